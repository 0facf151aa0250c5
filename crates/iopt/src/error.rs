//! Why an operation was refused. Every error names the cause with its numbers.

mod broken;
mod dirty;
mod protect;

use core::fmt;

use runs::{PageSizes, Run, Span};

use crate::format::{Aperture, FormatId};
use crate::prot::Prot;

pub use broken::BrokenMemory;
pub use dirty::DirtyError;
pub use protect::ProtectError;

/// Too little table memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTables {
    /// Bytes of table memory that the operation needs.
    pub needed: u64,
    /// Bytes that are left.
    pub available: u64,
}

impl fmt::Display for NoTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "table memory: needs {} bytes, {} bytes are left",
            self.needed, self.available
        )
    }
}

impl core::error::Error for NoTables {}

/// Why a table could not be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildError {
    /// The format has no table of so many levels.
    Levels {
        /// The format.
        format: FormatId,
        /// The number that was asked for.
        levels: u8,
    },
    /// None of the page sizes asked for is one of the format's.
    PageSizes {
        /// The sizes that were asked for.
        wanted: PageSizes,
        /// The sizes that the format has.
        offered: PageSizes,
    },
    /// A setting of the format is not within what the format has.
    Setting {
        /// The format.
        format: FormatId,
        /// Which setting, in words.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The least value.
        min: u64,
        /// The greatest value.
        max: u64,
    },
    /// [`AnyTable`](crate::AnyTable) builds no table of the format with this configuration.
    NotAny(FormatId),
    /// The table memory has entries of another width, or tables that are too small.
    TableMemory {
        /// The format.
        format: FormatId,
        /// Bytes of the format's entries, and of its tables.
        wanted: (usize, u64),
        /// Bytes of the memory's entries, and of its tables.
        offered: (usize, u64),
    },
    /// Tables may lie at addresses that an entry cannot hold.
    TableAddress {
        /// The last address of the table memory.
        last: u64,
        /// Bits of an address in an entry.
        bits: u32,
    },
    /// There is no memory for the root, or for the tables above it.
    NoTables(NoTables),
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Levels { format, levels } => {
                write!(f, "{format} has no tables of {levels} levels")
            }
            Self::PageSizes { wanted, offered } => {
                write!(f, "page sizes {wanted} asked for, {offered} offered")
            }
            Self::Setting {
                format,
                what,
                value,
                min,
                max,
            } => {
                write!(f, "{format}: {what} {value} is not within {min} to {max}")
            }
            Self::NotAny(format) => {
                write!(f, "no table of {format} is built with this configuration")
            }
            Self::TableMemory {
                format,
                wanted,
                offered,
            } => write!(
                f,
                "{format} has tables of {} bytes with entries of {}; the memory has {} and {}",
                wanted.1, wanted.0, offered.1, offered.0
            ),
            Self::TableAddress { last, bits } => {
                write!(f, "table memory ends at {last:#x}, beyond {bits} bits")
            }
            Self::NoTables(cause) => cause.fmt(f),
            Self::Broken(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for BuildError {}

/// `Broken` of every error of an operation.
macro_rules! broken {
    ($($error:ident$(<$parameter:ident>)?),*) => {$(
        impl$(<$parameter>)? From<BrokenMemory> for $error$(<$parameter>)? {
            fn from(cause: BrokenMemory) -> Self {
                Self::Broken(cause)
            }
        }
    )*};
}
broken!(
    BuildError,
    MapError,
    UnmapError,
    ProtectError,
    DirtyError,
    RefitError<E>
);

impl From<NoTables> for BuildError {
    fn from(cause: NoTables) -> Self {
        Self::NoTables(cause)
    }
}

/// What is wrong with a range, before any table is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// The range, or one of the runs, has no bytes.
    Empty,
    /// An address or a length is not a multiple of the smallest page.
    Misaligned {
        /// The address or length in bytes.
        value: u64,
        /// The smallest page in bytes.
        granule: u64,
    },
    /// The range lies, at least partly, where the table translates nothing.
    OutsideAperture {
        /// First address of the range.
        iova: u64,
        /// Its length in bytes; `None` when it ends beyond 2^64.
        len: Option<u64>,
        /// The addresses that the table translates.
        aperture: Aperture,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the range has no bytes"),
            Self::Misaligned { value, granule } => {
                write!(
                    f,
                    "{value:#x} is not a multiple of the smallest page, {granule:#x} bytes"
                )
            }
            Self::OutsideAperture {
                iova,
                len: Some(len),
                aperture,
            } => {
                write!(f, "{iova:#x}+{len:#x} is outside {aperture}")
            }
            Self::OutsideAperture {
                iova,
                len: None,
                aperture,
            } => {
                write!(
                    f,
                    "the range from {iova:#x} ends beyond 2^64, outside {aperture}"
                )
            }
        }
    }
}

impl core::error::Error for RangeError {}

