//! Each step fails once, and the whole state afterwards is the state before; or, when a unit has
//! not forgotten what was mapped, the memory is retired until it has.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
#[cfg(feature = "virtio-drivers")]
use std::{
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::common::*;
#[cfg(feature = "virtio-drivers")]
use ioas::{DmaPages, DriverMemory, DriverMemoryError, PageSource};
use ioas::{Ledger, MapError, Memory, MemoryObject, Step, Synthetic, UnmapError};
use iommu::{DeviceId, FlushError};
use iopt::{FormatId, HeapTables, Invalidation, NoTables, Prot, TableMemory};
use runs::{Pa, Span};

/// Device address of the memory under test: across the end of a table of each level.
const AT: u64 = (512 * GIB) - (2 * MIB) - (5 * PAGE);

/// An address space that is not empty: an area on both sides, a unit with a device.
struct Bench {
    tables: Arc<HeapTables>,
    space: Space,
    unit: Arc<FrailUnit>,
    ledger: Arc<Ledger>,
    neighbours: Arc<Synthetic>,
    memory: Arc<Frail>,
    whole: Arc<Memory>,
}

/// Runs of 4K, 16K, 2M, scattered: about 9 MiB in 43 runs.
fn layout() -> Vec<Span<Pa>> {
    let small = (0..40u64).map(|n| Span::new(0x1000_0000 + n * 0x1_1000, PAGE << (n % 3)));
    let large = [
        Span::new(0x4000_0000, 2 * MIB),
        Span::new(0x5000_1000, 3 * MIB),
        Span::new(0x6000_0000, 4 * MIB),
    ];
    small.chain(large).collect()
}

impl Bench {
    fn new(format: FormatId, levels: u8) -> Self {
        Self::with(format, levels, |_| (), |_| ())
    }

    fn with(
        format: FormatId,
        levels: u8,
        memory: impl FnOnce(&mut Frail),
        unit: impl FnOnce(&mut FrailUnit),
    ) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let ledger = Ledger::new("a counter", Some(GIB), 12345);
        let space = space(format, levels, &tables);
        let mut frail_unit = FrailUnit::new(crate::common::unit(&tables));
        unit(&mut frail_unit);
        let unit = Arc::new(frail_unit);
        space.attach((unit.clone(), DEVICE)).unwrap();

        let mut frail = Frail::new(Synthetic::new(layout()));
        memory(&mut frail);
        let memory = Arc::new(frail);
        let neighbours = Arc::new(Synthetic::new([Span::new(0x7000_0000, 64 * PAGE)]));
        let whole = Memory::new(memory.clone(), &ledger);
        let around = Memory::new(neighbours.clone(), &ledger);
        for (at, first) in [(AT - 16 * PAGE, 0), (AT + whole.len(), 16)] {
            let part = Span::new(first * PAGE, 16 * PAGE);
            space.map(at, &around, part, Prot::RW).unwrap();
        }
        Self {
            tables,
            space,
            unit,
            ledger,
            neighbours,
            memory,
            whole,
        }
    }

    fn state(&self) -> State {
        State::of(
            &self.space,
            &self.ledger,
            &self.tables,
            &[&self.neighbours, &self.memory.memory],
        )
    }

    fn map(&mut self, watch: &mut Watch) -> Result<(), MapError> {
        let part = Span::new(0, self.whole.len());
        self.space
            .observed(watch)
            .map(AT, &self.whole, part, Prot::RW)
    }

    /// After what was to fail has failed: maps and unmaps, to see that nothing stuck.
    fn works_still(&mut self) {
        self.memory.pins.set([]);
        self.memory.readers.set([]);
        self.memory.reads.set([]);
        self.unit.invalidates.set([]);
        let before = self.state();
        let mut watch = Watch::default();
        self.map(&mut watch).unwrap();
        let bytes = self.whole.len();
        for step in [Step::Charge, Step::Pin, Step::FindRuns, Step::FillTables] {
            assert_eq!(watch.bytes(step), bytes, "{step:?}");
        }
        let held = self.state();
        assert_eq!(held.in_use, before.in_use + bytes);
        assert_eq!(held.pinned, before.pinned + bytes);
        let mapped: u64 = held.leaves.iter().map(|leaf| leaf.run.len).sum();
        assert_eq!(mapped, bytes + 32 * PAGE);
        let unmapped = self
            .space
            .observed(&mut watch)
            .unmap(Span::new(AT, bytes))
            .unwrap();
        assert_eq!(
            (unmapped.areas, unmapped.bytes, unmapped.unpinned),
            (1, bytes, bytes)
        );
        assert_eq!(self.state(), before);
    }

    fn end(self) {
        self.space.close().unwrap();
        assert_eq!(self.tables.in_use(), 0);
        assert_eq!(self.neighbours.pinned() + self.memory.memory.pinned(), 0);
    }
}

