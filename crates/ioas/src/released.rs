//! Parts of areas that are let go of for a while: what a balloon does with a guest's memory.
//!
//! # Releasing
//!
//! For each range: look, set aside what its return will take, cut, empty tables. Then, once for all of
//! them, units and listeners forget, and only after that memory is unpinned. Each range is released as
//! a whole or stays as it was; whatever happens, no memory is unpinned that a device can reach.
//!
//! What is released stays an area, of its own, without entries and without pins. Two things are kept
//! for it, so that its return cannot fail for them: its charge (see `reserved.rs`), and the tables
//! that it can need if its memory comes back scattered, in every domain, also in one that comes later.
//! Without a domain nothing is charged, and nothing is kept.
//!
//! Released and [taken out](Ioas::take_out) are apart: what is both is mapped again when it is neither.
//! What is out is not charged, released or not.
//!
//! # Restoring
//!
//! Each stretch is pinned, mapped and joined again with the neighbours from which it was cut, and leaves
//! are merged: so what one call has mapped is one area again, and can be unmapped as that. What cannot be pinned or mapped stays released, and may be tried again.
//!
//! # Discarding
//!
//! That this address space has released memory does not mean that nobody has it: another area, address
//! space or external pin may hold it. Memory may be discarded when all address spaces over it have
//! released it and [`Memory::first_held`](crate::Memory::first_held) names nobody.

use alloc::vec::Vec;
use core::convert::Infallible;
use core::error::Error;
use core::fmt;

use iopt::{Interruption, RangeError};
use runs::{Iova, Span};

use crate::error::{MapError, UnmapError};
use crate::memory::Hold;
use crate::observer::{Observer, Step, observed};
use crate::own::Written;
use crate::space::{Ioas, Space};

/// Why a range was not released.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReleaseError {
    /// It is as it was.
    ///
    /// After [`UnmapError::Flush`] it was mapped again, and is also [retired](Ioas::retired) until a
    /// flush succeeds: before that a device of the unit that does not answer may fault there. If it could
    /// not be mapped again it is released, but pinned.
    ///
    /// After [`UnmapError::Unpin`] it is released, but nobody knows how much of it is still pinned.
    Unmap(UnmapError),
    /// What its return takes cannot be set aside. It is as it was.
    SetAside(MapError),
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmap(cause) => cause.fmt(f),
            Self::SetAside(cause) => {
                write!(f, "what its return takes cannot be set aside: {cause}")
            }
        }
    }
}

impl Error for ReleaseError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unmap(cause) => cause.source(),
            Self::SetAside(cause) => cause.source(),
        }
    }
}

impl From<UnmapError> for ReleaseError {
    fn from(cause: UnmapError) -> Self {
        Self::Unmap(cause)
    }
}

/// What a release has emptied and not unpinned yet.
#[derive(Default)]
struct Going {
    /// Ranges.
    ranges: Vec<Span<Iova>>,
    /// The areas in them.
    areas: Vec<Span<Iova>>,
    /// Those that were pinned, in the order of their holds.
    held: Vec<Span<Iova>>,
    /// What was written to in them.
    written: Written,
}

impl Ioas {
    /// Lets go of `ranges`, each of which areas cover: unmapped, flushed, unpinned, exactly that,
    /// until they are [restored](Self::restore) or unmapped. Devices go on reaching all the rest.
    ///
    /// Areas are cut at the ends. Their charge stays, and tables for their return are set aside. What
    /// is released already stays so. All ranges have one flush, also where flushing is lazy: when it
    /// returns, no device reaches what is released. Ranges are worth having in order, and joined.
    /// Returns the bytes that were unpinned. What devices have written there is forgotten.
    ///
    /// `kept` is told of each range that is not released, and why; all others are. That is so if
    /// somebody in this process [holds](Self::pin) some of it, who is asked to let go first if the pin
    /// [says so](crate::WhenUnmapped::LetsGo); and if it cannot be cut without a moment in which the
    /// rest is missing, unless `interruption` allows that.
    pub fn release(
        &self,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        kept: &mut dyn FnMut(Span<Iova>, ReleaseError),
        observer: &mut dyn Observer,
    ) -> u64 {
        self.lock().release(ranges, interruption, kept, observer)
    }

