//! ARMv7 short descriptors.
//!
//! Section: AP\[1:0\] 11:10, AP\[2\] 15, XN 4, PXN 0, supersection 18. Pages: AP\[1:0\] 5:4, AP\[2\] 9; XN
//! 0 in a small page, 15 in a large one.

use super::*;

/// Pairs of 32-bit words, the even one in the low half.
fn image32(words: &[(u64, u32)]) -> Image {
    let mut image = BTreeMap::new();
    for &(address, word) in words {
        *image.entry(address & !7).or_insert(0) |= u64::from(word) << (8 * (address & 4));
    }
    Image(image)
}

fn image() -> Image {
    image32(&[
        // Table at 0x8400: indices 1 and then 0x01, 0x02, 0x10, 0x1f.
        (0x4004, 0x8401),
        // Small pages at 0xabcde000: AP 011 and 111 with XN.
        (0x8404, 0xabcd_e032),
        (0x8408, 0xabcd_e233),
        // For privileged requests only (AP 001).
        (0x840c, 0xabcd_e012),
        // AP[0] 0: AP 010.
        (0x8414, 0xabcd_e022),
        // A large page at 0x5678_0000, XN; two of its sixteen entries.
        (0x8440, 0x5678_8031),
        (0x847c, 0x5678_8031),
        // A section at 0x1230_0000, AP 011.
        (0x4008, 0x1230_0c02),
        // With XN (4) and read-only (AP[2] 15); with PXN (0).
        (0x400c, 0x1230_8c12),
        (0x4010, 0x1230_0c03),
        // A supersection at 0x12_3400_0000: 31:24, 23:20, 8:5; two of its sixteen entries.
        (0x4040, 0x3424_0c22),
        (0x407c, 0x3424_0c22),
        // A table with PXN (2).
        (0x4014, 0x8405),
    ])
}

