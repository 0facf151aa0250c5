//! The shared form: many threads map, unmap and read one table.
//!
//! # Protocol
//!
//! **Guards.** Every operation holds a guard while it looks at tables, so that none of them is
//! reused meanwhile: see [`guard`](super::guard). Readers hold nothing else.
//!
//! **Claims.** A table is stored to only by the operation that has claimed it, by writing the number
//! of its guard into the table's [`Meta`](crate::Meta). An operation claims every table that it will
//! store to *before its first store*, so it is all or nothing here too. Tables are claimed in one
//! order: by address, and a table before those below it. Two operations that need the same tables
//! therefore never wait for each other in a circle. Whoever finds a table claimed waits for it.
//!
//! Which tables are these? Of a map, the tables at level 0 that exist, and those above in which an
//! entry of the range is empty: there a leaf or a new table will be linked. What lies below an empty
//! entry nobody else can reach. Of an unmap, the tables at level 0, those above that hold a leaf of
//! the range or an entry that the range covers whole, and below such an entry every table. Of a
//! protect, the tables at level 0 and those above that hold a leaf of the range. A harvest promises
//! nothing as a whole: it claims a table when it finds something dirty in it, and gives it back
//! before it claims one beside it.
//!
//! **Restart.** What is read before it is claimed may change. A table that was unlinked meanwhile is
//! marked, and cannot be claimed any more; an entry that became empty in a table that was thought to
//! need no claim would be claimed too late. In both cases the operation gives its claims back and
//! begins again; it has stored nothing. A table that is claimed stays linked, and with it all tables
//! above.
//!
//! **Empty tables.** An unmap that removes the last entry of a table whose parent it has not claimed
//! leaves the table linked and prunes afterwards: it claims the parent, then the table, looks again
//! whether it is empty, and unlinks it. In between another thread may map into it, in smaller leaves
//! than it would have chosen.
//!
//! **The root** may become an ordinary table at any time: see [`top`](super::top). An operation looks
//! once where it begins; an unmap looks again at its end, since the table that it emptied and took
//! for the root is then to be pruned too.
//!
//! **Links and flushes.** Where the unit reads past the caches
//! ([`FLUSHES`](crate::TableMemory::FLUSHES)), a link counts when it has been flushed, and whoever
//! stored it holds the claim of its table until then. A map that comes to a link of a table which
//! somebody else has claimed therefore begins again: it would be done before a unit could find what
//! it has mapped.
//!
//! **Unlinked tables** go through the gather and the flush as ever; [`reclaim`](SharedTable::reclaim)
//! then keeps them until every guard is gone that was held when they were unlinked.

use runs::{Iova, Pa, Span};

use super::access::{Access, Claiming};
use super::entries::Order;
use super::guard::{Guard, Readers};
use super::inside::Inside;
use super::sink::RunSink;
use super::{Leaf, Level, Table, at_top};
use crate::cell::Cell;
use crate::error::{BrokenMemory, BuildError, MapError, UnmapError};
use crate::format::{Entry, Format, Root};
use crate::gather::{Flushed, Gather};
use crate::memory::{Chain, TableMemory};
use crate::prot::Prot;

/// A [`Table`] that many threads map, unmap and read at once.
///
/// Operations that store to different tables go on side by side; those that store to the same one, also at
/// different entries of it, wait for each other for as long as one of them takes. At most `SLOTS` operations are under way at a
/// time, further ones wait. Waiting calls [`TableMemory::wait`].
///
/// Tables that were unlinked stay out of use until everybody has left who was inside by then. While
/// the scheduler has stopped one of those, memory that is just large enough may run out
/// ([`MapError::NoTables`](crate::MapError::NoTables)): [`poll`](Self::poll) and try again.
#[derive(Debug)]
pub struct SharedTable<F, M: TableMemory, const SLOTS: usize = 32> {
    pub(super) table: Table<F, M>,
    pub(super) readers: Readers<M::Link, SLOTS>,
    /// 1 while dirty tracking is on.
    pub(super) dirty: M::Link,
}

impl<F: Format, M: TableMemory, const SLOTS: usize> SharedTable<F, M, SLOTS> {
    /// Shares a table.
    pub fn new(table: Table<F, M>) -> Self {
        let dirty = M::Link::default();
        dirty.set(table.dirty.into());
        Self {
            table,
            readers: Readers::new(),
            dirty,
        }
    }

    /// The table by itself again. Tables that waited for readers are given back.
    pub fn into_inner(self) -> Table<F, M> {
        // Nobody is inside: this is the only reference.
        self.readers.poll(&self.table.memory);
        let mut table = self.table;
        table.format = table.format();
        table.tables = table.count_tables();
        table.dirty = self.dirty.get() != 0;
        table
    }

