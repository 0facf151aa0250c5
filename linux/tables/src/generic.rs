//! The functions of each format that Linux's generic page tables have on this architecture, as `tables.h` declares them.

use core::convert::Infallible;
use core::ffi::{c_int, c_void};
use core::slice;

#[cfg(target_arch = "riscv64")]
use iopt::format::RiscV;
#[cfg(target_arch = "x86_64")]
use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::{
    Bound, BuildError, Format, Gather, Interruption, Invalidation, ResizeError, TableMemory as _,
    TableOps as _,
};
#[cfg(planted)]
use iopt::{Cell as _, Chain, TableMemory};
use runs::{Iova, Pa, PageSizes, Run, Span};

#[cfg(planted)]
use crate::entry::Entry;
#[cfg(target_arch = "x86_64")]
use crate::mock::Mock;
use crate::{
    CChain, COHERENT, Call, Coded, EAGAIN, EINVAL, ENOMEM, EOPNOTSUPP, ERANGE, dirty, not_mapped,
    table, translate, unmap,
};

/// The bit of a link that says that it was flushed. Units ignore it (VT-d specification, revision 5.0, sections 9.8 and
/// 9.7), and so does Linux's driver when it shows tables: not so those from 52 on.
#[cfg(target_arch = "x86_64")]
const VTDSS_FLUSHED: u64 = 1 << 10;
#[cfg(target_arch = "x86_64")]
const X86_64_FLUSHED: u64 = 1 << 9;

