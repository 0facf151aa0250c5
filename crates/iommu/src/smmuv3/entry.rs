//! Contents of stream table entries and context descriptors.
//!
//! IHI 0070, sections 5.2 "STE, Stream Table Entry" and 5.4 "CD, Context Descriptor": 64 bytes each, of
//! which the first four words are used here; the rest is zero. The unit reads the words of either in any
//! order, but each in one piece (section 3.21.3). So both have the same three states:
//!
//! * **empty**: nothing is attached here;
//! * **present**: with V;
//! * **leaving**: the same without V. The unit finds it invalid, but may still have the old one cached;
//!   the device counts as attached.
//!
//! The way from empty to present is by leaving, with an invalidation before V is set, since the unit may
//! have cached words of an entry that was not valid (section 3.21.3.1).
//!
//! These are also where the driver keeps what it knows: there is no second list that could differ. Beside V,
//! a stream table entry of stage 1 says where the context descriptors of the device are, and those say which
//! tables. That pointer stays when the entry becomes empty, as do two bits that the unit ignores.

use iopt::format::{ArmConfig, ArmGranule};
use iopt::{Cell, FormatId, Root, TableMemory};

use super::capabilities::Features;
use crate::arm;

/// Words of an entry.
pub(super) const WORDS: usize = 8;
/// Bytes of an entry, as a power of two.
pub(super) const LOG2: u32 = 6;

// STE, first word.
/// V.
const STREAM_VALID: u64 = 1;
/// Config.
const CONFIG: u64 = 7 << 1;
/// Config: stage 1.
const FIRST: u64 = 0b101 << 1;
/// Config: stage 2.
const SECOND: u64 = 0b110 << 1;
/// S1Fmt: two levels, the second of 4 KiB.
pub(super) const TWO_LEVELS: u64 = 1 << 4;
/// S1ContextPtr.
const CONTEXTS: u64 = ((1 << 52) - 1) & !0x3f;
/// S1CDMax.
pub(super) const CONTEXT_BITS: u32 = 59;

// STE, second word.
/// S1DSS: requests without a PASID use the context descriptor 0.
const DEFAULT_CONTEXT: u64 = 0b10;
/// S1STALLD.
const NO_STALLS: u64 = 1 << 27;
/// EATS: full.
const TRANSLATION_REQUESTS: u64 = 1 << 28;
/// SHCFG: as the request says.
const INCOMING: u64 = 1 << 44;
/// SW_RESERVED: the device has a TLB.
const DEVICE_TLB: u64 = 1 << 20;
/// SW_RESERVED: the pointer leads to context descriptors.
const HAS_CONTEXTS: u64 = 1 << 21;

// STE, fourth word.
/// S2SL0_2 and S2DS.
const SL0_2: u64 = 1 << 2;
const STREAM_DS: u64 = 1 << 3;

// CD, first word.
/// EPD0 and EPD1: no walks.
const NO_LOWER: u64 = 1 << 14;
const NO_UPPER: u64 = 1 << 30;
/// V.
const CONTEXT_VALID: u64 = 1 << 31;
/// AA64. In every context descriptor that is not empty.
const AARCH64: u64 = 1 << 41;
/// HD, HA.
const DIRTY: u64 = 3 << 42;
/// R, A, and no S: faults are recorded and the request is aborted (section 5.5).
const RECORD_AND_ABORT: u64 = 3 << 45;
/// ASET: no address space of a processor's.
const NOT_SHARED: u64 = 1 << 47;

// CD, third word.
const CONTEXT_DS: u64 = 1 << 58;

/// TTB0, TTB1 and S2TTB.
const TABLE: u64 = ((1 << 52) - 1) & !0xf;

/// An attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) domain: u16,
    pub(super) root: Root,
}

/// The granule, and entries of 52 bits: from the size, and the field DS.
fn granule(log2: u32, ds: bool, size: u64) -> ArmGranule {
    match (log2, ds) {
        (12, false) => ArmGranule::K4,
        (12, true) => ArmGranule::K4Lpa2,
        (14, false) => ArmGranule::K16,
        (14, true) => ArmGranule::K16Lpa2,
        _ if size == 6 => ArmGranule::K64Lpa,
        _ => ArmGranule::K64,
    }
}

/// DS: 52 bits in tables of small granules.
const fn ds(granule: ArmGranule) -> bool {
    matches!(granule, ArmGranule::K4Lpa2 | ArmGranule::K16Lpa2)
}

/// IPS and S2PS: entries of 48 bits lead no further.
fn size(granule: ArmGranule, features: Features) -> u64 {
    match granule {
        ArmGranule::K4 | ArmGranule::K16 | ArmGranule::K64 => features.output_size().min(5),
        _ => features.output_size(),
    }
}

