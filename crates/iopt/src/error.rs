//! Why an operation was refused. Every error names the cause with its numbers.

mod dirty;
mod plan;
mod protect;

use core::fmt;

use runs::{Iova, Pa, PageSizes, Run, Span};

use crate::format::{Aperture, FormatId};
use crate::prot::Prot;

pub use dirty::DirtyError;
pub use plan::BrokenPlan;
pub use protect::ProtectError;

/// Too little table memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table memory: needs {needed} bytes, {available} bytes are left")]
pub struct NoTables {
    /// Bytes of table memory that the operation needs.
    pub needed: u64,
    /// Bytes that are left.
    pub available: u64,
}

/// Why a table could not be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The format has no table of so many levels.
    #[error("{format} has no tables of {levels} levels")]
    Levels {
        /// The format.
        format: FormatId,
        /// The number that was asked for.
        levels: u8,
    },
    /// None of the page sizes asked for is one of the format's.
    #[error("page sizes {wanted} asked for, {offered} offered")]
    PageSizes {
        /// The sizes that were asked for.
        wanted: PageSizes,
        /// The sizes that the format has.
        offered: PageSizes,
    },
    /// A setting of the format is not within what the format has.
    #[error("{format}: {what} {value} is not within {min} to {max}")]
    Setting {
        /// The format.
        format: FormatId,
        /// Which setting, in words.
        what: &'static str,
        /// The value asked for.
        value: u64,
        /// The least value.
        min: u64,
        /// The greatest value.
        max: u64,
    },
    /// [`AnyTable`](crate::AnyTable) builds no table of the format with this configuration.
    #[error("no table of {0} is built with this configuration")]
    NotAny(FormatId),
    /// The table memory has entries of another width, or tables that are too small.
    #[error("{format} has tables of {} bytes with entries of {}; the memory has {} and {}", wanted.1, wanted.0, offered.1, offered.0)]
    TableMemory {
        /// The format.
        format: FormatId,
        /// Bytes of the format's entries, and of its tables.
        wanted: (usize, u64),
        /// Bytes of the memory's entries, and of its tables.
        offered: (usize, u64),
    },
    /// Tables may lie at addresses that an entry cannot hold.
    #[error("table memory ends at {last:#x}, beyond {bits} bits")]
    TableAddress {
        /// The last address of the table memory.
        last: u64,
        /// Bits of an address in an entry.
        bits: u32,
    },
    /// There is no memory for the root, or for the tables above it.
    #[error(transparent)]
    NoTables(#[from] NoTables),
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}

/// Error of a range, found before any table is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The range, or one of the runs, has no bytes.
    #[error("the range has no bytes")]
    Empty,
    /// An address or a length is not a multiple of the smallest page.
    #[error("{value:#x} is not a multiple of the smallest page, {granule:#x} bytes")]
    Misaligned {
        /// The address or length in bytes.
        value: u64,
        /// The smallest page in bytes.
        granule: u64,
    },
    /// The range lies, at least partly, where the table translates nothing.
    #[error(fmt = outside)]
    OutsideAperture {
        /// First address of the range.
        iova: u64,
        /// Its length in bytes; `None` when it ends beyond 2^64.
        len: Option<u64>,
        /// The addresses that the table translates.
        aperture: Aperture,
    },
}

fn outside(
    iova: &u64,
    len: &Option<u64>,
    aperture: &Aperture,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    match len {
        Some(len) => write!(f, "{iova:#x}+{len:#x} is outside {aperture}"),
        None => write!(
            f,
            "the range from {iova:#x} ends beyond 2^64, outside {aperture}"
        ),
    }
}

