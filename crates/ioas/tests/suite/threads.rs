//! Operations of many threads: on disjoint ranges they run at once, on overlapping ones they come one after the
//! other, and whatever fails or panics in one is not seen by the others.

mod own;
mod tables;

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::*;
use ioas::{
    Flushing, Ioas, Ledger, MapError, Memory, MemoryObject, Observer, PinFailed, Pinned,
    ReleaseError, Step, Synthetic, Tracking, UnmapError, WhenUnmapped,
};
use iommu::SoftwareUnit;
use iopt::{FormatId, HeapTables, Interruption, Pending, Prot};
use runs::{Iova, Offset, Span};

const AT: u64 = 8 * GIB;
const FRAME: u64 = 0x1_0000_0000;

/// Memory whose pins call something first.
struct Hooked {
    memory: Synthetic,
    at_pin: Box<dyn Fn(Span<Offset>) + Send + Sync>,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.memory.fmt(f)
    }
}

impl MemoryObject for Hooked {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        self.memory.charge(part)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        (self.at_pin)(part);
        self.memory.pin(part, progress)
    }
}

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    software: SoftwareUnit<Arc<HeapTables>, Arc<Pages>>,
    unit: Arc<FrailUnit>,
    object: Arc<Tracked>,
    memory: Arc<Memory>,
    space: Space,
}

impl Bench {
    /// 32 MiB of memory in one run.
    fn new(format: (FormatId, u8), tables: u64) -> Self {
        let tables = Arc::new(HeapTables::with_tables(tables).unwrap());
        let ledger = Ledger::new("a counter", Some(GIB), 0);
        let object = Arc::new(Tracked::new(&[Span::new(FRAME, 32 * MIB)]));
        let software = SoftwareUnit::new(tables.clone(), object.pages.clone());
        let space = space(format.0, format.1, &tables);
        let unit = Arc::new(FrailUnit::new(Arc::new(software.clone())));
        space.attach((unit.clone(), DEVICE)).unwrap();
        Self {
            memory: Memory::new(object.clone(), &ledger),
            tables,
            ledger,
            software,
            unit,
            object,
            space,
        }
    }

    fn map(&self, iova: u64, start: u64, len: u64) -> Result<(), MapError> {
        let part = Span::new(start, len);
        self.space.map(iova, &self.memory, part, Prot::RW)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), UnmapError> {
        self.space.unmap(Span::new(iova, len)).map(drop)
    }

    fn hooked(&self, at_pin: impl Fn(Span<Offset>) + Send + Sync + 'static) -> Arc<Memory> {
        let hooked = Hooked {
            memory: Synthetic::new([Span::new(FRAME, 32 * MIB)]),
            at_pin: Box::new(at_pin),
        };
        Memory::new(Arc::new(hooked), &self.ledger)
    }

    /// Nothing is left: no area, no table but the root, no pin, no charge.
    fn is_empty(&self) {
        // Tables may wait for more of them.
        self.space.flush().unwrap();
        assert_eq!(self.space.areas().len(), 0);
        let left = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!((self.tables.in_use(), left), (1, (0, 0)));
    }

    fn end(self) {
        self.space.close().unwrap();
        let left = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!((self.tables.in_use(), left), (0, (0, 0)));
    }
}

/// Addresses of two operations that share a table, of which one is under way.
const NEIGHBOURS: [u64; 2] = [AT + 64 * PAGE, AT + 128 * PAGE];

/// The page of the object that a device finds there.
fn read(bench: &Bench, iova: u64) -> Option<u64> {
    let mut word = [0];
    let read = bench.software.port(DEVICE).read(iova, &mut word);
    read.ok().map(|()| (word[0] - FRAME) / PAGE)
}

/// Waits at the barrier, but not for ever: a thread that is kept from it makes the test fail.
fn meet(met: &(Barrier, AtomicBool)) {
    let (barrier, alone) = met;
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            let _ = sender.send(());
        });
        if receiver.recv_timeout(Duration::from_secs(20)).is_err() {
            alone.store(true, Ordering::SeqCst);
            // Lets the thread that waits go.
            barrier.wait();
        }
    });
}

fn meeting() -> Arc<(Barrier, AtomicBool)> {
    Arc::new((Barrier::new(2), AtomicBool::new(false)))
}

