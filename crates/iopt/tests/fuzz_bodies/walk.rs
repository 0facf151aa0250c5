//! The walker over memory of any content, with and without updates.

use std::cell::{Cell, RefCell};

use iopt::format::{ArmConfig, ArmGranule, DartConfig, DartVersion};
use iopt::walk::{
    Access, BadAddress, Says, ScanStep, Translation, UpperTable, WalkCache, WalkFault, WalkMemory,
    WalkReason, Walker,
};
use iopt::{FormatId, Prot, Root};
use runs::PageSizes;

use super::Bytes;

/// Words that stand at every address, over and over: wherever an entry leads, there is something.
struct Words {
    words: RefCell<Vec<u64>>,
    /// Tables in pages with this number cannot be read.
    hole: Option<u8>,
    read_only: bool,
    /// Bits that other writers flip in words before they are exchanged, and the exchanges, a bit for each.
    race: (u64, Cell<u32>),
    reads: Cell<usize>,
    /// Each exchange that took place: what was there and what is there now.
    marks: RefCell<Vec<(u64, u64)>>,
}

impl Words {
    fn new(words: &[u64], hole: Option<u8>) -> Self {
        Self {
            words: RefCell::new(words.to_vec()),
            hole,
            read_only: false,
            race: (0, Cell::new(0)),
            reads: Cell::new(0),
            marks: RefCell::new(Vec::new()),
        }
    }

    fn index(&self, address: u64) -> Result<usize, BadAddress> {
        let page = address >> 12;
        if self.hole.is_some_and(|hole| u64::from(hole) == page & 0xff) {
            return Err(BadAddress { address });
        }
        Ok(((address >> 3) ^ page) as usize % self.words.borrow().len())
    }
}

impl WalkMemory for Words {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        assert_eq!(address % 8, 0, "a word of 8 bytes at {address:#x}");
        self.reads.set(self.reads.get() + 1);
        let index = self.index(address)?;
        Ok(self.words.borrow()[index])
    }

    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        assert_eq!(address % 8, 0, "a word of 8 bytes at {address:#x}");
        assert_ne!(old, new, "nothing to mark");
        let index = self.index(address)?;
        if self.read_only {
            return Err(BadAddress { address });
        }
        let word = &mut self.words.borrow_mut()[index];
        let (bits, when) = &self.race;
        if when.replace(when.get() >> 1) & 1 != 0 {
            *word ^= bits;
        }
        if *word != old {
            return Ok(Err(*word));
        }
        *word = new;
        self.marks.borrow_mut().push((old, new));
        Ok(Ok(()))
    }
}

/// Keeps every table that it is given.
#[derive(Default)]
struct Tables(Vec<UpperTable>);

impl WalkCache for Tables {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let here = |t: &&UpperTable| t.span_log2 >= 64 || (iova ^ t.iova) >> t.span_log2 == 0;
        self.0.iter().filter(here).min_by_key(|t| t.level).copied()
    }
    fn found(&mut self, table: &UpperTable) {
        self.0.push(*table);
    }
}

fn format(data: &mut Bytes<'_>) -> FormatId {
    use ArmGranule as G;
    let kind = data.below(9);
    let granule = [G::K4, G::K4Lpa2, G::K16, G::K16Lpa2, G::K64, G::K64Lpa][data.below(6)];
    let (input_bits, upper) = (data.u8(), data.flag());
    let config = ArmConfig {
        granule,
        input_bits,
        upper,
    };
    match kind {
        0 => FormatId::AmdV1,
        1 => FormatId::X86_64,
        2 => FormatId::VtdSs,
        3 => FormatId::ArmStage1(config),
        4 => FormatId::ArmStage2(config),
        5 => FormatId::ArmV7s,
        6 => FormatId::RiscV,
        7 => FormatId::RiscVG,
        _ => FormatId::Dart(DartConfig {
            version: if upper {
                DartVersion::V1
            } else {
                DartVersion::V2
            },
            page_log2: if input_bits & 0x80 != 0 { 12 } else { 14 },
            input_bits: input_bits & 0x7f,
        }),
    }
}

