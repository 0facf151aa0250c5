//! The shared form under real threads: a stress test over many seeds.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;

use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs, X86_64};
use iopt::{
    BuildError, Format, Gather, HeapTables, Interruption, Invalidation, Prot, ProtectError,
    SharedTable, Table, TableMapError, TableMemory, TableOps as _, TableUnmapError,
};
use runs::{Iova, Run, Span};

const PAGE: u64 = 4096;

/// Memory that gives the processor away while it waits, as user space should.
struct Yielding<'a>(&'a HeapTables);

impl TableMemory for Yielding<'_> {
    type Cell = <HeapTables as TableMemory>::Cell;
    type Link = <HeapTables as TableMemory>::Link;
    type Count = <HeapTables as TableMemory>::Count;
    const TABLE_BYTES: u64 = 4096;

    fn entries(&self, table: u64, count: usize) -> &[Self::Cell] {
        self.0.entries(table, count)
    }
    fn meta(&self, table: u64) -> &iopt::Meta<Self::Link, Self::Count> {
        self.0.meta(table)
    }
    fn last_address(&self) -> u64 {
        self.0.last_address()
    }
    fn reserve(&self, count: u64) -> Result<iopt::Reserve, iopt::NoTables> {
        self.0.reserve(count)
    }
    fn allocate(&self, bytes: usize) -> Result<u64, iopt::NoTables> {
        self.0.allocate(bytes)
    }
    fn give_back(&self, reserve: iopt::Reserve) {
        self.0.give_back(reserve);
    }
    fn reclaim(&self, chain: iopt::Chain) {
        self.0.reclaim(chain);
    }
    fn wait(&self, _round: u32) {
        thread::yield_now();
    }
}

fn shared<F: Format>(format: F, memory: &HeapTables) -> SharedTable<F, Yielding<'_>> {
    SharedTable::new(Table::new(format, Yielding(memory)).unwrap())
}

fn flush<F: Format>(table: &SharedTable<F, Yielding<'_>>, mut gather: Gather) {
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
}

/// Nothing is left but the root, and no table waits, once those are given back that no operation owned.
fn finish<F: Format>(table: SharedTable<F, Yielding<'_>>, memory: &HeapTables) {
    let mut gather = Gather::new();
    for all in table.enter().format().aperture().spans() {
        table
            .enter()
            .give_back_empty_tables(all, &mut gather)
            .unwrap();
    }
    flush(&table, gather);
    // A thread of another test may be inside a table of its own.
    while !table.poll() {
        thread::yield_now();
    }
    let table = table.into_inner();
    assert_eq!(table.tables(), 1, "an empty table is still linked");
    assert_eq!(memory.in_use(), 1);
    let _ = table.tear_down();
}

/// Each thread owns every n-th page of a few leaf tables: they share all tables and never a page.
/// Each knows what it has mapped, and finds exactly that.
fn own_pages_of_the_same_tables<F: Format>(format: F, seed: u64) {
    const THREADS: u64 = 4;
    let memory = HeapTables::with_tables(1 << 10).unwrap();
    let table = shared(format, &memory);
    // On both sides of a boundary between tables of two levels.
    let base = (1u64 << 30) - 16 * PAGE;
    thread::scope(|scope| {
        for me in 0..THREADS {
            let table = &table;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed * 77 + me + 1);
                let mut mapped = [None; 16];
                for round in 0..400u64 {
                    let n = rng.u64(..16) as usize;
                    let iova = base + (n as u64 * THREADS + me) * PAGE;
                    let pa = (1 << 40) + (round * THREADS + me) * PAGE;
                    assert_eq!(table.enter().translate(iova), mapped[n]);
                    match mapped[n] {
                        None => {
                            table
                                .enter()
                                .map(iova, &[Span::new(pa, PAGE)], Prot::RW)
                                .unwrap();
                            mapped[n] = Some(pa);
                        }
                        Some(old) => {
                            let mut gather = Gather::new();
                            let mut runs = Vec::new();
                            let page = Span::new(iova, PAGE);
                            table
                                .enter()
                                .unmap(page, &mut gather, &mut |run| runs.push(run))
                                .unwrap();
                            assert_eq!(runs, [Run::new(iova, Span::new(old, PAGE))]);
                            flush(table, gather);
                            mapped[n] = None;
                        }
                    }
                }
                for n in 0..16 {
                    let mut gather = Gather::new();
                    let page = Span::new(base + (n * THREADS + me) * PAGE, PAGE);
                    let bytes = table
                        .enter()
                        .unmap_mapped(page, &mut gather, &mut iopt::NoRuns)
                        .unwrap();
                    assert_eq!(bytes > 0, mapped[n as usize].is_some());
                    flush(table, gather);
                }
            });
        }
    });
    finish(table, &memory);
}

/// Gives out ranges, as an address space does: what one thread has no other gets.
#[derive(Default)]
struct Ranges(Mutex<Vec<Span<Iova>>>);

