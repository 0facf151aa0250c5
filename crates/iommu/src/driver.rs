//! What drivers of hardware have beyond the seam of all units.

use iopt::TableMemory;

use crate::amdvi::AmdVi;
use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::registers::Registers;
use crate::riscv::RiscvIommu;
use crate::smmu::Smmu;
use crate::smmuv3::SmmuV3;
use crate::unit::Unit;
use crate::vtd::Vtd;

/// A unit of hardware.
pub trait Driver: Unit {
    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again.
    fn enable(&self) -> Result<(), UnitError>;

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name.
    fn disable(&self) -> Result<(), UnitError>;

    /// What the unit was told so far.
    fn counters(&self) -> CommandCounters;
}

/// What each driver has as its own methods, which need neither the trait nor its bounds.
macro_rules! forward {
    ($($driver:ident<R $(, $memory:ident)?>)*) => {
        $(
            impl<R: Registers + Send + Sync $(, $memory: TableMemory + Send + Sync)?> Driver
                for $driver<R $(, $memory)?>
            {
                fn enable(&self) -> Result<(), UnitError> {
                    self.enable()
                }

                fn disable(&self) -> Result<(), UnitError> {
                    self.disable()
                }

                fn counters(&self) -> CommandCounters {
                    self.counters()
                }
            }
        )*
    };
}

forward! { Vtd<R, M> AmdVi<R, M> SmmuV3<R, M> RiscvIommu<R, M> Smmu<R> }
