//! Dirty tracking: ranges that devices have written to.
//!
//! ```text
//! harvest ──▶ Pending ──show (flushes)──▶ Shown ──▶ acknowledge, or put back
//! ```
//!
//! While tracking is on, every domain's table notes what its devices write to. [`Ioas::harvest`]
//! moves that out of all tables into one bitmap, [`Ioas::show`] has all units invalidate what they hold
//! of these pages and then shows it: what is copied now and written later is dirty again. Bits stay
//! until they are acknowledged, also over a flush that fails. See [`iopt::Pending`]. Since the flush of
//! that one bitmap reaches the units of all domains, no second type is needed for several tables.
//!
//! If a unit or a format cannot tell, everything that its devices may write to counts as written
//! to, at each harvest, and at the one after it was detached, and [`Harvested::blind`] says so. What users
//! in this process hold to write to ([`ExternalPin`](crate::ExternalPin)) counts as well, and once more
//! after they have dropped the pin.
//!
//! A large leaf is dirty as a whole. [`Tracking::leaf`] has leaves split for as long as tracking is
//! on, and merged afterwards.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use iommu::FlushError;
use iopt::{DirtyError, Interruption, Invalidation, Pending, PendingHarvest, Prot, ResizeError};
use runs::{Iova, Offset, Span};

use crate::capability::Unsupported;
use crate::memory::Memory;
use crate::memory::object::Cause;
use crate::ranges::extents::Extent;
use crate::space::error::UnmapError;
use crate::space::operation::{Op, Panicked};
use crate::space::{Core, Ioas, Unmapped};

/// Options of dirty tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracking {
    /// The largest leaf in bytes, a page size of the tables: larger ones are split. `None`: leaves
    /// stay as they are.
    pub leaf: Option<u64>,
    /// Permission for moments without a translation, where a format needs them to split and merge.
    pub interruption: Interruption,
}

impl Default for Tracking {
    /// Leaves stay as they are.
    fn default() -> Self {
        Self {
            leaf: None,
            interruption: Interruption::Refused,
        }
    }
}

/// Result of a harvest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Harvested {
    /// Bytes of leaves that were dirty, of all domains together.
    pub bytes: u64,
    /// Some device writes without leaving a trace, or has until it was detached: what it may write to
    /// counts as written to.
    pub blind: bool,
}

/// Failure to begin tracking: it is off, and leaves are as they were, or smaller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackingError {
    /// The back end cannot do that.
    #[error(transparent)]
    Unsupported(Unsupported),
    /// The kernel refuses.
    #[error("the kernel does not track dirty pages")]
    Kernel(#[source] Cause),
    /// Leaves cannot be split.
    #[error("leaves cannot be split")]
    Split(#[source] ResizeError<FlushError>),
    /// Earlier writes cannot be cleared.
    #[error(transparent)]
    Clear(HarvestError),
    /// A unit did not invalidate it in time.
    #[error(transparent)]
    Flush(FlushError),
}

/// Failure of a harvest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HarvestError {
    /// A table cannot be harvested.
    #[error(transparent)]
    Table(DirtyError),
    /// The kernel refuses.
    #[error("the kernel does not report dirty pages")]
    Kernel(#[source] Cause),
    /// A unit did not answer in time after tables have moved, or leaves have another size: what its devices
    /// write to is not in the tables that are read here. All of it is for the next harvest.
    #[error(transparent)]
    Flush(FlushError),
    /// An operation on some of it has panicked, and its range stays taken until the address space is closed.
    #[error("an operation on {range} has panicked")]
    Panicked {
        /// The range of that operation.
        range: Span<Iova>,
    },
}

impl From<Panicked> for HarvestError {
    fn from(Panicked(range): Panicked) -> Self {
        Self::Panicked { range }
    }
}

impl Ioas {
    /// True while it is tracked what devices write to.
    pub fn tracks_dirty(&self) -> bool {
        self.gate.read().tracking.is_some()
    }

    /// Begins to track what devices write to. What they wrote to before is discarded.
    ///
    /// # Errors
    ///
    /// See [`TrackingError`].
    pub fn track_dirty(&self, tracking: Tracking) -> Result<(), TrackingError> {
        let core = &mut *self.gate.write();
        core.backend.track(tracking)?;
        self.set_tracking(core, Some(tracking));
        let op = self.op(core);
        let begun = op.split_all(tracking).and_then(|()| op.discard_dirty());
        if begun.is_err() {
            self.untrack(core);
        }
        begun
    }

    /// Ends it: what was not harvested is discarded. Leaves that were split are merged, as far as
    /// they can be.
    pub fn untrack_dirty(&self) {
        self.untrack(&mut self.gate.write());
    }

    fn untrack(&self, core: &mut Core) {
        core.backend.untrack();
        let Some(tracking) = self.set_tracking(core, None) else {
            return;
        };
        if tracking.leaf.is_some() {
            for range in self.op(core).stretches() {
                // Smaller leaves say the same.
                let _ = core.backend.merge(range, range, tracking.interruption);
            }
        }
    }

    /// Returns what it was. What pins count as written to begins with none.
    fn set_tracking(&self, core: &mut Core, tracking: Option<Tracking>) -> Option<Tracking> {
        self.externals.track(tracking.is_some());
        mem::replace(&mut core.tracking, tracking)
    }

    /// Moves what devices have written to in the span of `pending` out of all tables into it. Then
    /// [`show`](Self::show) it.
    ///
    /// # Errors
    ///
    /// When a table cannot be harvested; what was found before is in the bitmap and stays pending.
    pub fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &self,
        pending: &mut Pending<W>,
    ) -> Result<Harvested, HarvestError> {
        let core = self.gate.read();
        let op = self.op(&core);
        let named = [Extent::of(pending.span())];
        let (claim, ()) = op.take(|_| named, |_| Ok::<_, HarvestError>(()))?;
        claim.run(|_| op.harvest(pending))
    }

    /// Flushes what units keep of the dirty state of the harvested pages, and shows the bitmap.
    ///
    /// # Errors
    ///
    /// When a unit does not answer in time. Everything stays pending then.
    pub fn show<'p, W: AsRef<[u64]> + AsMut<[u64]>>(
        &self,
        pending: &'p mut Pending<W>,
    ) -> Result<PendingHarvest<'p, W>, FlushError> {
        let core = self.gate.read();
        pending.flush_with(|what| core.backend.show(what))
    }

    /// [`unmap`](Self::unmap), which notes in `pending` what devices had written to there. Plain
    /// `unmap` drops it.
    ///
    /// # Errors
    ///
    /// As [`unmap`](Self::unmap).
    pub fn unmap_noting<W: AsRef<[u64]> + AsMut<[u64]>>(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<W>,
    ) -> Result<Unmapped, UnmapError> {
        self.unmap_reporting(range, &mut |run| pending.mark(run))
    }

    /// [`unmap`](Self::unmap), which calls `note` with what devices had written to there, in no order and perhaps
    /// more than once. It must not use the address space.
    ///
    /// # Errors
    ///
    /// As [`unmap`](Self::unmap).
    pub fn unmap_reporting(
        &self,
        range: Span<Iova>,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<Unmapped, UnmapError> {
        let core = self.gate.read();
        let mut gone = self.retired.gone();
        self.op(&core)
            .unmap(range, core.backend.is_blind(), note, &mut gone, &mut ())
    }

    /// Parts of memory at the device addresses `range`: the addresses, the memory, and offset and length
    /// in it. In order, without holes. So what was [shown](Self::show) can be told by guest address.
    pub fn parts(&self, range: Span<Iova>) -> Vec<(Span<Iova>, Arc<Memory>, Span<Offset>)> {
        let state = self.state.lock();
        let areas = state.areas.0.overlapping(range.start, range.last());
        let parts = areas.filter_map(|(span, area)| {
            let here = span.intersection(&range)?;
            let offset = area.offset + (here.start - span.start);
            Some((here, Arc::clone(&area.memory), Span::new(offset, here.len)))
        });
        parts.collect()
    }
}

