//! Many threads on one shared table, and beside them threads that only store.
//!
//! An operation is a map and the unmap that undoes it, or as many stores and clears. All threads
//! begin together and go on until they are stopped; the figure counts the operations of all.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use iopt::{Format, Gather, Prot, SharedTable, Table, TableOps as _};
use runs::{Iova, PageSizes, Span};

use super::{Memory, arena, plain, take};
use crate::peers::places::Geometry;

/// Where threads work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terrain {
    /// Each in tables of its own, 256 pages at a time.
    Apart,
    /// All in one leaf table, a page at a time: neighbours belong to different threads.
    OneTable,
}

/// Threads for which there is room.
const MOST: u64 = 16;
/// Pages of an operation where threads are apart.
const APART: u64 = 256;
/// Pages of each thread in the one table.
const EACH: u64 = 16;
/// Operations between two looks at whether to stop.
const STRETCH: u64 = 16;

impl Terrain {
    /// The cells of thread `t`, and how many it takes at a time.
    fn cells(self, t: u64) -> (Vec<u64>, usize) {
        match self {
            // A table of 512 cells each.
            Self::Apart => ((0..APART).map(|n| 512 * t + n).collect(), APART as usize),
            Self::OneTable => ((0..EACH).map(|n| n * MOST + t).collect(), 1),
        }
    }
}

/// Operations a second of `count` threads together on a shared table.
pub fn threads<F: Format, M: Memory>(
    format: F,
    terrain: Terrain,
    count: u64,
    lasting: Duration,
) -> anyhow::Result<f64> {
    let geometry = Geometry::of(&format);
    let page = 1 << F::GRANULE_LOG2;
    let (start, pa) = (geometry.start(page), geometry.pa());
    let memory = arena::<F, M>(&format, 4 * MOST + 64)?;
    let small = PageSizes::from_bits(page);
    let mut table = Table::with_page_sizes(format, memory, small).map_err(plain)?;
    table.keep_empty_tables(true);
    let table: SharedTable<_, _> = SharedTable::new(table);
    let ranges = |t: u64| -> Vec<Span<Iova>> {
        match terrain {
            Terrain::Apart => vec![Span::new(start + t * geometry.table(page), APART * page)],
            Terrain::OneTable => {
                let own = terrain.cells(t).0.into_iter();
                own.map(|cell| Span::new(start + cell * page, page))
                    .collect()
            }
        }
    };
    let cycle = |range: &Span<Iova>| {
        let mapped = table
            .enter()
            .map(range.start, &[Span::new(pa, range.len)], Prot::RW);
        let mut gather = Gather::new();
        let unmapped = table.enter().unmap_mapped(*range, &mut gather, &mut take);
        let flushed = gather.flush_with(|what| {
            black_box(what);
            Ok::<_, ()>(())
        });
        if let Ok(flushed) = flushed {
            table.reclaim(flushed);
        }
        mapped.is_ok() && unmapped.is_ok_and(|bytes| bytes == range.len)
    };
    // The tables are there before.
    ensure!(
        (0..count).all(|t| ranges(t).iter().all(cycle)),
        "a page cannot be mapped"
    );
    let (rate, well) = together(count, lasting, |t, stop| {
        let (own, mut done, mut well) = (ranges(t), 0, true);
        while !stop.load(Ordering::Relaxed) {
            for n in 0..STRETCH {
                well &= cycle(black_box(&own[(done + n) as usize % own.len()]));
            }
            done += STRETCH;
        }
        (done, well)
    });
    ensure!(well, "an operation of a thread was refused");
    Ok(rate)
}

/// Operations a second of `count` threads together that store to as many cells in the same places,
/// and read and clear them.
pub fn store_loops(terrain: Terrain, count: u64, lasting: Duration) -> f64 {
    let cells: Vec<AtomicU64> = (0..512 * MOST).map(|_| AtomicU64::new(0)).collect();
    let (rate, _) = together(count, lasting, |t, stop| {
        let (own, width) = terrain.cells(t);
        // The cells of an operation lie side by side.
        let starts = own.iter().step_by(width).map(|n| *n as usize);
        let own: Vec<&[AtomicU64]> = starts.filter_map(|n| cells.get(n..n + width)).collect();
        let mut done = 0;
        while !stop.load(Ordering::Relaxed) {
            for cells in own.iter().cycle().take(STRETCH as usize) {
                for (word, cell) in (1..).zip(*black_box(cells)) {
                    cell.store(word, Ordering::Relaxed);
                }
                let mut found = 0;
                for cell in *black_box(cells) {
                    found |= cell.load(Ordering::Relaxed);
                    cell.store(0, Ordering::Relaxed);
                }
                black_box(found);
            }
            done += STRETCH;
        }
        (done, true)
    });
    rate
}

/// Runs `work` on `count` threads until the time is over. Each returns how often it did its
/// operation, and whether all went well; the rate is that of all together, from the moment at which
/// the first of them began to that at which the last one ended: where there are more threads than
/// processors, that is not when the one who waits for them gets its turn.
fn together(
    count: u64,
    lasting: Duration,
    work: impl Fn(u64, &AtomicBool) -> (u64, bool) + Sync,
) -> (f64, bool) {
    let stop = AtomicBool::new(false);
    let gate = Barrier::new(count as usize + 1);
    thread::scope(|scope| {
        let run = |t| {
            let (stop, gate, work) = (&stop, &gate, &work);
            scope.spawn(move || {
                gate.wait();
                let began = Instant::now();
                (began, work(t, stop), Instant::now())
            })
        };
        let all: Vec<_> = (0..count).map(run).collect();
        gate.wait();
        thread::sleep(lasting);
        stop.store(true, Ordering::Relaxed);
        let (mut done, mut well) = (0, true);
        let mut ends: Option<(Instant, Instant)> = None;
        for one in all {
            // A thread that panicked has done nothing that counts.
            let Ok((began, (own, went_well), ended)) = one.join() else {
                well = false;
                continue;
            };
            done += own;
            well &= went_well;
            let (first, last) = ends.unwrap_or((began, ended));
            ends = Some((first.min(began), last.max(ended)));
        }
        let taken = ends.map_or(Duration::MAX, |(first, last)| last - first);
        (done as f64 / taken.as_secs_f64(), well)
    })
}
