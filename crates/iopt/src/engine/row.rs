//! Map within one table: its entries are looked at together, and leaves are written in series.
//!
//! All of it is inlined into the passes over tables (`map.rs`).

use runs::{Pa, Span};

use super::map::Stop;
use super::request::{Cursor, Request};
use super::{Level, Table, part};
use crate::cell::{Cell, Series};
use crate::format::Format;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// In one table: looks whether the entries are empty, and writes the leaves. False, with nothing
    /// stored, when it takes more than leaves of this table; never so at level 0.
    #[inline(always)]
    pub(super) fn map_row(
        &self,
        v: impl Level,
        table: u64,
        request: &Request<'_>,
    ) -> Result<bool, Stop> {
        let mut cursor = Cursor::new(request);
        if v.n() > 0 {
            let all = self.leaves_here(v.n(), &cursor, request.len);
            if all.is_none_or(|(log2, count)| count << log2 < request.len) {
                return Ok(false);
            }
        }
        let cells = self.cells(table, v.n());
        let first = self.index(v.n(), request.at);
        let cells = part(cells, first, (request.len >> F::shift(v.n())) as usize);
        if let Some(i) = first_occupied::<F, _>(cells) {
            return match v.n() {
                0 => Err(Stop::Occupied(request.at + ((i as u64) << F::shift(0)))),
                _ => Ok(false),
            };
        }
        self.announce(request);
        let mut rest = cells;
        while let Some((log2, count)) = self.leaves_here(v.n(), &cursor, u64::MAX) {
            if v.n() == 0 {
                if let Some(runs) = self.single_leaves(&cursor, (log2, count), cursor.todo) {
                    let entries = (runs << log2 >> F::shift(0)) as usize;
                    let (here, behind) = rest.split_at_checked(entries).unwrap_or((rest, &[]));
                    let starts = cursor.starts(runs);
                    store_single_leaves::<F, M::Cell>(v, here, starts, log2, request.bits);
                    cursor.pass_single_leaves(log2, runs);
                    rest = behind;
                    continue;
                }
            }
            let bytes = count << log2;
            let entries = (bytes >> F::shift(v.n())) as usize;
            let Some((here, behind)) = rest.split_at_checked(entries) else {
                break;
            };
            let word = F::leaf(v.n(), cursor.pa, log2, request.bits);
            store_leaves::<F, M::Cell>(v, here, word, log2);
            cursor.advance(bytes);
            rest = behind;
        }
        self.memory.written(cells);
        Ok(true)
    }

    /// Writes the only run of a request if it takes leaves of one size, one or a leaf for each entry, and the entries are
    /// empty: as most requests are.
    #[inline(always)]
    pub(super) fn store_run(
        &self,
        v: impl Level,
        table: u64,
        request: &Request<'_>,
        run: Span<Pa>,
    ) -> Option<()> {
        let Span { start: pa, len, .. } = run;
        let own = F::shift(v.n());
        if (request.at | len) & ((1 << own) - 1) != 0 {
            return None;
        }
        let up_to_len = u64::MAX.checked_shr(len.leading_zeros())?;
        let sizes = F::leaf_sizes(v.n()).and(request.sizes).bits() & up_to_len;
        // Entries go on by a constant step within such a block of physical memory only.
        let linear = F::LINEAR_LOG2 >= 64 || (pa ^ (pa + (len - 1))) >> F::LINEAR_LOG2 == 0;
        let log2 = if sizes == 1 << own && pa & (sizes - 1) == 0 && linear {
            own
        } else if sizes & len != 0 && len.is_power_of_two() && (request.at | pa) & (len - 1) == 0 {
            len.trailing_zeros()
        } else {
            return None;
        };
        let (all, first) = (self.entries(table, v.n()), self.index(v.n(), request.at));
        let cells = all.get(first..)?.get(..(len >> own) as usize)?;
        if first_occupied::<F, _>(cells).is_some() || self.intact().is_err() {
            return None;
        }
        self.memory.table_read(table);
        self.announce(request);
        store_leaves::<F, M::Cell>(v, cells, F::leaf(v.n(), pa, log2, request.bits), log2);
        self.memory.written(cells);
        Some(())
    }
}

/// Index of the first entry that is not empty.
#[inline(always)]
pub(super) fn first_occupied<F: Format, C: Cell>(cells: &[C]) -> Option<usize> {
    // Most often all of them are 0, and to see that takes no decision for each.
    if C::union(cells) == 0 {
        return None;
    }
    cells.iter().position(|cell| !F::is_empty(cell.get()))
}

/// True when no entry is in use.
#[inline(always)]
pub(super) fn are_empty<F: Format, C: Cell>(cells: &[C]) -> bool {
    first_occupied_in_parts::<F, C>(cells).is_none()
}

/// [`first_occupied`] that reads no further than a few entries behind the one that it finds.
#[inline(always)]
pub(super) fn first_occupied_in_parts<F: Format, C: Cell>(cells: &[C]) -> Option<usize> {
    const PART: usize = 64;
    let mut parts = cells.chunks(PART).enumerate();
    parts.find_map(|(nth, part)| Some(nth * PART + first_occupied::<F, C>(part)?))
}

/// Writes the entries of leaves of 2^`log2` bytes, the first of which has the entry `word`.
#[inline(always)]
pub(super) fn store_leaves<F: Format, C: Cell>(v: impl Level, cells: &[C], word: u64, log2: u32) {
    let own = F::shift(v.n());
    let series = |next, stride| Series {
        next,
        stride,
        ignored: 0,
    };
    if F::GROUPS_ADVANCE || F::leaf_sizes(v.n()).bits().count_ones() <= 1 || log2 == own {
        C::set_series(cells, series(word, F::stride(own)));
    } else {
        let mut next = word;
        for group in cells.chunks_exact(1 << (log2 - own)) {
            C::set_series(group, series(next, 0));
            next = next.wrapping_add(F::stride(log2));
        }
    }
}

/// Writes the entries of leaves of 2^`log2` bytes each, the first of which begins at `start`.
#[inline(always)]
pub(super) fn store_single_leaves<F: Format, C: Cell>(
    v: impl Level,
    cells: &[C],
    (start, others): (u64, &[Span<Pa>]),
    log2: u32,
    bits: u64,
) {
    let leaf = |start| F::leaf(v.n(), start, log2, bits);
    let size = 1 << (log2 - F::shift(v.n()));
    let Some((first, rest)) = cells.split_at_checked(size) else {
        return;
    };
    store_leaves::<F, C>(v, first, leaf(start), log2);
    if F::leaf_sizes(v.n()).bits().count_ones() <= 1 || size == 1 {
        for (cell, run) in rest.iter().zip(others) {
            cell.set(leaf(run.start));
        }
    } else {
        for (group, run) in rest.chunks_exact(size).zip(others) {
            store_leaves::<F, C>(v, group, leaf(run.start), log2);
        }
    }
}
