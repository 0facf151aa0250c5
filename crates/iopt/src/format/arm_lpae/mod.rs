//! Arm's long descriptors: VMSAv8-64, as SMMUs and processors walk them (LPAE).
//!
//! Arm Architecture Reference Manual for A-profile (DDI 0487), chapter D8 "The AArch64 Virtual
//! Memory System Architecture": section D8.2 "Translation process" (sizes, levels, initial lookup),
//! D8.3 "Translation table descriptor formats", D8.4 "Memory access control", D8.5 "Hardware
//! updates to the translation tables" (AF, DBM), D8.6 "Memory region attributes", D8.7 "Other
//! descriptor fields" (Contiguous bit), D8.16 "TLB maintenance" (break-before-make, nT).
//! Arm SMMU architecture, version 3 (IHI 0070), sections 3.4 "Address sizes", 5.2 "STE" and
//! 5.4 "CD", takes these tables over and configures them.
//!
//! This file has the tables of both stages, which are alike but for what a [`Stage`] says. Our level 0 is
//! Arm's level 3.

mod granule;
mod stage1;
mod stage2;

use core::fmt;
use core::marker::PhantomData;

use runs::PageSizes;

use super::{Above, Aperture, BreakBeforeMake, Entry, Format, FormatId, mask};
use crate::error::BuildError;
use crate::prot::Prot;

pub use granule::{ArmGranule, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa};

/// Stage 1 tables with granule `G`, for a regime of two privilege levels with ASIDs.
///
/// A leaf can be read at least. Every leaf can be for privileged requests only or for all.
pub type ArmStage1<G> = ArmTables<G, stage1::Stage1>;

/// Stage 2 tables with granule `G`.
///
/// Up to 16 tables may stand side by side as the root, which saves a level. Leaves know no
/// privilege.
pub type ArmStage2<G> = ArmTables<G, stage2::Stage2>;

/// Bit 0, valid (D8.3.1).
const VALID: u64 = 1 << 0;
/// Bit 1: a table above the lowest level; must be 1 in a page (D8.3.1).
const TABLE_OR_PAGE: u64 = 1 << 1;
/// AP[2] of stage 1, read-only, and S2AP[1] of stage 2, writable (D8.4.1, D8.4.2). With DBM it says whether
/// the leaf is dirty (D8.5.2).
const WRITABLE_OR_NOT: u64 = 1 << 7;
/// SH[1:0], shareability; address bits 51:50 with LPA2, where SH comes from TCR (D8.3.1).
const SH_SHIFT: u32 = 8;
/// AF, access flag (D8.5.1). Set at once, so that the first access does not fault.
const AF: u64 = 1 << 10;
/// nT, no translation is cached: a block on its way to another size (D8.16.2, FEAT_BBM level 1).
const NT: u64 = 1 << 16;
/// DBM, dirty bit modifier: what is marked read-only is writable, and clean (D8.5.2).
const DBM: u64 = 1 << 51;
/// One of the bits that hardware ignores (D8.3.1, "reserved for software use"): the leaf was written
/// to before it lost DBM. Without it, taking the write permission away would lose that.
const WAS_DIRTY: u64 = 1 << 55;
/// Contiguous: one of a group whose translations one cache entry may hold (D8.7.1).
const CONTIGUOUS: u64 = 1 << 52;

/// The domain in which memory is kept coherent (D8.6.2, SH\[1:0\]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shareability {
    /// No other observer sees the caches' contents.
    Non = 0b00,
    /// The outer shareable domain. Device memory always is.
    Outer = 0b10,
    /// The inner shareable domain: the processors of an operating system, and its coherent devices.
    Inner = 0b11,
}

/// Parameters of an Arm table that a unit needs besides its address and its number of levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArmConfig {
    /// The granule, and whether entries hold 52 address bits.
    pub granule: ArmGranule,
    /// Bits of an input address: 64 − T0SZ or 64 − T1SZ.
    pub input_bits: u8,
    /// The table serves the top of the address space (TTBR1).
    pub upper: bool,
}

/// Options of both stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmOptions {
    /// The unit keeps dirty state (HTTU, HD): writable leaves get DBM and begin clean. Without a
    /// unit that does, such leaves could not be written.
    pub dirty: bool,
    /// Demand of the unit for changes in place (IDR3.BBML, ID_AA64MMFR2_EL1.BBM).
    pub break_before_make: BreakBeforeMake,
    /// Shareability of memory that is cached. Not in the entries with LPA2.
    pub shareability: Shareability,
}

impl Default for ArmOptions {
    /// No dirty state, break-before-make always, inner shareable.
    fn default() -> Self {
        Self::PLAIN
    }
}

