//! Map: plan, reserve, fill.

use core::slice;

use runs::Span;

use super::{Level, Table, at_top, part};
use crate::cell::Cell;
use crate::error::{MapError, RangeError};
use crate::format::{Entry, Format};
use crate::memory::{Reserve, TableMemory};
use crate::prot::Prot;

/// Where a pass over the request stands: the stripped address, and the run that lies there.
#[derive(Clone)]
struct Cursor<'a> {
    at: u64,
    todo: u64,
    pa: u64,
    left: u64,
    rest: slice::Iter<'a, Span>,
}

impl<'a> Cursor<'a> {
    fn new(at: u64, todo: u64, runs: &'a [Span]) -> Self {
        let mut cursor = Self {
            at,
            todo,
            pa: 0,
            left: 0,
            rest: runs.iter(),
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

/// An entry that is in the way, by its stripped address.
struct Occupied(u64);

/// A table that `fill` writes to.
#[derive(Clone, Copy)]
enum Target {
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
        let len = self.check_runs(runs)?;
        let at = self.check_range(Span::new(iova, len))?;
        let Some(bits) = self.format.leaf_bits(prot) else {
            return Err(MapError::Prot {
                prot,
                format: F::ID,
            });
        };
        let cursor = Cursor::new(at, len, runs);
        at_top!(self, F, Top => self.map_from::<Top>(cursor, bits))
            .map_err(|cause| cause.into_error(self, Span::new(iova, len)))
    }

    /// The two passes from the top level `V` on.
    fn map_from<V: Level>(&mut self, cursor: Cursor<'_>, bits: u64) -> Result<(), Refusal> {
        let mut needed = 0;
        self.plan::<V>(Some(self.root), &mut cursor.clone(), &mut needed)
            .map_err(Refusal::Occupied)?;
        let mut reserve = match needed {
            0 => Reserve::empty(),
            _ => self.memory.reserve(needed).map_err(Refusal::NoTables)?,
        };
        let mut cursor = cursor;
        self.fill::<V>(self.root, Target::Linked, &mut cursor, bits, &mut reserve);
        self.tables += needed;
        if needed > 0 {
            self.memory.give_back(reserve);
        }
        Ok(())
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
            if last.is_none_or(|last| last >> F::OUTPUT_BITS != 0) {
                return Err(MapError::OutputTooWide {
                    output: *run,
                    bits: F::OUTPUT_BITS,
                });
            }
            // More than 2^64 bytes fit no aperture: the sum saturates and is refused there.
            len = len.saturating_add(run.len);
        }
        Ok(len)
    }

    /// The largest leaves at level `V` with which the request can go on here: their size as a
    /// power of two, and how many of them in a row within `room` bytes.
    #[inline(always)]
    fn leaves_here<V: Level>(&self, cursor: &Cursor<'_>, room: u64) -> Option<(u32, u64)> {
        let offered = F::leaf_sizes(V::N);
        let sizes = offered.and(self.sizes);
        let len = room.min(cursor.left);
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

    /// First pass: every entry to be written is empty; counts the tables that are missing.
    /// `table` is `None` below an entry that is empty.
    fn plan<V: Level>(
        &self,
        table: Option<u64>,
        cursor: &mut Cursor<'_>,
        needed: &mut u64,
    ) -> Result<(), Occupied> {
        // In a table without a live entry there is nothing to look at.
        let cells = match table {
            Some(table) if self.memory.meta(table).live.get() != 0 => self.cells::<V>(table),
            _ => &[],
        };
        let mut room = self.room::<V>(cursor.at, cursor.todo);
        while room > 0 {
            let index = self.index::<V>(cursor.at);
            if let Some((log2, count)) = self.leaves_here::<V>(cursor, room) {
                let bytes = count << log2;
                let entries = (bytes >> F::shift(V::N)) as usize;
                if let Some(i) = part(cells, index, entries)
                    .iter()
                    .position(|c| !F::is_empty(c.get()))
                {
                    return Err(Occupied(cursor.at + ((i as u64) << F::shift(V::N))));
                }
                cursor.advance(bytes);
                room -= bytes;
            } else if V::N > 0 {
                let entry = cells
                    .get(index)
                    .map_or(Entry::Empty, |c| F::decode(V::N, c.get()));
                let below = match entry {
                    Entry::Table(below) => Some(below),
                    Entry::Empty => {
                        *needed += 1;
                        None
                    }
                    Entry::Leaf { .. } => return Err(Occupied(cursor.at)),
                };
                let todo = cursor.todo;
                self.plan::<V::Below>(below, cursor, needed)?;
                room -= todo - cursor.todo;
            } else {
                // Not reached: ranges and runs are multiples of the smallest size.
                debug_assert!(false, "no leaf fits at level 0");
                return Err(Occupied(cursor.at));
            }
        }
        Ok(())
    }

    /// Second pass: the same decisions, now written down. Cannot fail: `plan` has seen that the
    /// entries are empty, and `reserve` holds the tables that it counted.
    fn fill<V: Level>(
        &self,
        table: u64,
        target: Target,
        cursor: &mut Cursor<'_>,
        bits: u64,
        reserve: &mut Reserve,
    ) {
        let cells = self.cells::<V>(table);
        let mut live = 0;
        let begin = self.index::<V>(cursor.at);
        let mut end = begin;
        let mut room = self.room::<V>(cursor.at, cursor.todo);
        while room > 0 {
            let todo = cursor.todo;
            if let Some((log2, count)) = self.leaves_here::<V>(cursor, room) {
                let bytes = count << log2;
                let entries = (bytes >> F::shift(V::N)) as usize;
                let word = F::leaf(V::N, cursor.pa, log2, bits);
                store_leaves::<F, V, M::Cell>(part(cells, end, entries), word, log2);
                cursor.advance(bytes);
                live += entries as u32;
                end += entries;
            } else if V::N > 0
                && let Some(cell) = cells.get(end)
            {
                let entry = match target {
                    Target::Linked => F::decode(V::N, cell.get()),
                    Target::Zeroed | Target::Stale => Entry::Empty,
                };
                if let Entry::Table(below) = entry {
                    self.fill::<V::Below>(below, Target::Linked, cursor, bits, reserve);
                } else {
                    let Some((below, zeroed)) = self.memory.take(reserve) else {
                        debug_assert!(false, "the plan counted too few tables");
                        return;
                    };
                    let target = if zeroed {
                        Target::Zeroed
                    } else {
                        Target::Stale
                    };
                    self.fill::<V::Below>(below, target, cursor, bits, reserve);
                    // The new table is complete: whoever follows this entry finds it so.
                    cell.set_release(self.format.table(V::N, below));
                    live += 1;
                }
                end += 1;
            } else {
                debug_assert!(false, "the plan accepted what does not fit");
                return;
            }
            room -= todo - cursor.todo;
        }
        let meta = self.memory.meta(table);
        match target {
            Target::Linked => meta.live.set(meta.live.get() + u64::from(live)),
            Target::Zeroed => meta.live.set(u64::from(live)),
            Target::Stale => {
                for cell in part(cells, 0, begin) {
                    cell.set(0);
                }
                for cell in cells.get(end..).unwrap_or(&[]) {
                    cell.set(0);
                }
                meta.live.set(u64::from(live));
            }
        }
    }
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

/// Why the passes refused, before it is put in words.
enum Refusal {
    Occupied(Occupied),
    NoTables(crate::error::NoTables),
}

impl Refusal {
    #[cold]
    fn into_error<F: Format, M: TableMemory>(self, table: &Table<F, M>, wanted: Span) -> MapError {
        match self {
            Self::NoTables(cause) => MapError::NoTables(cause),
            Self::Occupied(Occupied(at)) => {
                // The entry may lead to a table: the first leaf in it is the one to name.
                let iova = table.format.aperture().extend(at);
                let rest = Span::new(iova, wanted.len - iova.wrapping_sub(wanted.start));
                let found = table
                    .leaves(rest)
                    .next()
                    .map_or(runs::Run::default(), |l| l.run);
                MapError::Overlap { wanted, found }
            }
        }
    }
}
