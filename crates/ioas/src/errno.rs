//! The kernel's error numbers, and the interfaces that give them.
//!
//! Source of the numbers, those of most architectures: `include/uapi/asm-generic/errno-base.h` and
//! `errno.h`.

use core::fmt;

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
