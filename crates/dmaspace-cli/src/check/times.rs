//! Times beside the check: the same map by runs and page by page, and memory of several sizes and backings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, Machine, Mapping};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use iopt::{AnyTable, Gather, NoRuns, Prot};
use runs::{Iova, Run, Span};

use super::job::{Clock, Job, PROBE, timed};
use super::memory::{brought_in, check_free};
use super::report::{Compared, Spread, TimesReport};
use super::{Because as _, CheckError, PAGE, Step};

/// Rounds of a comparison that are counted, where there is time for them.
const MOST_ROUNDS: usize = 15;
/// No round of it begins later than this after the first.
const TIME: Duration = Duration::from_millis(500);
/// Bytes that are mapped between two looks at the watch, whose time is not counted.
const STRETCH: u64 = 1 << 30;

/// Maps `runs`, which are all of `range`, into the empty `table`: a round is once by runs and once page by page, in turns,
/// so that what else the machine does falls on both.
pub(super) fn compare(
    mut table: AnyTable,
    runs: &[Run],
    range: Span<Iova>,
    job: &mut Job<'_>,
) -> Result<Compared, CheckError> {
    job.step = Step::Times;
    let begun = Instant::now();
    let mut rounds: Vec<[f64; 2]> = Vec::new();
    // The first round meets cold tables: it is left out where there is another.
    while rounds.is_empty() || rounds.len() <= MOST_ROUNDS && begun.elapsed() < TIME {
        let mut round = [0.0; 2];
        let first = rounds.len() % 2;
        for way in [first, 1 - first] {
            let taken = fill(&mut table, runs, job, way == 1)?;
            if let Some(time) = round.get_mut(way) {
                *time = taken.as_nanos() as f64;
            }
            let mut gather = Gather::new();
            let unmapped = table.alone().unmap(range, &mut gather, &mut NoRuns);
            unmapped.failed("cannot unmap the second mapping")?;
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
    job: &mut Job<'_>,
    by_pages: bool,
) -> Result<Duration, CheckError> {
    let mut taken = Duration::ZERO;
    for run in runs {
        for offset in (0..run.len).step_by(STRETCH as usize) {
            let len = (run.len - offset).min(STRETCH);
            let stretch = run.part(Span::new(run.iova + offset, len));
            let step = if by_pages { PAGE } else { len };
            let started = Instant::now();
            let mapped = (0..len).step_by(step as usize).try_for_each(|at| {
                let piece = [Span::new(stretch.pa + at, step)];
                table.map(stretch.iova + at, &piece, Prot::RW)
            });
            taken += started.elapsed();
            mapped.failed("cannot map the memory a second time, to compare")?;
            job.go_on()?;
        }
    }
    Ok(taken)
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

const SIZES: [u64; 4] = [64 << 10, 2 << 20, 64 << 20, 1 << 30];
/// Rounds of a size and backing, of which the median counts.
const ROUNDS: usize = 5;

/// Maps memory of each backing, up to `most` bytes of it, into a `space` that is empty, from `start` on.
pub(super) fn measure(
    space: &Ioas,
    start: impl Fn(u64) -> Option<u64>,
    ledger: &Arc<Ledger>,
    host: &dyn Fn(Arc<Mapping>) -> HostMemory,
    most: u64,
    job: &mut Job<'_>,
) -> Result<(), CheckError> {
    job.step = Step::Times;
    let machine = Machine::probe().failed(PROBE)?;
    for backing in Backing::ALL {
        let fits = |size: &u64| *size <= most && size % backing.page() == 0;
        for size in SIZES.into_iter().filter(fits) {
            let mut report = TimesReport {
                backing: backing.name(),
                size_bytes: size,
                ..TimesReport::default()
            };
            match start(size).filter(|_| check_free(&machine, backing, size).is_ok()) {
                Some(iova) => {
                    let mapping = Arc::new(brought_in(backing, size, job)?);
                    let memory = Memory::new(Arc::new(host(mapping)), ledger);
                    rounds(space, iova, &memory, &mut report)?;
                }
                None => report.refused = Some("not enough free memory of this kind".into()),
            }
            job.report.times.push(report);
        }
    }
    Ok(())
}

fn rounds(
    space: &Ioas,
    iova: u64,
    memory: &Arc<Memory>,
    report: &mut TimesReport,
) -> Result<(), CheckError> {
    let whole = Span::new(0, memory.len());
    let (mut pins, mut maps, mut unmaps) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut clock = Clock::new(None);
        let (mapped, ns) = timed(|| {
            space
                .observed(&mut clock)
                .map(iova, memory, whole, Prot::RW)
        });
        if let Err(error) = mapped {
            report.refused = Some(crate::private::without_addresses(&crate::output::sentence(
                &error,
            )));
            return Ok(());
        }
        let pin = clock.times.of(&[ioas::Step::Charge, ioas::Step::Pin]);
        let (unmapped, unmap) = timed(|| space.unmap(Span::new(iova, whole.len)));
        unmapped.failed("cannot unmap the memory")?;
        pins.push(pin as f64);
        maps.push(ns.saturating_sub(pin) as f64);
        unmaps.push(unmap as f64);
    }
    let median = |samples| Spread::of(samples).median as u64;
    (report.pin_ns, report.map_ns) = (median(pins), median(maps));
    report.unmap_ns = median(unmaps);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use iopt::{FormatId, HeapTables};
    use runs::PageSizes;

    use super::*;
    use crate::check::CheckJob;

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
        let (asked, mut go_on) = (CheckJob::default(), |_| ControlFlow::Continue(()));
        let mut job = Job::new(&asked, &mut go_on).unwrap();
        let found = compare(table(), &two_runs(), range, &mut job).unwrap();
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
            let asked = CheckJob::default();
            let mut job = Job::new(&asked, &mut stop).unwrap();
            let stopped = compare(table(), &two_runs(), range, &mut job);
            assert!(
                matches!(stopped, Err(CheckError::Interrupted(_))),
                "{looks}"
            );
        }
    }
}
