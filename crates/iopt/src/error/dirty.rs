//! Why dirty state could not be had.

use core::fmt;

use runs::{Run, Span};

use super::{BrokenMemory, RangeError};
use crate::format::FormatId;

/// Why a dirty-tracking operation did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyError {
    /// The units that walk this table do not note what they have written to: the format has no
    /// dirty bit, or was not configured to have one.
    NotKept {
        /// The format.
        format: FormatId,
    },
    /// Dirty tracking is off: unmaps do not keep what they find, so a harvest would not be
    /// complete.
    NotTracked,
    /// The range is not well formed.
    Range(RangeError),
    /// The bitmap does not stand for all of the range.
    OutsidePending {
        /// The range.
        range: Span,
        /// What the bitmap stands for.
        pending: Span,
    },
    /// The range begins or ends inside a large leaf, whose dirty bit is one for all of it.
    InsideLeaf {
        /// The range.
        range: Span,
        /// The leaf.
        leaf: Run,
    },
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl fmt::Display for DirtyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotKept { format } => write!(f, "{format}: no dirty state is kept"),
            Self::NotTracked => f.write_str("dirty tracking is off"),
            Self::Range(cause) => cause.fmt(f),
            Self::OutsidePending { range, pending } => {
                write!(f, "{range} is not within the bitmap's {pending}")
            }
            Self::InsideLeaf { range, leaf } => write!(f, "{range} cuts the leaf {leaf}"),
            Self::Broken(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for DirtyError {}

impl From<RangeError> for DirtyError {
    fn from(cause: RangeError) -> Self {
        Self::Range(cause)
    }
}
