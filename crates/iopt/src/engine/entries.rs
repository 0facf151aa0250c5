//! The entries of one table that a range covers: what every descent goes over.
//!
//! # Protocol
//!
//! An operation on a range is a recursion over tables, and in each table a loop over [`Entries`]:
//!
//! ```text
//! let mut entries = self.entries_in(table, v.n(), at, todo);
//! while let Some(part) = entries.next() {
//!     match part.entry() {
//!         Entry::Empty => ...
//!         Entry::Leaf { .. } => { ... of `part.row()`; entries.pass(n) }
//!         Entry::Table(below) => below!(v, v => self.pass(v, below, part.at(), part.len(), ...))
//!     }
//! }
//! ```
//!
//! * The range is a stripped address and a number of bytes. It is cut to what the table spans, so a
//!   caller may hand over more than that.
//! * Each entry that the range covers, be it in part, comes once and in order, as a [`Part`]: with
//!   the address at which the range enters it, and the bytes of the range that lie below it.
//! * A leaf may have several entries (a group), and leaves may follow one another in memory: a caller that
//!   handles them together reads [`row`](Part::row) and says with [`pass`](Entries::pass) how many
//!   entries are done with. A partly covered entry is always alone in its row.
//! * Nothing is read but when the caller asks: [`word`](Part::word) reads the entry anew at each call,
//!   by acquire.
//! * An entry at level 0 never leads to a table: one that says so is damaged and counts as empty.
//!   Therefore every recursion ends.
//! * A memory that gives too few entries for the table yields none; the shortage was noted when
//!   the entries were asked for (`trust.rs`).
//!
//! The level is a value here. In a pass whose level is a type it is a constant, and all of this is
//! inlined and folded; passes that do not decide about speed take the level as a number, so that they
//! are compiled once and not for each level.
//!
//! Two kinds of passes have loops of their own. The passes of *map* (`map.rs`, `row.rs`) are led
//! by the runs of a request, not by entries; the way *down* (`descend.rs`) has one entry in each
//! table.

use core::convert::Infallible;
use core::marker::PhantomData;

use super::{Table, part};
use crate::cell::Cell;
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

/// The entries of one table that a range covers, in order.
#[derive(Debug)]
pub(super) struct Entries<'t, F, C> {
    /// All that are covered, be it in part.
    pub(super) cells: &'t [C],
    /// Which of them comes next.
    next: usize,
    level: usize,
    /// The first and the last address of the range in this table.
    first: u64,
    pub(super) last: u64,
    format: PhantomData<F>,
}

/// An entry, and what a range covers of it.
pub(super) struct Part<'t, F, C> {
    pub(super) cell: &'t C,
    /// Which of the covered entries it is.
    pub(super) index: usize,
    entries: Entries<'t, F, C>,
}

impl<'t, F: Format, C: Cell> Entries<'t, F, C> {
    /// Entries of no table.
    pub(super) const fn none() -> Self {
        Self {
            cells: &[],
            next: 0,
            level: 0,
            first: 0,
            last: 0,
            format: PhantomData,
        }
    }

    /// Goes on behind `count` entries; the one that came last is the first of them.
    #[inline(always)]
    pub(super) fn pass(&mut self, count: usize) {
        self.next += count.saturating_sub(1);
    }

    /// Goes on behind the next `count` entries, which do not come.
    #[inline(always)]
    pub(super) fn pass_next(&mut self, count: usize) {
        self.next += count;
    }

    /// The entries that are still to come.
    #[inline(always)]
    pub(super) fn rest(&self) -> &'t [C] {
        self.cells.get(self.next..).unwrap_or(&[])
    }

    #[inline(always)]
    pub(super) fn level(&self) -> usize {
        self.level
    }
}

impl<'t, F: Format, C: Cell> Iterator for Entries<'t, F, C> {
    type Item = Part<'t, F, C>;

    #[inline(always)]
    fn next(&mut self) -> Option<Part<'t, F, C>> {
        let index = self.next;
        let cell = self.cells.get(index)?;
        self.next = index + 1;
        Some(Part {
            cell,
            index,
            entries: Entries { ..*self },
        })
    }
}

impl<'t, F: Format, C: Cell> Part<'t, F, C> {
    #[inline(always)]
    pub(super) fn word(&self) -> u64 {
        self.cell.get_acquire()
    }

