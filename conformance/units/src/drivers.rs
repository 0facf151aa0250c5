//! The drivers of the units.

use iommu::{
    AmdVi, Driver, Frozen, Registers, RiscvIommu, SmmuV3, UnitError, UnitMemory, Vtd, amdvi, riscv,
    smmuv3,
    vtd::{self, Mode},
};
use iopt::TableMemory;
use qtest::pci::{self, Address, Config, Window};

use crate::{Rig, qemu::Unit};

/// A driver that can let go of its unit.
pub(crate) trait Live: Driver {
    /// Lets go of it; see [`iommu::UnitMemory`].
    fn freeze(self: Box<Self>, each: &mut dyn FnMut(UnitMemory)) -> Result<Frozen, UnitError>;
}

macro_rules! live {
    ($($driver:ident)*) => {
        $(
            impl<R, M> Live for $driver<R, M>
            where
                R: Registers + Send + Sync,
                M: TableMemory + Send + Sync,
            {
                fn freeze(self: Box<Self>, each: &mut dyn FnMut(UnitMemory)) -> Result<Frozen, UnitError> {
                    let frozen = $driver::freeze(*self, each);
                    frozen.map(|(frozen, ..)| frozen).map_err(|(_, cause)| cause)
                }
            }
        )*
    };
}

live! { Vtd AmdVi SmmuV3 RiscvIommu }

/// Where a unit that is a PCI function is.
const FUNCTION: Address = Address::new(0, 1, 0);

impl Unit {
    /// Where the registers are. Those of a PCI function are placed in the window.
    pub(crate) fn registers(
        self,
        config: &Config<'_>,
        window: &mut Window,
    ) -> Result<u64, pci::Error> {
        Ok(match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => 0xfed9_0000,
            Self::AmdVi => 0xfed8_0000,
            Self::SmmuFirst | Self::SmmuSecond | Self::SmmuBoth => 0x0905_0000,
            Self::Riscv | Self::RiscvBase => {
                let bars = config.assign(FUNCTION, window)?;
                config.enable(FUNCTION)?;
                bars.first().map_or(0, |bar| bar.address)
            }
        })
    }
}

impl Rig {
    /// The unit's driver over registers, and over memory for structures. It begins anew, and has not
    /// changed the unit yet; or it takes over what is frozen.
    pub(crate) fn driver<'r>(
        &self,
        registers: impl Registers + Send + Sync + 'r,
        memory: impl TableMemory + Send + Sync + 'r,
        frozen: Option<&Frozen>,
    ) -> anyhow::Result<Box<dyn Live + 'r>> {
        let vtd = |mode| vtd::Config {
            mode,
            ..vtd::Config::default()
        };
        let vtd = match self.unit() {
            Unit::VtdLegacy => vtd(Mode::Legacy),
            Unit::VtdSecond => vtd(Mode::ScalableSecond),
            Unit::VtdFirst => vtd(Mode::ScalableFirst),
            Unit::AmdVi => {
                let config = amdvi::Config::default();
                return Ok(Box::new(match frozen {
                    None => AmdVi::new(registers, memory, config)?,
                    Some(frozen) => AmdVi::adopt(registers, memory, config, frozen)?,
                }));
            }
            Unit::SmmuFirst | Unit::SmmuSecond | Unit::SmmuBoth => {
                let config = smmuv3::Config::default();
                return Ok(Box::new(match frozen {
                    None => SmmuV3::new(registers, memory, config)?,
                    Some(frozen) => SmmuV3::adopt(registers, memory, config, frozen)?,
                }));
            }
            Unit::Riscv | Unit::RiscvBase => {
                let config = riscv::Config::default();
                return Ok(Box::new(match frozen {
                    None => RiscvIommu::new(registers, memory, config)?,
                    Some(frozen) => RiscvIommu::adopt(registers, memory, config, frozen)?,
                }));
            }
        };
        Ok(Box::new(match frozen {
            None => Vtd::new(registers, memory, vtd)?,
            Some(frozen) => Vtd::adopt(registers, memory, vtd, frozen)?,
        }))
    }
}
