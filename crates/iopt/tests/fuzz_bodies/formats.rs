//! Formats made from bytes, with every setting that they have.

use std::sync::atomic::AtomicU32;

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, BreakBeforeMake, Dart1, Dart1Page4K, Dart2,
    Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, Shareability, VtdSs, X86_64,
};
use iopt::{Format, FormatId, HeapArena, TableMemory, WideCell};
use runs::PageSizes;

use super::Bytes;

/// Operation on a format once it is made.
pub(super) trait Do {
    fn with<F: Format, M: Room>(self, format: F, data: &mut Bytes<'_>);
}

/// Table memory with few tables.
pub(super) trait Room: TableMemory + Sized {
    fn at(base: u64) -> Self;
}

macro_rules! room {
    ($($cell:ty, $log2:literal;)*) => {$(
        impl Room for HeapArena<$cell, $log2> {
            fn at(base: u64) -> Self {
                Self::with_tables_at(32, base).unwrap()
            }
        }
    )*};
}
room! {
    WideCell, 12;
    WideCell, 14;
    WideCell, 16;
    AtomicU32, 10;
}

type M12 = HeapArena<WideCell, 12>;
type M14 = HeapArena<WideCell, 14>;
type M16 = HeapArena<WideCell, 16>;

pub(super) fn amdv1(act: impl Do, data: &mut Bytes<'_>) {
    if let Ok(format) = AmdV1::new(data.u8()) {
        act.with::<_, M12>(format, data);
    }
}

pub(super) fn x86_64(act: impl Do, data: &mut Bytes<'_>) {
    if let Ok(format) = X86_64::new(data.u8()) {
        act.with::<_, M12>(format, data);
    }
}

pub(super) fn vtd_ss(act: impl Do, data: &mut Bytes<'_>) {
    if let Ok(format) = VtdSs::new(data.u8()) {
        act.with::<_, M12>(format, data);
    }
}

fn options(data: &mut Bytes<'_>) -> ArmOptions {
    let bits = data.u8();
    ArmOptions {
        dirty: bits & 1 != 0,
        break_before_make: BreakBeforeMake::Always,
        shareability: match bits >> 1 & 3 {
            0 => Shareability::Outer,
            _ => Shareability::Inner,
        },
    }
}

fn stage1<G: Granule>(data: &mut Bytes<'_>) -> Option<ArmStage1<G>> {
    let (input, output) = (data.u8(), data.u8());
    let mut format = ArmStage1::<G>::new(input.into(), output.into()).ok()?;
    format = format.with_options(options(data));
    let flags = data.u8();
    if flags & 1 != 0 {
        format = format.upper();
    }
    if flags & 8 != 0 {
        format = format
            .with_attribute_indices(data.u8(), data.u8(), data.u8())
            .ok()?;
    }
    Some(format)
}

fn stage2<G: Granule>(data: &mut Bytes<'_>) -> Option<ArmStage2<G>> {
    let (input, output) = (data.u8(), data.u8());
    let mut format = ArmStage2::<G>::new(input.into(), output.into()).ok()?;
    format = format.with_options(options(data));
    let flags = data.u8();
    if flags & 1 != 0 {
        format = format.with_forced_write_back();
    }
    if flags & 2 != 0 {
        format = format.with_levels(data.u8()).ok()?;
    }
    Some(format)
}

macro_rules! by_granule {
    ($name:ident, $make:ident) => {
        pub(super) fn $name(act: impl Do, data: &mut Bytes<'_>) {
            macro_rules! with {
                ($granule:ty, $memory:ty) => {
                    if let Some(format) = $make::<$granule>(data) {
                        act.with::<_, $memory>(format, data);
                    }
                };
            }
            match data.below(6) {
                0 => with!(K4, M12),
                1 => with!(K4Lpa2, M12),
                2 => with!(K16, M14),
                3 => with!(K16Lpa2, M14),
                4 => with!(K64, M16),
                _ => with!(K64Lpa, M16),
            }
        }
    };
}
by_granule!(arm_stage1, stage1);
by_granule!(arm_stage2, stage2);

pub(super) fn armv7s(act: impl Do, data: &mut Bytes<'_>) {
    let shareable = data.flag();
    if data.flag() {
        let format = ArmV7s::<15>::new().with_shareable(shareable);
        act.with::<_, HeapArena<AtomicU32, 10>>(format, data);
    } else {
        let format = <ArmV7s>::new().with_shareable(shareable);
        act.with::<_, HeapArena<AtomicU32, 10>>(format, data);
    }
}

pub(super) fn riscv(act: impl Do, data: &mut Bytes<'_>) {
    if let Ok(format) = RiscV::new(data.u8()) {
        let format = format
            .with_hardware_updates(data.flag())
            .with_memory_types(data.flag())
            .with_supervisor_requests(data.flag());
        act.with::<_, M12>(format, data);
    }
}

pub(super) fn riscv_g(act: impl Do, data: &mut Bytes<'_>) {
    if let Ok(format) = RiscVG::new(data.u8()) {
        let format = format
            .with_hardware_updates(data.flag())
            .with_memory_types(data.flag());
        act.with::<_, M12>(format, data);
    }
}

pub(super) fn dart(act: impl Do, data: &mut Bytes<'_>) {
    let (version, levels, bits) = (data.below(3), data.u8(), data.u8());
    match version {
        0 => {
            if let Ok(format) = Dart1::new(levels, bits) {
                act.with::<_, M14>(format, data);
            }
        }
        1 => {
            if let Ok(format) = Dart1Page4K::new(levels, bits) {
                act.with::<_, M12>(format, data);
            }
        }
        _ => {
            if let Ok(format) = Dart2::new(levels, bits) {
                act.with::<_, M14>(format, data);
            }
        }
    }
}

/// The sizes that an entry at `level` can say. The engine makes no supersections in a domain but 0;
/// a word that is one is one all the same.
pub(super) fn leaf_sizes<F: Format>(level: usize) -> PageSizes {
    if matches!((F::ID, level), (FormatId::ArmV7s, 1)) {
        PageSizes::from_bits(1 << 20 | 1 << 24)
    } else {
        F::leaf_sizes(level)
    }
}

/// One of all formats.
pub(super) fn any(act: impl Do, data: &mut Bytes<'_>) {
    match data.below(9) {
        0 => amdv1(act, data),
        1 => x86_64(act, data),
        2 => vtd_ss(act, data),
        3 => arm_stage1(act, data),
        4 => arm_stage2(act, data),
        5 => armv7s(act, data),
        6 => riscv(act, data),
        7 => riscv_g(act, data),
        _ => dart(act, data),
    }
}