    /// Decodes the entry as it is now.
    #[inline(always)]
    pub(super) fn entry(&self) -> Entry {
        decode::<F>(self.entries.level, self.word())
    }

    /// The entry and those behind it that the range covers, be it in part.
    #[inline(always)]
    pub(super) fn row(&self) -> &'t [C] {
        self.entries.cells.get(self.index..).unwrap_or(&[])
    }

    /// The entry and those behind it, `count` in all.
    #[inline(always)]
    pub(super) fn group(&self, count: usize) -> &'t [C] {
        part(self.entries.cells, self.index, count)
    }

    /// Where the addresses of the entry begin.
    #[inline(always)]
    pub(super) fn base(&self) -> u64 {
        let shift = F::shift(self.entries.level);
        let first = self.entries.first >> shift << shift;
        first.wrapping_add((self.index as u64) << shift)
    }

    /// Where they end.
    #[inline(always)]
    pub(super) fn end(&self) -> u64 {
        self.base() | (self.slot() - 1)
    }

    /// The stripped address at which the range enters it.
    #[inline(always)]
    pub(super) fn at(&self) -> u64 {
        self.base().max(self.entries.first)
    }

    /// Bytes of the range that lie below it.
    #[inline(always)]
    pub(super) fn len(&self) -> u64 {
        self.end().min(self.entries.last) - self.at() + 1
    }

    /// True when the range covers all that the entry spans.
    #[inline(always)]
    pub(super) fn is_whole(&self) -> bool {
        self.base() >= self.entries.first && self.end() <= self.entries.last
    }

    /// Bytes that the entry spans.
    #[inline(always)]
    fn slot(&self) -> u64 {
        1 << F::shift(self.entries.level)
    }
}

/// Decodes an entry; one at level 0 never leads to a table.
#[inline(always)]
pub(super) fn decode<F: Format>(level: usize, word: u64) -> Entry {
    match F::decode(level, word) {
        Entry::Table(_) if level == 0 => Entry::Empty,
        entry => entry,
    }
}

/// Order of a table and the tables below it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Above,
    Below,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// The entries of the table at `table` that `[at, at + todo)` covers, at least one byte; `at` lies in it,
    /// and the range ends where addresses do, if not before.
    #[inline(always)]
    pub(super) fn entries_in(
        &self,
        table: u64,
        level: usize,
        at: u64,
        todo: u64,
    ) -> Entries<'_, F, M::Cell> {
        let shift = F::shift(level);
        let last = (at | self.span_mask(level)).min(at.wrapping_add(todo - 1));
        let count = ((last >> shift) - (at >> shift)) as usize + 1;
        Entries {
            cells: part(self.cells(table, level), self.index(level, at), count),
            next: 0,
            level,
            first: at,
            last,
            format: PhantomData,
        }
    }

    /// All entries of the table at `table`, wherever it begins.
    #[inline(always)]
    pub(super) fn all_entries(&self, table: u64, level: usize) -> Entries<'_, F, M::Cell> {
        self.entries_in(table, level, 0, u64::MAX)
    }

    /// Calls `each`, with its address and its level, for `table` and every table below it that has an
    /// entry for `[at, at + todo)`, until one call fails.
    pub(super) fn tables_in<E>(
        &self,
        (table, level): (u64, usize),
        (at, todo): (u64, u64),
        order: Order,
        each: &mut impl FnMut(u64, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        if order == Order::Above {
            each(table, level)?;
        }
        if level > 0 {
            for part in self.entries_in(table, level, at, todo) {
                if let Entry::Table(below) = part.entry() {
                    self.tables_in((below, level - 1), (part.at(), part.len()), order, each)?;
                }
            }
        }
        if order == Order::Below {
            each(table, level)?;
        }
        Ok(())
    }

    /// Calls `each`, with its address and its level, for `table` and every table below it.
    pub(crate) fn all_tables(
        &self,
        (table, level): (u64, usize),
        order: Order,
        each: &mut impl FnMut(u64, usize),
    ) {
        let mut each = |table, level| {
            each(table, level);
            Ok::<_, Infallible>(())
        };
        let Ok(()) = self.tables_in((table, level), (0, u64::MAX), order, &mut each);
    }
}
