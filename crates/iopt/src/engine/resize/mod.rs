//! Split, cut, merge: other leaves for the same translation.
//!
//! # Protocol
//!
//! The device's view stays the same: every address leads where it led before, with the same
//! permissions. Only the sizes of leaves change, table by table, in *extents*: the entries of one
//! leaf that is to be smaller, or those that are to become one leaf.
//!
//! **In place.** Where the format does not ask for break-before-make, an extent is rewritten entry
//! by entry, and each entry translates before and after its store. A lower table is filled
//! completely before one compare-and-exchange puts it in the leaf's place. A table that a larger
//! leaf replaces is unlinked by the store of that leaf.
//!
//! **Accessed and dirty bits.** The new leaves inherit what the old ones had together: an access or a
//! write to a large page counts for each of its parts, since the part is not known. Hardware may set a
//! bit until the very store, so a leaf is replaced by an exchange that returns its last word; a bit
//! that was set late is then set in all leaves of the extent. A table that a larger leaf replaces is
//! read once, when the flush is done, since a unit may go on writing through a table that it has
//! cached. Until then the new leaf may be clean; harvests of it exclude this operation. Only then the
//! table is given back.
//!
//! **Break before make.** Where the format asks for it, the entries of up to [`EXTENTS`] extents are
//! first emptied, or marked where it has a mark, then the unit is flushed, then the new entries are
//! written. Accesses may fault in between, so the caller must have said that they may.
//!
//! **The flush is part of the operation.** A unit may hold the old leaf, and flushing a page of the
//! new size need not remove it. No other operation may therefore come between: the exclusive form
//! holds the table until the flush is done; in the shared form the whole leaves that change, also those
//! that reach over the ends of the range, belong to this operation until then.

mod apply;
mod batch;
mod scan;

use runs::{Iova, PageSizes, Span};

use super::Table;
use super::trust::set_aside;
use crate::error::{PageSizeError, RangeError, ResizeError};
use crate::format::{BreakBeforeMake, Format};
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::{Chain, TableMemory};

use apply::Work;
use batch::Batch;
pub(super) use scan::Job;
use scan::Scan;

