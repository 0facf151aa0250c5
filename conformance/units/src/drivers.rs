//! The drivers of the units.

use iommu::{
    AmdVi, Driver, Vtd, amdvi,
    vtd::{self, Mode},
};
use qtest::pci::{self, Config, Window};

use crate::{Rig, qemu::Unit};

impl Unit {
    /// Where the registers are. Those of a PCI function are placed in the window.
    pub(crate) fn registers(
        self,
        _config: &Config<'_>,
        _window: &mut Window,
    ) -> Result<u64, pci::Error> {
        Ok(match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => 0xfed9_0000,
            Self::AmdVi => 0xfed8_0000,
        })
    }
}

impl Rig {
    /// The unit's driver, which has not changed the unit yet.
    pub fn driver(&self) -> anyhow::Result<Box<dyn Driver + '_>> {
        let (registers, memory) = (self.registers(), self.structures());
        let vtd = |mode| vtd::Config {
            mode,
            ..vtd::Config::default()
        };
        Ok(match self.unit() {
            Unit::VtdLegacy => Box::new(Vtd::new(registers, memory, vtd(Mode::Legacy))?),
            Unit::VtdSecond => Box::new(Vtd::new(registers, memory, vtd(Mode::ScalableSecond))?),
            Unit::VtdFirst => Box::new(Vtd::new(registers, memory, vtd(Mode::ScalableFirst))?),
            Unit::AmdVi => Box::new(AmdVi::new(registers, memory, amdvi::Config::default())?),
        })
    }
}
