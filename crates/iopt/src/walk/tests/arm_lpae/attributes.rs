//! Reserved bits, access flag, dirty state and permissions.

use super::*;

#[test]
fn arm_invalid_and_reserved_encodings_translate_nothing() {
    let entry = |walker: &Walker, level: u8, word| {
        // A chain of tables in which the entry at `level` is `word`.
        let mut words = [
            (0x4000, 0x8443),
            (0x3000, 0x4003),
            (0x2000, 0x3003),
            (0x1000, 0x2003),
        ];
        words[usize::from(level)].1 = word;
        walker
            .walk(&Image::new(&words), 0, R, &mut ())
            .map_err(|fault| {
                assert_eq!((fault.level, fault.entry), (level, word));
                fault.reason
            })
    };
    let s1 = stage_1(ArmGranule::K4, 48, 0x1000, 4);
    let s2 = stage_2(ArmGranule::K4, 48, 0x1000, 4);
    for arm in [s1, s2] {
        for level in 0..4 {
            // Bit 0 is 0: the rest is software's.
            assert_eq!(
                entry(&arm, level, 0xffff_ffff_ffff_fffe),
                Err(WalkReason::NotPresent)
            );
        }
        // 0b01 at the lowest level, and a block at Arm's level 0 without LPA2.
        assert_eq!(entry(&arm, 0, 0x8441), Err(WalkReason::NotPresent));
        assert_eq!(entry(&arm, 3, 0x441), Err(WalkReason::NotPresent));
    }
    // A block of 4 TiB without LPA, of 64 GiB without LPA2, of 512 GiB with it.
    let root = Image::new(&[(0x1_0000, 0x441)]);
    for (granule, levels, bits) in [(ArmGranule::K64, 3, 48), (ArmGranule::K16, 3, 47)] {
        let arm = stage_1(granule, bits, 0x1_0000, levels);
        assert_eq!(reason(&arm, &root, 0, R), WalkReason::NotPresent);
    }
    let wide = stage_1(ArmGranule::K4Lpa2, 48, 0x1_0000, 4);
    assert_eq!(page(&wide, &root, 0).0.len, 512 << 30);
    // Level -1 has none.
    let wide = stage_1(ArmGranule::K4Lpa2, 52, 0x1_0000, 5);
    assert_eq!(reason(&wide, &root, 0, R), WalkReason::NotPresent);
    // Bits below a block's size and above an address of 48 bits are not looked at.
    let found = entry(&s1, 1, 0x0003_0000_801f_f441).unwrap();
    assert_eq!(found.page, Run::new(0, Span::new(0x8000_0000, 2 << 20)));
}

#[test]
fn arm_access_flag_and_dirty_state_depend_on_who_keeps_them() {
    // Page 0: AF 0. Page 1: AF, AP[2], DBM: clean. Page 2: AF, AP[2]: read-only.
    let words = [
        (0x1000, 0x2003),
        (0x2000, 0x3003),
        (0x3000, 0x8043),
        (0x3008, 0x0008_0000_0000_94c3),
        (0x3010, 0x0000_0000_0000_a4c3),
    ];
    let image = Image::new(&words);
    let arm = stage_1(ArmGranule::K4, 39, 0x1000, 3);
    assert!(arm.walk(&image, 0, W, &mut ()).is_ok());
    assert!(arm.walk(&image, 0x1000, W, &mut ()).is_ok());
    assert!(arm.walk(&image, 0x2000, W, &mut ()).is_err());
    let software = arm.with_hardware_accessed(false).with_hardware_dirty(false);
    let fault = software.walk(&image, 0, R, &mut ()).unwrap_err();
    assert_eq!((fault.reason, fault.level), (WalkReason::AccessFlag, 0));
    assert_eq!(
        fault.to_string(),
        "read of 0x0: the entry 0x8043 of the table at 0x3000 (level 0) was not accessed yet, and \
         the unit cannot mark it"
    );
    assert!(software.walk(&image, 0x1000, R, &mut ()).is_ok());
    let denied = WalkReason::Denied {
        granted: Prot::READ | Prot::EXECUTE,
    };
    assert_eq!(reason(&software, &image, 0x1000, W), denied);
    // An address that is too large comes first, then the flag, then permission.
    let image = Image::new(&[(0x1000, 0x40_0000_0081)]);
    let narrow = software.with_output_bits(36);
    assert!(matches!(
        reason(&narrow, &image, 0, W),
        WalkReason::BadOutput { .. }
    ));
    assert_eq!(reason(&software, &image, 0, W), WalkReason::AccessFlag);

    // Stage 2: DBM with S2AP 01 is clean.
    let mut words = words;
    words[2].1 = 0x0008_0000_0000_8443;
    let image = Image::new(&words);
    let arm = stage_2(ArmGranule::K4, 39, 0x1000, 3);
    assert!(arm.walk(&image, 0, W, &mut ()).is_ok());
    let software = arm.with_hardware_dirty(false);
    assert!(software.walk(&image, 0, W, &mut ()).is_err());
}

