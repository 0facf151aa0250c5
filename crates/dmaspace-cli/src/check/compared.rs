//! The map of the check once more, by runs and page by page: in turns over the same runs, so that what else the
//! machine does falls on both.

use std::time::{Duration, Instant};

use iopt::{AnyTable, Gather, NoRuns, Prot, TableMapError};
use runs::{Iova, Run, Span};

use super::report::{Compared, Spread};
use super::{CheckError, PAGE, Step, Watch};

/// Rounds that are counted, where there is time for them.
const MOST_ROUNDS: usize = 15;
/// No round begins later than this after the first.
const TIME: Duration = Duration::from_millis(500);
/// Bytes that are mapped between two looks at the watch, whose time is not counted.
const STRETCH: u64 = 1 << 30;

/// Maps `runs`, which are all of `range`, into the empty `table`: a round is once by runs and once page by
/// page, and the other way comes first in every second round.
pub(super) fn compare(
    mut table: AnyTable,
    runs: &[Run],
    range: Span<Iova>,
    watch: &mut Watch<'_>,
) -> Result<Compared, CheckError> {
    let begun = Instant::now();
    let mut rounds: Vec<[f64; 2]> = Vec::new();
    // The first round meets cold tables: it is left out where there is another.
    while rounds.is_empty() || rounds.len() <= MOST_ROUNDS && begun.elapsed() < TIME {
        let mut round = [0.0; 2];
        let first = rounds.len() % 2;
        for way in [first, 1 - first] {
            let taken = fill(&mut table, runs, watch, way == 1)?;
            if let Some(time) = round.get_mut(way) {
                *time = taken.as_nanos() as f64;
            }
            let mut gather = Gather::new();
            table.alone().unmap(range, &mut gather, &mut NoRuns)?;
            table.reclaim(gather.never_walked());
        }
        rounds.push(round);
    }
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    let warm = rounds.get(1..).filter(|rounds| !rounds.is_empty());
    Ok(of(warm.unwrap_or(&rounds)))
}

/// Time to map all runs.
fn fill(
    table: &mut AnyTable,
    runs: &[Run],
    watch: &mut Watch<'_>,
    by_pages: bool,
) -> Result<Duration, CheckError> {
    let mut taken = Duration::ZERO;
    for run in runs {
        for offset in (0..run.len).step_by(STRETCH as usize) {
            let len = (run.len - offset).min(STRETCH);
            let stretch = run.part(Span::new(run.iova + offset, len));
            let started = Instant::now();
            match by_pages {
                true => map_pages(table, stretch)?,
                false => table.map(stretch.iova, &[stretch.output()], Prot::RW)?,
            }
            taken += started.elapsed();
            if watch(Step::Times).is_break() {
                return Err(CheckError::Interrupted(Step::Times));
            }
        }
    }
    Ok(taken)
}

fn map_pages(table: &mut AnyTable, run: Run) -> Result<(), TableMapError> {
    for offset in (0..run.len).step_by(PAGE as usize) {
        let page = [Span::new(run.pa + offset, PAGE)];
        table.map(run.iova + offset, &page, Prot::RW)?;
    }
    Ok(())
}

/// Medians and middle halves of rounds by runs and page by page.
fn of(rounds: &[[f64; 2]]) -> Compared {
    let spread = |of: fn(&[f64; 2]) -> f64| Spread::of(rounds.iter().map(of).collect());
    Compared {
        rounds: rounds.len() as u64,
        by_runs_ns: spread(|[runs, _]| *runs),
        by_page_ns: spread(|[_, pages]| *pages),
        ratio: spread(|[runs, pages]| pages / runs.max(1.0)),
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use iopt::{FormatId, HeapTables};
    use runs::PageSizes;

    use super::*;

    const MIB: u64 = 1 << 20;
    const START: u64 = 1 << 40;

    fn table() -> AnyTable {
        let memory = HeapTables::with_tables(64).unwrap();
        let sizes = PageSizes::from_bits(u64::MAX);
        AnyTable::new(FormatId::VtdSs, 4, sizes, memory).unwrap()
    }

    fn two_runs() -> [Run; 2] {
        [
            Run::new(START, Span::new(64 * MIB, 4 * MIB)),
            Run::new(START + 4 * MIB, Span::new(16 * MIB, 4 * MIB)),
        ]
    }

    #[test]
    fn one_slow_round_moves_neither_medians_nor_what_is_around_them() {
        let found = of(&[
            [10.0, 100.0],
            [10.0, 120.0],
            [900.0, 110.0],
            [10.0, 90.0],
            [11.0, 110.0],
        ]);
        let spread = |lower, median, upper| Spread {
            median,
            lower,
            upper,
        };
        assert_eq!(found.rounds, 5);
        assert_eq!(found.by_runs_ns, spread(10.0, 10.0, 11.0));
        assert_eq!(found.by_page_ns, spread(100.0, 110.0, 110.0));
        assert_eq!(found.ratio, spread(9.0, 10.0, 10.0));
    }

    #[test]
    fn both_ways_are_mapped_in_several_rounds() {
        let range = Span::new(START, 8 * MIB);
        let mut go_on = |_| ControlFlow::Continue(());
        let found = compare(table(), &two_runs(), range, &mut go_on).unwrap();
        assert!((1..=MOST_ROUNDS as u64).contains(&found.rounds));
        for spread in [found.by_runs_ns, found.by_page_ns, found.ratio] {
            assert!(spread.lower > 0.0, "{found:?}");
            assert!(spread.lower <= spread.median && spread.median <= spread.upper);
        }
    }

    #[test]
    fn it_can_be_stopped_in_each_way() {
        let range = Span::new(START, 8 * MIB);
        for looks in 1..=4 {
            let mut left = looks;
            let mut stop = |_| {
                left -= 1;
                match left {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            };
            let stopped = compare(table(), &two_runs(), range, &mut stop);
            assert!(
                matches!(stopped, Err(CheckError::Interrupted(_))),
                "{looks}"
            );
        }
    }
}
