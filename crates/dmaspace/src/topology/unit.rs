//! Address of a unit, as its driver knows it.

use std::fmt;
use std::path::Path;

use iommu::NodeId;
use serde::Serialize;

use super::Topology;
use super::check::is_address;

/// Place of an IOMMU unit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnitAddress {
    /// The physical address of its registers.
    Registers(u64),
    /// It is a PCI function: domain, bus, device and function, `0000:00:00.2`.
    Function(String),
}

impl UnitAddress {
    /// PCI segment, and bus, device and function in 16 bits; `None` for a unit that is none, and beyond
    /// 65,536 segments, which no table names.
    pub(super) fn function(&self) -> Option<(u16, u16)> {
        let Self::Function(address) = self else {
            return None;
        };
        let (segment, rest) = address.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let number = |text| u16::from_str_radix(text, 16).ok();
        let (bus, device, function) = (number(bus)?, number(device)?, number(function)?);
        let whole = bus << 8 | (device & 0x1f) << 3 | (function & 7);
        Some((number(segment)?, whole))
    }

    /// Address of a unit as sysfs shows it: VT-d the address of its registers, AMD-Vi the PCI function, Arm the
    /// registers in the name (`smmu3.0x0000000009050000`), RISC-V its device (`riscv-iommu@0000:00:01.0`, or
    /// `riscv-iommu@3010000.iommu` with a device tree).
    pub(super) fn shown(unit: &Path, name: &str) -> Option<Self> {
        let registers = |digits: &str| u64::from_str_radix(digits, 16).ok().map(Self::Registers);
        if let Some(digits) = super::sysfs::text(&unit.join("intel-iommu/address")) {
            return registers(&digits);
        }
        let device = std::fs::read_link(unit.join("device")).ok();
        let device = device.and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
        let after = name.split_once('@').map(|(_, device)| device.to_owned());
        let function = device.into_iter().chain(after.clone());
        if let Some(address) = function.into_iter().find(|name| is_address(name)) {
            return Some(Self::Function(address));
        }
        match (name.split_once(".0x"), after) {
            (Some((_, digits)), _) => registers(digits),
            (None, Some(after)) => registers(after.split('.').next().unwrap_or_default()),
            (None, None) => None,
        }
    }
}

/// `registers at 0xfed90000`, `PCI function 0000:00:00.2`.
impl fmt::Display for UnitAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registers(at) => write!(f, "registers at {at:#x}"),
            Self::Function(address) => write!(f, "PCI function {address}"),
        }
    }
}

impl Topology {
    /// The node of the unit at `unit`, to be passed to its driver (`node` of [`iommu::vtd::Config`],
    /// [`iommu::amdvi::Config`], [`iommu::smmuv3::Config`], [`iommu::smmu::Config`], [`iommu::riscv::Config`]), which
    /// then returns it ([`iommu::Unit::node`]). A driver knows registers, and no nodes. `None` when not known.
    pub fn unit_node(&self, unit: &UnitAddress) -> Option<NodeId> {
        let mut units = self.units().iter();
        let found = units.find(|known| known.at.as_ref() == Some(unit))?;
        found.node.map(NodeId)
    }
}
