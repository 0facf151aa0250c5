//! Unmap: look at the ends, then clear and unlink.

use core::slice;

use runs::{Iova, Run, Span};

use super::access::{Access, Exclusive};
use super::clear::{row_of_leaves, same_run, take_dirty_run};
use super::removal_check::{Amount, OneRun, Range, RemovalCheck};
use super::removed::Removed;
use super::sink::{NoRuns, RunSink, Wants};
use super::{Level, Table, at_level, at_top};
use crate::cell::Cell;
use crate::error::TableUnmapError;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Unmaps exactly `range`, in one descent: all of it is mapped and no leaf reaches over its ends,
    /// or nothing happens. `sink` receives the physical runs; `gather` what must be flushed
    /// before they, and the tables that became empty, may be used again.
    pub fn unmap(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), TableUnmapError> {
        self.unmap_as(range, Amount::Whole, gather, sink, Exclusive)
            .map(|_| ())
    }

    /// Unmaps what is mapped in `range`, holes or not, and says how many bytes that were. No leaf
    /// may reach over the ends of the range.
    pub fn unmap_mapped(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, TableUnmapError> {
        self.unmap_as(range, Amount::Mapped, gather, sink, Exclusive)
    }

    /// Unmaps what is mapped in `range`, and tells nothing of it: for callers who know what that is. No
    /// leaf may reach over the ends of the range. Of tables that the range covers whole, those of the
    /// lowest level are not read.
    pub fn clear(&mut self, range: Span<Iova>, gather: &mut Gather) -> Result<(), TableUnmapError> {
        self.unmap_as(range, Amount::Untold, gather, &mut NoRuns, Exclusive)
            .map(|_| ())
    }

    /// The bytes that were mapped, as far as `amount` asks for them.
    #[inline(always)]
    pub(crate) fn unmap_as<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Result<u64, TableUnmapError> {
        self.check_sink(sink)?;
        match self.unmap_page_here(range, gather, sink, access) {
            Some(()) => Ok(range.len),
            None => self.unmap_range(range, amount, gather, sink, access),
        }
    }

    #[inline(never)]
    fn unmap_range<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Result<u64, TableUnmapError> {
        if self.unmap_straight(range, gather, sink, access).is_some() {
            self.intact()?;
            return Ok(range.len);
        }
        let look = Range {
            named: range,
            amount,
            run: OneRun::default(),
        };
        self.remove(range, look, gather, sink, access)
    }

    /// Removes as much of `range` as `look` says, in one descent, and returns how many bytes of it
    /// were mapped.
    #[inline(never)]
    pub(super) fn remove<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        mut look: impl RemovalCheck<F, M>,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Result<u64, TableUnmapError> {
        let at = self.check_range(range)?;
        self.intact()?;
        let (table, level) = self.lowest::<P, false>(at, range.len, access);
        let mut removed = Removed::new(self.aperture(), look.is_known(), gather, sink);
        let checked = at_level!(level, F, V => look.check::<V>(self, table, at, range.len));
        self.intact()?;
        let len = checked?;
        if len == 0 {
            // Not one of the pages is there.
            return Ok(0);
        }
        if removed.wants() == Wants::Runs {
            removed.one = look.one_run();
        }
        removed.lowest = look.lowest();
        at_level!(level, F, V => {
            self.clear_below::<V, S, P>(table, at, len, &mut removed, access)
        });
        let outcome = removed.finish();
        self.count::<P>(0, outcome.tables);
        self.free_emptied((table, level), (at, range.len), gather, access);
        self.intact()?;
        Ok(outcome.bytes)
    }

    /// Unlinks the table, from which `[at, at + len)` was removed, if it and perhaps others above it have become empty, as
    /// far as the operation owns what they span.
    #[inline(always)]
    pub(super) fn free_emptied<P: Access>(
        &self,
        (table, level): (u64, usize),
        (at, len): (u64, u64),
        gather: &mut Gather,
        access: P,
    ) {
        if self.frees_emptied(level, at, access) && level + 1 < usize::from(self.begin().levels) {
            let at = self.aperture().strip(at);
            if self.is_emptied((table, level), at, len) {
                self.unlink_emptied(at, len, gather, access);
            }
        }
    }

    /// Unlinks the tables on the way to `[at, at + len)` that are empty, as far as the operation owns
    /// what they span.
    #[cold]
    pub(super) fn unlink_emptied<P: Access>(
        &self,
        at: u64,
        len: u64,
        gather: &mut Gather,
        access: P,
    ) {
        let unlinked = at_top!(self.begin(), F, Top, root => {
            self.prune::<Top, _>(root, (at, len), gather, access)
        });
        self.count::<P>(0, unlinked);
    }

    /// Unlinks empty tables below `table` in `[at, at + todo)`; returns how many.
    fn prune<V: Level, P: Access>(
        &self,
        table: u64,
        (at, todo): (u64, u64),
        gather: &mut Gather,
        access: P,
    ) -> u64 {
        let mut count = 0;
        if V::N == 0 {
            return count;
        }
        for part in self.entries_in(table, V::N, at, todo) {
            if let Entry::Table(below) = part.entry() {
                count += self.prune::<V::Below, P>(below, (part.at(), part.len()), gather, access);
                if access.owns(part.base(), part.end()) && self.is_empty(below, V::N - 1) {
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
    pub(super) fn first_hole<V: Level>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        run: &mut OneRun,
    ) -> Option<u64> {
        run.looks_at(V::N);
        let mut entries = self.entries_in(table, V::N, at, todo);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => return Some(part.at()),
                Entry::Leaf { pa, log2 } => {
                    let count = if run.goes_on(pa) {
                        same_run::<F, V, M::Cell, false>(part.row(), log2)
                    } else {
                        row_of_leaves::<F, V, M::Cell>(part.row(), log2)
                    };
                    run.add(pa, (count as u64) << F::shift(V::N));
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let hole = self.first_hole::<V::Below>(below, part.at(), part.len(), run);
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
    pub(super) fn clear_below<V: Level, S: RunSink, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        removed: &mut Removed<'_, S>,
        access: P,
    ) {
        if V::N == 0 {
            return self.clear_row(table, at, self.room(0, at, todo), removed);
        }
        let mut entries = self.entries_in(table, V::N, at, todo);
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
                        take_dirty_run::<F, V, M::Cell>(row, log2)
                    } else {
                        (same_run::<F, V, M::Cell, true>(row, log2), false)
                    };
                    let bytes = (count as u64) << F::shift(V::N);
                    removed.leaves(V::N, part.base(), pa, bytes, dirty);
                    self.watch(part.base(), pa, bytes);
                    emptied(part.index, count);
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let level = V::N.saturating_sub(1);
                    if part.is_whole() && !self.keeps_empty {
                        self.read_out::<V::Below, S>(below, part.base(), removed);
                    } else {
                        let (at, len) = (part.at(), part.len());
                        self.clear_below::<V::Below, S, P>(below, at, len, removed, access);
                        if !self.frees_emptied(level, at, access)
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
    fn read_out<V: Level, S: RunSink>(&self, table: u64, at: u64, removed: &mut Removed<'_, S>) {
        let told = removed.wants() == Wants::Nothing || removed.one.is_some();
        if V::N <= removed.lowest && told && !self.memory.watches_runs() {
            // There are no tables below. Every entry stands for its own bytes, in a group or not.
            let rest = self.span_mask(V::N);
            let bytes = if removed.known {
                rest + 1
            } else {
                let used = |cell: &&M::Cell| !F::is_empty(cell.get());
                let entries = self.cells(table, V::N).iter().filter(used).count();
                (entries as u64) << F::shift(V::N)
            };
            if bytes > 0 {
                removed.stretch(V::N, at, at + rest, bytes);
            }
            return;
        }
        let all = self.room(V::N, at, u64::MAX);
        let mut entries = self.entries_in(table, V::N, at, all);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => {}
                Entry::Leaf { pa, log2 } => {
                    let (row, dirty) = (part.row(), removed.wants() == Wants::DirtyRuns);
                    let (count, dirty) = if dirty {
                        take_dirty_run::<F, V, M::Cell>(row, log2)
                    } else {
                        (same_run::<F, V, M::Cell, false>(row, log2), false)
                    };
                    let bytes = (count as u64) << F::shift(V::N);
                    removed.leaves(V::N, part.base(), pa, bytes, dirty);
                    self.watch(part.base(), pa, bytes);
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    self.read_out::<V::Below, S>(below, part.base(), removed);
                    self.unlinked(below, removed);
                }
            }
        }
    }
}
