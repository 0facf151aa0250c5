//! Known answers: every word below is written out from the specifications' field tables.

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

/// Words at addresses; the tables are the 4 KiB pages that hold at least one.
struct Image(BTreeMap<u64, u64>);

impl Image {
    fn new(words: &[(u64, u64)]) -> Self {
        Self(words.iter().copied().collect())
    }
}

impl WalkMemory for Image {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let page = address & !0xfff;
        if self.0.range(page..page + 0x1000).next().is_none() {
            return Err(BadAddress { address });
        }
        Ok(self.0.get(&address).copied().unwrap_or(0))
    }
}

const R: Access = Access::Read;
const W: Access = Access::Write;

fn walker(format: FormatId, address: u64, levels: u8) -> Walker {
    Walker::new(Root {
        format,
        address,
        levels,
    })
}

fn reason(walker: &Walker, image: &Image, iova: u64, access: Access) -> WalkReason {
    let fault = walker.walk(image, iova, access, &mut ()).unwrap_err();
    assert_eq!((fault.iova, fault.access), (iova, access));
    fault.reason
}

#[test]
fn vtd_four_levels_with_each_leaf_size() {
    // IOVA 0x0080_4020_1000 has index 1 at every level.
    let image = Image::new(&[
        // SS-PML4E 1: address 0x2000, R W. SS-PDPTE 1: 0x3000. SS-PDE 1: 0x4000.
        (0x1008, 0x2003),
        (0x2008, 0x3003),
        (0x3008, 0x4003),
        // SS-PTE 1: page 0xabcde000, SNP (11), D (9), A (8), R W.
        (0x4008, 0xabcd_eb03),
        // SS-PDE 2: PS (7), page 0x4060_0000, W only.
        (0x3010, 0x4060_0082),
        // SS-PDPTE 2: PS, page 0x1_8000_0000, R only, ignored bits 63 and 61:52 set.
        (0x2010, 0xbff0_0001_8000_0081),
    ]);
    let vtd = walker(FormatId::VtdSs, 0x1000, 4);

    let found = vtd.walk(&image, 0x80_4020_1abc, W, &mut ()).unwrap();
    assert_eq!(
        found,
        Translation {
            pa: 0xabcd_eabc,
            page: Run::new(0x80_4020_1000, 0xabcd_e000, 0x1000),
            level: 0,
            prot: Prot::RW | Prot::COHERENT,
            reads: 4,
        }
    );
    let found = vtd.walk(&image, 0x80_4041_2345, W, &mut ()).unwrap();
    assert_eq!(found.pa, 0x4061_2345);
    assert_eq!(found.page, Run::new(0x80_4040_0000, 0x4060_0000, 2 << 20));
    assert_eq!((found.prot, found.level, found.reads), (Prot::WRITE, 1, 3));
    let found = vtd.walk(&image, 0x80_8765_4321, R, &mut ()).unwrap();
    assert_eq!(found.pa, 0x1_8765_4321);
    assert_eq!(found.page, Run::new(0x80_8000_0000, 0x1_8000_0000, 1 << 30));
    assert_eq!((found.prot, found.level, found.reads), (Prot::READ, 2, 2));

    // The write-only page, the read-only page.
    assert_eq!(
        reason(&vtd, &image, 0x80_4040_0000, R),
        WalkReason::Denied {
            granted: Prot::WRITE
        }
    );
    assert_eq!(
        reason(&vtd, &image, 0x80_8000_0000, W),
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
}

#[test]
fn vtd_three_and_five_levels_begin_where_the_root_says() {
    let image = Image::new(&[
        (0x1000, 0x2003),
        (0x2000, 0x3003),
        (0x3000, 0x4003),
        (0x4000, 0x5003),
        // The last entry of each: IOVA ending in ones.
        (0x5ff8, 0x9_9000 | 0b11),
        (0x4ff8, 0x5003),
        (0x3ff8, 0x4003),
        (0x2ff8, 0x3003),
        (0x1ff8, 0x2003),
    ]);
    let three = walker(FormatId::VtdSs, 0x3000, 3);
    assert_eq!(
        three.walk(&image, 0x1f_ffff, R, &mut ()).unwrap().pa,
        0x9_9fff
    );
    assert_eq!(
        three.walk(&image, 0x7f_ffff_ffff, R, &mut ()).unwrap().pa,
        0x9_9fff
    );
    let five = walker(FormatId::VtdSs, 0x1000, 5);
    let found = five.walk(&image, (1 << 57) - 1, R, &mut ()).unwrap();
    assert_eq!((found.pa, found.reads), (0x9_9fff, 5));
    for (walker, bits) in [(three, 39), (five, 57)] {
        let aperture = Aperture {
            bits,
            sign_extended: false,
        };
        assert_eq!(
            reason(&walker, &image, 1 << bits, R),
            WalkReason::OutsideAperture { aperture }
        );
    }
}

#[test]
fn vtd_permissions_are_those_of_all_levels_and_the_fault_names_the_one_that_forbids() {
    let image = Image::new(&[(0x1000, 0x2001), (0x2000, 0x3003), (0x3000, 0x7003)]);
    let vtd = walker(FormatId::VtdSs, 0x1000, 3);
    assert_eq!(vtd.walk(&image, 0, R, &mut ()).unwrap().prot, Prot::READ);
    let fault = vtd.walk(&image, 0x10, W, &mut ()).unwrap_err();
    assert_eq!(
        (fault.level, fault.table, fault.entry, fault.reads),
        (2, 0x1000, 0x2001, 1)
    );
    assert_eq!(
        fault.to_string(),
        "write of 0x10: the entry 0x2001 of the table at 0x1000 (level 2) leaves only r--"
    );
}

#[test]
fn vtd_reserved_bits_fault_where_section_9_8_has_them() {
    let walk = |level: usize, word: u64, change: fn(Walker) -> Walker| {
        // A chain of tables in which the entry at `level` is `word`.
        let mut words = [
            (0x5000, 0x8003),
            (0x4000, 0x5003),
            (0x3000, 0x4003),
            (0x2000, 0x3003),
            (0x1000, 0x2003),
        ];
        words[level].1 = word;
        let vtd = change(walker(FormatId::VtdSs, 0x1000, 5));
        vtd.walk(&Image::new(&words), 0, R, &mut ())
            .map_err(|fault| {
                assert_eq!(usize::from(fault.level), level);
                assert_eq!((fault.entry, usize::from(fault.reads)), (word, 5 - level));
                fault.reason
            })
    };
    let same = |walker| walker;
    let reserved = |bits| Err(WalkReason::Reserved { bits });
    for level in 0..5 {
        // Bit 62 in every entry.
        assert_eq!(walk(level, 0x4000_0000_0000_9003, same), reserved(1 << 62));
        // Address bits above the unit's width: 0x8000_0000_0000 is bit 47.
        assert_eq!(
            walk(level, 0x8000_0000_9003, |w| w.with_output_bits(46)),
            reserved(1 << 47)
        );
        // Ignored: 63, 61:52, 10:8 and 6:2.
        let next = [0x8000, 0x5000, 0x4000, 0x3000, 0x2000][level];
        assert_eq!(
            walk(level, 0xbff0_0000_0000_077f | next, same).unwrap().pa,
            0x8000
        );
        if level > 0 {
            // Bit 11 in an entry that leads to a table.
            assert_eq!(walk(level, 0x9803, same), reserved(0x800));
        }
    }
    // PS in SS-PML4E and SS-PML5E, and where the unit does not have the size.
    assert_eq!(walk(3, 0x9083, same), reserved(0x80));
    assert_eq!(walk(4, 0x9083, same), reserved(0x80));
    let only_4k = |w: Walker| w.with_page_sizes(PageSizes::from_bits(1 << 12));
    assert_eq!(walk(1, 0x20_0083, only_4k), reserved(0x80));
    // In SS-PTE bit 7 is ignored.
    assert!(walk(0, 0x8083, same).is_ok());
    // Address bits below a large page's size.
    assert_eq!(walk(1, 0x4010_0083, same), reserved(0x10_0000));
    assert_eq!(walk(2, 0x2000_1083, same), reserved(0x2000_1000));
    // SNP without snoop control.
    let no_snoop = |w: Walker| w.with_snoop_control(false);
    for (level, word) in [(0, 0x8803), (1, 0x20_0883), (2, 0x4000_0883)] {
        assert_eq!(walk(level, word, no_snoop), reserved(0x800));
        assert_eq!(
            walk(level, word, same).unwrap().prot,
            Prot::RW | Prot::COHERENT
        );
    }
    // X alone is not present.
    assert_eq!(walk(0, 0x8004, same), Err(WalkReason::NotPresent));
}

#[test]
fn x86_permissions_privilege_and_the_upper_half() {
    // The last page of the address space: index 511 everywhere.
    let image = Image::new(&[
        // P, R/W, U/S, A.
        (0x1ff8, 0x2027),
        (0x2ff8, 0x3027),
        (0x3ff8, 0x4027),
        // P, R/W, U/S, A, D, NX.
        (0x4ff8, 0x8000_0000_dead_b067),
        // 2 MiB: PS, P, U/S; bit 12 is PAT.
        (0x3ff0, 0x1_0020_1085),
        // 1 GiB: PS, P, R/W, no U/S.
        (0x2ff0, 0x2_4000_0083),
    ]);
    let x86 = walker(FormatId::X86_64, 0x1000, 4);
    let found = x86.walk(&image, u64::MAX, W, &mut ()).unwrap();
    assert_eq!(found.pa, 0xdead_bfff);
    assert_eq!(found.page, Run::new(u64::MAX - 0xfff, 0xdead_b000, 0x1000));
    assert_eq!((found.prot, found.reads), (Prot::RW, 4));
    let found = x86.walk(&image, 0xffff_ffff_ffc1_2345, R, &mut ()).unwrap();
    assert_eq!(
        found.page,
        Run::new(0xffff_ffff_ffc0_0000, 0x1_0020_0000, 2 << 20)
    );
    assert_eq!(
        (found.pa, found.prot),
        (0x1_0021_2345, Prot::READ | Prot::EXECUTE)
    );
    let gib = 0xffff_ffff_8000_0000;
    let granted = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(reason(&x86, &image, gib, R), WalkReason::Denied { granted });
    let privileged = x86.with_privileged_requests(true);
    let found = privileged.walk(&image, gib, W, &mut ()).unwrap();
    assert_eq!(
        (found.page.pa, found.page.len, found.prot),
        (0x2_4000_0000, 1 << 30, granted)
    );

    // Neither half: bit 47 is not repeated, or not in all bits.
    let aperture = Aperture {
        bits: 48,
        sign_extended: true,
    };
    for iova in [1 << 47, 0x8000_0000_0000_0000, 0xfffe_ffff_ffff_f000] {
        assert_eq!(
            reason(&x86, &image, iova, R),
            WalkReason::OutsideAperture { aperture }
        );
    }
    assert_eq!(reason(&x86, &image, 0, R), WalkReason::NotPresent);
    // Level 5 sits on top: the same tables below.
    let image = Image::new(&[(0x7ff8, 0x1027), (0x1ff8, 0x2025), (0x2ff8, 0xc000_0087)]);
    let five = walker(FormatId::X86_64, 0x7000, 5);
    let found = five.walk(&image, u64::MAX, R, &mut ()).unwrap();
    assert_eq!((found.pa, found.reads), (0xffff_ffff, 3));
    // The level above withdrew write permission, and no bit 63 anywhere: executable.
    assert_eq!(found.prot, Prot::READ | Prot::EXECUTE);
    let fault = five.walk(&image, u64::MAX, W, &mut ()).unwrap_err();
    assert_eq!(fault.level, 3);
}

#[test]
fn x86_reserved_bits() {
    let walk = |level: usize, word: u64, bits: u32| {
        let mut words = [
            (0x4000, 0x8007),
            (0x3000, 0x4007),
            (0x2000, 0x3007),
            (0x1000, 0x2007),
        ];
        words[level].1 = word;
        let x86 = walker(FormatId::X86_64, 0x1000, 4).with_output_bits(bits);
        x86.walk(&Image::new(&words), 0, R, &mut ())
            .map_err(|fault| fault.reason)
    };
    let reserved = |bits| Err(WalkReason::Reserved { bits });
    assert_eq!(walk(3, 0x2087, 52), reserved(0x80));
    assert_eq!(walk(2, 0x4000_2087, 52), reserved(0x2000));
    assert_eq!(walk(1, 0x30_0087, 52), reserved(0x10_0000));
    for level in 0..4 {
        assert_eq!(
            walk(level, 0x000c_0000_0000_9007, 50),
            reserved(0x000c_0000_0000_0000)
        );
        // 62:52 and 11:9 are software's.
        let word = 0x7ff0_0000_0000_0e07 | [0x8000, 0x4000, 0x3000, 0x2000][level];
        assert_eq!(walk(level, word, 52).unwrap().pa, 0x8000);
    }
    // Nothing is reserved in an entry that is not present.
    assert_eq!(
        walk(2, 0x000f_ffff_ffff_fffe, 40),
        Err(WalkReason::NotPresent)
    );
}

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
        assert_eq!(found.page, Run::new(last & !0xfff, 0x1234_5000, 0x1000));
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
        assert_eq!(found.page, Run::new(0, pa, 1 << log2), "{log2}");
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

/// Keeps every table that it is told of.
#[derive(Default)]
struct Tables(Vec<UpperTable>);

impl WalkCache for Tables {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let here = |t: &&UpperTable| (iova ^ t.iova) & !low_bits(t.span_log2) == 0;
        self.0.iter().filter(here).min_by_key(|t| t.level).copied()
    }
    fn found(&mut self, table: &UpperTable) {
        self.0.push(*table);
    }
}

