//! Pages that devices have written to and that a refused report leaves for the next ones.
//!
//! A report takes dirty bits out of the tables before its waits are over: for the unit to invalidate its copies of
//! them, and for accesses under way to end. If it is refused then, the bits are kept until the client has received
//! them.

use iopt::Pending;
use runs::{Iova, Span};

/// Runs that are kept apart; with more of them the last one covers the rest, and pages between count as written to.
const MOST_RUNS: usize = 65_536;

#[derive(Default)]
pub(crate) struct Unreported {
    /// Bits of the last report that was refused. The unit may hold their pages as dirty still.
    pub(crate) pending: Option<Pending<Vec<u64>>>,
    /// Bits of earlier ones, which need no flush any more.
    runs: Vec<Span<Iova>>,
}

impl Unreported {
    /// `runs` are all that is known of `span`, and need no flush any more.
    pub(crate) fn flushed(&mut self, span: Span<Iova>, runs: impl Iterator<Item = Span<Iova>>) {
        self.reported(span);
        for run in runs {
            let full = self.runs.len() >= MOST_RUNS;
            let last = self.runs.last_mut().filter(|_| full);
            let hull = last.and_then(|last| {
                let end = last.last().max(run.last());
                let hull = Span::inclusive(last.start.min(run.start), end)?;
                Some((last, hull))
            });
            match hull {
                Some((last, hull)) => *last = hull,
                None => self.runs.push(run),
            }
        }
    }

    /// Adds what is kept for the span of `pending`.
    pub(crate) fn mark(&self, pending: &mut Pending<Vec<u64>>) {
        self.runs.iter().for_each(|run| pending.mark(*run));
    }

    /// The client knows all of `span`.
    pub(crate) fn reported(&mut self, span: Span<Iova>) {
        let below = |run: &Span<Iova>| {
            let last = span.start.checked_sub(1)?;
            Span::inclusive(run.start, run.last().min(last))
        };
        let above = |run: &Span<Iova>| {
            let first = span.last().checked_add(1)?;
            Span::inclusive(run.start.max(first), run.last())
        };
        let left = |run: &Span<Iova>| [below(run), above(run)];
        self.runs = self.runs.iter().flat_map(left).flatten().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_cuts_what_is_kept_and_too_many_runs_cover_more() {
        let page = |nth: u64| Span::new(nth * 4096, 4096);
        let mut kept = Unreported::default();
        kept.flushed(
            Span::new(0, 1 << 20),
            [Span::new(4096, 8 * 4096)].into_iter(),
        );
        kept.reported(Span::new(2 * 4096, 3 * 4096));
        assert_eq!(kept.runs, [page(1), Span::new(5 * 4096, 4 * 4096)]);
        // News of a span replace all that was known of it.
        kept.flushed(Span::new(5 * 4096, 1 << 20), [page(6)].into_iter());
        assert_eq!(kept.runs, [page(1), page(6)]);
        let all = Span::new(0, 1 << 40);
        kept.flushed(all, (0..MOST_RUNS as u64 + 9).map(|nth| page(2 * nth + 1)));
        assert_eq!(kept.runs.len(), MOST_RUNS);
        let rest = Span::new((2 * MOST_RUNS as u64 - 1) * 4096, 19 * 4096);
        assert_eq!(kept.runs.last(), Some(&rest));
        kept.reported(all);
        assert_eq!(kept.runs, []);
    }
}
