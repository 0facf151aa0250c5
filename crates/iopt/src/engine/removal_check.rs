//! What has to be true of a range before it is removed.
//!
//! The look and the removal share the way down: both begin at the lowest table that the whole range
//! goes through.

use runs::{Iova, Run, Span};

use super::{Level, Table, part};
use crate::cell::Cell;
use crate::error::TableUnmapError;
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

/// What has to be true of a range before it is removed.
pub(super) trait RemovalCheck<F: Format, M: TableMemory> {
    /// How many bytes from the stripped address `at` on are to be removed; `[at, at + todo)` goes
    /// through `table`, at level `V`, and lies in no single table below it.
    fn check<V: Level>(
        &mut self,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<u64, TableUnmapError>;

    /// True when it is known, or not asked for, how much of that is mapped: all counts as mapped.
    fn is_known(&self) -> bool;

    /// Where it leads, if the look has found that all of it is one run.
    fn one_run(&self) -> Option<u64> {
        None
    }

    /// The lowest level of the tables that the range goes through, if the look has met all of them: a table there
    /// that it covers whole has nothing but leaves.
    fn lowest(&self) -> usize {
        0
    }
}

impl<F: Format, M: TableMemory, L: RemovalCheck<F, M>> RemovalCheck<F, M> for &mut L {
    #[inline(always)]
    fn check<V: Level>(
        &mut self,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<u64, TableUnmapError> {
        (**self).check::<V>(tables, table, at, todo)
    }

    #[inline(always)]
    fn is_known(&self) -> bool {
        (**self).is_known()
    }

    #[inline(always)]
    fn one_run(&self) -> Option<u64> {
        (**self).one_run()
    }

    #[inline(always)]
    fn lowest(&self) -> usize {
        (**self).lowest()
    }
}

/// What is to be removed of a range, and what is said of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// All of it; holes are refused.
    Whole,
    /// What is mapped, and how many bytes that were.
    Mapped,
    /// What is mapped.
    Untold,
}

/// All of the range, if no leaf reaches over its ends.
pub(super) struct Range {
    /// As the caller named it.
    pub(super) named: Span<Iova>,
    pub(super) amount: Amount,
    pub(super) run: OneRun,
}

/// Leaves that may be one run, looked at in order.
#[derive(Clone, Copy, Default)]
pub(super) struct OneRun {
    /// Where it begins and where it goes on.
    found: Option<(u64, u64)>,
    /// It does not.
    ends: bool,
    /// The lowest level of the tables that were looked at.
    lowest: Option<usize>,
}

impl OneRun {
    #[inline(always)]
    pub(super) fn looks_at(&mut self, level: usize) {
        self.lowest = Some(self.lowest.map_or(level, |lowest| lowest.min(level)));
    }

    #[inline(always)]
    pub(super) fn goes_on(&self, pa: u64) -> bool {
        !self.ends && self.found.is_none_or(|(_, next)| next == pa)
    }

    #[inline(always)]
    pub(super) fn add(&mut self, pa: u64, len: u64) {
        self.ends |= !self.goes_on(pa);
        let start = self.found.map_or(pa, |(start, _)| start);
        self.found = Some((start, pa.wrapping_add(len)));
    }
}

impl<F: Format, M: TableMemory> RemovalCheck<F, M> for Range {
    #[inline(always)]
    fn check<V: Level>(
        &mut self,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<u64, TableUnmapError> {
        let aperture = tables.aperture();
        let whole = self.amount == Amount::Whole;
        if V::N == 0 {
            let checked = tables.check_row(table, at, todo, whole);
            return match checked {
                Ok(()) => Ok(todo),
                Err(refusal) => Err(tables.refused(refusal, self.named)),
            };
        }
        for end in [at, at + (todo - 1)] {
            if let Some((pa, log2, ..)) = tables.find_from::<V>(table, end) {
                let rest = (1u64 << log2) - 1;
                if end & !rest < at || end | rest > at + (todo - 1) {
                    return Err(TableUnmapError::InsideLeaf {
                        range: self.named,
                        leaf: Run::new(aperture.extend(end & !rest), Span::new(pa, rest + 1)),
                    });
                }
            }
        }
        if whole {
            if let Some(hole) = tables.first_hole::<V>(table, at, todo, &mut self.run) {
                return Err(TableUnmapError::Hole {
                    range: self.named,
                    at: aperture.extend(hole),
                });
            }
        }
        Ok(todo)
    }

    #[inline(always)]
    fn is_known(&self) -> bool {
        self.amount != Amount::Mapped
    }

    #[inline(always)]
    fn one_run(&self) -> Option<u64> {
        let (start, _) = self.run.found.filter(|_| !self.run.ends)?;
        Some(start)
    }

    #[inline(always)]
    fn lowest(&self) -> usize {
        self.run.lowest.unwrap_or(0)
    }
}

/// Pages of one size, as far as there are any.
pub(super) struct Pages {
    /// As the caller named them.
    pub(super) named: Span<Iova>,
    pub(super) size: u64,
    /// Why there are no more of them.
    pub(super) result: Result<(), TableUnmapError>,
}

impl<F: Format, M: TableMemory> RemovalCheck<F, M> for Pages {
    fn check<V: Level>(
        &mut self,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<u64, TableUnmapError> {
        let entries = (self.size >> F::shift(V::N)) as usize;
        let index = tables.index(V::N, at);
        if entries == 0 {
            // The pages are those of a table below.
            let cell = tables.cells(table, V::N).get(index);
            let word = cell.map_or(0, Cell::get_acquire);
            if V::N > 0 {
                if let Entry::Table(below) = F::decode(V::N, word) {
                    return self.check::<V::Below>(tables, below, at, todo);
                }
            }
        }
        let cells = tables.cells(table, V::N);
        let count = (todo >> F::shift(V::N)) as usize;
        let mut pages = 0;
        for group in part(cells, index, count).chunks_exact(entries.max(1)) {
            let word = group.first().map_or(0, Cell::get_acquire);
            match F::decode(V::N, word) {
                Entry::Leaf { log2, .. } if 1 << log2 == self.size => pages += 1,
                _ => break,
            }
        }
        let bytes = pages * self.size;
        if bytes < todo {
            let at = tables.aperture().extend(at + bytes);
            let (range, size) = (self.named, self.size);
            self.result = Err(match tables.leaf_at(at) {
                Some(leaf) => TableUnmapError::OtherSize {
                    size,
                    leaf: leaf.run,
                },
                None => TableUnmapError::Hole { range, at },
            });
        }
        Ok(bytes)
    }

    fn is_known(&self) -> bool {
        true
    }
}
