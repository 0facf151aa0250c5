//! The configuration of a unit.

use crate::unit::NodeId;

/// Parameters that are not in the registers. ACPI's IORT table or a device tree has them.
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
