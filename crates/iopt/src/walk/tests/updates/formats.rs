//! Marked bits, format by format.

use super::*;

/// 48882, section 2.2.3: PR 0, A 5, D 6, Next Level 11:9, IR 61, IW 62. Section 2.2.2.1: HAD.
#[test]
fn amd_marks_every_entry_as_accessed_and_the_page_as_dirty() {
    let amd = updating(FormatId::AmdV1, 0x1000, 2);
    let words = [
        (0x1000, 0x6000_0000_0000_2201),
        (0x2000, 0x6000_0000_0000_9001),
    ];
    let both = [0x6000_0000_0000_2221, 0x6000_0000_0000_9061];
    assert!(!after(&amd, &words, 0, W, &both).unwrap().clean);
    let read = [0x6000_0000_0000_2221, 0x6000_0000_0000_9021];
    assert!(after(&amd, &words, 0, R, &read).unwrap().clean);
    // HAD 01: no dirty bits. HAD 00: none.
    let accessed = amd.with_hardware_dirty(false);
    assert!(!after(&accessed, &words, 0, W, &read).unwrap().clean);
    let none = accessed.with_hardware_accessed(false);
    let same = words.map(|(_, word)| word);
    after(&none, &words, 0, W, &same).unwrap();
    // A page that may not be written: what leads to it was used, it was not.
    let words = [
        (0x1000, 0x6000_0000_0000_2201),
        (0x2000, 0x2000_0000_0000_9001),
    ];
    let half = [0x6000_0000_0000_2221, 0x2000_0000_0000_9001];
    assert_eq!(after(&amd, &words, 0, W, &half), denied(Prot::READ));
    // A directory that may not be written.
    let words = [
        (0x1000, 0x2000_0000_0000_2201),
        (0x2000, 0x6000_0000_0000_9001),
    ];
    let same = words.map(|(_, word)| word);
    assert_eq!(after(&amd, &words, 0, W, &same), denied(Prot::READ));
    // A 16 KiB page (Next Level 7, address bits 13:12 01): only the entry that was read.
    let page = 0x6000_0000_0000_1e01 | 0x4_0000;
    let words = [
        (0x1000, 0x6000_0000_0000_2221),
        (0x2000, page),
        (0x2008, page),
        (0x2010, page),
        (0x2018, page),
    ];
    let marked = [words[0].1, page, page, page | 0x60, page];
    let found = after(&amd, &words, 0x2000, W, &marked).unwrap();
    assert_eq!(found.page, Run::new(0, Span::new(0x4_0000, 0x4000)));
}

/// APM section 5.4.2, VT-d section 3.6.2: A 5 in all entries, D 6 in the one that maps the page.
#[test]
fn x86_marks_every_entry_as_accessed_and_the_page_as_dirty() {
    let x86 = updating(FormatId::X86_64, 0x1000, 4);
    let words = [
        (0x1000, 0x2007),
        (0x2000, 0x3007),
        (0x3000, 0x4007),
        (0x4000, 0x9007),
    ];
    let both = [0x2027, 0x3027, 0x4027, 0x9067];
    assert!(!after(&x86, &words, 0, W, &both).unwrap().clean);
    let read = [0x2027, 0x3027, 0x4027, 0x9027];
    assert!(after(&x86, &words, 0, R, &read).unwrap().clean);
    // A page of 2 MiB; bit 6 of entries that lead to tables is ignored.
    let words = [(0x1000, 0x2047), (0x2000, 0x3007), (0x3000, 0x20_0087)];
    after(&x86, &words, 0, W, &[0x2067, 0x3027, 0x20_00e7]).unwrap();
    // A fault marks what was used above it, not the entry that it names.
    let words = [(0x1000, 0x2007), (0x2000, 0x3005), (0x3000, 0x4007)];
    let granted = Prot::READ | Prot::EXECUTE;
    assert_eq!(
        after(&x86, &words, 0, W, &[0x2027, 0x3005, 0x4007]),
        denied(granted)
    );
    let words = [(0x1000, 0x2007), (0x2000, 0x3006)];
    assert_eq!(
        after(&x86, &words, 0, W, &[0x2027, 0x3006]),
        Err(WalkReason::NotPresent)
    );
    // Reserved bits, and a page for privileged requests only.
    let words = [(0x1000, 0x2007), (0x2000, 0x4000_2087)];
    assert_eq!(
        after(&x86, &words, 0, W, &[0x2027, 0x4000_2087]),
        Err(WalkReason::Reserved { bits: 0x2000 })
    );
    let words = [(0x1000, 0x2007), (0x2000, 0x4000_0083)];
    let granted = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(
        after(&x86, &words, 0, R, &[0x2027, 0x4000_0083]),
        denied(granted)
    );
}

