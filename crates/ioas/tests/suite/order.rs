//! Nothing is unpinned before every unit has forgotten it: unmap, undo, close, drop.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crate::common::*;
use ioas::{CloseError, DetachError, Ledger, Memory, Synthetic, UnmapError};
use iommu::{DeviceId, FaultReason, RunMap, SoftwareUnit, Unit, UnitAttachError};
use iopt::{HeapTables, Prot};
use runs::Span;

const AT: u64 = GIB - MIB;
const BYTES: u64 = 4 * MIB;
const OTHER: DeviceId = DeviceId::pci(0, 6, 0);

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    software: SoftwareUnit<Arc<HeapTables>, RunMap<Vec<AtomicU64>>>,
    unit: Arc<FrailUnit>,
    memory: Arc<Frail>,
    whole: Arc<Memory>,
    space: Space,
}

impl Bench {
    fn new(format: (iopt::FormatId, u8)) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let ledger = Ledger::new("a counter", Some(GIB), 0);
        let space = space(format.0, format.1, &tables);
        let words = (0..BYTES / 8).map(AtomicU64::new).collect();
        let data = RunMap::new([(0x4000_0000, words)]).unwrap();
        let software = SoftwareUnit::new(tables.clone(), data);
        let unit = Arc::new(FrailUnit::new(Arc::new(software.clone())));
        space.attach((unit.clone(), DEVICE)).unwrap();
        let memory = Synthetic::new([Span::new(0x4000_0000, BYTES)]);
        let mut memory = Frail::new(memory);
        memory.piece = MIB / 2;
        let memory = Arc::new(memory);
        Self {
            whole: Memory::new(memory.clone(), &ledger),
            tables,
            ledger,
            software,
            unit,
            memory,
            space,
        }
    }

    fn map(&mut self) -> Result<(), ioas::MapError> {
        let part = Span::new(0, BYTES);
        self.space.map(AT, &self.whole, part, Prot::RW)
    }

    /// Has the unit write down, whenever it is called, what is pinned, what is charged, and
    /// whether the device still gets data.
    fn record(&self) -> Arc<Mutex<Vec<Seen>>> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        for hook in [&self.unit.at_invalidate, &self.unit.at_detach] {
            let (seen, memory, ledger, tables) = (
                seen.clone(),
                self.memory.clone(),
                self.ledger.clone(),
                self.tables.clone(),
            );
            *hook.lock().unwrap() = Some(Arc::new(move || {
                seen.lock().unwrap().push(Seen {
                    pinned: memory.memory.pinned(),
                    charged: ledger.in_use(),
                    tables: tables.in_use(),
                });
            }));
        }
        seen
    }

    fn held(&self) -> (u64, u64) {
        (self.memory.memory.pinned(), self.ledger.in_use())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    pinned: u64,
    charged: u64,
    tables: u64,
}

#[test]
fn at_the_moment_of_the_flush_nothing_is_unpinned_and_no_table_is_back() {
    for format in FORMATS {
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        // The device has everything in its caches.
        let mut port = bench.software.port(DEVICE);
        let mut words = vec![0; (BYTES / 8) as usize];
        port.read(AT, &mut words).unwrap();
        let full = Seen {
            pinned: BYTES,
            charged: BYTES,
            tables: bench.tables.in_use(),
        };
        let seen = bench.record();
        bench.space.unmap(Span::new(AT, BYTES)).unwrap();
        assert_eq!(*seen.lock().unwrap(), [full]);
        assert_eq!(bench.held(), (0, 0));
        assert_eq!(bench.tables.in_use(), 1);
        assert!(port.read(AT, &mut words[..1]).is_err());
        bench.space.close().unwrap();
    }
}

#[test]
fn a_map_that_is_undone_flushes_before_it_unpins() {
    for format in FORMATS {
        let mut bench = Bench::new(format);
        // Five runs are read, four of them are mapped, then the reader fails.
        bench.memory.reads.set([1]);
        let mut port = bench.software.port(DEVICE);
        let seen = bench.record();
        bench.map().unwrap_err();
        let seen = seen.lock().unwrap().clone();
        // The pieces are one run: nothing of it is mapped before its end is known.
        assert_eq!(seen, []);
        assert_eq!(bench.held(), (0, 0));

        let scattered = (0..8u64).map(|n| Span::new(0x4000_0000 + n * 0x8_0000, 0x4_0000));
        let memory = Arc::new(Frail::new(Synthetic::new(scattered)));
        memory.reads.set([1]);
        bench.memory = memory.clone();
        let object = Memory::new(memory, &bench.ledger);
        let part = Span::new(0, object.len());
        let seen = bench.record();
        let failed = bench.space.map(AT, &object, part, Prot::RW);
        assert!(failed.is_err());
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].pinned, seen[0].charged), (part.len, part.len));
        assert_eq!(bench.held(), (0, 0));
        assert!(port.read(AT, &mut [0]).is_err());
    }
}

