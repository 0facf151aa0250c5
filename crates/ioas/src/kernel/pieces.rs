//! Pieces: mappings of a kernel, each of which takes one of its entries.
//!
//! A kernel unmaps whole mappings only, and some have few of them. So areas are mapped in pieces that
//! end at multiples of a *granule* of device addresses: no piece goes over one. Areas that go on in
//! each other share a piece where the granule allows. The smaller the granule, the smaller the part
//! that can be unmapped without touching the rest; the larger, the fewer entries are used.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::vec::Vec;

use iopt::Prot;
use runs::{Iova, Offset, Span};

use super::shares::Share;
use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::memory::Memory;

/// A stretch of device addresses over a part of one memory.
#[derive(Clone, Debug)]
pub(super) struct Stretch {
    pub(super) range: Span<Iova>,
    pub(super) memory: Arc<Memory>,
    /// Offset in the memory, bytes.
    pub(super) offset: u64,
    pub(super) prot: Prot,
}

impl Stretch {
    pub(super) fn of(area: &HeldArea) -> Self {
        Self {
            range: area.range,
            memory: Arc::clone(&area.memory),
            offset: area.offset,
            prot: area.prot,
        }
    }

    /// The part of the memory: offset and length in bytes.
    pub(super) const fn part(&self) -> Span<Offset> {
        Span::new(self.offset, self.range.len)
    }

    /// Part of it at `range`, which lies inside.
    pub(super) fn at(&self, range: Span<Iova>) -> Self {
        Self {
            range,
            memory: Arc::clone(&self.memory),
            offset: self.offset + (range.start - self.range.start),
            prot: self.prot,
        }
    }

    fn goes_on_in(&self, next: &Self) -> bool {
        self.range.start.checked_add(self.range.len) == Some(next.range.start)
            && self.offset + self.range.len == next.offset
            && Arc::ptr_eq(&self.memory, &next.memory)
            && self.prot == next.prot
    }

    /// Bytes that the kernel charges for it.
    pub(super) fn charge(&self) -> u64 {
        self.memory.charge_of_mapping(self.part())
    }
}

/// A mapping of the kernel, and what it is charged.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) stretch: Stretch,
    /// Its pages, with their charge.
    pub(super) share: Share,
    /// It is copied from another one, which was charged.
    pub(super) copied: bool,
}

/// All pieces of an address space, by their first device address. They are disjoint.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<u64, Piece>);

impl Pieces {
    pub(super) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn insert(&mut self, piece: Piece) {
        self.0.insert(piece.stretch.range.start, piece);
    }

    pub(super) fn remove(&mut self, start: u64) -> Option<Piece> {
        self.0.remove(&start)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.0.values()
    }

    /// The piece that holds `at`.
    pub(super) fn at(&self, at: u64) -> Option<Span<Iova>> {
        let (_, piece) = self.0.range(..=at).next_back()?;
        let range = piece.stretch.range;
        range.contains(at).then_some(range)
    }

    /// Pieces with bytes between `first` and `last`, both included, in order.
    pub(super) fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = &Piece> {
        let start = self.at(first).map_or(first, |range| range.start);
        self.0.range(start..=last).map(|(_, piece)| piece)
    }
}

/// `range` in pieces that end at multiples of `granule`; in one piece without a granule.
pub(super) fn cut(range: Span<Iova>, granule: Option<u64>) -> impl Iterator<Item = Span<Iova>> {
    let mut rest = (!range.is_empty()).then_some(range);
    core::iter::from_fn(move || {
        let here = rest.take()?;
        let last = granule.map_or(u64::MAX, |granule| here.start | (granule - 1));
        if last >= here.last() {
            return Some(here);
        }
        rest = Span::inclusive(last + 1, here.last());
        Span::inclusive(here.start, last)
    })
}

/// The areas that are not taken out, with those that go on in each other joined.
pub(super) fn stretches(areas: &Areas) -> impl Iterator<Item = Stretch> {
    let there = areas.iter().filter(|area| area.is_there());
    joined(there.map(Stretch::of))
}

/// Stretches in order of their addresses, with those that go on in each other joined.
pub(super) fn joined(stretches: impl Iterator<Item = Stretch>) -> impl Iterator<Item = Stretch> {
    let mut stretches = stretches.peekable();
    core::iter::from_fn(move || {
        let mut stretch = stretches.next()?;
        while let Some(next) = stretches.next_if(|next| stretch.goes_on_in(next)) {
            stretch.range.len += next.range.len;
        }
        Some(stretch)
    })
}

/// Number of pieces for areas that exist before the first device comes.
///
/// `parts` are the device addresses of memory that goes on without a break, like a guest's memory
/// below and above a hole. A granule of `None` never cuts.
///
/// ```
/// # use runs::Span;
/// // 8 GiB of guest memory, 3 GiB of it below a hole at 4 GiB, in pieces of 2 MiB.
/// let parts = [Span::new(0, 3 << 30), Span::new(4 << 30, 5 << 30)];
/// assert_eq!(ioas::pieces_needed(parts, Some(2 << 20)), 4096);
/// assert_eq!(ioas::pieces_needed(parts, None), 2);
/// ```
pub fn pieces_needed(parts: impl IntoIterator<Item = Span<Iova>>, granule: Option<u64>) -> u64 {
    let parts = parts.into_iter();
    parts.map(|part| cut(part, granule).count() as u64).sum()
}

/// Groups of pieces that can be one: those that go on in each other between two multiples of the
/// granule.
pub(super) fn groups(pieces: &Pieces, granule: Option<u64>) -> Vec<Stretch> {
    let bucket = |at: u64| granule.map(|granule| at / granule);
    let mut groups: Vec<(Stretch, u32)> = Vec::new();
    for piece in pieces.iter() {
        let next = &piece.stretch;
        match groups.last_mut() {
            Some((open, count))
                if open.goes_on_in(next)
                    && bucket(open.range.start) == bucket(next.range.last()) =>
            {
                open.range.len += next.range.len;
                *count += 1;
            }
            _ => groups.push((next.clone(), 1)),
        }
    }
    groups.retain(|(_, count)| *count > 1);
    groups.into_iter().map(|(stretch, _)| stretch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_the_range_and_cross_no_multiple(
            start in 0..4096u64,
            len in 1..4096u64,
            log2 in prop::option::of(0..13u32),
            top in any::<bool>(),
        ) {
            let base = if top { u64::MAX - 8191 } else { 0 };
            let range = Span::new(base + start, len);
            let granule = log2.map(|log2| 1 << log2);
            let pieces: Vec<Span<Iova>> = cut(range, granule).collect();
            let mut at = range.start;
            for piece in &pieces {
                prop_assert_eq!(piece.start, at);
                if let Some(granule) = granule {
                    prop_assert_eq!(piece.start / granule, piece.last() / granule);
                }
                at = piece.last().wrapping_add(1);
            }
            prop_assert_eq!(at, range.last().wrapping_add(1));
            // As few as there can be.
            let borders = granule.map_or(0, |granule| range.last() / granule - range.start / granule);
            prop_assert_eq!(pieces.len() as u64, borders + 1);
        }
    }
}
