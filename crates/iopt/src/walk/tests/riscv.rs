//! RISC-V, both stages.
//!
//! Bits: 0 V, 1 R, 2 W, 3 X, 4 U, 5 G, 6 A, 7 D, 9:8 for software, 53:10 page number, 60:54
//! reserved, 62:61 PBMT, 63 N.

use super::*;

/// IOVA 0x4020_1000 has index 1 at each of three levels.
fn image() -> Image {
    Image::new(&[
        // Tables 2 and 3: page number << 10, V.
        (0x1008, 0x801),
        (0x2008, 0xc01),
        // Page number 0xabcde; D A U W R V.
        (0x3008, 0x2af3_78d7),
        // The same for privileged requests (no U), with X and G.
        (0x3010, 0x2af3_78ef),
        // The highest page, bits 9:8 set, and I/O (PBMT 2).
        (0x3018, 0x403f_ffff_ffff_ffd7),
        // Not accessed (D, no A); accessed and clean.
        (0x3020, 0x2af3_7897),
        (0x3028, 0x2af3_7857),
        // Executable only.
        (0x3030, 0x2af3_78d9),
        // N: 64 KiB at 0x5_0001_0000: page number 0x500010, the lowest four bits 1000.
        (0x3080, 0x8000_0001_4000_60d7),
        (0x30f8, 0x8000_0001_4000_60d7),
        // 2 MiB at 0x4060_0000, R.
        (0x2010, 0x1018_0053),
        // 1 GiB at 0x1_8000_0000, R X.
        (0x1010, 0x6000_005b),
    ])
}

#[test]
fn sv39_with_each_leaf_size() {
    let image = image();
    let riscv = walker(FormatId::RiscV, 0x1000, 3);
    let at = |iova, access| riscv.walk(&image, iova, access, &mut ()).unwrap();
    assert_eq!(
        at(0x4020_1abc, W),
        Translation {
            pa: 0xabcd_eabc,
            page: Run::new(0x4020_1000, Span::new(0xabcd_e000, 0x1000)),
            open: Span::new(0x4020_1000, 0x1000),
            level: 0,
            prot: Prot::RW,
            clean: false,
            reads: 3,
        }
    );
    let found = at(0x4020_3fff, W);
    assert_eq!(found.pa, 0x00ff_ffff_ffff_ffff);
    assert_eq!(found.prot, Prot::RW | Prot::DEVICE);
    for iova in [0x4021_0abc, 0x4021_fabc] {
        let found = at(iova, W);
        assert_eq!(found.pa, iova - 0x4021_0000 + 0x5_0001_0000);
        assert_eq!(
            found.page,
            Run::new(0x4021_0000, Span::new(0x5_0001_0000, 0x1_0000))
        );
    }
    let found = at(0x4041_2345, R);
    assert_eq!(
        found.page,
        Run::new(0x4040_0000, Span::new(0x4060_0000, 2 << 20))
    );
    assert_eq!((found.prot, found.level, found.reads), (Prot::READ, 1, 2));
    let found = at(0x8765_4321, R);
    assert_eq!(found.pa, 0x1_8765_4321);
    assert_eq!(found.prot, Prot::READ | Prot::EXECUTE);
    assert_eq!((found.level, found.reads), (2, 1));
    // Bits 63:39 repeat bit 38.
    for iova in [0x40_0000_0000, 0xffff_ff80_0000_0000 - 1] {
        assert!(matches!(
            reason(&riscv, &image, iova, R),
            WalkReason::OutsideAperture { .. }
        ));
    }
    let top = Image::new(&[(0x1ff8, 0x6000_0053)]);
    let found = riscv.walk(&top, 0xffff_ffff_c000_0000, R, &mut ());
    assert_eq!(found.unwrap().pa, 0x1_8000_0000);
    // A unit of 40 bits.
    let narrow = riscv.with_output_bits(40);
    assert!(matches!(
        reason(&narrow, &image, 0x4020_3000, R),
        WalkReason::BadOutput { bits: 40, .. }
    ));
}