#[test]
fn two_maps_of_one_memory_are_pinned_at_the_same_time() {
    for format in FORMATS {
        let bench = Bench::new(format, 64);
        let met = meeting();
        let memory = bench.hooked({
            let met = met.clone();
            move |_| meet(&met)
        });
        thread::scope(|scope| {
            for n in 0..2 {
                let (bench, memory) = (&bench, &memory);
                scope.spawn(move || {
                    let part = Span::new(n * MIB, MIB);
                    let map = bench.space.map(AT + n * MIB, memory, part, Prot::RW);
                    map.unwrap();
                });
            }
        });
        assert!(!met.1.load(Ordering::SeqCst), "one waits for the other");
        assert_eq!(memory.held(), 2 * MIB);
        assert_eq!(
            bench.space.translate(AT + 2 * MIB - 1),
            Some(FRAME + 2 * MIB - 1)
        );
        bench.space.unmap_all().unwrap();
        assert_eq!(memory.held(), 0);
        bench.is_empty();
        bench.end();
    }
}

#[test]
fn a_map_and_an_unmap_run_at_once() {
    for format in FORMATS {
        let bench = Bench::new(format, 64);
        bench.map(AT, 0, MIB).unwrap();
        // Another area, so that the upper tables translate more than the unmapped range.
        bench.map(AT + 4 * MIB, 4 * MIB, MIB).unwrap();
        let met = meeting();
        let memory = bench.hooked({
            let met = met.clone();
            move |_| meet(&met)
        });
        // The unmap has come to its flush when the map has come to its pin.
        *bench.unit.at_invalidate.lock().unwrap() = Some(Arc::new({
            let met = met.clone();
            move || meet(&met)
        }));
        thread::scope(|scope| {
            scope.spawn(|| bench.unmap(AT, MIB).unwrap());
            scope.spawn(|| {
                let part = Span::new(0, MIB);
                let map = bench.space.map(AT + GIB, &memory, part, Prot::RW);
                map.unwrap();
            });
        });
        *bench.unit.at_invalidate.lock().unwrap() = None;
        assert!(!met.1.load(Ordering::SeqCst), "one waits for the other");
        assert_eq!(bench.space.areas().len(), 2);
        bench.space.unmap_all().unwrap();
        bench.is_empty();
        bench.end();
    }
}

#[test]
fn a_release_and_a_harvest_run_at_once() {
    let bench = Bench::new(FORMATS[2], 256);
    for (at, start) in [(0, 0), (MIB, MIB), (GIB, 8 * MIB)] {
        bench.map(AT + at, start, MIB).unwrap();
    }
    bench.space.track_dirty(Tracking::default()).unwrap();
    let met = meeting();
    *bench.unit.at_invalidate.lock().unwrap() = Some(Arc::new({
        let met = met.clone();
        let first = AtomicBool::new(true);
        move || {
            if first.swap(false, Ordering::SeqCst) {
                meet(&met);
            }
        }
    }));
    thread::scope(|scope| {
        scope.spawn(|| {
            let range = Span::new(AT + MIB, MIB);
            let refused = Interruption::Refused;
            let mut kept = |range, cause: ReleaseError| panic!("{range}: {cause}");
            let released = bench.space.release(&[range], refused, &mut kept);
            assert_eq!(released, MIB);
        });
        let span = Span::new(AT + GIB, MIB);
        let mut pending = Pending::new([0u64; 4], span, PAGE).unwrap();
        bench.space.harvest(&mut pending).unwrap();
        // The release is in its flush.
        meet(&met);
    });
    *bench.unit.at_invalidate.lock().unwrap() = None;
    assert!(!met.1.load(Ordering::SeqCst), "one waits for the other");
    bench.space.untrack_dirty();
    bench.space.unmap_all().unwrap();
    bench.is_empty();
    bench.end();
}

#[test]
fn a_second_operation_on_the_same_range_waits_and_finds_what_the_first_has_left() {
    let bench = Bench::new(FORMATS[0], 64);
    let (pinning, pinned) = mpsc::channel();
    let (go, gone) = mpsc::channel();
    let channels = Mutex::new((pinning, gone));
    let done = Arc::new(AtomicU64::new(0));
    let pins = done.clone();
    let memory = bench.hooked(move |_| {
        let channels = channels.lock().unwrap();
        channels.0.send(()).unwrap();
        channels.1.recv().unwrap();
        pins.fetch_add(1, Ordering::SeqCst);
    });
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            let part = Span::new(0, MIB);
            bench.space.map(AT, &memory, part, Prot::RW)
        });
        pinned.recv().unwrap();
        // It is under way: others wait, and see what was there before.
        let overlapping = scope.spawn(|| {
            let map = bench.map(AT + MIB - PAGE, 0, MIB);
            (done.load(Ordering::SeqCst), map)
        });
        let unmap = scope.spawn(|| {
            let unmap = bench.unmap(AT, PAGE);
            (done.load(Ordering::SeqCst), unmap)
        });
        let pin = scope.spawn(|| {
            let range = Span::new(AT, PAGE);
            let pin = bench.space.pin(range, Prot::READ, WhenUnmapped::Drops);
            (done.load(Ordering::SeqCst), pin)
        });
        assert!(bench.space.area_at(AT).is_none());
        // Operations elsewhere do not wait.
        bench.map(AT + MIB, 0, MIB).unwrap();
        bench.unmap(AT + MIB, MIB).unwrap();
        go.send(()).unwrap();
        first.join().unwrap().unwrap();
        let area = Span::new(AT, MIB);
        let (before, map) = overlapping.join().unwrap();
        assert!(
            matches!(map, Err(MapError::Overlap { area: found, .. }) if found == area),
            "{map:?}"
        );
        assert_eq!(before, 1);
        let (before, unmap) = unmap.join().unwrap();
        assert!(
            matches!(unmap, Err(UnmapError::CutsArea { area: found, .. }) if found == area),
            "{unmap:?}"
        );
        assert_eq!(before, 1);
        let (before, pin) = pin.join().unwrap();
        assert_eq!((before, pin.unwrap().holds().len()), (1, 1));
    });
    bench.unmap(AT, MIB).unwrap();
    bench.is_empty();
    bench.end();
}

