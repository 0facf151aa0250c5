//! A table of any format, for programs that tell their units themselves.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use dmaspace::iopt::{AnyTable, FormatId, Gather};
use dmaspace::runs;

use crate::boundary::{Output, end, exclusive, guarded, input, values};
use crate::format::{Chosen, TableConfig};
use crate::status::{Result, Status};
use crate::table_memory::TableMemory;
use crate::translation::{Leaf, Root, Run, Span, leaf, prot};
use crate::unit::{Caller, Flush, Released};

/// A table of one format in the hardware's own layout. What it maps is the caller's: nothing is pinned
/// or charged, and units are told by the caller's callback.
#[derive(Debug)]
pub struct Table(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    table: AnyTable,
    /// What was unmapped, and not flushed yet.
    gather: Gather,
    /// The runs of that.
    removed: Vec<Run>,
}

/// What a table is like now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableInfo {
    /// What a unit is told to walk it. It does not change.
    pub root: Root,
    /// The sizes of its leaves: bit n is set when there are leaves of 2^n bytes.
    pub page_sizes: u64,
    /// Tables that it consists of, with those that wait for a flush.
    pub tables: u64,
}

/// Builds an empty table.
///
/// `config` says which; `memory` where, or NULL for 1 MiB that this library takes. Tables of "armv7-short",
/// whose entries have 4 bytes, lie in memory that this library takes.
///
/// `*table` is the caller's, to be destroyed by `dmaspace_table_destroy`.
///
/// Fails with ARGUMENT, FORMAT or TABLE_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_new(
    config: *const TableConfig,
    memory: *const TableMemory,
    table: *mut *mut Table,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (config, output) = unsafe { (input(config, "config")?, Output::new(table, "table")?) };
        // SAFETY: as above.
        let memory = unsafe { TableMemory::or_taken(memory) }?;
        // SAFETY: the name is the caller's.
        let chosen = unsafe { config.chosen() }?;
        // SAFETY: the caller answers for that memory.
        let table = unsafe { build(&chosen, &memory) }?;
        let inner = Inner {
            table,
            gather: Gather::new(),
            removed: Vec::new(),
        };
        output.put(Box::into_raw(Box::new(Table(Mutex::new(inner)))));
        Ok(())
    })
}

/// A table of the chosen format.
///
/// # Safety
///
/// As [`TableMemory::arena`].
unsafe fn build(chosen: &Chosen, memory: &TableMemory) -> Result<AnyTable> {
    let (format, levels, sizes) = (chosen.format(), chosen.levels(), chosen.sizes);
    let bits = chosen.address_bits();
    if format == FormatId::ArmV7s {
        let tables = Arc::new(memory.taken(bits)?);
        return Ok(AnyTable::new(format, levels, sizes, tables)?);
    }
    // SAFETY: the caller's promise, each time.
    let table = unsafe {
        match chosen.geometry.table_bytes {
            0x1_0000 => AnyTable::new(format, levels, sizes, memory.arena::<16>(bits)?),
            0x4000 => AnyTable::new(format, levels, sizes, memory.arena::<14>(bits)?),
            _ => AnyTable::new(format, levels, sizes, memory.arena::<12>(bits)?),
        }
    };
    Ok(table?)
}

/// Maps `count` stretches of physical memory from `iova` on, end to end, with the largest leaves that
/// fit: all or nothing. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on.
///
/// Units that remember what was not present must be told by the caller.
///
/// Fails with ARGUMENT, RANGE, OVERLAP, PROT, TABLE_MEMORY or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_map(
    table: *const Table,
    iova: u64,
    memory: *const Span,
    count: usize,
    prot: u32,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (table, spans) = unsafe { (input(table, "table")?, values(memory, count, "memory")?) };
        let prot = self::prot(prot)?;
        let spans: Vec<runs::Span<runs::Pa>> = spans.iter().map(|span| (*span).into()).collect();
        Ok(exclusive(&table.0, "table")?
            .table
            .map(iova, &spans, prot)?)
    })
}

