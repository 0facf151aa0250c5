//! The address space: areas over memory.
//!
//! # Mapping
//!
//! Check, charge, pin, then batch by batch: find runs, fill tables. Each step can fail, and then
//! everything before it is undone in the opposite order: tables are emptied, units flushed, memory
//! let go. Without a domain an area is only noted; the first device that comes has it pinned and
//! mapped.
//!
//! # Unmapping
//!
//! Tables are emptied, units flushed, and only then memory is let go: unpinned, and its charge given
//! back, if nobody else holds it. Memory whose flush has failed is *retired*: it belongs to no area
//! any more, but stays pinned and charged until a later flush succeeds. Until then nothing is mapped
//! either: a unit that still holds old translations and tables would not see what is new.
//!
//! # The end
//!
//! [`Ioas::close`] gives everything back and tells what it could not. Dropping an address space
//! detaches its devices and unpins its memory; see [`Ioas`].

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem;

use iopt::{Aperture, Interruption, Prot, RangeError};
use runs::Span;

use crate::area::Area;
use crate::areas::Areas;
use crate::backend::{Backend, Capabilities};
use crate::dirty::Tracking;
use crate::error::{CloseError, MapError, UnmapError};
use crate::external::Externals;
use crate::ledger::Forecast;
use crate::listener::Listener;
use crate::memory::Memory;
use crate::observer::{Observer, Step, observed};
use crate::retired::{Flushing, Retired};

/// What an unmap has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmapped {
    /// Areas.
    pub areas: u64,
    /// Their bytes together.
    pub bytes: u64,
    /// Bytes that were unpinned: those of the areas that nobody else holds, and those that were
    /// retired before.
    pub unpinned: u64,
}

/// An I/O address space over the back end `B`: tables of ours ([`Own`](crate::Own)), or a kernel's.
///
/// # Dropping
///
/// [`close`](Self::close) gives everything back. Dropping an address space detaches its devices,
/// which waits for their accesses under way, and then unpins its memory. If a unit does not let a
/// device go, the memory of all areas stays pinned and charged for good: a device must never reach
/// memory that is not pinned. Tables of the caller's, as those of a dropped
/// [`Table`](iopt::Table), stay out of use in any case.
pub struct Ioas<B: Backend> {
    pub(crate) areas: Areas,
    pub(crate) backend: B,
    pub(crate) retired: Retired,
    pub(crate) externals: Arc<Externals>,
    /// To which addresses are chosen; anywhere when empty.
    pub(crate) allowed: Vec<Span>,
    /// While it is tracked what devices write to.
    pub(crate) tracking: Option<Tracking>,
}

impl<B: Backend> Ioas<B> {
    /// An empty address space over `backend`.
    pub(crate) fn over(backend: B) -> Self {
        Self {
            areas: Areas::default(),
            backend,
            retired: Retired::default(),
            externals: Arc::default(),
            allowed: Vec::new(),
            tracking: None,
        }
    }

    /// What the back end can do.
    pub fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    /// The back end.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// When units are told what was unmapped. What waits now is flushed by the next call that
    /// flushes.
    pub fn set_flushing(&mut self, flushing: Flushing) {
        self.retired.flushing = flushing;
    }

    /// Tells `listener` of all areas, from now on.
    pub fn add_listener(&mut self, listener: Arc<dyn Listener>) {
        let areas = self.areas().filter(|area| area.is_there());
        areas.for_each(|area| listener.mapped(area));
        self.retired.listeners.add(listener);
    }

    /// Tells `listener` nothing any more. It must not use what it knows.
    pub fn remove_listener(&mut self, listener: &Arc<dyn Listener>) {
        self.retired.listeners.remove(listener);
    }

    /// The areas, in order.
    pub fn areas(&self) -> impl Iterator<Item = &Area> {
        self.areas.iter()
    }

    /// The areas over some of `part` (offset and length in bytes) of `memory`, at whatever device
    /// addresses, in no order. The first call notes all areas by their memory, and from then on this
    /// takes a look at those that it yields, and at few others.
    pub fn areas_over(&mut self, memory: &Arc<Memory>, part: Span) -> impl Iterator<Item = &Area> {
        self.areas.over(memory, part)
    }

    /// How many areas there are.
    pub fn len(&self) -> usize {
        self.areas.0.len()
    }