#[test]
fn dropping_detaches_every_device_before_it_unpins() {
    for format in FORMATS {
        let mut bench = Bench::new(format);
        bench.space.attach((bench.unit.clone(), OTHER)).unwrap();
        bench.map().unwrap();
        let mut port = bench.software.port(DEVICE);
        port.read(AT, &mut [0; 8]).unwrap();
        let seen = bench.record();
        let Bench { space, .. } = bench;
        drop(space);
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen.len(), 2, "two devices");
        assert!(
            seen.iter()
                .all(|seen| (seen.pinned, seen.charged) == (BYTES, BYTES))
        );
        assert_eq!(
            (bench.memory.memory.pinned(), bench.ledger.in_use()),
            (0, 0)
        );
        let aborted = port.read(AT, &mut [0; 8]).unwrap_err();
        assert_eq!(aborted.fault.reason, FaultReason::NotAttached);
        // As with a table that is dropped.
        assert!(bench.tables.in_use() > 0);
    }
}

#[test]
fn memory_that_a_device_may_still_reach_is_never_unpinned() {
    let mut bench = Bench::new(FORMATS[0]);
    bench.space.attach((bench.unit.clone(), OTHER)).unwrap();
    bench.map().unwrap();
    // Part of it retired, the rest in an area.
    bench.unit.invalidates.set([0]);
    assert!(bench.space.unmap(Span::new(AT, BYTES)).is_err());
    bench.unit.invalidates.set([]);
    bench.space.flush().unwrap();
    bench.map().unwrap();
    let high = AT + GIB;
    let part = Span::new(0, BYTES / 2);
    bench.space.map(high, &bench.whole, part, Prot::RW).unwrap();
    bench.unit.invalidates.set([0]);
    assert!(bench.space.unmap(Span::new(AT, BYTES)).is_err());
    assert_eq!((bench.space.retired(), bench.space.areas().len()), (1, 1));

    // The second of two devices is not let go.
    bench.unit.detaches.set([1]);
    let Bench { space, .. } = bench;
    drop(space);
    // Its half is retired memory too: pinned once.
    let held = (bench.memory.memory.pinned(), bench.ledger.in_use());
    assert_eq!(held, (BYTES, BYTES), "pinned for good");
    // And that is why: it still reads.
    let mut port = bench.software.port(OTHER);
    let mut words = [0];
    port.read(high + 8, &mut words).unwrap();
    assert_eq!(words, [1]);
}

#[test]
fn a_device_that_was_detached_behind_our_back_holds_nothing() {
    let mut bench = Bench::new(FORMATS[1]);
    bench.map().unwrap();
    bench.unit.detach(DEVICE).unwrap();
    let Bench { space, .. } = bench;
    drop(space);
    assert_eq!(
        (bench.memory.memory.pinned(), bench.ledger.in_use()),
        (0, 0)
    );
}

#[test]
fn close_gives_back_whatever_one_way_out_allows() {
    for format in FORMATS {
        // Flushes fail, but no device is attached any more: there is nothing to flush.
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        bench.unit.invalidates.set(0..100);
        bench.space.close().unwrap();
        assert_eq!(
            (bench.memory.memory.pinned(), bench.ledger.in_use()),
            (0, 0)
        );
        assert_eq!(bench.tables.in_use(), 0);

        // Retired memory and its tables too.
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        bench.unit.invalidates.set(0..100);
        bench.space.unmap_all().unwrap_err();
        bench.space.close().unwrap();
        assert_eq!(
            (bench.memory.memory.pinned(), bench.ledger.in_use()),
            (0, 0)
        );
        assert_eq!(bench.tables.in_use(), 0);

        // A device stays, but its unit forgets: the memory is back, the root is lost.
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        bench.unit.detaches.set(0..100);
        let stays = bench.space.close().unwrap_err();
        assert!(matches!(
            stays,
            CloseError::Detach(DetachError::Unit(UnitAttachError::TimedOut { .. }))
        ));
        assert_eq!(
            (bench.memory.memory.pinned(), bench.ledger.in_use()),
            (0, 0)
        );
        assert_eq!(bench.tables.in_use(), 1);
        assert!(bench.software.port(DEVICE).read(AT, &mut [0]).is_err());

        // Both fail, and detaching succeeds when it is tried again at the very end.
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        bench.unit.invalidates.set(0..100);
        bench.unit.detaches.set([0]);
        assert!(bench.space.close().is_err());
        assert_eq!(
            (bench.memory.memory.pinned(), bench.ledger.in_use()),
            (0, 0)
        );

        // Both fail for good.
        let mut bench = Bench::new(format);
        bench.map().unwrap();
        bench.unit.invalidates.set(0..100);
        bench.unit.detaches.set(0..100);
        assert!(bench.space.close().is_err());
        let held = (bench.memory.memory.pinned(), bench.ledger.in_use());
        assert_eq!(held, (BYTES, BYTES));
    }
}

#[test]
fn a_failed_close_can_be_prepared_step_by_step() {
    let mut bench = Bench::new(FORMATS[2]);
    bench.map().unwrap();
    bench.unit.detaches.set([0]);
    bench.unit.invalidates.set([0]);
    assert!(matches!(
        bench.space.detach(DEVICE),
        Err(DetachError::Unit(UnitAttachError::TimedOut { .. }))
    ));
    assert_eq!(bench.space.endpoints(), [DEVICE.into()]);
    assert!(matches!(bench.space.unmap_all(), Err(UnmapError::Flush(_))));
    assert_eq!(bench.space.unmap_all().unwrap().unpinned, BYTES);
    bench.space.detach(DEVICE).unwrap();
    assert!(matches!(
        bench.space.detach(DEVICE),
        Err(DetachError::NotAttached { device: DEVICE })
    ));
    bench.space.close().unwrap();
    assert_eq!(bench.tables.in_use(), 0);
}
