//! The crate `iopt` inside a Linux kernel, in the place of its generic page tables.
//!
//! `iommu_pt.h` is the kernel's half: it implements what Linux's drivers call, keeps a table's root where Linux does,
//! and calls the functions below. There is no allocator, and no code of a standard library but `core`.
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

mod entry;
mod mock;

use core::ffi::{c_int, c_uint, c_void};
use core::panic::PanicInfo;
use core::slice;
use core::sync::atomic::AtomicU64;

use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::{
    AtomicMeta, BuildError, Cell as _, Chain, DirtyError, Format, Gather, NoRuns, NoTables,
    Reserve, Table, TableMapError, TableMemory, TableUnmapError,
};
use runs::{Iova, PageSizes, Span};

use entry::Entry;
use mock::Mock;

/// `struct pt_iommu`.
enum Opaque {}

/// `struct dmaspace_call`.
#[repr(C)]
pub struct Call {
    top: u64,
    sizes: u64,
    bits: u64,
    iommu: *mut Opaque,
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
    fn dmaspace_allocate(iommu: *mut Opaque, gfp: c_uint) -> u64;
    fn dmaspace_free(iommu: *mut Opaque, table: u64);
    fn dmaspace_flush(iommu: *mut Opaque, entries: *const c_void, bytes: usize);
    fn dmaspace_panic() -> !;
}

const EINVAL: c_int = 22;
const ENOMEM: c_int = 12;
const ENXIO: c_int = 6;
const ERANGE: c_int = 34;
const EADDRINUSE: c_int = 98;
const EAGAIN: c_int = 11;
const EOPNOTSUPP: c_int = 95;

/// Bytes of a `struct page`, and where in it the list element lies: iommu_pt.h says so, too.
const PAGE: u64 = 64;
const ELEMENT: u64 = 8;

/// For units that read memory through the processor's caches.
const COHERENT: u64 = 0;
/// For others: the bit of a link that says that it was flushed. Units ignore it (VT-d specification, revision 5.0, sections
/// 9.8 and 9.7), and so does Linux's driver when it shows tables: not so those from 52 on.
const VTDSS_FLUSHED: u64 = 1 << 10;
const X86_64_FLUSHED: u64 = 1 << 9;

/// The levels in `struct dmaspace_call`.
const LEVEL: u64 = 7;

/// The memory of one operation: the kernel's pages.
#[derive(Clone, Copy)]
struct Pages<const FLUSHED: u64> {
    direct: u64,
    pages: u64,
    iommu: *mut Opaque,
    gfp: c_uint,
}

impl<const FLUSHED: u64> TableMemory for Pages<FLUSHED> {
    type Cell = Entry;
    type Link = AtomicU64;
    type Count = core::sync::atomic::AtomicU32;

