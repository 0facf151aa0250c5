//! Arm's long descriptors. A descriptor is an address and these bits (DDI 0487, D8.3.1): valid (0),
//! table or page (1), AP\[2:1\] (7:6), SH (9:8), AF (10), nG (11), DBM (51), contiguous (52), PXN (53),
//! UXN or XN (54), and in tables PXNTable (59), UXNTable (60), APTable (62:61).

mod attributes;

use super::*;
use crate::format::{ArmConfig, ArmGranule};

const fn config(granule: ArmGranule, input_bits: u8, upper: bool) -> ArmConfig {
    ArmConfig {
        granule,
        input_bits,
        upper,
    }
}

fn stage_1(granule: ArmGranule, input_bits: u8, root: u64, levels: u8) -> Walker {
    let format = FormatId::ArmStage1(config(granule, input_bits, false));
    walker(format, root, levels)
}

fn stage_2(granule: ArmGranule, input_bits: u8, root: u64, levels: u8) -> Walker {
    let format = FormatId::ArmStage2(config(granule, input_bits, false));
    walker(format, root, levels)
}

/// The page that maps `iova`, and what is allowed.
fn page(walker: &Walker, image: &Image, iova: u64) -> (Run, Prot, u8) {
    let found = walker.walk(image, iova, R, &mut ()).unwrap();
    (found.page, found.prot, found.level)
}

#[test]
fn arm_4k_stage_1_with_each_leaf_size() {
    // IOVA 0x0080_4020_1000 has index 1 at every level.
    let image = Image::new(&[
        (0x1008, 0x2003),
        (0x2008, 0x3003),
        (0x3008, 0x4003),
        // A page: UXN, PXN; nG, AF, inner shareable, AP[1].
        (0x4008, 0x0060_0000_abcd_ef43),
        // A block of 2 MiB at index 2: AF, read-only (AP[2]), AP[1]; executable.
        (0x3010, 0x4060_04c1),
        // A block of 1 GiB at index 2: AF; AP 00 is for privileged requests only.
        (0x2010, 0x1_8000_0401),
    ]);
    let arm = stage_1(ArmGranule::K4, 48, 0x1000, 4);
    let found = arm.walk(&image, 0x80_4020_1abc, W, &mut ()).unwrap();
    assert_eq!(
        found,
        Translation {
            pa: 0xabcd_eabc,
            page: Run::new(0x80_4020_1000, Span::new(0xabcd_e000, 0x1000)),
            open: Span::new(0x80_4020_1000, 0x1000),
            level: 0,
            prot: Prot::RW,
            clean: false,
            reads: 4,
        }
    );
    assert_eq!(
        page(&arm, &image, 0x80_4055_5555),
        (
            Run::new(0x80_4040_0000, Span::new(0x4060_0000, 2 << 20)),
            Prot::READ | Prot::EXECUTE,
            1
        )
    );
    assert_eq!(
        reason(&arm, &image, 0x80_4040_0000, W),
        WalkReason::Denied {
            granted: Prot::READ | Prot::EXECUTE
        }
    );
    let all = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(
        reason(&arm, &image, 0x80_8000_0000, R),
        WalkReason::Denied { granted: all }
    );
    let privileged = arm.with_privileged_requests(true);
    assert_eq!(
        page(&privileged, &image, 0x80_8765_4321),
        (
            Run::new(0x80_8000_0000, Span::new(0x1_8000_0000, 1 << 30)),
            all,
            2
        )
    );
    // Bits above those of the input size are 0.
    assert_eq!(
        reason(&arm, &image, 1 << 48, R),
        WalkReason::OutsideAperture {
            aperture: Aperture::zeros(48)
        }
    );
}

