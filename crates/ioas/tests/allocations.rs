//! Allocations, counted by the allocator: mapping takes a fixed batch, whatever the number of runs, and a handover from
//! another process takes as much as it says. The fuzz targets found a violation of the latter.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on stops"
)]

#[allow(dead_code, unreachable_pub, reason = "every test that counts has it")]
#[path = "../../../fuzz/src/allocated.rs"]
mod allocated;
#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use std::ops::ControlFlow;
use std::sync::Arc;

use allocated::{Counting, counted};
use ioas::{Cause, Ioas, Ledger, Memory, MemoryObject, PinFailed, Pinned, RunReader};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{Offset, Pa, PageSizes, Span};

#[global_allocator]
static ALLOCATOR: Counting<{ u64::MAX }> = Counting;

/// Runs of 64 KiB, no two of them neighbours, computed and not stored.
#[derive(Debug)]
struct Fragments {
    runs: u64,
}

const RUN: u64 = 64 << 10;

impl MemoryObject for Fragments {
    fn len(&self) -> u64 {
        self.runs * RUN
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Ok(Box::new(FragmentsPin { runs: self.runs }))
    }
}

#[derive(Debug)]
struct FragmentsPin {
    runs: u64,
}

impl Pinned for FragmentsPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        let next = part.start / RUN..(part.start + part.len) / RUN;
        Ok(Box::new(FragmentsReader { next }))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.runs -= part.len / RUN;
        Ok(self.runs * RUN)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.runs * RUN)
    }
}

struct FragmentsReader {
    next: std::ops::Range<u64>,
}

impl RunReader for FragmentsReader {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let mut count = 0;
        for (slot, n) in out.iter_mut().zip(&mut self.next) {
            *slot = Span::new((1 << 40) + n * 2 * RUN, RUN);
            count += 1;
        }
        Ok(count)
    }
}

/// Allocations of map and unmap of so many runs.
fn measure(runs: u64) -> [(u64, u64); 2] {
    // Room for its 4K leaves, and some for the levels above.
    let tables = ((runs * RUN) >> 21) * 9 / 8 + 16;
    let tables = Arc::new(HeapTables::with_tables(tables).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    let (space, bytes, _) = counted(|| Ioas::over_table(DomainId(1), table));
    assert!(
        bytes <= 66 << 10,
        "{bytes} bytes for the batch of 64 KiB and room for a few domains"
    );
    let memory = Memory::new(Arc::new(Fragments { runs }), &Ledger::unlimited());
    let len = memory.len();
    let map = || space.map(1 << 40, &memory, Span::new(0, len), Prot::RW);
    let (result, bytes, calls) = counted(map);
    result.unwrap();
    let map = (bytes, calls);
    assert_eq!(space.leaf_at((1 << 40) + len - 1).unwrap().run.len, 4096);
    let (result, bytes, calls) = counted(|| space.unmap_all());
    assert_eq!(result.unwrap().bytes, len);
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
    [map, (bytes, calls)]
}

#[test]
fn a_million_runs_take_no_more_memory_than_a_few() {
    // A thread that reads tables for the first time gets a place for that.
    measure(16);
    let few = measure(16);
    // 64 GiB.
    let many = measure(1 << 20);
    assert_eq!(few, many, "[map, unmap]: (bytes, calls)");
    let [(map, map_calls), (unmap, unmap_calls)] = many;
    assert!(map <= 8192 && unmap <= 1024, "{many:?}");
    assert!(map_calls <= 17 && unmap_calls <= 8, "{many:?}");
}

replay::tests!("ioas", fuzz_bodies::TARGETS, changed);
