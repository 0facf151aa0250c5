//! What a back end over a kernel promises to an address space, and what only such an address space
//! has: attaching by the kernel's files, and being handed to another process.

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iommu::{FlushError, NodeId};
use iopt::{Interruption, Invalidation, Pending};
use runs::Span;

use super::backend::Kernel;
use super::error::KernelError;
use super::mapped::Journal;
use super::mapper::Mapper;
use super::pieces::{Piece, Stretch, stretches};
use super::refusals::{attach_refused, detach_refused, errno};
use super::shares::Share;
use crate::area::Area;
use crate::areas::Areas;
use crate::backend::{Backend, Capabilities, Capability, Unsupported};
use crate::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::errno::Errno;
use crate::error::{AttachError, DetachError, MapError, UnmapError};
use crate::observer::Observer;
use crate::placement::Placement;
use crate::retired::Retired;
use crate::space::Ioas;
use crate::windows::outside;

/// The `len` bytes from `iova` on, if they lie in `windows`.
pub(super) fn inside(windows: &[Span], iova: u64, len: u64) -> Result<Span, MapError> {
    let wanted = Span::checked(iova, len).ok_or(MapError::BeyondEnd { start: iova })?;
    match outside(windows, wanted) {
        Some(reserved) => Err(MapError::Reserved { wanted, reserved }),
        None => Ok(wanted),
    }
}

/// What is kept for `area` goes to its mapping, which is charged anew.
pub(super) fn map_again<B: Backend>(
    backend: &mut B,
    area: &mut Area,
    retired: &mut Retired,
    observer: &mut dyn Observer,
) -> Result<(), MapError> {
    let kept = area.reserved.take().is_some();
    let mapped = backend.map(area, retired, observer);
    if mapped.is_err() && kept {
        let _ = area.reserve(backend.times_charged());
    }
    mapped
}

impl<K: Mapper> Kernel<K> {
    /// What every one of them can do.
    pub(super) const LEAST: Capabilities = Capabilities {
        backend: K::PROFILE.name(),
        hitless_cut: false,
        unmap_part: false,
        shares_pins: false,
        page_dirty: false,
        given_runs: false,
        table_placement: false,
        node_tables: false,
        most_mappings: None,
    };
}

