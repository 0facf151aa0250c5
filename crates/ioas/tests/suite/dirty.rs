//! Writes of devices: merged over domains, at any granularity, over failures, by units that can tell and units that
//! cannot. A device's write is DMA through the software unit, which marks the leaf.

mod left;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::common::*;
use ioas::{
    DomainIds, Ioas, Ledger, Memory, Synthetic, TableBuilder, Tracking, TrackingError, UnmapError,
    WhenUnmapped,
};
use iommu::{
    DeviceId, DomainId, Fault, FlushError, NodeId, SoftwareConfig, SoftwareUnit, Unit,
    UnitAttachError, UnitCapabilities,
};
use iopt::{FormatId, HeapTables, Interruption, Invalidation, Pending, Prot, ResizeError, Root};
use runs::{Iova, Offset, Span};

const AT: u64 = 0x4000_0000;

type Software = SoftwareUnit<Arc<HeapTables>, Echo>;

/// A unit that keeps dirty bits, or does not; that snoops, or does not; that is deaf at times.
struct Tracker {
    inner: Software,
    deaf: AtomicBool,
    invalidated: AtomicU64,
}

impl Tracker {
    fn new(tables: &Arc<HeapTables>, tells: bool, snoops: bool) -> Arc<Self> {
        let mut config = SoftwareConfig::default();
        config.capabilities.dirty_tracking = tells;
        config.capabilities.snoop_control = snoops;
        Arc::new(Self {
            inner: SoftwareUnit::with_config(tables.clone(), Echo, config),
            deaf: AtomicBool::new(false),
            invalidated: AtomicU64::new(0),
        })
    }
}

impl Unit for Tracker {
    fn capabilities(&self) -> UnitCapabilities {
        self.inner.capabilities()
    }

    fn node(&self) -> Option<NodeId> {
        None
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.inner.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.inner.detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if self.deaf.load(Ordering::SeqCst) {
            let waited = std::time::Duration::from_millis(1);
            return Err(FlushError::TimedOut {
                domain,
                device: DEVICE,
                busy: 1,
                waited,
            });
        }
        self.invalidated.fetch_add(1, Ordering::SeqCst);
        self.inner.invalidate(domain, what)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.inner.invalidate_domain(domain)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.inner.drain_faults(sink)
    }
}

/// The device of the n-th unit.
fn device(n: usize) -> DeviceId {
    DeviceId::pci(0, n as u8, 0)
}

struct Bench {
    tables: Arc<HeapTables>,
    space: Ioas,
    memory: Arc<Memory>,
    units: Vec<Arc<Tracker>>,
}

/// 8 MiB at [`AT`] in leaves of 2 MiB, for these devices, of which each has a unit of its own.
fn bench(units: &[(bool, bool)]) -> Bench {
    bench_of(FormatId::VtdSs, units)
}

fn bench_of(format: FormatId, units: &[(bool, bool)]) -> Bench {
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    let builder = TableBuilder::new(tables.clone(), DomainIds::new(8), [format]);
    let space = Ioas::over_tables(builder);
    let runs = [Span::new(0x10_0000_0000, 16 * MIB)];
    let memory = Memory::new(Arc::new(Synthetic::new(runs)), &Ledger::unlimited());
    let part = Span::new(0, 8 * MIB);
    space.map(AT, &memory, part, Prot::RW).unwrap();
    let mut trackers = Vec::new();
    for (n, (tells, snoops)) in units.iter().enumerate() {
        let unit = Tracker::new(&tables, *tells, *snoops);
        space.attach((unit.clone(), device(n))).unwrap();
        trackers.push(unit);
    }
    Bench {
        tables,
        space,
        memory,
        units: trackers,
    }
}

impl Bench {
    /// The device of the n-th unit writes at `iova`.
    fn write(&self, n: usize, iova: u64) {
        let mut port = self.units[n].inner.port(device(n));
        port.write(iova, &[0]).unwrap();
    }

