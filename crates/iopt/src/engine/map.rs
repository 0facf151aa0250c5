//! Map: plan, reserve, fill.

use runs::{Pa, PageSizes, Span};

use super::claim::Claim;
use super::entries::Order;
use super::request::{Attributes, Cursor, Request};
use super::row::{are_empty, first_occupied, store_leaves, store_single_leaves};
use super::trust::set_aside;
use super::{L, Level, Table, at_level, below, part};
use crate::cell::{Cell, Series};
use crate::error::{BrokenPlan, NoTables, TableMapError};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::{Reserve, TableMemory};

/// Why a request was not filled in.
pub(super) enum Stop {
    /// An entry is in the way, by its stripped address.
    Occupied(u64),
    /// The tables for it cannot be had.
    NoTables(NoTables),
    /// Not as planned.
    Broken(BrokenPlan),
}

impl From<BrokenPlan> for Stop {
    fn from(cause: BrokenPlan) -> Self {
        Self::Broken(cause)
    }
}

/// A table that `fill` writes to.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// Linked: others see every store.
    Linked,
    /// It cannot be reached yet; its content is zero.
    Zeroed,
    /// It cannot be reached yet; its content is left over from earlier use.
    Stale,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps one page by a path of its own, and everything else by one for all.
    #[inline(always)]
    pub(super) fn map_runs(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
    ) -> Result<(), TableMapError> {
        match self.map_page(iova, runs, attributes) {
            Some(()) => Ok(()),
            None => self.map_any(iova, runs, attributes, self.sizes, None),
        }
    }

    /// Maps with leaves of these sizes. With a gather, the empty tables that the request covers whole and that are claimed
    /// are given back first.
    #[inline(never)]
    pub(super) fn map_any(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
        sizes: PageSizes,
        anew: Option<(&mut Gather, Claim)>,
    ) -> Result<(), TableMapError> {
        let mut request = self.check_map(iova, runs, attributes)?;
        request.sizes = sizes;
        self.map_from(&request, anew)
            .map_err(|stop| self.not_mapped(&request, stop))
    }

    /// The error for a request that was stopped.
    #[cold]
    pub(super) fn not_mapped(&self, request: &Request<'_>, stop: Stop) -> TableMapError {
        match stop {
            Stop::Occupied(at) => self.overlap(request, at),
            Stop::NoTables(cause) => TableMapError::NoTables(cause),
            Stop::Broken(cause) => TableMapError::Broken(cause),
        }
    }

    /// Stopped, it has stored nothing, unless the memory is broken.
    #[inline(always)]
    fn map_from(
        &self,
        request: &Request<'_>,
        anew: Option<(&mut Gather, Claim)>,
    ) -> Result<(), Stop> {
        self.intact()?;
        let (mut table, mut level) = self.lowest_to_map(request)?;
        if let [run] = request.runs {
            // Pages are mapped most often, and a level that is known costs less.
            let stored = match level {
                0 => self.store_run(L::<0>, table, request, *run),
                _ => at_level!(level, v => self.store_run(v, table, request, *run)),
            };
            if stored.is_some() {
                return Ok(());
            }
        }
        if let Some((gather, claim)) = anew {
            let (at, len) = (request.at, request.len);
            if level > 0 && !are_empty::<F, _>(self.entries_in(table, level, at, len).cells) {
                self.unlink_emptied(at, len, gather, claim);
                (table, level) = self.lowest_to_map(request)?;
            }
        }
        if level == 0 {
            self.map_row(L::<0>, table, request)?;
        } else {
            at_level!(level, v => self.map_below(v, table, request))?;
        }
        Ok(self.intact()?)
    }

    /// The lowest table that all of the request goes through, and its level.
    #[inline(always)]
    pub(super) fn lowest_to_map(&self, request: &Request<'_>) -> Result<(u64, usize), Stop> {
        let (table, level) = self.lowest::<true>(request.at, request.len);
        if level == 0 && request.sizes.and(F::leaf_sizes(0)).is_empty() {
            // A table from elsewhere, with pages smaller than this one is to have.
            return Err(Stop::Occupied(request.at));
        }
        Ok((table, level))
    }

    /// From a table at level `V` on that all of the request goes through: plan, reserve, fill.
    #[inline(never)]
    fn map_below(&self, v: impl Level, table: u64, request: &Request<'_>) -> Result<(), Stop> {
        if self.map_row(v, table, request)? {
            return Ok(());
        }
        let bits = request.bits;
        let mut cursor = Cursor::new(request);
        let mut needed = 0;
        self.plan(v, Some(table), &mut cursor.clone(), &mut needed)?;
        self.intact()?;
        let mut reserve = set_aside(&self.memory, needed)?;
        self.announce(request);
        self.memory.descended();
        self.fill(v, table, Target::Linked, &mut cursor, bits, &mut reserve);
        if needed > 0 {
            self.count(needed - reserve.len(), 0);
            self.memory.give_back(reserve);
        }
        Ok(())
    }

    /// The error for the entry in the way, at the stripped address `at`.
    #[cold]
    pub(super) fn overlap(&self, request: &Request<'_>, at: u64) -> TableMapError {
        let wanted = Span::new(request.iova, request.len);
        // The entry may lead to a table: the first leaf in it is the one to name.
        let iova = self.aperture().extend(at);
        let rest = Span::new(iova, wanted.len - iova.wrapping_sub(wanted.start));
        let found = self.leaves(rest).next().map(|leaf| leaf.run);
        TableMapError::Overlap {
            wanted,
            found: found.unwrap_or_default(),
        }
    }

    /// First pass: every entry to be written is empty; counts the tables that are missing. `table` is
    /// `None` below an entry that is empty.
    pub(super) fn plan(
        &self,
        v: impl Level,
        table: Option<u64>,
        cursor: &mut Cursor<'_>,
        needed: &mut u64,
    ) -> Result<(), Stop> {
        let cells: &[M::Cell] = table.map_or(&[], |table| self.cells(table, v.n()));
        let mut room = self.room(v.n(), cursor.at, cursor.todo);
        while room > 0 {
            let index = self.index(v.n(), cursor.at);
            let todo = cursor.todo;
            match self.next_step(v, cells, index, cursor, room) {
                Next::Leaves { log2, count, runs } => {
                    if v.n() == 0 || !self.has_empty {
                        let entries = ((count * runs) << log2 >> F::shift(v.n())) as usize;
                        if let Some(i) = first_occupied::<F, _>(part(cells, index, entries)) {
                            let at = cursor.at + ((i as u64) << F::shift(v.n()));
                            return Err(Stop::Occupied(at));
                        }
                    }
                    match runs {
                        1 => cursor.advance(count << log2),
                        _ => cursor.pass_single_leaves(log2, runs),
                    }
                }
                Next::Below => {
                    let word = cells.get(index).map_or(0, Cell::get_acquire);
                    let below = match F::decode(v.n(), word) {
                        Entry::Table(below) => Some(below),
                        Entry::Empty => {
                            *needed += 1;
                            None
                        }
                        Entry::Leaf { .. } => return Err(Stop::Occupied(cursor.at)),
                    };
                    below!(v, v => self.plan(v, below, cursor, needed))?;
                }
                Next::Nothing => {
                    // Ranges and runs are multiples of the smallest size: one that does not fit was not
                    // begun where the table says.
                    self.not_as_planned(table.unwrap_or_default(), v.n());
                    return Ok(());
                }
            }
            room -= todo - cursor.todo;
        }
        Ok(())
    }

    /// How the request goes on at entry `index` of a table with these cells.
    ///
    /// A table that is empty may still stand where a large leaf would fit: where operations on neighbouring ranges emptied
    /// it, none of which owned all that it spans, and where such tables are or were kept. Then the request goes on in that
    /// table, with smaller leaves.
    #[inline(always)]
    fn next_step(
        &self,
        v: impl Level,
        cells: &[M::Cell],
        index: usize,
        cursor: &Cursor<'_>,
        room: u64,
    ) -> Next {
        let Some((mut log2, mut count)) = self.leaves_here(v.n(), cursor, room) else {
            return if v.n() > 0 {
                Next::Below
            } else {
                Next::Nothing
            };
        };
        let mut runs = 1;
        // Memory is in pieces of the sizes of low levels.
        if v.is_low() {
            let singles = self.single_leaves(cursor, (log2, count), room);
            runs = singles.unwrap_or(1);
        }
        if v.n() > 0 && self.has_empty {
            let entries = ((count * runs) << log2 >> F::shift(v.n())) as usize;
            let empty = first_occupied::<F, _>(part(cells, index, entries))
                .map(|first| (first as u64) << F::shift(v.n()));
            match empty {
                None => {}
                Some(bytes) if runs > 1 && bytes >> log2 > 0 => runs = bytes >> log2,
                Some(0) => return Next::Below,
                Some(bytes) => match self.leaves_here(v.n(), cursor, bytes) {
                    Some(fewer) => (log2, count, runs) = (fewer.0, fewer.1, 1),
                    None => return Next::Below,
                },
            }
        }
        Next::Leaves { log2, count, runs }
    }

    /// Second pass: the same decisions, now written down. Cannot fail, but for a broken memory, which is
    /// noted: `plan` has seen that the entries are empty, and `reserve` holds the tables that it
    /// counted.
    ///
    /// The memory is notified of the entries that were [`written`](TableMemory::written): of a new
    /// table before it is linked, of a linked one before the operation ends.
    pub(super) fn fill(
        &self,
        v: impl Level,
        table: u64,
        target: Target,
        cursor: &mut Cursor<'_>,
        bits: u64,
        reserve: &mut Reserve,
    ) {
        let cells = self.cells(table, v.n());
        // A table that cannot be reached has no entries yet, whatever its memory holds.
        let linked: &[M::Cell] = match target {
            Target::Linked => cells,
            Target::Zeroed | Target::Stale => &[],
        };
        let begin = self.index(v.n(), cursor.at);
        let mut end = begin;
        // Where the stretch began that is stored and that the memory was not told of.
        let mut stored = begin;
        let mut room = self.room(v.n(), cursor.at, cursor.todo);
        while room > 0 {
            let todo = cursor.todo;
            match self.next_step(v, linked, end, cursor, room) {
                Next::Leaves { log2, count, runs } => {
                    let entries = ((count * runs) << log2 >> F::shift(v.n())) as usize;
                    let here = part(cells, end, entries);
                    if v.is_low() && runs > 1 {
                        let starts = cursor.starts(runs);
                        store_single_leaves::<F, M::Cell>(v, here, starts, log2, bits);
                        cursor.pass_single_leaves(log2, runs);
                    } else {
                        let word = F::leaf(v.n(), cursor.pa, log2, bits);
                        store_leaves::<F, M::Cell>(v, here, word, log2);
                        cursor.advance(count << log2);
                    }
                    end += entries;
                }
                Next::Below => {
                    let word = linked.get(end).map_or(0, Cell::get_acquire);
                    let mut below = match F::decode(v.n(), word) {
                        Entry::Table(below) => Some(below),
                        Entry::Empty | Entry::Leaf { .. } => None,
                    };
                    let Some(cell) = cells.get(end) else {
                        return self.not_as_planned(table, v.n());
                    };
                    if below.is_none() {
                        let Some((new, zeroed)) = reserve.take(&self.memory) else {
                            return self.not_as_planned(table, v.n());
                        };
                        let target = if zeroed {
                            Target::Zeroed
                        } else {
                            Target::Stale
                        };
                        let before = cursor.clone();
                        below!(v, v => self.fill(v, new, target, cursor, bits, reserve));
                        // The new table is complete before an entry leads to it.
                        let link = self.format.table(v.n(), new);
                        if linked.is_empty() {
                            cell.set_release(link);
                        } else if let Err(now) = cell.set_if(word, link) {
                            // Another thread, which maps beside this range, has linked one.
                            let Entry::Table(there) = F::decode(v.n(), now) else {
                                return self.not_as_planned(table, v.n());
                            };
                            below = Some(there);
                            *cursor = before;
                            let new = (new, v.n().saturating_sub(1));
                            self.all_tables(new, Order::Below, &mut |table, _| {
                                reserve.put(&self.memory, table);
                            });
                        }
                    }
                    if let Some(below) = below {
                        self.wrote(cells, stored, end);
                        stored = end + 1;
                        self.maps_below(cell);
                        let target = Target::Linked;
                        below!(v, v => self.fill(v, below, target, cursor, bits, reserve));
                    }
                    end += 1;
                }
                Next::Nothing => {
                    return self.not_as_planned(table, v.n());
                }
            }
            room -= todo - cursor.todo;
        }
        match target {
            Target::Linked => self.wrote(cells, stored, end),
            Target::Zeroed | Target::Stale => {
                if let Target::Stale = target {
                    let zero = Series {
                        next: 0,
                        stride: 0,
                        ignored: 0,
                    };
                    M::Cell::set_series(part(cells, 0, begin), zero);
                    M::Cell::set_series(cells.get(end..).unwrap_or(&[]), zero);
                }
                self.memory.written(cells);
            }
        }
    }

    /// Tells the memory of the entries `[first, end)` that were stored to a linked table.
    #[inline(always)]
    pub(super) fn wrote(&self, cells: &[M::Cell], first: usize, end: usize) {
        if first < end {
            self.memory.written(part(cells, first, end - first));
        }
    }
}

/// How a request goes on.
enum Next {
    /// With leaves of 2^`log2` bytes in this table: `count` of one run, or one of each of `runs`.
    Leaves { log2: u32, count: u64, runs: u64 },
    /// In the table below this entry.
    Below,
    /// Not at all.
    Nothing,
}
