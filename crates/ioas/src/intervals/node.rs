//! Nodes of the tree: sorted entries in arrays, and what a change of them does to the gaps.
//!
//! Leaves and inner nodes are one type. An entry of a leaf is a span; an entry of an inner node is
//! a child, as the stretch from its first span's start to its last span's last byte, with the
//! most room in a gap between two neighbouring spans inside that stretch. A leaf's entries have no
//! gaps inside, and no field for them: `G` is `()` there.
//!
//! Starts that are not in use are [`u64::MAX`], so that a search can compare a whole cache line
//! without looking at the number of entries.

use core::ops::Range;

use super::room::{self, Room};
use super::slab::{NONE, Place};

/// Starts that a search compares at once: a cache line of 64 bytes.
const LINE: usize = 8;

/// The most room inside an entry, as its node keeps it.
pub(super) trait Inside: Copy {
    fn new(room: Room) -> Self;
    fn room(self) -> Room;
}

/// Inner nodes.
impl Inside for Room {
    fn new(room: Room) -> Self {
        room
    }

    fn room(self) -> Room {
        self
    }
}

/// Leaves: a span has no gap inside.
impl Inside for () {
    fn new(_: Room) -> Self {}

    fn room(self) -> Room {
        Room::NONE
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// First byte.
    pub(super) start: u64,
    /// Last byte.
    pub(super) last: u64,
    /// The most room in a gap inside.
    pub(super) room: Room,
    /// The place of the value, of the leaf or of the inner node.
    pub(super) at: u32,
}

/// What a change of entries does to the gaps of their node.
///
/// It lets most changes pass without a look at the other entries: see [`kept`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Delta {
    /// The most room in the gaps that may be gone.
    lost: Room,
    /// The most room in those that may be new.
    gained: Room,
}

/// The largest number in a node, where it was `before`, and `lost` and `gained` are the largest of
/// those gone and new. `None` when that may be any of those that did not change.
fn kept<X: Ord>(before: X, lost: X, gained: X) -> Option<X> {
    if gained >= lost {
        // What is lost is made up for.
        Some(before.max(gained))
    } else if lost < before {
        // The largest one is still there, and larger than what is new.
        Some(before)
    } else {
        None
    }
}

/// The order of the fields is that of use: a search reads starts, then little of the rest.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Node<G, const N: usize> {
    starts: [u64; N],
    lasts: [u64; N],
    inside: [G; N],
    at: [u32; N],
    len: u32,
    /// The node behind this one on the same level; of a free node: the next free one.
    next: u32,
}

impl<G: Inside, const N: usize> Node<G, N> {
    /// Every node but the root has at least this many entries.
    pub(super) const HALF: usize = {
        assert!(
            N >= 8 && N.is_multiple_of(2),
            "the way down has room for halves of four"
        );
        N / 2
    };

    pub(super) fn new() -> Self {
        Self {
            starts: [u64::MAX; N],
            lasts: [0; N],
            inside: [G::new(Room::NONE); N],
            at: [0; N],
            len: 0,
            next: NONE,
        }
    }

    #[inline]
    pub(super) const fn len(&self) -> usize {
        self.len as usize
    }

    pub(super) const fn is_full(&self) -> bool {
        self.len() == N
    }

    #[inline]
    pub(super) const fn next(&self) -> u32 {
        self.next
    }

    #[inline]
    pub(super) fn start(&self, i: usize) -> u64 {
        self.starts[i]
    }

    #[inline]
    pub(super) fn last(&self, i: usize) -> u64 {
        self.lasts[i]
    }

    #[inline]
    pub(super) fn room(&self, i: usize) -> Room {
        self.inside[i].room()
    }

    #[inline]
    pub(super) fn at(&self, i: usize) -> u32 {
        self.at[i]
    }

    pub(super) fn entry(&self, i: usize) -> Entry {
        Entry {
            start: self.starts[i],
            last: self.lasts[i],
            room: self.inside[i].room(),
            at: self.at[i],
        }
    }

