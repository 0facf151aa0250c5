//! Why permissions were not changed.

use runs::{Iova, Run, Span};

use super::{BrokenPlan, RangeError};
use crate::format::FormatId;
use crate::prot::Prot;

/// Why no permission was changed. The table's bytes are what they were, but for what hardware sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtectError {
    /// The range is not well formed.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The range begins or ends inside a large leaf.
    #[error("{range} cuts the leaf {leaf}")]
    InsideLeaf {
        /// The range.
        range: Span<Iova>,
        /// The leaf that would have to be split.
        leaf: Run,
    },
    /// Part of the range is not mapped.
    #[error("{range} is not wholly mapped: nothing at {at:#x}")]
    Hole {
        /// The range.
        range: Span<Iova>,
        /// The first address that is not mapped.
        at: u64,
    },
    /// The format cannot express these permissions.
    #[error("{format} cannot express the permissions {prot}")]
    Prot {
        /// The permissions asked for.
        prot: Prot,
        /// The format.
        format: FormatId,
    },
    /// A leaf's memory attributes are others than those asked for. They cannot be changed while a
    /// unit may use the leaf: unmap, flush, and map anew.
    #[error(
        "the leaf {leaf} is mapped as {found}: its memory attributes cannot become those of {wanted} in place"
    )]
    Attributes {
        /// The permissions and attributes that were asked for.
        wanted: Prot,
        /// The first leaf that has other attributes.
        leaf: Run,
        /// The permissions and attributes that it has.
        found: Prot,
    },
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}
