//! Much memory in the smallest leaves: a source no two pages of which are neighbours.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use ioas::{Cause, Ioas, Ledger, Memory, MemoryObject, PinFailed, Pinned, RunReader};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{Offset, Pa, PageSizes, Span};

use crate::any;

const PAGE: u64 = 4096;

/// So many bytes; every page lies behind the one that follows it.
#[derive(Debug)]
struct Scattered(u64);

#[derive(Debug)]
struct Held(u64);

impl MemoryObject for Scattered {
    fn len(&self) -> u64 {
        self.0
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Ok(Box::new(Held(part.len)))
    }
}

impl Pinned for Held {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        Ok(Box::new(Runs(part)))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.0 -= part.len;
        Ok(self.0)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.0)
    }
}

struct Runs(Span<Offset>);

/// Where the page at `offset` lies.
const fn frame(offset: u64) -> u64 {
    offset ^ PAGE
}

impl RunReader for Runs {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let mut count = 0;
        for slot in out.iter_mut().take((self.0.len / PAGE) as usize) {
            *slot = Span::new(frame(self.0.start), PAGE);
            self.0 = Span::new(self.0.start + PAGE, self.0.len - PAGE);
            count += 1;
        }
        Ok(count)
    }
}

/// The tables that `bytes` from an address on take that is a multiple of all their sizes: one for each
/// 2 MiB, 1 GiB and 512 GiB, and the root.
const fn expected(bytes: u64) -> u64 {
    bytes.div_ceil(2 << 20) + bytes.div_ceil(1 << 30) + bytes.div_ceil(512 << 30) + 1
}

/// Maps and unmaps `gib` GiB.
pub(crate) fn mapped(gib: u64) -> anyhow::Result<String> {
    let bytes = gib << 30;
    let room = expected(bytes) + 1;
    let tables = Arc::new(HeapTables::with_tables(room).map_err(any)?);
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).map_err(any)?;
    let space = Ioas::over_table(DomainId(1), table);
    let ledger = Ledger::unlimited();
    let memory = Memory::new(Arc::new(Scattered(bytes)), &ledger);
    let iova = 1 << 40;
    let begun = Instant::now();
    let whole = Span::new(0, bytes);
    space.map(iova, &memory, whole, Prot::RW)?;
    let map = begun.elapsed();
    let (in_use, expected) = (tables.in_use(), expected(bytes));
    ensure!(in_use == expected, "{in_use} tables, and not {expected}");
    for offset in [0, bytes / 2, bytes - PAGE] {
        let leaf = space.leaf_at(iova + offset).map(|leaf| leaf.run);
        let right = leaf.is_some_and(|run| (run.pa, run.len) == (frame(offset), PAGE));
        ensure!(right, "at {offset:#x}: {leaf:?}");
    }
    let begun = Instant::now();
    space.unmap_all()?;
    let unmap = begun.elapsed();
    ensure!(
        tables.in_use() == 1 && ledger.in_use() == 0,
        "something is left"
    );
    space.close()?;
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e9 / (bytes / PAGE) as f64;
    Ok(format!(
        "{in_use} table pages, as computed ({} MiB); map {:.2} s ({:.2} ns a leaf), unmap {:.2} s ({:.2} ns a leaf)",
        (in_use * PAGE) >> 20,
        map.as_secs_f64(),
        each(map),
        unmap.as_secs_f64(),
        each(unmap)
    ))
}