/// D51397, section 3.7.2: A 8 in all entries, D 9 in the one that maps the page, with SSADE.
#[test]
fn vtd_second_stage_marks_where_ssade_is_set() {
    let vtd = updating(FormatId::VtdSs, 0x1000, 3);
    let words = [(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x9003)];
    assert!(
        !after(&vtd, &words, 0, W, &[0x2103, 0x3103, 0x9303])
            .unwrap()
            .clean
    );
    assert!(
        after(&vtd, &words, 0, R, &[0x2103, 0x3103, 0x9103])
            .unwrap()
            .clean
    );
    let without = vtd.with_hardware_accessed(false).with_hardware_dirty(false);
    after(&without, &words, 0, W, &[0x2003, 0x3003, 0x9003]).unwrap();
    // A page of 1 GiB at the root.
    after(&vtd, &[(0x1000, 0x4000_0083)], 5, W, &[0x4000_0383]).unwrap();
    // A read-only page, one beyond the unit's addresses, one of a size that it does not have.
    let words = [(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x9001)];
    assert_eq!(
        after(&vtd, &words, 0, W, &[0x2103, 0x3103, 0x9001]),
        denied(Prot::READ)
    );
    let words = [(0x1000, 0x1_0000_0003)];
    assert!(after(&vtd.with_output_bits(32), &words, 0, W, &[words[0].1]).is_err());
    let large = vtd.with_page_sizes(PageSizes::from_bits(1 << 21));
    let words = [(0x1000, 0x2103), (0x2000, 0x3103), (0x3000, 0x9003)];
    assert_eq!(
        after(&large, &words, 0, W, &[0x2103, 0x3103, 0x9003]),
        Err(WalkReason::PageSize { log2: 12 })
    );
}

/// DDI 0487, D8.5: HA sets AF (10). HD: a write with DBM (51) clears AP\[2\] (7).
#[test]
fn arm_stage_1_sets_the_access_flag_and_clears_the_read_only_bit() {
    let arm = arm(false);
    let clean = 0x0008_0000_0000_90c3;
    let words = |leaf| [(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, leaf)];
    let marked = |leaf| [0x2003, 0x3003, leaf];
    let (read, written) = (0x0008_0000_0000_94c3, 0x0008_0000_0000_9443);
    assert!(
        after(&arm, &words(clean), 0, R, &marked(read))
            .unwrap()
            .clean
    );
    assert!(
        !after(&arm, &words(clean), 0, W, &marked(written))
            .unwrap()
            .clean
    );
    assert!(
        !after(&arm, &words(written), 0, W, &marked(written))
            .unwrap()
            .clean
    );
    // Without DBM AP[2] is a permission.
    let read_only = Prot::READ | Prot::EXECUTE;
    assert_eq!(
        after(&arm, &words(0x90c3), 0, W, &marked(0x90c3)),
        denied(read_only)
    );
    assert!(
        !after(&arm, &words(0x90c3), 0, R, &marked(0x94c3))
            .unwrap()
            .clean
    );
    assert!(
        !after(&arm, &words(0x9043), 0, W, &marked(0x9443))
            .unwrap()
            .clean
    );
    // HA without HD: DBM is ignored.
    let accessed = arm.with_hardware_dirty(false);
    assert_eq!(
        after(&accessed, &words(clean), 0, W, &marked(clean)),
        denied(read_only)
    );
    assert!(
        !after(&accessed, &words(clean), 0, R, &marked(read))
            .unwrap()
            .clean
    );
    // Neither: a flag that is 0 faults; HD alone is none (TCR.HD).
    let none = arm.with_hardware_accessed(false);
    assert_eq!(
        after(&none, &words(clean), 0, R, &marked(clean)),
        Err(WalkReason::AccessFlag)
    );
    assert_eq!(
        after(&none, &words(read), 0, W, &marked(read)),
        denied(read_only)
    );
    // A table that forbids writes (APTable[1], 62): nothing is marked.
    let words = [
        (0x1000, 0x4000_0000_0000_2003),
        (0x2000, 0x3003),
        (0x3000, clean),
    ];
    let same = words.map(|(_, word)| word);
    assert_eq!(after(&arm, &words, 0, W, &same), denied(read_only));
    // Only the entry of a contiguous group (52) that was read, a block here.
    let block = 0x0018_0000_0000_00c1;
    let words = [
        (0x1000, 0x2003),
        (0x2000, block | 0x4000_0000),
        (0x2008, block | 0x4020_0000),
        (0x2010, block | 0x4040_0000),
    ];
    let mut marked = words.map(|(_, word)| word);
    marked[2] = 0x0018_0000_4020_0441;
    let found = after(&arm, &words, 0x20_0000, W, &marked).unwrap();
    assert_eq!(found.page.len, 32 << 20);
}