#[test]
fn what_is_unmapped_during_a_flush_waits_for_the_next() {
    for format in FORMATS {
        let bench = Bench::new(format, 64);
        bench.space.set_flushing(Flushing::Lazy {
            holds: 8,
            age: Duration::MAX,
            now: || Duration::ZERO,
        });
        for n in 0..3 {
            bench.map(AT + n * PAGE, n * PAGE, PAGE).unwrap();
            assert_eq!(read(&bench, AT + n * PAGE), Some(n));
        }
        bench.unmap(AT, PAGE).unwrap();
        let (pass, stopped) = stop();
        *bench.unit.at_invalidate.lock().unwrap() = Some(Arc::new(move || {
            pass();
        }));
        thread::scope(|scope| {
            let flush = scope.spawn(|| bench.space.flush().unwrap());
            stopped.wait();
            bench.unmap(AT + PAGE, PAGE).unwrap();
            stopped.go();
            assert_eq!(flush.join().unwrap(), PAGE);
        });
        // The unit still has the second page, which is pinned.
        let seen = [0, 1, 2].map(|n| read(&bench, AT + n * PAGE));
        assert_eq!(seen, [None, Some(1), Some(2)]);
        let pinned = bench.object.memory.pinned();
        assert_eq!((bench.space.retired(), pinned), (1, 2 * PAGE));
        bench.space.unmap_all().unwrap();
        bench.is_empty();
        bench.end();
    }
}

/// Panics at its first step, quietly.
struct Panics;

impl Observer for Panics {
    fn begin(&mut self, _: Step) {
        std::panic::resume_unwind(Box::new("the observer gives up"));
    }
}

#[test]
fn the_range_of_an_operation_that_panics_stays_taken_and_is_named() {
    for format in FORMATS {
        let bench = Bench::new(format, 64);
        let memory = bench.hooked(|_| std::panic::resume_unwind(Box::new("no pin")));
        bench.map(AT, 0, 2 * MIB).unwrap();
        bench.map(AT + 4 * MIB, 4 * MIB, 2 * MIB).unwrap();
        let taken = Span::new(AT + 2 * MIB, 2 * MIB);
        let map = || {
            let part = Span::new(0, taken.len);
            let space = &bench.space;
            space.map(taken.start, &memory, part, Prot::RW)
        };
        assert!(catch_unwind(AssertUnwindSafe(map)).is_err());
        assert_eq!((memory.held(), bench.ledger.in_use()), (0, 4 * MIB));
        let unmap = || {
            let range = Span::new(AT, 2 * MIB);
            bench.space.observed(&mut Panics).unmap(range).map(drop)
        };
        assert!(catch_unwind(AssertUnwindSafe(unmap)).is_err());

        let (first, second) = (Span::new(AT, 2 * MIB), taken);
        for range in [first, second] {
            let named = |found: Span<Iova>| found == range;
            let map = bench.map(range.start, 0, PAGE);
            assert!(
                matches!(map, Err(MapError::Panicked { range }) if named(range)),
                "{map:?}"
            );
            let unmap = bench.unmap(range.start, PAGE);
            assert!(matches!(unmap, Err(UnmapError::Panicked { range }) if named(range)));
            let pin = bench.space.pin(range, Prot::READ, WhenUnmapped::Keeps);
            assert!(matches!(pin, Err(ioas::ExternalPinError::Panicked { range }) if named(range)));
            let mut pending = Pending::new([0u64; 8], range, PAGE).unwrap();
            let harvest = bench.space.harvest(&mut pending);
            assert!(matches!(harvest, Err(ioas::HarvestError::Panicked { range }) if named(range)));
        }
        // The other ranges of several are released, and come back.
        let third = Span::new(AT + 5 * MIB, MIB);
        let (mut kept, mut failed) = (Vec::new(), Vec::new());
        let refused = Interruption::Refused;
        let mut keep = |range, cause| kept.push((range, cause));
        let released = bench.space.release(&[first, third], refused, &mut keep);
        assert_eq!(released, MIB);
        let panicked = |cause: &ReleaseError| {
            matches!(cause, ReleaseError::Unmap(UnmapError::Panicked { .. }))
        };
        assert!(matches!(&*kept, [(range, cause)] if *range == first && panicked(cause)));
        let mut fail = |range, cause| failed.push((range, cause));
        bench.space.restore(&[first, third], refused, &mut fail);
        assert!(matches!(&*failed, [(range, MapError::Panicked { .. })] if *range == first));

        // Elsewhere everything works, also with a device that comes and one that goes.
        let space = &bench.space;
        space.detach(DEVICE).unwrap();
        space.attach((bench.unit.clone(), DEVICE)).unwrap();
        let chosen = space.map_anywhere(&bench.memory, Span::new(0, MIB), Prot::RW);
        bench.unmap(chosen.unwrap(), MIB).unwrap();
        bench.unmap(AT + 4 * MIB, 2 * MIB).unwrap();
        assert!(space.unmap_all().is_err());
        bench.end();
    }
}