impl Op<'_> {
    fn split_all(self, tracking: Tracking) -> Result<(), TrackingError> {
        if let Some(leaf) = tracking.leaf {
            for range in self.stretches() {
                let backend = &self.core.backend;
                let split = backend.split(range, leaf, tracking.interruption);
                split.map_err(TrackingError::Split)?;
            }
        }
        Ok(())
    }

    /// Each area's range.
    fn stretches(self) -> Vec<Span<Iova>> {
        let areas = &self.ioas.state.lock().areas;
        areas.iter().map(|area| area.range()).collect()
    }

    fn discard_dirty(self) -> Result<(), TrackingError> {
        let backend = &self.core.backend;
        for half in iopt::Aperture::zeros(64).spans() {
            // A few bits for everything: which ones does not matter.
            let all = Pending::new([0; 1], half, 1 << 58);
            let Ok(mut all) = all else {
                continue;
            };
            self.harvest(&mut all).map_err(TrackingError::Clear)?;
            all.flush_with(|what| backend.show(what))
                .map_err(TrackingError::Flush)?
                .acknowledge();
            // Entries that were cleared when an earlier flush failed, a unit may hold as dirty to this day. It would
            // write there without a trace.
            let areas = self.stretches().into_iter();
            let mut areas = areas.filter(|range| half.covers(range));
            let (first, last) = (areas.next(), areas.next_back());
            let hull = first.and_then(|first| {
                let last = last.unwrap_or(first);
                Span::inclusive(first.start, last.last())
            });
            if let Some(hull) = hull {
                let everything = Invalidation::of(hull, u32::MAX, false);
                let shown = backend.show(&everything);
                shown.map_err(TrackingError::Flush)?;
            }
        }
        Ok(())
    }

    fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        self,
        pending: &mut Pending<W>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        let writable: Vec<Span<Iova>> = {
            let areas = &self.ioas.state.lock().areas;
            let here = areas.0.overlapping(span.start, span.last());
            let written = here.filter(|(_, area)| area.is_written());
            written
                .filter_map(|(range, _)| range.intersection(&span))
                .collect()
        };
        let backend = &self.core.backend;
        let found = pending.with_words(|pending| backend.harvest(&writable, pending))?;
        self.externals()
            .take_written(span, &mut |range| pending.mark(range));
        Ok(found)
    }

    /// The areas in `range` whose permissions are to write.
    pub(crate) fn writable(self, range: Span<Iova>) -> Vec<Span<Iova>> {
        let areas = &self.ioas.state.lock().areas;
        let here = areas.0.overlapping(range.start, range.last());
        let writable = here.filter(|(_, area)| area.prot.contains(Prot::WRITE));
        writable.map(|(range, _)| range).collect()
    }
}
