//! Unmap: look at the ends, then clear and unlink.

use runs::{Iova, Run, Span};

use super::access::{Access, Exclusive};
use super::clear::{first_empty, row_of_leaves, same_run, take_dirty_run};
use super::removal_check::{Range, RemovalCheck};
use super::removed::{Outcome, Removed};
use super::sink::{RunSink, Wants};
use super::trust::named;
use super::{Level, Table, at_level, at_top, part};
use crate::cell::Cell;
use crate::error::UnmapError;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Unmaps exactly `range`, in one descent: all of it is mapped and no leaf reaches over its ends,
    /// or nothing happens. `sink` is told the physical runs; `gather` what must be flushed before
    /// they, and the tables that became empty, may be used again.
    pub fn unmap(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        self.unmap_range(range, true, gather, sink).map(|_| ())
    }

    /// Unmaps what is mapped in `range`, holes or not, and says how many bytes that were. No leaf
    /// may reach over the ends of the range.
    ///
    /// Quicker than [`unmap`](Self::unmap) by one look at the entries, where a table is not
    /// removed whole.
    pub fn unmap_mapped(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        self.unmap_range(range, false, gather, sink)
    }

    #[inline(always)]
    pub(crate) fn unmap_range<S: RunSink>(
        &mut self,
        range: Span<Iova>,
        whole: bool,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, UnmapError> {
        self.check_sink(sink, self.dirty)?;
        if self.unmap_page(range, gather, sink, Exclusive).is_some() {
            return Ok(range.len);
        }
        let look = Range {
            named: range,
            whole,
        };
        self.remove(range, look, gather, sink)
    }

    /// Removes as much of `range` as `look` says, in one descent, and returns how many bytes of it
    /// were mapped.
    #[inline(never)]
    pub(super) fn remove<S: RunSink>(
        &mut self,
        range: Span<Iova>,
        mut look: impl RemovalCheck<F, M>,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, UnmapError> {
        let at = self.check_range(range)?;
        self.intact()?;
        let begin = self.begin();
        let Ok((table, level)) = self.lowest(begin, at, range.len, Exclusive) else {
            // By `&mut` no claim is waited for.
            return Err(named(begin.root, usize::from(begin.levels) - 1).into());
        };
        let len = at_level!(level, F, V => look.check::<V>(self, table, at, range.len));
        self.intact()?;
        let len = len?;
        if len == 0 {
            // Not one of the pages is there.
            return Ok(0);
        }
        let outcome = self.remove_claimed((table, level), at, len, gather, sink, Exclusive);
        self.tables = self.tables.saturating_sub(outcome.tables);
        if outcome.left_over {
            self.unlink_emptied(at, range.len, gather);
        }
        self.intact()?;
        Ok(outcome.bytes)
    }

    /// Unlinks the tables on the way to `[at, at + len)` that became empty.
    #[cold]
    pub(super) fn unlink_emptied(&mut self, at: u64, len: u64, gather: &mut Gather) {
        self.tables -= at_top!(self.begin(), F, Top, root => {
            self.prune::<Top, _>(root, (at, len), gather, Exclusive)
        });
    }

    /// Clears and unlinks what was looked at from `table` at `level` on, and claimed where that is
    /// necessary. All claims are given back.
    #[inline(always)]
    pub(crate) fn remove_claimed<S: RunSink, P: Access>(
        &self,
        (table, level): (u64, usize),
        at: u64,
        len: u64,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Outcome {
        let mut removed = Removed::new(self.aperture(), gather, sink);
        let empty = at_level!(level, F, V => {
            self.clear::<V, S, P>(table, at, len, &mut removed, access)
        });
        // Whoever began in it has not claimed the table above it.
        removed.outcome.left_over |= empty && !self.keeps_empty;
        self.release(table, access);
        removed.finish()
    }

    /// The first stripped address in `[at, at + todo)` that is not mapped.
    pub(super) fn first_hole<V: Level>(&self, table: u64, at: u64, todo: u64) -> Option<u64> {
        if V::N == 0 {
            let cells = self.cells(table, 0);
            // A table that is full needs no look.
            if self.memory.meta(table).live.get() == cells.len() as u64 {
                return None;
            }
            let pages = (self.room(0, at, todo) >> F::shift(0)) as usize;
            let hole = first_empty::<F, _>(part(cells, self.index(0, at), pages))?;
            return Some(at + ((hole as u64) << F::shift(0)));
        }
        let mut entries = self.entries_in(table, V::N, at, todo);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Empty => return Some(part.at()),
                Entry::Leaf { log2, .. } => {
                    entries.pass(row_of_leaves::<F, V, M::Cell>(part.row(), log2));
                }
                Entry::Table(below) => {
                    let hole = self.first_hole::<V::Below>(below, part.at(), part.len());
                    if hole.is_some() {
                        return hole;
                    }
                }
            }
        }
        None
    }

    /// Clears the entries of `[at, at + todo)` in the linked table `table` and in those below.
    /// True when no entry is left in it. The claim on `table` stays. The memory is told of the
    /// entries that were [`written`](TableMemory::written) when the table is done, which is before
    /// its claim is given back and before the gather can be flushed.
    ///
    /// What is not claimed came after the look: it was mapped by somebody else after this unmap, and
    /// is left alone.
    pub(super) fn clear<V: Level, S: RunSink, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        removed: &mut Removed<'_, S>,
        access: P,
    ) -> bool {
        let held = self.holds(table, access);
        if V::N == 0 {
            return held && self.clear_row(table, at, self.room(0, at, todo), removed);
        }
        let mut entries = self.entries_in(table, V::N, at, todo);
        let cells = entries.cells;
        let mut gone = 0u64;
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
                Entry::Leaf { .. } if !held => {}
                Entry::Table(_) if !held && part.is_whole() => {}
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
                    gone += count as u64;
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let empty = if part.is_whole() && !self.keeps_empty {
                        self.read_out::<V::Below, S, P>(below, part.base(), removed, access);
                        true
                    } else {
                        self.clear::<V::Below, S, P>(below, part.at(), part.len(), removed, access)
                    };
                    if empty && held && !self.keeps_empty {
                        part.cell.set(0);
                        emptied(part.index, 1);
                        self.unlinked(below, removed, access);
                        gone += 1;
                    } else {
                        removed.outcome.left_over |= empty && !self.keeps_empty;
                        self.release(below, access);
                    }
                }
            }
        }
        self.wrote(cells, stored, end);
        if gone == 0 {
            return false;
        }
        let live = &self.memory.meta(table).live;
        let left = live.get().saturating_sub(gone);
        live.set(left);
        left == 0
    }

    /// Tells the memory of leaves that are unmapped, from the stripped address `at` to `pa`.
    #[inline(always)]
    pub(super) fn watch(&self, at: u64, pa: u64, len: u64) {
        if self.memory.watches_runs() {
            let iova = self.aperture().extend(at);
            self.memory.unmapped(Run::new(iova, pa, len));
        }
    }

    /// The entry that led to `table` was just emptied.
    #[inline(always)]
    pub(super) fn unlinked<S, P: Access>(
        &self,
        table: u64,
        removed: &mut Removed<'_, S>,
        access: P,
    ) {
        self.bury(table, access);
        removed.gather.add_table(self, table);
        removed.outcome.tables += 1;
    }

    /// Reports everything below `table`, which the caller unlinks as a whole: its entries are read
    /// and not written, but for a sink that wants dirty state, for which each leaf is taken out by
    /// itself. `at` is the first address that it spans.
    fn read_out<V: Level, S: RunSink, P: Access>(
        &self,
        table: u64,
        at: u64,
        removed: &mut Removed<'_, S>,
        access: P,
    ) {
        if V::N == 0 && removed.wants() == Wants::Nothing && !self.memory.watches_runs() {
            // Every live entry of the lowest level stands for its own bytes, in a group or not.
            let bytes = self.memory.meta(table).live.get() << F::shift(V::N);
            if bytes > 0 {
                removed.stretch(V::N, at, at + self.span_mask(V::N), bytes);
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
                    self.read_out::<V::Below, S, P>(below, part.base(), removed, access);
                    self.unlinked(below, removed, access);
                }
            }
        }
    }
}
