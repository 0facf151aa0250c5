//! Memory of this machine: mapped, counted by the kernel, unmapped, counted no more.
//!
//! The counters belong to the process (and to the user), so that the tests take turns.

#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

#[cfg(feature = "vm-memory")]
mod guest_ram;
mod handover;
mod nodes;
#[cfg(feature = "vfio")]
mod released;
mod software;
#[cfg(feature = "virtio-drivers")]
mod virtio;

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hostmem::{Backing, FrameSource, Limits, Mapping, PinKind, Pinner};
use ioas::{
    HostMemory, HostTables, Ioas, Ledger, MapError, MappedStorage, Memory, MemoryObject as _,
    WhenUnmapped,
};
use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit};
use iopt::{AnyTable, FormatId, Prot};
use runs::{Iova, Pa, PageSizes, Span};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 4 * MIB;
const AT: u64 = 1 << 32;
const NOBODY: u32 = 65534;

/// A kernel charges nothing for registers that are mapped among memory; a pin of ours has no such memory.
#[test]
fn registers_among_memory_are_not_charged_by_a_kernel() {
    const PAGE: u64 = 4096;
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, 16 * PAGE, None).unwrap());
    let plain = HostMemory::new(mapping.clone());
    let registers = [(4, 1), (8, 2)].map(|(first, pages)| Span::new(first * PAGE, pages * PAGE));
    let object = HostMemory::new(mapping).with_registers(registers);
    for (first, pages, charged) in [(0, 16, 13), (0, 4, 4), (4, 1, 0), (3, 2, 1), (9, 7, 6)] {
        let part = Span::new(first * PAGE, pages * PAGE);
        assert_eq!(object.charge_of_mapping(part), charged * PAGE, "{part}");
        assert_eq!(plain.charge_of_mapping(part), pages * PAGE, "{part}");
    }
}

fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that the kernel counts for this process on the pinner's counter.
fn counted(pinner: &Pinner) -> u64 {
    Limits::in_use(pinner.counter()).unwrap().known
}