/// Has `fail` make the n-th call of some kind fail, for each n until the map succeeds.
fn each(format: FormatId, levels: u8, expected: u64, fail: impl Fn(&Bench, &mut Watch, u64)) {
    let mut bench = Bench::new(format, levels);
    let before = bench.state();
    let mut n = 0;
    loop {
        let mut watch = Watch::default();
        fail(&bench, &mut watch, n);
        match bench.map(&mut watch) {
            Ok(()) => break,
            Err(_) => assert_eq!(bench.state(), before, "after failure {n}"),
        }
        n += 1;
    }
    assert!(n >= expected, "failed only {n} times");
    bench.space.unmap(Span::new(AT, bench.whole.len())).unwrap();
    assert_eq!(bench.state(), before);
    bench.works_still();
    bench.end();
}

#[test]
fn a_pin_that_is_refused_leaves_nothing() {
    for (format, levels) in FORMATS {
        each(format, levels, 1, |bench, _, n| {
            bench.memory.pins.set((n == 0).then_some(0));
        });
    }
}

#[test]
fn runs_that_cannot_be_read_leave_nothing_whatever_the_batch() {
    for (format, levels) in FORMATS {
        each(format, levels, 1, |bench, _, n| {
            bench.memory.readers.set((n == 0).then_some(0));
        });
        // Nine batches of five or fewer runs, and the empty one at the end.
        each(format, levels, 10, |bench, _, n| {
            bench.memory.reads.set([n]);
        });
    }
}

#[test]
fn an_observer_that_stops_the_work_leaves_nothing() {
    for (format, levels) in FORMATS {
        // Twice while pinning, and after each of nine batches.
        each(format, levels, 11, |_, watch, n| watch.breaks.set([n]));
    }
}

#[test]
fn a_limit_that_is_too_low_is_refused_with_numbers_and_leaves_nothing() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let memory = Arc::new(Synthetic::new(layout()).charged_by(2 * MIB));
    let whole = Span::new(0, memory.len());
    let bytes = memory.charge(whole);
    assert!(bytes > whole.len);
    let ledger = Ledger::new("a counter", Some(bytes + 999), 1000);
    let space = space(FormatId::VtdSs, 4, &tables);
    let object = Memory::new(memory.clone(), &ledger);
    let before = State::of(&space, &ledger, &tables, &[&memory]);
    let mut watch = Watch::default();
    let refused = space.observed(&mut watch).map(AT, &object, whole, Prot::RW);
    let Err(MapError::OverLimit(limit)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        (limit.needed, limit.limit, limit.in_use),
        (bytes, bytes + 999, 1000)
    );
    assert_eq!(watch.steps, [(Step::Charge, 0)]);
    assert_eq!(State::of(&space, &ledger, &tables, &[&memory]), before);
}

