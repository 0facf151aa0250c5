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
//! # Many threads
//!
//! Every operation takes `&self`. One lock inside lets one operation in at a time, so callbacks that
//! an operation makes (observers, listeners, users of pins, flushes of units) must not call the
//! address space.
//!
//! # The end
//!
//! [`Ioas::close`] gives everything back and tells what it could not. Dropping an address space
//! detaches its devices and unpins its memory; see [`Ioas`].

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem;

use iopt::{Aperture, Interruption, Prot, RangeError};
use runs::{Iova, Offset, PageSizes, Span};

use crate::area::{Area, HeldArea};
use crate::areas::Areas;
use crate::backend::{Backend, Capabilities, Unsupported};
use crate::dirty::Tracking;
use crate::endpoint::{Endpoint, EndpointId};
use crate::error::{AttachError, CloseError, DetachError, MapError, UnmapError};
use crate::external::Externals;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
use crate::kernel::KernelError;
use crate::ledger::Forecast;
use crate::listener::Listener;
use crate::lock::{Guard, Mutex};
use crate::memory::Memory;
use crate::observer::{Observer, Step, observed};
use crate::placement::{Place, Placement};
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

/// An I/O address space: over tables of ours that units walk ([`new`](Self::new),
/// [`with_builder`](Self::with_builder)), or over a kernel's interface
/// ([`over_kernel`](Self::over_kernel)). What is opened is decided at run time; everything else is the same.
///
/// Any number of threads may use one. Callbacks of an operation must not call the address space.
///
/// # Dropping
///
/// [`close`](Self::close) gives everything back. Dropping an address space detaches its devices,
/// which waits for their accesses under way, and then unpins its memory. If a unit does not let a
/// device go, the memory of all areas stays pinned and charged for good: a device must never reach
/// memory that is not pinned. Tables of the caller's, as those of a dropped
/// [`Table`](iopt::Table), stay out of use in any case.
pub struct Ioas(pub(crate) Mutex<Space>);

/// What the lock of an [`Ioas`] guards.
pub(crate) struct Space {
    pub(crate) areas: Areas,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) retired: Retired,
    pub(crate) externals: Arc<Externals>,
    /// To which addresses are chosen; anywhere when empty.
    pub(crate) allowed: Vec<Span<Iova>>,
    /// While it is tracked what devices write to.
    pub(crate) tracking: Option<Tracking>,
}

impl Ioas {
    /// What the back end can do.
    pub fn capabilities(&self) -> Capabilities {
        self.lock().capabilities()
    }

    /// What ends of areas must be multiples of, bytes; 1 when nothing is known yet.
    pub fn granule(&self) -> u64 {
        self.lock().backend.granule()
    }

    /// Sizes of pages that everything attached translates; `None` when that is not known.
    pub fn page_sizes(&self) -> Option<PageSizes> {
        self.lock().backend.page_sizes()
    }

    /// Whether there are devices that reach the areas, or tables that wait for some.
    pub fn is_live(&self) -> bool {
        self.lock().backend.is_live()
    }

