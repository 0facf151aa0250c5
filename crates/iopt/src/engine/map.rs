//! Map: plan, reserve, fill.

use core::slice;

use runs::{PageSizes, Run, Span};

use super::form::{Exclusive, Form, Restart};
use super::{Level, Table, at_top, part};
use crate::cell::Cell;
use crate::error::{MapError, NoTables, RangeError};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::{Reserve, TableMemory};
use crate::prot::Prot;

/// Where a pass over the request stands: the stripped address, and the run that lies there.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    /// The sizes that leaves may have.
    sizes: PageSizes,
    at: u64,
    todo: u64,
    pa: u64,
    left: u64,
    rest: slice::Iter<'a, Span>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(request: &Request<'a>) -> Self {
        let mut cursor = Self {
            sizes: request.sizes,
            at: request.at,
            todo: request.len,
            pa: 0,
            left: 0,
            rest: request.runs.iter(),
        };
        cursor.next_run();
        cursor
    }

    #[inline]
    fn next_run(&mut self) {
        if let Some(run) = self.rest.next() {
            (self.pa, self.left) = (run.start, run.len);
        }
    }

    /// Where it stands in physical memory.
    pub(super) fn pa(&self) -> u64 {
        self.pa
    }

    /// Goes on, also over the end of a run.
    pub(super) fn skip(&mut self, bytes: u64) {
        let mut rest = bytes.min(self.todo);
        while rest > 0 && self.left > 0 {
            let here = rest.min(self.left);
            self.advance(here);
            rest -= here;
        }
    }

    /// Ends `bytes` from here.
    pub(super) fn end_after(&mut self, bytes: u64) {
        self.todo = self.todo.min(bytes);
    }

    #[inline(always)]
    fn advance(&mut self, bytes: u64) {
        self.at = self.at.wrapping_add(bytes);
        self.todo -= bytes;
        self.pa = self.pa.wrapping_add(bytes);
        self.left -= bytes;
        if self.left == 0 {
            self.next_run();
        }
    }
}

/// A request that is well formed.
#[derive(Clone, Copy)]
pub(crate) struct Request<'r> {
    pub(super) iova: u64,
    /// The address without the bits above the aperture.
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) runs: &'r [Span],
    /// Permission and attribute bits of the leaves.
    pub(super) bits: u64,
    /// The sizes that they may have.
    pub(super) sizes: PageSizes,
}