#[test]
fn arm_16k_and_64k_stage_1_with_each_leaf_size() {
    // 16 KiB, 47 bits: 11 bits each from bit 36, 25 and 14. Index 1 at every level.
    let image = Image::new(&[
        (0x1_0008, 0x1_4003),
        (0x1_4008, 0x1_8003),
        (0x1_8008, 0xabcd_c443),
        // A block of 32 MiB at index 2.
        (0x1_4010, 0x4200_0441),
    ]);
    let arm = stage_1(ArmGranule::K16, 47, 0x1_0000, 3);
    let rwx = Prot::RW | Prot::EXECUTE;
    assert_eq!(
        page(&arm, &image, 0x10_0200_7fff),
        (
            Run::new(0x10_0200_4000, Span::new(0xabcd_c000, 0x4000)),
            rwx,
            0
        )
    );
    assert_eq!(
        page(&arm, &image, 0x10_05ff_ffff),
        (
            Run::new(0x10_0400_0000, Span::new(0x4200_0000, 32 << 20)),
            rwx,
            1
        )
    );

    // 64 KiB, 48 bits: 6 bits from bit 42, so that the root has 64 entries and is aligned to 512
    // bytes; 13 bits each from bit 29 and 16.
    let image = Image::new(&[
        (0x1208, 0x2_0003),
        (0x2_0008, 0x3_0003),
        (0x3_0008, 0xabcd_0443),
        // A block of 512 MiB at index 2.
        (0x2_0010, 0x6000_0441),
    ]);
    let arm = stage_1(ArmGranule::K64, 48, 0x1200, 3);
    assert_eq!(
        page(&arm, &image, 0x400_2001_ffff),
        (
            Run::new(0x400_2001_0000, Span::new(0xabcd_0000, 0x1_0000)),
            rwx,
            0
        )
    );
    assert_eq!(
        page(&arm, &image, 0x400_5fff_ffff),
        (
            Run::new(0x400_4000_0000, Span::new(0x6000_0000, 512 << 20)),
            rwx,
            1
        )
    );
    let crooked = stage_1(ArmGranule::K64, 48, 0x1240, 3);
    assert_eq!(
        reason(&crooked, &image, 0, R),
        WalkReason::BadOutput {
            address: 0x1240,
            bits: 52
        }
    );
}

#[test]
fn arm_addresses_of_52_bits_are_put_together_from_their_parts() {
    // 4 KiB with LPA2, 52 bits, five levels: index 1 at each. Bits 9:8 are address bits 51:50.
    let image = Image::new(&[
        (0x1008, 0x2003),
        (0x2008, 0x0001_0000_0000_3303),
        (0xd_0000_0000_3008, 0x4003),
        (0x4008, 0x5003),
        // Bits 51:50 in 9:8, 49:48 in their places.
        (0x5008, 0x0003_1234_5678_9743),
        // A block of 512 GiB at index 2 of Arm's level 0: address bit 51.
        (0x2010, 0x0000_0000_0000_0641),
    ]);
    let arm = stage_1(ArmGranule::K4Lpa2, 52, 0x1000, 5);
    let rwx = Prot::RW | Prot::EXECUTE;
    assert_eq!(
        page(&arm, &image, 0x1_0080_4020_1000),
        (
            Run::new(0x1_0080_4020_1000, Span::new(0xf_1234_5678_9000, 0x1000)),
            rwx,
            0
        )
    );
    assert_eq!(
        page(&arm, &image, 0x1_0100_0000_0000),
        (
            Run::new(0x1_0100_0000_0000, Span::new(1 << 51, 512 << 30)),
            rwx,
            3
        )
    );
    // For a unit with 48 bits that is an address size fault, at the level that holds it.
    let fault = arm
        .with_output_bits(48)
        .walk(&image, 0x1_0080_4020_1000, R, &mut ())
        .unwrap_err();
    assert_eq!((fault.level, fault.reads), (3, 2));
    assert_eq!(
        fault.reason,
        WalkReason::BadOutput {
            address: 0xd_0000_0000_3000,
            bits: 48
        }
    );
    // Without LPA2 bits 9:8 are SH, and bits 49:48 are not looked at.
    let narrow = stage_1(ArmGranule::K4, 48, 0x2000, 4);
    let image = Image::new(&[(0x2008, 0x0003_0000_0000_3003), (0x3000, 0x4000_0741)]);
    assert_eq!(page(&narrow, &image, 0x80_0000_0000).0.pa, 0x4000_0000);

    // 16 KiB with LPA2, 52 bits: the root has 32 entries, from bit 47. A block of 64 GiB.
    let image = Image::new(&[
        (0x1008, 0x4303),
        (0xc_0000_0000_4010, 0x0001_0010_0000_0541),
    ]);
    let arm = stage_1(ArmGranule::K16Lpa2, 52, 0x1000, 4);
    assert_eq!(
        page(&arm, &image, 0x8020_0000_0000),
        (
            Run::new(0x8020_0000_0000, Span::new(0x5_0010_0000_0000, 64 << 30)),
            rwx,
            2
        )
    );

    // 64 KiB with LPA, 52 bits: bits 15:12 are address bits 51:48. A block of 4 TiB, and a table.
    let image = Image::new(&[
        (0x2010, 0x0000_8400_0000_f441),
        (0x2008, 0x3_a003),
        (0xa_0000_0003_0008, 0x7000_5441),
    ]);
    let arm = stage_1(ArmGranule::K64Lpa, 52, 0x2000, 3);
    assert_eq!(
        page(&arm, &image, 0x800_0000_0000),
        (
            Run::new(0x800_0000_0000, Span::new(0xf_8400_0000_0000, 4 << 40)),
            rwx,
            2
        )
    );
    assert_eq!(page(&arm, &image, 0x400_2000_0000).0.pa, 0x5_0000_6000_0000);
}

