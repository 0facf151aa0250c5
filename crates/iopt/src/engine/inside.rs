//! Inside a table that others use meanwhile.

use core::fmt;
use core::ops::Deref;

use super::Table;
use super::claim::Owned;
use crate::format::Format;
use crate::memory::{Chain, TableMemory};
use crate::reclaim::{DefaultReclaim, Guard, Readers, Reclaim, Unguarded};

/// A place inside a table, for as long as it lives: its operations are [`TableOps`](super::TableOps) and those of
/// [`Table`] that only read. Their results were true at some time during the call.
///
/// From [`SharedTable::enter`](crate::SharedTable::enter) it holds the guard of a reader. A caller with several operations,
/// as after reading a queue, stays inside for all of them. Other threads go on meanwhile; only the reuse
/// of unlinked tables waits until each thread that was inside has left. So do not stay while
/// you wait for something: a flush, a lock, another thread, or
/// [`track_dirty`](crate::SharedTable::track_dirty), which waits for all who are inside: where readers are known
/// by thread, inside any table.
///
/// From [`Table::unguarded`] it holds nothing.
pub struct Inside<'t, F: Format, M: TableMemory, R: Reclaim = DefaultReclaim> {
    table: &'t Table<F, M>,
    owned: Owned,
    // Leaves first.
    _guard: Guard<'t, R>,
    retired: Retired<'t, M, R>,
}

/// Tables that were flushed inside, and go to those that wait for readers when this reader has left.
struct Retired<'t, M: TableMemory, R: Reclaim> {
    memory: &'t M,
    /// Readers to wait for, if there may be any.
    readers: Option<&'t Readers<R, M::Link>>,
    tables: Chain,
}

impl<'t, F: Format, M: TableMemory, R: Reclaim> Inside<'t, F, M, R> {
    #[inline(always)]
    pub(super) fn guarded(
        table: &'t Table<F, M>,
        readers: &'t Readers<R, M::Link>,
        owned: Owned,
    ) -> Self {
        Self {
            table,
            owned,
            _guard: readers.enter(&table.memory),
            retired: Retired {
                memory: &table.memory,
                readers: Some(readers),
                tables: Chain::empty(),
            },
        }
    }

    pub(super) const fn owned(&self) -> Owned {
        self.owned
    }

    pub(super) fn retire(&mut self, tables: Chain) {
        match self.retired.readers {
            None => self.table.memory.reclaim(tables),
            Some(_) => self.retired.tables.append(&self.table.memory, tables),
        }
    }
}

impl<'t, F: Format, M: TableMemory> Inside<'t, F, M, Unguarded> {
    #[inline(always)]
    pub(super) fn unguarded(table: &'t Table<F, M>) -> Self {
        Self {
            table,
            owned: Owned::Named,
            _guard: Guard::of_none(),
            retired: Retired {
                memory: &table.memory,
                readers: None,
                tables: Chain::empty(),
            },
        }
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> Deref for Inside<'_, F, M, R> {
    type Target = Table<F, M>;

    #[inline(always)]
    fn deref(&self) -> &Table<F, M> {
        self.table
    }
}

impl<M: TableMemory, R: Reclaim> Drop for Retired<'_, M, R> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(readers) = self.readers {
            if !self.tables.is_empty() {
                let Chain { head, tail, count } = self.tables;
                retire(self.memory, readers, head, tail, count);
            }
        }
    }
}

// Takes values, so that a caller that has retired nothing keeps none of it in memory.
#[cold]
#[inline(never)]
fn retire<M: TableMemory, R: Reclaim>(
    memory: &M,
    readers: &Readers<R, M::Link>,
    head: u64,
    tail: u64,
    count: u64,
) {
    readers.retire(memory, Chain { head, tail, count });
}

impl<F: Format, M: TableMemory, R: Reclaim> fmt::Debug for Inside<'_, F, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}
