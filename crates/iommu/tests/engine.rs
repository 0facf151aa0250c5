//! Tables that the engine builds, walked by the unit: data arrives where it should in every format,
//! and nowhere else.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use iommu::{DeviceId, DomainId, FaultReason, RunMap, SoftwareConfig, SoftwareUnit, Unit};
use iopt::{AnyTable, FormatId, Gather, HeapTables, Prot};
use runs::{PageSizes, Span};

const BASE: u64 = 0x8000_0000;
const BYTES: u64 = 8 << 20;

#[test]
fn dma_through_the_engine_s_tables_reaches_every_byte_and_no_neighbour() {
    for (format, levels) in [
        (FormatId::AmdV1, 3),
        (FormatId::AmdV1, 6),
        (FormatId::X86_64, 4),
        (FormatId::X86_64, 5),
        (FormatId::VtdSs, 3),
        (FormatId::VtdSs, 5),
    ] {
        for sizes in [
            PageSizes::from_bits(4096),
            PageSizes::from_log2_range(12, 63),
        ] {
            dma(format, levels, sizes);
        }
    }
}

fn dma(format: FormatId, levels: u8, sizes: PageSizes) {
    // Each word holds its offset in the memory object.
    let memory: Vec<AtomicU64> = (0..BYTES / 8).map(|n| AtomicU64::new(n * 8)).collect();
    let data = RunMap::new([(BASE, memory)]).unwrap();
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    let table = AnyTable::new(format, levels, sizes, tables.clone()).unwrap();

    // 2 MiB, 64 KiB, 12 KiB: in another order than in memory.
    let runs = [
        Span::new(BASE + (4 << 20), 2 << 20),
        Span::new(BASE + (1 << 20), 64 << 10),
        Span::new(BASE + 0x3000, 0x3000),
    ];
    let iova = 6 << 20;
    let len: u64 = runs.iter().map(|run| run.len).sum();
    table.map(iova, &runs, Prot::RW).unwrap();

    let unit = SoftwareUnit::new(tables, data);
    let (device, domain) = (DeviceId::pci(1, 2, 3), DomainId(9));
    unit.attach(device, domain, table.root()).unwrap();
    let mut port = unit.port(device);
    let mut words = vec![0; len as usize / 8];
    for _ in 0..2 {
        port.read(iova, &mut words).unwrap();
        let expected = runs
            .iter()
            .flat_map(|run| (run.start - BASE..run.start - BASE + run.len).step_by(8));
        assert!(
            words.iter().copied().eq(expected),
            "{format} {levels} {sizes}"
        );
        port.write(iova, &words).unwrap();
    }
    for outside in [iova - 8, iova + len] {
        let aborted = port.read(outside, &mut [0]).unwrap_err();
        assert!(
            matches!(aborted.fault.reason, FaultReason::Walk(_)),
            "{aborted}"
        );
    }

    let mut gather = Gather::new();
    table
        .alone()
        .unmap(Span::new(iova, len), &mut gather, &mut iopt::NoRuns)
        .unwrap();
    // Not flushed: what is cached is still there.
    assert!(port.read(iova, &mut [0]).is_ok());
    let flushed = gather
        .flush_with(|what| unit.invalidate(domain, what))
        .unwrap();
    table.reclaim(flushed);
    for at in (iova..iova + len).step_by(0x1000) {
        assert!(port.read(at, &mut [0]).is_err());
    }
    unit.detach(device).unwrap();
    assert_eq!(table.tables(), 1);
}

/// The unit learns of the new root by the flush alone, and the old one can then be used for
/// something else.
#[test]
fn a_table_that_grows_is_followed_by_the_unit_at_the_flush() {
    let words: Vec<AtomicU64> = (0..BYTES / 8).map(|n| AtomicU64::new(n * 8)).collect();
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let all = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::AmdV1, 1, all, tables.clone()).unwrap();
    let unit = SoftwareUnit::new(tables.clone(), RunMap::new([(BASE, words)]).unwrap());
    let (device, domain) = (DeviceId::pci(1, 2, 3), DomainId(9));
    unit.attach(device, domain, table.root()).unwrap();
    let mut port = unit.port(device);
    let mut read = |iova| {
        let mut word = [u64::MAX];
        port.read(iova, &mut word).map(|()| word[0])
    };

    let (low, high) = (0x5000, 1 << 40);
    table
        .map(low, &[Span::new(BASE + 0x1000, 0x1000)], Prot::RW)
        .unwrap();
    assert_eq!(read(low).unwrap(), 0x1000);
    let mut gather = Gather::new();
    table.grow(5, &mut gather).unwrap();
    table
        .map(high, &[Span::new(BASE + 0x2000, 0x1000)], Prot::RW)
        .unwrap();
    // Not flushed: the unit walks the old root.
    assert_eq!(read(low).unwrap(), 0x1000);
    assert!(read(high).is_err());
    // The old root goes before the gather of the growth is flushed. Its content is still there, and
    // so the unit must not go on in it.
    let mut other = Gather::new();
    table
        .alone()
        .unmap(Span::new(low, 0x1000), &mut other, &mut iopt::NoRuns)
        .unwrap();
    for gather in [&mut other, &mut gather] {
        let flushed = gather
            .flush_with(|what| unit.invalidate(domain, what))
            .unwrap();
        table.reclaim(flushed);
        assert!(read(low).is_err());
        assert_eq!(read(high).unwrap(), 0x2000);
    }
    assert_eq!(table.tables(), tables.in_use());
    table
        .map(low, &[Span::new(BASE + 0x3000, 0x1000)], Prot::RW)
        .unwrap();
    assert_eq!(read(low).unwrap(), 0x3000);
    // Devices that come later come to the same root.
    let second = DeviceId::pci(1, 2, 4);
    unit.attach(second, domain, table.root()).unwrap();
    let mut word = [0];
    unit.port(second).read(high, &mut word).unwrap();
    assert_eq!(word, [0x2000]);
    unit.detach(second).unwrap();
    unit.detach(device).unwrap();
}

/// A unit that cannot walk as many levels says so, and the gather waits.
#[test]
fn a_unit_that_cannot_walk_the_new_root_keeps_the_old_one() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let all = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::AmdV1, 3, all, tables.clone()).unwrap();
    let mut config = SoftwareConfig::default();
    for support in config.capabilities.formats.iter_mut().flatten() {
        if support.format == FormatId::AmdV1 {
            support.levels = 0b1000;
        }
    }
    let words: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
    let data = RunMap::new([(BASE, words)]).unwrap();
    let unit = SoftwareUnit::with_config(tables, data, config);
    let (device, domain) = (DeviceId::pci(1, 2, 3), DomainId(9));
    unit.attach(device, domain, table.root()).unwrap();
    table.map(0, &[Span::new(BASE, 0x1000)], Prot::RW).unwrap();
    let mut gather = Gather::new();
    table.grow(4, &mut gather).unwrap();
    let refused = gather
        .flush_with(|what| unit.invalidate(domain, what))
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the new root of domain 9: the unit walks no amdv1 tables of 4 levels, only of 3"
    );
    assert!(!gather.is_empty());
    let mut word = [9];
    unit.port(device).read(0, &mut word).unwrap();
    assert_eq!(word, [0]);
}