    /// True when there is no area.
    pub fn is_empty(&self) -> bool {
        self.areas.0.is_empty()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<&Area> {
        self.areas.0.at(iova).map(|(_, area)| area)
    }

    /// Maps `part` (offset and length in bytes) of `memory` at `iova`, all or nothing.
    ///
    /// # Errors
    ///
    /// See [`MapError`]. Nothing is touched, not even for a moment, when the range, the part or
    /// the limit forbids it. If earlier unmaps still wait for a [`flush`](Self::flush), that comes
    /// first, and if it fails again nothing is mapped.
    pub fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = self.check(iova, memory, part, prot)?;
        self.retired
            .make_way(&mut self.backend, range)
            .map_err(MapError::Flush)?;
        let area = Area {
            range,
            memory: Arc::clone(memory),
            offset: part.start,
            prot,
            hold: None,
            out: false,
            released: false,
            cut: [false; 2],
            reserved: None,
        };
        // Vacant: `check` has seen that no area lies there.
        let wanted = self.areas.0.len() as u64 + 1;
        let too_many = |_| MapError::TooMany {
            wanted,
            most: u64::from(u32::MAX),
        };
        let Some(area) = self.areas.insert(area).map_err(too_many)? else {
            return Ok(());
        };
        if let Err(cause) = self.backend.map(area, &mut self.retired, observer) {
            if area.hold.is_none() {
                self.areas.remove(iova);
            }
            return Err(cause);
        }
        self.retired.listeners.mapped(area);
        self.refit(range, range, Interruption::Refused);
        Ok(())
    }

    /// Whether the limit permits to map `part` (offset and length in bytes) of `memory` here, before
    /// anything is touched: [`Memory::forecast`], as often as this address space charges it. That is
    /// more than once only with [containers by node](crate::ByNode), for each of those that it has now.
    pub fn forecast(&self, memory: &Memory, part: Span) -> Forecast {
        memory.forecast_times(part, self.backend.times_charged())
    }

    /// Everything that can be known to be wrong before anything is touched.
    pub(crate) fn check(
        &self,
        iova: u64,
        memory: &Memory,
        part: Span,
        prot: Prot,
    ) -> Result<Span, MapError> {
        let granule = self.backend.granule();
        if part.len == 0 {
            return Err(MapError::Range(RangeError::Empty));
        }
        if !prot.intersects(Prot::RW | Prot::EXECUTE) {
            return Err(MapError::Prot { prot });
        }
        if !Span::new(0, memory.len()).covers(&part) || !part.is_aligned(granule) {
            return Err(MapError::Part {
                part,
                object: memory.len(),
                granule,
            });
        }
        if iova & (granule - 1) != 0 {
            return Err(MapError::Range(RangeError::Misaligned {
                value: iova,
                granule,
            }));
        }
        let range = self.backend.check(iova, part.len)?;
        match self.areas.0.first_overlap(range.start, range.last()) {
            Some((area, _)) => Err(MapError::Overlap {
                wanted: range,
                area,
            }),
            None => Ok(range),
        }
    }

    /// Unmaps every area in `range`. Areas that lie only partly in it are not cut: that is refused
    /// and nothing changes. Where nothing is mapped nothing happens.
    ///
    /// Memory that was retired before is released as well, if the flush succeeds.
    ///
    /// # Errors
    ///
    /// See [`UnmapError`], which says for each case what has happened to the areas: either all of
    /// them are unmapped or none.
    pub fn unmap(
        &mut self,
        range: Span,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        self.unmap_with(range, &mut |_| (), observer)
    }

    /// Unmaps the areas in `range`; `note` is told what devices have written to.
    pub(crate) fn unmap_with(
        &mut self,
        range: Span,
        note: &mut dyn FnMut(Span),
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        if !self.check_unmap(range)? {
            return Ok(Unmapped::default());
        }
        for end in [range.start, range.last()] {
            let Some((area, _)) = self.areas.0.at(end) else {
                continue;
            };
            if !range.covers(&area) {
                return Err(UnmapError::CutsArea { range, area });
            }
            if area.len == range.len {
                break;
            }
        }
        self.externals.let_go(range)?;
        let (first, last) = (range.start, range.last());
        self.unmap_between(first, last, Interruption::Refused, note, observer)
    }

    /// Refuses what ends beyond the address space; false when there is nothing to do.
    pub(crate) fn check_unmap(&self, range: Span) -> Result<bool, UnmapError> {
        if range.is_empty() {
            return Ok(false);
        }
        if Span::checked(range.start, range.len).is_none() {
            return Err(UnmapError::BeyondEnd { start: range.start });
        }
        Ok(true)
    }

    /// Unmaps everything, as [`unmap`](Self::unmap) does.
    pub fn unmap_all(&mut self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        for half in Aperture::zeros(64).spans() {
            self.externals.let_go(half)?;
        }
        // The whole space: a span cannot say that.
        self.unmap_between(0, u64::MAX, Interruption::Refused, &mut |_| (), observer)
    }

