//! Threads that map and unmap 4 KiB and 2 MiB each, over and over, at ranges of their own in one address space.
//!
//! Tables of ours without a device. Memory of given runs costs nothing to pin; memory of this process is pinned by
//! another area already, or for each map. Ranges are neighbours, or lie so far apart that each map installs a table and
//! each unmap frees it. Printed are nanoseconds for a map and its unmap by one thread, and how many times as many pairs
//! two and ten threads make: medians of five runs. `cargo bench -p dmaspace-ioas --bench threads --all-features`;
//! without `--bench` one short run.
//!
//! # What was found
//!
//! November 2026, two processors of a virtual machine:
//!
//! | memory | each maps | ranges lie apart by | one thread | two | ten |
//! |---|---|---|--:|--:|--:|
//! | given | 4 KiB | 4 KiB | 1,891 ns | 0.44 | 0.98 |
//! | given | 4 KiB | 2 MiB | 1,914 ns | 0.71 | 0.67 |
//! | given | 2 MiB | 2 MiB | 1,829 ns | 0.77 | 0.84 |
//! | given | 2 MiB | 1 GiB | 1,834 ns | 0.70 | 0.93 |
//! | pinned already | 4 KiB | 4 KiB | 8,013 ns | 2.04 | 1.90 |
//! | pinned already | 4 KiB | 2 MiB | 8,033 ns | 1.66 | 1.71 |
//! | pinned already | 2 MiB | 2 MiB | 7,714 ns | 1.82 | 1.86 |
//! | pinned already | 2 MiB | 1 GiB | 7,645 ns | 1.69 | 1.66 |
//! | with pins | 4 KiB | 4 KiB | 13,539 ns | 2.01 | 1.95 |
//! | with pins | 4 KiB | 2 MiB | 13,452 ns | 1.77 | 1.76 |
//! | with pins | 2 MiB | 2 MiB | 14,048 ns | 1.95 | 1.92 |
//! | with pins | 2 MiB | 1 GiB | 14,154 ns | 1.82 | 1.82 |
//!
//! The two last rows came to 1.2 to 1.3 in two of four runs, where threads wait for the kernel's `mmap_lock`. Each
//! `membarrier` interrupts the other processor, so tables are given back 64 at a time.
//! Where nothing is pinned, what is left is waiting for the locks of the address space: [`ioas::Dma`] is for
//! memory that is mapped for each request.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hostmem::{Backing, Mapping};
use ioas::{GivenRuns, HostMemory, Ioas, Ledger, Memory};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;
const LARGE: u64 = 2 << 20;
const THREADS: u64 = 10;
const AT: u64 = 1 << 32;
/// Where memory is held that is to be pinned already.
const HELD: u64 = 1 << 40;

fn space() -> Ioas {
    let tables = Arc::new(HeapTables::with_tables(1024).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    Ioas::new(
        DomainId(1),
        AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap(),
    )
}

/// Pairs a second.
fn pairs(
    space: &Ioas,
    memory: &Arc<Memory>,
    threads: u64,
    (len, step): (u64, u64),
    time: Duration,
) -> f64 {
    let (stop, count) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let begun = Instant::now();
    thread::scope(|scope| {
        for n in 0..threads {
            scope.spawn(move || {
                let (at, part) = (AT + n * step, Span::new(n * LARGE, len));
                let mut pairs = 0;
                while !stop.load(Ordering::Relaxed) {
                    space.map(at, memory, part, Prot::RW, &mut ()).unwrap();
                    space.unmap(Span::new(at, len), &mut ()).unwrap();
                    pairs += 1;
                }
                count.fetch_add(pairs, Ordering::Relaxed);
            });
        }
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
    });
    count.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64()
}

fn main() {
    let benches = std::env::args().any(|argument| argument == "--bench");
    let (runs, time) = if benches { (5, 300) } else { (1, 2) };
    let time = Duration::from_millis(time);
    let mapping = Arc::new(Mapping::new(Backing::Thp, THREADS * LARGE, None).unwrap());
    mapping
        .populate(&mut |_| ControlFlow::Continue(()))
        .unwrap();
    let given = GivenRuns::new([Span::new(HELD, THREADS * LARGE)], PAGE).unwrap();
    let given = Memory::new(Arc::new(given), &Ledger::unlimited());
    let real = Memory::new(Arc::new(HostMemory::new(mapping)), &Ledger::unlimited());
    println!(
        "| memory | each maps | ranges lie apart by | one thread | two | ten |\n|---|---|---|--:|--:|--:|"
    );
    for (name, memory, held) in [
        ("given", &given, false),
        ("pinned already", &real, true),
        ("with pins", &real, false),
    ] {
        let space = space();
        if held {
            let all = Span::new(0, THREADS * LARGE);
            space.map(HELD, memory, all, Prot::RW, &mut ()).unwrap();
        }
        for place in [
            (PAGE, PAGE),
            (PAGE, LARGE),
            (LARGE, LARGE),
            (LARGE, 1 << 30),
        ] {
            let [one, two, ten] = [1, 2, THREADS].map(|threads| {
                let mut all: Vec<f64> = (0..runs)
                    .map(|_| pairs(&space, memory, threads, place, time))
                    .collect();
                all.sort_by(f64::total_cmp);
                all[all.len() / 2]
            });
            let (len, step) = (place.0 >> 10, place.1 >> 10);
            println!(
                "| {name} | {len} KiB | {step} KiB | {:.0} ns | {:.2} | {:.2} |",
                1e9 / one,
                two / one,
                ten / one
            );
        }
        space.close().unwrap();
    }
}