/// Why nothing was mapped. The table's bytes are what they were, unless the
/// [plan did not hold](BrokenPlan).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableMapError {
    /// The range or a run is not well formed.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Something is mapped there already.
    #[error("{wanted} overlaps what is mapped: {found}")]
    Overlap {
        /// The range that was to be mapped.
        wanted: Span<Iova>,
        /// The first leaf that is in the way.
        found: Run,
    },
    /// A run reaches beyond the addresses that an entry can hold.
    #[error("physical memory {output} is beyond {bits} bits")]
    OutputTooWide {
        /// The run in physical memory.
        output: Span<Pa>,
        /// Bits of an output address.
        bits: u32,
    },
    /// The format cannot express these permissions.
    #[error("{format} cannot express the permissions {prot}")]
    Prot {
        /// The permissions asked for.
        prot: Prot,
        /// The format.
        format: FormatId,
    },
    /// The table has no leaves of this size.
    #[error(transparent)]
    PageSize(PageSizeError),
    /// The tables for it cannot be had.
    #[error(transparent)]
    NoTables(#[from] NoTables),
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}

/// A table has no leaves of the size that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no leaves of {size:#x} bytes; there are {offered}")]
pub struct PageSizeError {
    /// The size in bytes.
    pub size: u64,
    /// The sizes that it has.
    pub offered: PageSizes,
}

/// Why leaves were not split, cut or merged. Translations are what they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError<E> {
    /// The range is not well formed.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The table has no leaves of this size.
    #[error(transparent)]
    PageSize(PageSizeError),
    /// There would be a moment without a translation, which the caller has not allowed: the format
    /// asks for break-before-make. Nothing was changed.
    #[error("{leaf} cannot change its size without a moment in which it is not mapped")]
    BreakBeforeMake {
        /// The first leaf, old or new, that would change.
        leaf: Run,
    },
    /// A leaf was not made by this format as it is configured. Nothing was changed.
    #[error("{leaf} with {prot} is no leaf that this table can write")]
    Foreign {
        /// The leaf.
        leaf: Run,
        /// Its permissions, as far as they are known.
        prot: Prot,
    },
    /// The tables for it cannot be had. Nothing was changed.
    #[error(transparent)]
    NoTables(NoTables),
    /// The flush failed, for the reason given.
    #[error("the flush failed: {0}")]
    Flush(E),
    /// The leaves at the ends were cut, but the range was not unmapped.
    #[error(transparent)]
    Unmap(TableUnmapError),
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}

#[cfg(feature = "alloc")]
impl<E> ResizeError<E> {
    /// Returns every error but a failed flush.
    pub(crate) fn but_for_flush<T>(self) -> Option<ResizeError<T>> {
        Some(match self {
            Self::Flush(_) => return None,
            Self::Range(cause) => ResizeError::Range(cause),
            Self::PageSize(cause) => ResizeError::PageSize(cause),
            Self::BreakBeforeMake { leaf } => ResizeError::BreakBeforeMake { leaf },
            Self::Foreign { leaf, prot } => ResizeError::Foreign { leaf, prot },
            Self::NoTables(cause) => ResizeError::NoTables(cause),
            Self::Unmap(cause) => ResizeError::Unmap(cause),
            Self::Broken(cause) => ResizeError::Broken(cause),
        })
    }
}

/// Why nothing was unmapped. The table's bytes are what they were, unless the
/// [plan did not hold](BrokenPlan).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableUnmapError {
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
    /// The table has no leaves of this size.
    #[error(transparent)]
    PageSize(PageSizeError),
    /// A leaf is of another size than was said.
    #[error("the leaf {leaf} is not of {size:#x} bytes")]
    OtherSize {
        /// The size that was said, bytes.
        size: u64,
        /// The leaf.
        leaf: Run,
    },
    /// Dirty tracking is on, and the sink does not take dirty state: it would be lost.
    #[error("dirty tracking is on: what the device has written to must be taken along")]
    DirtyWanted,
    /// The sink wants dirty state, and the units that walk this table keep none.
    #[error("{format}: no dirty state is kept")]
    DirtyNotKept {
        /// The format.
        format: FormatId,
    },
    /// The operation does not find what it was planned with.
    #[error(transparent)]
    Broken(#[from] BrokenPlan),
}
