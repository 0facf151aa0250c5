//! Nodes of the tree: sorted entries in arrays, and the room between them.
//!
//! Leaves and inner nodes are one type. An entry of a leaf is a span; an entry of an inner node is
//! a child, as the stretch from its first span's start to its last span's last byte, with a bound on
//! the room in a gap between two neighbouring spans inside that stretch. A leaf's entries have no
//! gaps inside, and no field for them: that is what `R` is for.
//!
//! Starts that are not in use are [`u64::MAX`], so that a search can compare a whole cache line
//! without looking at the number of entries.

use core::ops::Range;

use super::room::{self, Room};
use super::slab::{NONE, Place};

/// Starts that a search compares at once: a cache line of 64 bytes.
const LINE: usize = 8;

/// Part of an entry that a node keeps beside its start.
pub(super) trait Rest: Copy {
    /// Value of an unused place, with the size of an empty entry.
    const UNUSED: Self;
    fn of(entry: &Entry) -> Self;
    fn last(&self) -> u64;
    fn at(&self) -> u32;
    fn room(&self) -> Room;
    fn set_last(&mut self, last: u64);
    fn set_room(&mut self, room: Room);
}

/// In a leaf: a span has no gap inside. Packed, 12 bytes instead of 16: more leaves in the same cache.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
pub(super) struct Value {
    last: u64,
    at: u32,
}

impl Rest for Value {
    const UNUSED: Self = Self { last: 0, at: 0 };

    fn of(entry: &Entry) -> Self {
        let (last, at) = (entry.last, entry.at);
        Self { last, at }
    }

    fn last(&self) -> u64 {
        self.last
    }

    fn at(&self) -> u32 {
        self.at
    }

    fn room(&self) -> Room {
        Room::NONE
    }

    fn set_last(&mut self, last: u64) {
        self.last = last;
    }

    fn set_room(&mut self, _: Room) {}
}

/// In an inner node. The fields of [`Room`] by themselves: 24 bytes instead of 32.
#[derive(Clone, Copy)]
pub(super) struct Child {
    last: u64,
    longest: u64,
    at: u32,
    order: u8,
}

impl Rest for Child {
    const UNUSED: Self = Self {
        last: 0,
        longest: 0,
        at: 0,
        order: 0,
    };

    fn of(entry: &Entry) -> Self {
        let Entry { last, room, at, .. } = *entry;
        Self {
            last,
            longest: room.len,
            at,
            order: room.order,
        }
    }

    fn last(&self) -> u64 {
        self.last
    }

    fn at(&self) -> u32 {
        self.at
    }

    fn room(&self) -> Room {
        Room {
            len: self.longest,
            order: self.order,
        }
    }

    fn set_last(&mut self, last: u64) {
        self.last = last;
    }

    fn set_room(&mut self, room: Room) {
        (self.longest, self.order) = (room.len, room.order);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// First byte.
    pub(super) start: u64,
    /// Last byte.
    pub(super) last: u64,
    /// No gap inside has more room.
    pub(super) room: Room,
    /// The place of the value, of the leaf or of the inner node.
    pub(super) at: u32,
}

/// A search reads starts, then the rest of one entry, which is in one place: each cache line that is not
/// read, and each array less to be moved, counts.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Node<R, const N: usize> {
    starts: [u64; N],
    rest: [R; N],
    len: u32,
    /// The node behind this one on the same level; of a free node: the next free one.
    next: u32,
}

impl<R: Rest, const N: usize> Node<R, N> {
    /// Every node but the root has at least this many entries.
    pub(super) const HALF: usize = {
        assert!(
            N >= 8 && N % 2 == 0,
            "the way down has room for halves of four"
        );
        N / 2
    };