/// DDI 0487, D8.5.2: in stage 2 a write with DBM (51) sets S2AP\[1\] (7).
#[test]
fn arm_stage_2_sets_the_access_flag_and_the_write_bit() {
    let arm = arm(true);
    let clean = 0x0008_0000_4000_0041;
    let word = |word| [(0x1000, word)];
    let (read, written) = (0x0008_0000_4000_0441, 0x0008_0000_4000_04c1);
    assert!(after(&arm, &word(clean), 0, R, &[read]).unwrap().clean);
    assert!(!after(&arm, &word(clean), 0, W, &[written]).unwrap().clean);
    // Without DBM S2AP[1] is a permission.
    let read_only = Prot::READ | Prot::EXECUTE;
    assert_eq!(after(&arm, &word(0x41), 0, W, &[0x41]), denied(read_only));
    after(&arm, &word(0xc1), 0, W, &[0x4c1]).unwrap();
    let accessed = arm.with_hardware_dirty(false);
    assert_eq!(
        after(&accessed, &word(clean), 0, W, &[clean]),
        denied(read_only)
    );
    let none = arm.with_hardware_accessed(false);
    assert_eq!(
        after(&none, &word(clean), 0, W, &[clean]),
        Err(WalkReason::AccessFlag)
    );
}

/// DDI 0406C, B3.7.4: AP\[0\] is bit 10 of a section, bit 4 of a page; 32-bit words.
#[test]
fn armv7_sets_the_access_flag_in_half_of_a_word() {
    let arm = updating(FormatId::ArmV7s, 0x4000, 2);
    // Entry 1 of the root leads to a table at 0x8400; its neighbour is a section. Pages 2 and 3.
    let words = [(0x4000, 0x8401_1230_0802), (0x8408, 0xabcd_e022_5678_9022)];
    let page = [words[0].1, 0xabcd_e032_5678_9022];
    after(&arm, &words, 0x10_3000, R, &page).unwrap();
    let section = [0x8401_1230_0c02, words[1].1];
    after(&arm, &words, 0, W, &section).unwrap();
    let same = words.map(|(_, word)| word);
    // Without hardware management a fault; without the access flag (SCTLR.AFE) a permission.
    assert_eq!(
        after(&arm.with_hardware_accessed(false), &words, 0, R, &same),
        Err(WalkReason::AccessFlag)
    );
    after(&arm.with_access_flag(false), &words, 0, R, &same).unwrap();
    // AP[2] (15): read-only.
    let words = [(0x4000, 0x1230_8802)];
    assert_eq!(
        after(&arm, &words, 0, W, &[0x1230_8802]),
        denied(Prot::READ | Prot::EXECUTE)
    );
}

/// Privileged Architecture, "Virtual Address Translation Process", steps 6 to 9: A 6, D 7 of the
/// leaf; with Svade (no SADE, no GADE) a fault instead.
#[test]
fn riscv_marks_the_leaf_or_faults() {
    for (format, root) in [(FormatId::RiscV, 0x4000), (FormatId::RiscVG, 0x4000)] {
        let riscv = updating(format, root, 3);
        // V R W U; the tables are V only.
        let words = |leaf| [(0x4000, 0x2001), (0x8000, 0x2401), (0x9000, leaf)];
        let marked = |leaf| [0x2001, 0x2401, leaf];
        let page = 0x2af3_7817;
        assert!(
            !after(&riscv, &words(page), 0, W, &marked(0x2af3_78d7))
                .unwrap()
                .clean
        );
        assert!(
            after(&riscv, &words(page), 0, R, &marked(0x2af3_7857))
                .unwrap()
                .clean
        );
        after(&riscv, &words(0x2af3_7857), 0, W, &marked(0x2af3_78d7)).unwrap();
        // Read-only; for the privileged only.
        assert_eq!(
            after(&riscv, &words(0x2af3_7813), 0, W, &marked(0x2af3_7813)),
            denied(Prot::READ)
        );
        assert!(after(&riscv, &words(0x2af3_7807), 0, R, &marked(0x2af3_7807)).is_err());
        // One of the entries of a NAPOT page.
        let napot = 0x8000_0001_4000_6017;
        let words_of_group = [
            (0x4000, 0x2001),
            (0x8000, 0x2401),
            (0x9000, napot),
            (0x9008, napot),
        ];
        let one = [0x2001, 0x2401, napot, 0x8000_0001_4000_60d7];
        after(&riscv, &words_of_group, 0x1000, W, &one).unwrap();
        // Svade.
        let svade = riscv
            .with_hardware_accessed(false)
            .with_hardware_dirty(false);
        assert_eq!(
            after(&svade, &words(page), 0, R, &marked(page)),
            Err(WalkReason::AccessFlag)
        );
        let clean = 0x2af3_7857;
        assert_eq!(
            after(&svade, &words(clean), 0, W, &marked(clean)),
            denied(Prot::READ)
        );
        after(&svade, &words(clean), 0, R, &marked(clean)).unwrap();
    }
}
