//! The crate `iopt` inside a Linux kernel, in the place of its I/O page tables.
//!
//! `iommu_pt.h` (x86-64, RISC-V) and `io-pgtable-arm.c` (Arm) are the kernel's half: they implement what Linux's drivers call,
//! keep a table's root where Linux does, and call the functions below, of which `generic.rs` and `arm.rs` make those of each
//! format.
//! There is no allocator, and no code of a standard library but `core`.
//!
//! A [`Table`] lives as long as one operation: its root, the sizes of leaves and the flags of allocations come with
//! the call. Linux's contract is the only exclusion: operations that run at once have ranges that do not overlap
//! (`include/linux/generic_pt/iommu.h`), so that no guard, lock or RCU is needed ([`Table::unguarded`]), and an operation
//! in an interrupt waits for none that it has interrupted.
//!
//! Tables are pages of the kernel's allocator. While one is in no table, the list element in its `struct page` is the
//! [`Meta`] that chains it.

#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_arch = "aarch64")]
mod arm;
mod entry;
#[cfg(not(target_arch = "aarch64"))]
mod generic;
#[cfg(target_arch = "x86_64")]
mod mock;

use core::ffi::{c_int, c_uint, c_void};
use core::marker::PhantomData;
use core::panic::PanicInfo;
use core::slice;
use core::sync::atomic::AtomicU64;

use iopt::{
    AtomicMeta, BuildError, Cell as _, Chain, DirtyError, Format, Gather, NoRuns, NoTables,
    Reserve, Table, TableMapError, TableMemory, TableOps as _, TableUnmapError,
};
use runs::{Iova, PageSizes, Span};

use entry::Entry;

/// `struct device`.
enum Device {}

/// `struct dmaspace_call`.
#[repr(C)]
pub struct Call {
    top: u64,
    sizes: u64,
    bits: u64,
    device: *mut Device,
    node: c_int,
    gfp: c_uint,
}

/// `struct dmaspace_chain`.
#[repr(C)]
pub struct CChain {
    head: u64,
    count: u64,
    leaf_levels: u32,
    tables: u32,
}

// As in tables.h.
unsafe extern "C" {
    static dmaspace_direct: u64;
    static dmaspace_pages: u64;
    fn dmaspace_allocate(call: &Call, bytes: u64) -> u64;
    fn dmaspace_free(call: &Call, table: u64);
    fn dmaspace_flush(call: &Call, entries: *const c_void, bytes: usize);
    fn dmaspace_panic() -> !;
}

const EINVAL: c_int = 22;
const EAGAIN: c_int = 11;
const ENOMEM: c_int = 12;
const ENXIO: c_int = 6;
const ERANGE: c_int = 34;
const EADDRINUSE: c_int = 98;
const EOPNOTSUPP: c_int = 95;

/// Bytes of a `struct page`, and where in it the list element lies: tables.c says so, too.
const PAGE: u64 = 64;
const ELEMENT: u64 = 8;

/// For units that read memory through the processor's caches; for others, the bit of a link that says that it was flushed.
const COHERENT: u64 = 0;

/// The kernel's formats, by what stands in the lowest bits of the root's address in `struct dmaspace_call`.
trait Coded: Format {
    /// Value of those bits.
    const CODE: u64;
    /// Bits that make a leaf present, where the kernel's attributes do not say it.
    const PRESENT: u64;

    fn of(code: u64) -> Result<Self, BuildError>;
}

/// The memory of one operation: the kernel's pages.
#[derive(Clone, Copy)]
struct Pages<'c, F, const FLUSHED: u64> {
    direct: u64,
    pages: u64,
    call: &'c Call,
    format: PhantomData<F>,
}

impl<F: Format, const FLUSHED: u64> TableMemory for Pages<'_, F, FLUSHED> {
    type Cell = Entry;
    type Link = AtomicU64;
    type Count = core::sync::atomic::AtomicU32;

    const TABLE_BYTES: u64 = F::TABLE_BYTES;
    const FLUSHES: bool = FLUSHED != COHERENT;

    #[inline(always)]
    fn entries(&self, table: u64, count: usize) -> &[Entry] {
        let entries = self.direct.wrapping_add(table) as *const Entry;
        // SAFETY: the engine asks for the root that came with the call, and for addresses in entries of tables below it,
        // which it alone writes: pages that `reserve` gave out, in the direct map. They stay while the operation
        // that holds their range is under way (the contract of every function below).
        unsafe { slice::from_raw_parts(entries, count) }
    }

    #[inline(always)]
    fn meta(&self, table: u64) -> &AtomicMeta {
        let page = self.pages.wrapping_add((table >> 12) * PAGE);
        // SAFETY: as above; the element belongs to who holds the page, and nothing else uses it until the chain is
        // turned into a list.
        unsafe { &*(page.wrapping_add(ELEMENT) as *const AtomicMeta) }
    }

    fn last_address(&self) -> u64 {
        u64::MAX >> 12
    }

    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        let mut chain = Chain::empty();
        for had in 0..count {
            // SAFETY: it is the table of the call.
            match unsafe { dmaspace_allocate(self.call, Self::TABLE_BYTES) } {
                0 => {
                    self.reclaim(chain);
                    return Err(NoTables {
                        needed: count,
                        available: had,
                    });
                }
                table => chain.push(self, table),
            }
        }
        Ok(Reserve::of_zeroed(chain))
    }

    /// The kernel makes the root.
    fn allocate(&self, _bytes: usize) -> Result<u64, NoTables> {
        Err(NoTables {
            needed: 1,
            available: 0,
        })
    }

    fn give_back(&self, mut reserve: Reserve) {
        while let Some((table, _)) = reserve.take(self) {
            // SAFETY: it was reserved, and is in no table.
            unsafe { dmaspace_free(self.call, table) };
        }
    }

    fn reclaim(&self, chain: Chain) {
        self.give_back(Reserve::new(chain));
    }

    #[inline(always)]
    fn written(&self, entries: &[Entry]) {
        if Self::FLUSHES {
            // SAFETY: the entries are in a page of the direct map.
            unsafe { dmaspace_flush(self.call, entries.as_ptr().cast(), size_of_val(entries)) };
        }
        entry::order_for_units();
    }

    #[inline(always)]
    fn followed(&self, cell: &Entry) {
        let mut word = cell.get();
        if word & FLUSHED == 0 {
            self.written(slice::from_ref(cell));
            // Units set bits in links, too.
            while let Err(now) = cell.set_if(word, word | FLUSHED) {
                word = now;
            }
        }
    }
}

