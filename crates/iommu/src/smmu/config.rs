//! The configuration of a unit, and why it may be refused.

use crate::handover::UnitAdoptError;
use crate::unit::NodeId;

/// The version of the architecture. Registers do not say it: IDR7 is the version of the
/// implementation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// SMMUv1: MMU-400, MMU-401.
    V1,
    /// SMMUv2: MMU-500 and later.
    #[default]
    V2,
}

/// What the registers do not say. Firmware does: ACPI's IORT (node "SMMUv1 or SMMUv2") or the device
/// tree (`arm,smmu`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// The version (IORT: Model; device tree: `compatible`).
    pub version: Version,
    /// Bits of a stream id that are not compared (device tree: `stream-match-mask`): streams that
    /// differ in nothing else are one device. Only units that match streams can do that. Faults name
    /// devices without these bits.
    pub ignored: u16,
    /// The memory node, if it is known.
    pub node: Option<NodeId>,
}

/// Why a unit cannot be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers.
    #[error("no SMMU answers: IDR0 {idr0:#x}, IDR1 {idr1:#x}")]
    NoUnit {
        /// IDR0.
        idr0: u32,
        /// IDR1.
        idr1: u32,
    },
    /// The unit has no room for a single device.
    #[error("the SMMU has {streams} stream mapping registers and {banks} context banks")]
    NoRoom {
        /// Stream mapping registers.
        streams: usize,
        /// Context banks.
        banks: usize,
    },
    /// The unit walks no table that is known.
    #[error("the SMMU walks no known tables: IDR0 {idr0:#x}, IDR2 {idr2:#x}")]
    Formats {
        /// IDR0.
        idr0: u32,
        /// IDR2.
        idr2: u32,
    },
    /// The unit cannot leave these bits of stream ids out.
    #[error("the SMMU cannot ignore the bits {ignored:#x} of stream ids, but {writable:#x}")]
    StreamMask {
        /// The bits asked for ([`Config::ignored`]).
        ignored: u16,
        /// Those that it can leave out.
        writable: u16,
    },
    /// All stream match registers are in use, so that none can be asked for its bits.
    #[error("all {streams} stream match registers are in use")]
    InUse {
        /// How many there are.
        streams: usize,
    },
    /// The unit is not the one that was frozen, or has stopped.
    #[error("{0}")]
    Adopt(UnitAdoptError),
}
