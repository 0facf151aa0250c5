//! Granules, sizes, levels, roots, and their encoding for a unit.

use iopt::format::{
    ArmConfig, ArmGranule, ArmStage1, ArmStage2, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa,
};
use iopt::{BuildError, Format, FormatId};
use runs::PageSizes;

#[test]
fn the_sizes_are_those_of_the_granule() {
    let sizes = |list: &[u32]| {
        list.iter().fold(PageSizes::NONE, |all, log2| {
            all.or(PageSizes::from_log2(*log2))
        })
    };
    assert_eq!(
        ArmStage1::<K4>::page_sizes(4),
        sizes(&[12, 16, 21, 25, 30, 34])
    );
    assert_eq!(
        ArmStage2::<K4Lpa2>::page_sizes(5),
        sizes(&[12, 16, 21, 25, 30, 34, 39])
    );
    assert_eq!(ArmStage1::<K16>::page_sizes(4), sizes(&[14, 21, 25, 30]));
    assert_eq!(
        ArmStage1::<K16Lpa2>::page_sizes(4),
        sizes(&[14, 21, 25, 30, 36])
    );
    assert_eq!(ArmStage1::<K64>::page_sizes(3), sizes(&[16, 21, 29, 34]));
    assert_eq!(
        ArmStage2::<K64Lpa>::page_sizes(3),
        sizes(&[16, 21, 29, 34, 42])
    );
}

/// Levels and entries of the root for so many input bits.
fn stage1<G: Granule>(bits: u32) -> (u8, usize) {
    let format = ArmStage1::<G>::new(bits, 48).unwrap();
    let levels = format.levels();
    (levels, format.entries(usize::from(levels) - 1))
}

fn stage2<G: Granule>(bits: u32) -> (u8, usize) {
    let format = ArmStage2::<G>::new(bits, 48).unwrap();
    let levels = format.levels();
    assert_eq!(format.with_levels(levels), Ok(format));
    (levels, format.entries(usize::from(levels) - 1))
}

#[test]
fn a_walk_begins_where_the_input_size_says() {
    // D8.2.7 to D8.2.9: how many bits each level resolves.
    assert_eq!(stage1::<K4>(48), (4, 512));
    assert_eq!(stage1::<K4>(40), (4, 2));
    assert_eq!(stage1::<K4>(39), (3, 512));
    assert_eq!(stage1::<K4>(32), (3, 4));
    assert_eq!(stage1::<K4Lpa2>(52), (5, 16));
    assert_eq!(stage1::<K4Lpa2>(48), (4, 512));
    assert_eq!(stage1::<K16>(48), (4, 2));
    assert_eq!(stage1::<K16>(47), (3, 2048));
    assert_eq!(stage1::<K16>(36), (2, 2048));
    assert_eq!(stage1::<K16>(32), (2, 128));
    assert_eq!(stage1::<K16Lpa2>(52), (4, 32));
    assert_eq!(stage1::<K64>(52), (3, 1024));
    assert_eq!(stage1::<K64>(48), (3, 64));
    assert_eq!(stage1::<K64>(42), (2, 8192));
    assert_eq!(stage1::<K64Lpa>(32), (2, 8));
    // D8.2.6: up to 16 tables side by side.
    assert_eq!(stage2::<K4>(48), (4, 512));
    assert_eq!(stage2::<K4>(44), (4, 32));
    assert_eq!(stage2::<K4>(43), (3, 8192));
    assert_eq!(stage2::<K4>(40), (3, 1024));
    assert_eq!(stage2::<K4>(35), (3, 32));
    assert_eq!(stage2::<K4>(34), (2, 8192));
    assert_eq!(stage2::<K4>(32), (2, 2048));
    assert_eq!(stage2::<K4Lpa2>(52), (4, 8192));
    assert_eq!(stage2::<K16>(48), (3, 4096));
    assert_eq!(stage2::<K16>(40), (2, 32768));
    assert_eq!(stage2::<K16Lpa2>(52), (4, 32));
    assert_eq!(stage2::<K16Lpa2>(51), (3, 32768));
    assert_eq!(stage2::<K64>(48), (3, 64));
    assert_eq!(stage2::<K64>(46), (2, 131072));
    assert_eq!(stage2::<K64>(33), (1, 131072));
    assert_eq!(stage2::<K64Lpa>(52), (3, 1024));
    // Or one table, at a level more.
    let more = ArmStage2::<K4>::new(40, 48)
        .unwrap()
        .with_levels(4)
        .unwrap();
    assert_eq!((more.levels(), more.entries(3)), (4, 2));
    let more = ArmStage2::<K4Lpa2>::new(52, 48).unwrap().with_levels(5);
    assert_eq!(more.unwrap().entries(4), 16);
    for (levels, result) in [
        (2, ArmStage2::<K4>::new(40, 48).unwrap().with_levels(2)),
        (5, ArmStage2::<K4>::new(40, 48).unwrap().with_levels(5)),
        (4, ArmStage2::<K4>::new(39, 48).unwrap().with_levels(4)),
        (0, ArmStage2::<K4>::new(32, 48).unwrap().with_levels(0)),
    ] {
        assert!(matches!(result, Err(BuildError::Levels { levels: l, .. }) if l == levels));
    }
    // With 48 bits the 16 KiB granule has no level 0 in stage 2.
    let none = ArmStage2::<K16>::new(48, 48).unwrap().with_levels(4);
    assert!(none.is_err());
}

#[test]
fn settings_out_of_range_are_named() {
    let message = |result: Result<(), BuildError>| result.unwrap_err().to_string();
    assert_eq!(
        message(ArmStage1::<K4>::new(49, 48).map(drop)),
        "arm-s1-4k: an input size in bits of 49 is not within 32 to 48"
    );
    assert_eq!(
        message(ArmStage2::<K64>::new(52, 48).map(drop)),
        "arm-s2-64k: an input size in bits of 52 is not within 32 to 48"
    );
    assert_eq!(
        message(ArmStage1::<K16Lpa2>::new(31, 48).map(drop)),
        "arm-s1-16k-lpa2: an input size in bits of 31 is not within 32 to 52"
    );
    assert_eq!(
        message(ArmStage1::<K64>::new(48, 52).map(drop)),
        "arm-s1-64k: an output size in bits of 52 is not within 32 to 48"
    );
    let format = ArmStage1::<K4>::new(48, 48).unwrap();
    assert_eq!(
        message(format.with_attribute_indices(8, 0, 1).map(drop)),
        "arm-s1-4k: a MAIR index of 8 is not within 0 to 7"
    );
    assert_eq!(
        message(format.with_attribute_indices(2, 3, 9).map(drop)),
        "arm-s1-4k: a MAIR index of 9 is not within 0 to 7"
    );
}

#[test]
fn a_unit_gets_granule_input_size_and_half() {
    let config = |granule, input_bits, upper| ArmConfig {
        granule,
        input_bits,
        upper,
    };
    assert_eq!(
        ArmStage1::<K16>::new(47, 40).unwrap().upper().id(),
        FormatId::ArmStage1(config(ArmGranule::K16, 47, true))
    );
    assert_eq!(
        ArmStage2::<K64Lpa>::new(40, 40).unwrap().id(),
        FormatId::ArmStage2(config(ArmGranule::K64Lpa, 40, false))
    );
    assert_eq!(ArmStage2::<K64>::new(40, 40).unwrap().output_bits(), 40);
}
