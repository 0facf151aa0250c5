//! What the back end over several containers promises to an address space, and what only such an
//! address space has.

use std::sync::Arc;
use std::vec::Vec;

use iommu::{FlushError, NodeId};
use iopt::{Aperture, Interruption, Invalidation, Pending};
use runs::Span;

use super::ByNode;
use crate::area::Area;
use crate::areas::Areas;
use crate::backend::{Backend, Capabilities, Unsupported};
use crate::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::error::{AttachError, DetachError, MapError, UnmapError};
use crate::kernel::backend::Kernel;
use crate::kernel::error::KernelError;
use crate::kernel::mapped::Journal;
use crate::kernel::mapper::Mapper;
use crate::kernel::space::{inside, map_again};
use crate::observer::Observer;
use crate::placement::Placement;
use crate::retired::Retired;
use crate::space::Ioas;
use crate::windows::within;

impl<K: Mapper> Backend for ByNode<K> {
    /// Tables are by node, yet memory is charged for each: so that this lacks
    /// [`Capability::NodeTables`](crate::Capability::NodeTables), which is both.
    fn capabilities(&self) -> Capabilities {
        let all = || self.containers.iter().map(|member| &member.kernel);
        Capabilities {
            page_dirty: all().next().is_some() && !all().any(|kernel| kernel.mapper().is_blind()),
            most_mappings: all().filter_map(|kernel| kernel.most).min(),
            ..Kernel::<K>::LEAST
        }
    }

    fn granule(&self) -> u64 {
        let granules = self.containers.iter().map(|member| member.kernel.granule());
        granules.max().unwrap_or(1)
    }

    fn windows(&self) -> Vec<Span> {
        let whole: Vec<Span> = Aperture::zeros(64).spans().collect();
        self.containers.iter().fold(whole, |windows, member| {
            within(&windows, &member.kernel.windows)
        })
    }

    fn check(&self, iova: u64, len: u64) -> Result<Span, MapError> {
        inside(&self.windows(), iova, len)
    }

    fn allow(&mut self, ranges: &[Span]) -> Result<(), MapError> {
        for place in 0..self.containers.len() {
            let kernel = &mut self.containers[place].kernel;
            if let Err(cause) = kernel.allow(ranges) {
                for member in &mut self.containers[..place] {
                    // It was so before.
                    let _ = member.kernel.mapped.mapper.allow(&self.allowed);
                }
                return Err(cause);
            }
        }
        self.allowed = ranges.to_vec();
        Ok(())
    }

    fn map(
        &mut self,
        area: &mut Area,
        _retired: &mut Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let stretch = Kernel::<K>::mappable(area)?;
        self.map_stretch(&stretch, observer)
    }

    /// All containers are asked before the first changes. What has to be mapped again since a later one
    /// has failed was missing for a moment.
    fn empty(
        &mut self,
        _areas: &Areas,
        first: u64,
        last: u64,
        interruption: Interruption,
        note: &mut dyn FnMut(Span),
    ) -> Result<(), UnmapError> {
        let plan = |kernel: &mut Kernel<K>| kernel.plan_to_empty(first, last, interruption);
        let plans = self.live().map(plan).collect::<Result<Vec<_>, _>>()?;
        let mut journals: Vec<_> = plans.iter().map(|_| Journal::default()).collect();
        let mut steps = self.live().zip(&plans).zip(&mut journals);
        let emptied =
            steps.try_for_each(|((kernel, plan), journal)| kernel.empty_planned(plan, journal));
        drop(steps);
        if let Err(cause) = emptied {
            self.undo(journals);
            return Err(cause);
        }
        self.carried.take_between(first, last, note);
        for ((kernel, plan), journal) in self.live().zip(&plans).zip(journals) {
            kernel.emptied(plan, journal, &mut *note);
        }
        Ok(())
    }

    fn is_live(&self) -> bool {
        self.containers.iter().any(|member| member.is_live())
    }

    fn times_charged(&self) -> Option<u64> {
        let live = self.containers.iter().filter(|member| member.is_live());
        Some((live.count() as u64).max(1))
    }

    fn map_again(
        &mut self,
        area: &mut Area,
        retired: &mut Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        map_again(self, area, retired, observer)
    }

    fn cut(&mut self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        let mut all = self.containers.iter_mut();
        all.try_for_each(|member| member.kernel.cut(at, interruption))
    }