impl<K: Mapper> Backend for Kernel<K> {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shares_pins: self.mapper().shares().is_some(),
            page_dirty: !self.mapper().is_blind(),
            node_tables: K::NODE_TABLES,
            most_mappings: self.most,
            ..Self::LEAST
        }
    }

    fn granule(&self) -> u64 {
        self.info.granule
    }

    fn windows(&self) -> Vec<Span> {
        self.windows.clone()
    }

    fn check(&self, iova: u64, len: u64) -> Result<Span, MapError> {
        inside(&self.windows, iova, len)
    }

    fn allow(&mut self, ranges: &[Span]) -> Result<(), MapError> {
        let allowed = self.mapped.mapper.allow(ranges);
        allowed.map_err(|error| match errno(&error) {
            Some(Errno::EADDRINUSE | Errno::EINVAL) => MapError::Allowed {
                range: ranges.first().copied().unwrap_or_default(),
            },
            _ => MapError::Kernel(Box::new(error)),
        })
    }

    fn map(
        &mut self,
        area: &mut Area,
        _retired: &mut Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let stretch = Self::mappable(area)?;
        if self.devices.is_empty() {
            return Ok(());
        }
        let mut journal = Journal::default();
        let mapped = self.map_stretch(&stretch, &mut journal, observer);
        if mapped.is_err() {
            self.mapped.undo(journal);
        }
        mapped
    }

    fn empty(
        &mut self,
        _areas: &Areas,
        first: u64,
        last: u64,
        interruption: Interruption,
        note: &mut dyn FnMut(Span),
    ) -> Result<(), UnmapError> {
        let emptying = self.plan_to_empty(first, last, interruption)?;
        let mut journal = Journal::default();
        match self.empty_planned(&emptying, &mut journal) {
            Ok(()) => {
                self.emptied(&emptying, journal, note);
                Ok(())
            }
            Err(cause) => {
                self.mapped.undo(journal);
                Err(cause)
            }
        }
    }

    fn is_live(&self) -> bool {
        !self.devices.is_empty()
    }

    fn times_charged(&self) -> Option<u64> {
        self.mapper().shares().is_none().then_some(1)
    }

    fn map_again(
        &mut self,
        area: &mut Area,
        retired: &mut Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        map_again(self, area, retired, observer)
    }

    /// Areas need no cut of the kernel's: what has to be mapped anew is, when a part is emptied.
    fn cut(&mut self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        match self.mapped.pieces.at(at) {
            Some(piece) if piece.start < at && interruption == Interruption::Refused => {
                Err(Self::cuts(piece, Capability::HitlessCut))
            }
            _ => Ok(()),
        }
    }

    fn track(&mut self, tracking: Tracking) -> Result<(), TrackingError> {
        if tracking.leaf.is_some() {
            let cause = Self::unsupported(Capability::TablePlacement);
            return Err(TrackingError::Unsupported(cause));
        }
        if self.devices.is_empty() {
            return Ok(());
        }
        match self.mapped.mapper.set_tracking(true) {
            Ok(()) => self.bitmaps = true,
            // Then nobody can tell, and everything counts as written to.
            Err(KernelError::Refused { .. }) => self.bitmaps = false,
            Err(error) => return Err(TrackingError::Kernel(Box::new(error))),
        }
        Ok(())
    }

    fn untrack(&mut self) {
        self.carried.clear();
        if core::mem::take(&mut self.bitmaps) {
            // Nobody reads it any more, tracked or not.
            let _ = self.mapped.mapper.set_tracking(false);
        }
    }

    fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &mut self,
        _areas: &Areas,
        pending: &mut Pending<W>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        let read = self.carry(span);
        let mut found = self.carried.take(span, &mut |run| pending.mark(run));
        read.map_err(|error| HarvestError::Kernel(Box::new(error)))?;
        if !self.bitmaps {
            let writable = self.writable(span).into_iter();
            writable.for_each(|piece| pending.mark(piece));
        }
        found.blind |= self.is_blind();
        Ok(found)
    }

    /// Reading dirty bits has flushed already.
    fn show(&mut self, _what: &Invalidation) -> Result<(), FlushError> {
        Ok(())
    }

    fn is_blind(&self) -> bool {
        !self.devices.is_empty() && (!self.bitmaps || self.mapper().is_blind())
    }

    /// Unmaps everything. Devices that cannot be detached, like those of a group that are open,
    /// reach nothing then.
    fn leave(&mut self, _areas: &mut Areas, _retired: &mut Retired) -> Result<(), DetachError> {
        let unmapped = self.unmap_everything();
        unmapped.map_err(|error| detach_refused(&error))?;
        for device in core::mem::take(&mut self.devices) {
            let _ = self.mapped.mapper.leave(&device);
            self.mapped.mapper.left(&device);
        }
        let _ = self.refresh();
        Ok(())
    }
}

impl<K: Mapper> Ioas<Kernel<K>> {
    /// An empty address space of a kernel. Until a device comes, areas are only noted.
    pub fn over_kernel(backend: Kernel<K>) -> Self {
        Self::over(backend)
    }

    /// Says whether mappings of the kernel may be merged when it has no entries left
    /// ([`MapError::TooMany`]). Devices do not reach what is being merged for a moment. In the
    /// beginning they may not.
    pub const fn set_merging(&mut self, merging: Interruption) {
        self.backend.set_merging(merging);
    }