    /// The number of entries that start at or before `address`.
    ///
    /// First the line, by the first start of each, then the place in it: no branch depends on
    /// the address.
    #[inline]
    pub(super) fn rank(&self, address: u64) -> usize {
        let count = |starts: &[u64]| {
            let at_or_before = |&start: &u64| usize::from(start <= address);
            starts.iter().map(at_or_before).sum::<usize>()
        };
        if address == u64::MAX {
            // Starts out of use would count.
            return self.len();
        }
        let mut line = 0;
        for first in (LINE..N).step_by(LINE) {
            line += usize::from(self.starts[first] <= address);
        }
        let from = line * LINE;
        from + count(&self.starts[from..N.min(from + LINE)])
    }

    /// The room between entry `i` and the one before it; none when one of them is not there.
    fn room_before(&self, i: usize) -> Room {
        if i == 0 || i >= self.len() {
            return Room::NONE;
        }
        Room::between(self.lasts[i - 1], self.starts[i])
    }

    /// The most room at entry `i`: inside, before or behind it.
    fn room_at(&self, i: usize) -> Room {
        let around = self.room_before(i).max(self.room_before(i + 1));
        around.max(self.room(i))
    }

    /// Each entry but the first: the last byte of the one before, its start, and the room inside
    /// the one before.
    fn neighbours(&self) -> impl Iterator<Item = (u64, u64, Room)> {
        let starts = &self.starts[1..self.len()];
        let before = self.lasts.iter().zip(&self.inside);
        let pairs = starts.iter().zip(before);
        pairs.map(|(&next, (&last, inside))| (last, next, inside.room()))
    }

    /// The longest gap, bytes, which is at most `limit`.
    fn longest(&self, limit: u64) -> u64 {
        let mut longest = self.room(self.len() - 1).len;
        for (last, next, inside) in self.neighbours() {
            longest = longest.max(next - last - 1).max(inside.len);
            if longest >= limit {
                break;
            }
        }
        longest
    }

    /// The largest order of a gap, given the `longest`.
    fn widest(&self, longest: u64) -> u8 {
        let Some(most) = longest.checked_ilog2() else {
            return 0;
        };
        // No gap has a larger block, and half of one fits into the longest in any case.
        let most = most as u8;
        let there = self.room(self.len() - 1).order == most
            || self.neighbours().any(|(last, next, inside)| {
                inside.order == most
                    || ((next - last - 1) >> most != 0 && room::order(last, next) == most)
            });
        if there { most } else { most.saturating_sub(1) }
    }

    /// The entry that this node is in its parent, where `at` names it. It has entries.
    pub(super) fn summary(&self, at: u32) -> Entry {
        let len = self.longest(u64::MAX);
        let order = self.widest(len);
        self.summary_with(at, Room { len, order })
    }

    /// The same after a change, from the entry `before` it.
    pub(super) fn summary_after(&self, before: Entry, delta: Delta) -> Entry {
        let (room, Delta { lost, gained }) = (before.room, delta);
        let len = kept(room.len, lost.len, gained.len);
        // Of what has not changed nothing is longer than before.
        let len = len.unwrap_or_else(|| self.longest(room.len));
        let order = kept(room.order, lost.order, gained.order);
        let order = order.unwrap_or_else(|| self.widest(len));
        self.summary_with(before.at, Room { len, order })
    }

    fn summary_with(&self, at: u32, room: Room) -> Entry {
        Entry {
            start: self.starts[0],
            last: self.lasts[self.len() - 1],
            room,
            at,
        }
    }

    /// Puts `entry` in place of entry `i`, between the same neighbours.
    pub(super) fn replace(&mut self, i: usize, entry: Entry) -> Delta {
        let lost = self.room_at(i);
        self.set(i, entry);
        Delta {
            lost,
            gained: self.room_at(i),
        }
    }

