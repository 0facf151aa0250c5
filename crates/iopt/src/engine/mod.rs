//! The engine: every algorithm, once, over every format.
//!
//! # Protocol
//!
//! A [`Table`] is changed by `&mut`, a [`SharedTable`] by threads that have ranges of their own
//! (`shared.rs`). Units, the software unit and hardware's own writes (accessed and dirty bits) go on
//! meanwhile, so an entry is an atomic cell in both.
//!
//! *Map* goes over the range twice. The first pass, `plan`, stores nothing: it finds that every
//! entry it will write is empty and counts the tables that it will need. These are reserved. The
//! second pass, `fill`, cannot fail: it takes the same decisions over again, writes a new table
//! completely before anyone can reach it, and links it with one release store. A refused request
//! therefore leaves the table's bytes as they were.
//!
//! *Unmap* first looks whether a leaf reaches over either end, and whether there are holes if the
//! caller refuses them; then it cannot fail either. A table that the range covers whole is unlinked
//! with one store and its entries are only read; from others the entries are cleared one by one, and
//! they are unlinked when nothing is left in them and the operation owns all that they span. Unlinked
//! tables go into the [`Gather`], never straight back to the memory.
//!
//! *Protect* looks first and replaces then, as map does; *harvest* takes dirty bits out. Hardware's
//! own stores and what becomes of them are the subject of `dirty.rs`, which stands for all
//! operations: no dirty bit is lost while tracking is on.
//!
//! # Levels are constants where most work is
//!
//! Each pass that decides about speed is compiled three times for a format (`levels.rs`): for levels 0 and 1, where shifts,
//! table sizes and the sizes of leaves are constants, and for all above. Others take the level as a number. All go over the
//! entries of a table in one way (`entries.rs`).
//!
//! # Where the time goes
//!
//! * The descent is done once, to the lowest table that all of the request goes through
//!   (`descend.rs`); one page, and one leaf or one run of equal leaves, have paths of their own (`page.rs`,
//!   `straight.rs`).
//! * In a table, entries are handled in rows: [`Cell::set_series`] and its like. Only the first
//!   entry of a row is decoded.
//! * A table that will be linked is filled before it is reachable, and is zeroed only where it is not
//!   filled.

mod claim;
mod clear;
mod descend;
mod dirty;
mod entries;
mod harvest;
mod inside;
mod inspect;
mod levels;
mod look;
mod map;
mod nodes;
mod ops;
mod page;
mod planned;
mod progress;
mod protect;
mod read;
mod removed;
mod request;
mod resize;
mod row;
mod shared;
mod sink;
pub(crate) mod top;
pub(crate) mod trust;
mod unmap;

use core::fmt;

use runs::{Iova, PageSizes, SizeHistogram, Span};

use crate::cell::Cell;
use crate::error::{BrokenPlan, BuildError, RangeError};
use crate::format::{Format, Root};
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::reclaim::Unguarded;

#[cfg(feature = "alloc")]
pub(crate) use claim::Owned;
use entries::Order;
pub(crate) use inspect::inspect;
pub use inspect::{Damage, DamageKind};
pub(crate) use levels::{L, Level, Upper, at_level, below};
#[cfg(feature = "alloc")]
pub(crate) use look::Amount;
use top::Top;

pub use inside::Inside;
pub use nodes::Nodes;
pub use ops::TableOps;
#[cfg(feature = "alloc")]
pub(crate) use planned::Plan;
pub use planned::Planned;
pub use progress::{Bound, Progress};
pub use read::{Leaf, Leaves};
pub use resize::Interruption;
pub use shared::SharedTable;
pub use sink::{NoRuns, RunSink, Wants, WithDirty};

