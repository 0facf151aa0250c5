//! One back end over several containers: one for the groups of each memory node.
//!
//! A container has one page table for all groups that can share it, on the node of the first. Who wants
//! a table for each node opens a container for each; this does so. Every operation goes to all of them,
//! in one order, noted in a [`Journal`](super::mapped::Journal) for each: when one fails, it is undone in
//! all.
//!
//! # What it costs
//!
//! Containers share no pins. Each pins what is mapped, and has it charged: the ledger is charged for all
//! of them in one step, before the first is asked. [`Ioas::forecast`](crate::Ioas::forecast) says so
//! before.
//!
//! # Which container
//!
//! [`Placement::joins`] decides by the node that is given with a group, which is never divided. The first
//! group of a node opens a container, and has all areas mapped there before it is attached for the caller;
//! the last one to leave closes it. The node of a container follows from its groups. One that is left
//! with mappings that the kernel did not unmap is the first to be used again.

mod space;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iommu::NodeId;
use iopt::Interruption;
use runs::Span;

use super::backend::{Kernel, charged};
use super::error::KernelError;
use super::mapped::Journal;
use super::mapper::Mapper;
use super::pieces::Stretch;
use super::refusals::attach_refused;
use crate::areas::Areas;
use crate::backend::{Capability, Unsupported};
use crate::error::{AttachError, DetachError, MapError};
use crate::observer::{Observer, Step};
use crate::own::Written;
use crate::placement::Placement;
use crate::reserved::ForReleased;

/// The back end over containers of a kernel, one for the groups of each memory node. See the module's
/// head in the sources, and [`vfio::Containers`](crate::vfio::Containers).
pub struct ByNode<K: Mapper> {
    open: Box<Open<K>>,
    /// Pieces end at its multiples, bytes: see [`Kernel::new`].
    granule: Option<u64>,
    containers: Vec<Member<K>>,
    placement: Placement,
    merging: Interruption,
    /// What must stay possible in containers to come.
    allowed: Vec<Span>,
    /// What devices of containers that are closed have written to, until it is harvested.
    carried: Written,
}

/// Opens a container, or what does its work.
type Open<K> = dyn Fn() -> Result<K, KernelError> + Send + Sync;

struct Member<K: Mapper> {
    kernel: Kernel<K>,
    /// The node of each of its devices.
    near: Vec<Option<NodeId>>,
}

/// A container, and the node that it is for.
pub struct NodeContainer<'a, K: Mapper> {
    /// The node of its groups; `None` when it is not known.
    pub node: Option<NodeId>,
    /// The container.
    pub container: &'a Kernel<K>,
}

impl<K: Mapper> Member<K> {
    /// That of the first of which one is known.
    fn node(&self) -> Option<NodeId> {
        self.near.iter().copied().flatten().next()
    }

    fn is_live(&self) -> bool {
        !self.kernel.devices.is_empty()
    }

    fn place_of(&self, device: &Arc<K::Device>) -> Option<usize> {
        let mut devices = self.kernel.devices.iter();
        devices.position(|other| Arc::ptr_eq(other, device))
    }
}

impl<K: Mapper> core::fmt::Debug for ByNode<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let nodes: Vec<_> = self.containers.iter().map(Member::node).collect();
        f.debug_struct("ByNode")
            .field("placement", &self.placement)
            .field("nodes", &nodes)
            .finish_non_exhaustive()
    }
}

impl<K: Mapper> ByNode<K> {
    /// A back end without containers: `open` opens each when its first group comes. See
    /// [`Kernel::new`] for `granule`.
    pub fn new(
        open: impl Fn() -> Result<K, KernelError> + Send + Sync + 'static,
        granule: Option<u64>,
    ) -> Self {
        Self {
            open: Box::new(open),
            granule,
            containers: Vec::new(),
            placement: Placement::PerNode,
            merging: Interruption::Refused,
            allowed: Vec::new(),
            carried: Written::default(),
        }
    }

