//! The look at a range before it is emptied.
//!
//! The look and the removal share the way down: both begin at the lowest table that the whole range
//! goes through.

use runs::{Iova, Span};

use super::clear::Refusal;
use super::{Level, Table};
use crate::error::TableUnmapError;
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

/// How much of a range is to be removed, and what is said of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// All of it; holes are refused.
    Whole,
    /// As much as is mapped, and how many bytes that were.
    Mapped,
    /// As much as is mapped.
    Untold,
}

/// A range of which no leaf may reach over the ends, and that may have no holes.
pub(super) struct Look {
    /// As the caller named it.
    named: Span<Iova>,
    amount: Amount,
    run: OneRun,
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

impl Look {
    pub(super) fn new(named: Span<Iova>, amount: Amount) -> Self {
        let run = OneRun::default();
        Self { named, amount, run }
    }

    /// Looks at `[at, at + todo)`, which goes through `table`, at level `V`, and lies in no single table below it.
    #[inline(always)]
    pub(super) fn at<F: Format, M: TableMemory>(
        &mut self,
        v: impl Level,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<(), TableUnmapError> {
        self.refuses(v, tables, table, at, todo)
            .map_err(|refusal| tables.refused(refusal, self.named))
    }

    #[inline(always)]
    fn refuses<F: Format, M: TableMemory>(
        &mut self,
        v: impl Level,
        tables: &Table<F, M>,
        table: u64,
        at: u64,
        todo: u64,
    ) -> Result<(), Refusal> {
        let whole = self.amount == Amount::Whole;
        if v.n() == 0 {
            return tables.check_row(table, at, todo, whole);
        }
        let last = at + (todo - 1);
        for end in [at, last] {
            let place = tables.last_from((table, v.n()), end, 0);
            if let Entry::Leaf { log2, .. } = place.entry {
                let rest = (1u64 << log2) - 1;
                if end & !rest < at || end | rest > last {
                    return Err(Refusal::InsideLeaf(end));
                }
            }
        }
        if whole {
            if let Some(hole) = tables.first_hole(v, table, at, todo, &mut self.run) {
                return Err(Refusal::Hole(hole));
            }
        }
        Ok(())
    }

    /// Where it leads, if the look has found that all of it is one run.
    #[inline(always)]
    pub(super) fn one_run(&self) -> Option<u64> {
        let (start, _) = self.run.found.filter(|_| !self.run.ends)?;
        Some(start)
    }

    /// The lowest level of the tables that the range goes through, if the look has met all of them: a table there
    /// that it covers whole has nothing but leaves.
    #[inline(always)]
    pub(super) fn lowest(&self) -> usize {
        self.run.lowest.unwrap_or(0)
    }
}
