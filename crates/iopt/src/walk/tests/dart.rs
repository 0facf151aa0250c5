//! Apple's DART.
//!
//! Valid 0; sub-page start 63:52, end 51:40. Version 1: sub-page protection off 1, no write 7, no
//! read 8, address 39:12 (the unit has 36 bits). Version 2: not cached 1, no write 2, no read 3,
//! address bits 43:14 in 39:10 (the unit has 42 bits).

use super::*;
use crate::format::{DartConfig, DartVersion};

const RW: Prot = Prot::RW;
const V1: DartVersion = DartVersion::V1;
const V2: DartVersion = DartVersion::V2;

fn dart(version: DartVersion, page_log2: u8, input_bits: u8, address: u64, levels: u8) -> Walker {
    let config = DartConfig {
        version,
        page_log2,
        input_bits,
    };
    walker(FormatId::Dart(config), address, levels)
}

/// Reads at `iova`: the page, its open part, the permissions.
fn page(walker: &Walker, image: &Image, iova: u64) -> (Run, Span<Iova>, Prot) {
    let found = walker.walk(image, iova, R, &mut ()).unwrap();
    assert_eq!(found.pa - found.page.pa, iova - found.page.iova);
    assert_eq!(found.level, 0);
    assert!(!found.clean);
    (found.page, found.open, found.prot)
}

fn denied(granted: Prot) -> WalkReason {
    WalkReason::Denied { granted }
}

#[test]
fn version_1_with_two_levels_of_16k() {
    let image = Image::new(&[
        // Index 1 from bit 25; m1n1 sets bits 0 and 1 in tables, Linux bit 0 only.
        (0x8_0000_0008, 0x8_0000_4003),
        (0x8_0000_3ff8, 0x8_0000_8001),
        // Index 1 from bit 14: the whole page. Then no write; no read; neither.
        (0x8_0000_4008, 0x000f_ff09_1234_4003),
        (0x8_0000_4010, 0x000f_ff09_1234_8083),
        (0x8_0000_4018, 0x000f_ff09_1234_8103),
        (0x8_0000_4020, 0x000f_ff09_1234_8183),
        // An address that is not valid.
        (0x8_0000_4028, 0x000f_ff09_1234_8002),
        (0x8_0000_bff8, 0x000f_ff0f_ffff_c003),
    ]);
    let unit = dart(V1, 14, 36, 0x8_0000_0000, 2);
    assert_eq!(
        page(&unit, &image, 0x200_7fff),
        (
            Run::new(0x200_4000, Span::new(0x9_1234_4000, 0x4000)),
            Span::new(0x200_4000, 0x4000),
            RW
        )
    );
    assert_eq!(unit.walk(&image, 0x200_4000, W, &mut ()).unwrap().reads, 2);
    assert_eq!(
        page(&unit, &image, 0xf_ffff_ffff).0,
        Run::new(0xf_ffff_c000, Span::new(0xf_ffff_c000, 0x4000))
    );
    assert_eq!(page(&unit, &image, 0x200_8000).2, Prot::READ);
    assert_eq!(reason(&unit, &image, 0x200_8000, W), denied(Prot::READ));
    let write_only = unit.walk(&image, 0x200_c000, W, &mut ()).unwrap();
    assert_eq!(
        (write_only.prot, write_only.pa),
        (Prot::WRITE, 0x9_1234_8000)
    );
    assert_eq!(reason(&unit, &image, 0x200_c000, R), denied(Prot::WRITE));
    for access in [R, W] {
        assert_eq!(
            reason(&unit, &image, 0x201_0000, access),
            denied(Prot::empty())
        );
    }
    assert_eq!(reason(&unit, &image, 0x201_4000, R), WalkReason::NotPresent);
    assert_eq!(reason(&unit, &image, 0, R), WalkReason::NotPresent);
    assert!(matches!(
        reason(&unit, &image, 1 << 36, R),
        WalkReason::OutsideAperture { .. }
    ));
}