    /// Attaches an endpoint: all areas are mapped for it first, pinned if it is the first one, all or
    /// nothing. With tables of ours it joins a domain that suits its unit, or a new one is built.
    ///
    /// While memory is [retired](Self::retired), the device may come to see that too, as those
    /// that are attached already.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach(&self, endpoint: impl Into<Endpoint>) -> Result<(), AttachError> {
        let space = &mut *self.lock();
        let dirty = space.tracking.is_some();
        space
            .backend
            .attach(endpoint.into(), dirty, &mut space.areas)
    }

    /// Detaches an endpoint; if several units have a device of that name, that of the first domain.
    /// Areas stay, so that an endpoint that comes back finds them: with tables of ours they are pinned
    /// for as long as there is a domain, with a kernel for as long as an endpoint is attached.
    ///
    /// # Errors
    ///
    /// See [`DetachError`]; a kernel does not detach a group of which a device is open.
    pub fn detach(&self, endpoint: impl Into<EndpointId>) -> Result<(), DetachError> {
        let space = &mut *self.lock();
        let dirty = space.tracking.is_some();
        let Space { areas, retired, .. } = space;
        space.backend.detach(endpoint.into(), dirty, areas, retired)
    }

    /// The page tables, with their nodes and endpoints.
    pub fn places(&self) -> Vec<Place> {
        self.lock().backend.places()
    }

    /// What is attached.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        let places = self.places().into_iter();
        places.flat_map(|place| place.endpoints).collect()
    }

    /// Which endpoints share a page table from now on, and where it lies; those that are there stay
    /// where they are.
    ///
    /// Under [`Placement::PerNode`] iommufd has a table for each node, over memory that is pinned once;
    /// of VFIO's type 1 there is a container for each node, if they are
    /// [opened as they are needed](crate::Kernel::opening), and each is charged.
    ///
    /// # Errors
    ///
    /// [`Capability::NodeTables`](crate::Capability::NodeTables) of a single container;
    /// [`Capability::TablePlacement`](crate::Capability::TablePlacement) of a kernel for
    /// [`Placement::Near`], as it makes tables on the node of the device that they are for.
    pub fn set_placement(&self, placement: Placement) -> Result<(), Unsupported> {
        self.lock().backend.set_placement(placement)
    }

    /// Which endpoints share a page table.
    pub fn placement(&self) -> Placement {
        self.lock().backend.placement()
    }

    /// Says whether mappings of a kernel may be merged when it has no entries left
    /// ([`MapError::TooMany`]). Devices do not reach what is being merged for a moment. In the
    /// beginning they may not. Tables of ours need no such thing.
    pub fn set_merging(&self, merging: Interruption) {
        self.lock().backend.set_merging(merging);
    }

    /// Learns again what can be mapped, which attaching and detaching do by themselves.
    ///
    /// In a container that iommufd plays that is not enough: there a group reaches the memory, has
    /// it pinned and narrows the windows only while one of its devices is open.
    ///
    /// # Errors
    ///
    /// The kernel's. What was known stays known.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    pub fn refresh(&self) -> Result<(), KernelError> {
        self.lock().backend.refresh()
    }

    /// The mappings that a kernel has for this address space, in order: not the areas. `None` where
    /// tables are ours.
    pub fn kernel_mappings(&self) -> Option<Vec<Span<Iova>>> {
        self.lock().backend.mappings()
    }

    /// When units are told what was unmapped. What waits now is flushed by the next call that
    /// flushes.
    pub fn set_flushing(&self, flushing: Flushing) {
        let space = &mut *self.lock();
        space.retired.flushing = flushing;
    }

    /// Tells `listener` of all areas, from now on.
    pub fn add_listener(&self, listener: Arc<dyn Listener>) {
        self.lock().add_listener(listener)
    }

    /// Tells `listener` nothing any more. It must not use what it knows.
    pub fn remove_listener(&self, listener: &Arc<dyn Listener>) {
        let space = &mut *self.lock();
        space.retired.listeners.remove(listener);
    }

    /// The areas, in order.
    pub fn areas(&self) -> Vec<Area> {
        let space = self.lock();
        space.areas().map(|area| (**area).clone()).collect()
    }

    /// Calls `each` for every area over some of `part` (offset and length in bytes) of `memory`, at
    /// whatever device addresses, in no order. The first call notes all areas by their memory, and from
    /// then on this takes a look at those that it yields, and at few others.
    pub fn areas_over(
        &self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        mut each: impl FnMut(&Area),
    ) {
        let space = &mut *self.lock();
        space.areas.over(memory, part).for_each(|area| each(area));
    }

    /// How many areas there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True when there is no area.
    pub fn is_empty(&self) -> bool {
        let space = self.lock();
        space.areas.0.is_empty()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<Area> {
        let space = self.lock();
        let (_, area) = space.areas.0.at(iova)?;
        Some((**area).clone())
    }

    /// Maps `part` (offset and length in bytes) of `memory` at `iova`, all or nothing.
    ///
    /// # Errors
    ///
    /// See [`MapError`]. Nothing is touched, not even for a moment, when the range, the part or
    /// the limit forbids it. If earlier unmaps still wait for a [`flush`](Self::flush), that comes
    /// first, and if it fails again nothing is mapped.
    pub fn map(
        &self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        self.lock().map(iova, memory, part, prot, observer)
    }

    /// Whether the limit permits to map `part` (offset and length in bytes) of `memory` here, before
    /// anything is touched: [`Memory::forecast`], as often as this address space charges it. That is
    /// more than once only with containers by node, for each of those that it has now.
    pub fn forecast(&self, memory: &Memory, part: Span<Offset>) -> Forecast {
        let space = self.lock();
        memory.forecast_times(part, space.backend.times_charged())
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
        &self,
        range: Span<Iova>,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        self.lock().unmap(range, observer)
    }

    /// [`unmap`](Self::unmap), with the number of flushes before and after it.
    pub(crate) fn unmap_counted(
        &self,
        range: Span<Iova>,
    ) -> (Result<Unmapped, UnmapError>, [u64; 2]) {
        let space = &mut *self.lock();
        let before = space.retired.flushes;
        let unmapped = space.unmap(range, &mut ());
        (unmapped, [before, space.retired.flushes])
    }

    /// How many flushes have succeeded.
    pub(crate) fn flushes(&self) -> u64 {
        self.lock().retired.flushes
    }

    /// Unmaps everything, as [`unmap`](Self::unmap) does.
    pub fn unmap_all(&self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        self.lock().unmap_all(observer)
    }

    /// Has every unit forget what was unmapped and releases the memory that was retired. Returns
    /// the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] and [`UnmapError::Unpin`] only. After the first everything is still
    /// retired, and this may be called again. A device that is stuck can be
    /// [detached](Self::detach); then there is nobody to wait for.
    pub fn flush(&self) -> Result<u64, UnmapError> {
        self.lock().flush()
    }

    /// [`flush`](Self::flush), if [lazy flushing](Flushing::Lazy) has come to one of its bounds.
    pub fn poll(&self) -> Result<u64, UnmapError> {
        let space = &mut *self.lock();
        space.finish_unmap(&mut ())
    }

    /// Memory that is unmapped but waits for a flush, in areas.
    pub fn retired(&self) -> usize {
        let space = self.lock();
        space.retired.holds.len()
    }

    /// Ends the address space: detaches every device, unmaps everything, gives all tables back.
    ///
    /// # Errors
    ///
    /// The first failure, but everything is tried: memory is also released when a device cannot
    /// be detached but its unit forgets what was unmapped, and when a flush fails but every device
    /// can be detached. What is left then is lost on purpose, see [`CloseError`]. Who wants to try
    /// again calls [`detach`](Self::detach) and [`unmap_all`](Self::unmap_all) first.
    pub fn close(self) -> Result<(), CloseError> {
        self.0.into_inner().close()
    }

    pub(crate) fn over(backend: impl Backend) -> Self {
        Self(Mutex::new(Space::over(backend)))
    }

    pub(crate) fn lock(&self) -> Guard<'_, Space> {
        self.0.lock()
    }
}