    /// The containers that there are, in the order in which they were opened.
    pub fn containers(&self) -> impl Iterator<Item = NodeContainer<'_, K>> {
        self.containers.iter().map(|member| NodeContainer {
            node: member.node(),
            container: &member.kernel,
        })
    }

    fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        if let Placement::Near(_) = placement {
            return Err(Kernel::<K>::unsupported(Capability::TablePlacement));
        }
        self.placement = placement;
        Ok(())
    }

    fn set_merging(&mut self, merging: Interruption) {
        self.merging = merging;
        let kernels = self.containers.iter_mut();
        kernels.for_each(|member| member.kernel.set_merging(merging));
    }

    /// Those that have devices.
    fn live(&mut self) -> impl Iterator<Item = &mut Kernel<K>> {
        let all = self.containers.iter_mut();
        all.filter(|member| member.is_live())
            .map(|member| &mut member.kernel)
    }

    /// Lets a device into the container of its node. A new one maps all areas, and charges those that are
    /// released.
    fn enter(
        &mut self,
        device: Arc<K::Device>,
        dirty: bool,
        near: Option<NodeId>,
        areas: &Areas,
    ) -> Result<ForReleased, AttachError> {
        let mut all = self.containers.iter();
        if all.any(|member| member.place_of(&device).is_some()) {
            return Err(AttachError::AlreadyAttached);
        }
        let place = match self.place_for(near) {
            Some(place) => place,
            None => {
                let opened = self.opened();
                let new = opened.map_err(|error| attach_refused(K::PROFILE, error))?;
                self.containers.push(new);
                self.containers.len() - 1
            }
        };
        let member = &mut self.containers[place];
        let entered = member.kernel.enter(device, dirty, near, areas);
        if entered.is_ok() {
            member.near.push(near);
        }
        self.close_unused();
        entered
    }

    /// The container for a device at `near`: that of its node, or one in which nobody is.
    fn place_for(&self, near: Option<NodeId>) -> Option<usize> {
        let joins = |member: &Member<K>| self.placement.joins(member.node(), near);
        let mut all = self.containers.iter();
        let found = all.position(|member| member.is_live() && joins(member));
        found.or_else(|| self.containers.iter().position(|member| !member.is_live()))
    }

    /// A new container.
    fn opened(&mut self) -> Result<Member<K>, KernelError> {
        let mut mapper = (self.open)()?;
        if !self.allowed.is_empty() {
            mapper.allow(&self.allowed)?;
        }
        let mut kernel = Kernel::new(mapper, self.granule);
        kernel.set_merging(self.merging);
        let near = Vec::new();
        Ok(Member { kernel, near })
    }

    /// Lets a device go, and with the last one of a container that as well. With `dirty`, what it wrote
    /// to is carried until it is harvested.
    fn let_go(&mut self, device: &Arc<K::Device>, dirty: bool) -> Result<(), DetachError> {
        let mut all = self.containers.iter_mut();
        let found = all.find_map(|member| Some((member.place_of(device)?, member)));
        let (place, Member { kernel, near }) = found.ok_or(DetachError::Unknown)?;
        kernel.let_go(device, dirty)?;
        near.remove(place);
        self.close_unused();
        Ok(())
    }

    /// Closes the containers in which nothing is any more.
    fn close_unused(&mut self) {
        let carried = &mut self.carried;
        self.containers.retain(|member| {
            let used = member.is_live() || member.kernel.pieces().next().is_some();
            if !used {
                carried.append(&member.kernel.carried);
            }
            used
        });
    }

    /// Maps a stretch in all containers, part by part: charged for all of them in one step.
    fn map_stretch(
        &mut self,
        stretch: &Stretch,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let plans = self.live().map(|kernel| kernel.plan(stretch));
        let plans = plans.collect::<Result<Vec<_>, _>>()?;
        let Some(plan) = plans.first() else {
            return Ok(());
        };
        let once: u64 = plan.iter().map(|(part, _)| part.charge()).sum();
        let bytes = once.saturating_mul(plans.len() as u64);
        let mut charge = charged(stretch.memory.ledger(), bytes, observer)?;
        let mut journals: Vec<_> = plans.iter().map(|_| Journal::default()).collect();
        let mut done = 0;
        let mapped = plan.iter().try_for_each(|(part, _)| {
            for (kernel, journal) in self.live().zip(&mut journals) {
                kernel.map_part(part, None, &mut charge, journal, observer)?;
            }
            done += part.range.len;
            match observer.progress(Step::FillTables, done).is_break() {
                true => Err(MapError::Interrupted),
                false => Ok(()),
            }
        });
        if mapped.is_err() {
            self.undo(journals);
        }
        mapped
    }

    /// Undoes what the journals of the live containers have noted, of the last one first.
    fn undo(&mut self, journals: Vec<Journal>) {
        let noted: Vec<_> = self.live().zip(journals).collect();
        for (kernel, journal) in noted.into_iter().rev() {
            kernel.mapped.undo(journal);
        }
    }
}
