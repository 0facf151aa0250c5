//! VT-d second stage.

use super::*;

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
            page: Run::new(0x80_4020_1000, Span::new(0xabcd_e000, 0x1000)),
            open: Span::new(0x80_4020_1000, 0x1000),
            level: 0,
            prot: Prot::RW | Prot::COHERENT,
            clean: false,
            reads: 4,
        }
    );
    let found = vtd.walk(&image, 0x80_4041_2345, W, &mut ()).unwrap();
    assert_eq!(found.pa, 0x4061_2345);
    assert_eq!(
        found.page,
        Run::new(0x80_4040_0000, Span::new(0x4060_0000, 2 << 20))
    );
    assert_eq!((found.prot, found.level, found.reads), (Prot::WRITE, 1, 3));
    let found = vtd.walk(&image, 0x80_8765_4321, R, &mut ()).unwrap();
    assert_eq!(found.pa, 0x1_8765_4321);
    assert_eq!(
        found.page,
        Run::new(0x80_8000_0000, Span::new(0x1_8000_0000, 1 << 30))
    );
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
        let aperture = Aperture::zeros(bits);
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
