//! Unmap: look at the ends, then clear and unlink.

use runs::{Joiner, Run, Span};

use super::dirty::take_leaf;
use super::form::Form;
use super::once::{Look, Range};
use super::top::Begin;
use super::{Level, Table, at_top, part};
use crate::cell::Cell;
use crate::error::UnmapError;
use crate::format::{Aperture, Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

/// Who is told of the physical runs that an unmap removes.
///
/// Any `FnMut(Run)` is one; [`Discard`] says that nobody wants to know, which saves reading the
/// leaves of tables that are removed whole.
pub trait RunSink {
    /// False when the runs are not wanted.
    const WANTED: bool;

    /// True when the sink wants to know which runs were written to: see [`WithDirty`]. Such a
    /// sink wants the runs, too.
    const DIRTY: bool = false;

    /// Takes the next run. Runs come in order of their device addresses, as long as possible.
    fn run(&mut self, run: Run);

    /// Takes the next run, of a sink with [`DIRTY`](Self::DIRTY), and whether the device has
    /// written to it. A run ends where this changes.
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        let _ = dirty;
        self.run(run);
    }
}

impl<T: FnMut(Run)> RunSink for T {
    const WANTED: bool = true;

    #[inline]
    fn run(&mut self, run: Run) {
        self(run);
    }
}

/// The sink for unmaps whose runs nobody wants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Discard;

impl RunSink for Discard {
    const WANTED: bool = false;

    fn run(&mut self, _run: Run) {}
}

/// A sink that is told of each run whether the device has written to it since it was mapped or
/// harvested: what an unmap needs while [dirty tracking](Table::track_dirty) is on.
///
/// The device may go on writing to a run that is dirty until the flush is done: copy it afterwards.
#[derive(Clone, Copy, Debug)]
pub struct WithDirty<T>(pub T);

impl<T: FnMut(Run, bool)> RunSink for WithDirty<T> {
    const WANTED: bool = true;
    const DIRTY: bool = true;

    #[inline]
    fn run(&mut self, run: Run) {
        // Nobody has looked: it counts as written to.
        (self.0)(run, true);
    }

    #[inline]
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        (self.0)(run, dirty);
    }
}

/// What an unmap has removed so far.
pub(super) struct Removed<'a, S> {
    gather: &'a mut Gather,
    sink: &'a mut S,
    joiner: Joiner<Run>,
    /// The run in the joiner was written to; only for sinks that want to know.
    dirty: bool,
    aperture: Aperture,
    /// First and last stripped address that was removed.
    hull: Option<(u64, u64)>,
    leaf_levels: u32,
    outcome: Outcome,
}

/// What an unmap has done.
#[derive(Clone, Copy, Default)]
pub(crate) struct Outcome {
    /// Bytes that were mapped.
    pub(crate) bytes: u64,
    /// Tables that were unlinked.
    pub(crate) tables: u64,
    /// A table became empty, but the one above it was not claimed: it is still linked.
    pub(crate) left_over: bool,
}

impl<'a, S: RunSink> Removed<'a, S> {
    fn new(aperture: Aperture, gather: &'a mut Gather, sink: &'a mut S) -> Self {
        const { assert!(S::WANTED || !S::DIRTY, "a sink of dirty runs wants runs") }
        Self {
            gather,
            sink,
            joiner: Joiner::new(),
            dirty: false,
            aperture,
            hull: None,
            leaf_levels: 0,
            outcome: Outcome::default(),
        }
    }

    /// Tells the last run, and the gather what has to be flushed.
    #[inline(always)]
    fn finish(mut self) -> Outcome {
        self.end_of_run();
        if let Some((first, last)) = self.hull {
            let range = Span::new(self.aperture.extend(first), last - first + 1);
            self.gather.add(range, self.leaf_levels);
        }
        self.outcome
    }

    /// Leaves at `level`, from the stripped address `at` to `pa`.
    #[inline(always)]
    fn leaves(&mut self, level: usize, at: u64, pa: u64, len: u64, dirty: bool) {
        self.stretch(level, at, at + (len - 1), len);
        if !S::WANTED {
            return;
        }
        if S::DIRTY && dirty != self.dirty {
            self.end_of_run();
            self.dirty = dirty;
        }
        let next = Run::new(self.aperture.extend(at), pa, len);
        if let Some(run) = self.joiner.push(next) {
            self.tell(run);
        }
    }

    #[inline(always)]
    fn tell(&mut self, run: Run) {
        if S::DIRTY {
            self.sink.dirty_run(run, self.dirty);
        } else {
            self.sink.run(run);
        }
    }

    #[inline(always)]
    fn end_of_run(&mut self) {
        if let Some(run) = self.joiner.finish() {
            self.tell(run);
        }
    }

