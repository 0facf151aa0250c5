//! The address space: areas over memory.
//!
//! # Mapping
//!
//! Check, charge, pin, then batch by batch: find runs, fill tables. Each step can fail, and then
//! everything before it is undone in the opposite order: tables are emptied, units flushed, memory
//! released. Without a domain an area is only noted; the first device that comes has it pinned and
//! mapped.
//!
//! # Unmapping
//!
//! Tables are emptied, units flushed, and only then memory is released: unpinned, and its charge given
//! back, if no other user holds it. Memory whose flush has failed is *retired*: it belongs to no area
//! any more, but stays pinned and charged until a later flush succeeds. Until then nothing is mapped
//! either: a unit that still holds old translations and tables would not see new ones.
//!
//! # Many threads
//!
//! Every operation takes `&self`. There are two kinds.
//!
//! * Operations *on ranges* run at the same time where their ranges are disjoint: map, unmap, release, restore,
//!   take out, put back, harvest (the span of its bitmap), pin. Where ranges overlap, one waits, and then
//!   finds what a single thread would find. Each takes its range first: see `operation.rs`.
//! * All others that change something are *exclusive*: attach, detach, hand over, take over, give up, move
//!   tables, placement, merging, allowed ranges, tracking on and off, refresh, listeners that come and go,
//!   close. They wait until no operation is under way, and new ones wait for them.
//!
//! The steps of one operation, its calls to observers, listeners and users of pins, and flushes of units come
//! in the same order as without other threads. Those of operations that run at once come in any order among each
//! other, so that a listener, a unit and a memory object are called by several threads. Callbacks must not call
//! the address space.
//!
//! A gate, which operations on ranges hold for reading and exclusive ones for writing, guards the back end; a
//! lock that is held for a moment guards the areas and what is taken; what waits for a flush has a lock of its
//! own (`flush.rs`). They are locked in this order. A kernel's back end lets one operation in at a
//! time.
//!
//! # The end
//!
//! [`Ioas::close`] gives everything back and reports failures. Dropping an address space
//! detaches its devices and unpins its memory; see [`Ioas`].

pub(crate) mod backend;
pub(crate) mod choice;
mod cut;
pub(crate) mod dirty;
pub(crate) mod dirty_log;
pub(crate) mod endpoint;
mod errno;
pub(crate) mod error;
pub(crate) mod external_pin;
pub(crate) mod flush;
#[cfg(all(feature = "linux", feature = "vm-memory"))]
pub(crate) mod guest_ram;
pub(crate) mod listener;
mod map;
pub(crate) mod observed;
pub(crate) mod open;
pub(crate) mod operation;
pub(crate) mod placement;
pub(crate) mod release;
pub(crate) mod reservation;
mod unmap;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem;

use iopt::{Interruption, Prot};
use runs::{Iova, Offset, PageSizes, Span};

use crate::areas::area::Area;
use crate::capability::Unsupported;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
use crate::kernel_error::KernelError;
use crate::lock::{Changed, Mutex, RwLock};
use crate::memory::Memory;
#[cfg(feature = "linux")]
use crate::memory::ledger::Ledger;
use crate::memory::ledger::{Account, Forecast};
use crate::space::backend::{Backend, Capabilities};
use crate::space::dirty::Tracking;
use crate::space::endpoint::{Endpoint, EndpointId};
use crate::space::error::{AttachError, CloseError, DetachError, MapError, UnmapError};
use crate::space::external_pin::Externals;
use crate::space::flush::{Flushing, Retired};
use crate::space::listener::Listener;
use crate::space::operation::{Op, State};
use crate::space::placement::{Place, Placement};

/// Result of an unmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmapped {
    /// Areas.
    pub areas: u64,
    /// Their bytes together, `u64::MAX` of all 2^64.
    pub bytes: u64,
    /// Bytes that were unpinned: those of the areas that no other user holds, and those that were
    /// retired before.
    pub unpinned: u64,
}

