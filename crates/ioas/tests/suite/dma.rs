//! Buffers of requests: what the device finds at the address that each was given, and when addresses come back.
//!
//! The device's memory holds its own physical addresses, and refuses what is not pinned. Its unit has caches, so that an
//! address which is used again before a flush shows the old buffer.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use ioas::{Dma, DmaBuffer, DmaError, DmaUnmapError, Flushing, Ledger, Memory, UnmapError};
use iommu::{FaultReason, Port, SoftwareUnit};
use iopt::{FormatId, HeapTables, Prot};
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
        let tables = Arc::new(HeapTables::with_tables(256).unwrap());
        let ledger = Ledger::new("a counter", Some(16 * MIB), 0);
        let object = Arc::new(Tracked::new(&[Span::new(FRAME, 16 * MIB)]));
        let software = SoftwareUnit::new(tables.clone(), object.pages.clone());
        let space = space(format.0, format.1, &tables);
        let unit = Arc::new(FrailUnit::new(Arc::new(software.clone())));
        space.attach((unit.clone(), DEVICE)).unwrap();
        if let Some(holds) = waits {
            space.set_flushing(Flushing::Lazy {
                holds,
                age: Duration::MAX,
                now: || Duration::ZERO,
            });
        }
        Self {
            memory: Memory::new(object.clone(), &ledger),
            dma: Dma::new(Arc::new(space), &[window], 2),
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
        let space = Arc::clone(dma.space());
        drop(dma);
        Arc::into_inner(space).unwrap().close().unwrap();
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
fn a_buffer_of_a_large_page_is_one_leaf() {
    let bench = Bench::new(FORMATS[0], None, WINDOW);
    let small = bench.map(0, 1).unwrap();
    let large = bench.map(2 * MIB, 2 * MIB).unwrap();
    let sizes: Vec<u64> = leaves(bench.dma.space())
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

    let before = (bench.dma.space().areas().len(), bench.ledger.in_use());
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
        (bench.dma.space().areas().len(), bench.ledger.in_use()),
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
fn a_lazily_unmapped_address_is_not_used_again_before_the_flush() {
    for format in FORMATS {
        let bench = Bench::new(format, Some(3), WINDOW);
        let mut device = bench.device();
        let mut used = Vec::new();
        // Keeps the table: one that was unlinked is flushed before anything is mapped in its place.
        let kept = bench.map(0, 1).unwrap();
        bench.unit.invalidates.set(None);
        for n in 0..4 {
            let buffer = bench.map(n * PAGE, PAGE).unwrap();
            sees(&mut device, &buffer, n * PAGE);
            let start = buffer.range().start;
            assert!(!used.contains(&start), "{start:#x} may still be cached");
            used.push(start);
            bench.dma.unmap(buffer).unwrap();
        }
        assert_eq!(bench.unit.invalidates.calls(), 1, "at the bound");
        let again = bench.map(9 * PAGE, PAGE).unwrap();
        assert!(used.contains(&again.range().start));
        sees(&mut device, &again, 9 * PAGE);
        for buffer in [again, kept] {
            bench.dma.unmap(buffer).unwrap();
        }
        bench.end();
    }
}

#[test]
fn a_full_window_flushes_first_and_then_says_what_is_left() {
    let window = Span::new(WINDOW.start, 16 * PAGE);
    let bench = Bench::new(FORMATS[0], Some(100), window);
    let buffers: Vec<_> = (0..16).map(|n| bench.map(n * PAGE, 1).unwrap()).collect();
    assert!(matches!(
        bench.map(0, 1),
        Err(DmaError::NoRoom {
            wanted: PAGE,
            longest: 0
        })
    ));
    for (n, buffer) in buffers.into_iter().enumerate() {
        if n % 2 == 0 {
            bench.dma.unmap(buffer).unwrap();
        } else {
            // It stays for good.
            let _ = buffer;
        }
    }
    assert!(bench.dma.space().retired() > 0);
    let refused = bench.map(0, 2 * PAGE).unwrap_err();
    assert!(matches!(
        refused,
        DmaError::NoRoom { wanted, longest: PAGE } if wanted == 2 * PAGE
    ));
    assert_eq!(bench.dma.space().retired(), 0, "flushed for room");
    let mut device = bench.device();
    for n in 0..8 {
        let buffer = bench.map(n * PAGE, 1).unwrap();
        sees(&mut device, &buffer, n * PAGE);
        let _ = buffer;
    }
    bench.dma.space().unmap_all(&mut ()).unwrap();
    bench.end();
}

#[test]
fn an_address_whose_flush_has_failed_is_used_after_the_next() {
    let window = Span::new(WINDOW.start, 2 * PAGE);
    let bench = Bench::new(FORMATS[0], None, window);
    let mut device = bench.device();
    let buffer = bench.map(0, 1).unwrap();
    let start = buffer.range().start;
    sees(&mut device, &buffer, 0);
    let first = bench.unit.invalidates.calls();
    bench.unit.invalidates.set(first..first + 1);
    let failed = bench.dma.unmap(buffer);
    assert!(matches!(
        failed,
        Err(DmaUnmapError::Unmapped(UnmapError::Flush(_)))
    ));
    assert_eq!(read(&mut device, start), Some(0), "still cached");
    let other = bench.map(PAGE, 1).unwrap();
    assert_ne!(other.range().start, start);
    // The flush before it has succeeded.
    let third = bench.map(2 * PAGE, 1).unwrap();
    assert_eq!(third.range().start, start);
    sees(&mut device, &third, 2 * PAGE);
    for buffer in [other, third] {
        bench.dma.unmap(buffer).unwrap();
    }
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

#[test]
fn many_threads_map_and_unmap_at_once() {
    for waits in [None, Some(32)] {
        let bench = Bench::new(FORMATS[0], waits, WINDOW);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (bench, mut device) = (&bench, bench.device());
                scope.spawn(move || {
                    for n in 0..400 {
                        let start = (thread * 400 + n) * 1031 % (8 * MIB);
                        let len = 1 + (n * 7919) % (256 << 10);
                        let buffer = bench.map(start, len).unwrap();
                        sees(&mut device, &buffer, start);
                        bench.dma.unmap(buffer).unwrap();
                    }
                });
            }
        });
        bench.end();
    }
}
