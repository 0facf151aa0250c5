//! What all drivers' tests share.

/// What a test names.
pub(crate) mod prelude {
    pub(crate) use iopt::{Chain, Invalidation, Root};
    pub(crate) use runs::Span;

    pub(crate) use crate::capabilities::Capabilities;
    pub(crate) use crate::commands::CommandCounters;
    pub(crate) use crate::error::{AttachError, FlushError, UnitError};
    pub(crate) use crate::fault::Fault;
    pub(crate) use crate::handover::Held;
    pub(crate) use crate::registers::Registers;
    pub(crate) use crate::unit::{DeviceId, DeviceTlb, DomainId, Pasid, Unit};
}
