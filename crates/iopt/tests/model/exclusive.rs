//! The whole suite over all formats, with every operation by `&mut`.

use std::sync::atomic::AtomicU32;

use crate::suite::{World, op};
use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2, K4, K4Lpa2, K16,
    K16Lpa2, K64, K64Lpa, RiscV, RiscVG, VtdSs, X86_64,
};
use iopt::{HeapArena, HeapTables, WideCell};
use proptest::prelude::*;
use runs::PageSizes;

const ALL: PageSizes = PageSizes::from_bits(u64::MAX);
const SMALL: PageSizes = PageSizes::from_bits(1 << 12);
const FROM_2M: PageSizes = PageSizes::from_bits(1 << 21 | 1 << 30);

suite!(amdv1, AmdV1::new(4).unwrap(), ALL);
suite!(
    amdv1_3_levels,
    AmdV1::new(3).unwrap(),
    PageSizes::from_bits(1 << 12 | 1 << 16 | 1 << 20 | 1 << 21)
);
suite!(amdv1_5_levels, AmdV1::new(5).unwrap(), SMALL);
suite!(amdv1_6_levels, AmdV1::new(6).unwrap(), ALL);
suite!(x86_64, X86_64::new(4).unwrap(), ALL);
suite!(x86_64_5_levels, X86_64::new(5).unwrap(), ALL);
suite!(
    amdv1_encrypted,
    AmdV1::new(4).unwrap().with_encrypted_tables(51).unwrap(),
    ALL
);
suite!(
    x86_64_encrypted,
    X86_64::new(4).unwrap().with_encrypted_tables(47).unwrap(),
    ALL
);
suite!(vtd_ss_3_levels, VtdSs::new(3).unwrap(), ALL);
suite!(vtd_ss, VtdSs::new(4).unwrap(), ALL);
suite!(vtd_ss_5_levels, VtdSs::new(5).unwrap(), FROM_2M);

/// Tables of the 16 KiB and 64 KiB granules.
type Heap16K = HeapArena<WideCell, 14>;
type Heap64K = HeapArena<WideCell, 16>;

suite!(arm_s1_4k, ArmStage1::<K4>::new(48, 48).unwrap(), ALL);
suite!(arm_s1_4k_39, ArmStage1::<K4>::new(39, 48).unwrap(), ALL);
suite!(
    arm_s1_4k_upper,
    ArmStage1::<K4>::new(42, 48).unwrap().upper(),
    ALL
);
suite!(
    arm_s1_4k_lpa2,
    ArmStage1::<K4Lpa2>::new(52, 52).unwrap(),
    ALL
);
suite!(
    arm_s1_16k,
    ArmStage1::<K16>::new(48, 48).unwrap(),
    ALL,
    Heap16K
);
suite!(
    arm_s1_16k_lpa2,
    ArmStage1::<K16Lpa2>::new(52, 52).unwrap(),
    ALL,
    Heap16K
);
suite!(
    arm_s1_64k,
    ArmStage1::<K64>::new(48, 48).unwrap().upper(),
    ALL,
    Heap64K
);
suite!(
    arm_s1_64k_lpa,
    ArmStage1::<K64Lpa>::new(52, 52).unwrap(),
    ALL,
    Heap64K
);
suite!(arm_s2_4k, ArmStage2::<K4>::new(40, 48).unwrap(), ALL);
suite!(arm_s2_4k_32, ArmStage2::<K4>::new(32, 48).unwrap(), SMALL);
suite!(
    arm_s2_4k_lpa2,
    ArmStage2::<K4Lpa2>::new(52, 52).unwrap(),
    ALL
);
suite!(
    arm_s2_16k,
    ArmStage2::<K16>::new(48, 48).unwrap(),
    ALL,
    Heap16K
);
suite!(
    arm_s2_16k_lpa2,
    ArmStage2::<K16Lpa2>::new(49, 52).unwrap(),
    ALL,
    Heap16K
);
suite!(
    arm_s2_64k,
    ArmStage2::<K64>::new(32, 48).unwrap(),
    ALL,
    Heap64K
);
suite!(
    arm_s2_64k_lpa,
    ArmStage2::<K64Lpa>::new(52, 52).unwrap(),
    ALL,
    Heap64K
);

/// The unit keeps dirty state.
const DIRTY: ArmOptions = ArmOptions {
    dirty: true,
    ..ArmOptions::PLAIN
};
suite!(
    arm_s1_4k_dirty,
    ArmStage1::<K4>::new(48, 48).unwrap().with_options(DIRTY),
    ALL
);
suite!(
    arm_s2_16k_dirty,
    ArmStage2::<K16>::new(40, 48).unwrap().with_options(DIRTY),
    ALL,
    Heap16K
);

suite!(riscv_sv39, RiscV::new(3).unwrap(), ALL);
suite!(
    riscv_sv48_hardware_updates,
    RiscV::new(4).unwrap().with_hardware_updates(true),
    ALL
);
suite!(
    riscv_sv57_without_svnapot,
    RiscV::new(5).unwrap(),
    PageSizes::from_bits(!(1 << 16))
);
suite!(riscv_sv39x4, RiscVG::new(3).unwrap(), ALL);
suite!(riscv_sv48x4, RiscVG::new(4).unwrap(), ALL);
suite!(
    riscv_sv57x4_hardware_updates,
    RiscVG::new(5).unwrap().with_hardware_updates(true),
    ALL
);

/// Second-level tables of ARMv7.
type Heap1K = HeapArena<AtomicU32, 10>;

suite!(armv7s, <ArmV7s>::new(), ALL, Heap1K);
suite!(armv7s_domain_5, ArmV7s::<5>::new(), ALL, Heap1K);
suite!(
    armv7s_without_groups,
    <ArmV7s>::new(),
    PageSizes::from_bits(1 << 12 | 1 << 20),
    Heap1K
);

suite!(dart1_32, Dart1::new(2, 32).unwrap(), ALL, Heap16K);
suite!(
    dart1_with_four_roots,
    Dart1::new(2, 38).unwrap(),
    ALL,
    Heap16K
);
suite!(dart1_4k, Dart1Page4K::new(2, 32).unwrap(), ALL);
suite!(dart2, Dart2::new(2, 36).unwrap(), ALL, Heap16K);
suite!(dart2_3_levels, Dart2::new(3, 42).unwrap(), ALL, Heap16K);