/// Unmaps a range, all of which must be mapped, and has the units invalidate it.
///
/// `flush` is called once, and tells every unit that walks the table. Then `released`, unless it is NULL,
/// is called for each run that was mapped: only now the memory may be used for something else. Both get
/// `context`. `flush` may be NULL if no unit walks the table.
///
/// Fails with ARGUMENT, RANGE, NOT_MAPPED, CUTS or BUSY, and nothing has changed; or with FLUSH, when
/// `flush` has failed. Then the range is unmapped, but `released` has not been called: that waits for
/// `dmaspace_table_flush`, or the next unmap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_unmap(
    table: *const Table,
    iova: u64,
    len: u64,
    flush: Flush,
    released: Released,
    context: *mut c_void,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let table = unsafe { input(table, "table") }?;
        let inner = &mut *exclusive(&table.0, "table")?;
        let mut found = Vec::new();
        let range = runs::Span::new(iova, len);
        let gather = &mut inner.gather;
        // One call at a time.
        inner
            .table
            .alone()
            .unmap(range, gather, &mut |run: runs::Run| found.push(run.into()))?;
        inner.removed.append(&mut found);
        // SAFETY: the callbacks are the caller's.
        inner.flush(&unsafe { Caller::new(flush, released, context) })
    })
}

/// Maps at most `count` pages of `size` bytes, contiguous on both sides, by leaves of at most `size`: as many as lie in
/// one table. `*mapped` says how many are, also beside an error; a driver that is asked for more calls again from there.
///
/// Units that remember what was not present must be told by the caller.
///
/// Fails with ARGUMENT, RANGE, OVERLAP, PROT, TABLE_MEMORY or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_map_pages(
    table: *const Table,
    iova: u64,
    pa: u64,
    size: u64,
    count: u64,
    prot: u32,
    mapped: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (table, output) = unsafe { (input(table, "table")?, Output::new(mapped, "mapped")?) };
        let prot = self::prot(prot)?;
        let inner = exclusive(&table.0, "table")?;
        let progress = inner
            .table
            .map_pages(iova, runs::Span::new(pa, size), count, prot);
        output.put(progress.pages);
        Ok(progress.result?)
    })
}

/// Unmaps at most `count` pages of `size` bytes: as many as lie in one table. `*unmapped` says how many are, also beside an
/// error. Their memory may be used for something else once `dmaspace_table_flush` has succeeded; `released` is not called
/// for it.
///
/// Fails with ARGUMENT, RANGE, NOT_MAPPED, CUTS or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_unmap_pages(
    table: *const Table,
    iova: u64,
    size: u64,
    count: u64,
    unmapped: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (table, output) =
            unsafe { (input(table, "table")?, Output::new(unmapped, "unmapped")?) };
        let inner = &mut *exclusive(&table.0, "table")?;
        let owner = inner.table.alone();
        let progress = owner.unmap_pages(iova, size, count, &mut inner.gather);
        output.put(progress.pages);
        Ok(progress.result?)
    })
}

/// Has the units invalidate what was unmapped by pages, or when a flush failed, and calls `released` for the latter, as
/// `dmaspace_table_unmap` does. With nothing to invalidate neither is called.
///
/// Fails with ARGUMENT, BUSY or FLUSH.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_flush(
    table: *const Table,
    flush: Flush,
    released: Released,
    context: *mut c_void,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let table = unsafe { input(table, "table") }?;
        // SAFETY: the callbacks are the caller's.
        let caller = unsafe { Caller::new(flush, released, context) };
        exclusive(&table.0, "table")?.flush(&caller)
    })
}

impl Inner {
    fn flush(&mut self, caller: &Caller) -> Result<()> {
        let flushed = self.gather.flush_with(|what| caller.flush(what))?;
        self.table.reclaim(flushed);
        self.removed.drain(..).for_each(|run| caller.released(run));
        Ok(())
    }
}

/// The leaf that maps `iova`.
///
/// Fails with NOT_MAPPED, ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_translate(
    table: *const Table,
    iova: u64,
    found: *mut Leaf,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (table, output) = unsafe { (input(table, "table")?, Output::new(found, "found")?) };
        let inner = exclusive(&table.0, "table")?;
        output.put(leaf(inner.table.leaf_at(iova), iova)?);
        Ok(())
    })
}

/// Where the table begins, and what it is like now.
///
/// Fails with ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_get_info(
    table: *const Table,
    info: *mut TableInfo,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (table, output) = unsafe { (input(table, "table")?, Output::new(info, "info")?) };
        let table = &exclusive(&table.0, "table")?.table;
        output.put(TableInfo {
            root: table.root().into(),
            page_sizes: table.page_sizes().bits(),
            tables: table.tables(),
        });
        Ok(())
    })
}

/// Ends a table with all that is mapped, and frees it. No unit may walk it any more. NULL is fine.
///
/// Fails with ARGUMENT, BUSY or PANIC, and the table is still there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_table_destroy(table: *mut Table) -> Status {
    guarded(|| {
        let look = |table: &Table| exclusive(&table.0, "table").map(drop);
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(table, "table", look) }
    })
}