    /// All that was written to since the last time, in pages of `page` bytes; and whether all units
    /// can tell.
    fn harvest(&mut self, page: u64) -> (Vec<Span<Iova>>, bool) {
        self.harvest_in(Span::new(AT, 16 * MIB), page)
    }

    /// The same in a part of the addresses.
    fn harvest_in(&mut self, span: Span<Iova>, page: u64) -> (Vec<Span<Iova>>, bool) {
        let mut pending = Pending::new(vec![0u64; 64], span, page).unwrap();
        let found = self.space.harvest(&mut pending).unwrap();
        let shown = self.space.show(&mut pending).unwrap();
        let runs = shown.runs().collect();
        shown.acknowledge();
        (runs, found.blind)
    }

    fn leaf(&self) -> u64 {
        self.space.leaf_at(AT).unwrap().run.len
    }
}

fn page(n: u64, count: u64) -> Span<Iova> {
    Span::new(AT + n * PAGE, count * PAGE)
}

const SMALL: Tracking = Tracking {
    leaf: Some(PAGE),
    interruption: Interruption::Refused,
};

#[test]
fn what_devices_of_two_domains_write_is_merged() {
    let mut bench = bench(&[(true, false), (true, true)]);
    assert_eq!(bench.space.places().len(), 2);
    // Earlier writes are forgotten.
    bench.write(0, AT);
    bench.space.track_dirty(SMALL).unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![], false));
    assert_eq!(bench.leaf(), PAGE);

    bench.write(0, AT + 3 * PAGE);
    bench.write(1, AT + 4 * PAGE + 72);
    bench.write(0, AT + 600 * PAGE);
    bench.write(1, AT + 600 * PAGE);
    let before = bench.units[1].invalidated.load(Ordering::SeqCst);
    assert_eq!(bench.harvest(PAGE), (vec![page(3, 2), page(600, 1)], false));
    assert!(bench.units[1].invalidated.load(Ordering::SeqCst) > before);
    assert_eq!(bench.harvest(PAGE), (vec![], false));

    // In pages of any size.
    bench.write(1, AT + 5 * PAGE);
    assert_eq!(bench.harvest(64 << 10), (vec![page(0, 16)], false));

    // Leaves are merged again.
    bench.space.untrack_dirty();
    assert_eq!(bench.leaf(), 2 * MIB);
    bench.space.unmap_all().unwrap();
    bench.space.close().unwrap();
    assert_eq!(bench.tables.in_use(), 0);
}

#[test]
fn every_format_that_keeps_it_reports_what_a_device_writes() {
    for (format, _) in FORMATS {
        let mut bench = bench_of(format, &[(true, false)]);
        bench.space.track_dirty(SMALL).unwrap();
        for round in 0..3 {
            let written = [5 + round, 700, 1 + 512 * round];
            let mut port = bench.units[0].inner.port(device(0));
            for n in written {
                // A page that was read first is cached as clean.
                port.read(AT + n * PAGE, &mut [0; 2048]).unwrap();
                port.write(AT + n * PAGE + 16, &[7; 8]).unwrap();
                port.write(AT + n * PAGE + 512, &[7; 8]).unwrap();
            }
            let mut expected = written.map(|n| page(n, 1)).to_vec();
            expected.sort_unstable();
            assert_eq!(bench.harvest(PAGE), (expected, false), "{format}");
        }
        assert_eq!(bench.harvest(PAGE), (vec![], false), "{format}");
        bench.space.close().unwrap();
    }
}

