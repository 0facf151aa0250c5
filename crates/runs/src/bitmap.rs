//! Bitmaps and runs of set bits.
//!
//! A bitmap is a slice of 64-bit words, bit *n* of word *w* standing for page `64 w + n`. Both
//! directions take a step per run and per word, never per bit.

use core::ops::Range;

/// The runs of set bits, in order, as ranges of bit numbers.
///
/// ```
/// let words = [0b0111_0001u64, 1 << 63, 0b1];
/// let runs: Vec<_> = runs::bitmap::runs(&words).collect();
/// assert_eq!(runs, [0..1, 4..7, 127..129]);
/// ```
pub fn runs(words: &[u64]) -> Runs<'_> {
    Runs {
        words,
        index: 0,
        bits: words.first().copied().unwrap_or(0),
    }
}

/// Iterator of [`runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    /// The word it stands in.
    index: usize,
    /// The bits of that word that were not yet seen.
    bits: u64,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        while self.bits == 0 {
            let index = self.index + 1;
            self.bits = *self.words.get(index)?;
            self.index = index;
        }
        let first = self.bits.trailing_zeros();
        let start = self.index as u64 * 64 + u64::from(first);
        // The carry goes through the run and ends behind it; at the top of the word it is lost.
        let (rest, goes_on) = self.bits.overflowing_add(1 << first);
        if !goes_on {
            self.bits &= rest;
            return Some(start..self.index as u64 * 64 + u64::from(rest.trailing_zeros()));
        }
        // Whole words, then the bits at the bottom of one.
        loop {
            self.index += 1;
            match self.words.get(self.index).copied() {
                Some(u64::MAX) => {}
                word => {
                    let word = word.unwrap_or(0);
                    let ones = word.trailing_ones();
                    self.bits = word & word.wrapping_add(1);
                    return Some(start..self.index as u64 * 64 + u64::from(ones));
                }
            }
        }
    }
}

/// Sets the bits of `range`; those outside the bitmap are left out. Returns how many it set that
/// were clear before.
pub fn set(words: &mut [u64], range: Range<u64>) -> u64 {
    change(words, range, |word, mask| {
        let new = mask & !*word;
        *word |= mask;
        new.count_ones()
    })
}

/// Clears the bits of `range`; those outside the bitmap are left out. Returns how many it cleared
/// that were set before.
pub fn clear(words: &mut [u64], range: Range<u64>) -> u64 {
    change(words, range, |word, mask| {
        let old = mask & *word;
        *word &= !mask;
        old.count_ones()
    })
}

fn change(words: &mut [u64], range: Range<u64>, f: impl Fn(&mut u64, u64) -> u32) -> u64 {
    let end = range.end.min(words.len() as u64 * 64);
    let mut at = range.start;
    let mut changed = 0;
    while at < end {
        let bits = (64 - at % 64).min(end - at);
        let mask = (u64::MAX >> (64 - bits)) << (at % 64);
        changed += u64::from(f(&mut words[(at / 64) as usize], mask));
        at += bits;
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn runs_and_bitmaps_say_the_same(words in proptest::collection::vec(
            prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()], 0..6)) {
            let mut plain = Vec::new();
            for bit in 0..words.len() as u64 * 64 {
                if words[(bit / 64) as usize] >> (bit % 64) & 1 == 1 {
                    match plain.last_mut() {
                        Some(Range { end, .. }) if *end == bit => *end += 1,
                        _ => plain.push(bit..bit + 1),
                    }
                }
            }
            let found: Vec<_> = runs(&words).collect();
            prop_assert_eq!(&found, &plain);

            let mut again = std::vec![0; words.len()];
            for run in found {
                let len = run.end - run.start;
                prop_assert_eq!(set(&mut again, run), len);
            }
            prop_assert_eq!(&again, &words);
        }

        #[test]
        fn setting_and_clearing_touch_exactly_the_range(a in 0u64..200, n in 0u64..200, b in 0u64..200, m in 0u64..200) {
            let mut words = [0u64; 3];
            set(&mut words, a..a + n);
            let cleared = clear(&mut words, b..b + m);
            let mut expected = 0;
            for bit in 0..192 {
                let was = (a..a + n).contains(&bit);
                let gone = was && (b..b + m).contains(&bit);
                expected += u64::from(gone);
                prop_assert_eq!(words[(bit / 64) as usize] >> (bit % 64) & 1 == 1, was && !gone);
            }
            prop_assert_eq!(cleared, expected);
        }
    }

    #[test]
    fn ranges_outside_are_left_out() {
        let mut words = [0u64; 1];
        assert_eq!(set(&mut words, 60..u64::MAX), 4);
        assert_eq!(set(&mut words, 64..70), 0);
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 9..3;
        assert_eq!(set(&mut words, backwards), 0);
        assert_eq!(words[0], 0xf << 60);
    }
}
