//! Accessed and dirty bits, written by the walk as the unit writes them. Every word is written out
//! from the specifications' field tables.

use core::cell::{Cell, RefCell};

use super::*;
use crate::format::{ArmConfig, ArmGranule};

/// What happens to a word before it is exchanged; `None`: nothing any more.
type Race = fn(u64) -> Option<u64>;

/// Words at addresses that walks can write. All other words are 0.
struct Live {
    words: RefCell<BTreeMap<u64, u64>>,
    /// Happens between each read of this address and the exchange of its word.
    race: Cell<Option<(u64, Race)>>,
    exchanges: Cell<u32>,
}

impl Live {
    fn new(words: &[(u64, u64)]) -> Self {
        Self {
            words: RefCell::new(words.iter().copied().collect()),
            race: Cell::new(None),
            exchanges: Cell::new(0),
        }
    }

    fn word(&self, address: u64) -> u64 {
        self.words.borrow().get(&address).copied().unwrap_or(0)
    }

    fn set(&self, address: u64, word: u64) {
        self.words.borrow_mut().insert(address, word);
    }
}

impl WalkMemory for Live {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        assert_eq!(address % 8, 0);
        Ok(self.word(address))
    }

    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        assert_eq!(address % 8, 0);
        self.exchanges.set(self.exchanges.get() + 1);
        if let Some((place, race)) = self.race.get()
            && place == address
        {
            match race(self.word(address)) {
                Some(word) => self.set(address, word),
                None => self.race.set(None),
            }
        }
        let found = self.word(address);
        if found != old {
            return Ok(Err(found));
        }
        self.set(address, new);
        Ok(Ok(()))
    }
}

/// Walks over `words`; afterwards the words at the same addresses are `after`, and all others as
/// they were. `None` stands for a fault.
#[track_caller]
fn after(
    walker: &Walker,
    words: &[(u64, u64)],
    iova: u64,
    access: Access,
    after: &[u64],
) -> Result<Translation, WalkReason> {
    let live = Live::new(words);
    let found = walker.walk(&live, iova, access, &mut ());
    let expected: BTreeMap<u64, u64> = words
        .iter()
        .zip(after)
        .map(|(&(address, _), &word)| (address, word))
        .collect();
    assert_eq!(words.len(), after.len());
    let now = live.words.into_inner();
    assert_eq!(now, expected, "{now:#x?}, not {expected:#x?}");
    // Without updates the same walk finds the same and exchanges nothing.
    let live = Live::new(words);
    let read_only = walker.with_updates(false);
    let same = read_only.walk(&live, iova, access, &mut ());
    assert_eq!(live.exchanges.get(), 0);
    assert_eq!(live.words.into_inner(), words.iter().copied().collect());
    assert_eq!(
        same.map(|same| Translation {
            clean: found.unwrap().clean,
            ..same
        }),
        found
    );
    found.map_err(|fault| fault.reason)
}

fn updating(format: FormatId, address: u64, levels: u8) -> Walker {
    walker(format, address, levels).with_updates(true)
}

fn arm(stage_2: bool) -> Walker {
    let config = ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 39,
        upper: false,
    };
    let format = if stage_2 {
        FormatId::ArmStage2(config)
    } else {
        FormatId::ArmStage1(config)
    };
    updating(format, 0x1000, 3)
}

fn denied(granted: Prot) -> Result<Translation, WalkReason> {
    Err(WalkReason::Denied { granted })
}

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
    assert_eq!(found.page, Run::new(0, 0x4_0000, 0x4000));
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