#[test]
fn nothing_that_a_device_writes_is_lost_between_harvests() {
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    // The device counts in the first word of every page, and says up to which count it has come.
    let (stop, passes) = (AtomicBool::new(false), AtomicU64::new(0));
    let unit = bench.units[0].clone();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut port = unit.inner.port(device(0));
            while !stop.load(Ordering::Relaxed) {
                for n in 0..64 {
                    port.write(AT + n * PAGE, &[n]).unwrap();
                }
                passes.fetch_add(1, Ordering::Release);
            }
        });
        for _ in 0..200 {
            // A whole pass lies between the end of one harvest and the next: all of it is dirty.
            let until = passes.load(Ordering::Acquire) + 2;
            while passes.load(Ordering::Acquire) < until && !writer.is_finished() {
                thread::yield_now();
            }
            assert_eq!(bench.harvest(PAGE), (vec![page(0, 64)], false));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_large_leaf_is_dirty_as_a_whole_unless_it_is_split() {
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(Tracking::default()).unwrap();
    bench.write(0, AT + 5 * PAGE);
    assert_eq!(bench.harvest(PAGE), (vec![page(0, 512)], false));
    bench.space.untrack_dirty();
    bench.space.track_dirty(SMALL).unwrap();
    bench.write(0, AT + 5 * PAGE);
    assert_eq!(bench.harvest(PAGE), (vec![page(5, 1)], false));
    // A range mapped meanwhile has small leaves from the start.
    let (memory, part) = (bench.memory.clone(), Span::new(8 * MIB, 2 * MIB));
    let behind = AT + 8 * MIB;
    bench.space.map(behind, &memory, part, Prot::RW).unwrap();
    assert_eq!(bench.space.leaf_at(behind).unwrap().run.len, PAGE);
    bench.write(0, behind + 7 * PAGE);
    assert_eq!(bench.harvest(PAGE), (vec![page(2055, 1)], false));
    bench.space.untrack_dirty();
    assert_eq!(bench.space.leaf_at(behind).unwrap().run.len, 2 * MIB);
}

#[test]
fn nothing_is_lost_when_a_unit_is_deaf() {
    let bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    bench.write(0, AT + 9 * PAGE);
    let span = Span::new(AT, 8 * MIB);
    let mut pending = Pending::new(vec![0u64; 32], span, PAGE).unwrap();
    bench.space.harvest(&mut pending).unwrap();
    bench.units[0].deaf.store(true, Ordering::SeqCst);
    assert!(bench.space.show(&mut pending).is_err());
    bench.units[0].deaf.store(false, Ordering::SeqCst);
    bench.write(0, AT + 11 * PAGE);
    bench.space.harvest(&mut pending).unwrap();
    let shown = bench.space.show(&mut pending).unwrap();
    assert_eq!(shown.runs().collect::<Vec<_>>(), [page(9, 1), page(11, 1)]);
    shown.put_back();
    let shown = bench.space.show(&mut pending).unwrap();
    assert_eq!(shown.runs().count(), 2);
    shown.acknowledge();
}

#[test]
fn tracking_that_did_not_begin_leaves_nothing_that_a_unit_holds_as_dirty() {
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(Tracking::default()).unwrap();
    bench.write(0, AT + 9 * PAGE);
    // Dirty in the table and in the unit; then in the unit alone.
    bench.units[0].deaf.store(true, Ordering::SeqCst);
    let refused = bench.space.track_dirty(Tracking::default());
    assert!(
        matches!(refused, Err(TrackingError::Flush(_))),
        "{refused:?}"
    );
    bench.units[0].deaf.store(false, Ordering::SeqCst);
    bench.space.track_dirty(Tracking::default()).unwrap();
    bench.write(0, AT + 9 * PAGE);
    assert_eq!(bench.harvest(PAGE), (vec![page(0, 512)], false));
}

#[test]
fn leaves_whose_new_size_a_unit_has_not_noticed_are_not_changed_again() {
    let bench = bench(&[(true, false)]);
    bench.space.track_dirty(Tracking::default()).unwrap();
    let never = Interruption::Refused;
    bench.space.take_out(page(3, 1), never).unwrap();
    bench.units[0].deaf.store(true, Ordering::SeqCst);
    // It is back, and the merge around it waits for its flush: what the unit still writes through the
    // old leaves would be lost with them.
    bench.space.put_back(page(3, 1), never).unwrap();
    for _ in 0..2 {
        let refused = bench.space.unmap_all().unwrap_err();
        let waits = matches!(refused, UnmapError::Cut(ResizeError::Flush(_)));
        assert!(waits, "{refused:?}");
        let refused = bench.space.take_out(page(900, 1), never);
        assert!(matches!(
            refused,
            Err(UnmapError::Cut(ResizeError::Flush(_)))
        ));
    }
    assert_eq!((bench.space.len(), bench.space.retired()), (1, 0));
    assert_eq!(bench.memory.held(), 8 * MIB);
    bench.units[0].deaf.store(false, Ordering::SeqCst);
    assert_eq!(bench.space.unmap_all().unwrap().bytes, 8 * MIB);
    bench.space.close().unwrap();
    assert_eq!(bench.tables.in_use(), 0);
}

#[test]
fn who_cannot_tell_counts_as_having_written_everywhere() {
    // The second device's unit has no dirty bits, so that it gets a domain of its own.
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    let (memory, part) = (bench.memory.clone(), Span::new(8 * MIB, PAGE));
    let read_only = AT + 12 * MIB;
    bench
        .space
        .map(read_only, &memory, part, Prot::READ)
        .unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![], false));
    let silent = Tracker::new(&bench.tables, false, false);
    let device = DeviceId::pci(0, 9, 0);
    bench.space.attach((silent, device)).unwrap();
    assert_eq!(bench.space.places().len(), 2);
    let all = vec![Span::new(AT, 8 * MIB)];
    assert_eq!(bench.harvest(PAGE), (all.clone(), true));
    assert_eq!(bench.harvest(PAGE), (all.clone(), true), "again and again");
    bench.space.detach(device).unwrap();
    assert_eq!(bench.harvest(PAGE), (all, true), "and until it had left");
    bench.write(0, AT);
    assert_eq!(bench.harvest(PAGE), (vec![page(0, 1)], false));
}

