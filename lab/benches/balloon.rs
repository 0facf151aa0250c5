//! What a balloon's look for the areas over a run costs, by how many areas an address space has.
//!
//! Memory of 2 GiB is mapped in areas of 4 KiB, as an IOMMU's driver in a guest does, beside one area
//! over 2 MiB of another memory, which goes through the balloon: released and restored again and again.
//! Nothing is attached, so that tables and flushes do not count. Nanoseconds for one release with its
//! return, and, beside it, for a look at all areas, as it would be without an index; the best of five
//! rounds.
//! `cargo bench -p dmaspace-lab --bench balloon`; without `--bench` (as `cargo test --benches` runs it) few
//! rounds.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use dmaspace::balloon::BalloonDma;
use ioas::{Ioas, Ledger, Memory, Synthetic};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};
use virtio_balloon::{Dma, MemoryMap, Part, Region};

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const GUEST: u64 = 1 << 40;

/// Nanoseconds of one call, the best of five rounds.
fn best(times: u32, mut call: impl FnMut()) -> u128 {
    let rounds = (0..5).map(|_| {
        let begin = Instant::now();
        (0..times).for_each(|_| call());
        begin.elapsed().as_nanos() / u128::from(times)
    });
    rounds.min().unwrap_or(0)
}

fn measure(areas: u64, times: u32) -> [u128; 2] {
    let ledger = Ledger::new("a counter", None, 0);
    let memory = |at, len| Memory::new(Arc::new(Synthetic::new([Span::new(at, len)])), &ledger);
    let (others, block) = (memory(1 << 36, (areas + 1) * PAGE), memory(1 << 44, BLOCK));
    let tables = Arc::new(HeapTables::with_tables(1024).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap();
    let space = Ioas::new(DomainId(1), table);
    space
        .map(GUEST, &block, Span::new(0, BLOCK), Prot::RW, &mut ())
        .unwrap();
    for nr in 0..areas {
        // Never contiguous: these stay areas of their own.
        let part = Span::new(nr * PAGE, PAGE);
        space
            .map(2 * nr * PAGE, &others, part, Prot::RW, &mut ())
            .unwrap();
    }
    let mut balloon = BalloonDma::new();
    let regions = [(0, others), (GUEST, block)].map(|(at, memory)| Region {
        guest: Span::new(at, memory.len()),
        page: PAGE,
        memory,
    });
    let map = MemoryMap::new(&regions).unwrap();
    let space = Arc::new(space);
    balloon.add_space(space.clone());
    let part = Part::new(1, Span::new(0, BLOCK));
    let mut told = |part: Part, reason| unreachable!("{part:?}: {reason}");
    let ours = best(times, || {
        balloon.release(map, &[part], &mut told);
        balloon.restore(map, &[part], &mut told);
    });
    let all = best(times, || {
        let over = space
            .areas()
            .into_iter()
            .filter(|area| area.part().overlaps(&part.offsets));
        black_box(over.count());
    });
    [ours, all]
}

fn main() {
    let times = match std::env::args().any(|arg| arg == "--bench") {
        true => 100,
        false => 1,
    };
    println!("{:>14} {:>20} {:>16}", "", "release, restore", "all areas");
    for areas in [1, 1024, 65_536] {
        let [ours, all] = measure(areas, times);
        println!("{areas:>8} areas {ours:>17} ns {all:>13} ns");
    }
}