#[test]
fn an_entry_that_changed_is_read_again_and_decided_anew() {
    let vtd = updating(FormatId::VtdSs, 0x1000, 3);
    let race = |address, race| {
        let live = Live::new(&[
            (0x1000, 0x2003),
            (0x2000, 0x3003),
            (0x3000, 0x9003),
            (0x6000, 0x7003),
            (0x7000, 0xa003),
        ]);
        live.race.set(Some((address, race)));
        let found = vtd.walk(&live, 0x123, W, &mut ());
        (found, live)
    };
    // The leaf leads elsewhere: the new page is found, and only its word is marked.
    let (found, live) = race(0x3000, |word| (word == 0x9003).then_some(0xb003));
    let found = found.unwrap();
    assert_eq!((found.pa, found.reads), (0xb123, 4));
    assert_eq!(live.word(0x3000), 0xb303);
    // Somebody else has marked it as accessed: the walk adds what is missing.
    let (found, live) = race(0x3000, |word| (word == 0x9003).then_some(0x9103));
    assert_eq!(found.unwrap().reads, 4);
    assert_eq!(live.word(0x3000), 0x9303);
    // Unmapped, made read-only: a fault, and nothing is written.
    let (found, live) = race(0x3000, |word| (word != 0).then_some(0));
    assert_eq!(found.unwrap_err().reason, WalkReason::NotPresent);
    assert_eq!(live.word(0x3000), 0);
    let (found, live) = race(0x3000, |word| (word == 0x9003).then_some(0x9001));
    let reason = found.unwrap_err().reason;
    assert_eq!(
        reason,
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
    assert_eq!(live.word(0x3000), 0x9001);
    // A table is replaced: the walk goes through the new one, and the old one is left alone.
    let (found, live) = race(0x2000, |word| (word == 0x3003).then_some(0x7003));
    assert_eq!(found.unwrap().pa, 0xa123);
    let now = [0x1000, 0x2000, 0x3000, 0x7000].map(|address| live.word(address));
    assert_eq!(now, [0x2103, 0x7103, 0x9003, 0xa303]);
    // The permissions of the word that was there before count no more.
    let live = Live::new(&[(0x1000, 0x4000_0083)]);
    live.race.set(Some((0x1000, |word| {
        (word == 0x4000_0083).then_some(0x4000_0081)
    })));
    let found = vtd.walk(&live, 0, R, &mut ()).unwrap();
    assert_eq!(found.prot, Prot::READ);
    live.set(0x1000, 0x4000_0081);
    live.race.set(Some((0x1000, |word| {
        (word == 0x4000_0081).then_some(0x4000_0083)
    })));
    let found = vtd.walk(&live, 0, R, &mut ()).unwrap();
    assert_eq!(found.prot, Prot::RW);
}

#[test]
fn a_word_that_changes_each_time_ends_the_walk() {
    let vtd = updating(FormatId::VtdSs, 0x1000, 3);
    // One of its ignored bits is turned over and over.
    let live = Live::new(&[(0x1000, 0x2103), (0x2000, 0x3003), (0x3000, 0x9003)]);
    live.race.set(Some((0x2000, |word| Some(word ^ 1 << 52))));
    let fault = vtd.walk(&live, 0, W, &mut ()).unwrap_err();
    assert_eq!(fault.reason, WalkReason::Contended);
    assert_eq!((fault.level, fault.table, fault.reads), (1, 0x2000, 18));
    assert_eq!(live.exchanges.get(), 17);
    assert_eq!(
        fault.to_string(),
        "write of 0x0: the entry 0x3003 of the table at 0x2000 (level 1) changed whenever it was \
         to be marked"
    );
    // The same in 32 bits: the other half of the word turns.
    let arm = updating(FormatId::ArmV7s, 0x4000, 2);
    let live = Live::new(&[(0x4000, 0x1230_0802)]);
    live.race.set(Some((0x4000, |word| Some(word ^ 1 << 40))));
    let fault = arm.walk(&live, 0, R, &mut ()).unwrap_err();
    assert_eq!(fault.reason, WalkReason::Contended);
}

#[test]
fn memory_that_cannot_be_written_faults_only_where_something_is_to_be_marked() {
    for (words, address) in [
        (
            [(0x1000, 0x2003), (0x2000, 0x3103), (0x3000, 0x9303)],
            0x1000,
        ),
        (
            [(0x1000, 0x2103), (0x2000, 0x3103), (0x3000, 0x9103)],
            0x3000,
        ),
    ] {
        let vtd = updating(FormatId::VtdSs, 0x1000, 3);
        let fault = vtd.walk(&Image::new(&words), 0, W, &mut ()).unwrap_err();
        assert_eq!(fault.reason, WalkReason::NotWritable { address });
        assert_eq!(fault.table, address);
    }
    let marked = Image::new(&[(0x1000, 0x2103), (0x2000, 0x3103), (0x3000, 0x9303)]);
    let vtd = updating(FormatId::VtdSs, 0x1000, 3);
    assert_eq!(vtd.walk(&marked, 0, W, &mut ()).unwrap().pa, 0x9000);
    let arm = updating(FormatId::ArmV7s, 0x4000, 2);
    let section = Image::new(&[(0x4000, 0x1230_0802_1230_0802)]);
    let fault = arm.walk(&section, 0x10_0000, W, &mut ()).unwrap_err();
    assert_eq!(fault.reason, WalkReason::NotWritable { address: 0x4004 });
    assert_eq!(
        fault.to_string(),
        "write of 0x100000: the entry 0x12300802 of the table at 0x4000 (level 1) is to be marked, \
         and the memory at 0x4004 cannot be written"
    );
}

#[test]
fn the_cache_is_told_of_a_table_when_the_entry_that_leads_to_it_is_marked() {
    /// Looks whether the entry is marked when the table below it is told.
    struct Watch<'a>(&'a Live, Vec<u64>);
    impl WalkCache for Watch<'_> {
        fn find(&mut self, _: u64) -> Option<UpperTable> {
            None
        }
        fn found(&mut self, table: &UpperTable) {
            self.1.push(self.0.word(table.address - 0x1000));
        }
    }
    let live = Live::new(&[(0x1000, 0x2003), (0x2000, 0x3003)]);
    let mut watch = Watch(&live, Vec::new());
    let vtd = updating(FormatId::VtdSs, 0x1000, 3);
    let fault = vtd.walk(&live, 0, W, &mut watch).unwrap_err();
    assert_eq!(fault.reason, WalkReason::NotPresent);
    assert_eq!(watch.1, [0x2103, 0x3103]);
}