/// One I/O page table.
///
/// Addresses and lengths are bytes. Every operation takes the whole range at once and descends
/// once per leaf table.
///
/// A table that is dropped keeps its memory, since a unit may still walk it: detach it everywhere,
/// then [`tear_down`](Self::tear_down).
pub struct Table<F, M: TableMemory> {
    pub(crate) format: F,
    pub(crate) memory: M,
    pub(crate) top: Top<M::Link>,
    /// The sizes that leaves may have; among them those of levels that are yet to grow.
    pub(crate) sizes: PageSizes,
    /// How many there are.
    pub(crate) tables: M::Link,
    /// 1 while dirty tracking is on.
    pub(crate) dirty: M::Link,
    /// Empty tables stay linked.
    pub(crate) keeps_empty: bool,
    /// Some may be linked: they are kept, or were, or operations on parts of what a table spans have emptied it.
    pub(crate) has_empty: bool,
    /// Other operations go on beside an operation.
    pub(crate) shared: bool,
    /// The first table that was not as planned: see `trust.rs`.
    pub(crate) broken: M::Link,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// An empty table in `memory`, with leaves of every size that the format has.
    pub fn new(format: F, memory: M) -> Result<Self, BuildError> {
        Self::with_page_sizes(format, memory, PageSizes::from_bits(u64::MAX))
    }

    /// An empty table whose leaves are of the given sizes only. Sizes that the format does not
    /// have are left out; without the smallest page of the format, ranges and runs must be
    /// multiples of the smallest size that is left.
    pub fn with_page_sizes(format: F, memory: M, sizes: PageSizes) -> Result<Self, BuildError> {
        const {
            assert!(
                F::ENTRY_BYTES == M::Cell::BYTES,
                "the cell is not of the format's width"
            );
            assert!(
                F::TABLE_BYTES <= M::TABLE_BYTES,
                "the format's tables are larger than those of the memory"
            );
        }
        Self::in_memory(format, memory, sizes)
    }

    /// The table whose root is at `root`, for the length of an operation: for kernels, which keep the root and the levels
    /// in a form of their own, and say anew for each call where tables come from. Its leaves have the given sizes, which
    /// are some of those of the format with these levels.
    ///
    /// Nothing is checked, and what a `Table` counts begins anew ([`tables`](Self::tables)). Dirty state is what the unit
    /// says it is.
    #[inline(always)]
    pub fn at_root(format: F, memory: M, root: u64, sizes: PageSizes) -> Self {
        Self {
            format,
            memory,
            top: Top::new(root, format.levels()),
            sizes,
            tables: M::Link::default(),
            dirty: M::Link::default(),
            keeps_empty: false,
            has_empty: true,
            shared: true,
            broken: M::Link::default(),
        }
    }

