//! Tables that the engine builds, walked by the unit: data arrives where it should in every format,
//! and nowhere else.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use iommu::{DeviceId, DomainId, FaultReason, RunMap, SoftwareUnit, Unit};
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
    let mut table = AnyTable::new(format, levels, sizes, tables.clone()).unwrap();

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
        .unmap(Span::new(iova, len), &mut gather, &mut iopt::Discard)
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
