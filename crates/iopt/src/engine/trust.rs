//! What is done when a table memory breaks its contract.
//!
//! The engine asks for all that an operation needs before it stores anything. What comes afterwards
//! cannot fail, but for a memory that gives fewer tables than it said, or fewer entries of a table, or
//! other ones than before. The first is refused where tables are reserved, with nothing stored. The
//! others are noted where they are seen, once for each time that the entries of a table are asked for,
//! and every operation looks at the note before its first store and at its end.

use super::Table;
use super::map::Stop;
use crate::cell::Cell;
use crate::error::{BrokenMemory, BuildError, NoTables, ResizeError, TableMapError};
use crate::format::Format;
use crate::memory::{Reserve, TableMemory};

/// Why no tables are set aside.
pub(crate) enum NotSetAside {
    NoTables(NoTables),
    Broken(BrokenMemory),
}

/// What an operation says of it.
macro_rules! not_set_aside {
    ($($error:ident$(<$parameter:ident>)?),*) => {$(
        impl$(<$parameter>)? From<NotSetAside> for $error$(<$parameter>)? {
            fn from(cause: NotSetAside) -> Self {
                match cause {
                    NotSetAside::NoTables(cause) => Self::NoTables(cause),
                    NotSetAside::Broken(cause) => Self::Broken(cause),
                }
            }
        }
    )*};
}
not_set_aside!(Stop, BuildError, TableMapError, ResizeError<E>);

/// Sets `count` tables aside; fewer are given back, and refused.
pub(crate) fn set_aside<M: TableMemory>(memory: &M, count: u64) -> Result<Reserve, NotSetAside> {
    if count == 0 {
        return Ok(Reserve::empty());
    }
    let reserve = memory.reserve(count).map_err(NotSetAside::NoTables)?;
    if reserve.len() < count {
        let (wanted, given) = (count, reserve.len());
        memory.give_back(reserve);
        return Err(NotSetAside::Broken(BrokenMemory::Reserve { wanted, given }));
    }
    Ok(reserve)
}

/// The error for a table.
pub(super) const fn named(address: u64, level: usize) -> BrokenMemory {
    let level = level as u8;
    BrokenMemory::Table { address, level }
}

/// Tables are multiples of at least 16 bytes: room for the level, and for a bit that says that there
/// is a note.
const NOTED: u64 = 1;
const LEVEL: u64 = 0xe;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Whether the table memory has kept its contract as far as it was seen: reads do not say so
    /// themselves, all other operations do.
    #[inline(always)]
    pub fn intact(&self) -> Result<(), BrokenMemory> {
        match self.broken.get() {
            0 => Ok(()),
            note => Err(named(
                note & !(NOTED | LEVEL),
                ((note & LEVEL) >> 1) as usize,
            )),
        }
    }

    /// The entries of the table at `table`.
    #[inline(always)]
    pub(crate) fn entries(&self, table: u64, level: usize) -> &[M::Cell] {
        let count = self.format.entries(level);
        let cells = self.memory.entries(table, count);
        if cells.len() != count {
            self.broke(table, level);
        }
        cells
    }

    /// Notes that the memory broke its contract with the table at `table`.
    #[cold]
    #[inline(never)]
    pub(super) fn broke(&self, table: u64, level: usize) {
        let note = table & !(NOTED | LEVEL) | (level as u64) << 1 | NOTED;
        // The first counts; the others follow from it.
        let _ = self.broken.set_if(0, note);
    }
}