/// TG0 and S2TG; TG1 has the same two bits in another order.
const GRANULES: [(u64, u64, u32); 3] = [(0, 2, 12), (1, 3, 16), (2, 1, 14)];

fn granule_field(log2: u32, upper: bool) -> u64 {
    let field = GRANULES.iter().find(|(.., size)| *size == log2);
    field.map_or(0, |(lower, other, _)| if upper { *other } else { *lower })
}

fn granule_size(field: u64, upper: bool) -> u32 {
    let this = |(lower, other, _): &&(u64, u64, u32)| field == if upper { *other } else { *lower };
    GRANULES.iter().find(this).map_or(12, |(.., log2)| *log2)
}

/// An entry in memory.
pub(super) struct Entry<'m, M: TableMemory> {
    pub(super) memory: &'m M,
    pub(super) cells: &'m [M::Cell],
}

impl<M: TableMemory> Clone for Entry<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: TableMemory> Copy for Entry<'_, M> {}

impl<'m, M: TableMemory> Entry<'m, M> {
    /// The entry at `address`, a multiple of 64; `None` when the memory gives no such cells.
    pub(super) fn at(memory: &'m M, address: u64) -> Option<Self> {
        let cells = memory.entries(address, WORDS);
        (cells.len() == WORDS).then_some(Self { memory, cells })
    }

    fn word(&self, n: usize) -> u64 {
        self.cells.get(n).map_or(0, Cell::get)
    }

    /// Stores the words, from the last to the first.
    fn store(&self, words: &[u64]) {
        for (cell, word) in self.cells.iter().zip(words).rev() {
            cell.set_release(*word);
        }
        self.memory.written(self.cells);
    }

    fn change(&self, n: usize, clear: u64, set: u64) {
        if let Some(cell) = self.cells.get(n) {
            cell.set_release(cell.get() & !clear | set);
            self.memory.written(self.cells);
        }
    }
}

/// A stream table entry.
pub(super) struct Stream<'m, M: TableMemory>(pub(super) Entry<'m, M>);

impl<M: TableMemory> Stream<'_, M> {
    pub(super) fn is_valid(&self) -> bool {
        self.0.word(0) & STREAM_VALID != 0
    }

    /// Has the unit use what the entry says.
    pub(super) fn validate(&self) {
        self.0.change(0, 0, STREAM_VALID);
    }

    /// From present to leaving.
    pub(super) fn withdraw(&self) {
        self.0.change(0, STREAM_VALID, 0);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        self.0.change(0, CONFIG, 0);
    }

    pub(super) fn has_device_tlb(&self) -> bool {
        self.0.word(1) & DEVICE_TLB != 0
    }

    pub(super) fn set_device_tlb(&self, on: bool) {
        let set = if on { DEVICE_TLB } else { 0 };
        self.0.change(1, DEVICE_TLB, set);
    }

    /// Where the context descriptors are: S1Fmt, S1ContextPtr and S1CDMax, if there are any.
    pub(super) fn contexts(&self) -> Option<u64> {
        let kept = TWO_LEVELS | CONTEXTS | 0x1f << CONTEXT_BITS;
        (self.0.word(1) & HAS_CONTEXTS != 0).then_some(self.0.word(0) & kept)
    }

    /// Notes where the context descriptors are, in an empty entry.
    pub(super) fn set_contexts(&self, contexts: u64) {
        self.0.change(0, 0, contexts);
        self.0.change(1, 0, HAS_CONTEXTS);
    }

    /// Bits of the second word that both stages share.
    fn common(&self, features: Features) -> u64 {
        let mut word = self.0.word(1) & (DEVICE_TLB | HAS_CONTEXTS);
        if self.has_device_tlb() {
            word |= TRANSLATION_REQUESTS;
        }
        if features.overrides_types() {
            word |= INCOMING;
        }
        if features.stage1() {
            word |= DEFAULT_CONTEXT | features.attributes() << 2;
            if features.can_stall() {
                word |= NO_STALLS;
            }
        }
        word
    }

    /// From empty to leaving: stage 1, through context descriptors.
    pub(super) fn set_first(&self, features: Features) {
        let contexts = self.contexts().unwrap_or(0);
        let vmid = features.stage1_vmid().into();
        self.0
            .store(&[contexts | FIRST, self.common(features), vmid, 0]);
    }

    /// From empty to leaving: stage 2. The root was checked.
    pub(super) fn set_second(&self, domain: u16, root: &Root, features: Features) {
        let FormatId::ArmStage2(config) = root.format else {
            return;
        };
        let contexts = self.contexts().unwrap_or(0);
        let log2 = arm::granule_log2(config.granule);
        // Where the walk begins (DDI 0487, VTCR_EL2.SL0 and SL2): with 4 KiB level 2 is 0, else level 3.
        let (start, high) = match (log2, root.levels) {
            (12, 5) => (0, SL0_2),
            (12, levels) => (u64::from(levels.saturating_sub(2)), 0),
            (_, levels) => (u64::from(levels.saturating_sub(1)), 0),
        };
        let dirty = if features.dirty() { 3 << 55 } else { 0 };
        // S2R and S2AA64; no stalls (S2S).
        let second = u64::from(domain)
            | (64 - u64::from(config.input_bits)) << 32
            | (start & 3) << 38
            | features.attributes() << 40
            | granule_field(log2, false) << 46
            | size(config.granule, features) << 48
            | 1 << 51
            | dirty
            | 1 << 58;
        let wide = if ds(config.granule) { STREAM_DS } else { 0 };
        let table = root.address & TABLE | wide | high;
        let first = contexts | SECOND;
        self.0.store(&[first, self.common(features), second, table]);
    }

    /// Returns the attachment through stage 2.
    pub(super) fn second(&self) -> Option<Attached> {
        if self.0.word(0) & CONFIG != SECOND {
            return None;
        }
        let (second, table) = (self.0.word(2), self.0.word(3));
        let log2 = granule_size(second >> 46 & 3, false);
        let start = (second >> 38 & 3) as u8;
        let config = ArmConfig {
            granule: granule(log2, table & STREAM_DS != 0, second >> 48 & 7),
            input_bits: 64 - (second >> 32 & 0x3f) as u8,
            upper: false,
        };
        Some(Attached {
            domain: second as u16,
            root: Root {
                format: FormatId::ArmStage2(config),
                address: table & TABLE,
                levels: match (log2, table & SL0_2) {
                    (12, 0) => start + 2,
                    (12, _) => 5,
                    _ => start + 1,
                },
            },
        })
    }
}