#[test]
fn arm_permissions_of_tables_count_when_the_leaf_is_reached() {
    let walk = |walker: Walker, table: u64, leaf: u64, access| {
        let image = Image::new(&[(0x1000, table | 0x2003), (0x2000, leaf)]);
        let mut cache = Tables::default();
        let first = walker.walk(&image, 0, access, &mut cache);
        // Also from a cache of upper levels.
        let again = walker.walk(&image, 0, access, &mut cache);
        assert_eq!(first.map(|t| (t.pa, t.prot)), again.map(|t| (t.pa, t.prot)));
        first
            .map(|t| t.prot)
            .map_err(|fault| (fault.level, fault.reason))
    };
    let arm = stage_1(ArmGranule::K4, 30, 0x1000, 2);
    let privileged = arm.with_privileged_requests(true);
    let leaf = 0x4000_0443;
    // A page: AF, AP[1]. For privileged requests what users write is not executable.
    assert_eq!(walk(arm, 0, leaf, W), Ok(Prot::RW | Prot::EXECUTE));
    assert_eq!(walk(privileged, 0, leaf, W), Ok(Prot::RW));
    // APTable[1] (62): no writes; an invalid entry below it is a translation fault all the same.
    let no_writes = 1 << 62;
    let granted = Prot::READ | Prot::EXECUTE;
    assert_eq!(walk(arm, no_writes, leaf, R), Ok(granted));
    assert_eq!(
        walk(arm, no_writes, leaf, W),
        Err((0, WalkReason::Denied { granted }))
    );
    assert_eq!(walk(arm, no_writes, 0, W), Err((0, WalkReason::NotPresent)));
    // APTable[0] (61): privileged requests only.
    assert!(walk(arm, 1 << 61, leaf, R).is_err());
    let prot = walk(privileged, 1 << 61, leaf, W).unwrap();
    assert_eq!(prot, Prot::RW | Prot::PRIVILEGED);
    // UXNTable (60), PXNTable (59).
    assert_eq!(walk(arm, 1 << 60, leaf, W), Ok(Prot::RW));
    assert_eq!(walk(arm, 1 << 59, leaf, W), Ok(Prot::RW | Prot::EXECUTE));
    // A privileged page: AP 00.
    let system = 0x4000_0403;
    let all = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(walk(privileged, 0, system, W), Ok(all));
    let no_execute = Prot::RW | Prot::PRIVILEGED;
    assert_eq!(walk(privileged, 1 << 59, system, W), Ok(no_execute));
    assert_eq!(walk(privileged, 0, system | 1 << 53, W), Ok(no_execute));
    // With one privilege level: XN is bit 54, XNTable bit 60; AP[1], APTable[0] and the bits of
    // privileged execution mean nothing.
    let one = arm.with_single_privilege(true);
    let ignored = 1 << 61 | 1 << 59;
    assert_eq!(
        walk(one, ignored, system | 1 << 53, W),
        Ok(Prot::RW | Prot::EXECUTE)
    );
    assert_eq!(walk(one, 0, leaf | 1 << 54, W), Ok(Prot::RW));
    assert_eq!(walk(one, 1 << 60, leaf, W), Ok(Prot::RW));
    // Tables of stage 2 have no attributes.
    let s2 = stage_2(ArmGranule::K4, 30, 0x1000, 2);
    let prot = walk(s2, 0xf800_0000_0000_0000, leaf | 0x80, W);
    assert_eq!(prot, Ok(Prot::RW | Prot::EXECUTE));
}
