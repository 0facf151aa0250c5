//! AMD v1.

use super::*;

/// An AMD entry that leads to a table: PR (0), Next Level (11:9), IR (61), IW (62).
fn amd_table(address: u64, next_level: u64) -> u64 {
    0x6000_0000_0000_0001 | next_level << 9 | address
}

#[test]
fn amd_levels_one_to_six() {
    // Page translation entry with Next Level 0, FC (60), IR, IW, A (5), D (6).
    let mut words: Vec<(u64, u64)> = Vec::from([(0x1ff8, 0x7000_0000_1234_5061)]);
    // A table of n levels is at n * 0x1000; its last used entry leads to the one below.
    for levels in 2..=6u64 {
        let last = if levels == 6 { 127 } else { 511 };
        words.push((
            levels * 0x1000 + last * 8,
            amd_table((levels - 1) * 0x1000, levels - 1),
        ));
    }
    let image = Image::new(&words);
    for levels in 1..=6u8 {
        let amd = walker(FormatId::AmdV1, u64::from(levels) * 0x1000, levels);
        let last = if levels == 6 {
            u64::MAX
        } else {
            (1 << (12 + 9 * levels)) - 1
        };
        let found = amd.walk(&image, last, W, &mut ()).unwrap();
        assert_eq!((found.pa, found.reads), (0x1234_5fff, levels));
        assert_eq!(
            found.page,
            Run::new(last & !0xfff, Span::new(0x1234_5000, 0x1000))
        );
        assert_eq!(found.prot, Prot::RW | Prot::COHERENT);
        if levels < 6 {
            assert!(matches!(
                reason(&amd, &image, last + 1, R),
                WalkReason::OutsideAperture { aperture } if aperture.bits == 12 + 9 * u32::from(levels)
            ));
        }
    }
    for levels in [0, 7] {
        let amd = walker(FormatId::AmdV1, 0x1000, levels);
        let format = FormatId::AmdV1;
        assert_eq!(
            reason(&amd, &image, 0, R),
            WalkReason::Levels { format, levels }
        );
    }
}

#[test]
fn amd_sizes_in_the_address() {
    // IR, PR, Next Level 7, and the address bits 51:12 of the specification's size examples:
    // the lowest 0 tells the size.
    let cases = [
        // level, address bits, page address, size
        (0, 0x1_0000_2000u64, 0x1_0000_2000u64, 13), // bit 12 is 0: 8 KiB; 13 is of the address
        (0, 0x1_0000_7000, 0x1_0000_0000, 16),       // 12 to 14 are 1, 15 is 0: 64 KiB
        (0, 0x1_0007_f000, 0x1_0000_0000, 20),       // 1 MiB
        (1, 0x1_001f_f000, 0x1_0000_0000, 22),       // 4 MiB
        (1, 0x1_0fff_f000, 0x1_0000_0000, 29),       // 512 MiB
        (2, 0x7fff_f000, 0, 32),                     // 4 GiB
        (3, 0x7f_ffff_f000, 0, 40),                  // 1 TiB
        (4, 0x7_ffff_ffff_f000, 0, 52),              // 4 PiB
    ];
    for (level, bits, pa, log2) in cases {
        let image = Image::new(&[(0x1000, 0x2000_0000_0000_0e01 | bits)]);
        let amd = walker(FormatId::AmdV1, 0x1000, level + 1);
        let found = amd.walk(&image, 0x123, R, &mut ()).unwrap();
        assert_eq!(found.page, Run::new(0, Span::new(pa, 1 << log2)), "{log2}");
        assert_eq!(
            (found.pa, found.prot, found.level),
            (pa + 0x123, Prot::READ, level)
        );
    }
    // Sizes of the level itself (they are Next Level 0) and of other levels are refused.
    for (level, bits, log2) in [
        (1, 0x7000u64, 16),             // 64 KiB at the level of 2 MiB
        (1, 0xf_f000, 21),              // 2 MiB at its own level
        (0, 0xf_f000, 21),              // 2 MiB at the level of 4 KiB
        (1, 0x1fff_f000, 30),           // 1 GiB at the level of 2 MiB
        (5, 0x000f_ffff_ffff_f000, 64), // no 0 at all
    ] {
        let image = Image::new(&[(0x1000, 0x2000_0000_0000_0e01 | bits)]);
        let amd = walker(FormatId::AmdV1, 0x1000, level + 1);
        assert_eq!(
            reason(&amd, &image, 0, R),
            WalkReason::PageSize { log2 },
            "{log2} {level}"
        );
    }
    // Next Level 0: a page of the level's own size.
    for level in 0..5u8 {
        let image = Image::new(&[(0x1000, 0x2000_0000_0000_0001)]);
        let amd = walker(FormatId::AmdV1, 0x1000, level + 1);
        let found = amd.walk(&image, 0, R, &mut ()).unwrap();
        assert_eq!(found.page.len, 1 << (12 + 9 * level));
    }
    // 2^57 bytes cannot lie in 52 bits.
    let image = Image::new(&[(0x1000, 0x2000_0000_0000_0001)]);
    let amd = walker(FormatId::AmdV1, 0x1000, 6);
    let address = (1 << 57) - 1;
    assert_eq!(
        reason(&amd, &image, 0, R),
        WalkReason::BadOutput { address, bits: 52 }
    );
}

