//! Emptying entries of one table at level 0.

use runs::{Iova, Span};

use super::claim::Claim;
use super::dirty::{take_leaf, take_word};
use super::removed::Removed;
use super::row::{are_empty, first_occupied_in_parts};
use super::sink::{RunSink, Wants};
use super::{L, Level, Table, part};
use crate::cell::{Cell, Series};
use crate::error::TableUnmapError;
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

/// Why a row of entries is not to be emptied, by stripped address.
pub(super) enum Refusal {
    /// A leaf there reaches over an end of the range.
    InsideLeaf(u64),
    /// Nothing is mapped there.
    Hole(u64),
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Looks at the entries of `[at, at + todo)`, which are all in `table`: no leaf may reach over
    /// the ends, and with `whole` no entry may be empty. Where the range goes on in other tables that
    /// is enough, since no leaf goes from one into another.
    #[inline(always)]
    pub(super) fn check_row(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        whole: bool,
    ) -> Result<(), Refusal> {
        let shift = F::shift(0);
        let cells = self.cells(table, 0);
        let here = part(cells, self.index(0, at), (todo >> shift) as usize);
        let last = at + (todo - 1);
        if F::leaf_sizes(0).bits().count_ones() > 1 {
            for (end, cell) in [(at, here.first()), (last, here.last())] {
                let word = cell.map_or(0, Cell::get);
                if let Entry::Leaf { log2, .. } = F::decode(0, word) {
                    let rest = (1u64 << log2) - 1;
                    if end & !rest < at || end | rest > last {
                        return Err(Refusal::InsideLeaf(end));
                    }
                }
            }
        }
        if whole {
            if let Some(hole) = first_empty::<F, _>(here) {
                return Err(Refusal::Hole(at + ((hole as u64) << shift)));
            }
        }
        Ok(())
    }

    /// The error for it, of an operation on `range`.
    #[cold]
    pub(super) fn refused(&self, refusal: Refusal, range: Span<Iova>) -> TableUnmapError {
        let aperture = self.aperture();
        match refusal {
            Refusal::Hole(at) => TableUnmapError::Hole {
                range,
                at: aperture.extend(at),
            },
            Refusal::InsideLeaf(at) => {
                let leaf = self.leaf_at(aperture.extend(at));
                TableUnmapError::InsideLeaf {
                    range,
                    leaf: leaf.map(|leaf| leaf.run).unwrap_or_default(),
                }
            }
        }
    }

    /// Clears the entries of `[at, at + todo)`, which are all in the linked table `table`.
    #[inline(always)]
    pub(super) fn clear_row<S: RunSink>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        removed: &mut Removed<'_, S>,
    ) {
        let mut entries = self.entries_in(table, 0, at, todo);
        let cells = entries.cells;
        // Where the stretch began that is cleared and that the memory was not told of.
        let mut stored = 0;
        while let Some(part) = entries.next() {
            let Entry::Leaf { pa, log2 } = F::decode(0, part.cell.get()) else {
                self.wrote(cells, stored, part.index);
                stored = part.index + 1;
                continue;
            };
            let (count, dirty) = if removed.wants() == Wants::DirtyRuns {
                take_dirty_run::<F, M::Cell>(L::<0>, part.row(), log2)
            } else {
                (
                    same_run::<F, M::Cell, true>(L::<0>, part.row(), log2),
                    false,
                )
            };
            let bytes = (count as u64) << F::shift(0);
            removed.leaves(0, part.base(), pa, bytes, dirty);
            self.watch(part.base(), pa, bytes);
            entries.pass(count);
        }
        self.wrote(cells, stored, cells.len());
    }

    /// True when the operation unlinks the table at `level` with an entry for `at` once it is empty: it
    /// owns all that the table spans.
    #[inline(always)]
    pub(super) fn frees_emptied(&self, level: usize, at: u64, claim: Claim) -> bool {
        let (at, rest) = (self.aperture().strip(at), self.span_mask(level));
        !self.keeps_empty && claim.covers(at & !rest, at | rest)
    }

    /// True when no entry of `table`, from which those of `[at, at + todo)` were removed, is in use.
    #[inline(always)]
    pub(super) fn is_emptied(&self, (table, level): (u64, usize), at: u64, todo: u64) -> bool {
        let cells = self.entries(table, level);
        let room = self.room(level, at, todo);
        let first = self.index(level, at);
        let count = self.index(level, at.wrapping_add(room - 1)) - first + 1;
        if has_neighbour::<F, _>(cells, first, count) {
            return false;
        }
        // The entry that was found in use when the table was last looked at whole is in use still, most often.
        let hint = &self.memory.meta(table).note;
        let last = hint.get() as usize;
        if cells.get(last).is_some_and(|cell| !F::is_empty(cell.get())) {
            return false;
        }
        let found = first_occupied_in_parts::<F, _>(cells);
        if let Some(index) = found {
            hint.set(index as u64);
        }
        found.is_none()
    }

    /// True when no entry of `table` is in use.
    pub(super) fn is_empty(&self, table: u64, level: usize) -> bool {
        are_empty::<F, _>(self.entries(table, level))
    }
}

