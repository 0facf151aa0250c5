//! Parts of an address space over tables of ours: domains and their page tables.

use alloc::boxed::Box;
use alloc::vec::Vec;

use iommu::DomainId;
use iopt::{AnyTable, Leaf};

use super::{BuildDomain, Own};
use crate::space::open::{IoasOptions, OpenError};
use crate::space::{Core, Ioas};

impl IoasOptions {
    /// An address space over page tables that `builder` builds: see [`Ioas::over_tables`].
    ///
    /// # Errors
    ///
    /// [`OpenError::Unsupported`].
    pub fn over_tables(self, builder: impl BuildDomain + 'static) -> Result<Ioas, OpenError> {
        self.set_up(Ioas::over_tables(builder))
    }
}

impl Ioas {
    /// An empty address space over `table`, which is empty and which units know as `domain`. It is
    /// the only domain, and mapped and pinned also while no device is attached.
    pub fn over_table(domain: DomainId, table: AnyTable) -> Self {
        Self::over_own(Some((domain, table)), None)
    }

    /// An empty address space without a domain. The first device brings one, which `builder` builds,
    /// and every device that no domain suits another one. Until then areas are only noted.
    pub fn over_tables(builder: impl BuildDomain + 'static) -> Self {
        Self::over_own(None, Some(alloc::boxed::Box::new(builder)))
    }

    pub(crate) fn over_own(
        domain: Option<(DomainId, AnyTable)>,
        builder: Option<Box<dyn BuildDomain>>,
    ) -> Self {
        Self::over_backend(Own::new(domain, builder))
    }

    /// Results of `work` for number and page table of each domain, in order: nothing over a kernel, which keeps its
    /// tables to itself.
    pub fn tables<T>(&self, mut work: impl FnMut(DomainId, &AnyTable) -> T) -> Vec<T> {
        let core = self.gate.read();
        let domains = core.own_ref().map_or(&[][..], |own| own.domains.as_slice());
        let each = domains.iter().map(|domain| work(domain.id, &domain.table));
        each.collect()
    }

    /// Result of `work` for the page table of the first domain, if there is one.
    pub fn with_table<T>(&self, work: impl FnOnce(&AnyTable) -> T) -> Option<T> {
        let core = self.gate.read();
        let first = core.own_ref()?.domains.first()?;
        Some(work(&first.table))
    }

    /// The physical address behind `iova`, in the first domain.
    pub fn translate(&self, iova: u64) -> Option<u64> {
        self.with_table(|table| table.translate(iova))?
    }

    /// The leaf that maps `iova`, in the first domain.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.with_table(|table| table.leaf_at(iova))?
    }
}

impl Core {
    /// The back end, if tables are ours.
    pub(super) fn own(&mut self) -> Option<&mut Own> {
        self.backend.as_any_mut().downcast_mut()
    }

    pub(super) fn own_ref(&self) -> Option<&Own> {
        self.backend.as_any().downcast_ref()
    }
}
