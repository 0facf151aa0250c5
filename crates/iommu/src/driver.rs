//! What drivers of hardware have beyond the seam of all units.

use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::unit::Unit;

/// A unit of hardware.
pub trait Driver: Unit {
    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again.
    fn enable(&self) -> Result<(), UnitError>;

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name.
    fn disable(&self) -> Result<(), UnitError>;

    /// What the unit was told so far.
    fn counters(&self) -> CommandCounters;
}
