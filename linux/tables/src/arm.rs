//! The functions of Arm's long descriptors, in a table from which `io-pgtable-arm.c` takes those of a stage and a granule.

use core::ffi::{c_int, c_void};

use iopt::format::{ArmOptions, ArmStage1, ArmStage2, Granule, K4, K16, K64Lpa};
use iopt::{BuildError, Gather, TableOps as _};
use runs::{Iova, Span};

use crate::{
    CChain, COHERENT, Call, Coded, EAGAIN, EINVAL, dirty, not_mapped, table, translate, unmap,
};

/// The bit of a link that says that it was flushed: one that units ignore (DDI 0487, section D8.3.1, "Table descriptor").
const FLUSHED: u64 = 1 << 56;

/// In the root's address: the bits of an input address, and that they are those of the upper half.
const INPUT_BITS: u64 = 0x3f;
const UPPER: u64 = 0x40;

/// Linux has dirty state kept where it says so in the leaves.
const OPTIONS: ArmOptions = ArmOptions {
    dirty: true,
    ..ArmOptions::PLAIN
};

impl<G: Granule> Coded for ArmStage1<G> {
    const CODE: u64 = INPUT_BITS | UPPER;
    const PRESENT: u64 = 0;

    #[inline(always)]
    fn of(code: u64) -> Result<Self, BuildError> {
        let format = Self::new((code & INPUT_BITS) as u32, G::ADDRESS_BITS)?.with_options(OPTIONS);
        Ok(if code & UPPER == 0 {
            format
        } else {
            format.upper()
        })
    }
}

impl<G: Granule> Coded for ArmStage2<G> {
    const CODE: u64 = INPUT_BITS | UPPER;
    const PRESENT: u64 = 0;

    #[inline(always)]
    fn of(code: u64) -> Result<Self, BuildError> {
        Self::new((code & INPUT_BITS) as u32, G::ADDRESS_BITS)
    }
}

/// `struct dmaspace_arm`: see `tables.h`.
#[repr(C)]
pub struct Functions {
    map: unsafe extern "C" fn(&Call, u64, u64, u64, bool) -> c_int,
    unmap: unsafe extern "C" fn(&Call, u64, u64, &mut CChain) -> u64,
    give_back: unsafe extern "C" fn(&Call, u64, u64, &mut CChain),
    clear: unsafe extern "C" fn(&Call, &mut CChain),
    translate: unsafe extern "C" fn(u64, u64) -> u64,
    dirty: unsafe extern "C" fn(&Call, u64, u64, bool, Each, *mut c_void) -> c_int,
    root: extern "C" fn(u64, &mut u64) -> u64,
}

type Each = unsafe extern "C" fn(*mut c_void, u64, u64);

impl Functions {
    const fn of<F: Coded, const FLUSHED: u64>() -> Self {
        Self {
            map: map::<F, FLUSHED>,
            unmap: unmap_range::<F, FLUSHED>,
            give_back: give_back::<F, FLUSHED>,
            clear: clear::<F, FLUSHED>,
            translate: translate_one::<F>,
            dirty: dirty_range::<F>,
            root: root::<F>,
        }
    }
}

/// Functions by stage, granule and whether units read memory past the processor's caches.
#[unsafe(export_name = "dmaspace_arm")]
pub static FUNCTIONS: [Functions; 12] = [
    Functions::of::<ArmStage1<K4>, COHERENT>(),
    Functions::of::<ArmStage1<K4>, FLUSHED>(),
    Functions::of::<ArmStage1<K16>, COHERENT>(),
    Functions::of::<ArmStage1<K16>, FLUSHED>(),
    Functions::of::<ArmStage1<K64Lpa>, COHERENT>(),
    Functions::of::<ArmStage1<K64Lpa>, FLUSHED>(),
    Functions::of::<ArmStage2<K4>, COHERENT>(),
    Functions::of::<ArmStage2<K4>, FLUSHED>(),
    Functions::of::<ArmStage2<K16>, COHERENT>(),
    Functions::of::<ArmStage2<K16>, FLUSHED>(),
    Functions::of::<ArmStage2<K64Lpa>, COHERENT>(),
    Functions::of::<ArmStage2<K64Lpa>, FLUSHED>(),
];