    fn track(&mut self, tracking: Tracking) -> Result<(), TrackingError> {
        self.carried.clear();
        let mut all = self.containers.iter_mut();
        let tracked = all.try_for_each(|member| member.kernel.track(tracking));
        tracked.inspect_err(|_| self.untrack())
    }

    fn untrack(&mut self) {
        self.carried.clear();
        let all = self.containers.iter_mut();
        all.for_each(|member| member.kernel.untrack());
    }

    /// What is dirty in one of them is dirty.
    fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &mut self,
        areas: &Areas,
        pending: &mut Pending<W>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        let mut found = self.carried.take(span, &mut |run| pending.mark(run));
        for member in &mut self.containers {
            let here = member.kernel.harvest(areas, pending)?;
            found.bytes += here.bytes;
            found.blind |= here.blind;
        }
        Ok(found)
    }

    /// Reading dirty bits has flushed already.
    fn show(&mut self, _what: &Invalidation) -> Result<(), FlushError> {
        Ok(())
    }

    fn is_blind(&self) -> bool {
        self.containers
            .iter()
            .any(|member| member.kernel.is_blind())
    }

    /// Of all of them, also behind one that stays.
    fn leave(&mut self, areas: &mut Areas, retired: &mut Retired) -> Result<(), DetachError> {
        let mut left = Ok(());
        for member in &mut self.containers {
            let here = member.kernel.leave(areas, retired);
            if here.is_ok() {
                member.near.clear();
            }
            left = left.and(here);
        }
        self.close_unused();
        left
    }
}

impl<K: Mapper> Ioas<ByNode<K>> {
    /// An empty address space over containers, of which there is none before the first group. Until
    /// then, areas are only noted.
    pub fn over_containers(backend: ByNode<K>) -> Self {
        Self::over(backend)
    }

    /// Which groups share a container from now on; those that are there stay where they are. In the
    /// beginning it is [`Placement::PerNode`]. With [`Placement::Shared`] there is one container, as in an
    /// address space [over one](Self::over_kernel).
    ///
    /// # Errors
    ///
    /// [`Capability::TablePlacement`](crate::Capability::TablePlacement) for [`Placement::Near`], as the
    /// kernel makes tables on the node of the device that they are for.
    pub fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        self.backend.set_placement(placement)
    }

    /// Which groups share a container.
    pub const fn placement(&self) -> Placement {
        self.backend.placement
    }

    /// Says whether mappings may be merged when a container has no entries left; see
    /// [`Ioas::set_merging`](Ioas::<Kernel<K>>::set_merging).
    pub fn set_merging(&mut self, merging: Interruption) {
        self.backend.set_merging(merging);
    }

    /// Lets `group`, which is at the memory node `near`, see this address space: in the container of
    /// that node, or in a new one, in which all areas are mapped, pinned and charged once more, all or
    /// nothing. Its devices must not be opened before this has returned.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach_near(
        &mut self,
        group: Arc<K::Device>,
        near: Option<NodeId>,
    ) -> Result<(), AttachError> {
        let dirty = self.tracking.is_some();
        // What is kept for released areas is kept for a new container too.
        let charged = self.backend.enter(group, dirty, near, &self.areas)?;
        self.areas.keep(charged);
        Ok(())
    }

    /// Takes this address space away from `group`. The last one of a container closes that, which
    /// unmaps and unpins everything there, and gives its charge back.
    ///
    /// # Errors
    ///
    /// See [`DetachError`]; a kernel does not detach a group of which a device is open.
    pub fn detach(&mut self, group: &Arc<K::Device>) -> Result<(), DetachError> {
        self.backend.let_go(group, self.tracking.is_some())?;
        let live = self.backend.is_live();
        let times = self.backend.times_charged().filter(|_| live);
        self.areas.keep_only(times);
        Ok(())
    }

    /// Learns again what can be mapped, which attaching and detaching do by themselves; see
    /// [`Ioas::refresh`](Ioas::<Kernel<K>>::refresh).
    ///
    /// # Errors
    ///
    /// That of the first container that does not tell. What was known of it stays known.
    pub fn refresh(&mut self) -> Result<(), KernelError> {
        let mut all = self.backend.containers.iter_mut();
        all.try_for_each(|member| member.kernel.refresh())
    }
}