    /// Something was removed between `first` and `last`, `bytes` in all.
    #[inline(always)]
    fn stretch(&mut self, level: usize, first: u64, last: u64, bytes: u64) {
        self.outcome.bytes += bytes;
        self.leaf_levels |= 1 << level;
        self.hull = Some((self.hull.map_or(first, |(first, _)| first), last));
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Unmaps exactly `range`, in one descent: all of it is mapped and no leaf reaches over its
    /// ends, or nothing happens. `sink` is told the physical runs; `gather` what must be flushed before they, and
    /// the tables that became empty, may be used again.
    pub fn unmap(
        &mut self,
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        let whole = Range {
            named: range,
            whole: true,
        };
        self.remove(range, whole, gather, sink).map(|_| ())
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
        let mapped = Range {
            named: range,
            whole: false,
        };
        self.remove(range, mapped, gather, sink)
    }

    /// Removes as much of `range` as `look` says, in one descent, and returns how many bytes of it
    /// were mapped.
    #[inline(always)]
    pub(super) fn remove<S: RunSink>(
        &mut self,
        range: Span,
        mut look: impl Look<F, M>,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, UnmapError> {
        self.check_sink(sink, self.dirty)?;
        let at = self.check_range(range)?;
        let mut removed = Removed::new(self.aperture(), gather, sink);
        self.memory.descended();
        at_top!(self.begin(), F, Top, root => {
            self.remove_once::<Top, S>(root, at, range.len, &mut look, &mut removed)
        })?;
        let outcome = removed.finish();
        self.tables = self.tables.saturating_sub(outcome.tables);
        Ok(outcome.bytes)
    }

    /// Clears and unlinks what was looked at, and claimed where that is necessary. All claims are
    /// given back.
    #[inline(always)]
    pub(crate) fn remove_claimed<S: RunSink, P: Form>(
        &self,
        begin: Begin,
        at: u64,
        len: u64,
        gather: &mut Gather,
        sink: &mut S,
        form: P,
    ) -> Outcome {
        let mut removed = Removed::new(self.aperture(), gather, sink);
        self.memory.descended();
        let empty = at_top!(begin, F, Top, root => {
            self.clear::<Top, S, P>(root, at, len, &mut removed, form)
        });
        // The root stays, unless it has become an ordinary table meanwhile.
        removed.outcome.left_over |= empty && P::SHARED && F::GROWS && !self.keeps_empty;
        self.release(begin.root, form);
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
            let hole = part(cells, self.index::<V>(at), slots)
                .iter()
                .position(|cell| F::is_empty(cell.get()))?;
            return Some(at + ((hole as u64) << F::shift(V::N)));
        }
        while room > 0 {
            let entry = cells.get(self.index::<V>(at)).map_or(0, Cell::get_acquire);
            let slot = 1u64 << F::shift(V::N);
            let here = (slot - (at & (slot - 1))).min(room);
            match F::decode(V::N, entry) {
                Entry::Empty => return Some(at),
                Entry::Leaf { .. } => {}
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
        if V::N == 0 && !held {
            return false;
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
                    let (entries, dirty) = if S::DIRTY {
                        take_leaf::<F, V, M::Cell>(cells, log2)
                    } else {
                        let clear = |cell: &M::Cell| cell.set(0);
                        (same_run::<F, V, M::Cell>(cells, log2, clear), false)
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
    fn watch(&self, at: u64, pa: u64, len: u64) {
        if M::WATCHES_RUNS {
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
        if V::N == 0 && !S::WANTED && !M::WATCHES_RUNS {
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
                    (entries, dirty) = if S::DIRTY {
                        take_leaf::<F, V, M::Cell>(cells, log2)
                    } else {
                        (same_run::<F, V, M::Cell>(cells, log2, |_| {}), false)
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

/// Goes over the entries, from the first of `cells` on, whose leaves are one run: of 2^`log2`
/// bytes each, each going on in memory where the one before ended. Calls `each` for every entry
/// and returns how many there were; a group counts with all its entries.
#[inline(always)]
fn same_run<F: Format, V: Level, C: Cell>(cells: &[C], log2: u32, each: impl Fn(&C)) -> usize {
    let Some(first) = cells.first() else { return 0 };
    let own = F::shift(V::N);
    let mut expected = first.get() & !F::HARDWARE_BITS;
    let mut done = 0;
    if F::GROUPS_ADVANCE || F::leaf_sizes(V::N).bits().count_ones() <= 1 || log2 == own {
        let stride = F::stride(own);
        for cell in cells {
            if cell.get() & !F::HARDWARE_BITS != expected {
                break;
            }
            each(cell);
            expected = expected.wrapping_add(stride);
            done += 1;
        }
    } else {
        let stride = F::stride(log2);
        for group in cells.chunks_exact(1 << (log2 - own)) {
            if group[0].get() & !F::HARDWARE_BITS != expected {
                break;
            }
            group.iter().for_each(&each);
            expected = expected.wrapping_add(stride);
            done += group.len();
        }
    }
    // A damaged group counts as one entry: whoever goes over a table must get to its end.
    done.max(1)
}
