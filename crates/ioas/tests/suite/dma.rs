//! Buffers of requests: what the device finds at the address that each was given, and when addresses come back.
//!
//! The device's memory holds its own physical addresses, and refuses what is not pinned. Its unit has caches, so that an
//! address which is used again before a flush shows the old buffer.

mod flushes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::*;
use ioas::{
    AttachError, DetachError, Dma, DmaBuffer, DmaError, DmaUnmapError, Endpoint, FixedRuns,
    Flushing, Ledger, MapError, Memory, Synthetic,
};
use iommu::{DeviceId, FaultReason, Port, SoftwareUnit};
use iopt::{FormatId, HeapTables, Invalidation, Prot, TableMemory as _};
use proptest::prelude::*;
use runs::{Iova, Offset, Span};

const FRAME: u64 = 0x1_0000_0000;
const WINDOW: Span<Iova> = Span::new(3 * GIB, 64 * MIB);

type Device = Port<Arc<HeapTables>, Arc<Pages>>;

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    software: SoftwareUnit<Arc<HeapTables>, Arc<Pages>>,
    unit: Arc<FrailUnit>,
    object: Arc<Tracked>,
    memory: Arc<Memory>,
    dma: Dma,
}

impl Bench {
    /// 16 MiB of memory in one run; `waits` buffers may wait for a flush, or none.
    fn new(format: (FormatId, u8), waits: Option<usize>, window: Span<Iova>) -> Self {
        Self::with_unit(format, waits, window, 256, |_| ())
    }

    /// The same with so many tables, and a unit as `change` has it.
    fn with_unit(
        format: (FormatId, u8),
        waits: Option<usize>,
        window: Span<Iova>,
        count: u64,
        change: impl FnOnce(&mut FrailUnit),
    ) -> Self {
        let tables = Arc::new(HeapTables::with_tables(count).unwrap());
        let ledger = Ledger::new("a counter", Some(16 * MIB), 0);
        let object = Arc::new(Tracked::new(&[Span::new(FRAME, 16 * MIB)]));
        let software = SoftwareUnit::new(tables.clone(), object.pages.clone());
        let mut unit = FrailUnit::new(Arc::new(software.clone()));
        change(&mut unit);
        let unit = Arc::new(unit);
        let flushing = waits.map_or(Flushing::Strict, |holds| Flushing::Lazy {
            holds,
            age: Duration::MAX,
            now: || Duration::ZERO,
        });
        let table = table(format.0, format.1, &tables);
        let dma = Dma::new(DOMAIN, table, &[window], flushing, 2);
        dma.attach((unit.clone(), DEVICE)).unwrap();
        Self {
            memory: Memory::new(object.clone(), &ledger),
            dma,
            tables,
            ledger,
            software,
            unit,
            object,
        }
    }

    fn map(&self, start: u64, len: u64) -> Result<DmaBuffer, DmaError> {
        self.dma.map(&self.memory, Span::new(start, len), Prot::RW)
    }

    fn device(&self) -> Device {
        self.software.port(DEVICE)
    }

    fn end(self) {
        let Self { dma, tables, .. } = self;
        dma.close().unwrap();
        let left = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!((tables.in_use(), left), (0, (0, 0)));
    }
}

/// The offset in the object that the device finds; `None` for a fault of the unit.
fn read(device: &mut Device, iova: u64) -> Option<u64> {
    let mut word = [0];
    match device.read(iova & !7, &mut word) {
        Ok(()) => Some(word[0] - FRAME + (iova & 7)),
        Err(aborted) => {
            let reason = aborted.fault.reason;
            assert!(!matches!(reason, FaultReason::Target(_)), "{aborted}");
            None
        }
    }
}

/// The buffer is the part of the object from `start` on, at both ends.
fn sees(device: &mut Device, buffer: &DmaBuffer, start: u64) {
    let range = buffer.range();
    assert_eq!(read(device, range.start), Some(start));
    assert_eq!(read(device, range.last()), Some(start + range.len - 1));
}

#[test]
fn a_buffer_of_any_bytes_is_reached_until_it_is_unmapped() {
    for format in FORMATS {
        let bench = Bench::new(format, None, WINDOW);
        let mut device = bench.device();
        for (start, len) in [
            (0, 1),
            (4095, 2),
            (0x1234, 0x5678),
            (0x20_0000, 0x20_0000),
            (0x3fff, 9 * MIB),
            (16 * MIB - 1, 1),
        ] {
            let buffer = bench.map(start, len).unwrap();
            let range = buffer.range();
            assert_eq!(range.len, len);
            assert!(WINDOW.covers(&range));
            sees(&mut device, &buffer, start);
            bench.dma.unmap(buffer).unwrap();
            assert_eq!(read(&mut device, range.start), None);
            assert_eq!(read(&mut device, range.last()), None);
            assert_eq!(bench.object.memory.pinned(), 0);
        }
        bench.end();
    }
}

