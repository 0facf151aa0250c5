//! Unmap: look at the ends, then clear and unlink.

use core::slice;

use runs::{Iova, Run, Span};

use super::claim::Claim;
use super::clear::{row_of_leaves, same_run, take_dirty_run};
use super::look::{Amount, Look, OneRun};
use super::removed::Removed;
use super::sink::{RunSink, Wants};
use super::{L, Level, Table, at_level, below, part};
use crate::cell::{Cell, Series};
use crate::error::TableUnmapError;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Unmaps one page by a path of its own, and everything else by one for all. Returns the bytes that were mapped, as
    /// far as `amount` asks for them.
    #[inline(always)]
    pub(crate) fn unmap_range<S: RunSink>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
        claim: Claim,
    ) -> Result<u64, TableUnmapError> {
        self.check_sink(sink)?;
        match self.unmap_page(range, gather, sink, claim) {
            Some(()) => Ok(range.len),
            None => self.unmap_any(range, amount, gather, sink, claim),
        }
    }

    #[inline(never)]
    fn unmap_any<S: RunSink>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
        claim: Claim,
    ) -> Result<u64, TableUnmapError> {
        let at = self.check_range(range)?;
        self.intact()?;
        let (table, level) = self.lowest::<false>(at, range.len);
        if sink.wants() != Wants::DirtyRuns {
            // Pages are unmapped most often, and a level that is known costs less.
            let taken = match level {
                0 => self.take_row(L::<0>, table, range),
                _ => at_level!(level, v => self.take_row(v, table, range)),
            };
            if let Some(pa) = taken {
                let run = Run::new(range.start, Span::new(pa, range.len));
                self.report(run, level, false, gather, sink);
                self.free_emptied((table, level), (at, range.len), gather, claim);
                self.intact()?;
                return Ok(range.len);
            }
        }
        let mut look = Look::new(range, amount);
        let mut removed = Removed::new(self.aperture(), amount != Amount::Mapped, gather, sink);
        let looked = at_level!(level, v => look.at(v, self, table, at, range.len));
        self.intact()?;
        looked?;
        if removed.wants() == Wants::Runs {
            removed.one = look.one_run();
        }
        removed.lowest = look.lowest();
        self.empty((table, level), (at, range.len), removed, claim)
    }

    /// Empties the entries for `[at, at + len)`, of which the look has found that they may be, in the lowest table that all
    /// of it goes through. Returns the bytes that were mapped.
    pub(super) fn empty<S: RunSink>(
        &self,
        (table, level): (u64, usize),
        (at, len): (u64, u64),
        mut removed: Removed<'_, S>,
        claim: Claim,
    ) -> Result<u64, TableUnmapError> {
        at_level!(level, v => {
            self.clear_below(v, table, at, len, &mut removed, claim)
        });
        let (outcome, gather) = removed.finish();
        self.count(0, outcome.tables);
        self.free_emptied((table, level), (at, len), gather, claim);
        self.intact()?;
        Ok(outcome.bytes)
    }

    /// Empties the entries of `range` if that is one run of leaves of one table, one leaf together or a leaf for each
    /// entry, and says where they led.
    #[inline(always)]
    fn take_row(&self, v: impl Level, table: u64, range: Span<Iova>) -> Option<u64> {
        let own = F::shift(v.n());
        if (range.start | range.len) & ((1 << own) - 1) != 0 {
            return None;
        }
        let count = (range.len >> own) as usize;
        let cells = part(
            self.entries(table, v.n()),
            self.index(v.n(), range.start),
            count,
        );
        let Entry::Leaf { pa, log2 } = F::decode(v.n(), cells.first()?.get()) else {
            return None;
        };
        // Leaves of a series have one size, where their entries go on by a constant step. One leaf is known by its first.
        let one = 1u64.checked_shl(log2) == Some(range.len) && range.start & (range.len - 1) == 0;
        if !one && (log2 != own || same_run::<F, _, false>(v, cells, log2) != cells.len()) {
            return None;
        }
        self.memory.table_read(table);
        let empty = Series {
            next: 0,
            stride: 0,
            ignored: 0,
        };
        M::Cell::set_series(cells, empty);
        self.memory.written(cells);
        Some(pa)
    }

    /// Unlinks the table, from which `[at, at + len)` was removed, if it and perhaps others above it have become empty, as
    /// far as the operation owns what they span.
    #[inline(always)]
    pub(super) fn free_emptied(
        &self,
        (table, level): (u64, usize),
        (at, len): (u64, u64),
        gather: &mut Gather,
        claim: Claim,
    ) {
        if self.frees_emptied(level, at, claim) && level + 1 < usize::from(self.begin().levels) {
            let at = self.aperture().strip(at);
            if self.is_emptied((table, level), at, len) {
                self.unlink_emptied(at, len, gather, claim);
            }
        }
    }

    /// Unlinks the tables on the way to `[at, at + len)` that are empty, as far as the operation owns
    /// what they span.
    #[cold]
    pub(super) fn unlink_emptied(&self, at: u64, len: u64, gather: &mut Gather, claim: Claim) {
        let unlinked = self.prune(self.begin().table(), (at, len), gather, claim);
        self.count(0, unlinked);
    }

    /// Unlinks empty tables below `table` in `[at, at + todo)`; returns how many.
    fn prune(
        &self,
        (table, level): (u64, usize),
        (at, todo): (u64, u64),
        gather: &mut Gather,
        claim: Claim,
    ) -> u64 {
        let mut count = 0;
        for part in self.entries_in(table, level, at, todo) {
            if let Entry::Table(below) = part.entry() {
                let lower = (below, level - 1);
                count += self.prune(lower, (part.at(), part.len()), gather, claim);
                if claim.covers(part.base(), part.end()) && self.is_empty(below, level - 1) {
                    part.cell.set(0);
                    self.memory.written(slice::from_ref(part.cell));
                    gather.add_table(self, below);
                    count += 1;
                }
            }
        }
        count
    }

    /// The first stripped address in `[at, at + todo)` that is not mapped; until then, whether it is one
    /// `run`.
    pub(super) fn first_hole(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        todo: u64,
        run: &mut OneRun,
    ) -> Option<u64> {
        run.looks_at(v.n());
        let mut entries = self.entries_in(table, v.n(), at, todo);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => return Some(part.at()),
                Entry::Leaf { pa, log2 } => {
                    let count = if run.goes_on(pa) {
                        same_run::<F, M::Cell, false>(v, part.row(), log2)
                    } else {
                        row_of_leaves::<F, M::Cell>(v, part.row(), log2)
                    };
                    run.add(pa, (count as u64) << F::shift(v.n()));
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let hole =
                        below!(v, v => self.first_hole(v, below, part.at(), part.len(), run));
                    if hole.is_some() {
                        return hole;
                    }
                }
            }
        }
        None
    }

    /// Clears the entries of `[at, at + todo)` in the linked table `table` and in those below. Tables
    /// that the range covers whole are unlinked, and others that have become empty, as far as the
    /// operation owns what they span. The memory is notified of the entries that were
    /// [`written`](TableMemory::written) when the table is done, which is before the gather can be
    /// flushed.
    pub(super) fn clear_below<S: RunSink>(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        todo: u64,
        removed: &mut Removed<'_, S>,
        claim: Claim,
    ) {
        if v.n() == 0 {
            return self.clear_row(table, at, self.room(0, at, todo), removed);
        }
        let mut entries = self.entries_in(table, v.n(), at, todo);
        let cells = entries.cells;
        // The stretch that is cleared and that the memory was not told of.
        let (mut stored, mut end) = (0, 0);
        let mut emptied = |index: usize, count: usize| {
            if index != end {
                self.wrote(cells, stored, end);
                stored = index;
            }
            end = index + count;
        };
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => {}
                Entry::Leaf { pa, log2 } => {
                    let (row, dirty) = (part.row(), removed.wants() == Wants::DirtyRuns);
                    let (count, dirty) = if dirty {
                        take_dirty_run::<F, M::Cell>(v, row, log2)
                    } else {
                        (same_run::<F, M::Cell, true>(v, row, log2), false)
                    };
                    let bytes = (count as u64) << F::shift(v.n());
                    removed.leaves(v.n(), part.base(), pa, bytes, dirty);
                    self.watch(part.base(), pa, bytes);
                    emptied(part.index, count);
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let level = v.n().saturating_sub(1);
                    if part.is_whole() && !self.keeps_empty {
                        below!(v, v => self.read_out(v, below, part.base(), removed));
                    } else {
                        let (at, len) = (part.at(), part.len());
                        below!(v, v => self.clear_below(v, below, at, len, removed, claim));
                        if !self.frees_emptied(level, at, claim)
                            || !self.is_emptied((below, level), at, len)
                        {
                            continue;
                        }
                    }
                    part.cell.set(0);
                    emptied(part.index, 1);
                    self.unlinked(below, removed);
                }
            }
        }
        self.wrote(cells, stored, end);
    }

    /// Tells the memory of leaves that are unmapped, from the stripped address `at` to `pa`.
    #[inline(always)]
    pub(super) fn watch(&self, at: u64, pa: u64, len: u64) {
        if self.memory.watches_runs() {
            let iova = self.aperture().extend(at);
            self.memory.unmapped(Run { iova, pa, len });
        }
    }

    /// The entry that led to `table` was just emptied.
    #[inline(always)]
    pub(super) fn unlinked<S>(&self, table: u64, removed: &mut Removed<'_, S>) {
        removed.gather.add_table(self, table);
        removed.outcome.tables += 1;
    }

    /// Reports everything below `table`, which the caller unlinks as a whole: its entries are read
    /// and not written, but for a sink that wants dirty state, for which each leaf is taken out by
    /// itself. `at` is the first address that it spans.
    fn read_out<S: RunSink>(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        removed: &mut Removed<'_, S>,
    ) {
        let told = removed.wants() == Wants::Nothing || removed.one.is_some();
        if v.n() <= removed.lowest && told && !self.memory.watches_runs() {
            // There are no tables below. Every entry stands for its own bytes, in a group or not.
            let rest = self.span_mask(v.n());
            let bytes = if removed.known {
                rest + 1
            } else {
                let used = |cell: &&M::Cell| !F::is_empty(cell.get());
                let entries = self.cells(table, v.n()).iter().filter(used).count();
                (entries as u64) << F::shift(v.n())
            };
            if bytes > 0 {
                removed.stretch(v.n(), at, at + rest, bytes);
            }
            return;
        }
        let all = self.room(v.n(), at, u64::MAX);
        let mut entries = self.entries_in(table, v.n(), at, all);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => {}
                Entry::Leaf { pa, log2 } => {
                    let (row, dirty) = (part.row(), removed.wants() == Wants::DirtyRuns);
                    let (count, dirty) = if dirty {
                        take_dirty_run::<F, M::Cell>(v, row, log2)
                    } else {
                        (same_run::<F, M::Cell, false>(v, row, log2), false)
                    };
                    let bytes = (count as u64) << F::shift(v.n());
                    removed.leaves(v.n(), part.base(), pa, bytes, dirty);
                    self.watch(part.base(), pa, bytes);
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    below!(v, v => self.read_out(v, below, part.base(), removed));
                    self.unlinked(below, removed);
                }
            }
        }
    }
}