/// An I/O address space: over a kernel's interface or a unit that was opened ([`over`](Self::over)), over tables of
/// the caller's ([`over_tables`](Self::over_tables), [`over_table`](Self::over_table)), or over a foreign mapper
#[cfg_attr(
    any(feature = "vfio", feature = "iommufd"),
    doc = "([`over_mapper`](Self::over_mapper))."
)]
/// The choice is made at run time; everything else is the same.
///
/// Any number of threads may use one. Operations on disjoint ranges run at the same time; where ranges
/// overlap, one waits for the other. Attaching, detaching and whatever concerns the whole address space waits for
/// all others. Callbacks of an operation must not call the address space.
///
/// When a callback panics, the range of its operation stays taken: later operations on it fail with
/// [`MapError::Panicked`] or [`UnmapError::Panicked`], and all others go on.
///
/// # Dropping
///
/// [`close`](Self::close) gives everything back. Dropping an address space detaches its devices,
/// which waits for their accesses under way, and then unpins its memory. If a unit does not let a
/// device go, the memory of all areas stays pinned and charged for good: a device must never reach
/// memory that is not pinned. Tables of the caller's, as those of a dropped
/// [`Table`](iopt::Table), stay out of use in any case.
pub struct Ioas {
    pub(crate) state: Mutex<State>,
    /// Notified when a range claimed by an operation may be free again.
    pub(crate) given_back: Changed,
    /// For reading by operations on ranges; for writing by those that are alone.
    pub(crate) gate: RwLock<Core>,
    pub(crate) retired: Retired,
    pub(crate) externals: Arc<Externals>,
    pub(crate) account: Account,
}

/// State that stays as it is while operations on ranges are under way.
pub(crate) struct Core {
    pub(crate) backend: Box<dyn Backend>,
    /// To which addresses are chosen; anywhere when empty.
    pub(crate) allowed: Vec<Span<Iova>>,
    /// While it is tracked what devices write to.
    pub(crate) tracking: Option<Tracking>,
}

impl Ioas {
    /// The account that guest memory is charged to: that of what was opened, unless
    /// [another](crate::IoasOptions::ledger) was asked for. Over tables of ours it is that of
    /// [this process](Ledger::of_process), over a foreign mapper that of
    /// [the kernel's counter](Ledger::of_kernel).
    ///
    /// # Errors
    ///
    /// When the limit of the process cannot be read.
    #[cfg(feature = "linux")]
    pub fn ledger(&self) -> Result<Arc<Ledger>, hostmem::PinnerError> {
        self.account.ledger()
    }

    /// Capabilities of the back end.
    pub fn capabilities(&self) -> Capabilities {
        self.gate.read().backend.capabilities()
    }

    /// Alignment of the ends of areas, bytes; 1 when nothing is known yet.
    pub fn granule(&self) -> u64 {
        self.gate.read().backend.granule()
    }

    /// Sizes of pages that everything attached translates; `None` when that is not known.
    pub fn page_sizes(&self) -> Option<PageSizes> {
        self.gate.read().backend.page_sizes()
    }

    /// Returns true if there are devices that reach the areas, or tables that wait for some.
    pub fn is_live(&self) -> bool {
        self.gate.read().backend.is_live()
    }

    /// Attaches an endpoint: all areas are mapped for it first, pinned if it is the first one, all or
    /// nothing. With tables of ours it joins a domain that suits its unit, or a new one is built.
    ///
    /// While memory is [retired](Self::retired), the device may come to see that too, as those
    /// that are attached already.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then, unless a unit comes neither to the end of the attach nor to
    /// that of taking it back: the device translates nothing, and is [attached](Self::endpoints) until
    /// [`detach`](Self::detach) succeeds.
    pub fn attach(&self, endpoint: impl Into<Endpoint>) -> Result<(), AttachError> {
        let core = &mut *self.gate.write();
        let dirty = core.tracking.is_some();
        let areas = &mut self.state.lock().areas;
        core.backend.attach(endpoint.into(), dirty, areas)
    }

    /// Detaches an endpoint; if several units have a device of that name, that of the first domain.
    /// Areas stay, so that an endpoint that comes back finds them: with tables of ours they are pinned
    /// for as long as there is a domain, with a kernel for as long as an endpoint is attached.
    ///
    /// # Errors
    ///
    /// See [`DetachError`]; a kernel does not detach a group of which a device is open.
    pub fn detach(&self, endpoint: impl Into<EndpointId>) -> Result<(), DetachError> {
        let core = &mut *self.gate.write();
        let dirty = core.tracking.is_some();
        let areas = &mut self.state.lock().areas;
        core.backend
            .detach(endpoint.into(), dirty, areas, &self.retired)
    }