    pub(super) fn new() -> Self {
        Self {
            starts: [u64::MAX; N],
            rest: [R::UNUSED; N],
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
        self.rest[i].last()
    }

    #[inline]
    pub(super) fn room(&self, i: usize) -> Room {
        self.rest[i].room()
    }

    #[inline]
    pub(super) fn at(&self, i: usize) -> u32 {
        self.rest[i].at()
    }

    pub(super) fn entry(&self, i: usize) -> Entry {
        Entry {
            start: self.starts[i],
            last: self.last(i),
            room: self.room(i),
            at: self.at(i),
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
    pub(super) fn room_before(&self, i: usize) -> Room {
        if i == 0 || i >= self.len() {
            return Room::NONE;
        }
        Room::between(self.last(i - 1), self.starts[i])
    }

    /// The most room beside entry `i`.
    pub(super) fn room_beside(&self, i: usize) -> Room {
        self.room_before(i).max(self.room_before(i + 1))
    }

    /// Each entry but the first: the last byte of the one before, its start, and the room inside
    /// the one before.
    fn neighbours(&self) -> impl Iterator<Item = (u64, u64, Room)> {
        let starts = &self.starts[1..self.len()];
        let pairs = starts.iter().zip(&self.rest);
        pairs.map(|(&next, before)| (before.last(), next, before.room()))
    }

    /// The longest gap, bytes.
    fn longest(&self) -> u64 {
        let inside = self.room(self.len() - 1).len;
        self.neighbours()
            .map(|(last, next, inside)| inside.len.max(next - last - 1))
            .fold(inside, u64::max)
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

    /// The first byte and the last one of a node with entries.
    #[inline]
    pub(super) fn ends(&self) -> (u64, u64) {
        (self.starts[0], self.last(self.len() - 1))
    }

    /// The most room in its gaps, as far as its entries know.
    pub(super) fn most_room(&self) -> Room {
        let len = self.longest();
        let order = self.widest(len);
        Room { len, order }
    }

    /// The entry that this node is in its parent, where `at` names it. It has entries.
    pub(super) fn summary(&self, at: u32) -> Entry {
        let (start, last) = self.ends();
        Entry {
            start,
            last,
            room: self.most_room(),
            at,
        }
    }

    /// Puts `entry` before entry `i`; the node is not full.
    pub(super) fn insert(&mut self, i: usize, entry: Entry) {
        self.shift(i..self.len(), i + 1);
        self.len += 1;
        self.set(i, entry);
    }

    /// Takes entry `i` out.
    pub(super) fn remove(&mut self, i: usize) {
        self.shift(i + 1..self.len(), i);
        self.cut(self.len() - 1);
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

    /// Says that no gap inside entry `i` has more room than this.
    pub(super) fn set_room(&mut self, i: usize, room: Room) {
        self.rest[i].set_room(room);
    }

    /// Has entry `i` begin and end there.
    pub(super) fn set_ends(&mut self, i: usize, start: u64, last: u64) {
        self.starts[i] = start;
        self.rest[i].set_last(last);
    }

    /// Puts `entry` in place of entry `i`.
    pub(super) fn set(&mut self, i: usize, entry: Entry) {
        self.starts[i] = entry.start;
        self.rest[i] = R::of(&entry);
    }

    /// Moves entries inside the node.
    fn shift(&mut self, from: Range<usize>, to: usize) {
        self.starts.copy_within(from.clone(), to);
        self.rest.copy_within(from, to);
    }

    /// Copies entries of another node.
    fn copy(&mut self, to: usize, other: &Self, from: Range<usize>) {
        let to = to..to + from.len();
        self.starts[to.clone()].copy_from_slice(&other.starts[from.clone()]);
        self.rest[to].copy_from_slice(&other.rest[from]);
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
            assert!(self.starts[i] <= self.last(i), "an empty entry");
            assert!(
                i == 0 || self.last(i - 1) < self.starts[i],
                "out of order or overlapping"
            );
        }
        let unused = &self.starts[self.len()..];
        assert!(unused.iter().all(|&start| start == u64::MAX), "unused");
    }
}

impl<R: Rest, const N: usize> Place for Node<R, N> {
    fn free(next: u32) -> Self {
        let mut node = Self::new();
        node.next = next;
        node
    }

    fn next_free(&self) -> u32 {
        self.next
    }
}