    /// Takes `ranges` back, as far as they are [released](Self::release): pinned and mapped as before,
    /// and leaves merged, as far as that is possible without a moment in which the rest is missing
    /// unless `interruption` allows one. Ends need not be those that were released.
    ///
    /// `failed` is told of each stretch that stays released, and why; all others are back. Charge and
    /// tables are there; what can fail is the pin, and a flush that was still to come.
    pub fn restore(
        &self,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        failed: &mut dyn FnMut(Span<Iova>, MapError),
        observer: &mut dyn Observer,
    ) {
        let space = &mut *self.lock();
        let mut back = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            match space.released_in(*range) {
                Err(cause) => failed(*range, cause),
                Ok(stretches) => {
                    for span in stretches {
                        let flushed = space.retired.make_way(&mut *space.backend, span);
                        let mapped = flushed
                            .map_err(MapError::Flush)
                            .and_then(|()| space.map_released(span, observer));
                        match mapped {
                            Ok(()) => back.push(span),
                            Err(cause) => failed(span, cause),
                        }
                    }
                }
            }
            space.join_inside(*range);
        }
        let mut back = back.into_iter().peekable();
        while let Some(mut span) = back.next() {
            while let Some(next) = back.next_if(|next| span.start + span.len == next.start) {
                span.len += next.len;
            }
            space.resize_at(span, interruption);
        }
    }
}

impl Space {
    pub(crate) fn release(
        &mut self,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        kept: &mut dyn FnMut(Span<Iova>, ReleaseError),
        observer: &mut dyn Observer,
    ) -> u64 {
        let first = self.retired.holds.len();
        let mut going = Going::default();
        for range in ranges {
            if let Err(cause) = self.empty_for_release(*range, interruption, &mut going, observer) {
                kept(*range, cause);
            }
        }
        let flushed = observed(observer, Step::Flush, |_| {
            self.retired.flush(&mut *self.backend)?;
            Ok(((), 0))
        });
        if let Err(cause) = flushed {
            let written = going.written.ranges();
            written.for_each(|range| self.externals.note_written(range));
            for range in going.ranges {
                self.map_what_was_emptied(range, &going.areas, observer);
                kept(range, UnmapError::Flush(cause).into());
            }
            return 0;
        }
        let mut failed = Vec::new();
        let released = observed(observer, Step::Unpin, |_| {
            let mine = self.retired.holds.split_off(first);
            let (mut unpinned, _) = self.retired.release();
            for (area, hold) in going.held.iter().zip(mine) {
                let (bytes, cause) = hold.release();
                unpinned += bytes;
                failed.extend(cause.map(|cause| (*area, cause)));
            }
            Ok::<_, Infallible>((unpinned, unpinned))
        });
        for (area, cause) in failed {
            kept(area, UnmapError::Unpin(cause).into());
        }
        let Ok(unpinned) = released;
        for range in &going.ranges {
            self.join_inside(*range);
        }
        unpinned
    }