/// Why nothing was mapped. The table's bytes are what they were, unless the table memory is
/// [broken](BrokenMemory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The range or a run is not well formed.
    Range(RangeError),
    /// Something is mapped there already.
    Overlap {
        /// The range that was to be mapped.
        wanted: Span,
        /// The first leaf that is in the way.
        found: Run,
    },
    /// A run reaches beyond the addresses that an entry can hold.
    OutputTooWide {
        /// The run in physical memory.
        output: Span,
        /// Bits of an output address.
        bits: u32,
    },
    /// The format cannot express these permissions.
    Prot {
        /// What was asked for.
        prot: Prot,
        /// The format.
        format: FormatId,
    },
    /// The table has no leaves of this size.
    PageSize(PageSizeError),
    /// The tables for it cannot be had.
    NoTables(NoTables),
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(cause) => cause.fmt(f),
            Self::Overlap { wanted, found } => {
                write!(f, "{wanted} overlaps what is mapped: {found}")
            }
            Self::OutputTooWide { output, bits } => {
                write!(f, "physical memory {output} is beyond {bits} bits")
            }
            Self::Prot { prot, format } => {
                write!(f, "{format} cannot express the permissions {prot}")
            }
            Self::PageSize(cause) => cause.fmt(f),
            Self::NoTables(cause) => cause.fmt(f),
            Self::Broken(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for MapError {}

impl From<RangeError> for MapError {
    fn from(cause: RangeError) -> Self {
        Self::Range(cause)
    }
}

impl From<NoTables> for MapError {
    fn from(cause: NoTables) -> Self {
        Self::NoTables(cause)
    }
}

/// A table has no leaves of the size that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSizeError {
    /// The size in bytes.
    pub size: u64,
    /// The sizes that it has.
    pub offered: PageSizes,
}

impl fmt::Display for PageSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no leaves of {:#x} bytes; there are {}",
            self.size, self.offered
        )
    }
}

impl core::error::Error for PageSizeError {}

/// Why leaves were not split, cut or merged. Translations are what they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefitError<E> {
    /// The range is not well formed.
    Range(RangeError),
    /// The table has no leaves of this size.
    PageSize(PageSizeError),
    /// There would be a moment without a translation, which the caller has not allowed: the format
    /// asks for break-before-make. Nothing was changed.
    BreakBeforeMake {
        /// The first leaf, old or new, that would change.
        leaf: Run,
    },
    /// A leaf was not made by this format as it is configured. Nothing was changed.
    Foreign {
        /// The leaf.
        leaf: Run,
        /// Its permissions, as far as they can be told.
        prot: Prot,
    },
    /// The tables for it cannot be had. Nothing was changed.
    NoTables(NoTables),
    /// The flush failed, for the reason given.
    Flush(E),
    /// The leaves at the ends were cut, but the range was not unmapped.
    Unmap(UnmapError),
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl<E: fmt::Display> fmt::Display for RefitError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(cause) => cause.fmt(f),
            Self::PageSize(cause) => cause.fmt(f),
            Self::BreakBeforeMake { leaf } => write!(
                f,
                "{leaf} cannot change its size without a moment in which it is not mapped"
            ),
            Self::Foreign { leaf, prot } => {
                write!(f, "{leaf} with {prot} is no leaf that this table can write")
            }
            Self::NoTables(cause) => cause.fmt(f),
            Self::Flush(cause) => write!(f, "the flush failed: {cause}"),
            Self::Unmap(cause) => cause.fmt(f),
            Self::Broken(cause) => cause.fmt(f),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for RefitError<E> {}

#[cfg(feature = "alloc")]
impl<E> RefitError<E> {
    /// With another cause of a failed flush.
    pub(crate) fn map_flush<T>(self, map: impl FnOnce(E) -> T) -> RefitError<T> {
        match self {
            Self::Range(cause) => RefitError::Range(cause),
            Self::PageSize(cause) => RefitError::PageSize(cause),
            Self::BreakBeforeMake { leaf } => RefitError::BreakBeforeMake { leaf },
            Self::Foreign { leaf, prot } => RefitError::Foreign { leaf, prot },
            Self::NoTables(cause) => RefitError::NoTables(cause),
            Self::Flush(cause) => RefitError::Flush(map(cause)),
            Self::Unmap(cause) => RefitError::Unmap(cause),
            Self::Broken(cause) => RefitError::Broken(cause),
        }
    }
}

impl<E> From<RangeError> for RefitError<E> {
    fn from(cause: RangeError) -> Self {
        Self::Range(cause)
    }
}

/// Why nothing was unmapped. The table's bytes are what they were, unless the table memory is
/// [broken](BrokenMemory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmapError {
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
    /// The table has no leaves of this size.
    PageSize(PageSizeError),
    /// A leaf is of another size than was said.
    OtherSize {
        /// The size that was said, bytes.
        size: u64,
        /// The leaf.
        leaf: Run,
    },
    /// Dirty tracking is on, and the sink does not take dirty state: it would be lost.
    DirtyWanted,
    /// The sink wants dirty state, and the units that walk this table keep none.
    DirtyNotKept {
        /// The format.
        format: FormatId,
    },
    /// The table memory broke its contract.
    Broken(BrokenMemory),
}

impl fmt::Display for UnmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(cause) => cause.fmt(f),
            Self::InsideLeaf { range, leaf } => {
                write!(f, "{range} cuts the leaf {leaf}")
            }
            Self::Hole { range, at } => {
                write!(f, "{range} is not wholly mapped: nothing at {at:#x}")
            }
            Self::PageSize(cause) => cause.fmt(f),
            Self::OtherSize { size, leaf } => {
                write!(f, "the leaf {leaf} is not of {size:#x} bytes")
            }
            Self::DirtyWanted => f.write_str(
                "dirty tracking is on: what the device has written to must be taken along",
            ),
            Self::DirtyNotKept { format } => write!(f, "{format}: no dirty state is kept"),
            Self::Broken(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for UnmapError {}

impl From<RangeError> for UnmapError {
    fn from(cause: RangeError) -> Self {
        Self::Range(cause)
    }
}
