//! Map: plan, reserve, fill.

use runs::{Pa, Span};

use super::access::{Access, Exclusive, Restart};
use super::request::{Cursor, Request};
use super::row::{first_occupied, store_leaves, store_single_leaves};
use super::top::Begin;
use super::trust::set_aside;
use super::{L, Level, Table, at_level, part};
use crate::cell::{Cell, Series};
use crate::error::{BrokenMemory, MapError, NoTables};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::{Reserve, TableMemory};
use crate::prot::Prot;

/// Why a request was not filled in.
pub(super) enum Stop {
    /// An entry is in the way, by its stripped address.
    Occupied(u64),
    /// The tables for it cannot be had.
    NoTables(NoTables),
    /// Something changed before it was claimed.
    Restart,
    /// The memory broke its contract.
    Broken(BrokenMemory),
}

impl From<BrokenMemory> for Stop {
    fn from(cause: BrokenMemory) -> Self {
        Self::Broken(cause)
    }
}

impl From<Restart> for Stop {
    fn from(_: Restart) -> Self {
        Self::Restart
    }
}

/// A table that `fill` writes to.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// Linked: others see every store.
    Linked,
    /// Nobody can reach it yet; its content is zero.
    Zeroed,
    /// Nobody can reach it yet; its content is left over from earlier use.
    Stale,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs`, laid end to end, from `iova` on.
    ///
    /// The largest leaves that alignment, length and the allowed sizes permit are used, stretch by
    /// stretch. Either everything is mapped, or the table's bytes are what they were.
    pub fn map(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), MapError> {
        if self.map_page(iova, runs, prot, Exclusive).is_some() {
            return Ok(());
        }
        self.map_runs(iova, runs, prot)
    }

    #[inline(never)]
    fn map_runs(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), MapError> {
        let request = self.check_map(iova, runs, prot)?;
        self.tables += self.map_checked(request, Exclusive)?;
        Ok(())
    }

    /// [`map`](Self::map) that first gives back the empty tables that were
    /// [kept](Self::keep_empty_tables) in the range, so that the largest leaves can take their
    /// place.
    ///
    /// Units may still look for entries in those tables: until the gather is flushed the new mapping
    /// can be missing to them.
    pub fn map_anew(
        &mut self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let request = self.check_map(iova, runs, prot)?;
        let (at, len) = (request.at, request.len);
        self.intact()?;
        self.unlink_emptied(at, len, gather);
        self.map(iova, runs, prot)
    }

    /// Maps; returns how many tables were added.
    #[inline(always)]
    pub(crate) fn map_checked<P: Access>(
        &self,
        request: Request<'_>,
        access: P,
    ) -> Result<u64, MapError> {
        let begin = self.begin();
        match self.map_from(begin, request, access) {
            Ok(tables) => Ok(tables),
            Err(stop) => self.map_again(begin, request, access, stop),
        }
    }

    /// What is left to do when a request was stopped: to say why, or to begin again.
    #[cold]
    fn map_again<P: Access>(
        &self,
        mut begin: Begin,
        request: Request<'_>,
        access: P,
        mut stop: Stop,
    ) -> Result<u64, MapError> {
        let mut round = 0;
        loop {
            self.release_all(begin, request.at, request.len, access);
            match stop {
                Stop::Occupied(at) => return Err(self.overlap(&request, at)),
                Stop::NoTables(cause) => return Err(MapError::NoTables(cause)),
                Stop::Broken(cause) => return Err(MapError::Broken(cause)),
                Stop::Restart => self.memory.wait(round),
            }
            round += 1;
            begin = self.begin();
            stop = match self.map_from(begin, request, access) {
                Ok(tables) => return Ok(tables),
                Err(stop) => stop,
            };
        }
    }

    /// One attempt. Stopped, it has stored nothing, unless the memory is broken, and leaves what it
    /// claimed to the caller.
    #[inline(always)]
    fn map_from<P: Access>(
        &self,
        begin: Begin,
        request: Request<'_>,
        access: P,
    ) -> Result<u64, Stop> {
        self.intact()?;
        let (table, level) = self.lowest_to_map(begin, &request, access)?;
        let tables = if level == 0 {
            self.map_row::<L<0>, P>(table, &request, access)?;
            0
        } else {
            at_level!(level, F, V => self.map_below::<V, P>(table, request, access))?
        };
        self.intact()?;
        Ok(tables)
    }

    /// The lowest table that all of the request goes through, and its level.
    #[inline(always)]
    pub(super) fn lowest_to_map<P: Access>(
        &self,
        begin: Begin,
        request: &Request<'_>,
        access: P,
    ) -> Result<(u64, usize), Stop> {
        let (table, level) = self.lowest(begin, request.at, request.len, access)?;
        if level == 0 && request.sizes.and(F::leaf_sizes(0)).is_empty() {
            // A table from elsewhere, with pages smaller than this one is to have.
            return Err(Stop::Occupied(request.at));
        }
        Ok((table, level))
    }

    /// From a table at level `V` on that all of the request goes through: plan, reserve, fill;
    /// returns how many tables were added.
    #[inline(never)]
    fn map_below<V: Level, P: Access>(
        &self,
        table: u64,
        request: Request<'_>,
        access: P,
    ) -> Result<u64, Stop> {
        if self.map_row::<V, P>(table, &request, access)? {
            return Ok(0);
        }
        let bits = request.bits;
        let mut cursor = Cursor::new(&request);
        let mut needed = 0;
        self.plan::<V, P>(Some(table), &mut cursor.clone(), &mut needed, access)?;
        self.intact()?;
        let mut reserve = set_aside(&self.memory, needed)?;
        self.announce(&request);
        self.memory.descended();
        self.fill::<V, P>(
            table,
            Target::Linked,
            &mut cursor,
            bits,
            &mut reserve,
            access,
        );
        if needed > 0 {
            self.memory.give_back(reserve);
        }
        Ok(needed)
    }

    /// The error for the entry in the way, at the stripped address `at`.
    #[cold]
    pub(super) fn overlap(&self, request: &Request<'_>, at: u64) -> MapError {
        let wanted = Span::new(request.iova, request.len);
        // The entry may lead to a table: the first leaf in it is the one to name.
        let iova = self.aperture().extend(at);
        let rest = Span::new(iova, wanted.len - iova.wrapping_sub(wanted.start));
        let found = self.leaves(rest).next().map(|leaf| leaf.run);
        MapError::Overlap {
            wanted,
            found: found.unwrap_or_default(),
        }
    }

    /// First pass: every entry to be written is empty; counts the tables that are missing, and
    /// claims those that will be stored to. `table` is `None` below an entry that is empty.
    pub(super) fn plan<V: Level, P: Access>(
        &self,
        table: Option<u64>,
        cursor: &mut Cursor<'_>,
        needed: &mut u64,
        access: P,
    ) -> Result<(), Stop> {
        // What is not there yet belongs to this operation alone.
        let mut held = true;
        let mut cells: &[M::Cell] = &[];
        if let Some(table) = table {
            held = self.claim_to_map::<V, P>(table, cursor.at, cursor.todo, access)?;
            // In a table without a live entry there is nothing to look at.
            if !held || self.memory.meta(table).live.get() != 0 {
                cells = self.cells(table, V::N);
            }
        }
        let mut room = self.room(V::N, cursor.at, cursor.todo);
        while room > 0 {
            let index = self.index(V::N, cursor.at);
            let todo = cursor.todo;
            match self.next_step::<V, P>(cells, index, cursor, room) {
                Next::Leaves { log2, count, runs } => {
                    if !held {
                        return Err(Stop::Restart);
                    }
                    if !P::SHARED || V::N == 0 {
                        let entries = ((count * runs) << log2 >> F::shift(V::N)) as usize;
                        if let Some(i) = first_occupied::<F, _>(part(cells, index, entries)) {
                            let at = cursor.at + ((i as u64) << F::shift(V::N));
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
                    let below = match F::decode(V::N, word) {
                        Entry::Table(_) if !held && !self.settled(table, access) => {
                            return Err(Stop::Restart);
                        }
                        Entry::Table(below) => Some(below),
                        Entry::Empty if !held => return Err(Stop::Restart),
                        Entry::Empty => {
                            *needed += 1;
                            None
                        }
                        Entry::Leaf { .. } => return Err(Stop::Occupied(cursor.at)),
                    };
                    self.plan::<V::Below, P>(below, cursor, needed, access)?;
                }
                Next::Nothing => {
                    // Ranges and runs are multiples of the smallest size: one that does not fit was not
                    // begun where the table says.
                    self.broke(table.unwrap_or_default(), V::N);
                    return Ok(());
                }
            }
            room -= todo - cursor.todo;
        }
        Ok(())
    }

    /// How the request goes on at entry `index` of a table with these cells.
    ///
    /// A table that is empty may still stand where a large leaf would fit: in the shared access, when
    /// another thread has just emptied it; in both, where such tables are or were kept. Then the
    /// request goes on in that table, with smaller leaves.
    #[inline(always)]
    fn next_step<V: Level, P: Access>(
        &self,
        cells: &[M::Cell],
        index: usize,
        cursor: &Cursor<'_>,
        room: u64,
    ) -> Next {
        let Some((mut log2, mut count)) = self.leaves_here(V::N, cursor, room) else {
            return if V::N > 0 { Next::Below } else { Next::Nothing };
        };
        let singles = self.single_leaves(cursor, (log2, count), room);
        let mut runs = singles.unwrap_or(1);
        if V::N > 0 && (P::SHARED || self.has_empty) {
            let entries = ((count * runs) << log2 >> F::shift(V::N)) as usize;
            let empty = first_occupied::<F, _>(part(cells, index, entries))
                .map(|first| (first as u64) << F::shift(V::N));
            match empty {
                None => {}
                Some(bytes) if runs > 1 && bytes >> log2 > 0 => runs = bytes >> log2,
                Some(0) => return Next::Below,
                Some(bytes) => match self.leaves_here(V::N, cursor, bytes) {
                    Some(fewer) => (log2, count, runs) = (fewer.0, fewer.1, 1),
                    None => return Next::Below,
                },
            }
        }
        Next::Leaves { log2, count, runs }
    }

    /// Second pass: the same decisions, now written down. Cannot fail, but for a broken memory, which is
    /// noted: `plan` has seen that the
    /// entries are empty and has claimed their tables, and `reserve` holds the tables that it
    /// counted. A claim is given back as soon as its table is complete.
    ///
    /// The memory is told of the entries that were [`written`](TableMemory::written): of a new
    /// table before it is linked, of a linked one before its claim is given back.
    pub(super) fn fill<V: Level, P: Access>(
        &self,
        table: u64,
        target: Target,
        cursor: &mut Cursor<'_>,
        bits: u64,
        reserve: &mut Reserve,
        access: P,
    ) {
        let cells = self.cells(table, V::N);
        // A table that nobody can reach has no entries yet, whatever its memory holds.
        let linked: &[M::Cell] = match target {
            Target::Linked => cells,
            Target::Zeroed | Target::Stale => &[],
        };
        let mut live = 0;
        let begin = self.index(V::N, cursor.at);
        let mut end = begin;
        // Where the stretch began that is stored and that the memory was not told of.
        let mut stored = begin;
        let mut room = self.room(V::N, cursor.at, cursor.todo);
        while room > 0 {
            let todo = cursor.todo;
            match self.next_step::<V, P>(linked, end, cursor, room) {
                Next::Leaves { log2, count, runs } => {
                    let entries = ((count * runs) << log2 >> F::shift(V::N)) as usize;
                    let here = part(cells, end, entries);
                    if runs > 1 {
                        let starts = cursor.starts(runs);
                        store_single_leaves::<F, V, M::Cell>(here, starts, log2, bits);
                        cursor.pass_single_leaves(log2, runs);
                    } else {
                        let word = F::leaf(V::N, cursor.pa, log2, bits);
                        store_leaves::<F, V, M::Cell>(here, word, log2);
                        cursor.advance(count << log2);
                    }
                    live += entries as u64;
                    end += entries;
                }
                Next::Below => {
                    let word = linked.get(end).map_or(0, Cell::get_acquire);
                    if let Entry::Table(below) = F::decode(V::N, word) {
                        self.wrote(cells, stored, end);
                        stored = end + 1;
                        let target = Target::Linked;
                        self.fill::<V::Below, P>(below, target, cursor, bits, reserve, access);
                    } else {
                        let (Some((below, zeroed)), Some(cell)) =
                            (reserve.take(&self.memory), cells.get(end))
                        else {
                            return self.broke(table, V::N);
                        };
                        let target = if zeroed {
                            Target::Zeroed
                        } else {
                            Target::Stale
                        };
                        self.fill::<V::Below, P>(below, target, cursor, bits, reserve, access);
                        // The new table is complete: whoever follows this entry finds it so.
                        cell.set_release(self.format.table(V::N, below));
                        live += 1;
                    }
                    end += 1;
                }
                Next::Nothing => {
                    return self.broke(table, V::N);
                }
            }
            room -= todo - cursor.todo;
        }
        let meta = self.memory.meta(table);
        match target {
            Target::Linked => {
                if live > 0 {
                    meta.live.set(meta.live.get() + live);
                }
                self.wrote(cells, stored, end);
                self.release(table, access);
            }
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
                meta.live.set(live);
                self.unclaimed(table);
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