    /// Takes the areas that begin between `first` and `last`, both included, from all devices, all or
    /// none. None of them ends behind `last`. `note` receives what was written to there, which is not
    /// harvested any more.
    pub(crate) fn empty(
        &mut self,
        first: u64,
        last: u64,
        interruption: Interruption,
        note: &mut dyn FnMut(Span),
    ) -> Result<(), UnmapError> {
        let (backend, areas) = (&mut self.backend, &self.areas);
        backend.empty(areas, first, last, interruption, note)?;
        self.externals.take_written_between(first, last, note);
        Ok(())
    }

    /// Unmaps the areas that begin between `first` and `last`, both included. None of them ends
    /// behind `last`.
    pub(crate) fn unmap_between(
        &mut self,
        first: u64,
        last: u64,
        interruption: Interruption,
        note: &mut dyn FnMut(Span),
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        let mut unmapped = observed(observer, Step::EmptyTables, |_| {
            self.empty(first, last, interruption, note)?;
            let mut unmapped = Unmapped::default();
            for (range, area) in self.areas.extract_inside(first, last) {
                unmapped.areas += 1;
                unmapped.bytes += range.len;
                if area.released {
                    self.backend.give_back(range);
                }
                self.retired.add(range, area.hold);
            }
            Ok::<_, UnmapError>((unmapped, unmapped.bytes))
        })?;
        unmapped.unpinned = self.finish_unmap(observer)?;
        Ok(unmapped)
    }

    pub(crate) fn finish_unmap(&mut self, observer: &mut dyn Observer) -> Result<u64, UnmapError> {
        if self.retired.is_due() {
            self.flush_observed(observer)
        } else {
            Ok(0)
        }
    }

    /// Has every unit forget what was unmapped and releases the memory that was retired. Returns
    /// the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] and [`UnmapError::Unpin`] only. After the first everything is still
    /// retired, and this may be called again. A device that is stuck can be
    /// [detached](Self::detach); then there is nobody to wait for.
    pub fn flush(&mut self) -> Result<u64, UnmapError> {
        self.flush_observed(&mut ())
    }

    /// [`flush`](Self::flush), if [lazy flushing](Flushing::Lazy) has come to one of its bounds.
    pub fn poll(&mut self) -> Result<u64, UnmapError> {
        self.finish_unmap(&mut ())
    }

    pub(crate) fn flush_observed(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<u64, UnmapError> {
        observed(observer, Step::Flush, |_| {
            self.retired
                .flush(&mut self.backend)
                .map_err(UnmapError::Flush)?;
            Ok::<_, UnmapError>(((), 0))
        })?;
        let (unpinned, failed) = observed(observer, Step::Unpin, |_| {
            let (unpinned, failed) = self.retired.release();
            Ok::<_, UnmapError>(((unpinned, failed), unpinned))
        })?;
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }

    /// Memory that is unmapped but waits for a flush, in areas.
    pub const fn retired(&self) -> usize {
        self.retired.holds.len()
    }

    /// Ends the address space: detaches every device, unmaps everything, gives all tables back.
    ///
    /// # Errors
    ///
    /// The first failure, but everything is tried: memory is also released when a device cannot
    /// be detached but its unit forgets what was unmapped, and when a flush fails but every device
    /// can be detached. What is left then is lost on purpose, see [`CloseError`]. Who wants to try
    /// again calls [`detach`](Self::detach) and [`unmap_all`](Self::unmap_all) first.
    pub fn close(mut self) -> Result<(), CloseError> {
        let detached = self.backend.leave(&mut self.areas, &mut self.retired);
        self.retired.flushing = Flushing::Strict;
        let unmapped = self.unmap_all(&mut ()).map_err(CloseError::Unmap);
        // Only when both have failed memory is left; dropping tries to detach once more.
        detached.map_err(CloseError::Detach)?;
        // Nobody is attached, so that the flush was empty, and each unit has forgotten the domain
        // with its last device. Areas are left in a damaged table only, which nobody should follow.
        if self.areas.0.is_empty() {
            self.backend.end();
        }
        unmapped.map(|_| ())
    }
}

impl<B: Backend> Drop for Ioas<B> {
    fn drop(&mut self) {
        // A unit that has let its last device of a domain go has forgotten the domain, so that
        // nothing needs to be flushed any more.
        let left = self.backend.leave(&mut self.areas, &mut self.retired);
        if left.is_err() {
            mem::forget(mem::take(&mut self.areas));
            mem::forget(mem::take(&mut self.retired.holds));
        }
    }
}

impl<B: Backend> fmt::Debug for Ioas<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ioas")
            .field("backend", &self.capabilities().backend)
            .field("areas", &self.areas.0.len())
            .field("retired", &self.retired.holds.len())
            .finish_non_exhaustive()
    }
}
