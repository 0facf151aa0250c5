//! Room of a gap: lengths and alignments that fit.

/// The room in a gap between two neighbouring spans, or the most that any of several gaps has:
/// each of the two numbers is then the largest one, maybe of different gaps.
///
/// The length alone would not do. Among spans of all lengths many gaps are long enough for a large
/// page, but few hold an aligned one; the search would look into all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// Bytes.
    pub(super) len: u64,
    /// The largest block of a power of two bytes, aligned to its size: the exponent. 0 also where
    /// there are no bytes.
    pub(super) order: u8,
}

impl Room {
    /// None, as inside a span.
    pub(super) const NONE: Self = Self { len: 0, order: 0 };

    /// The room behind `last` and before `next`, which is larger.
    pub(super) const fn between(last: u64, next: u64) -> Self {
        Self {
            len: next - last - 1,
            order: order(last, next),
        }
    }

    pub(super) fn max(self, other: Self) -> Self {
        Self {
            len: self.len.max(other.len),
            order: self.order.max(other.order),
        }
    }

    /// The least room without which `len` bytes, at least one, at a multiple of `align` cannot fit.
    /// If both are the same power of two, they fit for sure.
    pub(super) const fn least(len: u64, align: u64) -> Self {
        // From a multiple of 2^k on: a block of 2^k. From elsewhere on: half of that, since two
        // halves cannot both be cut.
        let order = len.ilog2();
        let aligned = align.ilog2() >= order;
        Self {
            len,
            order: (if aligned { order } else { order - 1 }) as u8,
        }
    }

    /// True when there is as much as in `least`.
    pub(super) const fn suffices(self, least: Self) -> bool {
        self.len >= least.len && self.order >= least.order
    }
}

/// [`Room::order`] of the bytes behind `last` and before `next`.
pub(super) const fn order(last: u64, next: u64) -> u8 {
    let (first, len) = (last + 1, next - last - 1);
    if len == 0 {
        return 0;
    }
    let order = len.ilog2();
    let block = 1u64 << order;
    // Bytes before the first multiple; fewer than a block.
    let before = first.wrapping_neg() & (block - 1);
    // Half a block fits wherever it begins.
    (if before + block <= len {
        order
    } else {
        order - 1
    }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_what_trying_every_block_finds() {
        for (base, first) in (0..70).flat_map(|n| [(0, n), (u64::MAX - 140, n)]) {
            for len in 0..70u64 {
                let last = base + first;
                let free = last + 1..last + 1 + len;
                let fits = |len: u64, align: u64| {
                    free.clone()
                        .any(|a| a.is_multiple_of(align) && free.end - a >= len)
                };
                let room = Room::between(last, free.end);
                let orders = (0..7).filter(|&order| fits(1 << order, 1 << order));
                assert_eq!(room.len, len);
                assert_eq!(room.order, orders.max().unwrap_or(0));
                for wanted in 1..70 {
                    for align in 0..7 {
                        let least = Room::least(wanted, 1 << align);
                        let fits = fits(wanted, 1 << align);
                        assert!(!fits || room.suffices(least), "{free:?} {wanted} {align}");
                        assert!(fits || wanted != 1 << align || !room.suffices(least));
                    }
                }
            }
        }
    }

    #[test]
    fn the_largest_gaps_have_orders() {
        assert_eq!(Room::between(0, u64::MAX).order, 62);
        let half = 1 << 63;
        assert_eq!(Room::between(half - 1, u64::MAX).order, 62);
        assert_eq!(Room::between(0, half).order, 61 + 1);
    }
}
