//! The configuration of a unit.

use crate::unit::NodeId;

/// How a unit works, and so which tables it walks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Legacy mode: second-stage tables, [`FormatId::VtdSs`](iopt::FormatId::VtdSs).
    #[default]
    Legacy,
    /// Scalable mode with second-stage tables, [`FormatId::VtdSs`](iopt::FormatId::VtdSs).
    ScalableSecond,
    /// Scalable mode with first-stage tables, [`FormatId::X86_64`](iopt::FormatId::X86_64): the unit sets accessed and dirty
    /// bits.
    ScalableFirst,
}

impl Mode {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Legacy => "legacy mode",
            Self::ScalableSecond => "scalable mode with second-stage tables",
            Self::ScalableFirst => "scalable mode with first-stage tables",
        }
    }
}

/// Parameters that are not in the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The mode.
    pub mode: Mode,
    /// The PCI segment of the devices (DMAR table, DRHD structure: Segment Number).
    pub segment: u16,
    /// Bits of host addresses (DMAR table: Host Address Width + 1), at most 52.
    pub host_bits: u32,
    /// Bits of a PASID (1 to 20), in scalable mode: each device's PASID directory has room for all of
    /// them, 4 KiB up to 15 bits and twice as much for each bit more. 0: requests with a PASID fault.
    pub pasid_bits: u32,
    /// The memory node (DMAR table, RHSA structure), if it is known.
    pub node: Option<NodeId>,
}

impl Default for Config {
    /// Legacy mode, segment 0, 48 bits, no PASIDs, no node.
    fn default() -> Self {
        Self {
            mode: Mode::Legacy,
            segment: 0,
            host_bits: 48,
            pasid_bits: 0,
            node: None,
        }
    }
}
