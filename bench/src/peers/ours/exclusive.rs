//! The exclusive form: one owner, by `&mut`.

use std::hint::black_box;
use std::sync::Arc;

use iopt::{Format, Gather, Prot, RunSink, Table};
use runs::{Iova, Pa, Span};

use super::alike::{alike, flush};
use super::{Access, Memory};

/// The exclusive form.
pub struct Exclusive<F: Format, M: Memory>(Table<F, Arc<M>>);

impl<F: Format, M: Memory> Access<F, M> for Exclusive<F, M> {
    const NAME: &'static str = "exclusive";

    fn of(table: Table<F, Arc<M>>) -> Self {
        Self(table)
    }

    alike!();

    #[inline]
    fn map_each(&mut self, ranges: &[Span<Iova>], runs: &[Span<Pa>]) -> bool {
        let mut well = true;
        for range in ranges {
            well &= self.0.map(range.start, black_box(runs), Prot::RW).is_ok();
        }
        well
    }

    #[inline]
    fn unmap_each<S: RunSink>(&mut self, ranges: &[Span<Iova>], mut sink: S) -> bool {
        let mut gather = Gather::new();
        let mut well = true;
        for range in ranges {
            well &= self.0.unmap(*range, &mut gather, &mut sink).is_ok();
        }
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        well
    }
}

#[cfg(test)]
impl<F: Format, M: Memory> Exclusive<F, M> {
    /// The table, to look at.
    pub(super) fn table(&self) -> &Table<F, Arc<M>> {
        &self.0
    }
}