#[test]
fn four_roots_lie_side_by_side() {
    let image = Image::new(&[
        // 38 bits: the last entries of the first and of the fourth root.
        (0x8_0001_3ff8, 0x8_0000_4001),
        (0x8_0001_fff8, 0x8_0000_8001),
        (0x8_0000_4000, 0x000f_ff08_0000_c003),
        (0x8_0000_bff8, 0x000f_ff08_0001_0003),
        // 4 KiB: entries of 2^21 bytes, roots of 2^30.
        (0x8_0003_2ff8, 0x8_0000_3001),
        (0x8_0003_3000, 0),
        (0x8_0000_3ff8, 0x000f_ff08_0000_5003),
    ]);
    let unit = dart(V1, 14, 38, 0x8_0001_0000, 2);
    assert_eq!(page(&unit, &image, 0xf_fe00_0000).0.pa, 0x8_0000_c000);
    assert_eq!(page(&unit, &image, 0x3f_ffff_c000).0.pa, 0x8_0001_0000);
    assert_eq!(unit.span_log2(0), Some(25));
    let small = dart(V1, 12, 32, 0x8_0003_0000, 2);
    assert_eq!(
        page(&small, &image, 0xbfff_f000).0,
        Run::new(0xbfff_f000, Span::new(0x8_0000_5000, 0x1000))
    );
    assert_eq!(
        reason(&small, &image, 0xffff_f000, R),
        WalkReason::NotPresent
    );
    // They need not begin at a multiple of all four.
    assert!(
        dart(V1, 14, 38, 0x4000, 2)
            .walk(&image, 0, R, &mut ())
            .is_err()
    );
    assert!(matches!(
        reason(&dart(V1, 14, 38, 0x1000, 2), &image, 0, R),
        WalkReason::BadOutput { bits: 36, .. }
    ));
}

#[test]
fn version_2_holds_its_addresses_shifted_by_four() {
    let image = Image::new(&[
        // Index 1 from bit 36, from bit 25, from bit 14.
        (0x200_0000_0008, 0x20_0000_0401),
        (0x200_0000_4008, 0x20_0000_0801),
        (0x200_0000_8008, 0x000f_ff12_3456_7c01),
        // Not cached; no write (2); no read (3).
        (0x200_0000_8010, 0x000f_ff12_3456_7c03),
        (0x200_0000_8018, 0x000f_ff12_3456_7c07),
        (0x200_0000_8020, 0x000f_ff12_3456_7c0b),
        // The bits that are version 1's permissions; the highest address.
        (0x200_0000_8028, 0x000f_ff3f_ffff_fd81),
        // One bit more than the unit has.
        (0x200_0000_8030, 0x000f_ff40_0000_0001),
        (0x200_0000_4010, 0x40_0000_0001),
    ]);
    let unit = dart(V2, 14, 42, 0x200_0000_0000, 3);
    let first = 0x10_0200_4000;
    let whole = |iova| Span::new(iova, 0x4000);
    assert_eq!(
        page(&unit, &image, first + 0x123),
        (
            Run::new(first, Span::new(0x123_4567_c000, 0x4000)),
            whole(first),
            RW | Prot::COHERENT
        )
    );
    assert_eq!(unit.walk(&image, first, W, &mut ()).unwrap().reads, 3);
    assert_eq!(page(&unit, &image, first + 0x4000).2, RW);
    assert_eq!(page(&unit, &image, first + 0x8000).2, Prot::READ);
    assert_eq!(
        reason(&unit, &image, first + 0xc000, R),
        denied(Prot::WRITE)
    );
    assert_eq!(page(&unit, &image, first + 0x1_0000).0.pa, 0x3ff_ffff_c000);
    for (iova, address) in [
        (first + 0x1_4000, 0x400_0000_3fff),
        (first + 0x200_0000, 0x400_0000_0000),
    ] {
        assert_eq!(
            reason(&unit, &image, iova, R),
            WalkReason::BadOutput { address, bits: 42 }
        );
    }
    // Two levels from the second table.
    let lower = dart(V2, 14, 36, 0x200_0000_4000, 2);
    assert_eq!(page(&lower, &image, 0x200_4000).0.pa, 0x123_4567_c000);
}

#[test]
fn version_1_addresses_beyond_its_36_bits_are_faults() {
    let image = Image::new(&[
        (0x4000, 0x8001),
        (0x8000, 0x000f_ff10_0000_0003),
        (0x4008, 0x10_0000_8001),
    ]);
    let unit = dart(V1, 14, 32, 0x4000, 2);
    assert!(matches!(
        reason(&unit, &image, 0, R),
        WalkReason::BadOutput { bits: 36, .. }
    ));
    assert!(matches!(
        reason(&unit, &image, 0x200_0000, R),
        WalkReason::BadOutput { bits: 36, .. }
    ));
}