impl ArmOptions {
    /// The default, as a constant.
    pub const PLAIN: Self = Self {
        dirty: false,
        break_before_make: BreakBeforeMake::Always,
        shareability: Shareability::Inner,
    };

    /// The SH field of a leaf. With LPA2 (TCR.DS) there is none: its bits hold address bits.
    const fn shareability_bits<G: Granule>(&self, outer: bool) -> u64 {
        if matches!(G::KIND, ArmGranule::K4Lpa2 | ArmGranule::K16Lpa2) {
            return 0;
        }
        // Device memory, and normal memory that is non-cacheable for inner and outer caches, are
        // outer shareable whatever the field says (D8.6.2); it then says so.
        let sh = if outer {
            Shareability::Outer
        } else {
            self.shareability
        };
        (sh as u64) << SH_SHIFT
    }
}

/// Differences between the two stages.
pub trait Stage: Copy + fmt::Debug + PartialEq + Eq + Send + Sync + 'static {
    /// It is the first.
    const FIRST: bool;
    /// The most tables that can stand side by side as the root, as a power of two.
    const CONCATENATED: u32;
    /// The bit [`WRITABLE_OR_NOT`] of a leaf that can be written to, or is dirty.
    const WRITABLE: u64;

    /// See [`Format::leaf_bits`].
    fn leaf_bits<G: Granule>(&self, options: &ArmOptions, prot: Prot) -> Option<u64>;
    /// See [`Format::prot`]; `marked` says that it is writable, and keeps dirty state.
    fn prot(&self, word: u64, marked: bool) -> Prot;
}

/// Tables with granule `G` of one stage: [`ArmStage1`] or [`ArmStage2`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmTables<G, S> {
    input_bits: u8,
    output_bits: u8,
    levels: u8,
    upper: bool,
    options: ArmOptions,
    stage: S,
    granule: PhantomData<G>,
}

impl<G: Granule, S: Stage> ArmTables<G, S> {
    /// A root that is a single table, of one entry at least (D8.2.5, stage 1), or up to
    /// 2^[`CONCATENATED`](Stage::CONCATENATED) tables side by side (D8.2.6, stage 2).
    const fn of_stage(stage: S, input_bits: u32, output_bits: u32) -> Result<Self, BuildError> {
        let max_input_bits = if S::FIRST {
            G::STAGE1_INPUT_BITS
        } else {
            G::ADDRESS_BITS
        };
        if input_bits < 32 || input_bits > max_input_bits {
            return Err(BuildError::Setting {
                format: Self::ID,
                what: "an input size in bits of",
                value: input_bits as u64,
                min: 32,
                max: max_input_bits as u64,
            });
        }
        if output_bits < 32 || output_bits > G::ADDRESS_BITS {
            return Err(BuildError::Setting {
                format: Self::ID,
                what: "an output size in bits of",
                value: output_bits as u64,
                min: 32,
                max: G::ADDRESS_BITS as u64,
            });
        }
        Ok(Self {
            input_bits: input_bits as u8,
            output_bits: output_bits as u8,
            levels: Self::levels_for(input_bits),
            upper: false,
            options: ArmOptions::PLAIN,
            stage,
            granule: PhantomData,
        })
    }

    /// The fewest levels for so many input bits.
    const fn levels_for(input_bits: u32) -> u8 {
        (input_bits - G::LOG2 - S::CONCATENATED).div_ceil(G::STRIDE) as u8
    }

    const fn id_of(input_bits: u8, upper: bool) -> FormatId {
        let config = ArmConfig {
            granule: G::KIND,
            input_bits,
            upper,
        };
        if S::FIRST {
            FormatId::ArmStage1(config)
        } else {
            FormatId::ArmStage2(config)
        }
    }

    /// With these options.
    pub const fn with_options(mut self, options: ArmOptions) -> Self {
        self.options = options;
        self
    }
}

impl<G: Granule, S: Stage> Format for ArmTables<G, S> {
    const ID: FormatId = Self::id_of(G::ADDRESS_BITS as u8, false);
    const ENTRY_BYTES: usize = 8;
    const TABLE_BYTES: u64 = 1 << G::LOG2;
    const GRANULE_LOG2: u32 = G::LOG2;
    const MIN_LEVELS: u8 = Self::levels_for(32);
    const MAX_LEVELS: u8 = if S::FIRST {
        G::STAGE1_LEVELS
    } else {
        G::STAGE2_LEVELS
    };
    const OUTPUT_BITS: u32 = G::ADDRESS_BITS;
    // The second changes only where DBM is set; it is a permission elsewhere.
    const HARDWARE_BITS: u64 = AF | WRITABLE_OR_NOT | WAS_DIRTY;
    const ACCESSED: u64 = AF;
    const CLEAN: Option<(u64, u64)> =
        Some((WAS_DIRTY | S::WRITABLE, WRITABLE_OR_NOT ^ S::WRITABLE));
    const GROUPS_ADVANCE: bool = true;
    const LINEAR_LOG2: u32 = G::LINEAR_LOG2;