#[test]
fn four_and_five_levels_and_their_largest_leaves() {
    // 2 GiB is no multiple of 512 GiB.
    let image = Image::new(&[(0x2008, 0x2000_0053)]);
    assert_eq!(
        reason(
            &walker(FormatId::RiscV, 0x2000, 4),
            &image,
            0x80_0000_0000,
            R
        ),
        WalkReason::Reserved { bits: 0x2000_0000 }
    );
    // 2^39 is page number 2^27, and in the entry bit 37; 2^48 is 2^36, and bit 46.
    let good = Image::new(&[
        (0x2008, 0x0000_0020_0000_0053),
        (0x3008, 0x0000_4000_0000_0053),
    ]);
    let found = walker(FormatId::RiscV, 0x2000, 4)
        .walk(&good, 0x80_1234_5678, R, &mut ())
        .unwrap();
    assert_eq!(
        found.page,
        Run::new(0x80_0000_0000, Span::new(0x80_0000_0000, 1 << 39))
    );
    let found = walker(FormatId::RiscV, 0x3000, 5)
        .walk(&good, 0x1_0000_1234_5678, R, &mut ())
        .unwrap();
    assert_eq!(
        found.page,
        Run::new(0x1_0000_0000_0000, Span::new(0x1_0000_0000_0000, 1 << 48))
    );
    for levels in [0, 1, 2, 6, 255] {
        for format in [FormatId::RiscV, FormatId::RiscVG] {
            let none = walker(format, 0x4000, levels);
            assert!(matches!(
                reason(&none, &image, 0, R),
                WalkReason::Levels { .. }
            ));
            assert_eq!(none.aperture(), None);
        }
    }
}

#[test]
fn what_is_reserved_faults() {
    let riscv = walker(FormatId::RiscV, 0x1000, 3);
    // (entry at level 0, reserved bits)
    for (word, bits) in [
        // 60:54.
        (0x0040_0000_2af3_78d7, 0x0040_0000_0000_0000),
        (0x1000_0000_2af3_78d7, 0x1000_0000_0000_0000),
        // W without R, with and without X.
        (0x2af3_78d5, 4),
        (0x2af3_78dd, 4),
        // PBMT 3.
        (0x6000_0000_2af3_78d7, 0x6000_0000_0000_0000),
        // N with other sizes: ...xxx1, ...xx10, ...x100, 0000.
        (0x8000_0001_4000_44d7, 0x8000_0000_0000_0400),
        (0x8000_0001_4000_48d7, 0x8000_0000_0000_0800),
        (0x8000_0001_4000_50d7, 0x8000_0000_0000_1000),
        (0x8000_0001_4000_40d7, 0x8000_0000_0000_0000),
        (0x8000_0001_4000_64d7, 0x8000_0000_0000_2400),
    ] {
        let image = Image::new(&[(0x1008, 0x801), (0x2008, 0xc01), (0x3008, word)]);
        assert_eq!(
            reason(&riscv, &image, 0x4020_1000, R),
            WalkReason::Reserved { bits },
            "{word:#x}"
        );
    }
    // (entry at level 1, reserved bits)
    for (word, bits) in [
        // D, A, U, PBMT and N in an entry that leads to a table.
        (0xc81, 0x80),
        (0xc41, 0x40),
        (0xc11, 0x10),
        (0x2000_0000_0000_0c01, 0x2000_0000_0000_0000),
        (0x8000_0000_0000_0c01, 0x8000_0000_0000_0000),
        // N above the lowest level.
        (0x8000_0000_1018_0053, 0x8000_0000_0000_0000),
        // 2 MiB pages that are not multiples of 2 MiB.
        (0x1018_0453, 0x400),
        (0x101c_0053, 0x4_0000),
    ] {
        let image = Image::new(&[(0x1008, 0x801), (0x2008, word)]);
        assert_eq!(
            reason(&riscv, &image, 0x4020_1000, R),
            WalkReason::Reserved { bits },
            "{word:#x}"
        );
    }
    // G in an entry that leads to a table is no error.
    let image = Image::new(&[(0x1008, 0x821), (0x2008, 0x1018_0053)]);
    assert!(riscv.walk(&image, 0x4020_1000, R, &mut ()).is_ok());
    // A table below the lowest level; nothing.
    let image = Image::new(&[(0x1008, 0x801), (0x2008, 0xc01), (0x3008, 0x801)]);
    assert_eq!(
        reason(&riscv, &image, 0x4020_1000, R),
        WalkReason::NextLevel { next: 0 }
    );
    let image = Image::new(&[(0x1008, !1)]);
    assert_eq!(
        reason(&riscv, &image, 0x4020_1000, R),
        WalkReason::NotPresent
    );
}

