//! Unmap: look at the ends, then clear and unlink.

use runs::{Run, Span};

use super::clear::{first_empty, row_of_leaves, same_run, take_dirty_run};
use super::form::{Exclusive, Form};
use super::look::{Look, Range};
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
        range: Span,
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
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        self.unmap_range(range, false, gather, sink)
    }

    #[inline(always)]
    pub(crate) fn unmap_range<S: RunSink>(
        &mut self,
        range: Span,
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
        range: Span,
        mut look: impl Look<F, M>,
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
        let len = at_level!(level, F, V => look.look::<V>(self, table, at, range.len));
        self.intact()?;
        let len = len?;
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
            self.prune::<Top, _>(root, at, len, gather, Exclusive)
        });
    }

    /// Clears and unlinks what was looked at from `table` at `level` on, and claimed where that is
    /// necessary. All claims are given back.
    #[inline(always)]
    pub(crate) fn remove_claimed<S: RunSink, P: Form>(
        &self,
        (table, level): (u64, usize),
        at: u64,
        len: u64,
        gather: &mut Gather,
        sink: &mut S,
        form: P,
    ) -> Outcome {
        let mut removed = Removed::new(self.aperture(), gather, sink);
        let empty = at_level!(level, F, V => {
            self.clear::<V, S, P>(table, at, len, &mut removed, form)
        });
        // Whoever began in it has not claimed the table above it.
        removed.outcome.left_over |= empty && !self.keeps_empty;
        self.release(table, form);
        removed.finish()
    }

    /// The first stripped address in `[at, at + todo)` that is not mapped.
    pub(super) fn first_hole<V: Level>(&self, table: u64, mut at: u64, todo: u64) -> Option<u64> {
        let cells = self.cells::<V>(table);
        let mut room = self.room::<V>(at, todo);
        let slots = (room >> F::shift(V::N)) as usize;
        // A table at level 0 that is full needs no look.
        if V::N == 0 && self.memory.meta(table).live.get() == cells.len() as u64 {
            return None;
        }
        if V::N == 0 {
            let hole = first_empty::<F, _>(part(cells, self.index::<V>(at), slots))?;
            return Some(at + ((hole as u64) << F::shift(V::N)));
        }
        while room > 0 {
            let rest = cells.get(self.index::<V>(at)..).unwrap_or(&[]);
            let entry = rest.first().map_or(0, Cell::get_acquire);
            let slot = 1u64 << F::shift(V::N);
            let mut here = (slot - (at & (slot - 1))).min(room);
            match F::decode(V::N, entry) {
                Entry::Empty => return Some(at),
                Entry::Leaf { log2, .. } => {
                    let row = part(rest, 0, (room >> F::shift(V::N)) as usize);
                    let entries = row_of_leaves::<F, V, M::Cell>(row, log2);
                    here = ((entries as u64) << F::shift(V::N)).clamp(here, room);
                }
                Entry::Table(below) => {
                    let hole = self.first_hole::<V::Below>(below, at, here);
                    if hole.is_some() {
                        return hole;
                    }
                }
            }
            at = at.wrapping_add(here);
            room -= here;
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
    pub(super) fn clear<V: Level, S: RunSink, P: Form>(
        &self,
        table: u64,
        mut at: u64,
        todo: u64,
        removed: &mut Removed<'_, S>,
        form: P,
    ) -> bool {
        let held = self.holds(table, form);
        if V::N == 0 {
            return held && self.clear_row(table, at, self.room::<V>(at, todo), removed);
        }
        let cells = self.cells::<V>(table);
        let mut room = self.room::<V>(at, todo);
        let mut gone = 0u64;
        // The stretch that is cleared and that the memory was not told of.
        let (mut stored, mut end) = (0, 0);
        let mut emptied = |index: usize, entries: usize| {
            if index != end {
                self.wrote(cells, stored, end);
                stored = index;
            }
            end = index + entries;
        };
        while room > 0 {
            let slot = 1u64 << F::shift(V::N);
            let here = (slot - (at & (slot - 1))).min(room);
            let count = if here < slot {
                1
            } else {
                (room >> F::shift(V::N)) as usize
            };
            let index = self.index::<V>(at);
            let cells = part(cells, index, count);
            let Some(cell) = cells.first() else { break };
            let mut done = here;
            match F::decode(V::N, cell.get_acquire()) {
                Entry::Empty => {}
                Entry::Leaf { .. } if !held => {}
                Entry::Table(_) if !held && here == slot => {}
                Entry::Leaf { pa, log2 } => {
                    let (entries, dirty) = if removed.wants() == Wants::DirtyRuns {
                        take_dirty_run::<F, V, M::Cell>(cells, log2)
                    } else {
                        (same_run::<F, V, M::Cell, true>(cells, log2), false)
                    };
                    done = (entries as u64) << F::shift(V::N);
                    removed.leaves(V::N, at, pa, done, dirty);
                    self.watch(at, pa, done);
                    emptied(index, entries);
                    gone += entries as u64;
                }
                Entry::Table(below) => {
                    let empty = if here == slot && !self.keeps_empty {
                        self.read_out::<V::Below, S, P>(below, at, removed, form);
                        true
                    } else {
                        self.clear::<V::Below, S, P>(below, at, here, removed, form)
                    };
                    if empty && held && !self.keeps_empty {
                        cell.set(0);
                        emptied(index, 1);
                        self.unlinked(below, removed, form);
                        gone += 1;
                    } else {
                        removed.outcome.left_over |= empty && !self.keeps_empty;
                        self.release(below, form);
                    }
                }
            }
            at = at.wrapping_add(done);
            room -= done;
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
    pub(super) fn unlinked<S, P: Form>(&self, table: u64, removed: &mut Removed<'_, S>, form: P) {
        self.bury(table, form);
        removed.gather.add_table(self, table);
        removed.outcome.tables += 1;
    }

    /// Reports everything below `table`, which the caller unlinks as a whole: its entries are read
    /// and not written, but for a sink that wants dirty state, for which each leaf is taken out by
    /// itself. `at` is the first address that it spans.
    fn read_out<V: Level, S: RunSink, P: Form>(
        &self,
        table: u64,
        mut at: u64,
        removed: &mut Removed<'_, S>,
        form: P,
    ) {
        if V::N == 0 && removed.wants() == Wants::Nothing && !self.memory.watches_runs() {
            // Every live entry of the lowest level stands for its own bytes, in a group or not.
            let bytes = self.memory.meta(table).live.get() << F::shift(V::N);
            if bytes > 0 {
                removed.stretch(V::N, at, at + self.span_mask::<V>(), bytes);
            }
            return;
        }
        let mut cells = self.cells::<V>(table);
        while let Some(cell) = cells.first() {
            let mut entries = 1;
            match F::decode(V::N, cell.get_acquire()) {
                Entry::Empty => {}
                Entry::Leaf { pa, log2 } => {
                    let dirty;
                    (entries, dirty) = if removed.wants() == Wants::DirtyRuns {
                        take_dirty_run::<F, V, M::Cell>(cells, log2)
                    } else {
                        (same_run::<F, V, M::Cell, false>(cells, log2), false)
                    };
                    let bytes = (entries as u64) << F::shift(V::N);
                    removed.leaves(V::N, at, pa, bytes, dirty);
                    self.watch(at, pa, bytes);
                }
                Entry::Table(below) if V::N > 0 => {
                    self.read_out::<V::Below, S, P>(below, at, removed, form);
                    self.unlinked(below, removed, form);
                }
                Entry::Table(_) => {}
            }
            at = at.wrapping_add((entries as u64) << F::shift(V::N));
            cells = cells.get(entries..).unwrap_or(&[]);
        }
    }
}
