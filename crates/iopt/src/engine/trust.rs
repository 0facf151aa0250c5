//! Notes of operations that do not find what they were planned with.
//!
//! The engine asks for all that an operation needs before it stores anything. The steps afterwards cannot fail,
//! but for a memory that gives fewer tables than it said, or fewer entries of a table, or other ones than
//! before; for callers that let two operations change one range; and for a miscount of the engine's own. Fewer
//! tables are refused where they are reserved, with nothing stored. Fewer entries are seen each time that the
//! entries of a table are asked for. The rest shows where a store does not find its place or its table, and
//! cannot be told apart. It is noted where it is seen, and every operation looks at the note before its first
//! store and at its end.

use super::Table;
use super::map::Stop;
use crate::cell::Cell;
use crate::error::{BrokenPlan, BuildError, NoTables, ResizeError, TableMapError};
use crate::format::Format;
use crate::memory::{Reserve, TableMemory};

/// Why no tables are set aside.
pub(crate) enum NotSetAside {
    NoTables(NoTables),
    Broken(BrokenPlan),
}

/// Converts it to the errors of operations.
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
        return Err(NotSetAside::Broken(BrokenPlan::Reserve { wanted, given }));
    }
    Ok(reserve)
}

/// Tables are multiples of at least 16 bytes: below are four bits for the cause and the level, of which there are
/// fewer than eight. 0 is no note.
const LOW: u64 = 0xf;
/// Too few entries: from here on the level.
const ENTRIES: u64 = 1;
/// Not as planned: from here on the level.
const MISMATCH: u64 = 8;

/// The error that a note stands for.
const fn noted(note: u64) -> BrokenPlan {
    let (address, low) = (note & !LOW, note & LOW);
    if low < MISMATCH {
        let level = (low - ENTRIES) as u8;
        return BrokenPlan::Entries { address, level };
    }
    let level = (low - MISMATCH) as u8;
    BrokenPlan::Mismatch { address, level }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// An error when an operation has not found what it was planned with, as far as it was seen: reads do not say so
    /// themselves, all other operations do.
    #[inline(always)]
    pub fn intact(&self) -> Result<(), BrokenPlan> {
        match self.broken.get() {
            0 => Ok(()),
            note => Err(noted(note)),
        }
    }

    /// The entries of the table at `table`.
    #[inline(always)]
    pub(crate) fn entries(&self, table: u64, level: usize) -> &[M::Cell] {
        let count = self.format.entries(level);
        let cells = self.memory.entries(table, count);
        if cells.len() != count {
            self.note(table, ENTRIES, level);
        }
        cells
    }

    /// Notes that the table at `table`, or the reserve for what hangs below it, is not as planned.
    #[cold]
    #[inline(never)]
    pub(super) fn not_as_planned(&self, table: u64, level: usize) {
        self.note(table, MISMATCH, level);
    }

    #[cold]
    #[inline(never)]
    fn note(&self, table: u64, cause: u64, level: usize) {
        // The first counts; the others follow from it.
        let _ = self.broken.set_if(0, table & !LOW | (cause + level as u64));
    }
}
