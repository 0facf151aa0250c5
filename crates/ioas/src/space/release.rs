//! Parts of areas that are released for a while: what a balloon does with a guest's memory.
//!
//! # Releasing
//!
//! For each range: look, set aside what its return will take, cut, empty tables. Then, once for all of
//! them, units and listeners invalidate, and only after that memory is unpinned. Each range is released as
//! a whole or stays as it was; whatever happens, no memory is unpinned that a device can reach.
//!
//! Released ranges stay areas, of their own, without entries and without pins. Two things are kept for each, so that
//! its return cannot fail for them: its charge (see `memory/reservation.rs`), and the tables
//! that it can need if its memory comes back scattered, in every domain, also in one that comes later.
//! Without a domain nothing is charged, and nothing is kept.
//!
//! Released and [taken out](Ioas::take_out) are apart: a range that is both is mapped again when it is neither. A range
//! that is out is not charged, released or not.
//!
//! # Restoring
//!
//! Each stretch is pinned, mapped and joined again with the neighbours from which it was cut, and leaves
//! are merged: so what one call has mapped is one area again, and can be unmapped as that. What cannot be pinned or mapped stays released, and may be tried again.
//!
//! # Discarding
//!
//! Memory that this address space has released need not be unused: another area, address space or
//! external pin may hold it. Memory may be discarded when all address spaces over it have released it
//! and [`Memory::first_held`](crate::Memory::first_held) returns `None`.

use alloc::vec::Vec;
use core::error::Error;
use core::fmt;

use iopt::{Interruption, RangeError};
use runs::{Iova, Joiner, Span};

use crate::areas::area::HeldArea;
use crate::memory::Hold;
use crate::ranges::extents::Extent;
use crate::space::Ioas;
use crate::space::dirty_log::DirtyLog;
use crate::space::error::{MapError, UnmapError};
use crate::space::flush::UnmappedHolds;
use crate::space::operation::{Claim, Op};
use crate::space::unmap::check_unmap;

/// Failure to release a range.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReleaseError {
    /// It is as it was.
    ///
    /// After [`UnmapError::Flush`] it was mapped again, and is also [retired](Ioas::retired) until a
    /// flush succeeds: before that a device of the unit that does not answer may fault there. If it could
    /// not be mapped again it is released, but pinned.
    ///
    /// After [`UnmapError::Unpin`] it is released, but it is not known how much of it is still pinned.
    Unmap(UnmapError),
    /// Charge or tables for its return cannot be set aside. It is as it was.
    SetAside(MapError),
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmap(cause) => cause.fmt(f),
            Self::SetAside(_) => f.write_str("charge or tables for its return cannot be reserved"),
        }
    }
}

impl Error for ReleaseError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unmap(cause) => cause.source(),
            Self::SetAside(cause) => Some(cause),
        }
    }
}

impl From<UnmapError> for ReleaseError {
    fn from(cause: UnmapError) -> Self {
        Self::Unmap(cause)
    }
}

/// Ranges that a release has emptied and not unpinned yet.
struct PartialRelease<'a> {
    /// Ranges.
    ranges: Vec<Span<Iova>>,
    /// The areas in them.
    areas: Vec<Span<Iova>>,
    /// Pinned ranges, in the order of their holds.
    held: Vec<Span<Iova>>,
    /// The holds.
    gone: UnmappedHolds<'a>,
    /// Writes of devices in them.
    written: DirtyLog,
}

impl Ioas {
    /// Releases `ranges`, each of which areas cover: unmapped, flushed, unpinned, exactly that,
    /// until they are [restored](Self::restore) or unmapped. Devices go on reaching all the rest.
    ///
    /// Areas are cut at the ends. Their charge stays, and tables for their return are set aside. What
    /// is released already stays so. All ranges have one flush, also where flushing is lazy: when it
    /// returns, no device reaches what is released. Ranges are worth having in order, and joined.
    /// Returns the bytes that were unpinned. What devices have written there is discarded.
    ///
    /// `kept` receives each range that is not released, and why; all others are. A range is not released if
    /// an external pin [holds](Self::pin) some of it, after its user was asked to drop a pin that
    /// [allows it](crate::WhenUnmapped::Drops); and if it cannot be cut without a moment in which the
    /// rest is missing, unless `interruption` allows that.
    pub fn release(
        &self,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        kept: &mut dyn FnMut(Span<Iova>, ReleaseError),
    ) -> u64 {
        let core = self.gate.read();
        let op = self.op(&core);
        op.take_each(ranges)
            .run(|claim| op.release(claim, ranges, interruption, kept))
    }