/// An empty table in the place of a large leaf is not replaced on the way, as on x86-64: the architecture wants a flush
/// before the leaf is written (DDI 0487, section D8.16, "Using break-before-make"). Where one may be, nothing is mapped
/// (`EAGAIN`) before the caller says that they are given back.
///
/// # Safety
///
/// See [`table`].
unsafe extern "C" fn map<F: Coded, const FLUSHED: u64>(
    call: &Call,
    iova: u64,
    pa: u64,
    len: u64,
    given_back: bool,
) -> c_int {
    // SAFETY: as the caller promises.
    let Ok(table) = (unsafe { table::<F, FLUSHED>(call) }) else {
        return -EINVAL;
    };
    let mut inside = table.unguarded();
    let large = call.sizes >> F::shift(0) > 1;
    if large && !given_back && inside.may_have_empty_tables(Span::new(iova, len)) {
        return -EAGAIN;
    }
    let run = [Span::new(pa, len)];
    let mapped = inside.map_leaves(iova, &run, call.bits | F::PRESENT);
    match mapped {
        Ok(()) => 0,
        Err(error) => not_mapped(&error),
    }
}

/// # Safety
///
/// See [`table`].
unsafe extern "C" fn unmap_range<F: Coded, const FLUSHED: u64>(
    call: &Call,
    iova: u64,
    len: u64,
    chain: &mut CChain,
) -> u64 {
    // SAFETY: as the caller promises.
    unsafe { unmap::<F, FLUSHED>(call, Span::new(iova, len), chain) }
}

/// # Safety
///
/// See [`table`].
unsafe extern "C" fn give_back<F: Coded, const FLUSHED: u64>(
    call: &Call,
    iova: u64,
    len: u64,
    chain: &mut CChain,
) {
    // SAFETY: as the caller promises.
    if let Ok(table) = unsafe { table::<F, FLUSHED>(call) } {
        let mut gather = Gather::new();
        let range = Span::new(iova, len);
        // A range that cannot be mapped is refused by the map that follows.
        let _ = table.unguarded().give_back_empty_tables(range, &mut gather);
        chain.set(gather.never_walked().into_tables(), table.memory());
    }
}

/// Everything but the root, which the kernel's half has made.
///
/// # Safety
///
/// See [`table`]; nothing uses the table any more.
unsafe extern "C" fn clear<F: Coded, const FLUSHED: u64>(call: &Call, chain: &mut CChain) {
    // SAFETY: as the caller promises.
    if let Ok(table) = unsafe { table::<F, FLUSHED>(call) } {
        let mut gather = Gather::new();
        for span in table.format().aperture().spans() {
            // It is the whole aperture, which no table refuses.
            let _ = table.unguarded().clear(span, &mut gather);
        }
        chain.set(gather.never_walked().into_tables(), table.memory());
    }
}

/// # Safety
///
/// See [`table`].
unsafe extern "C" fn translate_one<F: Coded>(top: u64, iova: u64) -> u64 {
    // SAFETY: as the caller promises.
    unsafe { translate::<F>(top, iova) }
}

/// # Safety
///
/// See [`table`]; `each` may be called with `to`.
unsafe extern "C" fn dirty_range<F: Coded>(
    call: &Call,
    iova: u64,
    len: u64,
    clean: bool,
    each: Each,
    to: *mut c_void,
) -> c_int {
    // SAFETY: as the caller promises.
    let each = |leaves: Span<Iova>| unsafe { each(to, leaves.start, leaves.len) };
    // SAFETY: as the caller promises.
    unsafe { dirty::<F>(call, Span::new(iova, len), clean, each) }
}

/// The bytes of a root, and how many levels there are; 0 for an input size that the format does not have.
extern "C" fn root<F: Coded>(code: u64, levels: &mut u64) -> u64 {
    let Ok(format) = F::of(code) else {
        return 0;
    };
    *levels = format.levels().into();
    let entries = format.entries(usize::from(format.levels()) - 1);
    (entries * F::ENTRY_BYTES) as u64
}