    /// Which devices share a page table from now on; those that are there stay where they are.
    ///
    /// With iommufd each node has a table under [`Placement::PerNode`]: see
    /// [`attach_near`](Self::attach_near). A container has one table for all that can share it. There,
    /// [`ByNode`](crate::ByNode) does the same with a container for the groups of each node, which is
    /// charged for each.
    ///
    /// # Errors
    ///
    /// [`Capability::NodeTables`] of a container; [`Capability::TablePlacement`] for
    /// [`Placement::Near`], as the kernel makes tables on the node of the device that they are for.
    pub fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        self.backend.set_placement(placement)
    }

    /// Which devices share a page table.
    pub const fn placement(&self) -> Placement {
        self.backend.placement
    }

    /// The attached devices, or groups.
    pub fn devices(&self) -> &[Arc<K::Device>] {
        &self.backend.devices
    }

    /// Lets `device` see this address space. If it is the first, all areas are mapped and pinned,
    /// all or nothing.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach(&mut self, device: Arc<K::Device>) -> Result<(), AttachError> {
        self.attach_near(device, None)
    }

    /// [`attach`](Self::attach) of a device that is at the memory node `near`, where the kernel makes
    /// its tables: [`Placement::PerNode`] has it share one with devices of this node only.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach_near(
        &mut self,
        device: Arc<K::Device>,
        near: Option<NodeId>,
    ) -> Result<(), AttachError> {
        let dirty = self.tracking.is_some();
        let charged = self.backend.enter(device, dirty, near, &self.areas)?;
        self.areas.keep(charged);
        Ok(())
    }

    /// Takes this address space away from `device`. With the last one everything is unmapped and
    /// unpinned; areas stay, so that a device that comes back finds them.
    ///
    /// # Errors
    ///
    /// See [`DetachError`]; a kernel does not detach a group of which a device is open.
    pub fn detach(&mut self, device: &Arc<K::Device>) -> Result<(), DetachError> {
        self.backend.let_go(device, self.tracking.is_some())?;
        if self.backend.devices.is_empty() {
            self.areas.keep_only(None);
        }
        Ok(())
    }

    /// Learns again what can be mapped, which attaching and detaching do by themselves.
    ///
    /// In a container that iommufd plays that is not enough: there a group reaches the memory, has
    /// it pinned and narrows the windows only while one of its devices is open.
    ///
    /// # Errors
    ///
    /// The kernel's. What was known stays known.
    pub fn refresh(&mut self) -> Result<(), KernelError> {
        self.backend.refresh()
    }

    /// Gives the mappings to another process, which has the kernel's files: devices go on. It
    /// [takes over](Self::take_over) with the [pieces](Kernel::pieces) that this returns, and the
    /// same areas over the same memory. Here the areas are only noted from now on.
    ///
    /// # Errors
    ///
    /// The kernel's; [`KernelError::NoSource`] when iommufd maps memory that is no file, which cannot
    /// be handed over. Nothing has changed then.
    pub fn give_up(&mut self) -> Result<Vec<Span>, KernelError> {
        if !self.backend.mapped.can_move() {
            return Err(KernelError::NoSource);
        }
        self.backend.mapped.mapper.give_up_addresses()?;
        if self.tracking.is_some() {
            self.backend.carry_unseen();
        }
        let pieces: Vec<Span> = self.backend.pieces().collect();
        let starts: Vec<u64> = pieces.iter().map(|range| range.start).collect();
        // The kernel knows no address of this process any more.
        self.backend.mapped.forget(&starts);
        self.backend.devices.clear();
        self.areas.keep_only(None);
        let _ = self.backend.refresh();
        Ok(pieces)
    }

    /// Takes over what another process has given up: `pieces`, mapped for `devices`. The areas are
    /// there already, only noted. The memory is charged here from now on.
    ///
    /// # Errors
    ///
    /// [`AttachError::NoArea`] when a piece is not in one memory of the areas;
    /// [`AttachError::Replay`] over the limit; the kernel's. Then nothing is mapped here. Of iommufd
    /// nothing has changed, and this may be tried again; a container may hold some of the memory, and
    /// its charge, until its files are closed.
    pub fn take_over(
        &mut self,
        devices: Vec<Arc<K::Device>>,
        pieces: &[Span],
    ) -> Result<(), AttachError> {
        let all: Vec<Stretch> = stretches(&self.areas).collect();
        let mut taken = Vec::with_capacity(pieces.len());
        for range in pieces {
            let failed = |cause| AttachError::Replay {
                area: *range,
                cause,
            };
            let at = all.partition_point(|stretch| stretch.range.last() < range.last());
            let whole = all.get(at).filter(|stretch| stretch.range.covers(range));
            let stretch = whole.ok_or(AttachError::NoArea { mapping: *range })?;
            let stretch = stretch.at(*range);
            Kernel::<K>::check_source(&stretch).map_err(failed)?;
            let charge = stretch.memory.ledger().charge(stretch.charge());
            let charge = charge.map_err(|over| failed(MapError::OverLimit(over)))?;
            taken.push(Piece {
                share: Share::new(charge, stretch.part()),
                stretch,
                copied: false,
            });
        }
        let charged = self.backend.charge_released(&self.areas)?;
        let refused = |error| attach_refused(K::PROFILE, error);
        let first = taken.first().map(|piece| piece.stretch.clone());
        let needed = taken.iter().map(|piece| piece.stretch.charge()).sum();
        let mapped = &mut self.backend.mapped;
        let taken = mapped.take_over(&devices, taken);
        taken.map_err(|error| match (errno(&error), first) {
            // The kernel knows of others who are charged, like the process before.
            (Some(Errno::ENOMEM), Some(first)) => match first.memory.ledger().over(needed) {
                Some(over) => AttachError::Replay {
                    area: first.range,
                    cause: MapError::OverLimit(over),
                },
                None => refused(error),
            },
            _ => refused(error),
        })?;
        self.backend.devices = devices;
        self.areas.keep(charged);
        self.backend.refresh().map_err(refused)
    }
}
