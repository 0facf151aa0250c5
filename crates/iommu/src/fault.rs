//! Faults as named records.

use core::fmt;

use iopt::walk::{Access, WalkFault};

use crate::target::BadTarget;
use crate::unit::{DeviceId, DomainId, Pasid};

/// An access that a unit blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Who asked.
    pub device: DeviceId,
    /// The PASID that the request carried, if it did and the unit says so.
    pub pasid: Option<Pasid>,
    /// The device's domain at that time, if it had one.
    pub domain: Option<DomainId>,
    /// The first address that could not be reached.
    pub iova: u64,
    /// What was asked for.
    pub access: Access,
    /// Why it was blocked.
    pub reason: FaultReason,
}

/// Why an access was blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultReason {
    /// The device is not attached.
    NotAttached,
    /// The table does not allow it.
    Walk(WalkFault),
    /// The table leads to an address at which there is no memory.
    Target(BadTarget),
    /// The address is not a multiple of 8.
    Misaligned,
    /// The access would go on beyond the end of the 64-bit address space.
    WrapsAround {
        /// Its length in bytes.
        len: u64,
    },
    /// A unit of hardware says why; `iova` is the address of the page.
    Reported {
        /// The unit's code.
        code: u16,
        /// What its specification says about it.
        meaning: &'static str,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            pasid,
            domain,
            iova,
            access,
            reason,
        } = self;
        write!(f, "{device}")?;
        if let Some(pasid) = pasid {
            write!(f, " PASID {pasid}")?;
        }
        match domain {
            Some(domain) => write!(f, " (domain {domain}): ")?,
            None => write!(f, ": ")?,
        }
        match reason {
            FaultReason::Walk(fault) => fault.fmt(f),
            FaultReason::NotAttached => write!(f, "{access} of {iova:#x}: not attached"),
            FaultReason::Target(bad) => write!(f, "{access} of {iova:#x}: {bad}"),
            FaultReason::Misaligned => {
                write!(f, "{access} of {iova:#x}: not a multiple of 8 bytes")
            }
            FaultReason::Reported { code, meaning } => {
                write!(f, "{access} of {iova:#x}: {meaning} (reason {code:#x})")
            }
            FaultReason::WrapsAround { len } => {
                write!(
                    f,
                    "{access} of {iova:#x}: {len:#x} bytes go beyond the last address"
                )
            }
        }
    }
}

impl core::error::Error for Fault {}