#[test]
fn each_leaf_size() {
    let image = image();
    let arm = walker(FormatId::ArmV7s, 0x4000, 2);
    let all = Prot::RW | Prot::EXECUTE;
    let at = |iova, access| arm.walk(&image, iova, access, &mut ()).unwrap();
    assert_eq!(
        at(0x10_1abc, W),
        Translation {
            pa: 0xabcd_eabc,
            page: Run::new(0x10_1000, Span::new(0xabcd_e000, 0x1000)),
            open: Span::new(0x10_1000, 0x1000),
            level: 0,
            prot: all,
            clean: false,
            reads: 2,
        }
    );
    assert_eq!(at(0x10_2abc, R).prot, Prot::READ);
    for iova in [0x11_0abc, 0x11_fabc] {
        let found = at(iova, W);
        assert_eq!(
            found.page,
            Run::new(0x11_0000, Span::new(0x5678_0000, 0x1_0000))
        );
        assert_eq!((found.prot, found.level), (Prot::RW, 0));
        assert_eq!(found.pa & 0xffff, iova & 0xffff);
    }
    let found = at(0x21_2345, W);
    assert_eq!(
        found.page,
        Run::new(0x20_0000, Span::new(0x1230_0000, 1 << 20))
    );
    assert_eq!((found.prot, found.level, found.reads), (all, 1, 1));
    assert_eq!(at(0x30_0000, R).prot, Prot::READ);
    for iova in [0x101_2345, 0x1f1_2345] {
        let found = at(iova, W);
        assert_eq!(
            found.page,
            Run::new(0x100_0000, Span::new(0x12_3400_0000, 16 << 20))
        );
        assert_eq!(found.pa, 0x12_3400_0000 + iova - 0x100_0000);
    }
    assert_eq!(reason(&arm, &image, 0x10_0000, R), WalkReason::NotPresent);
    assert_eq!(reason(&arm, &image, 0x60_0000, R), WalkReason::NotPresent);
    assert_eq!(
        reason(&arm, &image, 0x10_2000, W),
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
    assert!(matches!(
        reason(&arm, &image, 1 << 32, R),
        WalkReason::OutsideAperture { .. }
    ));
    // A supersection beyond 32 bits where the unit has no more.
    assert!(matches!(
        reason(&arm.with_output_bits(32), &image, 0x100_0000, R),
        WalkReason::BadOutput { bits: 32, .. }
    ));
}

#[test]
fn the_last_index_of_both_levels_and_the_root_alignment() {
    let image = image32(&[(0x7ffc, 0x8401), (0x87fc, 0xffff_f032)]);
    let arm = walker(FormatId::ArmV7s, 0x4000, 2);
    let found = arm.walk(&image, 0xffff_ffff, W, &mut ()).unwrap();
    assert_eq!(found.pa, 0xffff_ffff);
    let arm = walker(FormatId::ArmV7s, 0x5000, 2);
    assert!(matches!(
        reason(&arm, &image, 0, R),
        WalkReason::BadOutput { .. }
    ));
    for levels in [0, 1, 3, 255] {
        let arm = walker(FormatId::ArmV7s, 0x4000, levels);
        assert!(matches!(
            reason(&arm, &image, 0, R),
            WalkReason::Levels { .. }
        ));
    }
}

#[test]
fn with_the_access_flag_ap_0_is_no_permission() {
    let image = image();
    let user = walker(FormatId::ArmV7s, 0x4000, 2);
    let privileged = user.with_privileged_requests(true);
    // AP[2:1] 00: for privileged requests only.
    let granted = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(
        reason(&user, &image, 0x10_3000, R),
        WalkReason::Denied { granted }
    );
    let found = privileged.walk(&image, 0x10_3000, W, &mut ()).unwrap();
    assert_eq!(found.prot, granted);
    // AP[2:1] 01 with the flag 0.
    assert!(user.walk(&image, 0x10_5000, W, &mut ()).is_ok());
    assert_eq!(
        reason(&user.with_hardware_accessed(false), &image, 0x10_5000, W),
        WalkReason::AccessFlag
    );
}

#[test]
fn without_the_access_flag_three_bits_are_permissions() {
    // Small pages with AP 000 to 111 at indices 0 to 7.
    let words: Vec<(u64, u32)> = (0..8)
        .map(|ap: u32| {
            let word = 0xabcd_e002 | (ap & 3) << 4 | (ap >> 2) << 9;
            (0x8400 + 4 * u64::from(ap), word)
        })
        .chain([(0x4000, 0x8401)])
        .collect();
    let image = image32(&words);
    let user = walker(FormatId::ArmV7s, 0x4000, 2).with_access_flag(false);
    let privileged = user.with_privileged_requests(true);
    // DDI 0406C, table "VMSAv7 MMU access permissions": (privileged, user) for each.
    let (none, read, all) = (Prot::empty(), Prot::READ, Prot::RW);
    let expected = [
        (none, none),
        (all, none),
        (all, read),
        (all, all),
        (none, none),
        (read, none),
        (read, read),
        (read, read),
    ];
    for (ap, (for_privileged, for_user)) in expected.into_iter().enumerate() {
        let iova = (ap as u64) << 12;
        for (walker, allowed) in [(&privileged, for_privileged), (&user, for_user)] {
            for access in [R, W] {
                let found = walker.walk(&image, iova, access, &mut ());
                assert_eq!(
                    found.is_ok(),
                    allowed.contains(access.needs()),
                    "AP {ap:03b} {access}"
                );
            }
        }
    }
}

#[test]
fn pxn_is_for_privileged_requests() {
    let image = image();
    let user = walker(FormatId::ArmV7s, 0x4000, 2);
    let privileged = user.with_privileged_requests(true);
    // A section with PXN; a small page below a table with PXN.
    for iova in [0x40_0000, 0x50_1000] {
        let found = user.walk(&image, iova, R, &mut ()).unwrap();
        assert!(found.prot.contains(Prot::EXECUTE));
        let found = privileged.walk(&image, iova, R, &mut ()).unwrap();
        assert_eq!(found.prot, Prot::RW);
    }
}