#[test]
fn arm_contiguous_entries_are_one_leaf_where_the_address_agrees() {
    // Index 0 of every level but the last. Page 1 of a group of 16, block 17 of one of 16.
    let image = Image::new(&[
        (0x1000, 0x2003),
        (0x2000, 0x3003),
        (0x3000, 0x4003),
        (0x4008, 0x0010_0005_0001_1443),
        // The second page of the group says that it is the third.
        (0x4010, 0x0010_0005_0001_3443),
        // 2 MiB blocks: entry 17 is the second of its group, 34 MiB = 0x220_0000.
        (0x3088, 0x0010_0000_8620_0441),
        // 1 GiB blocks: entry 16 is the first of its group of 16 GiB.
        (0x2080, 0x0010_0040_0000_0441),
    ]);
    let arm = stage_1(ArmGranule::K4, 48, 0x1000, 4);
    let whole = |iova| page(&arm, &image, iova).0;
    assert_eq!(
        whole(0x1000),
        Run::new(0, Span::new(0x5_0001_0000, 0x1_0000))
    );
    assert_eq!(
        whole(0x2000),
        Run::new(0x2000, Span::new(0x5_0001_3000, 0x1000))
    );
    assert_eq!(
        whole(0x220_0000),
        Run::new(0x200_0000, Span::new(0x8600_0000, 32 << 20))
    );
    assert_eq!(
        whole(16 << 30),
        Run::new(16 << 30, Span::new(256 << 30, 16 << 30))
    );
    // A unit without that size has the pages.
    let small = arm.with_page_sizes(PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30));
    assert_eq!(
        page(&small, &image, 0x1000).0,
        Run::new(0x1000, Span::new(0x5_0001_1000, 0x1000))
    );

    // 16 KiB: 128 pages (2 MiB) and 32 blocks (1 GiB); 64 KiB: 32 pages (2 MiB), 32 blocks (16 GiB).
    let image = Image::new(&[
        (0x4000, 0x8003),
        (0x8000, 0xc003),
        (0xc008, 0x0010_0000_8000_4443),
        (0x8008, 0x0010_0000_c200_0441),
    ]);
    let arm = stage_1(ArmGranule::K16, 47, 0x4000, 3);
    assert_eq!(
        page(&arm, &image, 0x4000).0,
        Run::new(0, Span::new(0x8000_0000, 2 << 20))
    );
    assert_eq!(
        page(&arm, &image, 0x200_0000).0,
        Run::new(0, Span::new(0xc000_0000, 1 << 30))
    );
    let image = Image::new(&[
        (0x1_0000, 0x2_0003),
        (0x2_0008, 0x0010_0000_8001_0443),
        (0x1_0008, 0x0010_0004_2000_0441),
    ]);
    let arm = stage_1(ArmGranule::K64, 42, 0x1_0000, 2);
    assert_eq!(
        page(&arm, &image, 0x1_0000).0,
        Run::new(0, Span::new(0x8000_0000, 2 << 20))
    );
    assert_eq!(
        page(&arm, &image, 0x2000_0000).0,
        Run::new(0, Span::new(0x4_0000_0000, 16 << 30))
    );
}

#[test]
fn arm_upper_half_begins_below_the_top() {
    // TTBR1 with 39 bits: from 0xffff_ff80_0000_0000 on, three levels.
    let format = FormatId::ArmStage1(config(ArmGranule::K4, 39, true));
    let arm = walker(format, 0x1000, 3);
    let image = Image::new(&[(0x1ff8, 0x4000_0441), (0x1000, 0x8000_0441)]);
    let rwx = Prot::RW | Prot::EXECUTE;
    assert_eq!(
        page(&arm, &image, u64::MAX),
        (
            Run::new(0xffff_ffff_c000_0000, Span::new(0x4000_0000, 1 << 30)),
            rwx,
            2
        )
    );
    assert_eq!(page(&arm, &image, 0xffff_ff80_0000_0000).0.pa, 0x8000_0000);
    for outside in [0, 0xffff_ff7f_ffff_ffff, 0x7f_ffff_ffff] {
        assert!(matches!(
            reason(&arm, &image, outside, R),
            WalkReason::OutsideAperture { .. }
        ));
    }
    // Neither stage 2 nor a regime with one privilege level has it.
    assert!(arm.with_single_privilege(true).aperture().is_none());
    let format = FormatId::ArmStage2(config(ArmGranule::K4, 39, true));
    assert!(walker(format, 0x1000, 3).aperture().is_none());
}