#[test]
fn amd_skipped_levels_need_zero_address_bits() {
    // Four levels; entry 1 leads straight to a table of one level.
    let image = Image::new(&[
        (0x1008, amd_table(0x2000, 1)),
        (0x2018, 0x6000_0000_0000_5001),
    ]);
    let amd = walker(FormatId::AmdV1, 0x1000, 4);
    let found = amd.walk(&image, 0x80_0000_3000, R, &mut ()).unwrap();
    assert_eq!((found.pa, found.reads), (0x5000, 2));
    for bits in [0x20_0000, 0x4000_0000, 0x7f_ffe0_0000] {
        let iova = 0x80_0000_3000 | bits;
        assert_eq!(
            reason(&amd, &image, iova, R),
            WalkReason::SkippedBits { bits }
        );
    }
}

#[test]
fn amd_entries_that_lead_nowhere() {
    let fault = |word: u64, access| {
        let image = Image::new(&[(0x1000, word)]);
        walker(FormatId::AmdV1, 0x1000, 3)
            .walk(&image, 0, access, &mut ())
            .unwrap_err()
    };
    // Next levels that are not lower, one of them the table itself.
    assert_eq!(
        fault(amd_table(0x1000, 3), R).reason,
        WalkReason::NextLevel { next: 2 }
    );
    assert_eq!(
        fault(amd_table(0x1000, 6), R).reason,
        WalkReason::NextLevel { next: 5 }
    );
    // PR is what makes an entry present, whatever else is set.
    assert_eq!(
        fault(amd_table(0x2000, 2) & !1, R).reason,
        WalkReason::NotPresent
    );
    // Reserved: 60:52 of a directory entry, 58:52 of a page.
    let directory = amd_table(0x2000, 2) | 0x1010_0000_0000_0000;
    assert_eq!(
        fault(directory, R).reason,
        WalkReason::Reserved {
            bits: 0x1010_0000_0000_0000
        }
    );
    let page = 0x6410_0000_0000_0001;
    assert_eq!(
        fault(page, R).reason,
        WalkReason::Reserved {
            bits: 0x0410_0000_0000_0000
        }
    );
    // IR and IW of a directory entry.
    assert_eq!(
        fault(0x2000_0000_0000_2401, W).reason,
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
    assert_eq!(
        fault(0x4000_0000_0000_2401, R).reason,
        WalkReason::Denied {
            granted: Prot::WRITE
        }
    );
    // A table where there is no memory.
    let fault = fault(amd_table(0x9000, 2), R);
    assert_eq!(fault.reason, WalkReason::NoMemory { address: 0x9000 });
    assert_eq!((fault.table, fault.level, fault.reads), (0x9000, 1, 2));
    assert_eq!(
        fault.to_string(),
        "read of 0x0: the table at 0x9000 (level 1) cannot be read: there is no memory at 0x9000"
    );
}

#[test]
fn roots_and_tables_outside_the_unit_s_addresses() {
    let image = Image::new(&[(0x1000, amd_table(0x1_0000_0000, 1))]);
    let amd = walker(FormatId::AmdV1, 0x1000, 2).with_output_bits(32);
    let address = 0x1_0000_0000;
    assert_eq!(
        reason(&amd, &image, 0, R),
        WalkReason::BadOutput { address, bits: 32 }
    );
    for address in [0x1008, 1 << 60] {
        let amd = walker(FormatId::AmdV1, address, 2);
        assert_eq!(
            reason(&amd, &image, 0, R),
            WalkReason::BadOutput { address, bits: 52 }
        );
    }
}
