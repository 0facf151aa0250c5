//! Why a walk ended without a translation.

use core::fmt;

use super::Access;
use crate::format::{Aperture, FormatId};
use crate::prot::Prot;

/// A walk that ended without a translation, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalkFault {
    /// The input address.
    pub iova: u64,
    /// The access asked for.
    pub access: Access,
    /// Level of the table at which the walk ended; level 0 is the one of the smallest page.
    pub level: u8,
    /// Address of that table. Before the first read: the root.
    pub table: u64,
    /// The entry as it was read; 0 when none was.
    pub entry: u64,
    /// How many table entries were read, or tried to.
    pub reads: u8,
    /// The reason of the fault.
    pub reason: WalkReason,
}

/// Why a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalkReason {
    /// The entry is not present.
    #[error("is not present")]
    NotPresent,
    /// The leaf's access flag is 0, and the unit does not set it by itself (Arm, RISC-V).
    #[error("was not accessed yet, and the unit cannot mark it")]
    AccessFlag,
    /// The levels together do not allow the access.
    #[error("leaves only {granted}")]
    Denied {
        /// Permissions down to this entry.
        granted: Prot,
    },
    /// Reserved bits of a present entry are not 0.
    #[error("has the reserved bits {bits:#x}")]
    Reserved {
        /// These bits.
        bits: u64,
    },
    /// The input address is not one that the table translates, or is not canonical.
    #[error("outside {aperture}")]
    OutsideAperture {
        /// Addresses that it translates.
        aperture: Aperture,
    },
    /// There is no memory where the table should be.
    #[error("there is no memory at {address:#x}")]
    NoMemory {
        /// The address that was read.
        address: u64,
    },
    /// A table or a page, with all its bytes, is not within the unit's addresses, or a root is not
    /// aligned as its format demands.
    #[error("leads to {address:#x}, not an aligned address of a unit with {bits} bits")]
    BadOutput {
        /// The address.
        address: u64,
        /// Bits of the unit's addresses.
        bits: u32,
    },
    /// The format has no root of so many levels.
    #[error("{format} has no root of {levels} levels")]
    Levels {
        /// The format.
        format: FormatId,
        /// The number.
        levels: u8,
    },
    /// The entry leads to a table that is not of a lower level (AMD v1; RISC-V at the lowest).
    #[error("leads to a table of level {next}, not lower")]
    NextLevel {
        /// The level it leads to, 0 for the smallest page.
        next: u8,
    },
    /// The entry skips levels, and the address bits that these would use are not all 0 (AMD v1).
    #[error("skips levels for which the address has the bits {bits:#x}")]
    SkippedBits {
        /// These bits of the input address.
        bits: u64,
    },
    /// The page size is not one that this level, or this unit, can have.
    #[error("is a page of 2^{log2} bytes, which cannot be at this level")]
    PageSize {
        /// The size as a power of two.
        log2: u32,
    },
    /// The address is in a part of the page that is not open (DART, sub-page protection).
    #[error("opens only the bytes {first:#x} to {last:#x} of its page")]
    SubPage {
        /// The first byte of the page that is open.
        first: u64,
        /// The last; where it lies before the first, none is.
        last: u64,
    },
    /// The entry must be marked as accessed or dirty, and the memory cannot be written (VT-d, fault
    /// reason "A/D bit update failed"; Arm, unsupported atomic hardware update; RISC-V, an access
    /// fault).
    #[error("is to be marked, and the memory at {address:#x} cannot be written")]
    NotWritable {
        /// The address of the entry.
        address: u64,
    },
    /// The entry, or those above it, changed each time that it was to be marked.
    #[error("changed whenever it was to be marked")]
    Contended,
}

impl WalkFault {
    pub(super) const fn because(mut self, reason: WalkReason) -> Self {
        self.reason = reason;
        self
    }
}

impl fmt::Display for WalkFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            iova,
            access,
            level,
            table,
            entry,
            ..
        } = self;
        write!(f, "{access} of {iova:#x}: ")?;
        match self.reason {
            WalkReason::OutsideAperture { .. } | WalkReason::Levels { .. } => {}
            WalkReason::NoMemory { .. } => {
                write!(
                    f,
                    "the table at {table:#x} (level {level}) cannot be read: "
                )?;
            }
            WalkReason::BadOutput { .. } if *entry == 0 => f.write_str("the root ")?,
            _ => {
                write!(
                    f,
                    "the entry {entry:#x} of the table at {table:#x} (level {level}) "
                )?;
            }
        }
        self.reason.fmt(f)
    }
}

impl core::error::Error for WalkFault {}
