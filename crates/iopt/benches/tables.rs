//! Map and unmap, per format, next to a loop that stores the same entries: the machine's limit.
//!
//! `cargo bench -p dmaspace-iopt`. Every row goes through the exclusive form, and its time is that
//! of one operation.
//!
//! Rows of up to 256 pages are warm: the tables exist already (a neighbour keeps each alive) and
//! the entries are empty; 64 operations on different ranges are timed together. Rows of 1 and 8 GiB
//! take their tables from the arena, which was touched before, and give them back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{Bencher, BenchmarkGroup, Criterion, criterion_group, criterion_main};
use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::{AnyTable, Discard, Format, Gather, HeapTables, Prot, RunSink, Table, TableMemory};
use runs::{PageSizes, Run, Span};

const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
/// Far from the pages that keep the upper tables alive.
const IOVA: u64 = 5 << 30;
const PA: u64 = 9 << 30;

struct Shape {
    name: &'static str,
    page: u64,
    count: u64,
}

const SHAPES: [Shape; 5] = [
    Shape {
        name: "1 x 4K",
        page: K4,
        count: 1,
    },
    Shape {
        name: "256 x 4K",
        page: K4,
        count: 256,
    },
    Shape {
        name: "256 x 2M",
        page: M2,
        count: 256,
    },
    Shape {
        name: "1 GiB in 4K",
        page: K4,
        count: G1 / K4,
    },
    Shape {
        name: "8 GiB in 2M",
        page: M2,
        count: 8 * G1 / M2,
    },
];

impl Shape {
    /// How many operations are timed together.
    fn ranges(&self) -> impl Iterator<Item = Span> + Clone + use<> {
        let len = self.page * self.count;
        let repeat = if self.count <= 256 { 64 } else { 1 };
        (0..repeat).map(move |n| Span::new(IOVA + n * 2 * len, len))
    }
}

/// A table with leaves of one size, warm for the shape's ranges.
fn table<'a, F: Format>(
    format: F,
    memory: &'a HeapTables,
    shape: &Shape,
) -> Table<F, &'a HeapTables> {
    let sizes = PageSizes::from_bits(shape.page);
    let mut table = Table::with_page_sizes(format, memory, sizes).unwrap();
    if shape.count <= 256 {
        for range in shape.ranges() {
            let beside = [Span::new(PA, shape.page)];
            table
                .map(range.start + range.len, &beside, Prot::RW)
                .unwrap();
        }
    }
    table
}

fn map<F: Format>(table: &mut Table<F, &HeapTables>, range: Span) {
    table
        .map(
            black_box(range.start),
            &[Span::new(black_box(PA), range.len)],
            Prot::RW,
        )
        .unwrap();
}

fn unmap<F: Format>(table: &mut Table<F, &HeapTables>, range: Span, mut sink: impl RunSink) {
    let mut gather = Gather::new();
    table
        .unmap_mapped(black_box(range), &mut gather, &mut sink)
        .unwrap();
    let flushed = gather
        .flush_with(|what| {
            black_box(what);
            Ok::<_, ()>(())
        })
        .unwrap();
    table.reclaim(flushed);
}

/// The time of `timed` for all ranges of a shape, each followed by `untimed`; per range.
fn timed<T>(
    b: &mut Bencher<'_, WallTime>,
    shape: &Shape,
    table: &mut T,
    before: impl Fn(&mut T, Span),
    timed: impl Fn(&mut T, Span),
    after: impl Fn(&mut T, Span),
) {
    b.iter_custom(|times| {
        let per_round = shape.ranges().count() as u64;
        let mut taken = Duration::ZERO;
        let rounds = times.div_ceil(per_round);
        for _ in 0..rounds {
            shape.ranges().for_each(|range| before(table, range));
            let started = Instant::now();
            shape.ranges().for_each(|range| timed(table, range));
            taken += started.elapsed();
            shape.ranges().for_each(|range| after(table, range));
        }
        taken.mul_f64(times as f64 / (rounds * per_round) as f64)
    });
}

