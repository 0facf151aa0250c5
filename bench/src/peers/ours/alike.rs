//! Operations by either way to a table.

use std::convert::Infallible;
use std::hint::black_box;

use iopt::Invalidation;

/// Tells a unit that is not there.
#[inline]
pub(super) fn flush(what: &Invalidation) -> Result<(), Infallible> {
    black_box(what);
    Ok(())
}

/// The operations of `$ops`, which leads to those of the table `$table`.
macro_rules! alike {
    ($table:ident => $ops:expr) => {
        #[inline]
        fn map(&mut self, iova: u64, runs: &[Span<Pa>]) -> bool {
            let $table = &mut self.0;
            $ops.map(iova, runs, Prot::RW).is_ok()
        }

        #[inline]
        fn unmap<S: iopt::RunSink>(&mut self, range: Span<Iova>, mut sink: S) -> bool {
            let mut gather = iopt::Gather::new();
            let $table = &mut self.0;
            let removed = $ops.unmap(range, &mut gather, &mut sink);
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            removed.is_ok()
        }

        #[inline]
        fn clear(&mut self, range: Span<Iova>) -> bool {
            let mut gather = iopt::Gather::new();
            let $table = &mut self.0;
            let removed = $ops.clear(range, &mut gather);
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            removed.is_ok()
        }

        #[inline]
        fn map_each(&mut self, ranges: &[Span<Iova>], runs: &[Span<Pa>]) -> bool {
            let $table = &mut self.0;
            #[allow(unused_mut, reason = "one of the ways is a reference")]
            let (mut ops, mut well) = ($ops, true);
            for range in ranges {
                well &= ops.map(range.start, black_box(runs), Prot::RW).is_ok();
            }
            well
        }

        #[inline]
        fn unmap_each<S: iopt::RunSink>(&mut self, ranges: &[Span<Iova>], mut sink: S) -> bool {
            let mut gather = iopt::Gather::new();
            let mut well = true;
            {
                let $table = &mut self.0;
                #[allow(unused_mut, reason = "one of the ways is a reference")]
                let mut ops = $ops;
                for range in ranges {
                    well &= ops.unmap(*range, &mut gather, &mut sink).is_ok();
                }
            }
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            well
        }

        #[inline]
        fn translate(&self, iova: u64) -> Option<u64> {
            let $table = &self.0;
            $ops.translate(iova)
        }

        fn harvest(&mut self, range: Span<Iova>, pending: &mut iopt::Pending<Vec<u64>>) -> bool {
            let $table = &mut self.0;
            let harvested = $ops.harvest(range, pending).is_ok();
            let Ok(shown) = pending.flush_with(flush);
            shown.acknowledge();
            harvested
        }

        fn set_dirty(&mut self, range: Span<Iova>) -> bool {
            let $table = &mut self.0;
            $ops.set_dirty(range).is_ok_and(|bytes| bytes == range.len)
        }

        fn split(&mut self, range: Span<Iova>, size: u64) -> bool {
            let mut gather = iopt::Gather::new();
            let $table = &mut self.0;
            let allowed = iopt::Interruption::Allowed;
            let done = $ops.split(range, size, allowed, &mut gather, flush).is_ok();
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            done
        }

        fn merge(&mut self, range: Span<Iova>) -> bool {
            let mut gather = iopt::Gather::new();
            let $table = &mut self.0;
            let allowed = iopt::Interruption::Allowed;
            let done = $ops.merge(range, allowed, &mut gather, flush).is_ok();
            let Ok(flushed) = gather.flush_with(flush);
            self.0.reclaim(flushed);
            done
        }
    };
}
pub(super) use alike;
