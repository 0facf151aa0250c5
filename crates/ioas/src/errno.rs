//! The kernel's error numbers, and which of them its interfaces give for our errors.
//!
//! Every back end returns the same named errors. This is the way back: what
//! [`Profile::Type1`] or [`Profile::Iommufd`] would say in the kernel. (How a number becomes a named
//! error is the business of the back ends, which know what they have asked for.)
//!
//! Source of the numbers, those of most architectures: `include/uapi/asm-generic/errno-base.h` and
//! `errno.h`. What the interfaces answer is that of Linux 7.2.

use core::fmt;

use iopt::RangeError;

use crate::memory::object::PinFailed;
use crate::space::error::{AttachError, MapError, UnmapError};

/// Kernel interface whose error numbers are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// A container of VFIO's type 1, second version.
    Type1,
    /// An address space of iommufd.
    Iommufd,
}

impl Profile {
    /// The name of the back end over it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Type1 => "VFIO type1",
            Self::Iommufd => "iommufd",
        }
    }
}

/// An error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $number:literal: $doc:literal;)*) => {
        impl Errno {
            $(#[doc = $doc] pub const $name: Self = Self($number);)*

            /// Its name.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    EPERM = 1: "Not permitted.";
    ENOENT = 2: "Nothing is there.";
    EINTR = 4: "A signal came in between.";
    ENOMEM = 12: "No memory, or no more may be locked.";
    EFAULT = 14: "No such memory.";
    EBUSY = 16: "In use.";
    EEXIST = 17: "Something is there already.";
    ENODEV = 19: "No such device.";
    EINVAL = 22: "Not well formed.";
    ENOTTY = 25: "Not known to this file.";
    ENOSPC = 28: "No room.";
    EDEADLOCK = 35: "A holder did not let go.";
    EOVERFLOW = 75: "Beyond the largest number.";
    EOPNOTSUPP = 95: "Not supported.";
    EADDRINUSE = 98: "Overlaps a mapping.";
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "error {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

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