impl Ranges {
    /// Does something with `range`, unless some of it is taken.
    fn with(&self, range: Span<Iova>, f: impl FnOnce()) {
        let overlaps = |taken: &Span<Iova>| taken.intersection(&range).is_some();
        {
            let mut taken = self.0.lock().unwrap();
            if taken.iter().any(overlaps) {
                return;
            }
            taken.push(range);
        }
        f();
        self.0.lock().unwrap().retain(|taken| *taken != range);
    }
}

/// Other sizes, or other permissions, for what is mapped there just now.
fn reshape<F: Format>(table: &SharedTable<F, Yielding<'_>>, range: Span<Iova>, kind: u64) {
    let (mut gather, allowed) = (Gather::new(), Interruption::Allowed);
    let flush_now = |_: &Invalidation| Ok::<_, ()>(());
    match kind {
        0 => table
            .enter()
            .split(range, PAGE, allowed, &mut gather, flush_now)
            .unwrap(),
        1 => table
            .enter()
            .merge(range, allowed, &mut gather, flush_now)
            .unwrap(),
        _ => {
            let result = table.enter().protect(range, Prot::READ, &mut gather);
            assert!(matches!(
                result,
                Ok(()) | Err(ProtectError::Hole { .. } | ProtectError::InsideLeaf { .. })
            ));
        }
    }
    flush(table, gather);
}

/// Threads map, unmap, split, merge and protect ranges of all sizes, each of which is one thread's own for
/// as long as an operation takes, with more or less around it; every page that is mapped is counted by the
/// one that maps it and the one that unmaps it.
fn ranges_of_their_own<F: Format>(format: F, seed: u64) {
    const THREADS: u64 = 4;
    /// No leaf is larger.
    const LARGEST: u64 = 4 << 20;
    let memory = HeapTables::with_tables(1 << 12).unwrap();
    let table = shared(format, &memory);
    let (balance, ranges) = (AtomicU64::new(0), Ranges::default());
    let base = (1u64 << 30) - (4 << 20);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|me| {
                let (table, balance, ranges) = (&table, &balance, &ranges);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed * 131 + me + 1);
                    for _ in 0..1000 {
                        let large = rng.u64(..3) == 0;
                        let (iova, len) = if large {
                            (
                                base + rng.u64(..4) * (2 << 20),
                                (1 + rng.u64(..2)) * (2 << 20),
                            )
                        } else {
                            let pages = 1 + rng.u64(..700);
                            (base + rng.u64(..2048) * PAGE, pages * PAGE)
                        };
                        let range = Span::new(iova, len);
                        // The leaves around its ends, which change as a whole.
                        let around = |size: u64| {
                            let first = iova & !(size - 1);
                            let end = (iova + len).next_multiple_of(size);
                            Span::new(first, end - first)
                        };
                        if rng.u64(..3) == 0 {
                            let kind = rng.u64(..3);
                            ranges.with(around(LARGEST), || reshape(table, range, kind));
                            continue;
                        }
                        if rng.u64(..2) == 0 {
                            // Physical address = iova + 2^40: every translation can be checked.
                            let run = [Span::new(iova + (1 << 40), len)];
                            ranges.with(range, || match table.enter().map(iova, &run, Prot::RW) {
                                Ok(()) => {
                                    balance.fetch_add(len, Ordering::Relaxed);
                                }
                                Err(TableMapError::Overlap { .. }) => {}
                                Err(other) => panic!("{other}"),
                            });
                            continue;
                        }
                        let owned = around([PAGE, 2 << 20, LARGEST][rng.u64(..3) as usize]);
                        ranges.with(owned, || {
                            let mut gather = Gather::new();
                            let mut bytes = 0;
                            let mut sink = |run: Run| {
                                assert_eq!(run.pa, run.iova + (1 << 40));
                                bytes += run.len;
                            };
                            let mut inside = table.owning(owned);
                            let result = inside.unmap_mapped(range, &mut gather, &mut sink);
                            drop(inside);
                            match result {
                                Ok(said) => assert_eq!(said, bytes),
                                Err(TableUnmapError::InsideLeaf { leaf, .. }) => {
                                    assert!(!range.covers(&leaf.input()));
                                    assert_eq!(bytes, 0);
                                }
                                Err(other) => panic!("{other}"),
                            }
                            balance.fetch_sub(bytes, Ordering::Relaxed);
                            flush(table, gather);
                        });
                    }
                })
            })
            .collect();
        let (table, stop) = (&table, &stop);
        scope.spawn(move || {
            let mut rng = fastrand::Rng::with_seed(seed + 5);
            while !stop.load(Ordering::Relaxed) {
                let iova = base + rng.u64(..16 << 20);
                if let Some(pa) = table.enter().translate(iova) {
                    assert_eq!(pa, iova + (1 << 40), "a reader was led astray");
                }
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut gather = Gather::new();
    let all = Span::new(base, 64 << 20);
    let left = table
        .enter()
        .unmap_mapped(all, &mut gather, &mut iopt::NoRuns)
        .unwrap();
    assert_eq!(left, balance.into_inner());
    flush(&table, gather);
    finish(table, &memory);
}

/// Threads map and unmap their own pages, and find them, before and after the top has grown; the lower
/// ones empty the old root now and then. Another thread reads meanwhile.
#[test]
fn the_top_grows_under_threads_that_map_and_unmap() {
    const THREADS: u64 = 3;
    for seed in 0..40 {
        let memory = HeapTables::with_tables(1 << 8).unwrap();
        let table = shared(AmdV1::new(1).unwrap(), &memory);
        // Growing is exclusive but for readers.
        let gate = RwLock::new(());
        // Single pages leave their tables behind.
        let give_back = || {
            let _exclusive = gate.write().unwrap();
            let mut gather = Gather::new();
            for all in table.enter().format().aperture().spans() {
                table
                    .enter()
                    .give_back_empty_tables(all, &mut gather)
                    .unwrap();
            }
            flush(&table, gather);
            thread::yield_now();
        };
        thread::scope(|scope| {
            for me in 0..THREADS {
                let (table, gate, give_back) = (&table, &gate, &give_back);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed * 57 + me + 1);
                    for round in 0..200 {
                        let levels = table.enter().root().levels;
                        // In the first table, or anywhere in what is there.
                        let bits = [21, (9 * u32::from(levels) + 12).min(62)];
                        let bits = bits[rng.u64(..2) as usize];
                        let page = (rng.u64(..1 << bits) >> 12) / THREADS * THREADS + me;
                        if page >= 1 << (bits - 12) {
                            continue;
                        }
                        let run = Span::new((1 << 40) + round * PAGE, PAGE);
                        let map = || {
                            let _open = gate.read().unwrap();
                            table.enter().map(page * PAGE, &[run], Prot::RW)
                        };
                        while let Err(error) = map() {
                            assert!(matches!(error, TableMapError::NoTables(_)), "{error}");
                            give_back();
                        }
                        thread::yield_now();
                        assert_eq!(table.enter().translate(page * PAGE), Some(run.start));
                        let mut gather = Gather::new();
                        let mut runs = Vec::new();
                        {
                            let _open = gate.read().unwrap();
                            let mut sink = |run| runs.push(run);
                            table
                                .enter()
                                .unmap(Span::new(page * PAGE, PAGE), &mut gather, &mut sink)
                                .unwrap();
                        }
                        assert_eq!(runs, [Run::new(page * PAGE, Span::new(run.start, PAGE))]);
                        assert_eq!(table.enter().translate(page * PAGE), None);
                        flush(table, gather);
                    }
                });
            }
            let (table, gate, give_back) = (&table, &gate, &give_back);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + 9);
                for levels in 2..=6 {
                    for _ in 0..rng.u64(..300) {
                        thread::yield_now();
                    }
                    let mut gather = Gather::new();
                    let mut grow = || {
                        let _exclusive = gate.write().unwrap();
                        table.grow(levels, &mut gather)
                    };
                    let root = loop {
                        match grow() {
                            // The others may be at their end, and give nothing back any more.
                            Err(BuildError::NoTables(_)) => give_back(),
                            root => break root.unwrap(),
                        }
                    };
                    assert_eq!(root.levels, levels);
                    flush(table, gather);
                }
            });
        });
        assert_eq!(table.enter().root().levels, 6);
        finish(table, &memory);
    }
}