    /// Takes `ranges` back, as far as they are [released](Self::release): pinned and mapped as before,
    /// and leaves merged, as far as that is possible without a moment in which the rest is missing
    /// unless `interruption` allows one. Ends need not be those that were released.
    ///
    /// `failed` receives each stretch that stays released, and why; all others are back. Charge and
    /// tables are there; what can fail is the pin, and a flush that was still to come.
    pub fn restore(
        &self,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        failed: &mut dyn FnMut(Span<Iova>, MapError),
    ) {
        let core = self.gate.read();
        let op = self.op(&core);
        op.take_each(ranges).run(|claim| {
            let mut back = Vec::new();
            for &range in ranges.iter().filter(|range| !range.is_empty()) {
                match op.released_in(claim, range) {
                    Err(cause) => failed(range, cause),
                    Ok(stretches) => {
                        for span in stretches {
                            let flushed = self.retired.make_way(&*core.backend, span);
                            let mapped = flushed
                                .map_err(MapError::Flush)
                                .and_then(|()| op.map_released(claim, span));
                            match mapped {
                                Ok(()) => back.push(span),
                                Err(cause) => failed(span, cause),
                            }
                        }
                    }
                }
                op.join_inside(range);
            }
            let mut joiner = Joiner::new();
            let complete = joiner.push_all(&mut back, |_| ());
            back.truncate(complete);
            for span in back.into_iter().chain(joiner.finish()) {
                op.resize_at(span, interruption);
            }
        });
    }
}