fn operations<F: Format>(c: &mut Criterion, format: F) {
    let memory = HeapTables::with_tables(4096).unwrap();
    for shape in &SHAPES {
        let mut group = group(c, &format!("{}/{}", F::ID, shape.name));
        let mut table = table(format, &memory, shape);
        let take = |run: Run| {
            black_box(run);
        };
        group.bench_function("map", |b| {
            timed(
                b,
                shape,
                &mut table,
                |_, _| {},
                map,
                |t, range| unmap(t, range, Discard),
            );
        });
        group.bench_function("unmap, runs returned", |b| {
            timed(
                b,
                shape,
                &mut table,
                map,
                |t, range| unmap(t, range, take),
                |_, _| {},
            );
        });
        group.bench_function("unmap, runs not wanted", |b| {
            timed(
                b,
                shape,
                &mut table,
                map,
                |t, range| unmap(t, range, Discard),
                |_, _| {},
            );
        });
        group.finish();
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
    }
}

/// The format chosen at run time beside the format as a type, in turns: what the branch costs.
fn any<F: Format>(c: &mut Criterion, format: F)
where
    for<'a> AnyTable<&'a HeapTables>: From<Table<F, &'a HeapTables>>,
{
    let memory = HeapTables::with_tables(4096).unwrap();
    for shape in &SHAPES[..2] {
        let mut group = group(c, &format!("any/{}/{}", F::ID, shape.name));
        let mut typed = table(format, &memory, shape);
        group.bench_function("map, format as a type", |b| {
            let after = |t: &mut _, range| unmap(t, range, Discard);
            timed(b, shape, &mut typed, |_, _| {}, map, after);
        });
        let mut any = AnyTable::from(table(format, &memory, shape));
        group.bench_function("map, format at run time", |b| {
            let map = |t: &mut AnyTable<_>, range: Span| {
                let run = [Span::new(black_box(PA), range.len)];
                t.map(black_box(range.start), &run, Prot::RW).unwrap();
            };
            let after = |t: &mut AnyTable<_>, range| {
                let mut gather = Gather::new();
                t.unmap_mapped(range, &mut gather, &mut Discard).unwrap();
                t.reclaim(gather.never_walked());
            };
            timed(b, shape, &mut any, |_, _| {}, map, after);
        });
        group.finish();
    }
}

fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    group
}

/// The limit: the same number of entries stored in tables that are there, and emptied again.
fn limits(c: &mut Criterion) {
    let cells: Vec<AtomicU64> = (0..G1 / K4).map(|_| AtomicU64::new(0)).collect();
    for shape in &SHAPES {
        let cells = &cells[..shape.count as usize];
        let mut group = group(c, &format!("limit/{}", shape.name));
        group.bench_function("store", |b| {
            b.iter(|| store(black_box(cells), black_box(PA | 3), shape.page));
        });
        group.bench_function("check and store", |b| {
            b.iter(|| {
                let empty = cells.iter().all(|c| c.load(Ordering::Relaxed) & 4 == 0);
                assert!(black_box(empty));
                store(black_box(cells), black_box(PA | 3), shape.page);
            });
        });
        group.bench_function("read and zero", |b| {
            b.iter(|| {
                let mut sum = 0;
                for cell in black_box(cells) {
                    sum ^= cell.load(Ordering::Relaxed);
                    cell.store(0, Ordering::Relaxed);
                }
                sum
            });
        });
        group.finish();
    }
}

fn store(cells: &[AtomicU64], mut word: u64, stride: u64) {
    for cell in cells {
        cell.store(word, Ordering::Relaxed);
        word += stride;
    }
}

fn tables(c: &mut Criterion) {
    limits(c);
    operations(c, VtdSs::new(4).unwrap());
    operations(c, X86_64::new(4).unwrap());
    operations(c, AmdV1::new(4).unwrap());
    any(c, VtdSs::new(4).unwrap());
    any(c, AmdV1::new(4).unwrap());
}

criterion_group!(benches, tables);
criterion_main!(benches);
