//! Why dirty state could not be had.

use runs::{Iova, Run, Span};

use super::{BrokenPlan, RangeError};
use crate::format::FormatId;

/// Why a dirty-tracking operation did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirtyError {
    /// The units that walk this table do not note what they have written to: the format has no
    /// dirty bit, or was not configured to have one.
    #[error("{format}: no dirty state is kept")]
    NotKept {
        /// The format.
        format: FormatId,
    },
    /// Dirty tracking is off: unmaps do not keep what they find, so a harvest would not be
    /// complete.
    #[error("dirty tracking is off")]
    NotTracked,
    /// The range is not well formed.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The bitmap does not stand for all of the range.
    #[error("{range} is not within the bitmap's {pending}")]
    OutsidePending {
        /// The range.
        range: Span<Iova>,
        /// The range of the bitmap.
        pending: Span<Iova>,
    },
    /// The range begins or ends inside a large leaf, whose dirty bit is one for all of it.
    #[error("{range} cuts the leaf {leaf}")]
    InsideLeaf {
        /// The range.
        range: Span<Iova>,
        /// The leaf.
        leaf: Run,
    },
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}
