//! What a unit is told at the start, and why it may be refused.

use core::fmt;

use iopt::NoTables;

use crate::handover::AdoptError;
use crate::unit::NodeId;

/// What the registers do not say. ACPI's IVRS table and the unit's PCI capability block do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
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
    /// The memory node, if it is known.
    pub node: Option<NodeId>,
}

impl Default for Config {
    /// Segment 0, all 65,536 devices, 48 bits of host addresses, 64 of device addresses, nothing cached
    /// that is not present, no TLBs in devices, no node.
    fn default() -> Self {
        Self {
            segment: 0,
            last_device: u16::MAX,
            host_bits: 48,
            input_bits: 64,
            caches_not_present: false,
            device_tlbs: false,
            node: None,
        }
    }
}

/// Why a unit cannot be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers.
    NoUnit {
        /// The Extended Feature Register.
        features: u64,
    },
    /// The unit walks no table that is known (Extended Feature Register, HATS = 3).
    Levels {
        /// The Extended Feature Register.
        features: u64,
    },
    /// There is no memory for device table, command buffer and event log. The device table is one
    /// piece.
    Memory(NoTables),
    /// The unit is not the one that was frozen, or has stopped.
    Adopt(AdoptError),
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoUnit { features } => {
                write!(f, "no AMD-Vi unit answers: features {features:#x}")
            }
            Self::Levels { features } => {
                write!(f, "the unit walks no known tables: features {features:#x}")
            }
            Self::Memory(cause) => cause.fmt(f),
            Self::Adopt(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for ProbeError {}