#[test]
fn too_little_table_memory_leaves_nothing_whichever_table_is_missing() {
    for (format, levels) in FORMATS {
        let mut bench = Bench::new(format, levels);
        let before = bench.state();
        let mut refused = 0;
        for left in 0.. {
            // Another user takes all but `left` tables.
            let taken = 64 - bench.tables.in_use() - left;
            let reserve = bench.tables.reserve(taken).unwrap();
            let result = bench.map(&mut Watch::default());
            bench.tables.give_back(reserve);
            match result {
                Ok(()) => break,
                Err(MapError::Table(iopt::TableMapError::NoTables(NoTables {
                    available, ..
                }))) => {
                    assert!(available <= left * 4096);
                    assert_eq!(bench.state(), before, "{left} tables left");
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        // At least two tables for leaves and two above them on the far side of 512 GiB.
        assert!(refused >= 3, "{format}: {refused}");
        bench.space.unmap(Span::new(AT, bench.whole.len())).unwrap();
        assert_eq!(bench.state(), before);
        bench.works_still();
        bench.end();
    }
}

#[test]
fn a_reader_that_lies_about_its_runs_is_found_out() {
    for (lie, name) in [
        (Lie::More, "RunsDiffer"),
        (Lie::Less, "RunsDiffer"),
        (Lie::Nothing, "Empty"),
        (Lie::TooMany, "BatchTooLong"),
    ] {
        let mut bench = Bench::with(FormatId::VtdSs, 4, |memory| memory.lie = lie, |_| ());
        let before = bench.state();
        let refused = bench.map(&mut Watch::default()).unwrap_err();
        assert!(
            format!("{refused:?}").contains(name),
            "{lie:?}: {refused:?}"
        );
        assert_eq!(bench.state(), before, "{lie:?}");
        bench.end();
    }
}

#[test]
fn permissions_that_the_format_lacks_leave_nothing() {
    let bench = Bench::new(FormatId::VtdSs, 4);
    let before = bench.state();
    let part = Span::new(0, bench.whole.len());
    let refused = bench.space.map(AT, &bench.whole, part, Prot::EXECUTE);
    assert!(matches!(
        refused,
        Err(MapError::Table(iopt::TableMapError::Prot { .. }))
    ));
    assert_eq!(bench.state(), before);
    assert_eq!(bench.unit.invalidates.calls(), 0, "nothing to forget");
    bench.end();
}

#[test]
fn a_map_that_fails_under_a_deaf_unit_retires_its_memory_until_the_unit_hears() {
    for (format, levels) in FORMATS {
        for batch in 0..10 {
            let mut bench = Bench::new(format, levels);
            let before = bench.state();
            let bytes = bench.whole.len();
            bench.memory.reads.set([batch]);
            bench.unit.invalidates.set(0..3);
            assert!(matches!(
                bench.map(&mut Watch::default()),
                Err(MapError::Runs(_))
            ));
            let after = bench.state();
            if batch == 0 {
                // Nothing was in the tables yet, so that no unit has to invalidate it.
                assert_eq!(after, before);
                assert_eq!(bench.unit.invalidates.calls(), 0);
                continue;
            }
            // In no area and in no leaf, but pinned and charged; its tables are not reused.
            assert_eq!(after.retired, 1);
            assert_eq!(
                (&after.areas, &after.leaves),
                (&before.areas, &before.leaves)
            );
            assert_eq!(after.pinned, before.pinned + bytes);
            assert_eq!(after.in_use, before.in_use + bytes);
            assert!(after.tables >= before.tables);

            // Still deaf: nothing new is mapped, and nothing else changes.
            assert!(matches!(
                bench.map(&mut Watch::default()),
                Err(MapError::Flush(FlushError::TimedOut { .. }))
            ));
            assert_eq!(bench.state(), after);
            assert!(matches!(bench.space.flush(), Err(UnmapError::Flush(_))));
            assert_eq!(bench.state(), after);

            // It hears.
            assert_eq!(bench.space.flush().unwrap(), bytes);
            assert_eq!(bench.state(), before);
            bench.works_still();
            bench.end();
        }
    }
}

/// A driver's pages: all of a memory, once.
#[cfg(feature = "virtio-drivers")]
struct Once {
    whole: Arc<Memory>,
    given_back: Arc<AtomicBool>,
}

#[cfg(feature = "virtio-drivers")]
#[allow(unsafe_code, reason = "the trait is unsafe")]
// SAFETY: nothing follows the address, since no map succeeds.
unsafe impl PageSource for Once {
    fn allocate(&self, bytes: u64) -> Result<DmaPages, ioas::Cause> {
        assert_eq!(bytes, self.whole.len());
        Ok(DmaPages {
            memory: self.whole.clone(),
            part: Span::new(0, bytes),
            address: NonNull::dangling(),
        })
    }

    fn free(&self, _: DmaPages) {
        self.given_back.store(true, Ordering::Relaxed);
    }
}

#[cfg(feature = "virtio-drivers")]
#[test]
fn a_drivers_pages_that_cannot_be_mapped_are_given_back_unless_a_unit_may_have_them() {
    for (format, levels) in FORMATS {
        // In the first batch nothing was in the tables yet.
        for (batch, deaf, given_back) in [
            (0, true, true),
            (3, true, false),
            (9, true, false),
            (3, false, true),
        ] {
            let bench = Bench::new(format, levels);
            let before = bench.state();
            bench.memory.reads.set([batch]);
            bench.unit.invalidates.set(0..if deaf { 3 } else { 0 });
            let source = Once {
                whole: bench.whole.clone(),
                given_back: Arc::default(),
            };
            let free = source.given_back.clone();
            let space = Arc::new(bench.space);
            let window = bench.whole.len() as usize;
            let made = DriverMemory::new(space.clone(), source, window);
            assert!(matches!(
                made,
                Err(DriverMemoryError::Map(MapError::Runs(_)))
            ));
            assert_eq!(free.load(Ordering::Relaxed), given_back, "{batch} {deaf}");
            assert_eq!(space.retired() == 0, given_back);
            bench.unit.invalidates.set([]);
            space.flush().unwrap();
            let bench = Bench {
                space: Arc::into_inner(space).unwrap(),
                ..bench
            };
            assert_eq!(bench.state(), before);
            bench.end();
        }
    }
}

#[test]
fn an_unmap_under_a_deaf_unit_retires_the_memory_and_a_map_brings_the_flush_with_it() {
    for (format, levels) in FORMATS {
        let mut bench = Bench::new(format, levels);
        // A second unit that hears: the flush is complete only when both have.
        let other = Arc::new(FrailUnit::new(crate::common::unit(&bench.tables)));
        bench
            .space
            .attach((other.clone(), DeviceId::pci(0, 6, 0)))
            .unwrap();
        let before = bench.state();
        let bytes = bench.whole.len();
        bench.map(&mut Watch::default()).unwrap();
        let mapped = bench.state();
        for deaf in [bench.unit.clone(), other] {
            deaf.invalidates.set([0]);
            let mut watch = Watch::default();
            let failed = bench.space.observed(&mut watch).unmap(Span::new(AT, bytes));
            assert!(matches!(failed, Err(UnmapError::Flush(_))));
            assert_eq!(watch.steps, [(Step::EmptyTables, bytes), (Step::Flush, 0)]);
            let after = bench.state();
            assert_eq!(after.areas, before.areas);
            assert_eq!(after.leaves, before.leaves);
            assert_eq!(after.retired, 1);
            assert_eq!((after.pinned, after.in_use), (mapped.pinned, mapped.in_use));
            assert_eq!(after.tables, mapped.tables, "tables that a walk may be in");
            // The next map has both units forget before it begins.
            bench.map(&mut Watch::default()).unwrap();
            assert_eq!(bench.state(), mapped);
        }
        // A device that stays deaf is detached, and then no device is left to wait for.
        bench.unit.invalidates.set(0..1000);
        assert!(bench.space.unmap(Span::new(AT, bytes)).is_err());
        assert!(bench.space.flush().is_err());
        bench.space.detach(DEVICE).unwrap();
        assert_eq!(bench.space.flush().unwrap(), bytes);
        let devices = vec![DeviceId::pci(0, 6, 0).into()];
        assert_eq!(bench.state(), State { devices, ..before });
        bench.end();
    }
}

#[test]
fn a_unit_that_caches_holes_is_flushed_after_a_map_or_the_map_is_undone() {
    for (format, levels) in FORMATS {
        let caching = |unit: &mut FrailUnit| unit.caches_not_present = true;
        let mut bench = Bench::with(format, levels, |_| (), caching);
        let before = bench.state();
        bench.unit.invalidates.set([0]);
        assert!(matches!(
            bench.map(&mut Watch::default()),
            Err(MapError::Flush(_))
        ));
        assert_eq!(bench.unit.invalidates.calls(), 2, "told, and told again");
        assert_eq!(bench.state(), before);

        bench.unit.invalidates.set([0, 1]);
        assert!(bench.map(&mut Watch::default()).is_err());
        assert_eq!(bench.state().retired, 1);
        assert_eq!(bench.space.flush().unwrap(), bench.whole.len());
        assert_eq!(bench.state(), before);

        bench.unit.invalidates.set([]);
        bench.map(&mut Watch::default()).unwrap();
        assert_eq!(bench.unit.invalidates.calls(), 1);
        let last = bench.unit.invalidated.lock().unwrap().take();
        let area = Span::new(AT, bench.whole.len());
        assert_eq!(last, Some(Invalidation::mapped(area)), "nothing else");
        bench.end();
    }
}

#[test]
fn memory_that_cannot_be_unpinned_stays_charged_and_all_other_is_released() {
    let mut bench = Bench::new(FormatId::AmdV1, 4);
    let bytes = bench.whole.len();
    bench.map(&mut Watch::default()).unwrap();
    bench.memory.unpins.set([0]);
    let mut watch = Watch::default();
    let failed = bench.space.observed(&mut watch).unmap_all().unwrap_err();
    assert!(matches!(failed, UnmapError::Unpin(_)), "{failed}");
    assert_eq!(watch.steps.last(), Some(&(Step::Unpin, 32 * PAGE)));
    let after = bench.state();
    assert_eq!(
        (after.retired, after.areas.len(), after.leaves.len()),
        (0, 0, 0)
    );
    assert_eq!(bench.neighbours.pinned(), 0);
    assert_eq!(bench.memory.memory.pinned(), bytes);
    assert_eq!(after.in_use, 12345 + bytes, "what is pinned is charged");
    bench.space.close().unwrap();
}

#[test]
fn a_panic_of_the_observer_never_leaves_an_entry_to_memory_that_is_not_pinned() {
    for (format, levels) in FORMATS {
        let mut n = 0;
        loop {
            let mut bench = Bench::new(format, levels);
            let before = bench.state();
            let mut watch = Watch::panicking(n);
            let result = catch_unwind(AssertUnwindSafe(|| bench.map(&mut watch)));
            let state = bench.state();
            let mapped: u64 = state.leaves.iter().map(|leaf| leaf.run.len).sum();
            assert!(
                mapped <= state.pinned,
                "{mapped} mapped, {} pinned",
                state.pinned
            );
            assert_eq!(state.in_use - before.in_use, state.pinned - before.pinned);
            let range = Span::new(AT, bench.whole.len());
            let unmapped = bench.space.unmap(range);
            if result.is_ok() {
                unmapped.unwrap();
                assert_eq!(bench.state(), before);
                bench.works_still();
                bench.end();
                break;
            }
            // The range stays taken, and is named. Its neighbours are as before.
            let named =
                matches!(unmapped, Err(UnmapError::Panicked { range: taken }) if taken == range);
            assert!(named, "{unmapped:?}");
            let again = bench.map(&mut Watch::default());
            assert!(matches!(again, Err(MapError::Panicked { .. })), "{again:?}");
            for beside in [
                Span::new(AT - 16 * PAGE, 16 * PAGE),
                Span::new(range.last() + 1, 16 * PAGE),
            ] {
                assert_eq!(bench.space.unmap(beside).unwrap().areas, 1);
            }
            bench.end();
            n += 1;
        }
        assert!(n > 30, "only {n} places to panic at");
    }
}