#[test]
fn a_cache_of_upper_levels_is_told_each_table_and_shortens_the_next_walk() {
    let image = Image::new(&[
        (0x1008, 0x2001), // read-only from here on
        (0x2008, 0x3003),
        (0x3008, 0x4003),
        (0x4008, 0x9003),
        (0x4010, 0x7003),
    ]);
    let vtd = walker(FormatId::VtdSs, 0x1000, 4);
    let mut cache = Tables::default();
    assert_eq!(
        vtd.walk(&image, 0x80_4020_1000, R, &mut cache)
            .unwrap()
            .reads,
        4
    );
    let table = |iova, span_log2, level, address| UpperTable {
        iova,
        span_log2,
        level,
        address,
        prot: Prot::READ,
    };
    assert_eq!(
        cache.0,
        [
            table(0x80_0000_0000, 39, 2, 0x2000),
            table(0x80_4000_0000, 30, 1, 0x3000),
            table(0x80_4020_0000, 21, 0, 0x4000),
        ]
    );
    let found = vtd.walk(&image, 0x80_4020_2000, R, &mut cache).unwrap();
    assert_eq!((found.pa, found.reads, found.prot), (0x7000, 1, Prot::READ));
    assert_eq!(cache.0.len(), 3);
    // A write is not allowed by what the cache says: the walk starts over and names the level.
    let fault = vtd.walk(&image, 0x80_4020_2000, W, &mut cache).unwrap_err();
    assert_eq!((fault.level, fault.reads), (3, 1));
}