#[test]
fn only_the_open_part_of_a_page_can_be_accessed() {
    let image = Image::new(&[
        (0x4000, 0x8001),
        // Version 1, 4-byte units 0x010 to 0x7ff; bit 1 says that they do not count.
        (0x8000, 0x0107_ff00_0001_0001),
        (0x8008, 0x0107_ff00_0001_0003),
        // One unit; none, since the start is behind the end.
        (0x8010, 0x0100_1000_0001_0001),
        (0x8018, 0x0110_1000_0001_0001),
        // The last unit; the first one alone.
        (0x8020, 0xffff_ff00_0001_0001),
        (0x8028, 0x0000_0000_0001_0001),
    ]);
    let unit = dart(V1, 14, 32, 0x4000, 2);
    let bounds = |first, last| WalkReason::SubPage { first, last };
    let cases = [
        (0, 0x40, 0x1fff),
        (2, 0x40, 0x43),
        (4, 0x3ffc, 0x3fff),
        (5, 0, 3),
    ];
    for (index, first, last) in cases {
        let iova = index * 0x4000;
        for at in [first, last] {
            assert_eq!(
                page(&unit, &image, iova + at),
                (
                    Run::new(iova, Span::new(0x1_0000, 0x4000)),
                    Span::new(iova + first, last - first + 1),
                    RW
                )
            );
        }
        for at in [first.wrapping_sub(1), last + 1, 0, 0x3fff] {
            if at < 0x4000 && !(first..=last).contains(&at) {
                assert_eq!(reason(&unit, &image, iova + at, R), bounds(first, last));
                assert_eq!(reason(&unit, &image, iova + at, W), bounds(first, last));
            }
        }
    }
    assert_eq!(page(&unit, &image, 0x4000).1, Span::new(0x4000, 0x4000));
    for at in [0, 0x40, 0x43, 0x44, 0x3fff] {
        assert_eq!(reason(&unit, &image, 0xc000 + at, R), bounds(0x44, 0x43));
    }
    let fault = unit.walk(&image, 0x8, R, &mut ()).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "read of 0x8: the entry 0x107ff0000010001 of the table at 0x8000 (level 0) opens only the \
         bytes 0x40 to 0x1fff of its page"
    );
}

#[test]
fn sub_page_units_are_a_4096th_of_the_page_and_always_count_in_version_2() {
    let small = Image::new(&[
        (0x4000, 0x5001),
        // Bytes 0x010 to 0x7ff.
        (0x5000, 0x0107_ff00_0001_1001),
    ]);
    let unit = dart(V1, 12, 32, 0x4000, 2);
    assert_eq!(page(&unit, &small, 0x7ff).1, Span::new(0x10, 0x7f0));
    assert_eq!(
        page(&unit, &small, 0x10).0,
        Run::new(0, Span::new(0x1_1000, 0x1000))
    );
    assert!(matches!(
        reason(&unit, &small, 0x800, R),
        WalkReason::SubPage { .. }
    ));

    let image = Image::new(&[
        (0x4000, 0x801),
        // Bit 1 is "not cached" here.
        (0x8000, 0x0107_ff00_0000_1003),
        (0x8008, 0x0107_ff00_0000_1001),
    ]);
    let unit = dart(V2, 14, 36, 0x4000, 2);
    for iova in [0, 0x4000] {
        assert_eq!(
            page(&unit, &image, iova + 0x1fff).1,
            Span::new(iova + 0x40, 0x1fc0)
        );
        assert!(matches!(
            reason(&unit, &image, iova + 0x2000, W),
            WalkReason::SubPage { .. }
        ));
    }
}

#[test]
fn other_roots_are_refused() {
    let image = Image::new(&[(0x4000, 0)]);
    let refused = |version, page_log2, input_bits, levels| {
        let unit = dart(version, page_log2, input_bits, 0x4000, levels);
        let refused = matches!(reason(&unit, &image, 0, R), WalkReason::Levels { .. });
        assert_eq!(unit.aperture().is_none(), refused);
        refused
    };
    for levels in [0, 1, 4, 255] {
        assert!(refused(V1, 14, 36, levels));
    }
    for page_log2 in [0, 1, 11, 13, 15, 16, 63, 64, 255] {
        assert!(refused(V1, page_log2, 32, 2));
    }
    // Version 2 has no pages of 4 KiB.
    assert!(refused(V2, 12, 32, 2));
    // Four roots at most.
    assert!(!refused(V1, 14, 38, 2) && refused(V1, 14, 39, 2));
    assert!(!refused(V1, 12, 32, 2) && refused(V1, 12, 33, 2));
    assert!(!refused(V2, 14, 49, 3) && refused(V2, 14, 50, 3));
    assert!(!refused(V1, 14, 15, 2) && refused(V1, 14, 14, 2));
}