    /// Takes `range` from all devices, without waiting for them, or leaves everything as it was.
    fn empty_for_release(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
        going: &mut Going,
        observer: &mut dyn Observer,
    ) -> Result<(), ReleaseError> {
        if !self.check_unmap(range)? {
            return Ok(());
        }
        if let Some(at) = self.first_hole(range) {
            return Err(UnmapError::Hole { range, at }.into());
        }
        self.externals.let_go(range)?;
        if let Some(held) = self.first_pinned(range) {
            return Err(UnmapError::Held { range, held }.into());
        }
        let (first, last) = (range.start, range.last());
        let cuts = self.cut_around(range, interruption)?;
        let inside = self.areas.0.overlapping(first, last);
        let fresh: Vec<Span<Iova>> = inside
            .filter(|(_, area)| !area.released)
            .map(|(span, _)| span)
            .collect();
        for (done, span) in fresh.iter().enumerate() {
            if let Err(cause) = self.backend.set_aside(*span) {
                let before = fresh.iter().take(done);
                before.for_each(|span| self.backend.give_back(*span));
                self.join_cuts(cuts);
                return Err(ReleaseError::SetAside(cause));
            }
        }
        let emptied = observed(observer, Step::EmptyTables, |_| {
            let note = &mut |written| going.written.add(written);
            let emptied = self.empty(first, last, interruption, note);
            let bytes = fresh.iter().map(|span| span.len).sum();
            emptied.map(|()| ((), bytes))
        });
        if let Err(cause) = emptied {
            fresh.iter().for_each(|span| self.backend.give_back(*span));
            self.join_cuts(cuts);
            return Err(cause.into());
        }
        let live = self.backend.is_live();
        for span in &fresh {
            let Some((_, area)) = self.areas.0.at_mut(span.start) else {
                continue;
            };
            area.released = true;
            if live && area.keeps_charge() {
                // Where a kernel pins, somebody else may have taken the charge in this moment.
                let _ = area.reserve(self.backend.times_charged());
            }
            let hold: Option<Hold> = area.hold.take();
            going.held.extend(hold.is_some().then_some(*span));
            self.retired.add(*span, hold);
        }
        going.ranges.push(range);
        going.areas.extend(fresh);
        Ok(())
    }

    /// Somebody has not forgotten what was emptied in `range`: has devices see it again, the same
    /// memory, which is still pinned. What cannot be mapped stays released.
    fn map_what_was_emptied(
        &mut self,
        range: Span<Iova>,
        areas: &[Span<Iova>],
        observer: &mut dyn Observer,
    ) {
        for span in areas.iter().filter(|span| range.covers(span)) {
            let _ = self.map_released(*span, observer);
        }
        self.join_inside(range);
        self.resize_at(range, Interruption::Refused);
    }

    /// What is released in `range`, in areas of their own.
    fn released_in(&mut self, range: Span<Iova>) -> Result<Vec<Span<Iova>>, MapError> {
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(MapError::BeyondEnd { start: range.start });
        }
        let granule = self.backend.granule();
        let ends = [Some(range.start), range.last().checked_add(1)];
        for at in ends.into_iter().flatten() {
            let Some((span, area)) = self.areas.0.at(at) else {
                continue;
            };
            if span.start == at || !area.released {
                continue;
            }
            if at & (granule - 1) != 0 {
                let value = at;
                return Err(MapError::Range(RangeError::Misaligned { value, granule }));
            }
            self.split_area(at);
        }
        let inside = self.areas.0.overlapping(range.start, range.last());
        let released = inside.filter(|(_, area)| area.released);
        Ok(released.map(|(span, _)| span).collect())
    }

    /// Has devices see the released area `span` again. After an error it is still released.
    fn map_released(
        &mut self,
        span: Span<Iova>,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let Some((_, area)) = self.areas.0.at_mut(span.start) else {
            return Ok(());
        };
        if !area.out {
            self.backend.map_again(area, &mut self.retired, observer)?;
            self.retired.listeners.mapped(area);
        } else {
            self.backend.give_back(span);
        }
        area.released = false;
        area.reserved = None;
        Ok(())
    }

    /// Joins the areas in `range`, and those that meet at its ends, where they were cut.
    fn join_inside(&mut self, range: Span<Iova>) {
        let inside = self.areas.0.overlapping(range.start, range.last());
        let starts: Vec<u64> = inside.map(|(span, _)| span.start).collect();
        starts.into_iter().for_each(|start| self.join_at(start));
        if let Some(end) = range.last().checked_add(1) {
            self.join_at(end);
        }
    }

    /// Merges leaves around `range`, which has come back.
    fn resize_at(&mut self, range: Span<Iova>, interruption: Interruption) {
        let inside = self.areas.0.overlapping(range.start, range.last());
        let there = inside.filter(|(_, area)| area.is_there());
        let parts: Vec<(Span<Iova>, Span<Iova>)> = there
            .filter_map(|(whole, _)| Some((whole.intersection(&range)?, whole)))
            .collect();
        for (part, whole) in parts {
            self.resize(part, whole, interruption);
        }
    }
}
