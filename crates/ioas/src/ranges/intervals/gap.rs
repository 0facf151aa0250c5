//! The search for free addresses.
//!
//! The lowest address that fits is taken, as iommufd does: used addresses stay together, so few
//! tables translate them, and devices with few address bits can reach what comes first.
//!
//! The search passes over every subtree in which no gap has the [room](super::room) that there must
//! be. Where a gap has that room and yet no place that fits, the search goes on to the next one.
//! For a power of two bytes aligned to as much there is no such gap, and the search takes one way
//! down the tree, or a second one at the border of a window. For other lengths and alignments up
//! to the length, every other gap or so fits. Only where the alignment is far above the length,
//! can very many gaps be looked at in vain, each of them once.

use runs::Span;

use super::Intervals;
use super::room::Room;
use super::slab::NONE;

/// A gap to find: `len` bytes at a multiple of `align` between `first` and `last`.
struct Wish {
    len: u64,
    align: u64,
    first: u64,
    last: u64,
    least: Room,
}

impl Wish {
    /// The lowest address that fits in the gap between `first` and `last`, both free.
    fn fit(&self, first: u64, last: u64) -> Option<u64> {
        let mask = self.align - 1;
        let address = first.max(self.first).checked_add(mask)? & !mask;
        let end = address.checked_add(self.len - 1)?;
        (end <= last.min(self.last)).then_some(address)
    }

    /// The same between two neighbours, one of which ends with `last` while `next` is the first byte of
    /// the other.
    fn fit_between(&self, last: u64, next: u64) -> Option<u64> {
        if next - last <= self.len {
            return None;
        }
        self.fit(last + 1, next - 1)
    }
}

impl<A, T, const N: usize> Intervals<A, T, N> {
    /// The lowest address that is a multiple of `align`, a power of two, and from which on `len`
    /// bytes are free and inside one of the `windows`.
    ///
    /// Windows are in order and disjoint; each of them costs one descent at least. Two that touch
    /// are still two: nothing is found across their border. `None` also for no bytes at all and for
    /// an alignment that is no power of two.
    pub(crate) fn gap(&mut self, len: u64, align: u64, windows: &[Span<A>]) -> Option<u64> {
        if len == 0 || !align.is_power_of_two() {
            return None;
        }
        windows
            .iter()
            .filter_map(|window| Span::<A>::checked(window.start, window.len))
            .filter(|window| window.len >= len)
            .find_map(|window| {
                self.gap_in(&Wish {
                    len,
                    align,
                    first: window.start,
                    last: window.last(),
                    least: Room::least(len, align),
                })
            })
    }

    fn gap_in(&mut self, wish: &Wish) -> Option<u64> {
        if self.root == NONE {
            return wish.fit(0, u64::MAX);
        }
        let (first, last) = self.ends(self.height, self.root);
        let before = first.checked_sub(1).and_then(|last| wish.fit(0, last));
        before
            .or_else(|| self.gap_below(self.height, self.root, wish))
            .or_else(|| wish.fit(last.checked_add(1)?, u64::MAX))
    }

    /// The same among the gaps between the spans below the node `at` of `level`.
    fn gap_below(&mut self, level: usize, at: u32, wish: &Wish) -> Option<u64> {
        if level == 0 {
            let leaf = &self.leaves[at];
            let begin = leaf.rank(wish.first).saturating_sub(1);
            let mut gaps = (begin + 1..leaf.len()).map(|i| (leaf.last(i - 1), leaf.start(i)));
            return gaps.find_map(|(last, next)| wish.fit_between(last, next));
        }
        let begin = self.inners[at].rank(wish.first).saturating_sub(1);
        for i in begin..self.inners[at].len() {
            let inner = &self.inners[at];
            if inner.room(i).suffices(wish.least) {
                let child = inner.at(i);
                let found = self.gap_below(level - 1, child, wish);
                if found.is_some() {
                    return found;
                }
                // No later search is to look there in vain for what has changed since.
                let room = self.most_room(level - 1, child);
                self.inners[at].set_room(i, room);
            }
            let inner = &self.inners[at];
            if i + 1 == inner.len() || inner.last(i) >= wish.last {
                break;
            }
            let found = wish.fit_between(inner.last(i), inner.start(i + 1));
            if found.is_some() {
                return found;
            }
        }
        None
    }
}