    fn id(&self) -> FormatId {
        Self::id_of(self.input_bits, self.upper)
    }

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.levels
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        u32::from(self.output_bits)
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.options.break_before_make
    }

    fn demanding(mut self, demand: BreakBeforeMake) -> Self {
        self.options.break_before_make = demand;
        self
    }

    /// TTBR0 and stage 2: the bottom; TTBR1: the top (D8.2.4).
    #[inline(always)]
    fn aperture(&self) -> Aperture {
        Aperture {
            bits: u32::from(self.input_bits),
            above: if self.upper {
                Above::Ones
            } else {
                Above::Zeros
            },
        }
    }

    /// Bytes that one entry at `level` spans, as a power of two (D8.2.7 to D8.2.9).
    #[inline(always)]
    fn shift(level: usize) -> u32 {
        G::LOG2 + G::STRIDE * level as u32
    }

    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        if level + 1 == usize::from(self.levels) {
            1 << (u32::from(self.input_bits) - Self::shift(level))
        } else {
            1 << G::STRIDE
        }
    }

    /// Pages, blocks, and contiguous groups of either.
    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        if level > G::LARGEST_BLOCK {
            return PageSizes::NONE;
        }
        let own = PageSizes::from_log2(Self::shift(level));
        match G::contiguous_log2(level) {
            0 => own,
            group => own.or(PageSizes::from_log2(Self::shift(level) + group)),
        }
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        self.stage.leaf_bits::<G>(&self.options, prot)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        self.stage.prot(word, self.options.dirty && word & DBM != 0)
    }

    /// A page is 0b11 at the lowest level, a block 0b01 above (D8.3.1).
    #[inline(always)]
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        let mut word = VALID | bits | G::spread(pa);
        if level == 0 {
            word |= TABLE_OR_PAGE;
        }
        if log2 != Self::shift(level) {
            word |= CONTIGUOUS;
        }
        word
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << log2
    }

    /// The attributes of stage 1 that tables hand down (APTable, UXNTable, PXNTable, NSTable; D8.3.1) stay
    /// 0: tables allow everything. Stage 2 has none.
    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        VALID | TABLE_OR_PAGE | G::spread(table)
    }

    /// The reserved encodings (0b01 at the lowest level, a block where the granule has none) translate
    /// nothing, as in hardware (D8.3.1).
    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        match (word & (VALID | TABLE_OR_PAGE), level) {
            (0b11, 1..) => return Entry::Table(G::collect(word)),
            (0b01, 1..) if level <= G::LARGEST_BLOCK => {}
            (0b11, 0) => {}
            _ => return Entry::Empty,
        }
        let mut log2 = Self::shift(level);
        // Where there are no groups the bit is reserved, and read as 0.
        if word & CONTIGUOUS != 0 {
            log2 += G::contiguous_log2(level);
        }
        Entry::Leaf {
            pa: G::collect(word) & !mask(0, log2 - 1),
            log2,
        }
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & VALID == 0
    }

    /// Blocks have nT, pages and contiguous groups have nothing of the kind.
    fn broken(&self, level: usize, word: u64) -> u64 {
        let marks = self.options.break_before_make == BreakBeforeMake::Marked;
        let block = level > 0 && word & (VALID | TABLE_OR_PAGE) == VALID;
        if marks && block && word & CONTIGUOUS == 0 {
            word | NT
        } else {
            0
        }
    }

    #[inline]
    fn keeps_dirty(&self) -> bool {
        self.options.dirty
    }

    /// It keeps dirty state and hardware has made it writable (D8.5.2), or did so before it became
    /// read-only.
    #[inline(always)]
    fn is_dirty(word: u64) -> bool {
        word & (DBM | WRITABLE_OR_NOT) == DBM | S::WRITABLE || word & WAS_DIRTY != 0
    }

    #[inline(always)]
    fn cleaned(word: u64) -> u64 {
        let clean = if word & DBM != 0 {
            word & !WRITABLE_OR_NOT | WRITABLE_OR_NOT ^ S::WRITABLE
        } else {
            word
        };
        clean & !WAS_DIRTY
    }

    #[inline(always)]
    fn dirtied(word: u64) -> u64 {
        if word & DBM != 0 {
            word & !WRITABLE_OR_NOT | S::WRITABLE
        } else {
            word | WAS_DIRTY
        }
    }
}
