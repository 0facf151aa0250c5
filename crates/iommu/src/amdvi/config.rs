//! The configuration of a unit.

use crate::unit::NodeId;

/// Which tables a unit walks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Host tables, [`FormatId::AmdV1`](iopt::FormatId::AmdV1).
    #[default]
    Host,
    /// Guest tables of 4 levels, [`FormatId::X86_64`](iopt::FormatId::X86_64), also for requests without a
    /// PASID (GIoV). The unit must be able to invalidate all at once.
    Guest,
}

/// Parameters that are not in registers. ACPI's IVRS table and the unit's PCI capability block have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The mode.
    pub mode: Mode,
    /// The PCI segment of the devices (IVRS, IVHD block: PCI Segment Group).
    pub segment: u16,
    /// The highest requester id, without the segment, of a device behind the unit (IVRS, IVHD device
    /// entries). The device table ends there, after 32 bytes for each device from 0 on; its size is a
    /// power of two of 4 KiB to 2 MiB.
    pub last_device: u16,
    /// Bits of host addresses (IVRS, IVinfo: PASize), at most 52.
    pub host_bits: u32,
    /// Bits of device addresses (IVRS, IVinfo: VASize).
    pub input_bits: u32,
    /// The unit remembers entries that were not present (Capability Header, NpCache: emulated units).
    pub caches_not_present: bool,
    /// The unit answers translation requests of devices (Capability Header, IotlbSup).
    pub device_tlbs: bool,
    /// Bits of a PASID (1 to 20), with guest tables. 0: requests with a PASID fault.
    pub pasid_bits: u32,
    /// The memory node, if it is known.
    pub node: Option<NodeId>,
}

impl Default for Config {
    /// Host tables, segment 0, all 65,536 devices, 48 bits of host addresses, 64 of device addresses, nothing cached
    /// that is not present, no TLBs in devices, no PASIDs, no node.
    fn default() -> Self {
        Self {
            mode: Mode::Host,
            segment: 0,
            last_device: u16::MAX,
            host_bits: 48,
            input_bits: 64,
            caches_not_present: false,
            device_tlbs: false,
            pasid_bits: 0,
            node: None,
        }
    }
}

impl Config {
    /// Returns the values that a successor must share, for a description's first word.
    pub(super) const fn describe(&self) -> u64 {
        (self.mode as u64) << 40 | (self.pasid_bits as u64 & 0xff) << 48
    }
}