impl CChain {
    fn set(&mut self, chain: Chain, memory: &impl TableMemory) {
        // A chain is linked as this one is.
        self.count = chain.len();
        let mut chain = chain;
        self.head = chain.pop(memory).unwrap_or_default();
    }
}

/// The table of a call.
///
/// # Safety
///
/// `call.top` is the root of a table of this format, made by the kernel's half, and the caller of this operation has what
/// the head of this module says.
#[inline(always)]
unsafe fn table<F: Coded, const FLUSHED: u64>(
    call: &Call,
) -> Result<Table<F, Pages<'_, F, FLUSHED>>, BuildError> {
    let format = F::of(call.top & F::CODE)?;
    // SAFETY: written once, before the first table is made.
    let (direct, pages) = unsafe { (dmaspace_direct, dmaspace_pages) };
    let memory = Pages {
        direct,
        pages,
        call,
        format: PhantomData,
    };
    let root = (call.top & !F::CODE).wrapping_sub(direct);
    let sizes = PageSizes::from_bits(call.sizes);
    Ok(Table::at_root(format, memory, root, sizes))
}

#[cold]
fn not_mapped(error: &TableMapError) -> c_int {
    match error {
        TableMapError::Overlap { .. } => -EADDRINUSE,
        TableMapError::NoTables(_) => -ENOMEM,
        TableMapError::OutputTooWide { .. } => -ERANGE,
        _ => -ENXIO,
    }
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
#[inline(always)]
unsafe fn unmap<F: Coded, const FLUSHED: u64>(
    call: &Call,
    range: Span<Iova>,
    chain: &mut CChain,
) -> u64 {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return 0;
    };
    let mut gather = Gather::new();
    let bytes = match table.unguarded().unmap(range, &mut gather, &mut NoRuns) {
        Ok(()) => range.len,
        Err(_) => unmap_leaves(&table, range, &mut gather),
    };
    chain.leaf_levels = gather.invalidation().leaf_levels();
    chain.tables = gather.invalidation().tables_unlinked().into();
    chain.set(gather.never_walked().into_tables(), table.memory());
    bytes
}

/// Linux unmaps what there is up to the first hole, and a leaf whole that the range ends in.
#[cold]
fn unmap_leaves<F: Format, const FLUSHED: u64>(
    table: &Table<F, Pages<'_, F, FLUSHED>>,
    range: Span<Iova>,
    gather: &mut Gather,
) -> u64 {
    let mut end = range.start;
    while end.wrapping_sub(range.start) < range.len {
        match table.leaf_at(end) {
            Some(leaf) if leaf.run.iova == end => end = end.wrapping_add(leaf.run.len),
            _ => break,
        }
    }
    let leaves = Span::new(range.start, end.wrapping_sub(range.start));
    if leaves.len == 0 {
        return 0;
    }
    let unmapped: Result<(), TableUnmapError> =
        table.unguarded().unmap(leaves, gather, &mut NoRuns);
    if unmapped.is_ok() { leaves.len } else { 0 }
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
#[inline(always)]
unsafe fn translate<F: Coded>(top: u64, iova: u64) -> u64 {
    let call = Call {
        top,
        sizes: 0,
        bits: 0,
        device: core::ptr::null_mut(),
        node: 0,
        gfp: 0,
    };
    // SAFETY: as the caller promises. Nothing is stored, so that there is nothing to flush either.
    let table = unsafe { table::<F, COHERENT>(&call) };
    let found = table
        .ok()
        .and_then(|table| table.unguarded().translate(iova));
    found.unwrap_or_default()
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn dirty<F: Coded>(
    call: &Call,
    range: Span<Iova>,
    clean: bool,
    mut each: impl FnMut(Span<Iova>),
) -> c_int {
    // A harvest may begin and end at any address.
    let call = Call {
        sizes: u64::MAX,
        ..*call
    };
    // SAFETY: as the caller promises. Units that keep dirty bits read through the caches.
    let Ok(table) = (unsafe { table::<F, COHERENT>(&call) }) else {
        return -EINVAL;
    };
    let each = |leaves: Span<Iova>| {
        let cut = range.start.saturating_sub(leaves.start);
        each(Span::new(leaves.start + cut, leaves.len - cut));
    };
    let told = match clean {
        true => table.unguarded().take_dirty(range, each),
        false => table.peek_dirty(range, each),
    };
    match told {
        Ok(_) => 0,
        Err(DirtyError::Range(_)) => -ERANGE,
        Err(_) => -EOPNOTSUPP,
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: it takes nothing.
    unsafe { dmaspace_panic() }
}
