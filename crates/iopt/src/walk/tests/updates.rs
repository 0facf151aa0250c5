//! Accessed and dirty bits, written by the walk as the unit writes them. Every word is written out
//! from the specifications' field tables.

mod formats;

use core::cell::{Cell, RefCell};

use super::*;
use crate::format::{ArmConfig, ArmGranule};

/// Change of a word before it is exchanged; `None`: no further change.
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
    // Another writer has marked it as accessed: the walk adds the missing bit.
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
fn the_cache_gets_a_table_when_the_entry_that_leads_to_it_is_marked() {
    /// Checks that the entry is marked when the table below it is reported.
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
