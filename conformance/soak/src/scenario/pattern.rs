//! Contents of memory: every word follows from its offset, so that no two places hold the
//! same, and a page that is reached by a wrong address is noticed at its first word.

/// The word for `offset`: a mix that takes every offset to another word (the finalizer of SplitMix64, which is a
/// bijection).
#[inline]
pub(super) const fn word_of(offset: u64) -> u64 {
    let mut z = offset ^ 0xd1b5_4a32_d192_ed03;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How many bytes of the words that were found are not what was expected.
pub(super) fn differing(
    found: impl Iterator<Item = u64>,
    expected: impl Iterator<Item = u64>,
) -> u64 {
    found
        .zip(expected)
        .filter(|(found, expected)| found != expected)
        .map(|(found, expected)| (found ^ expected).to_ne_bytes())
        .map(|bytes| bytes.iter().filter(|byte| **byte != 0).count() as u64)
        .sum()
}

/// The numbers below `len` in a shuffled order, each once, without a list of them: the powers of a
/// full-period generator, of which those beyond the end are passed over.
pub(super) fn shuffled(len: u64, seed: u64) -> impl Iterator<Item = u64> {
    let mask = len.next_power_of_two() - 1;
    let mut state = seed & mask;
    // Full period modulo a power of two: the increment is odd, the factor 1 modulo 4 (Hull and
    // Dobell). The low bits of such a generator repeat soon, so the bits are folded downwards,
    // which takes every number below the power of two to another.
    (0..=mask).filter_map(move |_| {
        state = state
            .wrapping_mul(0xd134_2543_de82_ef95)
            .wrapping_add(0x1405_7b7e_f767_814f)
            & mask;
        let folded = state ^ (state >> (mask.count_ones() / 2 + 1));
        (folded < len).then_some(folded)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_shuffle_visits_every_number_once_and_not_in_order() {
        for len in [1, 2, 3, 64, 65, 1000, 4096, 65535] {
            let order: Vec<u64> = shuffled(len, 7).collect();
            assert_eq!(order.len() as u64, len);
            assert_eq!(order.iter().collect::<HashSet<_>>().len() as u64, len);
            assert!(order.iter().all(|n| *n < len));
            if len > 64 {
                let steps = order
                    .windows(2)
                    .filter(|w| w[1].abs_diff(w[0]) == 1)
                    .count();
                assert!(steps < order.len() / 8, "{steps} of {len} are neighbours");
            }
        }
    }
}