/// A walker, and how many bits its unit's addresses have at most.
fn walker(data: &mut Bytes<'_>) -> (Walker, u32) {
    let format = format(data);
    let levels = data.u8();
    // Mostly a root that is aligned.
    let address = match data.below(3) {
        0 => data.u64(),
        _ => u64::from(data.u8()) << 16,
    };
    let mut walker = Walker::new(Root {
        format,
        address,
        levels,
    });
    let flags = data.u16();
    let bit = |n: u32| flags >> n & 1 != 0;
    let mut output_bits = 56;
    if bit(0) {
        let bits = data.u8().into();
        walker = walker.with_output_bits(bits);
        output_bits = bits.clamp(12, 56);
    }
    if bit(1) {
        walker = walker.with_input_bits(data.u8().into());
    }
    if bit(2) {
        walker = walker.with_page_sizes(PageSizes::from_bits(data.u64()));
    }
    let walker = walker
        .with_snoop_control(!bit(3))
        .with_privileged_requests(bit(4))
        .with_single_privilege(bit(5))
        .with_hardware_accessed(!bit(6))
        .with_hardware_dirty(!bit(7))
        .with_svpbmt(!bit(8))
        .with_supervisor_user_access(!bit(9))
        .with_access_flag(!bit(10));
    (walker, output_bits)
}

/// The bits that a unit may set and clear in an entry.
fn updates(format: FormatId) -> (u64, u64) {
    match format {
        FormatId::AmdV1 | FormatId::X86_64 => (0x60, 0),
        FormatId::VtdSs => (0x300, 0),
        FormatId::ArmStage1(_) => (0x400, 0x80),
        FormatId::ArmStage2(_) => (0x480, 0),
        // Either half of the word.
        FormatId::ArmV7s => (0x0000_0410_0000_0410, 0),
        FormatId::RiscV | FormatId::RiscVG => (0xc0, 0),
        _ => (0, 0),
    }
}

type Found = Result<Translation, WalkFault>;

pub(super) fn walk(data: &[u8]) {
    let data = &mut Bytes(data);
    let (walker, output_bits) = walker(data);
    let access = if data.flag() {
        Access::Write
    } else {
        Access::Read
    };
    // Near one end of the address space or the other.
    let (iova, near) = (data.u64(), data.u8());
    let iova = iova >> (near & 63);
    let iova = if near & 64 != 0 { !iova } else { iova };
    let flags = data.u8();
    let hole = (flags & 1 != 0).then(|| data.u8());
    let race = if flags & 2 != 0 {
        (data.u64(), Cell::new(u32::from_le_bytes(data.take())))
    } else {
        (1 << (flags >> 2), Cell::new(u32::MAX))
    };
    let mut words: Vec<u64> = Vec::new();
    while words.is_empty() || (!data.is_empty() && words.len() < 64) {
        words.push(data.u64());
    }

    let _ = walker.aperture();
    for level in 0..=255 {
        let _ = walker.span_log2(level);
    }

    // It reads only.
    let still = Words::new(&words, hole);
    let mut cache = Tables::default();
    let found = walker.walk(&still, iova, access, &mut cache);
    check(&walker, &still, iova, access, &found, 0);
    if let Ok(found) = found {
        let last = found.page.pa | (found.page.len - 1);
        assert_eq!(last >> output_bits, 0, "{:?}", found.page);
    }
    scan(&walker, &still);
    assert!(still.marks.borrow().is_empty());
    from_the_cache(&walker, &still, iova, access, &found, &mut cache);

    // It marks, and there is no other writer: the same is found, and a second walk has nothing to
    // mark.
    let walker = walker.with_updates(true);
    let live = Words::new(&words, hole);
    let marking = walker.walk(&live, iova, access, &mut ());
    check(&walker, &live, iova, access, &marking, 0);
    same(&found, &marking);
    let marks = live.marks.borrow().len();
    let again = walker.walk(&live, iova, access, &mut ());
    assert_eq!(live.marks.borrow().len(), marks, "marked twice");
    same(&marking, &again);

    // The memory is read-only.
    let mut frozen = Words::new(&words, hole);
    frozen.read_only = true;
    let refused = walker.walk(&frozen, iova, access, &mut ());
    check(&walker, &frozen, iova, access, &refused, 0);
    match refused {
        Err(fault) if matches!(fault.reason, WalkReason::NotWritable { .. }) => {
            assert!(marks > 0, "{fault}");
        }
        other => {
            assert_eq!(marks, 0);
            same(&found, &other);
        }
    }

    // Others change the words meanwhile.
    let racing = Words {
        race,
        ..Words::new(&words, hole)
    };
    let found = walker.walk(&racing, iova, access, &mut ());
    check(&walker, &racing, iova, access, &found, 16);
}