/// A context descriptor.
pub(super) struct Context<'m, M: TableMemory>(pub(super) Entry<'m, M>);

impl<M: TableMemory> Context<'_, M> {
    pub(super) fn is_valid(&self) -> bool {
        self.0.word(0) & CONTEXT_VALID != 0
    }

    /// Has the unit use what the descriptor says.
    pub(super) fn validate(&self) {
        self.0.change(0, 0, CONTEXT_VALID);
    }

    /// From present to leaving.
    pub(super) fn withdraw(&self) {
        self.0.change(0, CONTEXT_VALID, 0);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        self.0.store(&[0; 4]);
    }

    /// From empty to leaving. The root was checked.
    pub(super) fn set(&self, domain: u16, root: &Root, features: Features) {
        let FormatId::ArmStage1(config) = root.format else {
            return;
        };
        let log2 = arm::granule_log2(config.granule);
        let input = 64 - u64::from(config.input_bits);
        let half = input | granule_field(log2, config.upper) << 6 | features.attributes() << 8;
        let table = root.address & TABLE;
        let wide = if ds(config.granule) { CONTEXT_DS } else { 0 };
        let (half, tables) = if config.upper {
            (half << 16 | NO_LOWER, [0, table | wide])
        } else {
            (half | NO_UPPER, [table, wide])
        };
        let dirty = if features.dirty() { DIRTY } else { 0 };
        let first = half
            | size(config.granule, features) << 32
            | AARCH64
            | dirty
            | RECORD_AND_ABORT
            | NOT_SHARED
            | u64::from(domain) << 48;
        self.0.store(&[first, tables[0], tables[1], arm::MAIR]);
    }

    /// Returns the attachment; `None` when the descriptor is empty.
    pub(super) fn read(&self) -> Option<Attached> {
        let first = self.0.word(0);
        if first & AARCH64 == 0 {
            return None;
        }
        let upper = first & NO_LOWER != 0;
        let (half, table) = if upper {
            (first >> 16, self.0.word(2))
        } else {
            (first, self.0.word(1))
        };
        let log2 = granule_size(half >> 6 & 3, upper);
        let wide = self.0.word(2) & CONTEXT_DS != 0;
        let format = FormatId::ArmStage1(ArmConfig {
            granule: granule(log2, wide, first >> 32 & 7),
            input_bits: 64 - (half & 0x3f) as u8,
            upper,
        });
        Some(Attached {
            domain: (first >> 48) as u16,
            root: Root {
                format,
                address: table & TABLE,
                levels: arm::levels(format).trailing_zeros() as u8,
            },
        })
    }
}
