//! What only an address space over tables of ours has: domains, units and their devices.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use iommu::{DeviceId, DomainId, NodeId, Unit};
use iopt::{AnyTable, Leaf, TableMemory};

use super::domain::Member;
use super::{BuildDomain, Own};
use crate::error::{AttachError, DetachError};
use crate::placement::Placement;
use crate::space::Ioas;

/// A domain, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainPlace {
    /// Its number.
    pub domain: DomainId,
    /// The node of its devices: of the first of which one is known, by its unit or by who attached it.
    /// It follows from who is attached, so it may change when a device leaves.
    pub node: Option<NodeId>,
    /// Where its tables were asked to lie; `None`: anywhere.
    pub tables: Option<NodeId>,
    /// Its devices.
    pub devices: Vec<DeviceId>,
}

impl<M: TableMemory> Ioas<Own<M>> {
    /// An empty address space over `table`, which is empty and which units know as `domain`. It is
    /// the only domain, and mapped and pinned also while no device is attached.
    pub fn new(domain: DomainId, table: AnyTable<M>) -> Self {
        Self::over(Own::new(Some((domain, table)), None))
    }

    /// An empty address space without a domain. The first device brings one, which `builder` builds,
    /// and every device that no domain suits another one. Until then areas are only noted.
    pub fn with_builder(builder: impl BuildDomain<M> + 'static) -> Self {
        Self::over(Own::new(None, Some(Box::new(builder))))
    }

    /// The domains: number, page table and devices of each.
    pub fn domains(&self) -> impl Iterator<Item = (DomainId, &AnyTable<M>)> {
        let domains = self.backend.domains.iter();
        domains.map(|domain| (domain.id, &domain.table))
    }

    /// Where the tables of new domains lie from now on, and who shares one. Domains that are there stay
    /// as they are.
    pub fn set_placement(&mut self, placement: Placement) {
        self.backend.placement = placement;
    }

    /// Where the tables of new domains lie.
    pub fn placement(&self) -> Placement {
        self.backend.placement
    }

    /// Each domain with its node and devices.
    pub fn places(&self) -> impl Iterator<Item = DomainPlace> + '_ {
        self.backend.domains.iter().map(|domain| DomainPlace {
            domain: domain.id,
            node: domain.node(),
            tables: domain.tables_on,
            devices: domain
                .devices
                .0
                .iter()
                .map(|member| member.device)
                .collect(),
        })
    }

    /// The page table of the first domain, if there is one.
    pub fn table(&self) -> Option<&AnyTable<M>> {
        self.backend.domains.first().map(|domain| &domain.table)
    }

    /// The leaf that maps `iova`, in the first domain.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.table()?.leaf_at(iova)
    }

    /// The attached devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.backend.devices()
    }

    /// Lets `device` of `unit` see this address space: in a domain that suits the unit, or in a new
    /// one, in which all areas are mapped first.
    ///
    /// While memory is [retired](Self::retired), the device may come to see that too, as those
    /// that are attached already.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach(&mut self, unit: Arc<dyn Unit>, device: DeviceId) -> Result<(), AttachError> {
        self.attach_near(unit, device, None)
    }

    /// [`attach`](Self::attach) of a device that is at the memory node `near`, which counts if its
    /// unit does not know a node.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach_near(
        &mut self,
        unit: Arc<dyn Unit>,
        device: DeviceId,
        near: Option<NodeId>,
    ) -> Result<(), AttachError> {
        let dirty = self.tracking.is_some();
        let member = Member { unit, device, near };
        self.backend.attach(member, dirty, &mut self.areas)
    }

    /// Takes this address space away from `device`; if several units have a device of that name, from
    /// that of the first domain. Areas stay, pinned for as long as there is a domain: when
    /// the device comes back, it finds them.
    ///
    /// # Errors
    ///
    /// See [`DetachError`].
    pub fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        let dirty = self.tracking.is_some();
        self.backend
            .detach(device, dirty, &mut self.areas, &mut self.retired)
    }
}