#[test]
fn a_buffer_may_end_at_the_top_of_the_address_space() {
    for format in [
        (FormatId::X86_64, 4),
        (FormatId::X86_64, 5),
        (FormatId::AmdV1, 6),
    ] {
        for waits in [None, Some(1)] {
            let top = Span::inclusive(u64::MAX - 16 * PAGE + 1, u64::MAX).unwrap();
            let bench = Bench::with_unit(format, waits, top, 256, |unit| {
                unit.caches_not_present = true;
            });
            let mut device = bench.device();
            for (start, len) in [(PAGE, 16 * PAGE), (0x1001, 16 * PAGE - 1), (0x1fff, 0xf001)] {
                let buffer = bench.map(start, len).unwrap();
                assert_eq!(buffer.range().last(), u64::MAX);
                sees(&mut device, &buffer, start);
                bench.dma.unmap(buffer).unwrap();
            }
            let parts = [Span::new(0x3ffc, 4), Span::new(0, 15 * PAGE)];
            let list = parts.map(|part| (&bench.memory, part));
            bench.dma.flush().unwrap();
            bench.unit.invalidates.set([0]);
            let failed = bench.dma.map_list(&list, Prot::RW);
            assert!(
                matches!(failed, Err(DmaError::Map(MapError::Flush(_)))),
                "{failed:?}"
            );
            let buffer = bench.dma.map_list(&list, Prot::RW).unwrap();
            assert_eq!(read(&mut device, u64::MAX), Some(15 * PAGE - 1));
            bench.dma.unmap(buffer).unwrap();
            let over = bench.map(0, 17 * PAGE).unwrap_err();
            assert!(matches!(over, DmaError::NoRoom { longest, .. } if longest == 16 * PAGE));
            bench.end();
        }
    }
}

#[test]
fn a_buffer_of_a_large_page_is_one_leaf() {
    let bench = Bench::new(FORMATS[0], None, WINDOW);
    let small = bench.map(0, 1).unwrap();
    let large = bench.map(2 * MIB, 2 * MIB).unwrap();
    let sizes: Vec<u64> = leaves_of(bench.dma.table())
        .iter()
        .map(|leaf| leaf.run.len)
        .collect();
    assert_eq!(sizes, [PAGE, 2 * MIB]);
    for buffer in [small, large] {
        bench.dma.unmap(buffer).unwrap();
    }
    bench.end();
}

#[test]
fn a_list_is_one_buffer_or_nothing() {
    let bench = Bench::new(FORMATS[0], None, WINDOW);
    let (memory, mut device) = (&bench.memory, bench.device());
    let parts = [
        Span::new(0x5100, 0xf00),
        Span::new(0x9000, 0x3000),
        Span::new(0x1000, 0x10),
    ];
    let list = parts.map(|part| (memory, part));
    let buffer = bench.dma.map_list(&list, Prot::RW).unwrap();
    let mut at = buffer.range().start;
    for part in parts {
        assert_eq!(read(&mut device, at), Some(part.start));
        at += part.len;
        assert_eq!(read(&mut device, at - 1), Some(part.last()));
    }
    assert_eq!(at, buffer.range().last() + 1);
    bench.dma.unmap(buffer).unwrap();

    let before = (leaves_of(bench.dma.table()), bench.ledger.in_use());
    let gap = |list: &[Span<Offset>]| {
        let list: Vec<_> = list.iter().map(|part| (memory, *part)).collect();
        bench.dma.map_list(&list, Prot::RW).unwrap_err()
    };
    let [first, second, last] = parts;
    assert!(matches!(
        gap(&[second, first]),
        DmaError::Gap { index: 1, .. }
    ));
    assert!(matches!(
        gap(&[last, second]),
        DmaError::Gap { index: 0, .. }
    ));
    assert!(matches!(gap(&[]), DmaError::List { parts: 0 }));
    assert!(matches!(
        gap(&[Span::new(0, 0)]),
        DmaError::List { parts: 1 }
    ));
    let huge = Span::new(0, 1 << 63);
    assert!(matches!(gap(&[huge, huge]), DmaError::List { parts: 2 }));
    assert!(matches!(
        gap(&[Span::new(u64::MAX, 1)]),
        DmaError::List { .. }
    ));
    // The last part lies outside of the object: those before it are unmapped.
    assert!(matches!(
        gap(&[second, Span::new(1 << 40, PAGE)]),
        DmaError::Map(_)
    ));
    assert_eq!(
        (leaves_of(bench.dma.table()), bench.ledger.in_use()),
        before
    );
    let all = bench
        .dma
        .map(memory, Span::new(0, 16 * MIB), Prot::RW)
        .unwrap();
    bench.dma.unmap(all).unwrap();
    bench.end();
}

