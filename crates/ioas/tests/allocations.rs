//! Mapping takes a fixed batch, whatever the number of runs: counted by the allocator.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use ioas::{Cause, Ioas, Ledger, Memory, MemoryObject, PinFailed, Pinned, RunReader};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

struct Counting;

thread_local! {
    // Of this thread alone: the test harness allocates when it likes.
    static BYTES: Cell<u64> = const { Cell::new(0) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) {
    BYTES.set(BYTES.get() + bytes as u64);
    CALLS.set(CALLS.get() + 1);
}

// SAFETY: every call goes to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise is the one that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// What `f` allocates: bytes and calls.
fn counted<T>(f: impl FnOnce() -> T) -> (T, u64, u64) {
    let before = (BYTES.get(), CALLS.get());
    let value = f();
    let after = (BYTES.get(), CALLS.get());
    (value, after.0 - before.0, after.1 - before.1)
}

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

    fn charge(&self, part: Span) -> u64 {
        part.len
    }

    fn pin(
        &self,
        _part: Span,
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
    fn runs(&self, part: Span) -> Result<Box<dyn RunReader + '_>, Cause> {
        let next = part.start / RUN..(part.start + part.len) / RUN;
        Ok(Box::new(FragmentsReader { next }))
    }

    fn release(&mut self, part: Span) -> Result<u64, Cause> {
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
    fn next_batch(&mut self, out: &mut [Span]) -> Result<usize, Cause> {
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
    let (mut space, bytes, _) = counted(|| Ioas::new(DomainId(1), table));
    assert!(
        bytes <= 66 << 10,
        "{bytes} bytes for the batch of 64 KiB and room for a few domains"
    );
    let memory = Memory::new(Arc::new(Fragments { runs }), &Ledger::unlimited());
    let len = memory.len();
    let map = || space.map(1 << 40, &memory, Span::new(0, len), Prot::RW, &mut ());
    let (result, bytes, calls) = counted(map);
    result.unwrap();
    let map = (bytes, calls);
    assert_eq!(space.leaf_at((1 << 40) + len - 1).unwrap().run.len, 4096);
    let (result, bytes, calls) = counted(|| space.unmap_all(&mut ()));
    assert_eq!(result.unwrap().bytes, len);
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
    [map, (bytes, calls)]
}

#[test]
fn a_million_runs_take_no_more_memory_than_a_few() {
    let few = measure(16);
    // 64 GiB.
    let many = measure(1 << 20);
    assert_eq!(few, many, "[map, unmap]: (bytes, calls)");
    let [(map, map_calls), (unmap, unmap_calls)] = many;
    assert!(map <= 8192 && unmap <= 1024, "{many:?}");
    assert!(map_calls <= 16 && unmap_calls <= 8, "{many:?}");
}
