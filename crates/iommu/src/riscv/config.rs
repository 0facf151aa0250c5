//! The configuration of a unit, and why it may be refused.

use crate::error::UnitSetupError;
use crate::unit::NodeId;

/// What the registers do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bits of the ids of devices behind the unit, at most 24: with more than 16 they begin with a segment
    /// of 8 bits. The directory gets as few levels as hold them and as the unit takes.
    pub device_bits: u32,
    /// Bits of the PASIDs that devices will use; 0 for none. More than the unit offers are not had. With
    /// any, each device with first-stage tables gets a process directory: a page at least; and what is attached
    /// without a PASID is there for requests with PASID 0 too, since the unit does not tell them apart (section
    /// "Process to translate an IOVA"). With none, requests with any PASID are blocked.
    pub pasid_bits: u32,
    /// The memory node, if it is known.
    pub node: Option<NodeId>,
}

impl Default for Config {
    /// 16 bits of devices, no PASIDs, no node.
    fn default() -> Self {
        Self {
            device_bits: 16,
            pasid_bits: 0,
            node: None,
        }
    }
}

/// Why a unit cannot be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// Nothing answers at these registers, or a unit of another major version of the specification.
    #[error("no RISC-V IOMMU of version 1 answers: capabilities {capabilities:#x}")]
    NoUnit {
        /// The register `capabilities`.
        capabilities: u64,
    },
    /// The unit walks no table that is known: none of Sv39 to Sv57, none of Sv39x4 to Sv57x4.
    #[error("the unit walks no known tables: capabilities {capabilities:#x}")]
    Tables {
        /// The register `capabilities`.
        capabilities: u64,
    },
    /// The unit reads memory in big-endian order only.
    #[error("the unit reads memory in big-endian order only: capabilities {capabilities:#x}")]
    BigEndian {
        /// The register `capabilities`.
        capabilities: u64,
    },
    /// The driver's own memory, or what it was to take over.
    #[error(transparent)]
    Setup(#[from] UnitSetupError),
}