#[test]
fn users_in_this_process_count_as_writing_what_they_hold_to_write() {
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    let keeps = WhenUnmapped::Keeps;
    let reads = bench.space.pin(page(1, 2), Prot::READ, keeps).unwrap();
    let writes = bench.space.pin(page(20, 3), Prot::RW, keeps).unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![page(20, 3)], false));
    drop(reads);
    assert_eq!(bench.harvest(PAGE), (vec![page(20, 3)], false));
    drop(writes);
    assert_eq!(bench.harvest(PAGE), (vec![page(20, 3)], false));
    assert_eq!(bench.harvest(PAGE), (vec![], false));
}

#[test]
fn an_unmap_can_take_along_what_was_written() {
    let bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    bench.write(0, AT + 2 * PAGE);
    bench.write(0, AT + 2000 * PAGE);
    let span = Span::new(AT, 8 * MIB);
    let mut pending = Pending::new(vec![0u64; 32], span, PAGE).unwrap();
    let unmapped = bench.space.unmap_noting(span, &mut pending);
    assert_eq!(unmapped.unwrap().bytes, 8 * MIB);
    let shown = bench.space.show(&mut pending).unwrap();
    let runs: Vec<Span<Iova>> = shown.runs().collect();
    assert_eq!(runs, [page(2, 1), page(2000, 1)]);
    shown.acknowledge();
    assert_eq!(bench.space.len(), 0);
}

#[test]
fn what_was_written_is_reported_by_its_place_in_memory() {
    let bench = bench(&[(true, false)]);
    let (memory, part) = (bench.memory.clone(), Span::new(12 * MIB, 4 * PAGE));
    let behind = AT + 8 * MIB;
    bench.space.map(behind, &memory, part, Prot::RW).unwrap();
    let asked = Span::new(behind - PAGE, 3 * PAGE);
    let parts: Vec<(Span<Iova>, Span<Offset>)> = bench
        .space
        .parts(asked)
        .into_iter()
        .map(|(range, of, part)| {
            assert!(Arc::ptr_eq(&of, &memory));
            (range, part)
        })
        .collect();
    assert_eq!(
        parts,
        [
            (
                Span::new(behind - PAGE, PAGE),
                Span::new(8 * MIB - PAGE, PAGE)
            ),
            (Span::new(behind, 2 * PAGE), Span::new(12 * MIB, 2 * PAGE)),
        ]
    );
}