/// Permission for a moment without a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interruption {
    /// Never: what cannot be done in place is refused.
    Refused,
    /// Accesses may fault for as long as a flush takes, where the format asks for
    /// break-before-make.
    Allowed,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Where a range is to be cut.
    pub(crate) fn check_ends(&self, range: Span<Iova>) -> Result<[Option<u64>; 2], RangeError> {
        self.check_range(range)?;
        let aperture = self.aperture();
        let behind = range.last().checked_add(1);
        Ok([
            Some(range.start),
            behind.filter(|end| aperture.covers(&Span::new(*end, 1))),
        ])
    }

    pub(super) fn check_split<E>(&self, size: u64) -> Result<Job, ResizeError<E>> {
        if !self.sizes.contains(size) {
            let offered = self.sizes;
            return Err(ResizeError::PageSize(PageSizeError { size, offered }));
        }
        Ok(Job::Split(size))
    }

    /// The page at `at` stands for the leaf around it.
    pub(super) fn check_cut<E>(&self, at: u64) -> Result<(Span<Iova>, Job), ResizeError<E>> {
        let range = Span::new(at, self.sizes.smallest());
        let at = self.check_range(range)?;
        Ok((range, Job::Cut(at)))
    }

    /// The two passes. Tables that are flushed and replaced go to `done`, also where it fails.
    pub(super) fn resize<E>(
        &self,
        range: Span<Iova>,
        job: Job,
        interruption: Interruption,
        gather: &mut Gather,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
        done: &mut Chain,
    ) -> Result<(), ResizeError<E>> {
        let at = self.check_range(range)?;
        let mut scan = Scan::new((at, at + (range.len - 1)), job);
        // First pass: nothing is stored.
        self.intact()?;
        let bbm = self.format.break_before_make();
        let (mut needed, mut extents) = (0, 0u64);
        let mut only = None;
        let mut first = scan.clone();
        while let Some(extent) = first.next(self)? {
            if bbm != BreakBeforeMake::NotNeeded && interruption == Interruption::Refused {
                return Err(ResizeError::BreakBeforeMake {
                    leaf: extent.run(self),
                });
            }
            needed += self.tables_for(&extent, &scan.layout(self));
            extents += 1;
            only = (extents == 1).then_some(extent);
        }
        self.intact()?;
        if extents == 0 {
            return Ok(());
        }
        let reserve = set_aside(&self.memory, needed)?;

        // Second pass.
        let mut work = Work::new(scan.layout(self), scan.first(), reserve);
        if let Some(extent) = only {
            // There is no need to look for it again.
            scan.only(extent);
        }
        let result = loop {
            // Between two flushes, as much as the notes about unlinked tables reach.
            let window = match bbm {
                BreakBeforeMake::NotNeeded => match only {
                    Some(extent) => {
                        work.restart_at(extent.at);
                        extent.note(self, gather);
                        self.apply(&extent, &[], &mut work, gather);
                        Ok(false)
                    }
                    None => self.change_in_place(&mut scan, &mut work, gather),
                },
                BreakBeforeMake::Marked | BreakBeforeMake::Always => {
                    self.break_and_make(&mut scan, &mut work, gather, &mut flush, done)
                }
            };
            let more = match window {
                Ok(more) => more,
                Err(cause) => break Err(cause),
            };
            match gather.flush_with(&mut flush) {
                Ok(flushed) => {
                    self.take_back(flushed, done);
                    self.settle(&mut work, done);
                }
                Err(cause) => break Err(ResizeError::Flush(cause)),
            }
            if !more {
                break Ok(());
            }
        };
        self.abandon(&mut work, gather);
        self.count(work.added, work.removed);
        self.memory.give_back(work.reserve);
        // Errors of a broken memory come before errors of a flush.
        self.intact()?;
        result
    }

    fn take_back(&self, flushed: Flushed, done: &mut Chain) {
        self.told(flushed.root);
        done.append(&self.memory, flushed.tables);
    }

    /// Rewrites extents in place until a window is full. False when there are no more.
    fn change_in_place<E>(
        &self,
        scan: &mut Scan,
        work: &mut Work,
        gather: &mut Gather,
    ) -> Result<bool, ResizeError<E>> {
        loop {
            let Some(extent) = scan.next(self)? else {
                return Ok(false);
            };
            // The extent may lie far behind the place where the scan stood.
            if !work.reaches::<F>(extent.at) {
                if work.has_notes() {
                    scan.put_back(extent);
                    return Ok(true);
                }
                work.restart_at(extent.at);
            }
            extent.note(self, gather);
            self.apply(&extent, &[], work, gather);
        }
    }

    /// Empties the entries of some extents, flushes, writes the new ones. False when there are no
    /// more.
    fn break_and_make<E>(
        &self,
        scan: &mut Scan,
        work: &mut Work,
        gather: &mut Gather,
        flush: &mut impl FnMut(&Invalidation) -> Result<(), E>,
        done: &mut Chain,
    ) -> Result<bool, ResizeError<E>> {
        let mut batch = Batch::new();
        let mut more = true;
        while batch.has_room() {
            let Some(extent) = scan.next(self)? else {
                more = false;
                break;
            };
            if batch.is_empty() {
                work.restart_at(extent.at);
            } else if !work.reaches::<F>(extent.at) {
                scan.put_back(extent);
                break;
            }
            extent.note(self, gather);
            self.break_extent(&extent, &mut batch);
        }
        match gather.flush_with(flush) {
            Ok(flushed) => self.take_back(flushed, done),
            Err(cause) => {
                for (extent, words) in batch.extents::<F>() {
                    self.restore(extent, words);
                }
                return Err(ResizeError::Flush(cause));
            }
        }
        for (extent, words) in batch.extents::<F>() {
            self.apply(extent, words, work, gather);
        }
        Ok(more)
    }
}

/// The sizes that leaves of a job may have, at most `size`.
pub(super) fn up_to(sizes: PageSizes, size: u64) -> PageSizes {
    // All sizes are powers of two: those below, and itself.
    sizes.and(PageSizes::from_bits(size | (size - 1)))
}
