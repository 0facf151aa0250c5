//! The configuration of a unit, and why it may be refused.

use crate::error::UnitSetupError;
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

/// What the registers do not say.
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

/// Why a unit cannot be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers.
    #[error("no VT-d unit answers: version {version:#x}, capabilities {cap:#x}")]
    NoUnit {
        /// The version register.
        version: u32,
        /// The capability register.
        cap: u64,
    },
    /// The unit does not offer the mode, or no table that is known.
    #[error("the unit does not offer {mode:?}: capabilities {cap:#x}, extended {ecap:#x}")]
    Mode {
        /// The mode.
        mode: Mode,
        /// The capability register.
        cap: u64,
        /// The extended capability register.
        ecap: u64,
    },
    /// The unit takes no PASIDs of so many bits in this mode (Extended Capability Register, PASID and PSS).
    #[error("PASIDs of {asked} bits, but the unit supports {offered}")]
    Pasids {
        /// The bits asked for.
        asked: u32,
        /// The most that there can be.
        offered: u32,
    },
    /// The driver's own memory, or what it was to take over.
    #[error(transparent)]
    Setup(#[from] UnitSetupError),
}
