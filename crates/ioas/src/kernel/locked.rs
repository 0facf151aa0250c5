//! The back end of an address space over a kernel, which one operation at a time uses.

use core::any::Any;
use std::vec::Vec;

use iopt::{Interruption, Pending};
use runs::{Iova, PageSizes, Span};

use super::backend::Kernel;
use super::mapper::Mapper;
use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::capability::Unsupported;
use crate::kernel_error::KernelError;
use crate::lock::Mutex;
use crate::memory::ledger::Account;
use crate::observer::Observer;
use crate::ranges::extents::Extent;
use crate::space::Ioas;
use crate::space::backend::{Backend, Capabilities};
use crate::space::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::space::endpoint::{Endpoint, EndpointId};
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::flush::Retired;
use crate::space::placement::{Place, Placement};

/// The back end of an address space, which one operation at a time uses.
type Locked<K> = Mutex<Kernel<K>>;

impl<K: Mapper> Backend for Locked<K> {
    fn capabilities(&self) -> Capabilities {
        self.lock().capabilities()
    }

    fn granule(&self) -> u64 {
        self.lock().granule()
    }

    fn windows(&self) -> Vec<Span<Iova>> {
        self.lock().windows()
    }

    fn check(&self, iova: u64, len: u64) -> Result<Span<Iova>, MapError> {
        self.lock().check(iova, len)
    }

    fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        self.get_mut().allow(ranges)
    }

    fn map(
        &self,
        area: &mut HeldArea,
        _owned: &dyn Fn() -> Extent,
        _retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        self.lock().map(area, observer)
    }

    fn empty(
        &self,
        range: Extent,
        _areas: Option<(Extent, Extent)>,
        interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), UnmapError> {
        self.lock().empty(range, interruption, note)
    }

    fn is_live(&self) -> bool {
        self.lock().is_live()
    }

    fn times_charged(&self) -> Option<u64> {
        self.lock().times_charged()
    }

    fn map_again(
        &self,
        area: &mut HeldArea,
        _owned: &dyn Fn() -> Extent,
        _retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        self.lock().map_again(area, observer)
    }

    fn cut(&self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        self.lock().cut(at, interruption)
    }

    fn track(&mut self, tracking: Tracking) -> Result<(), TrackingError> {
        self.get_mut().track(tracking)
    }

    fn untrack(&mut self) {
        self.get_mut().untrack();
    }

    /// Reading dirty bits flushes, so that nothing is left to be done to show them.
    fn harvest(
        &self,
        _writable: &[Span<Iova>],
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<Harvested, HarvestError> {
        self.lock().harvest(pending)
    }

    fn is_blind(&self) -> bool {
        self.lock().is_blind()
    }

    fn leave(&mut self, _areas: &mut Areas, _retired: &Retired) -> Result<(), DetachError> {
        self.get_mut().leave()
    }

    fn attach(
        &mut self,
        endpoint: Endpoint,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        self.get_mut().attach(endpoint, dirty, areas)
    }

    fn detach(
        &mut self,
        endpoint: EndpointId,
        dirty: bool,
        areas: &mut Areas,
        _retired: &Retired,
    ) -> Result<(), DetachError> {
        self.get_mut().detach(endpoint, dirty, areas)
    }

    fn places(&self) -> Vec<Place> {
        self.lock().places()
    }

    fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        self.get_mut().set_placement(placement)
    }

    fn placement(&self) -> Placement {
        self.lock().placement()
    }

    fn set_merging(&mut self, merging: Interruption) {
        self.get_mut().set_merging(merging);
    }

    fn refresh(&mut self) -> Result<(), KernelError> {
        self.get_mut().refresh()
    }

    fn give_up(
        &mut self,
        tracked: bool,
        areas: &mut Areas,
    ) -> Result<Vec<Span<Iova>>, KernelError> {
        self.get_mut().give_up(tracked, areas)
    }

    fn take_over(
        &mut self,
        endpoints: Vec<Endpoint>,
        mappings: &[Span<Iova>],
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        self.get_mut().take_over(endpoints, mappings, areas)
    }

    fn mappings(&self) -> Option<Vec<Span<Iova>>> {
        self.lock().mappings()
    }

    fn page_sizes(&self) -> Option<PageSizes> {
        self.lock().page_sizes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Ioas {
    pub(crate) fn over_kernel<K: Mapper>(kernel: Kernel<K>) -> Self {
        let mut space = Self::over_backend(Mutex::new(kernel));
        space.account = Account::OfKernel(K::PROFILE);
        space
    }

    /// Gives the mappings to another process, which has the kernel's files: devices go on. It
    /// [takes over](Self::take_over) with the [mappings](Self::kernel_mappings) that this returns, and
    /// the same areas over the same memory. Here the areas are only noted from now on.
    ///
    /// # Errors
    ///
    /// The kernel's; [`KernelError::NoSource`] when iommufd maps memory that is no file, or registers by a
    /// dma-buf, which cannot be handed over, and of every back end that is not one container or address space of a kernel.
    /// Nothing has changed then.
    pub fn give_up(&self) -> Result<Vec<Span<Iova>>, KernelError> {
        let core = &mut *self.gate.write();
        let areas = &mut self.state.lock().areas;
        core.backend.give_up(core.tracking.is_some(), areas)
    }

    /// Takes over what another process has given up: `mappings`, for `endpoints`. The areas are
    /// there already, only noted. The memory is charged here from now on.
    ///
    /// # Errors
    ///
    /// [`AttachError::NoArea`] when a mapping is not in one memory of the areas;
    /// [`AttachError::Replay`] over the limit; the kernel's; [`AttachError::Endpoint`] of every back end
    /// that is not one container or address space of a kernel. Then nothing is mapped here. Of iommufd
    /// nothing has changed, and this may be tried again; a container may hold some of the memory, and
    /// its charge, until its files are closed.
    pub fn take_over(
        &self,
        endpoints: Vec<Endpoint>,
        mappings: &[Span<Iova>],
    ) -> Result<(), AttachError> {
        let core = &mut *self.gate.write();
        let areas = &mut self.state.lock().areas;
        core.backend.take_over(endpoints, mappings, areas)
    }
}