impl Op<'_> {
    fn release(
        self,
        claim: &Claim<'_>,
        ranges: &[Span<Iova>],
        interruption: Interruption,
        kept: &mut dyn FnMut(Span<Iova>, ReleaseError),
    ) -> u64 {
        let mut going = PartialRelease {
            ranges: Vec::new(),
            areas: Vec::new(),
            held: Vec::new(),
            gone: self.retired().gone(),
            written: DirtyLog::default(),
        };
        for range in ranges {
            let emptied = self.empty_for_release(claim, *range, interruption, &mut going);
            if let Err(cause) = emptied {
                kept(*range, cause);
            }
        }
        if let Err(cause) = self.retired().flush(&*self.core.backend) {
            going.gone.wait();
            let written = going.written.ranges();
            written.for_each(|range| self.externals().note_written(range));
            for range in going.ranges {
                self.map_what_was_emptied(claim, range, &going.areas);
                kept(range, UnmapError::Flush(cause).into());
            }
            return 0;
        }
        let mut failed = Vec::new();
        let mut held = going.held.iter();
        let (unpinned, _) = going.gone.release(|cause| {
            let area = held.next();
            failed.extend(area.copied().zip(cause));
        });
        for (area, cause) in failed {
            kept(area, UnmapError::Unpin(cause).into());
        }
        for range in &going.ranges {
            self.join_inside(*range);
        }
        unpinned
    }

    /// Takes `range` from all devices, without waiting for them, or leaves everything as it was.
    fn empty_for_release(
        self,
        claim: &Claim<'_>,
        range: Span<Iova>,
        interruption: Interruption,
        going: &mut PartialRelease<'_>,
    ) -> Result<(), ReleaseError> {
        if !check_unmap(range)? {
            return Ok(());
        }
        let backend = &self.core.backend;
        claim.check(range).map_err(UnmapError::from)?;
        if let Some(at) = self.ioas.state.lock().first_hole(range) {
            return Err(UnmapError::Hole { range, at }.into());
        }
        self.externals().drop_pins(range)?;
        if let Some(held) = self.externals().first_pinned(range) {
            return Err(UnmapError::Held { range, held }.into());
        }
        let cuts = self.cut_around(range, interruption)?;
        let fresh = self.spans(range, |area| !area.released);
        for (done, span) in fresh.iter().enumerate() {
            if let Err(cause) = backend.set_aside(*span) {
                let before = fresh.iter().take(done);
                before.for_each(|span| backend.give_back(*span));
                self.join_cuts(cuts);
                return Err(ReleaseError::SetAside(cause));
            }
        }
        let note = &mut |written| going.written.add(written);
        if let Err(cause) = self.empty(claim, Extent::of(range), interruption, note) {
            fresh.iter().for_each(|span| backend.give_back(*span));
            self.join_cuts(cuts);
            return Err(cause.into());
        }
        let live = backend.is_live();
        for span in &fresh {
            let Some(mut edit) = self.edit(span.start) else {
                continue;
            };
            edit.area.released = true;
            if live && edit.area.keeps_charge() {
                // If a kernel pins, another process may have taken the charge meanwhile.
                let _ = edit.area.reserve(backend.times_charged());
            }
            let hold: Option<Hold> = edit.area.hold.take();
            going.held.extend(hold.is_some().then_some(*span));
            going.gone.add(*span, hold);
        }
        going.ranges.push(range);
        going.areas.extend(fresh);
        Ok(())
    }

    /// A unit or listener has not invalidated what was emptied in `range`: has devices see it again, the same
    /// memory, which is still pinned. What cannot be mapped stays released.
    fn map_what_was_emptied(self, claim: &Claim<'_>, range: Span<Iova>, areas: &[Span<Iova>]) {
        for span in areas.iter().filter(|span| range.covers(span)) {
            let _ = self.map_released(claim, *span);
        }
        self.join_inside(range);
        self.resize_at(range, Interruption::Refused);
    }

    /// Released parts of `range`, in areas of their own.
    fn released_in(
        self,
        claim: &Claim<'_>,
        range: Span<Iova>,
    ) -> Result<Vec<Span<Iova>>, MapError> {
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(MapError::BeyondEnd { start: range.start });
        }
        claim.check(range)?;
        let granule = self.core.backend.granule();
        let ends = [Some(range.start), range.last().checked_add(1)];
        let mut state = self.ioas.state.lock();
        for at in ends.into_iter().flatten() {
            let Some((span, area)) = state.areas.0.at(at) else {
                continue;
            };
            if span.start == at || !area.released {
                continue;
            }
            if at & (granule - 1) != 0 {
                let value = at;
                return Err(MapError::Range(RangeError::Misaligned { value, granule }));
            }
            state.split_area(at);
        }
        drop(state);
        Ok(self.spans(range, |area| area.released))
    }

    /// The areas in `range` that are as `wanted`.
    fn spans(self, range: Span<Iova>, wanted: impl Fn(&HeldArea) -> bool) -> Vec<Span<Iova>> {
        let areas = &self.ioas.state.lock().areas.0;
        let inside = areas.overlapping(range.start, range.last());
        let wanted = inside.filter(|(_, area)| wanted(area));
        wanted.map(|(span, _)| span).collect()
    }

    /// Has devices see the released area `span` again. After an error it is still released.
    fn map_released(self, claim: &Claim<'_>, span: Span<Iova>) -> Result<(), MapError> {
        let Some(mut edit) = self.edit(span.start) else {
            return Ok(());
        };
        let backend = &self.core.backend;
        if !edit.area.out {
            let owned = || claim.widen(Extent::of(span));
            backend.map_again(&mut edit.area, &owned, self.retired(), &mut ())?;
            self.retired().listeners.mapped(&edit.area);
        } else {
            backend.give_back(span);
        }
        edit.area.released = false;
        edit.area.reserved = None;
        Ok(())
    }

    /// Joins the areas in `range`, and those that meet at its ends, where they were cut.
    fn join_inside(self, range: Span<Iova>) {
        let starts = self.spans(range, |_| true);
        let starts = starts.into_iter().map(|span| span.start);
        let end = range.last().checked_add(1);
        let state = &mut *self.ioas.state.lock();
        starts.chain(end).for_each(|start| state.join_at(start));
    }

    /// Merges leaves around `range`, which has come back.
    fn resize_at(self, range: Span<Iova>, interruption: Interruption) {
        for whole in self.spans(range, |area| area.is_there()) {
            if let Some(part) = whole.intersection(&range) {
                self.resize(part, whole, interruption);
            }
        }
    }
}
