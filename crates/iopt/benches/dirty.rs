//! Harvest over 1 GiB in pages of 4 KiB, 262,144 entries, next to a loop that reads as many.
//!
//! `cargo bench -p dmaspace-iopt --bench dirty`. Clean entries are only read; of those that are
//! written to, each is marked again before the next harvest, outside of the time taken.

#![allow(clippy::unwrap_used, reason = "benchmarks panic as tests do")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use iopt::format::{AmdV1, ArmOptions, ArmStage1, K4, VtdSs, X86_64};
use iopt::{Format, HeapTables, Pending, Prot, Table};
use runs::{PageSizes, Span};

const PAGE: u64 = 4 << 10;
const ALL: Span = Span::new(5 << 30, 1 << 30);

fn harvest<F: Format>(c: &mut Criterion, format: F) {
    let memory = HeapTables::with_tables(1024).unwrap();
    let small = PageSizes::from_bits(PAGE);
    let mut table = Table::with_page_sizes(format, &memory, small).unwrap();
    table
        .map(ALL.start, &[Span::new(9 << 30, ALL.len)], Prot::RW)
        .unwrap();
    table.track_dirty(true).unwrap();
    let mut pending = Pending::new(vec![0; 4096], ALL, PAGE).unwrap();
    for (name, step) in [("clean", 0), ("1 of 64 dirty", 64), ("all dirty", 1)] {
        c.bench_function(&format!("{}/harvest 1 GiB in 4K, {name}", F::ID), |b| {
            b.iter_custom(|times| {
                let mut taken = Duration::ZERO;
                for _ in 0..times {
                    for page in (0..ALL.len / PAGE)
                        .step_by(step.max(1))
                        .take_while(|_| step > 0)
                    {
                        let at = ALL.start + page * PAGE;
                        table.set_dirty(Span::new(at, PAGE)).unwrap();
                    }
                    let started = Instant::now();
                    let bytes = table.harvest(black_box(ALL), &mut pending).unwrap();
                    let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
                    black_box(bytes);
                    shown.acknowledge();
                    taken += started.elapsed();
                }
                taken
            });
        });
    }
}

/// The limit: as many entries read by a plain loop.
fn limit(c: &mut Criterion) {
    let cells: Vec<AtomicU64> = (0..ALL.len / PAGE).map(AtomicU64::new).collect();
    c.bench_function("limit/read 262,144 entries", |b| {
        b.iter(|| {
            let cells = black_box(&cells).iter();
            cells.fold(0, |all, cell| all | cell.load(Ordering::Relaxed))
        });
    });
}

fn dirty(c: &mut Criterion) {
    limit(c);
    harvest(c, VtdSs::new(4).unwrap());
    harvest(c, X86_64::new(4).unwrap());
    harvest(c, AmdV1::new(4).unwrap());
    let options = ArmOptions {
        dirty: true,
        ..ArmOptions::PLAIN
    };
    harvest(
        c,
        ArmStage1::<K4>::new(48, 48).unwrap().with_options(options),
    );
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = dirty
}
criterion_main!(benches);