/// Memory of any content: a word is a hash of its address, made to look like an entry.
struct Noise {
    seed: u64,
    flavour: u64,
}

impl WalkMemory for Noise {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let mut x = address ^ self.seed;
        for _ in 0..2 {
            x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        if x >> 60 == 0 {
            return Err(BadAddress { address });
        }
        // Mostly present and permitted, with few reserved bits, so that walks get far.
        Ok(match self.flavour {
            0 => x,
            1 => x & 0x000f_ffff_ffff_ffff | 0x6000_0000_0000_0007,
            _ => x & 0x0000_0fff_ffff_f6ff | 0x6000_0000_0000_0007,
        })
    }
}

proptest! {
    #[test]
    fn any_bytes_give_a_page_or_a_fault_within_as_many_reads_as_levels(
        seed: u64,
        flavour in 0..3u64,
        iova: u64,
        near in 0..64u32,
        levels in 0..9u8,
        address in prop_oneof![any::<u64>(), (0..1u64 << 40).prop_map(|page| page << 12)],
        bits in 0..70u32,
        write: bool,
    ) {
        let memory = Noise { seed, flavour };
        let access = if write { W } else { R };
        let iova = iova >> near;
        for format in FormatId::ALL {
            let walker = walker(format, address, levels).with_output_bits(bits);
            let mut cache = Tables::default();
            let found = walker.walk(&memory, iova, access, &mut cache);
            for table in &cache.0 {
                prop_assert!((iova ^ table.iova) & !low_bits(table.span_log2) == 0);
                prop_assert!(table.level < levels);
            }
            match found {
                Ok(found) => {
                    prop_assert!(found.reads <= levels && found.reads > 0);
                    prop_assert!(found.page.len.is_power_of_two());
                    prop_assert_eq!((found.page.pa | found.page.iova) & (found.page.len - 1), 0);
                    prop_assert!(found.page.input().contains(iova));
                    prop_assert_eq!(found.pa - found.page.pa, iova - found.page.iova);
                    prop_assert!(found.prot.contains(access.needs()));
                    // Starting from the lowest table that was met gives the same.
                    let again = walker.walk(&memory, iova, access, &mut cache).unwrap();
                    prop_assert_eq!(Translation { reads: found.reads, ..again }, found);
                    prop_assert_eq!(again.reads, 1);
                }
                Err(fault) => {
                    prop_assert!(fault.reads <= levels);
                    prop_assert!(!fault.to_string().is_empty());
                }
            }
        }
    }
}