#[test]
fn a_buffer_of_another_allocator_stays_mapped() {
    let (one, other) = (
        Bench::new(FORMATS[0], None, WINDOW),
        Bench::new(FORMATS[0], None, WINDOW),
    );
    let buffer = one.map(0, 1).unwrap();
    let Err(DmaUnmapError::Foreign { buffer }) = other.dma.unmap(buffer) else {
        panic!("it was not refused");
    };
    one.dma.unmap(buffer).unwrap();
    one.end();
    other.end();
}

#[test]
fn a_device_reaches_the_buffers_while_it_is_attached() {
    let other = DeviceId::pci(0, 6, 0);
    for format in FORMATS {
        let bench = Bench::with_unit(format, None, WINDOW, 256, |unit| {
            unit.reserved = vec![Span::new(0xfee0_0000, MIB)];
        });
        let buffer = bench.map(PAGE, 3 * PAGE).unwrap();
        let mut late = bench.software.port(other);
        assert_eq!(read(&mut late, buffer.range().start), None);
        bench.dma.attach((bench.unit.clone(), other)).unwrap();
        sees(&mut late, &buffer, PAGE);
        let again = bench.dma.attach((bench.unit.clone(), other));
        assert!(matches!(again, Err(AttachError::Unit(_))));
        bench.dma.detach(other).unwrap();
        assert!(matches!(
            bench.dma.detach(other),
            Err(DetachError::NotAttached { device }) if device == other
        ));
        assert_eq!(read(&mut late, buffer.range().start), None);
        sees(&mut bench.device(), &buffer, PAGE);
        bench.dma.unmap(buffer).unwrap();
        bench.end();
    }
}

#[test]
fn a_device_that_cannot_translate_a_window_is_not_attached() {
    let bench = Bench::new(FORMATS[0], None, WINDOW);
    let mut unit = FrailUnit::new(Arc::new(bench.software.clone()));
    let reserved = Span::new(WINDOW.last(), MIB);
    unit.reserved = vec![Span::new(0, MIB), reserved];
    let refused = bench.dma.attach((Arc::new(unit), DeviceId::pci(0, 6, 0)));
    assert!(matches!(
        refused,
        Err(AttachError::Reserved { area, reserved: found }) if (area, found) == (WINDOW, reserved)
    ));
    let file = Arc::new("no device");
    assert!(matches!(
        bench.dma.attach(Endpoint::from(file)),
        Err(AttachError::Endpoint { .. })
    ));
    bench.end();
}

#[test]
fn buffers_of_memory_that_was_pinned_once_cost_no_pin() {
    for waits in [None, Some(8)] {
        let bench = Bench::new(FORMATS[0], waits, WINDOW);
        let mut device = bench.device();
        let (pinned, charged) = (8 * MIB, || bench.ledger.in_use());
        let part = Span::new(4 * MIB, pinned);
        let memory = bench.memory.pinned(part).unwrap();
        assert_eq!((memory.len(), charged()), (pinned, pinned));
        let beyond = bench.memory.pinned(Span::new(9 * MIB, pinned));
        assert!(matches!(beyond, Err(MapError::Part { .. })));
        for n in 0..40 {
            let buffer = bench.dma.map(&memory, Span::new(n * 1000, 5000), Prot::RW);
            let buffer = buffer.unwrap();
            sees(&mut device, &buffer, 4 * MIB + n * 1000);
            assert_eq!(bench.object.memory.pinned(), pinned);
            bench.dma.unmap(buffer).unwrap();
        }
        // It stays pinned for as long as a buffer is mapped, and until its flush.
        let last = bench.dma.map(&memory, Span::new(0, PAGE), Prot::RW);
        drop(memory);
        bench.dma.flush().unwrap();
        let last = last.unwrap();
        sees(&mut device, &last, 4 * MIB);
        bench.dma.unmap(last).unwrap();
        assert_eq!(charged(), pinned, "kept for the next buffer");
        bench.dma.flush().unwrap();
        bench.dma.poll().unwrap();
        bench.dma.flush().unwrap();
        assert_eq!((charged(), bench.object.memory.pinned()), (0, 0));
        bench.end();
    }
}