/// A scan says of every entry what a walk says that comes to it. Words that stand at every address
/// make tables without end, so it is ended.
fn scan(walker: &Walker, memory: &Words) {
    let levels = walker.root().levels;
    let (mut left, mut last) = (300, None);
    let scanned = walker.scan(memory, |entry| {
        assert!(entry.level < levels && entry.log2 < 64);
        if !matches!(entry.says, Ok(Says::Table { .. })) {
            assert!(last < Some(entry.iova), "{entry:?} after {last:?}");
            last = Some(entry.iova);
            let found = walker.walk(memory, entry.iova, Access::Read, &mut ());
            match (found, entry.says) {
                (Ok(found), Ok(Says::Leaf(page))) => {
                    assert_eq!((found.page, found.level), (page, entry.level));
                    assert_eq!(found.prot, entry.prot);
                }
                // On the way, or in the part of the page that is not open.
                (Err(fault), _)
                    if matches!(
                        fault.reason,
                        WalkReason::Denied { .. } | WalkReason::SubPage { .. }
                    ) => {}
                (Err(fault), Err(reason)) => {
                    assert_eq!(
                        (fault.reason, fault.level),
                        (reason, entry.level),
                        "{entry:?}"
                    );
                }
                (found, _) => panic!("{entry:?}, but {found:?}"),
            }
        }
        left -= 1;
        match left {
            0 => ScanStep::End,
            n if n % 7 == 0 => ScanStep::Past,
            _ => ScanStep::Into,
        }
    });
    if scanned.is_err() {
        assert_eq!(left, 300, "nothing was read");
    }
    memory.reads.set(0);
}

/// Checks the properties of every walk.
fn check(walker: &Walker, memory: &Words, iova: u64, access: Access, found: &Found, retries: u8) {
    let levels = walker.root().levels;
    let (sets, clears) = updates(walker.root().format);
    for &(old, new) in memory.marks.borrow().iter() {
        assert_eq!(new & !old & !sets, 0, "{old:#x} became {new:#x}");
        assert_eq!(old & !new & !clears, 0, "{old:#x} became {new:#x}");
    }
    let reads = match found {
        Ok(found) => found.reads,
        Err(fault) => fault.reads,
    };
    assert!(reads <= levels.saturating_add(retries), "{reads} reads");
    if walker.root().format != FormatId::ArmV7s {
        assert_eq!(usize::from(reads), memory.reads.replace(0));
    }
    match found {
        Ok(found) => {
            let page = found.page;
            assert!(reads > 0 && found.level < levels);
            assert!(page.len.is_power_of_two());
            assert_eq!((page.iova | page.pa) & (page.len - 1), 0, "{page:?}");
            assert!(found.open.contains(iova), "{:?}, not {iova:#x}", found.open);
            assert!(page.input().covers(&found.open), "{page:?}");
            let partly = matches!(walker.root().format, FormatId::Dart(_));
            assert!(partly || found.open == page.input());
            assert_eq!(found.pa - page.pa, iova - page.iova);
            let prot = match access {
                Access::Write => Prot::WRITE,
                _ => Prot::READ,
            };
            assert!(found.prot.contains(prot));
        }
        Err(fault) => {
            assert_eq!((fault.iova, fault.access), (iova, access));
            assert!(fault.level < levels.max(1));
            assert!(!fault.to_string().is_empty());
            let contended = matches!(fault.reason, WalkReason::Contended);
            assert!(retries > 0 || !contended, "{fault}");
        }
    }
}

/// From the lowest table that was met the same is found.
fn from_the_cache(
    walker: &Walker,
    memory: &Words,
    iova: u64,
    access: Access,
    found: &Found,
    cache: &mut Tables,
) {
    for table in &cache.0 {
        assert!(table.level < walker.root().levels);
        assert_eq!(walker.span_log2(table.level), Some(table.span_log2));
    }
    if let Ok(found) = found {
        let again = walker.walk(memory, iova, access, cache).unwrap();
        assert_eq!(again.reads, 1);
        let reads = found.reads;
        assert_eq!(Translation { reads, ..again }, *found);
    }
}

/// The same, but for bits that were set on the way in words that are met twice.
fn same(one: &Found, other: &Found) {
    match (one, other) {
        (Ok(one), Ok(other)) => assert_eq!(one, other),
        (Err(one), Err(other)) => {
            let entry = one.entry;
            assert_eq!(*one, WalkFault { entry, ..*other });
        }
        _ => panic!("{one:?}, then {other:?}"),
    }
}
