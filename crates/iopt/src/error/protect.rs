//! Why permissions were not changed.

use core::fmt;

use runs::{Run, Span};

use super::{BrokenMemory, RangeError};
use crate::format::FormatId;
use crate::prot::Prot;

/// Why no permission was changed. The table's bytes are what they were, but for what hardware sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectError {
    /// The range is not well formed.
    Range(RangeError),
    /// The range begins or ends inside a large leaf.
    InsideLeaf {
        /// The range.
        range: Span,
        /// The leaf that would have to be split.
        leaf: Run,
    },
    /// Part of the range is not mapped.
    Hole {
        /// The range.
        range: Span,
        /// The first address that is not mapped.
        at: u64,
    },
    /// The format cannot express these permissions.
    Prot {
        /// What was asked for.
        prot: Prot,
        /// The format.
        format: FormatId,
    },
    /// A leaf's memory attributes are others than those asked for. They cannot be changed while a
    /// unit may use the leaf: unmap, flush, and map anew.
    Attributes {
        /// The permissions and attributes that were asked for.
        wanted: Prot,
        /// The first leaf that has other attributes.
        leaf: Run,
        /// The permissions and attributes that it has.
        found: Prot,
    },
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl fmt::Display for ProtectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(cause) => cause.fmt(f),
            Self::InsideLeaf { range, leaf } => write!(f, "{range} cuts the leaf {leaf}"),
            Self::Broken(cause) => cause.fmt(f),
            Self::Hole { range, at } => {
                write!(f, "{range} is not wholly mapped: nothing at {at:#x}")
            }
            Self::Prot { prot, format } => {
                write!(f, "{format} cannot express the permissions {prot}")
            }
            Self::Attributes {
                wanted,
                leaf,
                found,
            } => {
                write!(
                    f,
                    "the leaf {leaf} is mapped as {found}: its memory attributes cannot become \
                     those of {wanted} in place"
                )
            }
        }
    }
}

impl core::error::Error for ProtectError {}

impl From<RangeError> for ProtectError {
    fn from(cause: RangeError) -> Self {
        Self::Range(cause)
    }
}
