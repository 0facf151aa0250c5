//! The shared form: many threads map, unmap and read one table, each in a range of its own.
//!
//! # Protocol
//!
//! **Ranges.** Operations that change the table and run at once are given ranges that do not overlap.
//! Who gives them out decides that once, above the table: an address space by its areas, Linux by the
//! addresses that its callers hold. So an operation stores to entries that no other one stores to, waits
//! for none, and needs neither a claim nor a count in a table: two operations on neighbouring pages
//! share a line of the cache only where their entries do. An operation may be interrupted at any store,
//! and the handler may do another one beside it.
//!
//! Where callers break this rule translations are wrong, and not only in the ranges that overlap: two operations may
//! both unlink a table, which then comes back twice. The program stays sound, since entries are atomic cells, and a table
//! that one operation frees is not reused while another one is inside.
//!
//! **Links** are what two operations have in common: both may find that the same table is missing.
//! Each fills one of its own completely and links it by one compare-and-exchange. Who comes second gives
//! its own back and goes on in the one that is there.
//!
//! **Freeing.** An operation unlinks a table only where it *owns* all that the table spans: its own
//! range, or more if the caller [says so](SharedTable::owning). Nothing of that can be mapped or linked
//! by another operation, so one store unlinks it. An address space owns the gap between two areas;
//! who does not leaves an emptied table linked, and what is mapped there next is mapped in it, in smaller
//! leaves than it could be ([`map_anew`](SharedTable::map_anew) gives it back first).
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

use runs::{Iova, Pa, Span};

use super::inside::Inside;
use super::sink::RunSink;
use super::{Leaf, Table};
use crate::error::{BrokenMemory, BuildError, TableMapError, TableUnmapError};
use crate::format::{Format, Root};
use crate::gather::{Flushed, Gather};
use crate::memory::{Chain, TableMemory};
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard, Readers, Reclaim};

/// A [`Table`] that many threads map, unmap and read at once.
///
/// Operations that change it and run at once have ranges that do not overlap: that is the caller's part,
/// and where it fails translations may be wrong, anywhere in the table. They never wait for each other.
///
/// Tables that were unlinked stay out of use until every thread has left that was inside by then; `R` says
/// how these are known ([`reclaim`](crate::reclaim)). While the scheduler has stopped one of those, memory
/// that is just large enough may run out ([`TableMapError::NoTables`](crate::TableMapError::NoTables)):
/// [`poll`](Self::poll) and try again. The operations of this type do that once themselves, those of [`Inside`] do not.
#[derive(Debug)]
pub struct SharedTable<F, M: TableMemory, R = DefaultReclaim> {
    pub(super) table: Table<F, M>,
    pub(super) readers: Readers<R, M::Link>,
}

impl<F: Format, M: TableMemory> SharedTable<F, M> {
    /// Shares a table.
    pub fn new(table: Table<F, M>) -> Self {
        Self::with_reclaim(table, DefaultReclaim::default())
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> SharedTable<F, M, R> {
    /// Shares a table whose readers are known by `reclaim`.
    pub fn with_reclaim(table: Table<F, M>, reclaim: R) -> Self {
        Self {
            table,
            readers: Readers::new(reclaim),
        }
    }

    /// The table by itself again. Tables that waited for readers are given back.
    pub fn into_inner(mut self) -> Table<F, M> {
        // No thread is inside: this is the only reference.
        self.readers.give_all_back(&self.table.memory);
        let mut table = self.table;
        table.format = table.format();
        table.look_for_empty_tables();
        table
    }

    /// The root from which a unit walks this table.
    pub fn root(&self) -> Root {
        self.table.root()
    }

    /// The format, with its configuration.
    pub fn format(&self) -> F {
        self.table.format()
    }

    /// See [`Table::grow`]. Readers go on meanwhile, and no operation may change the table.
    pub fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        let none = |error: &BuildError| matches!(error, BuildError::NoTables(_));
        self.once_more(none, || {
            let _guard = self.guard();
            self.table.grow_top(levels, gather)
        })?;
        Ok(self.table.root())
    }

    /// See [`Table::intact`].
    pub fn intact(&self) -> Result<(), BrokenMemory> {
        self.table.intact()
    }

    /// Does `operation`, and once more if it found no tables ([`more_tables`](Self::more_tables)). It goes
    /// inside itself: tables wait for this thread, too.
    pub(super) fn once_more<T, E>(
        &self,
        no_tables: impl Fn(&E) -> bool,
        mut operation: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        match operation() {
            Err(error) if no_tables(&error) && self.more_tables() => operation(),
            done => done,
        }
    }

    /// Gives back tables that waited to be given back together. False when there were none: then there is no
    /// reason to try again.
    #[cold]
    fn more_tables(&self) -> bool {
        let waited = !self.readers.is_idle();
        if waited {
            self.poll();
        }
        waited
    }

    /// The table, for callers that hold a guard.
    #[inline]
    pub(crate) fn table(&self) -> &Table<F, M> {
        &self.table
    }

    /// Reclaims flushed tables as soon as no reader can hold them.
    pub(super) fn retire(&self, tables: Chain) {
        self.readers.retire(&self.table.memory, tables);
    }

    #[inline]
    pub(crate) fn guard(&self) -> Guard<'_, R> {
        self.readers.enter(&self.table.memory)
    }

