//! Device models on vm-memory behind an address space: what they see, and that an unmap waits for
//! them.

#![cfg(feature = "vm-memory")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ioas::{GuestIommu, Ioas, Ledger, Listener, Memory, Synthetic, UnmapError};
use iommu::{DomainId, FlushError};
use iopt::{AnyTable, FormatId, HeapTables, Interruption, Prot};
use runs::{PageSizes, Span};
use vm_memory::{GuestAddress, Iommu, Permissions};

const PAGE: u64 = 4096;
const BASE: u64 = 0x8000_0000;
const IOVA: u64 = 0x10_0000;

struct Bench {
    space: Ioas,
    iommu: Arc<GuestIommu>,
    ledger: Arc<Ledger>,
    ram: Arc<Memory>,
}

impl Bench {
    /// 16 pages of guest memory, mapped for reading and writing; guards are waited for up to `wait`.
    fn new(wait: Duration) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let sizes = PageSizes::from_bits(u64::MAX);
        let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap();
        let space = Ioas::over_table(DomainId(1), table);
        let ledger = Ledger::unlimited();
        let runs = [Span::new(0x4000_0000, 64 * PAGE)];
        let ram = Memory::new(Arc::new(Synthetic::new(runs)), &ledger);
        let iommu = Arc::new(GuestIommu::new(wait));
        iommu.add_memory(&ram, GuestAddress(BASE));
        space.add_listener(iommu.clone());
        let part = Span::new(0, 16 * PAGE);
        space.map(IOVA, &ram, part, Prot::RW).unwrap();
        Self {
            space,
            iommu,
            ledger,
            ram,
        }
    }

    /// Guest address of each stretch of a range.
    fn look(&self, iova: u64, len: u64, access: Permissions) -> Option<Vec<(u64, usize)>> {
        let found = self
            .iommu
            .translate(GuestAddress(iova), len as usize, access);
        let stretches = found.ok()?.map(|range| (range.base.0, range.length));
        Some(stretches.collect())
    }
}

#[test]
fn a_device_model_sees_exactly_the_areas_over_guest_memory() {
    let bench = Bench::new(Duration::from_millis(50));
    let (read, write) = (Permissions::Read, Permissions::ReadWrite);
    assert_eq!(
        bench.look(IOVA + 8, 16 * PAGE - 8, write),
        Some(vec![(BASE + 8, 65528)])
    );
    assert_eq!(bench.look(IOVA, 16 * PAGE + 1, read), None);
    assert_eq!(bench.look(u64::MAX - 7, 16, read), None);

    // After it, other pages, to be read only; and memory that is none of the guest's.
    let (ram, part) = (bench.ram.clone(), Span::new(32 * PAGE, 2 * PAGE));
    let behind = IOVA + 16 * PAGE;
    bench.space.map(behind, &ram, part, Prot::READ).unwrap();
    let bar = Arc::new(Synthetic::new([Span::new(0xf000_0000, PAGE)]));
    let bar = Memory::new(bar, &bench.ledger);
    let part = Span::new(0, PAGE);
    bench.space.map(0x90_0000, &bar, part, Prot::RW).unwrap();
    let two = vec![
        (BASE + 15 * PAGE, PAGE as usize),
        (BASE + 32 * PAGE, PAGE as usize),
    ];
    assert_eq!(bench.look(behind - PAGE, 2 * PAGE, read), Some(two));
    assert_eq!(bench.look(behind, PAGE, write), None);
    assert_eq!(bench.look(0x90_0000, 8, read), None);

    // A part is taken out and comes back.
    let middle = Span::new(IOVA + 4 * PAGE, PAGE);
    let never = Interruption::Refused;
    bench.space.take_out(middle, never).unwrap();
    assert_eq!(bench.look(middle.start, 8, read), None);
    assert!(bench.look(IOVA, 4 * PAGE, write).is_some());
    assert!(bench.look(IOVA + 5 * PAGE, 11 * PAGE, write).is_some());
    bench.space.put_back(middle, never).unwrap();
    assert!(bench.look(IOVA, 16 * PAGE, write).is_some());

    // A late listener is notified of everything; one that has left, of nothing.
    let late = Arc::new(GuestIommu::new(Duration::ZERO));
    late.add_memory(&bench.ram, GuestAddress(0));
    bench.space.add_listener(late.clone());
    assert!(late.translate(GuestAddress(IOVA), 8, read).is_ok());
    let gone: Arc<dyn Listener> = bench.iommu.clone();
    bench.space.remove_listener(&gone);
    bench.space.unmap_all().unwrap();
    assert!(late.translate(GuestAddress(IOVA), 8, read).is_err());
    assert!(bench.look(IOVA, 8, read).is_some());
}

#[test]
fn an_unmap_waits_for_a_reader_that_holds_a_guard() {
    let bench = Bench::new(Duration::from_secs(600));
    let iommu = bench.iommu.clone();
    let (looked, has_looked) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let left = Arc::new(AtomicBool::new(false));
    let leaving = left.clone();
    let reader = thread::spawn(move || {
        let access = Permissions::Read;
        let guard = iommu.translate(GuestAddress(IOVA), 64, access).unwrap();
        looked.send(()).unwrap();
        released.recv().unwrap();
        // Once more, while an unmap waits: a descriptor that names another one.
        assert!(iommu.translate(GuestAddress(IOVA), 64, access).is_ok());
        leaving.store(true, Ordering::SeqCst);
        drop(guard);
    });
    has_looked.recv().unwrap();
    release.send(()).unwrap();
    let unmapped = bench.space.unmap_all().unwrap();
    assert!(left.load(Ordering::SeqCst), "unmapped under the reader");
    assert_eq!(unmapped.unpinned, 16 * PAGE);
    reader.join().unwrap();
}

#[test]
fn a_guard_that_is_never_dropped_keeps_memory_pinned_and_is_named() {
    let bench = Bench::new(Duration::from_millis(5));
    let iommu = bench.iommu.clone();
    let guard = iommu
        .translate(GuestAddress(IOVA), 64, Permissions::Read)
        .unwrap();
    let failed = bench.space.unmap_all();
    let Err(UnmapError::Flush(FlushError::Held { range, .. })) = failed else {
        panic!("{failed:?}");
    };
    assert_eq!(range, Span::new(IOVA, 16 * PAGE));
    assert_eq!((bench.space.len(), bench.space.retired()), (0, 1));
    assert_eq!(bench.ram.held(), 16 * PAGE);
    // Nothing new is mapped under an old translation either.
    let (ram, part) = (bench.ram.clone(), Span::new(32 * PAGE, PAGE));
    assert!(bench.space.map(IOVA, &ram, part, Prot::RW).is_err());
    drop(guard);
    assert_eq!(bench.space.flush().unwrap(), 16 * PAGE);
    assert_eq!(bench.look(IOVA, 8, Permissions::Read), None);
    bench.space.close().unwrap();
    assert_eq!(bench.ledger.in_use(), 0);
}
