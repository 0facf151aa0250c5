//! The back end over a kernel's own mappings: containers of VFIO's type 1, or an address space of iommufd.
//!
//! A [space](super::space) is one container, or one address space of iommufd: its mappings, and the
//! devices that see them. There is one that the caller gives, or they are opened as they are needed:
//! a container has one page table for all groups that can share it, on the node of the first, so that
//! [`Placement::PerNode`] takes a container for the groups of each node. iommufd has a table for each
//! node in one address space. Every operation goes to all spaces, in one order, noted in a [`Journal`]
//! for each: when one fails, it is undone in all. After an unmap that was refused half-way, restored
//! mappings were missing for a moment.
//!
//! # What it costs
//!
//! Containers share no pins. Each pins its own mappings, and has them charged: the ledger is charged for
//! all of them in one step, before the first is asked. [`Ioas::forecast`] tells the sum beforehand.
//!
//! # Many threads
//!
//! One operation at a time asks the kernel, under one lock (`locked.rs`): a journal is undone before another
//! operation begins.
//!
//! # Which container
//!
//! [`Placement::joins`] decides by the node that is given with a group, which is never divided. The first
//! group of a node opens a container, and has all areas mapped there before it is attached for the caller;
//! the last one to leave closes it. The node of a container follows from its groups. One that is left
//! with mappings that the kernel did not unmap is the first to be used again.

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iommu::NodeId;
use iopt::{Aperture, Interruption, Pending};
use runs::{Iova, PageSizes, Span};

use super::mapper::Mapper;
use super::mappings::Journal;
use super::refusals::attach_refused;
use super::space::{KernelSpace, map_stretch};
use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::capability::{Capability, Unsupported};
use crate::kernel_error::KernelError;
use crate::observer::Observer;
use crate::ranges::extents::Extent;
use crate::ranges::windows::{outside, within};
use crate::space::backend::Capabilities;
use crate::space::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::space::dirty_log::DirtyLog;
use crate::space::endpoint::{Endpoint, EndpointId, EndpointKind};
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::placement::{Place, Placement};
use crate::space::reservation::ForReleased;

/// The back end over the mappings of a kernel.
pub(crate) struct Kernel<K: Mapper> {
    /// Opens a space when there is none for an endpoint; `None`: there is the one that was given.
    open: Option<Box<Open<K>>>,
    /// Mappings end at its multiples, bytes: see [`Kernel::new`].
    granule: Option<u64>,
    spaces: Vec<Member<K>>,
    placement: Placement,
    merging: Interruption,
    /// Ranges that must stay possible in spaces to come.
    allowed: Vec<Span<Iova>>,
    /// Writes of devices of closed spaces, until they are harvested.
    carried: DirtyLog,
}

/// Opens a container, or what does its work.
type Open<K> = dyn Fn() -> Result<K, KernelError> + Send;

struct Member<K: Mapper> {
    space: KernelSpace<K>,
    /// The node of each of its devices.
    near: Vec<Option<NodeId>>,
}

impl<K: Mapper> Member<K> {
    fn new(mapper: K, granule: Option<u64>) -> Self {
        Self {
            space: KernelSpace::new(mapper, granule),
            near: Vec::new(),
        }
    }

    /// Node of the first device whose node is known.
    fn node(&self) -> Option<NodeId> {
        self.near.iter().copied().flatten().next()
    }

    fn is_live(&self) -> bool {
        !self.space.devices.is_empty()
    }
}

impl<K: Mapper> core::fmt::Debug for Kernel<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let spaces: Vec<_> = self.spaces.iter().map(|member| &member.space).collect();
        f.debug_struct("Kernel")
            .field("placement", &self.placement)
            .field("spaces", &spaces)
            .finish_non_exhaustive()
    }
}

impl<K: Mapper> Kernel<K> {
    /// Over one container or address space, `mapper`, to which nothing is attached and which maps
    /// nothing.
    ///
    /// Mappings end at multiples of `granule` bytes of device addresses, rounded up to a power of two
    /// of at least 4096: that is the largest stretch which can only be unmapped together. `None`:
    /// areas that go on in each other share a mapping however long.
    pub(crate) fn new(mapper: K, granule: Option<u64>) -> Self {
        let given = Member::new(mapper, granule);
        Self::with(None, granule, Vec::from([given]))
    }

    /// Over containers that `open` opens when they are needed: one when the first group is attached, and
    /// under [`Placement::PerNode`] one for the groups of each memory node. Each is closed with its last
    /// group. Live address spaces are not handed over.
    pub(crate) fn opening(
        open: impl Fn() -> Result<K, KernelError> + Send + 'static,
        granule: Option<u64>,
    ) -> Self {
        Self::with(Some(Box::new(open)), granule, Vec::new())
    }