    /// The page tables, with their nodes and endpoints.
    pub fn places(&self) -> Vec<Place> {
        self.gate.read().backend.places()
    }

    /// Attached endpoints.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        let places = self.places().into_iter();
        places.flat_map(|place| place.endpoints).collect()
    }

    /// Sets the policy for sharing page tables and placing them from now on; existing ones stay where they are.
    ///
    /// Under [`Placement::PerNode`] iommufd has a table for each node, over memory that is pinned once;
    /// of VFIO's type 1 there is a container for each node, if they are
    /// [opened as they are needed](crate::IoasOptions::over_mappers), and each is charged.
    ///
    /// # Errors
    ///
    /// [`Capability::NodeTables`](crate::Capability::NodeTables) of a single container;
    /// [`Capability::TablePlacement`](crate::Capability::TablePlacement) of a kernel for
    /// [`Placement::Near`], as it makes tables on the node of the device that they are for.
    pub fn set_placement(&self, placement: Placement) -> Result<(), Unsupported> {
        self.gate.write().backend.set_placement(placement)
    }

    /// Policy for sharing page tables.
    pub fn placement(&self) -> Placement {
        self.gate.read().backend.placement()
    }

    /// Says whether mappings of a kernel may be merged when it has no entries left
    /// ([`MapError::TooMany`]). Devices do not reach what is being merged for a moment. In the
    /// beginning they may not. Tables of ours need no such thing.
    pub fn set_merging(&self, merging: Interruption) {
        self.gate.write().backend.set_merging(merging);
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
        self.gate.write().backend.refresh()
    }

    /// The mappings that a kernel has for this address space, in order: not the areas. `None` where
    /// tables are ours.
    pub fn kernel_mappings(&self) -> Option<Vec<Span<Iova>>> {
        self.gate.read().backend.mappings()
    }

    /// Time at which units invalidate what was unmapped. What waits now is flushed by the next call that
    /// flushes.
    pub fn set_flushing(&self, flushing: Flushing) {
        self.retired.set_flushing(flushing);
    }

    /// Tells `listener` of all areas, from now on.
    pub fn add_listener(&self, listener: Arc<dyn Listener>) {
        let _alone = self.gate.write();
        let areas = &self.state.lock().areas;
        let there = areas.iter().filter(|area| area.is_there());
        there.for_each(|area| listener.mapped(area));
        self.retired.listeners.all.write().push(listener);
    }

    /// Tells `listener` nothing any more. It must not use what it knows.
    pub fn remove_listener(&self, listener: &Arc<dyn Listener>) {
        let _alone = self.gate.write();
        let mut all = self.retired.listeners.all.write();
        all.retain(|other| !Arc::ptr_eq(other, listener));
    }

    /// The areas, in order. What an operation has not come to its end with is as it was before.
    pub fn areas(&self) -> Vec<Area> {
        let areas = &self.state.lock().areas;
        areas.iter().map(|area| (**area).clone()).collect()
    }

    /// Calls `each` for every area over some of `part` (offset and length in bytes) of `memory`, at
    /// whatever device addresses, in no order. The first call notes all areas by their memory, and from
    /// then on this takes a look at those that it yields, and at few others. Other threads wait for `each`.
    pub fn areas_over(
        &self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        mut each: impl FnMut(&Area),
    ) {
        let areas = &mut self.state.lock().areas;
        areas.over(memory, part).for_each(|area| each(area));
    }

    /// Number of areas.
    pub fn len(&self) -> usize {
        self.state.lock().areas.0.len()
    }

    /// True when there is no area.
    pub fn is_empty(&self) -> bool {
        self.state.lock().areas.0.is_empty()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<Area> {
        let state = self.state.lock();
        let (_, area) = state.areas.0.at(iova)?;
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
    ) -> Result<(), MapError> {
        self.observed(&mut ()).map(iova, memory, part, prot)
    }

    /// Says if the limit permits to map `part` (offset and length in bytes) of `memory` here, before anything is
    /// touched: [`Memory::forecast`], as often as this address space charges it. That is more than once only with
    /// containers by node, for each of those that it has now.
    pub fn forecast(&self, memory: &Memory, part: Span<Offset>) -> Forecast {
        let times = self.gate.read().backend.times_charged();
        memory.forecast_times(part, times)
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
    pub fn unmap(&self, range: Span<Iova>) -> Result<Unmapped, UnmapError> {
        self.observed(&mut ()).unmap(range)
    }

    /// Unmaps everything, as [`unmap`](Self::unmap) does.
    pub fn unmap_all(&self) -> Result<Unmapped, UnmapError> {
        self.observed(&mut ()).unmap_all()
    }

    /// Has every unit invalidate what was unmapped. Releases the memory that was retired, and the tables that wait to
    /// be given back together. Returns the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] and [`UnmapError::Unpin`] only. After the first everything is still
    /// retired, and this may be called again. A device that is stuck can be
    /// [detached](Self::detach); then there is no unit to wait for.
    pub fn flush(&self) -> Result<u64, UnmapError> {
        let core = self.gate.read();
        let mut gone = self.retired.gone();
        let flushed = self.op(&core).flush_gone(&mut gone, &mut ());
        core.backend.give_back_tables();
        flushed
    }

    /// [`flush`](Self::flush), if [lazy flushing](Flushing::Lazy) has come to one of its bounds.
    pub fn poll(&self) -> Result<u64, UnmapError> {
        if self.retired.is_due() {
            self.flush()
        } else {
            Ok(0)
        }
    }

    /// Memory that is unmapped but waits for a flush, in areas.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Ends the address space: detaches every device, unmaps everything, gives all tables back.
    ///
    /// # Errors
    ///
    /// The first failure, but everything is tried: memory is also released when a device cannot
    /// be detached but its unit invalidates what was unmapped, and when a flush fails but every device
    /// can be detached. What is left then is lost on purpose, see [`CloseError`]. Who wants to try
    /// again calls [`detach`](Self::detach) and [`unmap_all`](Self::unmap_all) first.
    pub fn close(mut self) -> Result<(), CloseError> {
        let detached = self.leave();
        self.retired.set_flushing(Flushing::Strict);
        let state = self.state.get_mut();
        state.taken.clear();
        let unmapped = self.unmap_all().map_err(CloseError::Unmap);
        // Only when both have failed memory is left; dropping tries to detach once more.
        detached.map_err(CloseError::Detach)?;
        // No device is attached, so that the flush was empty, and each unit has invalidated the domain
        // with its last device. Areas are left in a damaged table only, which must not be followed.
        if self.state.get_mut().areas.0.is_empty() {
            self.gate.get_mut().backend.end();
        }
        unmapped.map(|_| ())
    }

    fn leave(&mut self) -> Result<(), DetachError> {
        let areas = &mut self.state.get_mut().areas;
        self.gate.get_mut().backend.leave(areas, &self.retired)
    }

    /// An empty address space over `backend`.
    pub(crate) fn over_backend(backend: impl Backend) -> Self {
        Self {
            account: Account::OfProcess,
            state: Mutex::default(),
            given_back: Changed::default(),
            gate: RwLock::new(Core {
                backend: Box::new(backend),
                allowed: Vec::new(),
                tracking: None,
            }),
            retired: Retired::default(),
            externals: Arc::default(),
        }
    }

    pub(crate) const fn op<'a>(&'a self, core: &'a Core) -> Op<'a> {
        Op { ioas: self, core }
    }
}

impl Drop for Ioas {
    fn drop(&mut self) {
        // A unit that has released its last device of a domain has invalidated the domain, so that
        // nothing needs to be flushed any more.
        if self.leave().is_err() {
            mem::forget(mem::take(&mut self.state.get_mut().areas));
            self.retired.lose();
        }
    }
}

impl fmt::Debug for Ioas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ioas")
            .field("backend", &self.capabilities().backend)
            .field("areas", &self.len())
            .field("retired", &self.retired())
            .finish_non_exhaustive()
    }
}
