//! Error numbers that the kernel's interfaces give for our errors.
//!
//! Every back end returns the same named errors. This is the reverse: the number that [`Profile::Type1`] or
//! [`Profile::Iommufd`] would return in Linux 7.2. (The back ends turn numbers into named errors, since they know their
//! requests.)

use iopt::RangeError;

use crate::errno::{Errno, Profile};
use crate::memory::object::PinFailed;
use crate::space::error::{AttachError, MapError, UnmapError};

impl MapError {
    /// Error number of the kernel; `None` where it has no such case.
    pub fn errno(&self, profile: Profile) -> Option<Errno> {
        Some(match self {
            Self::Range(RangeError::OutsideAperture { len: None, .. }) => Errno::EOVERFLOW,
            Self::Range(_)
            | Self::Part { .. }
            | Self::Reserved { .. }
            | Self::Prot { .. }
            | Self::Allowed { .. } => Errno::EINVAL,
            Self::BeyondEnd { .. } => Errno::EOVERFLOW,
            Self::Overlap { .. } => Errno::EEXIST,
            Self::NoRoom { .. } => Errno::ENOSPC,
            Self::TooMany { .. } => match profile {
                Profile::Type1 => Errno::ENOSPC,
                Profile::Iommufd => Errno::ENOMEM,
            },
            Self::OverLimit(_) | Self::NoMemory { .. } => Errno::ENOMEM,
            Self::Table(iopt::TableMapError::NoTables(_)) => Errno::ENOMEM,
            Self::Pin(PinFailed::Refused(_)) => Errno::EFAULT,
            Self::Interrupted | Self::Pin(PinFailed::Interrupted) => Errno::EINTR,
            Self::Revoked { .. } => Errno::ENODEV,
            Self::Table(_) => Errno::EINVAL,
            _ => return None,
        })
    }
}

impl UnmapError {
    /// Error number of the kernel; `None` where it has no such case.
    pub fn errno(&self, profile: Profile) -> Option<Errno> {
        Some(match (self, profile) {
            (Self::CutsArea { .. } | Self::CutsMapping { .. }, Profile::Type1) => Errno::EINVAL,
            (Self::CutsArea { .. } | Self::CutsMapping { .. }, Profile::Iommufd) => Errno::ENOENT,
            (Self::Hole { .. }, _) => Errno::ENOENT,
            // The older interface gives up with a broken container.
            (Self::Held { .. }, Profile::Type1) => Errno::EBUSY,
            (Self::Held { .. }, Profile::Iommufd) => Errno::EDEADLOCK,
            (Self::BeyondEnd { .. }, _) => Errno::EOVERFLOW,
            _ => return None,
        })
    }
}

impl AttachError {
    /// Error number of the kernel; `None` where it has no such case.
    pub fn errno(&self, profile: Profile) -> Option<Errno> {
        Some(match (self, profile) {
            (Self::Reserved { .. } | Self::Conflict(_), Profile::Type1) => Errno::EINVAL,
            (Self::Reserved { .. } | Self::Conflict(_), Profile::Iommufd) => Errno::EADDRINUSE,
            (Self::AlreadyAttached, Profile::Type1) => Errno::EINVAL,
            (Self::AlreadyAttached, Profile::Iommufd) => Errno::EBUSY,
            (Self::Unit(iommu::UnitAttachError::AlreadyAttached { .. }), Profile::Type1) => {
                Errno::EINVAL
            }
            (Self::Busy(_), _) => Errno::EBUSY,
            (Self::Replay { cause, .. }, profile) => return cause.errno(profile),
            _ => return None,
        })
    }
}