#[test]
fn arm_stage_2_begins_with_tables_side_by_side() {
    // 4 KiB, 40 bits, three levels: two tables, aligned to 8 KiB; bit 39 selects the second.
    // S2AP (7:6): 11 both, 01 reads, 10 writes. XN (54:53).
    let image = Image::new(&[
        (0x2000, 0x4000_04c1),
        (0x2008, 0x4000_0441),
        (0x2010, 0x4000_0481),
        (0x3000, 0x0040_0000_8000_04c1),
        (0x3008, 0x0020_0000_8000_04c1),
        (0x3010, 0x0060_0000_8000_04c1),
    ]);
    let arm = stage_2(ArmGranule::K4, 40, 0x2000, 3);
    let rwx = Prot::RW | Prot::EXECUTE;
    let prot = |walker: &Walker, iova| page(walker, &image, iova).1;
    assert_eq!(
        page(&arm, &image, 0),
        (Run::new(0, Span::new(0x4000_0000, 1 << 30)), rwx, 2)
    );
    assert_eq!(prot(&arm, 1 << 30), Prot::READ | Prot::EXECUTE);
    let write_only = arm.walk(&image, 2 << 30, W, &mut ()).unwrap();
    assert_eq!(write_only.prot, Prot::WRITE);
    assert!(arm.walk(&image, 2 << 30, R, &mut ()).is_err());
    assert_eq!(page(&arm, &image, 1 << 39).0.pa, 0x8000_0000);
    // XN 10: no instructions; 01: only unprivileged ones; 11: only privileged ones.
    let privileged = arm.with_privileged_requests(true);
    for (nth, user, system) in [(0, false, false), (1, true, false), (2, false, true)] {
        let iova = 1 << 39 | nth << 30;
        assert_eq!(prot(&arm, iova).contains(Prot::EXECUTE), user);
        assert_eq!(prot(&privileged, iova).contains(Prot::EXECUTE), system);
    }
    // Not aligned to both tables; not within the aperture.
    let crooked = stage_2(ArmGranule::K4, 40, 0x3000, 3);
    assert!(matches!(
        reason(&crooked, &image, 0, R),
        WalkReason::BadOutput { .. }
    ));
    assert!(matches!(
        reason(&arm, &image, 1 << 40, R),
        WalkReason::OutsideAperture { .. }
    ));

    // 16 tables at most; a single one with one level more, where the granule has that level.
    let levels = |granule, bits, levels| {
        let arm = stage_2(granule, bits, 0x10_0000, levels);
        arm.aperture().map(|aperture| aperture.bits)
    };
    assert_eq!(levels(ArmGranule::K4, 43, 3), Some(43));
    assert_eq!(levels(ArmGranule::K4, 44, 3), None);
    assert_eq!(levels(ArmGranule::K4, 44, 4), Some(44));
    assert_eq!(levels(ArmGranule::K4, 40, 4), Some(40));
    assert_eq!(levels(ArmGranule::K4, 39, 4), None);
    assert_eq!(levels(ArmGranule::K4, 52, 4), None);
    assert_eq!(levels(ArmGranule::K4Lpa2, 52, 4), Some(52));
    assert_eq!(levels(ArmGranule::K4Lpa2, 52, 5), Some(52));
    assert_eq!(levels(ArmGranule::K16, 48, 3), Some(48));
    assert_eq!(levels(ArmGranule::K16, 48, 4), None);
    assert_eq!(levels(ArmGranule::K16Lpa2, 52, 4), Some(52));
    assert_eq!(levels(ArmGranule::K64, 46, 2), Some(46));
    assert_eq!(levels(ArmGranule::K64, 52, 3), None);
    assert_eq!(levels(ArmGranule::K64Lpa, 52, 3), Some(52));
    // Stage 1 has one table.
    let levels = |granule, bits, levels| {
        let arm = stage_1(granule, bits, 0x10_0000, levels);
        arm.aperture().map(|aperture| aperture.bits)
    };
    assert_eq!(levels(ArmGranule::K4, 40, 3), None);
    assert_eq!(levels(ArmGranule::K4, 40, 4), Some(40));
    assert_eq!(levels(ArmGranule::K16, 48, 4), Some(48));
    assert_eq!(levels(ArmGranule::K64, 52, 3), Some(52));
    for bits in [0, 12, 63, 64, 255] {
        assert_eq!(levels(ArmGranule::K4, bits, 4), None);
    }
}
