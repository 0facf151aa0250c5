//! Processor time of a start, with its error.

use serde::Serialize;

/// Processor time of a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Faulting in and zeroing.
    pub fault_ns: u64,
    /// Pinning, and writing leaves; `None` where this library may not pin.
    pub pin_map_ns: Option<u64>,
    /// The sum of what is known.
    pub total_ns: u64,
    /// The error of the sum, in both directions.
    pub error_ns: u64,
}