/// True when an entry beside the `count` from `first` on is in use. The entries that a table still
/// holds when some are removed lie there most often.
#[inline(always)]
pub(super) fn has_neighbour<F: Format, C: Cell>(cells: &[C], first: usize, count: usize) -> bool {
    [first.wrapping_sub(1), first + count]
        .into_iter()
        .filter_map(|index| cells.get(index))
        .any(|cell| !F::is_empty(cell.get()))
}

/// How many entries, from the first of `cells` on, have leaves that are one run: of 2^`log2` bytes
/// each, each going on in memory where the one before ended. A group counts with all its entries.
/// With `TAKE` they are emptied.
#[inline(always)]
pub(super) fn same_run<F: Format, C: Cell, const TAKE: bool>(
    v: impl Level,
    cells: &[C],
    log2: u32,
) -> usize {
    let Some(first) = cells.first() else { return 0 };
    let own = F::shift(v.n());
    let series = |next, stride| Series {
        next,
        stride,
        ignored: F::HARDWARE_BITS,
    };
    if F::GROUPS_ADVANCE || F::leaf_sizes(v.n()).bits().count_ones() <= 1 || log2 == own {
        let series = series(first.get(), F::stride(own));
        return if TAKE {
            C::take_series(cells, series)
        } else {
            C::match_series(cells, series)
        };
    }
    let mut next = first.get();
    let mut done = 0;
    for group in cells.chunks_exact(1 << (log2 - own)) {
        if (group[0].get() ^ next) & !F::HARDWARE_BITS != 0 {
            break;
        }
        if TAKE {
            C::set_series(group, series(0, 0));
        }
        next = next.wrapping_add(F::stride(log2));
        done += group.len();
    }
    // A damaged group counts as one entry, so that a loop over a table ends.
    done.max(1)
}

/// How many entries, from the first of `cells` on, which has a leaf of 2^`log2` bytes, are known to have
/// leaves after one look at the row: the entries of one run, or else single leaves wherever they lead.
#[inline(always)]
pub(super) fn row_of_leaves<F: Format, C: Cell>(v: impl Level, cells: &[C], log2: u32) -> usize {
    let own = F::shift(v.n());
    let goes_on = || {
        let words = cells.first().zip(cells.get(1));
        words.is_some_and(|(first, second)| {
            let next = first.get().wrapping_add(F::stride(own));
            (second.get() ^ next) & !F::HARDWARE_BITS == 0
        })
    };
    if log2 > own || goes_on() {
        return same_run::<F, C, false>(v, cells, log2);
    }
    let others = cells.iter().skip(1).take_while(
        |cell| matches!(F::decode(v.n(), cell.get()), Entry::Leaf { log2, .. } if log2 == own),
    );
    1 + others.count()
}

/// Index of the first entry at level 0 that is empty.
#[inline(always)]
pub(super) fn first_empty<F: Format, C: Cell>(cells: &[C]) -> Option<usize> {
    let row = match F::decode(0, cells.first().map_or(0, Cell::get)) {
        Entry::Leaf { log2, .. } => row_of_leaves::<F, C>(L::<0>, cells, log2),
        _ => 0,
    };
    let rest = cells.get(row..)?;
    let hole = rest.iter().position(|cell| F::is_empty(cell.get()))?;
    Some(row + hole)
}

/// Empties the entries, from the first of `cells` on, whose leaves are one run and were all written
/// to, or all not. Returns how many there were, and which it is.
#[inline(always)]
pub(super) fn take_dirty_run<F: Format, C: Cell>(
    v: impl Level,
    cells: &[C],
    log2: u32,
) -> (usize, bool) {
    if log2 > F::shift(v.n()) {
        return take_leaf::<F, C>(v, cells, log2);
    }
    let mut next = cells.first().map_or(0, Cell::get);
    let (mut taken, mut all) = (0, false);
    for cell in cells {
        let word = cell.get();
        if (word ^ next) & !F::HARDWARE_BITS != 0 {
            break;
        }
        let dirty = F::is_dirty(word);
        if taken == 0 {
            all = take_word::<F, C>(cell, word);
        } else if dirty != all {
            break;
        } else if !dirty && cell.set_if(word, 0).is_err() {
            // The device was quicker: it is dirty now, and the next run.
            break;
        } else if dirty {
            take_word::<F, C>(cell, word);
        }
        next = next.wrapping_add(F::stride(log2));
        taken += 1;
    }
    (taken.max(1), all)
}
