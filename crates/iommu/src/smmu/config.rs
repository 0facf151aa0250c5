//! What a unit is told at the start, and why it may be refused.

use core::fmt;

use crate::handover::AdoptError;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers.
    NoUnit {
        /// IDR0.
        idr0: u32,
        /// IDR1.
        idr1: u32,
    },
    /// The unit has no room for a single device.
    NoRoom {
        /// Stream mapping registers.
        streams: usize,
        /// Context banks.
        banks: usize,
    },
    /// The unit walks no table that is known.
    Formats {
        /// IDR0.
        idr0: u32,
        /// IDR2.
        idr2: u32,
    },
    /// The unit cannot leave these bits of stream ids out.
    StreamMask {
        /// The bits asked for ([`Config::ignored`]).
        ignored: u16,
        /// Those that it can leave out.
        writable: u16,
    },
    /// Somebody uses all stream match registers, so that none can be asked for its bits.
    InUse {
        /// How many there are.
        streams: usize,
    },
    /// The unit is not the one that was frozen, or has stopped.
    Adopt(AdoptError),
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoUnit { idr0, idr1 } => {
                write!(f, "no SMMU answers: IDR0 {idr0:#x}, IDR1 {idr1:#x}")
            }
            Self::NoRoom { streams, banks } => write!(
                f,
                "the SMMU has {streams} stream mapping registers and {banks} context banks"
            ),
            Self::Formats { idr0, idr2 } => write!(
                f,
                "the SMMU walks no known tables: IDR0 {idr0:#x}, IDR2 {idr2:#x}"
            ),
            Self::StreamMask { ignored, writable } => write!(
                f,
                "the SMMU cannot ignore the bits {ignored:#x} of stream ids, but {writable:#x}"
            ),
            Self::InUse { streams } => {
                write!(f, "all {streams} stream match registers are in use")
            }
            Self::Adopt(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for ProbeError {}
