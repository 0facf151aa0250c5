//! The shared form: many threads map, unmap and read one table, each in a range of its own.
//!
//! # Protocol
//!
//! **Ranges.** Operations that change the table and run at once are given ranges that do not overlap.
//! The layer above the table gives them out and ensures that once: an address space by its areas, Linux
//! by the addresses that its callers hold. So an operation stores to entries that no other one stores
//! to, waits for none, and needs neither a claim nor a count in a table: two operations on neighbouring
//! pages share a line of the cache only where their entries do. An operation may be interrupted at any
//! store, and the handler may do another one beside it.
//!
//! Where callers break this rule translations are wrong, and not only in the ranges that overlap: two operations may
//! both unlink a table, which then comes back twice. The program stays sound, since entries are atomic cells, and a table
//! that one operation frees is not reused while another one is inside.
//!
//! **Links** are what two operations have in common: both may find that the same table is missing. Each
//! fills one of its own completely and links it by one compare-and-exchange. The second operation gives
//! its own back and goes on in the one that is there.
//!
//! **Freeing.** An operation unlinks a table only where it *owns* all that the table spans: its own
//! range, or more if the caller [says so](SharedTable::owning). Nothing of that can be mapped or linked
//! by another operation, so one store unlinks it. An address space owns the gap between two areas; a
//! caller that does not leaves an emptied table linked, and the next map there uses it, with smaller
//! leaves than it could have ([`map_anew`](super::TableOps::map_anew) gives it back first).
//!
//! **Guards.** Every operation holds a guard while it looks at tables, so that none of them is
//! reused meanwhile: see [`reclaim`](crate::reclaim). Readers hold nothing else, and may read what others
//! change.
//!
//! **Links and flushes.** Where the unit reads past the caches
//! ([`FLUSHES`](crate::TableMemory::FLUSHES)), a link counts when it has been flushed. A map does not
//! know whether the thread that stored a link has come that far, so it flushes the links on its way
//! itself.
//!
//! **Growing** is exclusive: its range is all addresses, and only readers go on meanwhile.
//!
//! **Unlinked tables** go through the gather and the flush as ever; [`reclaim`](SharedTable::reclaim)
//! then keeps them until every guard is gone that was held when they were unlinked.

use runs::{Iova, Span};

use super::Table;
use super::claim::Owned;
use super::inside::Inside;
use crate::error::{BuildError, DirtyError};
use crate::format::{Format, Root};
use crate::gather::{Flushed, Gather};
use crate::memory::TableMemory;
use crate::reclaim::{DefaultReclaim, Readers, Reclaim};

/// A [`Table`] that many threads map, unmap and read at once: [`enter`](Self::enter) leads to its operations.
///
/// Operations that change it and run at once have ranges that do not overlap: that is the caller's part,
/// and where it fails translations may be wrong, anywhere in the table. They never wait for each other.
///
/// Tables that were unlinked stay out of use until every thread has left that was inside by then; `R` says
/// how these are known ([`reclaim`](crate::reclaim)). While the scheduler has stopped one of those, memory
/// that is just large enough may run out ([`TableMapError::NoTables`](crate::TableMapError::NoTables)): leave,
/// [`poll`](Self::poll) and try again. [`AnyTable`](crate::AnyTable) does that once itself.
#[derive(Debug)]
pub struct SharedTable<F, M: TableMemory, R = DefaultReclaim> {
    table: Table<F, M>,
    readers: Readers<R, M::Link>,
}

impl<F: Format, M: TableMemory> SharedTable<F, M> {
    /// Shares a table.
    pub fn new(table: Table<F, M>) -> Self {
        Self::with_reclaim(table, DefaultReclaim::default())
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> SharedTable<F, M, R> {
    /// Shares a table whose readers are known by `reclaim`.
    pub fn with_reclaim(mut table: Table<F, M>, reclaim: R) -> Self {
        (table.shared, table.has_empty) = (true, true);
        let readers = Readers::new(reclaim);
        Self { table, readers }
    }

    /// The table by itself again. Tables that waited for readers are given back.
    pub fn into_inner(mut self) -> Table<F, M> {
        // No thread is inside: this is the only reference.
        self.readers.give_all_back(&self.table.memory);
        let mut table = self.table;
        table.format = table.format();
        table.shared = false;
        table.look_for_empty_tables();
        table
    }

    /// Goes inside, where the operations are: see [`Inside`].
    #[inline(always)]
    pub fn enter(&self) -> Inside<'_, F, M, R> {
        self.enter_as(Owned::Named)
    }

    /// As [`enter`](Self::enter), for operations that own `range` and not only what they name:
    /// tables that `range` spans whole are unlinked when they have become empty.
    #[inline(always)]
    pub fn owning(&self, range: Span<Iova>) -> Inside<'_, F, M, R> {
        self.enter_as(Owned::Span(range))
    }

    /// See [`Table::grow`]. Readers go on meanwhile, and no operation may change the table.
    pub fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        let inside = self.enter();
        inside.grow_top(levels, gather)?;
        Ok(inside.root())
    }

    /// See [`Table::track_dirty`]. Waits for every operation that is under way: when it returns, no
    /// unmap goes on that has not seen the change. Not to be called [inside](Self::enter).
    pub fn track_dirty(&self, on: bool) -> Result<(), DirtyError> {
        self.table.set_tracking(on)?;
        self.readers.wait_for_all(&self.table.memory);
        Ok(())
    }

    /// Gives back the tables of flushed gathers, as soon as no reader can hold them: now, or
    /// at a later call.
    pub fn reclaim(&self, flushed: Flushed) {
        self.table.told(flushed.root);
        self.readers.retire(&self.table.memory, flushed.tables);
    }

    /// Gives back tables that waited for readers. True when none is left waiting.
    pub fn poll(&self) -> bool {
        self.readers.poll(&self.table.memory)
    }

    #[inline(always)]
    pub(crate) fn enter_as(&self, owned: Owned) -> Inside<'_, F, M, R> {
        Inside::guarded(&self.table, &self.readers, owned)
    }

    /// True when no table waits for readers.
    #[cfg(feature = "alloc")]
    pub(crate) fn is_idle(&self) -> bool {
        self.readers.is_idle()
    }

    #[cfg(feature = "alloc")]
    pub(crate) fn guard(&self) -> crate::reclaim::Guard<'_, R> {
        self.readers.enter(&self.table.memory)
    }

    /// The table, for what needs no guard: what no operation changes, or a caller that is inside.
    #[cfg(feature = "alloc")]
    pub(crate) fn table(&self) -> &Table<F, M> {
        &self.table
    }
}