    /// What a unit is told to walk this table.
    pub fn root(&self) -> Root {
        self.table.root()
    }

    /// The format, with its configuration.
    pub fn format(&self) -> F {
        self.table.format()
    }

    /// See [`Table::grow`]. What is under way meanwhile goes on, and whoever begins after it finds
    /// the new levels.
    pub fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        let guard = self.guard();
        self.table
            .grow_top(levels, gather, Claiming(guard.number()))?;
        Ok(self.table.root())
    }

    /// See [`Table::intact`].
    pub fn intact(&self) -> Result<(), BrokenMemory> {
        self.table.intact()
    }

    /// The table, for whoever holds a guard.
    #[inline]
    pub(super) fn table(&self) -> &Table<F, M> {
        &self.table
    }

    /// Tables that are flushed, as soon as nobody can read them any more.
    pub(super) fn retire(&self, tables: Chain) {
        self.readers.retire(&self.table.memory, tables);
    }

    #[inline]
    pub(super) fn guard(&self) -> Guard<'_, M::Link> {
        self.readers.enter(&self.table.memory)
    }

    /// Goes inside, to do several things there: see [`Inside`].
    #[inline]
    pub fn enter(&self) -> Inside<'_, F, M, SLOTS> {
        Inside::new(self, self.guard())
    }

    /// See [`Table::map`].
    pub fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), MapError> {
        self.enter().map(iova, runs, prot)
    }

    /// See [`Table::map_anew`]. Another thread may keep or map something there meanwhile: then
    /// leaves are smaller.
    pub fn map_anew(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let request = self.table.check_map(iova, runs, prot)?;
        let guard = self.guard();
        let access = Claiming(guard.number());
        let (at, len) = (request.at, request.len);
        self.table.intact()?;
        at_top!(self.table.begin(), F, Top, root => {
            self.table.prune::<Top, _>(root, (at, len), gather, access);
        });
        self.table.map_checked(request, access).map(|_| ())
    }

    /// See [`Table::unmap`].
    pub fn unmap(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        self.enter().unmap(range, gather, sink)
    }

    /// See [`Table::unmap_mapped`].
    pub fn unmap_mapped(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        self.enter().unmap_mapped(range, gather, sink)
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

    /// Gives back the tables of flushed gathers, as soon as nobody can read them any more: now, or
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

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Unlinks empty tables below `table` in `[at, at + todo)`; returns how many.
    pub(super) fn prune<V: Level, P: Access>(
        &self,
        table: u64,
        (at, todo): (u64, u64),
        gather: &mut Gather,
        access: P,
    ) -> u64 {
        // Below a table without an entry there is nothing.
        if V::N == 0 || self.memory.meta(table).live.get() == 0 {
            return 0;
        }
        let mut count = 0;
        for part in self.entries_in(table, V::N, at, todo) {
            if let Entry::Table(below) = part.entry() {
                count += self.prune::<V::Below, P>(below, (part.at(), part.len()), gather, access);
                if self.memory.meta(below).live.get() == 0 {
                    let unlinked =
                        self.unlink_empty((table, V::N), part.cell, below, gather, access);
                    count += u64::from(unlinked);
                }
            }
        }
        count
    }

    /// Unlinks `below` from the entry `cell` of `table`, if both are still what they were. True when
    /// that was so.
    #[inline(always)]
    fn unlink_empty<P: Access>(
        &self,
        (table, level): (u64, usize),
        cell: &M::Cell,
        below: u64,
        gather: &mut Gather,
        access: P,
    ) -> bool {
        if self.claim(table, access).is_err() {
            return false;
        }
        let mut unlinked = false;
        let linked = matches!(F::decode(level, cell.get()), Entry::Table(there) if there == below);
        if linked && self.claim(below, access).is_ok() {
            let live = &self.memory.meta(table).live;
            if self.memory.meta(below).live.get() == 0 {
                cell.set(0);
                self.memory.written(core::slice::from_ref(cell));
                live.set(live.get().saturating_sub(1));
                self.bury(below, access);
                gather.add_table(self, below);
                unlinked = true;
            } else {
                self.release(below, access);
            }
        }
        self.release(table, access);
        unlinked
    }

    /// Counts the tables, the root among them.
    pub(crate) fn count_tables(&self) -> u64 {
        let mut count = 0;
        let root = self.begin().table();
        self.all_tables(root, Order::Above, &mut |_, _| count += 1);
        count
    }
}