#[test]
fn a_flush_that_fails_for_one_thread_loses_nothing_of_another() {
    for format in FORMATS {
        let bench = Bench::new(format, 64);
        for n in 0..8 {
            bench.map(AT + n * GIB, n * MIB, MIB).unwrap();
        }
        // Any of the first six of eight flushes at once fail.
        bench.unit.invalidates.set([0, 2, 3, 5]);
        let failed = AtomicU64::new(0);
        thread::scope(|scope| {
            for n in 0..8 {
                let (bench, failed) = (&bench, &failed);
                scope.spawn(move || match bench.unmap(AT + n * GIB, MIB) {
                    Ok(()) => assert_eq!(bench.space.translate(AT + n * GIB), None),
                    Err(UnmapError::Flush(_)) => drop(failed.fetch_add(1, Ordering::SeqCst)),
                    Err(cause) => panic!("{cause}"),
                });
            }
        });
        assert_eq!(bench.space.areas().len(), 0);
        assert!(failed.load(Ordering::SeqCst) > 0);
        // All retired memory is pinned and charged, and nothing else is.
        let pinned = bench.object.memory.pinned();
        assert_eq!(pinned, bench.space.retired() as u64 * MIB);
        assert_eq!(bench.ledger.in_use(), pinned);
        bench.unit.invalidates.set([]);
        bench.space.flush().unwrap();
        assert_eq!(bench.space.retired(), 0);
        bench.is_empty();
        bench.end();
    }
}

#[test]
fn devices_come_and_go_while_others_map() {
    let bench = Bench::new(FORMATS[0], 256);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|n| {
                let bench = &bench;
                scope.spawn(move || {
                    for _ in 0..200 {
                        bench.map(AT + n * MIB, n * MIB, MIB).unwrap();
                        bench.unmap(AT + n * MIB, MIB).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                bench.space.detach(DEVICE).unwrap();
                bench.space.attach((bench.unit.clone(), DEVICE)).unwrap();
                thread::yield_now();
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        stop.store(true, Ordering::SeqCst);
    });
    bench.is_empty();
    bench.end();
}

#[test]
fn chosen_addresses_are_apart() {
    let bench = Bench::new(FORMATS[0], 256);
    bench.space.allow(&[Span::new(AT, 16 * MIB)]).unwrap();
    let all = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..8 {
            let (bench, all) = (&bench, &all);
            scope.spawn(move || {
                for k in 0..2 {
                    let part = Span::new((2 * n + k) * MIB, MIB);
                    let space: &Ioas = &bench.space;
                    let at = space.map_anywhere(&bench.memory, part, Prot::RW);
                    all.lock().unwrap().push(at.unwrap());
                }
            });
        }
    });
    let mut all = all.into_inner().unwrap();
    all.sort_unstable();
    let expected: Vec<u64> = (0..16).map(|n| AT + n * MIB).collect();
    assert_eq!(all, expected);
    let part = Span::new(0, MIB);
    let more = bench.space.map_anywhere(&bench.memory, part, Prot::RW);
    assert!(matches!(more, Err(MapError::NoRoom { .. })));
    bench.space.unmap_all().unwrap();
    bench.is_empty();
    bench.end();
}