#[test]
fn a_unit_without_an_extension_reserves_its_bits() {
    let image = image();
    let riscv = walker(FormatId::RiscV, 0x1000, 3);
    let pages = PageSizes::from_log2_range(12, 63);
    let without = riscv.with_page_sizes(PageSizes::from_bits(pages.bits() & !(1 << 16)));
    assert_eq!(
        reason(&without, &image, 0x4021_0000, R),
        WalkReason::Reserved {
            bits: 0x8000_0000_0000_0000
        }
    );
    assert_eq!(
        reason(&riscv.with_svpbmt(false), &image, 0x4020_3000, R),
        WalkReason::Reserved {
            bits: 0x4000_0000_0000_0000
        }
    );
}

#[test]
fn accessed_and_dirty_are_the_units_or_they_fault() {
    let image = image();
    let sets = walker(FormatId::RiscV, 0x1000, 3);
    for iova in [0x4020_4000, 0x4020_5000] {
        let found = sets.walk(&image, iova, W, &mut ()).unwrap();
        assert_eq!(found.prot, Prot::RW);
    }
    let software = sets
        .with_hardware_accessed(false)
        .with_hardware_dirty(false);
    assert_eq!(
        reason(&software, &image, 0x4020_4000, R),
        WalkReason::AccessFlag
    );
    assert!(software.walk(&image, 0x4020_5000, R, &mut ()).is_ok());
    assert_eq!(
        reason(&software, &image, 0x4020_5000, W),
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
    assert!(software.walk(&image, 0x4020_1000, W, &mut ()).is_ok());
}

#[test]
fn pages_are_for_users_or_for_the_privileged() {
    let image = image();
    let user = walker(FormatId::RiscV, 0x1000, 3);
    let privileged = user.with_privileged_requests(true);
    assert_eq!(
        reason(&user, &image, 0x4020_2000, R),
        WalkReason::Denied {
            granted: Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED
        }
    );
    let found = privileged.walk(&image, 0x4020_2000, W, &mut ()).unwrap();
    assert_eq!(found.prot, Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED);
    // User pages: never executed, and read only with SUM.
    let found = privileged.walk(&image, 0x8000_0000, R, &mut ()).unwrap();
    assert_eq!(found.prot, Prot::READ);
    assert_eq!(
        reason(
            &privileged.with_supervisor_user_access(false),
            &image,
            0x8000_0000,
            R
        ),
        WalkReason::Denied {
            granted: Prot::empty()
        }
    );
    // Executable only.
    assert_eq!(
        reason(&user, &image, 0x4020_6000, R),
        WalkReason::Denied {
            granted: Prot::EXECUTE
        }
    );
}

#[test]
fn the_second_stage_has_a_root_of_16_kib_and_only_user_pages() {
    // IOVA 0x1ff_ffff_f000 has index 2047 at the root, then 511 and 511.
    let image = Image::new(&[
        (0x7ff8, 0x2001),
        (0x8ff8, 0x2401),
        (0x9ff8, 0x2af3_78d7),
        (0x9ff0, 0x2af3_78c7),
        (0x4000, 0x6000_0053),
    ]);
    for (levels, bits) in [(3, 41), (4, 50), (5, 59)] {
        let aperture = walker(FormatId::RiscVG, 0x4000, levels).aperture();
        assert_eq!(aperture, Some(Aperture::zeros(bits)));
    }
    let riscv = walker(FormatId::RiscVG, 0x4000, 3);
    let found = riscv.walk(&image, 0x1ff_ffff_fabc, W, &mut ()).unwrap();
    assert_eq!(
        (found.pa, found.prot, found.reads),
        (0xabcd_eabc, Prot::RW, 3)
    );
    assert!(matches!(
        reason(&riscv, &image, 0x200_0000_0000, R),
        WalkReason::OutsideAperture { .. }
    ));
    // No U.
    for riscv in [riscv, riscv.with_privileged_requests(true)] {
        assert_eq!(
            reason(&riscv, &image, 0x1ff_ffff_e000, R),
            WalkReason::Denied {
                granted: Prot::empty()
            }
        );
    }
    // The root is aligned to its size.
    let riscv = walker(FormatId::RiscVG, 0x5000, 3);
    assert!(matches!(
        reason(&riscv, &image, 0, R),
        WalkReason::BadOutput {
            address: 0x5000,
            ..
        }
    ));
}
