//! Cost of an access through the software unit.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]
#![allow(missing_docs, reason = "criterion makes public functions")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit, Unit};
use iopt::format::VtdSs;
use iopt::{HeapTables, Prot, Table, TableOps as _};
use runs::{PageSizes, Span};

const PAGES: u64 = 4096;
const BASE: u64 = 1 << 30;

fn port(criterion: &mut Criterion) {
    let memory: Vec<AtomicU64> = (0..PAGES * 512).map(AtomicU64::new).collect();
    let data = RunMap::new([(BASE, memory)]).unwrap();
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let sizes = PageSizes::from_bits(4096);
    let format = VtdSs::new(4).unwrap();
    let mut table = Table::with_page_sizes(format, tables.clone(), sizes).unwrap();
    table
        .map(0, &[Span::new(BASE, PAGES * 4096)], Prot::RW)
        .unwrap();
    let unit = SoftwareUnit::new(tables, data);
    let device = DeviceId::pci(0, 5, 0);
    unit.attach(device, DomainId(1), table.root()).unwrap();
    let mut port = unit.port(device);

    let mut group = criterion.benchmark_group("port");
    let mut word = [0];
    group.bench_function("hit, 8 bytes", |b| {
        b.iter(|| port.read(black_box(0x1000), &mut word).unwrap());
    });
    let mut page = [0];
    // Far more pages than the IOTLB holds, but few enough for the cache of upper levels.
    group.bench_function("miss, 8 bytes, one table read", |b| {
        b.iter(|| {
            page[0] = (page[0] + 1) % PAGES;
            port.read(page[0] * 4096, &mut word).unwrap();
        });
    });
    for (what, bytes) in [("4 KiB", 4 << 10), ("1 MiB", 1 << 20)] {
        let mut buffer = vec![0; bytes / 8];
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("read", what), |b| {
            b.iter(|| port.read(black_box(0x1000), &mut buffer).unwrap());
        });
        group.bench_function(BenchmarkId::new("write", what), |b| {
            b.iter(|| port.write(black_box(0x1000), &buffer).unwrap());
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("flush");
    group.bench_function("one page, nobody inside", |b| {
        let page = [Span::new(0x1000, 0x1000)];
        b.iter(|| {
            unit.invalidate_ranges(DomainId(1), &page, 1, false)
                .unwrap()
        });
    });
    group.bench_function("a domain, nobody inside", |b| {
        b.iter(|| unit.invalidate_domain(DomainId(1)).unwrap());
    });
    group.finish();
}

criterion_group!(benches, port);
criterion_main!(benches);