    fn with(open: Option<Box<Open<K>>>, granule: Option<u64>, spaces: Vec<Member<K>>) -> Self {
        Self {
            open,
            granule,
            spaces,
            placement: Placement::default(),
            merging: Interruption::Refused,
            allowed: Vec::new(),
            carried: DirtyLog::default(),
        }
    }

    /// Spaces that have devices.
    fn live(&mut self) -> impl Iterator<Item = &mut KernelSpace<K>> {
        let all = self.spaces.iter_mut();
        all.filter(|member| member.is_live())
            .map(|member| &mut member.space)
    }

    /// Lets a device into the space of its node. A new one maps all areas, and charges those that are
    /// released.
    fn enter(
        &mut self,
        device: Arc<K::Device>,
        dirty: bool,
        near: Option<NodeId>,
        areas: &Areas,
    ) -> Result<ForReleased, AttachError> {
        let mut all = self.spaces.iter();
        let endpoint = EndpointId::from(&device);
        if all.any(|member| member.space.place_of(endpoint).is_some()) {
            return Err(AttachError::AlreadyAttached);
        }
        let place = self.place_for(near)?;
        let member = &mut self.spaces[place];
        let entered = member.space.enter(device, dirty, near, areas);
        if entered.is_ok() {
            member.near.push(near);
        }
        self.close_unused();
        entered
    }

    /// The space for a device at `near`: that of its node, or one in which no device is, or a new one.
    fn place_for(&mut self, near: Option<NodeId>) -> Result<usize, AttachError> {
        let Some(open) = &self.open else {
            return Ok(0);
        };
        let joins = |member: &Member<K>| self.placement.joins(member.node(), near);
        let mut all = self.spaces.iter();
        let found = all.position(|member| member.is_live() && joins(member));
        let unused = || self.spaces.iter().position(|member| !member.is_live());
        if let Some(place) = found.or_else(unused) {
            return Ok(place);
        }
        let opened = open().and_then(|mut mapper| {
            if !self.allowed.is_empty() {
                mapper.allow(&self.allowed)?;
            }
            Ok(mapper)
        });
        let mapper = opened.map_err(|error| attach_refused(K::PROFILE, error))?;
        let mut member = Member::new(mapper, self.granule);
        member.space.merging = self.merging;
        self.spaces.push(member);
        Ok(self.spaces.len() - 1)
    }

    /// Closes the containers in which nothing is any more, of those that were opened here.
    fn close_unused(&mut self) {
        if self.open.is_none() {
            return;
        }
        let carried = &mut self.carried;
        self.spaces.retain(|member| {
            let used = member.is_live() || member.space.pieces().next().is_some();
            if !used {
                carried.append(&member.space.carried);
            }
            used
        });
    }

    /// The only space; `None` of those that are opened as they are needed.
    fn only(&mut self) -> Option<&mut Member<K>> {
        match (&self.open, self.spaces.as_mut_slice()) {
            (None, [member]) => Some(member),
            _ => None,
        }
    }
}

/// Undoes what the journals of the spaces have noted, of the last one first.
fn undo<'a, K: Mapper>(
    spaces: impl Iterator<Item = &'a mut KernelSpace<K>>,
    journals: Vec<Journal>,
) {
    let noted: Vec<_> = spaces.zip(journals).collect();
    for (space, journal) in noted.into_iter().rev() {
        space.mapped.undo(journal);
    }
}

impl<K: Mapper> Kernel<K> {
    /// Containers have tables by node, yet memory is charged for each: so they lack
    /// [`Capability::NodeTables`], which is both.
    pub(super) fn capabilities(&self) -> Capabilities {
        let all = || self.spaces.iter().map(|member| &member.space);
        Capabilities {
            shares_pins: all().any(|space| space.mapper().shares().is_some()),
            page_dirty: all().next().is_some() && !all().any(|space| space.mapper().is_blind()),
            node_tables: K::NODE_TABLES,
            most_mappings: all().filter_map(|space| space.most).min(),
            ..KernelSpace::<K>::LEAST
        }
    }

    pub(super) fn granule(&self) -> u64 {
        let granules = self.spaces.iter().map(|member| member.space.info.granule);
        granules.max().unwrap_or(1)
    }

    pub(super) fn windows(&self) -> Vec<Span<Iova>> {
        let whole: Vec<Span<Iova>> = Aperture::zeros(64).spans().collect();
        let all = self.spaces.iter();
        all.fold(whole, |windows, member| {
            within(&windows, &member.space.windows)
        })
    }