#[test]
fn a_shared_table_is_cut_and_unmapped_in_one_call() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = shared(VtdSs::new(4).unwrap(), &memory);
    let large = 2 << 20;
    table
        .enter()
        .map(large, &[Span::new(1 << 30, large)], Prot::RW)
        .unwrap();
    let (mut gather, mut runs) = (Gather::new(), Vec::new());
    let range = Span::new(large + 5 * PAGE, 7 * PAGE);
    let bytes = table.enter().unmap_cutting(
        range,
        Interruption::Refused,
        &mut gather,
        &mut |run| runs.push(run),
        |_| Ok::<_, ()>(()),
    );
    assert_eq!(bytes, Ok(range.len));
    assert_eq!(
        runs,
        [Run::new(
            range.start,
            Span::new((1 << 30) + 5 * PAGE, range.len)
        )]
    );
    flush(&table, gather);
    assert_eq!(table.enter().translate(large), Some(1 << 30));
    assert_eq!(table.enter().translate(range.start), None);
    let mut gather = Gather::new();
    let all = Span::new(large, large);
    let left = table
        .enter()
        .unmap_mapped(all, &mut gather, &mut iopt::NoRuns);
    assert_eq!(left, Ok(large - range.len));
    flush(&table, gather);
    finish(table, &memory);
}

macro_rules! stress {
    ($name:ident, $format:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn threads_that_own_pages_of_the_same_tables_find_what_they_mapped() {
                (0..12).for_each(|seed| own_pages_of_the_same_tables($format, seed));
            }

            #[test]
            fn threads_with_ranges_of_their_own_keep_the_books() {
                (0..12).for_each(|seed| ranges_of_their_own($format, seed));
            }
        }
    };
}

stress!(vtd_ss, VtdSs::new(4).unwrap());
stress!(x86_64, X86_64::new(4).unwrap());
stress!(amdv1, AmdV1::new(4).unwrap());
stress!(arm_s1_4k, ArmStage1::<K4>::new(48, 48).unwrap());
stress!(riscv_sv48, RiscV::new(4).unwrap());
