//! The shared form: many threads, by `&`; here one at a time.

use std::hint::black_box;
use std::sync::Arc;

use iopt::reclaim::{DefaultReclaim, Reclaim};
use iopt::{Format, Gather, Prot, RunSink, SharedTable, Table};
use runs::{Iova, Pa, Span};

use super::alike::{alike, flush};
use super::{Access, Memory};

/// The shared form.
pub struct Shared<F: Format, M: Memory, R = DefaultReclaim>(SharedTable<F, Arc<M>, R>);

impl<F: Format, M: Memory, R: Reclaim + Default + 'static> Access<F, M> for Shared<F, M, R> {
    const NAME: &'static str = "shared";
    const SETS: u64 = 2;

    fn of(table: Table<F, Arc<M>>) -> Self {
        Self(SharedTable::with_reclaim(table, R::default()))
    }

    alike!();

    #[inline]
    fn map_each(&mut self, ranges: &[Span<Iova>], runs: &[Span<Pa>]) -> bool {
        let (inside, mut well) = (self.0.enter(), true);
        for range in ranges {
            well &= inside.map(range.start, black_box(runs), Prot::RW).is_ok();
        }
        well
    }

    #[inline]
    fn unmap_each<S: RunSink>(&mut self, ranges: &[Span<Iova>], mut sink: S) -> bool {
        let mut gather = Gather::new();
        let (inside, mut well) = (self.0.enter(), true);
        for range in ranges {
            well &= inside.unmap(*range, &mut gather, &mut sink).is_ok();
        }
        drop(inside);
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        well
    }
}
