//! Removal of a range from devices: mappings to undo, and parts of them to map again.
//!
//! It is planned first, so that what is refused by name is refused before anything changes; then it is
//! done, noted in a [`Journal`]; and once nothing can fail any more, the records follow.

use std::boxed::Box;
use std::vec::Vec;

use iopt::Interruption;
use runs::{Iova, Span};

use super::mapper::Mapper;
use super::mappings::Journal;
use super::pieces::Stretch;
use super::refusals::unmap_refused;
use super::space::KernelSpace;
use crate::capability::Capability;
use crate::space::error::UnmapError;

/// Steps that take the addresses from `first` to `last`, both included, from devices.
pub(super) struct Removal {
    first: u64,
    last: u64,
    /// The pieces there, in order.
    pieces: Vec<Stretch>,
}

impl Removal {
    /// Pieces that go over an end, with what stays of each.
    fn partial(&self) -> impl Iterator<Item = (&Stretch, Vec<Span<Iova>>)> {
        let stays = |stretch: &Stretch| -> Vec<Span<Iova>> {
            let range = stretch.range;
            let head = self.first.checked_sub(1);
            let head = head.and_then(|end| Span::inclusive(range.start, end));
            let tail = self.last.checked_add(1);
            let tail = tail.and_then(|start| Span::inclusive(start, range.last()));
            [
                head.filter(|_| range.start < self.first),
                tail.filter(|_| range.last() > self.last),
            ]
            .into_iter()
            .flatten()
            .collect()
        };
        let pieces = self.pieces.iter();
        let with_rest = pieces.map(move |stretch| (stretch, stays(stretch)));
        with_rest.filter(|(_, rest)| !rest.is_empty())
    }

    /// The addresses of the pieces that go as a whole, from the first to the last.
    fn whole(&self) -> Option<Span<Iova>> {
        let inside = |range: &Span<Iova>| range.start >= self.first && range.last() <= self.last;
        let mut whole = self.pieces.iter().map(|piece| piece.range).filter(inside);
        let one = whole.next()?;
        let end = whole.next_back().unwrap_or(one);
        Span::inclusive(one.start, end.last()).or(Some(one))
    }
}

impl<K: Mapper> KernelSpace<K> {
    /// Looks whether the range can be emptied. Nothing changes.
    pub(super) fn plan_to_empty(
        &self,
        first: u64,
        last: u64,
        interruption: Interruption,
    ) -> Result<Removal, UnmapError> {
        let pieces = self.mapped.pieces.overlapping(first, last);
        let pieces = pieces.map(|piece| piece.stretch.clone()).collect();
        let removal = Removal {
            first,
            last,
            pieces,
        };
        let mut len = self.mapped.pieces.len();
        for (stretch, rest) in removal.partial() {
            // One piece more, when something stays on either side.
            len = len - 1 + rest.len() as u64;
            let full = self.most.is_some_and(|most| len > most);
            if interruption == Interruption::Refused || full {
                return Err(Self::cuts(stretch.range, Capability::UnmapPart));
            }
        }
        Ok(removal)
    }

    /// Has the kernel unmap it, which has every unit invalidate before it answers. What stays of a piece of
    /// which a part goes is missing for a moment. After an error, `journal` has what is to be undone.
    pub(super) fn empty_planned(
        &mut self,
        removal: &Removal,
        journal: &mut Journal,
    ) -> Result<(), UnmapError> {
        let range = Span::inclusive(removal.first, removal.last);
        // Parts of a piece that stay, or are mapped again after an error, have no dirty bits then.
        for piece in &removal.pieces {
            let read = self.carry(piece.range);
            read.map_err(|error| UnmapError::Kernel(Box::new(error)))?;
        }
        let mut partial = removal.partial();
        let shrunk =
            partial.try_for_each(|(stretch, rest)| self.mapped.shrink(stretch, &rest, journal));
        let emptied = shrunk.and_then(|()| match removal.whole() {
            Some(whole) => self.mapped.take(whole, journal),
            None => Ok(()),
        });
        emptied.map_err(|error| unmap_refused(K::PROFILE, error, range.unwrap_or_default()))
    }

    /// It is done for good: releases the memory, passes what was dirty to `note`, and records which pages
    /// the rest has.
    pub(super) fn emptied(
        &mut self,
        removal: &Removal,
        journal: Journal,
        note: &mut dyn FnMut(Span<Iova>),
    ) {
        drop(journal);
        self.carried.take_between(removal.first, removal.last, note);
        let stays = removal.partial().flat_map(|(_, rest)| rest);
        let starts: Vec<u64> = stays.map(|range| range.start).collect();
        self.mapped.part_pages(&starts);
    }

    pub(super) fn cuts(mapping: Span<Iova>, what: Capability) -> UnmapError {
        let cause = Self::unsupported(what);
        UnmapError::CutsMapping { mapping, cause }
    }
}
