//! The configuration of a unit.

use crate::unit::NodeId;

/// Parameters that are not in the registers.
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