/// Why a request was not filled in.
pub(super) enum Stop {
    /// An entry is in the way, by its stripped address.
    Occupied(u64),
    /// The tables for it cannot be had.
    NoTables(NoTables),
    /// Something changed before it was claimed.
    Restart,
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
    pub fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
        let request = self.check_map(iova, runs, prot)?;
        if request.len == 1 << F::shift(0) {
            self.memory.descended();
            if at_top!(self.begin(), F, Top, root => self.map_one::<Top>(root, &request)).is_some()
            {
                return Ok(());
            }
        }
        self.tables += self.map_checked(&request, Exclusive)?;
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
        runs: &[Span],
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let len = self.check_map(iova, runs, prot)?.len;
        self.give_back_empty_tables(Span::new(iova, len), gather)?;
        self.map(iova, runs, prot)
    }

    /// The short path of a single smallest page: one descent, one store. `None`, with nothing
    /// changed, when its table is missing or its entry is not empty: the long path has the answer.
    #[inline(always)]
    fn map_one<V: Level>(&self, table: u64, request: &Request<'_>) -> Option<()> {
        let cell = self.cells::<V>(table).get(self.index::<V>(request.at))?;
        let word = cell.get();
        if V::N > 0 {
            return match F::decode(V::N, word) {
                Entry::Table(below) => self.map_one_below::<V::Below>(below, request),
                Entry::Empty | Entry::Leaf { .. } => None,
            };
        }
        if !F::is_empty(word) || !self.sizes.contains(1 << F::shift(0)) {
            return None;
        }
        let log2 = F::shift(0);
        let pa = request.runs.first()?.start;
        self.announce(request);
        cell.set(F::leaf(0, pa, log2, request.bits));
        self.memory.written(slice::from_ref(cell));
        let live = &self.memory.meta(table).live;
        live.set(live.get() + 1);
        Some(())
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline]
    fn map_one_below<V: Level>(&self, table: u64, request: &Request<'_>) -> Option<()> {
        self.map_one::<V>(table, request)
    }

    /// Tells the memory what is about to be mapped.
    #[inline(always)]
    fn announce(&self, request: &Request<'_>) {
        if !M::WATCHES_RUNS {
            return;
        }
        let leaf = F::leaf(0, 0, F::shift(0), request.bits);
        let prot = self.format.prot(0, leaf);
        let mut iova = request.iova;
        for run in request.runs {
            self.memory.mapped(Run::new(iova, run.start, run.len), prot);
            iova = iova.wrapping_add(run.len);
        }
    }

    /// Everything that can be known to be wrong before a table is looked at.
    #[inline(always)]
    pub(crate) fn check_map<'r>(
        &self,
        iova: u64,
        runs: &'r [Span],
        prot: Prot,
    ) -> Result<Request<'r>, MapError> {
        let len = self.check_runs(runs)?;
        let at = self.check_range(Span::new(iova, len))?;
        match self.format.leaf_bits(prot) {
            Some(bits) => Ok(Request {
                iova,
                at,
                len,
                runs,
                bits,
                sizes: self.sizes,
            }),
            None => Err(MapError::Prot {
                prot,
                format: F::ID,
            }),
        }
    }

    /// Plan, reserve, fill; returns how many tables were added.
    #[inline(always)]
    pub(crate) fn map_checked<P: Form>(
        &self,
        request: &Request<'_>,
        form: P,
    ) -> Result<u64, MapError> {
        let mut round = 0;
        loop {
            let begin = self.begin();
            let stop = match at_top!(begin, F, Top, root => {
                self.map_from::<Top, P>(root, request, form)
            }) {
                Ok(tables) => return Ok(tables),
                Err(stop) => stop,
            };
            self.release_all(begin, request.at, request.len, form);
            match stop {
                Stop::Occupied(at) => return Err(self.overlap(request, at)),
                Stop::NoTables(cause) => return Err(MapError::NoTables(cause)),
                Stop::Restart => self.memory.wait(round),
            }
            round += 1;
        }
    }

    /// The two passes from the root on, which is at level `V`. Stopped, it has stored nothing, and
    /// leaves what it claimed to the caller.
    fn map_from<V: Level, P: Form>(
        &self,
        root: u64,
        request: &Request<'_>,
        form: P,
    ) -> Result<u64, Stop> {
        let bits = request.bits;
        let mut cursor = Cursor::new(request);
        let mut needed = 0;
        self.memory.descended();
        self.plan::<V, P>(Some(root), &mut cursor.clone(), &mut needed, form)?;
        let mut reserve = match needed {
            0 => Reserve::empty(),
            _ => self.memory.reserve(needed).map_err(Stop::NoTables)?,
        };
        self.announce(request);
        self.memory.descended();
        self.fill::<V, P>(root, Target::Linked, &mut cursor, bits, &mut reserve, form);
        if needed > 0 {
            self.memory.give_back(reserve);
        }
        Ok(needed)
    }

    /// The error for the entry in the way, at the stripped address `at`.
    #[cold]
    fn overlap(&self, request: &Request<'_>, at: u64) -> MapError {
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

    /// The runs' bytes together, if each of them is well formed.
    fn check_runs(&self, runs: &[Span]) -> Result<u64, MapError> {
        let granule = self.sizes.smallest();
        let mut len = 0u64;
        for run in runs {
            if run.len == 0 {
                return Err(RangeError::Empty.into());
            }
            if !run.is_aligned(granule) {
                let value = if run.start & (granule - 1) != 0 {
                    run.start
                } else {
                    run.len
                };
                return Err(RangeError::Misaligned { value, granule }.into());
            }
            let last = run.start.checked_add(run.len - 1);
            let bits = self.format.output_bits();
            if last.is_none_or(|last| last >> bits != 0) {
                return Err(MapError::OutputTooWide { output: *run, bits });
            }
            // More than 2^64 bytes fit no aperture: the sum saturates and is refused there.
            len = len.saturating_add(run.len);
        }
        Ok(len)
    }

    /// The largest leaves at level `V` with which the request can go on here: their size as a
    /// power of two, and how many of them in a row within `room` bytes.
    #[inline(always)]
    pub(super) fn leaves_here<V: Level>(
        &self,
        cursor: &Cursor<'_>,
        room: u64,
    ) -> Option<(u32, u64)> {
        let offered = F::leaf_sizes(V::N);
        let sizes = offered.and(cursor.sizes);
        let mut len = room.min(cursor.left);
        if F::LINEAR_LOG2 < 64 {
            // Entries go on by a constant step within such a block of physical memory only.
            let block = 1u64 << F::LINEAR_LOG2;
            len = len.min(block - (cursor.pa & (block - 1)));
        }
        if offered.bits().count_ones() <= 1 {
            // One size: no choice to make.
            let log2 = F::shift(V::N);
            let aligned = (cursor.at | cursor.pa) & ((1 << log2) - 1) == 0;
            return (!sizes.is_empty() && aligned && len >> log2 > 0)
                .then_some((log2, len >> log2));
        }
        let (size, count) = sizes.step(cursor.at, cursor.pa, len)?;
        Some((size.trailing_zeros(), count))
    }

    /// First pass: every entry to be written is empty; counts the tables that are missing, and
    /// claims those that will be stored to. `table` is `None` below an entry that is empty.
    pub(super) fn plan<V: Level, P: Form>(
        &self,
        table: Option<u64>,
        cursor: &mut Cursor<'_>,
        needed: &mut u64,
        form: P,
    ) -> Result<(), Stop> {
        // What is not there yet belongs to this operation alone.
        let mut held = true;
        let mut cells: &[M::Cell] = &[];
        if let Some(table) = table {
            held = self.claim_to_map::<V, P>(table, cursor.at, cursor.todo, form)?;
            // In a table without a live entry there is nothing to look at.
            if !held || self.memory.meta(table).live.get() != 0 {
                cells = self.cells::<V>(table);
            }
        }
        let mut room = self.room::<V>(cursor.at, cursor.todo);
        while room > 0 {
            let index = self.index::<V>(cursor.at);
            let todo = cursor.todo;
            match self.next_step::<V, P>(cells, index, cursor, room) {
                Next::Leaves { log2, count } => {
                    if !held {
                        return Err(Stop::Restart);
                    }
                    if !P::SHARED || V::N == 0 {
                        let entries = ((count << log2) >> F::shift(V::N)) as usize;
                        let mut here = part(cells, index, entries).iter();
                        if let Some(i) = here.position(|cell| !F::is_empty(cell.get())) {
                            let at = cursor.at + ((i as u64) << F::shift(V::N));
                            return Err(Stop::Occupied(at));
                        }
                    }
                    cursor.advance(count << log2);
                }
                Next::Below => {
                    let word = cells.get(index).map_or(0, Cell::get_acquire);
                    let below = match F::decode(V::N, word) {
                        Entry::Table(_) if !held && !self.settled(table, form) => {
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
                    self.plan::<V::Below, P>(below, cursor, needed, form)?;
                }
                Next::Nothing => {
                    // Not reached: ranges and runs are multiples of the smallest size.
                    debug_assert!(false, "no leaf fits at level 0");
                    return Err(Stop::Occupied(cursor.at));
                }
            }
            room -= todo - cursor.todo;
        }
        Ok(())
    }

    /// How the request goes on at entry `index` of a table with these cells.
    ///
    /// A table that is empty may still stand where a large leaf would fit: in the shared form, when
    /// another thread has just emptied it; in both, where such tables are kept. Then the request
    /// goes on in that table, with smaller leaves.
    #[inline(always)]
    fn next_step<V: Level, P: Form>(
        &self,
        cells: &[M::Cell],
        index: usize,
        cursor: &Cursor<'_>,
        room: u64,
    ) -> Next {
        let Some((mut log2, mut count)) = self.leaves_here::<V>(cursor, room) else {
            return if V::N > 0 { Next::Below } else { Next::Nothing };
        };
        if V::N > 0 && (P::SHARED || self.keeps_empty) {
            let entries = ((count << log2) >> F::shift(V::N)) as usize;
            let empty = part(cells, index, entries)
                .iter()
                .position(|cell| !F::is_empty(cell.get()))
                .map(|first| (first as u64) << F::shift(V::N));
            match empty {
                None => {}
                Some(0) => return Next::Below,
                Some(bytes) => match self.leaves_here::<V>(cursor, bytes) {
                    Some(fewer) => (log2, count) = fewer,
                    None => return Next::Below,
                },
            }
        }
        Next::Leaves { log2, count }
    }

    /// Second pass: the same decisions, now written down. Cannot fail: `plan` has seen that the
    /// entries are empty and has claimed their tables, and `reserve` holds the tables that it
    /// counted. A claim is given back as soon as its table is complete.
    ///
    /// The memory is told of the entries that were [`written`](TableMemory::written): of a new
    /// table before it is linked, of a linked one before its claim is given back.
    pub(super) fn fill<V: Level, P: Form>(
        &self,
        table: u64,
        target: Target,
        cursor: &mut Cursor<'_>,
        bits: u64,
        reserve: &mut Reserve,
        form: P,
    ) {
        let cells = self.cells::<V>(table);
        // A table that nobody can reach has no entries yet, whatever its memory holds.
        let linked: &[M::Cell] = match target {
            Target::Linked => cells,
            Target::Zeroed | Target::Stale => &[],
        };
        let mut live = 0;
        let begin = self.index::<V>(cursor.at);
        let mut end = begin;
        // Where the stretch began that is stored and that the memory was not told of.
        let mut stored = begin;
        let mut room = self.room::<V>(cursor.at, cursor.todo);
        while room > 0 {
            let todo = cursor.todo;
            match self.next_step::<V, P>(linked, end, cursor, room) {
                Next::Leaves { log2, count } => {
                    let bytes = count << log2;
                    let entries = (bytes >> F::shift(V::N)) as usize;
                    let word = F::leaf(V::N, cursor.pa, log2, bits);
                    store_leaves::<F, V, M::Cell>(part(cells, end, entries), word, log2);
                    cursor.advance(bytes);
                    live += entries as u64;
                    end += entries;
                }
                Next::Below => {
                    let word = linked.get(end).map_or(0, Cell::get_acquire);
                    if let Entry::Table(below) = F::decode(V::N, word) {
                        self.wrote(cells, stored, end);
                        stored = end + 1;
                        let target = Target::Linked;
                        self.fill::<V::Below, P>(below, target, cursor, bits, reserve, form);
                    } else {
                        let (Some((below, zeroed)), Some(cell)) =
                            (self.memory.take(reserve), cells.get(end))
                        else {
                            debug_assert!(false, "the plan counted too few tables");
                            return;
                        };
                        let target = if zeroed {
                            Target::Zeroed
                        } else {
                            Target::Stale
                        };
                        self.fill::<V::Below, P>(below, target, cursor, bits, reserve, form);
                        // The new table is complete: whoever follows this entry finds it so.
                        cell.set_release(self.format.table(V::N, below));
                        live += 1;
                    }
                    end += 1;
                }
                Next::Nothing => {
                    debug_assert!(false, "the plan accepted what does not fit");
                    return;
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
                self.release(table, form);
            }
            Target::Zeroed | Target::Stale => {
                if let Target::Stale = target {
                    for cell in part(cells, 0, begin) {
                        cell.set(0);
                    }
                    for cell in cells.get(end..).unwrap_or(&[]) {
                        cell.set(0);
                    }
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
    /// With `count` leaves of 2^`log2` bytes in this table.
    Leaves { log2: u32, count: u64 },
    /// In the table below this entry.
    Below,
    /// Not at all.
    Nothing,
}

/// Writes the entries of leaves of 2^`log2` bytes, the first of which has the entry `word`.
#[inline(always)]
fn store_leaves<F: Format, V: Level, C: Cell>(cells: &[C], mut word: u64, log2: u32) {
    let own = F::shift(V::N);
    if F::GROUPS_ADVANCE || F::leaf_sizes(V::N).bits().count_ones() <= 1 || log2 == own {
        let stride = F::stride(own);
        for cell in cells {
            cell.set(word);
            word = word.wrapping_add(stride);
        }
    } else {
        let stride = F::stride(log2);
        for group in cells.chunks_exact(1 << (log2 - own)) {
            for cell in group {
                cell.set(word);
            }
            word = word.wrapping_add(stride);
        }
    }
}