    const TABLE_BYTES: u64 = 4096;
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
            match unsafe { dmaspace_allocate(self.iommu, self.gfp) } {
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
            unsafe { dmaspace_free(self.iommu, table) };
        }
    }

    fn reclaim(&self, chain: Chain) {
        self.give_back(Reserve::new(chain));
    }

    #[inline(always)]
    fn written(&self, entries: &[Entry]) {
        if Self::FLUSHES {
            // SAFETY: the entries are in a page of the direct map.
            unsafe { dmaspace_flush(self.iommu, entries.as_ptr().cast(), size_of_val(entries)) };
        }
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

/// The kernel's formats, by the number of levels.
trait Levels: Format {
    /// What makes a leaf present: Linux's attributes do not say it.
    const PRESENT: u64;

    fn with_levels(levels: u8) -> Result<Self, BuildError>;
}

impl Levels for VtdSs {
    const PRESENT: u64 = 0;

    #[inline(always)]
    fn with_levels(levels: u8) -> Result<Self, BuildError> {
        Self::new(levels)
    }
}

impl Levels for AmdV1 {
    const PRESENT: u64 = 1;

    #[inline(always)]
    fn with_levels(levels: u8) -> Result<Self, BuildError> {
        Self::new(levels)
    }
}

impl Levels for X86_64 {
    const PRESENT: u64 = 1;

    #[inline(always)]
    fn with_levels(levels: u8) -> Result<Self, BuildError> {
        Self::new(levels)
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
/// `call.top` is the root of a table of this format, made by `iommu_pt.h`, and the caller of this operation has what the
/// head of this module says.
#[inline(always)]
unsafe fn table<F: Levels, const FLUSHED: u64>(
    call: &Call,
) -> Result<Table<F, Pages<FLUSHED>>, BuildError> {
    let format = F::with_levels((call.top & LEVEL) as u8 + 1)?;
    // SAFETY: written once, before the first table is made.
    let (direct, pages) = unsafe { (dmaspace_direct, dmaspace_pages) };
    let memory = Pages {
        direct,
        pages,
        iommu: call.iommu,
        gfp: call.gfp,
    };
    let root = (call.top & !LEVEL).wrapping_sub(direct);
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
unsafe fn map<F: Levels, const FLUSHED: u64>(
    call: &Call,
    iova: u64,
    run: Span<runs::Pa>,
    chain: &mut CChain,
) -> c_int {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return -EINVAL;
    };
    let inside = table.unguarded();
    // Where a large leaf fits, an empty table may be in its place.
    let mapped = if run.len >> F::shift(1) == 0 {
        inside.map_leaves(iova, &[run], call.bits | F::PRESENT)
    } else {
        let mut gather = Gather::new();
        let mapped = inside.map_leaves_anew(iova, &[run], call.bits | F::PRESENT, &mut gather);
        chain.set(gather.never_walked().into_tables(), table.memory());
        mapped
    };
    match mapped {
        Ok(()) => 0,
        Err(error) => not_mapped(&error),
    }
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
#[inline(always)]
unsafe fn unmap<F: Levels, const FLUSHED: u64>(
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
    table: &Table<F, Pages<FLUSHED>>,
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
unsafe fn translate<F: Levels>(top: u64, iova: u64) -> u64 {
    let call = Call {
        top,
        sizes: 0,
        bits: 0,
        iommu: core::ptr::null_mut(),
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
unsafe fn dirty<F: Levels>(
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

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn set_dirty<F: Levels>(call: &Call, iova: u64) -> c_int {
    let call = Call {
        sizes: u64::MAX,
        ..*call
    };
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, COHERENT>(&call) }) else {
        return -EINVAL;
    };
    let page = 1u64 << F::shift(0);
    match table.set_dirty(Span::new(iova & !(page - 1), page)) {
        Ok(bytes) if bytes > 0 => 0,
        Ok(_) => -EAGAIN,
        Err(_) => -EINVAL,
    }
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn raise<F: Levels>(call: &Call, levels: u8, root: &mut u64, chain: &mut CChain) -> c_int {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, COHERENT>(call) }) else {
        return -EINVAL;
    };
    match table.raised(levels) {
        Ok((new, added)) => {
            *root = new;
            chain.set(added, table.memory());
            0
        }
        Err(BuildError::NoTables(_)) => -ENOMEM,
        Err(_) => -ERANGE,
    }
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn collect<F: Levels>(call: &Call, chain: &mut CChain) {
    // SAFETY: as the caller promises.
    if let Ok(table) = unsafe { table::<F, COHERENT>(call) } {
        #[cfg(planted)]
        read_what_was_freed(table.memory());
        let (gather, memory) = table.tear_down();
        chain.set(gather.never_walked().into_tables(), &memory);
    }
}

/// A fault that a kernel with KASAN is to find: `cargo xtask linux --full --planted`.
#[cfg(planted)]
fn read_what_was_freed(memory: &impl TableMemory<Cell = Entry>) {
    let Ok(mut reserve) = memory.reserve(1) else {
        return;
    };
    if let Some((table, _)) = reserve.take(memory) {
        let mut chain = Chain::empty();
        chain.push(memory, table);
        memory.reclaim(chain);
        core::hint::black_box(memory.entries(table, 1).first().map(Entry::get));
    }
}

/// The functions of a format that store to linked tables, for units that read memory through the processor's caches or
/// past them.
macro_rules! mapping {
    ($($format:ty, $flushed:ident: $map:ident $unmap:ident)*) => {$(
        /// # Safety
        ///
        /// See [`table`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $map(
            call: &Call,
            iova: u64,
            pa: u64,
            len: u64,
            chain: &mut CChain,
        ) -> c_int {
            // SAFETY: as the caller promises.
            unsafe { map::<$format, $flushed>(call, iova, Span::new(pa, len), chain) }
        }

        /// # Safety
        ///
        /// See [`table`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $unmap(
            call: &Call,
            iova: u64,
            len: u64,
            chain: &mut CChain,
        ) -> u64 {
            // SAFETY: as the caller promises.
            unsafe { unmap::<$format, $flushed>(call, Span::new(iova, len), chain) }
        }
    )*};
}

mapping! {
    AmdV1, COHERENT: dmaspace_amdv1_map dmaspace_amdv1_unmap
    Mock, COHERENT: dmaspace_amdv1_mock_map dmaspace_amdv1_mock_unmap
    VtdSs, COHERENT: dmaspace_vtdss_map dmaspace_vtdss_unmap
    VtdSs, VTDSS_FLUSHED: dmaspace_vtdss_map_incoherent dmaspace_vtdss_unmap_incoherent
    X86_64, COHERENT: dmaspace_x86_64_map dmaspace_x86_64_unmap
    X86_64, X86_64_FLUSHED: dmaspace_x86_64_map_incoherent dmaspace_x86_64_unmap_incoherent
}

/// All others.
macro_rules! functions {
    ($(
        $format:ty: $translate:ident $dirty:ident $set_dirty:ident $raise:ident $collect:ident $sizes:ident
    )*) => {$(
        /// # Safety
        ///
        /// See [`table`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $translate(top: u64, iova: u64) -> u64 {
            // SAFETY: as the caller promises.
            unsafe { translate::<$format>(top, iova) }
        }

        /// # Safety
        ///
        /// See [`table`]; `each` may be called with `to`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $dirty(
            call: &Call,
            iova: u64,
            len: u64,
            clean: bool,
            each: unsafe extern "C" fn(*mut c_void, u64, u64),
            to: *mut c_void,
        ) -> c_int {
            let range = Span::new(iova, len);
            // SAFETY: as the caller promises.
            let each = |leaves: Span<Iova>| unsafe { each(to, leaves.start, leaves.len) };
            // SAFETY: as the caller promises.
            unsafe { dirty::<$format>(call, range, clean, each) }
        }

        /// # Safety
        ///
        /// See [`table`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $set_dirty(call: &Call, iova: u64) -> c_int {
            // SAFETY: as the caller promises.
            unsafe { set_dirty::<$format>(call, iova) }
        }

        /// # Safety
        ///
        /// See [`table`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $raise(
            call: &Call,
            levels: u8,
            root: &mut u64,
            chain: &mut CChain,
        ) -> c_int {
            // SAFETY: as the caller promises.
            unsafe { raise::<$format>(call, levels, root, chain) }
        }

        /// # Safety
        ///
        /// See [`table`]; nothing uses the table any more.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $collect(call: &Call, chain: &mut CChain) {
            // SAFETY: as the caller promises.
            unsafe { collect::<$format>(call, chain) }
        }

        /// The sizes of leaves of a table with so many levels.
        #[unsafe(no_mangle)]
        pub extern "C" fn $sizes(levels: u8) -> u64 {
            <$format>::page_sizes(levels.min(<$format>::MAX_LEVELS)).bits()
        }
    )*};
}

functions! {
    AmdV1: dmaspace_amdv1_translate dmaspace_amdv1_dirty dmaspace_amdv1_set_dirty dmaspace_amdv1_raise
        dmaspace_amdv1_collect dmaspace_amdv1_sizes
    Mock: dmaspace_amdv1_mock_translate dmaspace_amdv1_mock_dirty dmaspace_amdv1_mock_set_dirty
        dmaspace_amdv1_mock_raise dmaspace_amdv1_mock_collect dmaspace_amdv1_mock_sizes
    VtdSs: dmaspace_vtdss_translate dmaspace_vtdss_dirty dmaspace_vtdss_set_dirty dmaspace_vtdss_raise
        dmaspace_vtdss_collect dmaspace_vtdss_sizes
    X86_64: dmaspace_x86_64_translate dmaspace_x86_64_dirty dmaspace_x86_64_set_dirty dmaspace_x86_64_raise
        dmaspace_x86_64_collect dmaspace_x86_64_sizes
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: it takes nothing.
    unsafe { dmaspace_panic() }
}