    /// Goes inside without a guard: nothing keeps tables from being reused but that no other operation on a range that
    /// they translate is under way. Linux promises that, and others are to use a [`SharedTable`].
    #[inline(always)]
    pub fn unguarded(&self) -> Inside<'_, F, M, Unguarded> {
        Inside::unguarded(self)
    }

    /// As [`with_page_sizes`](Self::with_page_sizes), for a format that is chosen at run time: it
    /// may not fit the memory.
    pub(crate) fn in_memory(format: F, memory: M, sizes: PageSizes) -> Result<Self, BuildError> {
        let offered = (M::Cell::BYTES, memory.table_bytes());
        if F::ENTRY_BYTES != offered.0 || F::TABLE_BYTES > offered.1 {
            return Err(BuildError::TableMemory {
                format: format.id(),
                wanted: (F::ENTRY_BYTES, F::TABLE_BYTES),
                offered,
            });
        }
        let offered = F::page_sizes(format.levels());
        let kept = offered.and(sizes);
        if kept.is_empty() {
            return Err(BuildError::PageSizes {
                wanted: sizes,
                offered,
            });
        }
        let (last, bits) = (memory.last_address(), format.table_bits());
        if last >> bits.min(63) != 0 {
            return Err(BuildError::TableAddress { last, bits });
        }
        let root = memory.allocate(Self::root_bytes(&format))?;
        // Empty, for every unit that walks it from now on.
        let top = usize::from(format.levels()) - 1;
        let cells = memory.entries(root, format.entries(top));
        if cells.len() != format.entries(top) {
            let (address, level) = (root, top as u8);
            return Err(BrokenPlan::Entries { address, level }.into());
        }
        memory.written(cells);
        let sizes = if F::GROWS {
            F::page_sizes(F::MAX_LEVELS).and(sizes)
        } else {
            kept
        };
        let tables = M::Link::default();
        tables.set(1);
        Ok(Self {
            format,
            memory,
            top: Top::new(root, format.levels()),
            sizes,
            tables,
            dirty: M::Link::default(),
            keeps_empty: false,
            has_empty: false,
            shared: false,
            broken: M::Link::default(),
        })
    }

    /// The root from which a unit walks this table.
    pub fn root(&self) -> Root {
        self.root_of(self.begin())
    }

    /// The format, with its configuration.
    pub fn format(&self) -> F {
        self.format_now()
    }

    /// The same in memory that leads to the same tables.
    #[cfg(feature = "alloc")]
    pub(crate) fn map_memory<N>(self, map: impl FnOnce(M) -> N) -> Table<F, N>
    where
        N: TableMemory<Link = M::Link>,
    {
        Table {
            memory: map(self.memory),
            format: self.format,
            top: self.top,
            sizes: self.sizes,
            tables: self.tables,
            dirty: self.dirty,
            keeps_empty: self.keeps_empty,
            has_empty: self.has_empty,
            shared: self.shared,
            broken: self.broken,
        }
    }

    /// Where its tables lie.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The log2 of the bytes of addresses that a table at `level` translates, 0 for tables of the
    /// smallest leaves; `None` for the root and above it.
    pub fn table_log2(&self, level: usize) -> Option<u32> {
        let above = level.checked_add(1)?;
        (above < usize::from(self.begin().levels)).then(|| F::shift(above))
    }

    /// The sizes of leaves that [`map`](TableOps::map) uses.
    pub fn page_sizes(&self) -> PageSizes {
        if F::GROWS {
            self.sizes.and(F::page_sizes(self.begin().levels))
        } else {
            self.sizes
        }
    }

    /// Tables in use, the root among them.
    pub fn tables(&self) -> u64 {
        self.tables.get()
    }

    /// Counts tables that came and went.
    #[inline(always)]
    pub(crate) fn count(&self, added: u64, removed: u64) {
        if added == removed {
            return;
        }
        let mut there = self.tables.get();
        let now = |there: u64| there.wrapping_add(added).wrapping_sub(removed);
        while let Err(found) = self.tables.set_if(there, now(there)) {
            there = found;
        }
    }

    /// How many leaves of each size there are. Reads every leaf.
    pub fn leaf_sizes(&self) -> SizeHistogram {
        let mut sizes = SizeHistogram::new();
        let spans = self.aperture().spans();
        for (leaf, run) in spans.flat_map(|span| self.leaves(span).stretches()) {
            sizes.add(leaf.run.len, run.len / leaf.run.len);
        }
        sizes
    }

    /// Calls `each` for every table with its address and its level, the root first, and every table
    /// before those below it.
    pub fn for_each_table(&self, each: &mut impl FnMut(u64, u8)) {
        let root = self.begin().table();
        self.all_tables(root, Order::Above, &mut |table, level| {
            each(table, level as u8);
        });
    }

    /// Tells the memory of everything that is mapped, in a table that was not filled by maps.
    pub(crate) fn announce_all(&self) {
        if self.memory.watches_runs() {
            for span in self.aperture().spans() {
                self.leaves(span)
                    .for_each(|leaf| self.memory.mapped(leaf.run, leaf.prot));
            }
        }
    }

    /// Selects whether unmapping leaves emptied tables in place, for the next map there; off at
    /// first. Buffers that come and go in the same place are then mapped and unmapped without a
    /// table that changes hands, and unmapping needs no flush of upper levels.
    ///
    /// [`give_back_empty_tables`](TableOps::give_back_empty_tables) gives them back, and so does
    /// [`map_anew`](TableOps::map_anew) where it maps.
    pub fn keep_empty_tables(&mut self, keep: bool) {
        self.keeps_empty = keep;
        self.has_empty |= keep;
    }

    /// Checks whether empty tables are linked.
    pub(crate) fn look_for_empty_tables(&mut self) {
        let root = self.begin().root;
        let mut found = false;
        self.for_each_table(&mut |address, level| {
            found |= address != root && self.is_empty(address, level.into());
        });
        self.has_empty = found;
    }

    /// Takes the whole table down: everything is unmapped, and all tables, the root too, are in
    /// the gather. No device may be attached to it any more; the flush still has to come, since
    /// units cache what they have walked. Tables that the memory does not give any more
    /// ([`intact`](Self::intact)) are not among them.
    pub fn tear_down(self) -> (Gather, M) {
        if self.memory.watches_runs() {
            for span in self.aperture().spans() {
                self.leaves(span)
                    .for_each(|leaf| self.memory.unmapped(leaf.run));
            }
        }
        let mut gather = Gather::new();
        let top = self.begin().table();
        self.memory.descended();
        self.all_tables(top, Order::Below, &mut |table, _| {
            if table != top.0 {
                gather.add_table(&self, table);
            }
        });
        let bytes = Self::root_bytes(&self.format) as u64;
        let size = self.memory.table_bytes();
        for table in (0..bytes.div_ceil(size)).rev() {
            gather.add_table(&self, top.0 + table * size);
        }
        (gather, self.memory)
    }

    pub(crate) fn root_bytes(format: &F) -> usize {
        format.entries(usize::from(format.levels()) - 1) * F::ENTRY_BYTES
    }

    /// Checks a range and strips it of the bits above the aperture.
    #[inline(always)]
    pub(crate) fn check_range(&self, range: Span<Iova>) -> Result<u64, RangeError> {
        if range.len == 0 {
            return Err(RangeError::Empty);
        }
        let granule = self.sizes.smallest();
        if !range.is_aligned(granule) {
            let value = if range.start & (granule - 1) != 0 {
                range.start
            } else {
                range.len
            };
            return Err(RangeError::Misaligned { value, granule });
        }
        let aperture = self.aperture();
        if !aperture.covers(&range) {
            return Err(RangeError::OutsideAperture {
                iova: range.start,
                len: range.start.checked_add(range.len - 1).map(|_| range.len),
                aperture,
            });
        }
        Ok(aperture.strip(range.start))
    }

    /// The entries of the table at `table`, which a pass now turns to.
    #[inline(always)]
    pub(crate) fn cells(&self, table: u64, level: usize) -> &[M::Cell] {
        self.memory.table_read(table);
        self.entries(table, level)
    }

    /// Index of the entry for the stripped address `at` in its table at `level`.
    #[inline(always)]
    pub(crate) fn index(&self, level: usize, at: u64) -> usize {
        (at >> F::shift(level)) as usize & (self.format.entries(level) - 1)
    }

    /// Bytes from `at` to the end of its table at `level`, but at most `todo`.
    #[inline(always)]
    pub(crate) fn room(&self, level: usize, at: u64, todo: u64) -> u64 {
        (!at & self.span_mask(level)).saturating_add(1).min(todo)
    }

    /// Bytes that a table at `level` spans, less one.
    #[inline(always)]
    pub(crate) fn span_mask(&self, level: usize) -> u64 {
        let bits = F::shift(level) + self.format.entries(level).trailing_zeros();
        if bits >= 64 {
            u64::MAX
        } else {
            (1 << bits) - 1
        }
    }
}

impl<F: fmt::Debug, M: TableMemory + fmt::Debug> fmt::Debug for Table<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table")
            .field("format", &self.format)
            .field("memory", &self.memory)
            .field("top", &self.top.shown())
            .field("sizes", &self.sizes)
            .field("tables", &self.tables.get())
            .finish()
    }
}

/// The entries `[index, index + count)`; none where that is outside the table.
#[inline(always)]
pub(crate) fn part<C>(cells: &[C], index: usize, count: usize) -> &[C] {
    cells.get(index..index + count).unwrap_or(&[])
}
