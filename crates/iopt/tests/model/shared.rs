//! The random sequences of the suite, with every operation by `&`.

use std::sync::atomic::AtomicU32;

use crate::suite::{Tables, World, cases, op};
use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, BreakBeforeMake, Dart2, K4, K16, RiscV, VtdSs,
};
use iopt::{HeapArena, HeapTables, WideCell};
use proptest::prelude::*;
use runs::PageSizes;

const ALL: PageSizes = PageSizes::from_bits(u64::MAX);
const IN_PLACE: ArmOptions = ArmOptions {
    dirty: true,
    break_before_make: BreakBeforeMake::NotNeeded,
    ..ArmOptions::PLAIN
};

macro_rules! shared {
    ($($name:ident: $format:expr, $tables:ty;)*) => {$(
        mod $name {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig {
                    cases: cases::<$tables>(),
                    ..ProptestConfig::default()
                })]

                #[test]
                fn random_sequences_match_the_model(ops in prop::collection::vec(op(), 1..40)) {
                    let format = $format;
                    let bits = iopt::Format::output_bits(&format);
                    let memory = <$tables as Tables>::room_for(1 << 12, bits);
                    let mut world = World::<_, _, true>::new(format, ALL, &memory);
                    for op in &ops {
                        world.apply(op);
                    }
                    world.finish();
                }
            }
        }
    )*};
}

shared! {
    amdv1: AmdV1::new(4).unwrap(), HeapTables;
    vtd_ss: VtdSs::new(4).unwrap(), HeapTables;
    arm_s1_4k: ArmStage1::<K4>::new(48, 48).unwrap().with_options(IN_PLACE), HeapTables;
    arm_s2_16k: ArmStage2::<K16>::new(48, 48).unwrap(), HeapArena<WideCell, 14>;
    riscv: RiscV::new(3).unwrap().with_hardware_updates(true), HeapTables;
    armv7s: <ArmV7s>::new(), HeapArena<AtomicU32, 10>;
    dart2: Dart2::new(2, 36).unwrap(), HeapArena<WideCell, 14>;
}
