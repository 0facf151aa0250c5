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
use super::node::{Inside, Node};
use super::room::Room;
use super::slab::NONE;

/// What is looked for: `len` bytes at a multiple of `align` between `first` and `last`.
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
}

impl<T, const N: usize> Intervals<T, N> {
    /// The lowest address that is a multiple of `align`, a power of two, and from which on `len`
    /// bytes are free and inside one of the `windows`.
    ///
    /// Windows are in order and disjoint; each of them costs one descent at least. Two that touch
    /// are still two: nothing is found across their border. `None` also for no bytes at all and for
    /// an alignment that is no power of two.
    pub(crate) fn gap(&self, len: u64, align: u64, windows: &[Span]) -> Option<u64> {
        if len == 0 || !align.is_power_of_two() {
            return None;
        }
        windows
            .iter()
            .filter_map(|window| Span::checked(window.start, window.len))
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

    fn gap_in(&self, wish: &Wish) -> Option<u64> {
        if self.root == NONE {
            return wish.fit(0, u64::MAX);
        }
        let all = self.summary(self.height, self.root);
        let before = || all.start.checked_sub(1);
        let behind = || all.last.checked_add(1);
        before()
            .and_then(|last| wish.fit(0, last))
            .or_else(|| self.gap_below(self.height, self.root, wish))
            .or_else(|| behind().and_then(|first| wish.fit(first, u64::MAX)))
    }

    /// The same among the gaps between the spans below the node `at` of `level`.
    fn gap_below(&self, level: usize, at: u32, wish: &Wish) -> Option<u64> {
        if level == 0 {
            self.gap_among(&self.leaves[at], level, wish)
        } else {
            self.gap_among(&self.inners[at], level, wish)
        }
    }

    fn gap_among<G: Inside>(&self, node: &Node<G, N>, level: usize, wish: &Wish) -> Option<u64> {
        let begin = node.rank(wish.first).saturating_sub(1);
        for i in begin..node.len() {
            // Never in a leaf: its entries have no gaps.
            if node.room(i).suffices(wish.least)
                && let Some(found) = self.gap_below(level - 1, node.at(i), wish)
            {
                return Some(found);
            }
            let last = node.last(i);
            if i + 1 == node.len() || last >= wish.last || wish.last - last < wish.len {
                break;
            }
            let next = node.start(i + 1);
            if next - last > wish.len
                && let Some(found) = wish.fit(last + 1, next - 1)
            {
                return Some(found);
            }
        }
        None
    }
}