    /// Puts `entry` before entry `i`; the node is not full.
    pub(super) fn insert(&mut self, i: usize, entry: Entry) -> Delta {
        let lost = self.room_before(i);
        self.shift(i..self.len(), i + 1);
        self.len += 1;
        self.set(i, entry);
        Delta {
            lost,
            gained: self.room_at(i),
        }
    }

    /// Takes entry `i` out.
    pub(super) fn remove(&mut self, i: usize) -> Delta {
        let lost = self.room_at(i);
        self.shift(i + 1..self.len(), i);
        self.cut(self.len() - 1);
        Delta {
            lost,
            gained: self.room_before(i),
        }
    }

    /// Splits off the upper half; this node is full. `at` is where the upper half will be.
    pub(super) fn split(&mut self, at: u32) -> Self {
        let mut upper = Self::new();
        upper.copy(0, self, Self::HALF..N);
        upper.len = (N - Self::HALF) as u32;
        upper.next = self.next;
        self.cut(Self::HALF);
        self.next = at;
        upper
    }

    /// Takes all entries of `upper`, the node behind this one, which is then out of use. They fit.
    pub(super) fn append(&mut self, upper: &Self) {
        self.copy(self.len(), upper, 0..upper.len());
        self.len += upper.len;
        self.next = upper.next;
    }

    /// Shares the entries evenly with `upper`, the node behind this one.
    pub(super) fn share(&mut self, upper: &mut Self) {
        let (lower_len, upper_len) = (self.len(), upper.len());
        let half = (lower_len + upper_len) / 2;
        if lower_len < half {
            let moved = half - lower_len;
            self.copy(lower_len, upper, 0..moved);
            self.len = half as u32;
            upper.shift(moved..upper_len, 0);
            upper.cut(upper_len - moved);
        } else {
            let moved = lower_len - half;
            upper.shift(0..upper_len, moved);
            upper.copy(0, self, half..lower_len);
            upper.len += moved as u32;
            self.cut(half);
        }
    }

    /// Puts `entry` in place of entry `i`. What that does to the gaps remains to be found out.
    pub(super) fn set(&mut self, i: usize, entry: Entry) {
        self.starts[i] = entry.start;
        self.lasts[i] = entry.last;
        self.inside[i] = G::new(entry.room);
        self.at[i] = entry.at;
    }

    /// Moves entries inside the node.
    fn shift(&mut self, from: Range<usize>, to: usize) {
        self.starts.copy_within(from.clone(), to);
        self.lasts.copy_within(from.clone(), to);
        self.inside.copy_within(from.clone(), to);
        self.at.copy_within(from, to);
    }

    /// Copies entries of another node.
    fn copy(&mut self, to: usize, other: &Self, from: Range<usize>) {
        let to = to..to + from.len();
        self.starts[to.clone()].copy_from_slice(&other.starts[from.clone()]);
        self.lasts[to.clone()].copy_from_slice(&other.lasts[from.clone()]);
        self.inside[to.clone()].copy_from_slice(&other.inside[from.clone()]);
        self.at[to].copy_from_slice(&other.at[from]);
    }

    /// Drops all entries from `len` on.
    fn cut(&mut self, len: usize) {
        self.starts[len..self.len as usize].fill(u64::MAX);
        self.len = len as u32;
    }

    /// Panics unless the entries are in order and what is not in use is marked.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for i in 0..self.len() {
            assert!(self.starts[i] <= self.lasts[i], "an empty entry");
            assert!(
                i == 0 || self.lasts[i - 1] < self.starts[i],
                "out of order or overlapping"
            );
        }
        let unused = &self.starts[self.len()..];
        assert!(unused.iter().all(|&start| start == u64::MAX), "unused");
    }
}

impl<G: Inside, const N: usize> Place for Node<G, N> {
    fn free(next: u32) -> Self {
        let mut node = Self::new();
        node.next = next;
        node
    }

    fn next_free(&self) -> u32 {
        self.next
    }
}