    /// Goes inside, to do several things there: see [`Inside`].
    #[inline]
    pub fn enter(&self) -> Inside<'_, F, M, R> {
        Inside::new(&self.table, self.guard(), None)
    }

    /// As [`enter`](Self::enter), for an operation that owns `range` and not only what it removes:
    /// tables that `range` spans whole are unlinked when they have become empty.
    #[inline]
    pub fn owning(&self, range: Span<Iova>) -> Inside<'_, F, M, R> {
        Inside::new(&self.table, self.guard(), Some(range))
    }

    /// See [`Table::map`].
    pub fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        let done = self.enter().map(iova, runs, prot);
        match done {
            Err(TableMapError::NoTables(_)) if self.more_tables() => {
                self.map_again(iova, runs, prot)
            }
            done => done,
        }
    }

    // As `once_more`, but what is not usual is not inlined: the usual way stays short.
    #[cold]
    #[inline(never)]
    fn map_again(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        self.enter().map(iova, runs, prot)
    }

    /// See [`Table::map_anew`]. Of empty tables those are given back that the range covers whole.
    pub fn map_anew(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), TableMapError> {
        let none = |error: &TableMapError| matches!(error, TableMapError::NoTables(_));
        self.once_more(none, || {
            let _guard = self.guard();
            self.table.map_anew_beside(iova, runs, prot, gather)
        })
    }

    /// See [`Table::give_back_empty_tables`]: those are unlinked that the range covers whole.
    pub fn give_back_empty_tables(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        self.enter().give_back_empty_tables(range, gather)
    }

    /// See [`Table::unmap`].
    pub fn unmap(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), TableUnmapError> {
        self.enter().unmap(range, gather, sink)
    }

    /// See [`Table::unmap_mapped`].
    pub fn unmap_mapped(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, TableUnmapError> {
        self.enter().unmap_mapped(range, gather, sink)
    }

    /// See [`Table::clear`].
    pub fn clear(&self, range: Span<Iova>, gather: &mut Gather) -> Result<(), TableUnmapError> {
        self.enter().clear(range, gather)
    }

    /// See [`Table::translate`]. What it says was true at some time during the call.
    #[inline]
    pub fn translate(&self, iova: u64) -> Option<u64> {
        self.enter().translate(iova)
    }

    /// See [`Table::leaf_at`]. What it says was true at some time during the call.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.enter().leaf_at(iova)
    }

    /// Gives back the tables of flushed gathers, as soon as no reader can hold them: now, or
    /// at a later call.
    pub fn reclaim(&self, flushed: Flushed) {
        self.table.told(flushed.root);
        self.retire(flushed.tables);
    }

    /// Gives back tables that waited for readers. True when none is left waiting.
    pub fn poll(&self) -> bool {
        self.readers.poll(&self.table.memory)
    }
}
