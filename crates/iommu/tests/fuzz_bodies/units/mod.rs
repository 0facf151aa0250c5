//! How a good unit of each kind answers, and what makes a bad one of it.

/// Common part of drivers with structures in memory.
macro_rules! over_memory {
    () => {
        fn new(
            unit: Unit<Self::Model>,
            memory: Arc<HeapTables>,
            config: Self::Config,
        ) -> Option<Self> {
            Self::new(unit, memory, config).ok()
        }

        fn tear_down(self) -> Result<(), iommu::UnitError> {
            self.tear_down().map(|_| ())
        }

        fn freeze(self, each: &mut dyn FnMut(iommu::UnitMemory)) -> Result<iommu::Frozen, Self> {
            let frozen = self.freeze(each);
            frozen
                .map(|(frozen, ..)| frozen)
                .map_err(|(driver, _)| driver)
        }

        fn adopt(
            unit: Unit<Self::Model>,
            memory: Arc<HeapTables>,
            config: Self::Config,
            frozen: &iommu::Frozen,
            _tables: &[(iommu::DomainId, iopt::Root)],
        ) -> Option<Self> {
            Self::adopt(unit, memory, config, frozen).ok()
        }
    };
}

pub(super) mod amdvi;
pub(super) mod riscv;
pub(super) mod smmu;
pub(super) mod smmuv3;
pub(super) mod vtd;