#[cfg(feature = "alloc")]
#[test]
fn an_arena_s_own_cells_are_marked_through_every_way_to_it() {
    use crate::memory::TableMemory as _;
    use crate::{Cell as _, HeapArena};
    use core::sync::atomic::{AtomicU32, AtomicU64};

    let wide = HeapArena::<AtomicU64, 12>::with_tables_at(16, 1 << 46).unwrap();
    let root = wide.base();
    let cells = wide.entries(root, 512);
    cells[0].set(0x4000_0083);
    let vtd = updating(FormatId::VtdSs, root, 3);
    vtd.walk(&wide, 0, R, &mut ()).unwrap();
    assert_eq!(cells[0].get(), 0x4000_0183);
    cells[0].set(0x4000_0083);
    vtd.walk(&&wide, 0, W, &mut ()).unwrap();
    assert_eq!(cells[0].get(), 0x4000_0383);
    assert_eq!(wide.compare_exchange_u32(root + 4, 0, 7), Ok(Ok(())));
    assert_eq!(wide.compare_exchange_u32(root + 4, 0, 9), Ok(Err(7)));
    assert_eq!(cells[0].get(), 0x7_4000_0383);
    cells[0].set(0x4000_0083);
    let shared = alloc::sync::Arc::new(wide);
    vtd.walk(&shared, 0, W, &mut ()).unwrap();
    assert_eq!(shared.read_u64(root), Ok(0x4000_0383));
    for outside in [0, root + 4, root + shared.size()] {
        let bad = Err(BadAddress { address: outside });
        assert_eq!(shared.compare_exchange_u64(outside, 0, 1), bad);
    }

    let narrow = HeapArena::<AtomicU32, 10>::with_tables_at(64, 1 << 20).unwrap();
    let root = narrow.base();
    narrow.entries(root, 4096)[1].set(0x1230_0802);
    let arm = updating(FormatId::ArmV7s, root, 2);
    arm.walk(&&narrow, 0x10_0000, W, &mut ()).unwrap();
    assert_eq!(narrow.entries(root, 4096)[1].get(), 0x1230_0c02);
    let shared = alloc::sync::Arc::new(narrow);
    assert_eq!(shared.compare_exchange_u32(root, 1, 2), Ok(Err(0)));
    assert_eq!(shared.compare_exchange_u32(root, 0, 2), Ok(Ok(())));
    assert_eq!(shared.read_u32(root), Ok(2));
    // There are no 64-bit words in it.
    let bad = Err(BadAddress { address: root });
    assert_eq!(shared.compare_exchange_u64(root, 2, 1), bad);
}