    pub(super) fn check(&self, iova: u64, len: u64) -> Result<Span<Iova>, MapError> {
        let wanted = Span::checked(iova, len).ok_or(MapError::BeyondEnd { start: iova })?;
        let mut all = self.spaces.iter();
        match all.find_map(|member| outside(&member.space.windows, wanted)) {
            Some(reserved) => Err(MapError::Reserved { wanted, reserved }),
            None => Ok(wanted),
        }
    }

    pub(super) fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        for place in 0..self.spaces.len() {
            if let Err(cause) = self.spaces[place].space.allow(ranges) {
                for member in &mut self.spaces[..place] {
                    // It was so before.
                    let _ = member.space.mapped.mapper.allow(&self.allowed);
                }
                return Err(cause);
            }
        }
        self.allowed = ranges.to_vec();
        Ok(())
    }

    pub(super) fn map(
        &mut self,
        area: &HeldArea,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let stretch = KernelSpace::<K>::mappable(area)?;
        let mut journals: Vec<_> = self.live().map(|_| Journal::default()).collect();
        if journals.is_empty() {
            return Ok(());
        }
        let mut spaces: Vec<_> = self.live().zip(&mut journals).collect();
        let mapped = map_stretch(&mut spaces, &stretch, observer);
        if mapped.is_err() {
            undo(self.live(), journals);
        }
        mapped
    }

    /// All spaces are asked before the first changes. What has to be mapped again since a later one
    /// has failed was missing for a moment.
    pub(super) fn empty(
        &mut self,
        Extent { first, last }: Extent,
        interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), UnmapError> {
        let all = || self.spaces.iter();
        let plans = all().map(|member| member.space.plan_to_empty(first, last, interruption));
        let plans = plans.collect::<Result<Vec<_>, _>>()?;
        let mut journals: Vec<_> = plans.iter().map(|_| Journal::default()).collect();
        let mut steps = self.spaces.iter_mut().zip(&plans).zip(&mut journals);
        let emptied = steps
            .try_for_each(|((member, plan), journal)| member.space.empty_planned(plan, journal));
        if let Err(cause) = emptied {
            undo(
                self.spaces.iter_mut().map(|member| &mut member.space),
                journals,
            );
            return Err(cause);
        }
        self.carried.take_between(first, last, note);
        for ((member, plan), journal) in self.spaces.iter_mut().zip(&plans).zip(journals) {
            member.space.emptied(plan, journal, &mut *note);
        }
        Ok(())
    }

    pub(super) fn is_live(&self) -> bool {
        self.spaces.iter().any(Member::is_live)
    }

    /// Once for each container that has devices, or is to have the first.
    pub(super) fn times_charged(&self) -> Option<u64> {
        if self.capabilities().shares_pins {
            return None;
        }
        let live = self.spaces.iter().filter(|member| member.is_live());
        Some((live.count() as u64).max(1))
    }

    /// The charge kept for `area` goes to its mapping, which is charged anew.
    pub(super) fn map_again(
        &mut self,
        area: &mut HeldArea,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let kept = area.reserved.take().is_some();
        let mapped = self.map(area, observer);
        if mapped.is_err() && kept {
            let _ = area.reserve(self.times_charged());
        }
        mapped
    }

    pub(super) fn cut(&mut self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        let mut all = self.spaces.iter_mut();
        all.try_for_each(|member| member.space.cut(at, interruption))
    }

    pub(super) fn track(&mut self, tracking: Tracking) -> Result<(), TrackingError> {
        if tracking.leaf.is_some() {
            let cause = KernelSpace::<K>::unsupported(Capability::TablePlacement);
            return Err(TrackingError::Unsupported(cause));
        }
        self.carried.clear();
        let mut all = self.spaces.iter_mut();
        let tracked = all.try_for_each(|member| member.space.track());
        tracked.inspect_err(|_| self.untrack())
    }

    pub(super) fn untrack(&mut self) {
        self.carried.clear();
        let all = self.spaces.iter_mut();
        all.for_each(|member| member.space.untrack());
    }

    /// A page is dirty if it is dirty in one of them.
    pub(super) fn harvest(
        &mut self,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        let mut found = self.carried.take(span, &mut |run| pending.mark(run));
        for member in &mut self.spaces {
            let here = member.space.harvest(pending)?;
            found.bytes += here.bytes;
            found.blind |= here.blind;
        }
        Ok(found)
    }

    pub(super) fn is_blind(&self) -> bool {
        self.spaces.iter().any(|member| member.space.is_blind())
    }

    /// All spaces are left, also after one whose devices cannot be detached.
    pub(super) fn leave(&mut self) -> Result<(), DetachError> {
        let mut left = Ok(());
        for member in &mut self.spaces {
            let here = member.space.leave();
            if here.is_ok() {
                member.near.clear();
            }
            left = left.and(here);
        }
        self.close_unused();
        left
    }

    /// Charges kept for released areas are kept for a new container too.
    pub(super) fn attach(
        &mut self,
        endpoint: Endpoint,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let near = endpoint.near;
        let charged = self.enter(device::<K>(endpoint)?, dirty, near, areas)?;
        areas.keep(charged);
        Ok(())
    }

    pub(super) fn detach(
        &mut self,
        endpoint: EndpointId,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), DetachError> {
        let mut all = self.spaces.iter_mut();
        let found = all.find_map(|member| Some((member.space.place_of(endpoint)?, member)));
        let (place, Member { space, near }) = found.ok_or(DetachError::Unknown)?;
        space.detach(endpoint, dirty)?;
        near.remove(place);
        self.close_unused();
        areas.keep_only(match self.is_live() {
            // With shared pins nothing is kept for one area alone.
            true => self.times_charged().or(Some(1)),
            false => None,
        });
        Ok(())
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let all = self.spaces.iter().flat_map(|member| {
            let node = member.node();
            let places = member.space.places().into_iter();
            places.map(move |place| Place {
                node: place
                    .node
                    .or(node.filter(|_| self.open.is_some() || !K::NODE_TABLES)),
                ..place
            })
        });
        all.collect()
    }

    pub(super) fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        let unsupported = KernelSpace::<K>::unsupported;
        match placement {
            Placement::Near(_) => return Err(unsupported(Capability::TablePlacement)),
            Placement::PerNode if !K::NODE_TABLES && self.open.is_none() => {
                return Err(unsupported(Capability::NodeTables));
            }
            Placement::Shared | Placement::PerNode => self.placement = placement,
        }
        if K::NODE_TABLES {
            let all = self.spaces.iter_mut();
            all.for_each(|member| member.space.placement = placement);
        }
        Ok(())
    }

    pub(super) fn placement(&self) -> Placement {
        self.placement
    }

    pub(super) fn set_merging(&mut self, merging: Interruption) {
        self.merging = merging;
        let all = self.spaces.iter_mut();
        all.for_each(|member| member.space.merging = merging);
    }

    /// The error is that of the first container that does not tell.
    pub(super) fn refresh(&mut self) -> Result<(), KernelError> {
        let mut all = self.spaces.iter_mut();
        all.try_for_each(|member| member.space.learn())
    }

    pub(super) fn give_up(
        &mut self,
        tracked: bool,
        areas: &mut Areas,
    ) -> Result<Vec<Span<Iova>>, KernelError> {
        let member = self.only().ok_or(KernelError::NoSource)?;
        let pieces = member.space.give_up(tracked, areas)?;
        member.near.clear();
        Ok(pieces)
    }

    pub(super) fn take_over(
        &mut self,
        endpoints: Vec<Endpoint>,
        mappings: &[Span<Iova>],
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let near: Vec<_> = endpoints.iter().map(|endpoint| endpoint.near).collect();
        let devices = endpoints.into_iter().map(device::<K>);
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let backend = K::PROFILE.name();
        let member = self.only().ok_or(AttachError::Endpoint { backend })?;
        member.space.take_over(devices, mappings, areas)?;
        member.near = near;
        Ok(())
    }

    /// Mappings of each container, one after the other.
    pub(super) fn mappings(&self) -> Option<Vec<Span<Iova>>> {
        let all = self.spaces.iter();
        Some(all.flat_map(|member| member.space.pieces()).collect())
    }

    pub(super) fn page_sizes(&self) -> Option<PageSizes> {
        let all = self.spaces.iter();
        let sizes = all.filter_map(|member| member.space.info.page_sizes);
        sizes.reduce(|all, here| PageSizes::from_bits(all.bits() & here.bits()))
    }
}

/// The kernel's device or group that an endpoint is.
fn device<K: Mapper>(endpoint: Endpoint) -> Result<Arc<K::Device>, AttachError> {
    let backend = K::PROFILE.name();
    let refused = AttachError::Endpoint { backend };
    match endpoint.kind {
        EndpointKind::File(file) => file.downcast().map_err(|_| refused),
        EndpointKind::Device(..) => Err(refused),
    }
}