macro_rules! by_level {
    ($($format:ty, present $present:literal;)*) => {$(
        impl Coded for $format {
            /// The root's level.
            const CODE: u64 = 7;
            const PRESENT: u64 = $present;

            #[inline(always)]
            fn of(code: u64) -> Result<Self, BuildError> {
                Self::new(code as u8 + 1)
            }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
by_level! {
    VtdSs, present 0;
    AmdV1, present 1;
    Mock, present 1;
    X86_64, present 1;
}

#[cfg(target_arch = "riscv64")]
by_level! {
    RiscV, present 1;
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
#[inline(always)]
unsafe fn map<F: Coded, const FLUSHED: u64>(
    call: &Call,
    iova: u64,
    runs: &[Span<Pa>],
    chain: &mut CChain,
) -> c_int {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return -EINVAL;
    };
    let mut inside = table.unguarded();
    // Where a large leaf fits, an empty table may be in its place.
    let mapped = if runs.iter().all(|run| run.len >> F::shift(1) == 0) {
        inside.map_leaves(iova, runs, call.bits | F::PRESENT)
    } else {
        let mut gather = Gather::new();
        let mapped = inside.map_leaves_anew(iova, runs, call.bits | F::PRESENT, &mut gather);
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
unsafe fn unmap_runs<F: Coded, const FLUSHED: u64>(
    call: &Call,
    range: Span<Iova>,
    bound: Bound,
    chain: &mut CChain,
    each: impl Fn(Span<Pa>),
) -> u64 {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return 0;
    };
    let mut gather = Gather::new();
    let mut taken = |run: Run| each(Span::new(run.pa, run.len));
    // The kernel's caller sees by the bytes where a hole has ended it.
    let unmapped = (table.unguarded()).unmap_some(range, bound, &mut gather, &mut taken);
    chain.leaf_levels = gather.invalidation().leaf_levels();
    chain.tables = gather.invalidation().tables_unlinked().into();
    chain.set(gather.never_walked().into_tables(), table.memory());
    unmapped.bytes
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`]; the caller holds the leaves that reach over the ends, too.
unsafe fn resize<F: Coded, const FLUSHED: u64>(
    call: &Call,
    range: Span<Iova>,
    largest: u64,
    flush: impl Fn(Span<Iova>, &Invalidation),
) -> c_int {
    // New leaves have these sizes at most, and none that the root has no level for; old ones may be larger.
    let levels = (call.top & F::CODE) as u8 + 1;
    let sizes = PageSizes::from_bits(call.sizes).and(F::page_sizes(levels));
    let sizes = match range.len {
        0 => sizes,
        _ => sizes.up_to(largest),
    };
    let call = Call {
        sizes: sizes.bits(),
        ..*call
    };
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(&call) }) else {
        return -EINVAL;
    };
    let mut flush = |what: &Invalidation| {
        let all = what.ranges().iter().copied();
        flush(all.reduce(around).unwrap_or(range), what);
        Ok::<_, Infallible>(())
    };
    let mut inside = table.unguarded();
    let (gather, refused) = (&mut Gather::new(), Interruption::Refused);
    let resized = match range.len {
        0 => inside.cut(range.start, refused, gather, &mut flush),
        _ => {
            let split = inside.split(range, sizes.largest(), refused, gather, &mut flush);
            split.and_then(|()| inside.merge(range, refused, gather, &mut flush))
        }
    };
    match resized {
        Ok(()) => 0,
        // Nothing is mapped beyond what the root translates.
        Err(ResizeError::Range(_)) if range.len == 0 => 0,
        Err(ResizeError::NoTables(_)) => -ENOMEM,
        Err(ResizeError::Range(_) | ResizeError::PageSize(_)) => -EINVAL,
        Err(_) => -EOPNOTSUPP,
    }
}

/// Unlinks tables in a range that are empty, has `flush` make the unit forget them, and frees them. See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn free_empty<F: Coded, const FLUSHED: u64>(
    call: &Call,
    range: Span<Iova>,
    flush: impl Fn(Span<Iova>, &Invalidation),
) -> c_int {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return -EINVAL;
    };
    let mut gather = Gather::new();
    // There is nothing beyond what the root translates.
    let both = |part: Span<Iova>| {
        let (start, last) = (part.start.max(range.start), part.last().min(range.last()));
        (start <= last).then(|| Span::new(start, last - start + 1))
    };
    let mut parts = table
        .format()
        .aperture()
        .spans()
        .into_iter()
        .filter_map(both);
    let mut inside = table.unguarded();
    let unlinked = parts.try_for_each(|part| inside.give_back_empty_tables(part, &mut gather));
    let Ok(flushed) = gather.flush_with(|what| {
        flush(range, what);
        Ok::<_, Infallible>(())
    });
    table.memory().reclaim(flushed.into_tables());
    match unlinked {
        Ok(()) => 0,
        Err(_) => -EINVAL,
    }
}

/// The least span with both in it.
fn around(one: Span<Iova>, other: Span<Iova>) -> Span<Iova> {
    let start = one.start.min(other.start);
    Span::new(start, one.last().max(other.last()) - start + 1)
}

/// See `tables.h`.
///
/// # Safety
///
/// See [`table`].
unsafe fn set_dirty<F: Coded>(call: &Call, iova: u64) -> c_int {
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
unsafe fn raise<F: Coded>(call: &Call, levels: u8, root: &mut u64, chain: &mut CChain) -> c_int {
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
unsafe fn collect<F: Coded>(call: &Call, chain: &mut CChain) {
    // SAFETY: as the caller promises.
    if let Ok(table) = unsafe { table::<F, COHERENT>(call) } {
        #[cfg(planted)]
        read_what_was_freed(table.memory());
        let (gather, memory) = table.tear_down();
        chain.set(gather.never_walked().into_tables(), &memory);
    }
}

/// A fault that a kernel with KASAN is to find: `cargo xtask linux --full --kernel tests-debug --planted`.
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

/// And one with KCSAN.
#[cfg(planted)]
fn count_without_order() {
    static mut MAPS: u64 = 0;
    // SAFETY: none: two processors do this at once.
    unsafe { MAPS = core::hint::black_box(MAPS + 1) };
}

/// The functions of a format that store to linked tables, for units that read memory through the processor's caches or
/// past them.
macro_rules! mapping {
    ($(
        $format:ty, $flushed:ident: $map:ident $unmap:ident $map_runs:ident $unmap_runs:ident $resize:ident
    )*) => {$(
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
            #[cfg(planted)]
            count_without_order();
            // SAFETY: as the caller promises.
            unsafe { map::<$format, $flushed>(call, iova, &[Span::new(pa, len)], chain) }
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

        /// # Safety
        ///
        /// See [`table`]; `runs` are `count` runs.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $map_runs(
            call: &Call,
            iova: u64,
            runs: *const Span<Pa>,
            count: usize,
            chain: &mut CChain,
        ) -> c_int {
            // SAFETY: as the caller promises; a span is a `struct iommu_run`.
            let runs = unsafe { slice::from_raw_parts(runs, count) };
            // SAFETY: as the caller promises.
            unsafe { map::<$format, $flushed>(call, iova, runs, chain) }
        }

        /// # Safety
        ///
        /// See [`table`]; `each` may be called with `to`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $unmap_runs(
            call: &Call,
            iova: u64,
            len: u64,
            bytes: u64,
            runs: u64,
            chain: &mut CChain,
            each: unsafe extern "C" fn(*mut c_void, u64, u64),
            to: *mut c_void,
        ) -> u64 {
            let (range, bound) = (Span::new(iova, len), Bound { bytes, runs });
            // SAFETY: as the caller promises.
            let each = |run: Span<Pa>| unsafe { each(to, run.start, run.len) };
            // SAFETY: as the caller promises.
            unsafe { unmap_runs::<$format, $flushed>(call, range, bound, chain, each) }
        }

        /// # Safety
        ///
        /// See [`resize`]; `flush` may be called with `to`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $resize(
            call: &Call,
            iova: u64,
            len: u64,
            largest: u64,
            flush: unsafe extern "C" fn(*mut c_void, u64, u64, u32, bool),
            to: *mut c_void,
        ) -> c_int {
            let flush = |range: Span<Iova>, what: &Invalidation| {
                let (levels, tables) = (what.leaf_levels(), what.tables_unlinked());
                // SAFETY: as the caller promises.
                unsafe { flush(to, range.start, range.len, levels, tables) }
            };
            let range = Span::new(iova, len);
            if largest == 0 && len != 0 {
                // SAFETY: as the caller promises.
                return unsafe { free_empty::<$format, $flushed>(call, range, flush) };
            }
            // SAFETY: as the caller promises.
            unsafe { resize::<$format, $flushed>(call, range, largest, flush) }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
mapping! {
    AmdV1, COHERENT: dmaspace_amdv1_map dmaspace_amdv1_unmap
        dmaspace_amdv1_map_runs dmaspace_amdv1_unmap_runs
        dmaspace_amdv1_resize
    Mock, COHERENT: dmaspace_amdv1_mock_map dmaspace_amdv1_mock_unmap
        dmaspace_amdv1_mock_map_runs dmaspace_amdv1_mock_unmap_runs
        dmaspace_amdv1_mock_resize
    VtdSs, COHERENT: dmaspace_vtdss_map dmaspace_vtdss_unmap
        dmaspace_vtdss_map_runs dmaspace_vtdss_unmap_runs
        dmaspace_vtdss_resize
    VtdSs, VTDSS_FLUSHED: dmaspace_vtdss_map_incoherent dmaspace_vtdss_unmap_incoherent
        dmaspace_vtdss_map_runs_incoherent dmaspace_vtdss_unmap_runs_incoherent
        dmaspace_vtdss_resize_incoherent
    X86_64, COHERENT: dmaspace_x86_64_map dmaspace_x86_64_unmap
        dmaspace_x86_64_map_runs dmaspace_x86_64_unmap_runs
        dmaspace_x86_64_resize
    X86_64, X86_64_FLUSHED: dmaspace_x86_64_map_incoherent dmaspace_x86_64_unmap_incoherent
        dmaspace_x86_64_map_runs_incoherent dmaspace_x86_64_unmap_runs_incoherent
        dmaspace_x86_64_resize_incoherent
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

#[cfg(target_arch = "x86_64")]
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

#[cfg(target_arch = "riscv64")]
mapping! {
    RiscV, COHERENT: dmaspace_riscv_64_map dmaspace_riscv_64_unmap
        dmaspace_riscv_64_map_runs dmaspace_riscv_64_unmap_runs
        dmaspace_riscv_64_resize
}

#[cfg(target_arch = "riscv64")]
functions! {
    RiscV: dmaspace_riscv_64_translate dmaspace_riscv_64_dirty dmaspace_riscv_64_set_dirty dmaspace_riscv_64_raise
        dmaspace_riscv_64_collect dmaspace_riscv_64_sizes
}
