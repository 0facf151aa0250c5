//! The configuration of a unit, and why it may be refused.

use crate::error::UnitSetupError;
use crate::unit::NodeId;

/// What the registers do not say. ACPI's IORT table does, or a device tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The highest StreamID of a device behind the unit (IORT, ID mappings). The stream table ends there,
    /// or where the unit's StreamIDs do.
    pub last_device: u32,
    /// Bits of PASIDs to be served, at most 20; 0 for none. Each device that is attached through stage 1
    /// takes a page for its context descriptors, and a table of 8 bytes for each 64 of them beside it.
    pub pasid_bits: u32,
    /// The system in front of the unit passes translation requests and invalidations on (IORT, root
    /// complex node: ATS Attribute).
    pub device_tlbs: bool,
    /// The memory node, if it is known.
    pub node: Option<NodeId>,
}

impl Default for Config {
    /// 65,536 devices, no PASIDs, no device TLBs, no node.
    fn default() -> Self {
        Self {
            last_device: 0xffff,
            pasid_bits: 0,
            device_tlbs: false,
            node: None,
        }
    }
}

/// Why a unit cannot be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers.
    #[error("no SMMUv3 answers: IDR0 {idr0:#x}")]
    NoUnit {
        /// SMMU_IDR0.
        idr0: u32,
    },
    /// The unit walks no AArch64 tables in this processor's byte order, with a granule and a stage that are
    /// known.
    #[error("the unit walks no known tables: IDR0 {idr0:#x}, IDR5 {idr5:#x}")]
    Formats {
        /// SMMU_IDR0.
        idr0: u32,
        /// SMMU_IDR5.
        idr5: u32,
    },
    /// All faults of devices stall, until software has answered each (SMMU_IDR0.STALL_MODEL).
    #[error("all faults stall: IDR0 {idr0:#x}")]
    StallsAlways {
        /// SMMU_IDR0.
        idr0: u32,
    },
    /// The unit has tables or queues of its own, or no room for a command and a CMD_SYNC
    /// (SMMU_IDR1: TABLES_PRESET, QUEUES_PRESET, CMDQS).
    #[error("tables or queues cannot be set up: IDR1 {idr1:#x}")]
    Queues {
        /// SMMU_IDR1.
        idr1: u32,
    },
    /// The driver's own memory, or what it was to take over.
    #[error(transparent)]
    Setup(#[from] UnitSetupError),
}