fn space() -> (Ioas, Arc<HostTables>) {
    let storage = MappedStorage::new(1 << 20, None).unwrap();
    let tables = Arc::new(HostTables::new(storage, 1 << 46).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    (Ioas::over_table(DomainId(1), table), tables)
}

/// The physical runs behind a range in one area.
fn runs_of(space: &Ioas, range: Span<Iova>) -> Vec<Span<Pa>> {
    let mut runs = Vec::new();
    let pin = space.pin(range, Prot::READ, WhenUnmapped::Keeps).unwrap();
    let hold = &pin.holds()[0];
    hold.with_runs(hold.part(), |reader| {
        let mut batch = [Span::default(); 64];
        loop {
            match reader.next_batch(&mut batch).unwrap() {
                0 => break,
                count => runs.extend_from_slice(&batch[..count]),
            }
        }
    });
    runs
}

/// Maps, reads by DMA, unmaps; the kernel's counter goes up and comes back.
fn round(pinner: Pinner, backing: Backing) {
    let pinner = Arc::new(pinner);
    let mapping = Arc::new(Mapping::new(backing, BYTES, None).unwrap());
    for (n, cell) in mapping.cells().iter().enumerate() {
        cell.store(n as u64, Ordering::Relaxed);
    }
    let frames = FrameSource::detect(&mapping);
    let memory = Arc::new(HostMemory::with_pinner(
        mapping.clone(),
        pinner.clone(),
        frames,
    ));
    let ledger = Ledger::new("a counter", None, 0);
    let object = Memory::new(memory.clone(), &ledger);
    let (space, tables) = space();

    let before = counted(&pinner);
    let whole = Span::new(0, BYTES);
    space.map(AT, &object, whole, Prot::RW).unwrap();
    assert_eq!(ledger.in_use(), BYTES);
    assert!(memory.effort().calls() > 0);
    let up = counted(&pinner);
    assert!(
        up >= before + BYTES,
        "{before} → {up} ({:?})",
        pinner.kind()
    );

    // The device sees the pages in the order of their offsets.
    let runs = runs_of(&space, Span::new(AT, whole.len));
    let mut offset = 0;
    let pieces: Vec<_> = runs
        .iter()
        .map(|run| {
            let words = &mapping.cells()[offset / 8..offset / 8 + run.len as usize / 8];
            offset += run.len as usize;
            (run.start, words)
        })
        .collect();
    let data = RunMap::new(pieces).unwrap();
    // The unit's data is borrowed, which an attached unit's must not be: by hand then.
    let unit = SoftwareUnit::new(tables.clone(), data);
    let device = DeviceId::pci(0, 5, 0);
    iommu::Unit::attach(
        &unit,
        device,
        DomainId(1),
        space.with_table(|table| table.root()).unwrap(),
    )
    .unwrap();
    let mut words = vec![0; (BYTES / 8) as usize];
    unit.port(device).read(AT, &mut words).unwrap();
    assert!(words.iter().enumerate().all(|(n, word)| *word == n as u64));
    iommu::Unit::detach(&unit, device).unwrap();

    assert_eq!(space.unmap_all().unwrap().unpinned, BYTES);
    assert_eq!(counted(&pinner), before);
    assert_eq!(ledger.in_use(), 0);
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn the_kernel_counts_what_is_mapped_and_no_more_after_unmap() {
    let _turn = alone();
    let pinner = Pinner::probe(2 << 20).unwrap();
    if pinner.kind() == PinKind::Mlock {
        eprintln!("SKIPPED for io_uring, which is refused here; mlock only");
    }
    // VmPin for io_uring, VmLck for mlock.
    if let Some(room) = pinner.room().unwrap()
        && room < BYTES
    {
        eprintln!("SKIPPED: only {room} bytes may be locked here");
        return;
    }
    round(pinner, Backing::Anon4K);
    round(Pinner::mlock(2 << 20).unwrap(), Backing::Anon4K);
    round(Pinner::probe(2 << 20).unwrap(), Backing::Memfd);
}

#[test]
fn a_refused_map_leaves_the_kernel_s_counter_as_it_was() {
    let _turn = alone();
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    if pinner.room().unwrap().is_some_and(|room| room < BYTES) {
        eprintln!("SKIPPED: too little may be locked here");
        return;
    }
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, BYTES, None).unwrap());
    let frames = FrameSource::detect(&mapping);
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    let memory = Arc::new(HostMemory::with_pinner(mapping, pinner.clone(), frames));
    let object = Memory::new(memory.clone(), &ledger);
    let (space, tables) = space();
    let before = counted(&pinner);
    let part = Span::new(0, BYTES);
    // Write-only and executable is more than the format has: refused when all is pinned.
    let refused = space.map(AT, &object, part, Prot::EXECUTE);
    assert!(matches!(refused, Err(MapError::Table(_))));
    assert_eq!((counted(&pinner), ledger.in_use()), (before, 0));
    space.map(AT, &object, part, Prot::RW).unwrap();
    let held = counted(&pinner);
    // The same pages by another object are pages more.
    let other = Memory::new(memory, &ledger);
    let page = Span::new(0, 4096);
    let refused = space.map(2 * AT, &other, page, Prot::RW);
    assert!(matches!(refused, Err(MapError::OverLimit(_))));
    // With the same pinner they are pinned and charged already.
    space.map(2 * AT, &object, page, Prot::RW).unwrap();
    assert_eq!((counted(&pinner), ledger.in_use()), (held, BYTES));
    // Dropped with the area in it.
    drop(space);
    assert_eq!((counted(&pinner), ledger.in_use()), (before, 0));
    drop(tables);
}

/// The same as an ordinary user, in a process of its own, where this one is root.
#[test]
fn an_ordinary_user_maps_as_well() {
    let uid =
        std::fs::metadata("/proc/self").map(|proc| std::os::unix::fs::MetadataExt::uid(&proc));
    if uid.unwrap() != 0 {
        eprintln!("this is an ordinary user already");
        return;
    }
    // A copy where everybody may read it.
    let exe = std::env::temp_dir().join(format!("ioas-linux-test-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    let run = Command::new(&exe)
        .args([
            "--nocapture",
            "--test-threads=1",
            "--exact",
            "the_kernel_counts_what_is_mapped_and_no_more_after_unmap",
            "a_refused_map_leaves_the_kernel_s_counter_as_it_was",
        ])
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output();
    std::fs::remove_file(&exe).unwrap();
    match run {
        Err(error) => eprintln!("SKIPPED: no process of another user: {error}"),
        Ok(run) => {
            let (out, err) = (
                String::from_utf8_lossy(&run.stdout),
                String::from_utf8_lossy(&run.stderr),
            );
            eprintln!("as user {NOBODY}:\n{out}{err}");
            assert!(run.status.success());
            assert!(out.contains("2 passed"));
        }
    }
}