#[test]
fn memory_that_cannot_be_had_leaves_nothing() {
    let bench = Bench::new(FORMATS[0], None, WINDOW);
    let given = FixedRuns::new([Span::new(FRAME, 2 * PAGE)], PAGE).unwrap();
    let given = Memory::new(Arc::new(given), &Ledger::unlimited());
    let refused = Synthetic::new([Span::new(0, 4 * PAGE)]).refusing(2 * PAGE);
    let refused = Memory::new(Arc::new(refused), &bench.ledger);
    let (first, whole) = (Span::new(0, PAGE), Span::new(0, 4 * PAGE));
    let list = [(&given, first), (&bench.memory, first), (&refused, whole)];
    for _ in 0..3 {
        let failed = bench.dma.map_list(&list, Prot::RW);
        assert!(
            matches!(failed, Err(DmaError::Map(MapError::Pin(_)))),
            "{failed:?}"
        );
        assert_eq!(bench.ledger.in_use(), 0);
    }
    let over = bench.dma.map(&given, Span::new(PAGE, 2 * PAGE), Prot::RW);
    assert!(matches!(over, Err(DmaError::Map(MapError::Part { .. }))));
    let none = bench.dma.map(&given, first, Prot::empty());
    assert!(matches!(none, Err(DmaError::Map(MapError::Prot { .. }))));
    let all = bench.map(0, 16 * MIB).unwrap();
    let limit = bench.dma.map(&refused, first, Prot::RW);
    assert!(matches!(limit, Err(DmaError::Map(MapError::OverLimit(_)))));
    bench.dma.unmap(all).unwrap();
    bench.end();
}

#[test]
fn a_unit_that_remembers_holes_learns_of_each_buffer() {
    let bench = Bench::with_unit(FORMATS[0], None, WINDOW, 256, |unit| {
        unit.caches_not_present = true;
    });
    bench.unit.invalidates.set([1, 2]);
    let buffer = bench.map(0, 1).unwrap();
    assert_eq!(bench.unit.invalidates.calls(), 1);
    let page = Span::new(buffer.range().start, PAGE);
    let last = bench.unit.invalidated.lock().unwrap().take();
    assert_eq!(last, Some(Invalidation::mapped(page)), "nothing else");
    // Neither the map nor taking it back is flushed.
    let failed = bench.map(PAGE, 1);
    assert!(matches!(failed, Err(DmaError::Map(MapError::Flush(_)))));
    assert_eq!(bench.dma.waiting(), 1);
    assert_eq!(
        bench.object.memory.pinned(),
        2 * PAGE,
        "a device may reach it"
    );
    bench.dma.poll().unwrap();
    assert_eq!(bench.object.memory.pinned(), PAGE);
    bench.dma.unmap(buffer).unwrap();
    bench.end();
}

/// The memory of what was unmapped when the unit panicked stays held, its address is not used again, and others go on.
#[test]
fn a_unit_that_panics_leaves_the_buffer_held() {
    let bench = Bench::new(FORMATS[0], None, Span::new(WINDOW.start, 4 * PAGE));
    let kept = bench.map(PAGE, PAGE).unwrap();
    let buffer = bench.map(0, PAGE).unwrap();
    let lost = buffer.range().start;
    *bench.unit.at_invalidate.lock().unwrap() =
        Some(Arc::new(|| std::panic::resume_unwind(Box::new("no flush"))));
    let unmap = || bench.dma.unmap(buffer).is_ok();
    assert!(catch_unwind(AssertUnwindSafe(unmap)).is_err());
    *bench.unit.at_invalidate.lock().unwrap() = None;
    assert_eq!(bench.object.memory.pinned(), 2 * PAGE);
    let mut device = bench.device();
    sees(&mut device, &kept, PAGE);
    for n in 2..20 {
        let buffer = bench.map(n * PAGE, PAGE).unwrap();
        assert_ne!(buffer.range().start, lost);
        sees(&mut device, &buffer, n * PAGE);
        bench.dma.unmap(buffer).unwrap();
    }
    bench.dma.unmap(kept).unwrap();
    bench.end();
}

#[test]
fn what_a_device_may_reach_stays_pinned_when_it_cannot_be_detached() {
    for closes in [false, true] {
        let bench = Bench::new(FORMATS[0], None, WINDOW);
        let _buffer = bench.map(0, PAGE).unwrap();
        bench.unit.detaches.set([0, 1]);
        if closes {
            assert!(matches!(bench.dma.close(), Err(DetachError::Unit(_))));
        } else {
            drop(bench.dma);
        }
        assert_eq!(bench.object.memory.pinned(), PAGE);
        assert_eq!(bench.ledger.in_use(), PAGE);
    }
}

