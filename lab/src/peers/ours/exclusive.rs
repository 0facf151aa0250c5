//! The exclusive form: one owner, by `&mut`.

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;

use iopt::{Format, Gather, Interruption, Invalidation, Pending, Prot, RunSink, Table};
use runs::Span;

use super::{Form, Memory};

/// The exclusive form.
pub struct Exclusive<F: Format, M: Memory>(Table<F, Arc<M>>);

/// Tells a unit that is not there.
#[inline]
fn flush(what: &Invalidation) -> Result<(), Infallible> {
    black_box(what);
    Ok(())
}

impl<F: Format, M: Memory> Form<F, M> for Exclusive<F, M> {
    const NAME: &'static str = "exclusive";

    fn of(table: Table<F, Arc<M>>) -> Self {
        Self(table)
    }

    #[inline]
    fn map(&mut self, iova: u64, runs: &[Span]) -> bool {
        self.0.map(iova, runs, Prot::RW).is_ok()
    }

    #[inline]
    fn unmap<S: RunSink>(&mut self, range: Span, mut sink: S) -> bool {
        let mut gather = Gather::new();
        let removed = self.0.unmap_mapped(range, &mut gather, &mut sink);
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        removed.is_ok_and(|bytes| bytes == range.len)
    }

    #[inline]
    fn map_each(&mut self, ranges: &[Span], runs: &[Span]) -> bool {
        let mut well = true;
        for range in ranges {
            well &= self.0.map(range.start, black_box(runs), Prot::RW).is_ok();
        }
        well
    }

    #[inline]
    fn unmap_each<S: RunSink>(&mut self, ranges: &[Span], mut sink: S) -> bool {
        let mut gather = Gather::new();
        let mut well = true;
        for range in ranges {
            let removed = self.0.unmap_mapped(*range, &mut gather, &mut sink);
            well &= removed.is_ok_and(|bytes| bytes == range.len);
        }
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        well
    }

    #[inline]
    fn translate(&self, iova: u64) -> Option<u64> {
        self.0.translate(iova)
    }

    fn harvest(&mut self, range: Span, pending: &mut Pending<Vec<u64>>) -> bool {
        let harvested = self.0.harvest(range, pending).is_ok();
        let Ok(shown) = pending.flush_with(flush);
        shown.acknowledge();
        harvested
    }

    fn set_dirty(&mut self, range: Span) -> bool {
        self.0
            .set_dirty(range)
            .is_ok_and(|bytes| bytes == range.len)
    }

    fn split(&mut self, range: Span, size: u64) -> bool {
        let mut gather = Gather::new();
        let done = self
            .0
            .split(range, size, Interruption::Allowed, &mut gather, flush)
            .is_ok();
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        done
    }

    fn merge(&mut self, range: Span) -> bool {
        let mut gather = Gather::new();
        let done = self
            .0
            .merge(range, Interruption::Allowed, &mut gather, flush)
            .is_ok();
        let Ok(flushed) = gather.flush_with(flush);
        self.0.reclaim(flushed);
        done
    }
}

#[cfg(test)]
impl<F: Format, M: Memory> Exclusive<F, M> {
    /// The table, to look at.
    pub(super) fn table(&self) -> &Table<F, Arc<M>> {
        &self.0
    }
}