impl Space {
    /// An empty address space over `backend`.
    pub(crate) fn over(backend: impl Backend) -> Self {
        Self {
            areas: Areas::default(),
            backend: Box::new(backend),
            retired: Retired::default(),
            externals: Arc::default(),
            allowed: Vec::new(),
            tracking: None,
        }
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    pub(crate) fn add_listener(&mut self, listener: Arc<dyn Listener>) {
        let areas = self.areas().filter(|area| area.is_there());
        areas.for_each(|area| listener.mapped(area));
        self.retired.listeners.add(listener);
    }

    pub(crate) fn areas(&self) -> impl Iterator<Item = &HeldArea> {
        self.areas.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.areas.0.len()
    }

    pub(crate) fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = self.check(iova, memory, part, prot)?;
        self.retired
            .make_way(&mut *self.backend, range)
            .map_err(MapError::Flush)?;
        let area = Area {
            range,
            memory: Arc::clone(memory),
            offset: part.start,
            prot,
            out: false,
            released: false,
            cut: [false; 2],
        };
        // Vacant: `check` has seen that no area lies there.
        let wanted = self.areas.0.len() as u64 + 1;
        let too_many = |_| MapError::TooMany {
            wanted,
            most: u64::from(u32::MAX),
        };
        let Some(area) = self.areas.insert(area.into()).map_err(too_many)? else {
            return Ok(());
        };
        if let Err(cause) = self.backend.map(area, &mut self.retired, observer) {
            if area.hold.is_none() {
                self.areas.remove(iova);
            }
            return Err(cause);
        }
        self.retired.listeners.mapped(area);
        self.resize(range, range, Interruption::Refused);
        Ok(())
    }

    /// Everything that can be known to be wrong before anything is touched.
    pub(crate) fn check(
        &self,
        iova: u64,
        memory: &Memory,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<Span<Iova>, MapError> {
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

    pub(crate) fn unmap(
        &mut self,
        range: Span<Iova>,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        self.unmap_with(range, &mut |_| (), observer)
    }

    /// Unmaps the areas in `range`; `note` is told what devices have written to.
    pub(crate) fn unmap_with(
        &mut self,
        range: Span<Iova>,
        note: &mut dyn FnMut(Span<Iova>),
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
    pub(crate) fn check_unmap(&self, range: Span<Iova>) -> Result<bool, UnmapError> {
        if range.is_empty() {
            return Ok(false);
        }
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(UnmapError::BeyondEnd { start: range.start });
        }
        Ok(true)
    }

    pub(crate) fn unmap_all(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
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
        note: &mut dyn FnMut(Span<Iova>),
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
        note: &mut dyn FnMut(Span<Iova>),
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

    pub(crate) fn flush(&mut self) -> Result<u64, UnmapError> {
        self.flush_observed(&mut ())
    }

    pub(crate) fn flush_observed(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<u64, UnmapError> {
        observed(observer, Step::Flush, |_| {
            self.retired
                .flush(&mut *self.backend)
                .map_err(UnmapError::Flush)?;
            Ok::<_, UnmapError>(((), 0))
        })?;
        let (unpinned, failed) = observed(observer, Step::Unpin, |_| {
            let (unpinned, failed) = self.retired.release();
            Ok::<_, UnmapError>(((unpinned, failed), unpinned))
        })?;
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }

    pub(crate) fn close(mut self) -> Result<(), CloseError> {
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

impl Drop for Space {
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

impl fmt::Debug for Ioas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = self.lock();
        f.debug_struct("Ioas")
            .field("backend", &space.capabilities().backend)
            .field("areas", &space.areas.0.len())
            .field("retired", &space.retired.holds.len())
            .finish_non_exhaustive()
    }
}