#[test]
fn dropping_detaches_and_unpins_what_is_mapped_and_what_waits() {
    let bench = Bench::new(FORMATS[0], Some(100), WINDOW);
    let buffers: Vec<_> = (0..4).map(|n| bench.map(n * PAGE, PAGE).unwrap()).collect();
    let kept = buffers[3].range().start;
    for buffer in buffers.into_iter().take(2) {
        bench.dma.unmap(buffer).unwrap();
    }
    assert_eq!(
        (bench.dma.waiting(), bench.object.memory.pinned()),
        (2, 4 * PAGE)
    );
    let mut device = bench.device();
    assert_eq!(read(&mut device, kept), Some(3 * PAGE));
    drop(bench.dma);
    assert_eq!(read(&mut device, kept), None);
    assert_eq!(
        (bench.ledger.in_use(), bench.object.memory.pinned()),
        (0, 0)
    );
}

/// With so many tables left, ten threads at once: what is refused is refused by name, and nothing is lost.
#[test]
fn table_memory_at_its_end_refuses_single_buffers() {
    const TABLES: u64 = 32;
    for left in 0..24 {
        for waits in [None, Some(4)] {
            let window = Span::new(WINDOW.start, 512 * MIB);
            let bench = Bench::with_unit(FORMATS[0], waits, window, TABLES, |_| ());
            let others = bench.tables.reserve(TABLES - bench.tables.in_use() - left);
            let others = others.unwrap();
            let mapped = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for thread in 0..10u64 {
                    let (bench, mapped) = (&bench, &mapped);
                    scope.spawn(move || {
                        let mut device = bench.device();
                        let mut held = Vec::new();
                        for n in 0..12 {
                            let (start, len) = ((thread + n) * PAGE, (2 * MIB) << (n % 3));
                            match bench.map(start, len) {
                                Ok(buffer) => {
                                    sees(&mut device, &buffer, start);
                                    held.push(buffer);
                                    mapped.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(DmaError::Map(MapError::Table(cause))) => {
                                    assert!(matches!(cause, iopt::TableMapError::NoTables(_)));
                                }
                                Err(other) => panic!("{other}"),
                            }
                            if held.len() > 2 {
                                bench.dma.unmap(held.swap_remove(0)).unwrap();
                            }
                        }
                        for buffer in held {
                            bench.dma.unmap(buffer).unwrap();
                        }
                    });
                }
            });
            // The root is there. Two tables lead to leaves of 2M, one more to those of a page.
            assert!(left >= 2 || mapped.into_inner() == 0, "{left}");
            bench.dma.flush().unwrap();
            let alone = bench.map(PAGE, 2 * MIB);
            assert_eq!(alone.is_ok(), left >= 3, "{left}");
            if let Ok(buffer) = alone {
                bench.dma.unmap(buffer).unwrap();
            }
            bench.dma.flush().unwrap();
            bench.tables.give_back(others);
            assert_eq!(
                (bench.ledger.in_use(), bench.object.memory.pinned()),
                (0, 0)
            );
            bench.end();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Buffers of random parts, strict or lazy: each is what its device finds, at addresses that no other has.
    #[test]
    fn each_buffer_shows_its_own_bytes(
        format in prop::sample::select(FORMATS.to_vec()),
        waits in prop::option::of(0usize..20),
        steps in prop::collection::vec((0..12 * MIB, 1..3 * MIB, any::<prop::sample::Index>(), any::<bool>()), 1..60),
    ) {
        let bench = Bench::new(format, waits, WINDOW);
        let mut device = bench.device();
        let mut buffers: Vec<(DmaBuffer, u64)> = Vec::new();
        for (start, len, nth, gone) in steps {
            if gone && !buffers.is_empty() {
                let (buffer, _) = buffers.swap_remove(nth.index(buffers.len()));
                bench.dma.unmap(buffer).unwrap();
            } else if let Ok(buffer) = bench.map(start, len) {
                let range = buffer.range();
                prop_assert!(buffers.iter().all(|(other, _)| !other.range().overlaps(&range)));
                buffers.push((buffer, start));
            }
            for (buffer, start) in &buffers {
                sees(&mut device, buffer, *start);
            }
        }
        for (buffer, _) in buffers {
            bench.dma.unmap(buffer).unwrap();
        }
        bench.end();
    }
}
