//! The configuration of a unit.

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

/// Parameters that are not in the registers. Firmware has them: ACPI's IORT (node "SMMUv1 or SMMUv2") or the device
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
