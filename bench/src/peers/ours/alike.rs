//! What both forms do by calls of the same names. A macro, since the tables have no trait in common.

use std::convert::Infallible;
use std::hint::black_box;

use iopt::Invalidation;

/// Tells a unit that is not there.
#[inline]
pub(super) fn flush(what: &Invalidation) -> Result<(), Infallible> {
    black_box(what);
    Ok(())
}

macro_rules! alike {
    () => {
        #[inline]
        fn map(&mut self, iova: u64, runs: &[Span<Pa>]) -> bool {
            self.0.map(iova, runs, Prot::RW).is_ok()
        }

        #[inline]
        fn unmap<S: iopt::RunSink>(&mut self, range: Span<Iova>, mut sink: S) -> bool {
            let mut gather = iopt::Gather::new();
            let removed = self.0.unmap(range, &mut gather, &mut sink);
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            removed.is_ok()
        }

        #[inline]
        fn clear(&mut self, range: Span<Iova>) -> bool {
            let mut gather = iopt::Gather::new();
            let removed = self.0.clear(range, &mut gather);
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            removed.is_ok()
        }

        #[inline]
        fn translate(&self, iova: u64) -> Option<u64> {
            self.0.translate(iova)
        }

        fn harvest(&mut self, range: Span<Iova>, pending: &mut iopt::Pending<Vec<u64>>) -> bool {
            let harvested = self.0.harvest(range, pending).is_ok();
            let Ok(shown) = pending.flush_with(flush);
            shown.acknowledge();
            harvested
        }

        fn set_dirty(&mut self, range: Span<Iova>) -> bool {
            self.0
                .set_dirty(range)
                .is_ok_and(|bytes| bytes == range.len)
        }

        fn split(&mut self, range: Span<Iova>, size: u64) -> bool {
            let mut gather = iopt::Gather::new();
            let done = self
                .0
                .split(range, size, iopt::Interruption::Allowed, &mut gather, flush)
                .is_ok();
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            done
        }

        fn merge(&mut self, range: Span<Iova>) -> bool {
            let mut gather = iopt::Gather::new();
            let done = self
                .0
                .merge(range, iopt::Interruption::Allowed, &mut gather, flush)
                .is_ok();
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            done
        }
    };
}
pub(super) use alike;
