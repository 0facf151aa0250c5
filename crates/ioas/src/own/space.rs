//! What only an address space over tables of ours has: domains, units and their devices.

use alloc::boxed::Box;
use alloc::sync::Arc;

use iommu::{DeviceId, DomainId, Unit};
use iopt::{AnyTable, Leaf, TableMemory};

use super::{BuildDomain, Own};
use crate::error::{AttachError, DetachError};
use crate::space::Ioas;

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
        let dirty = self.tracking.is_some();
        self.backend.attach(unit, device, dirty, &mut self.areas)
    }

    /// Takes this address space away from `device`; if several units have a device of that name, from
    /// that of the first domain. Areas stay, pinned for as long as there is a domain: when
    /// the device comes back, it finds them.
    ///
    /// # Errors
    ///
    /// See [`DetachError`].
    pub fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        self.backend
            .detach(device, &mut self.areas, &mut self.retired)
    }
}
