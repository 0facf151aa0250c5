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
//! This file has what both stages share: the geometry of the granules, where the bits of an address
//! go, and which entries are tables, blocks and pages. Our level 0 is Arm's level 3.

mod granule;
mod stage1;
mod stage2;

use core::marker::PhantomData;

use runs::PageSizes;

use super::{Above, Aperture, BreakBeforeMake, Entry, FormatId, mask};
use crate::error::BuildError;

pub use granule::{ArmGranule, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa};
pub use stage1::ArmStage1;
pub use stage2::ArmStage2;

/// Bit 0, valid (D8.3.1).
const VALID: u64 = 1 << 0;
/// Bit 1: a table above the lowest level; must be 1 in a page (D8.3.1).
const TABLE_OR_PAGE: u64 = 1 << 1;
/// SH[1:0], shareability; address bits 51:50 with LPA2, where SH comes from TCR (D8.3.1).
const SH_SHIFT: u32 = 8;
/// AF, access flag (D8.5.1). Set at once, so that the first access does not fault.
const AF: u64 = 1 << 10;
/// nT, no translation is cached: a block on its way to another size (D8.16.2, FEAT_BBM level 1).
const NT: u64 = 1 << 16;
/// DBM, dirty bit modifier: what is marked read-only is writable, and clean (D8.5.2).
const DBM: u64 = 1 << 51;
/// One of the bits that hardware ignores (D8.3.1, "reserved for software use"): the leaf was written
/// to before it lost DBM. Without it, taking the write permission away would forget that.
const WAS_DIRTY: u64 = 1 << 55;
/// Contiguous: one of a group whose translations one cache entry may hold (D8.7.1).
const CONTIGUOUS: u64 = 1 << 52;

/// The domain in which memory is kept coherent (D8.6.2, SH\[1:0\]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shareability {
    /// Nobody else sees the caches' contents.
    Non = 0b00,
    /// The outer shareable domain. Device memory always is.
    Outer = 0b10,
    /// The inner shareable domain: the processors of an operating system, and its coherent devices.
    Inner = 0b11,
}

/// What a unit must be told of an Arm table besides its address and its number of levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArmConfig {
    /// The granule, and whether entries hold 52 address bits.
    pub granule: ArmGranule,
    /// Bits of an input address: 64 − T0SZ or 64 − T1SZ.
    pub input_bits: u8,
    /// The table serves the top of the address space (TTBR1).
    pub upper: bool,
}

/// What both stages can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmOptions {
    /// The unit keeps dirty state (HTTU, HD): writable leaves get DBM and begin clean. Without a
    /// unit that does, such leaves could not be written.
    pub dirty: bool,
    /// What the unit demands of changes in place (IDR3.BBML, ID_AA64MMFR2_EL1.BBM).
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

/// Sizes of one table: a stage's input and output addresses, and where its walk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry<G> {
    input_bits: u8,
    output_bits: u8,
    levels: u8,
    upper: bool,
    granule: PhantomData<G>,
}

impl<G: Granule> Geometry<G> {
    /// A root that is a single table, of one entry at least (D8.2.5, stage 1), or up to
    /// 2^`concatenated` tables side by side (D8.2.6, stage 2).
    const fn new(
        id: FormatId,
        input_bits: u32,
        output_bits: u32,
        max_input_bits: u32,
        concatenated: u32,
    ) -> Result<Self, BuildError> {
        if input_bits < 32 || input_bits > max_input_bits {
            return Err(BuildError::Setting {
                format: id,
                what: "an input size in bits of",
                value: input_bits as u64,
                min: 32,
                max: max_input_bits as u64,
            });
        }
        if output_bits < 32 || output_bits > G::ADDRESS_BITS {
            return Err(BuildError::Setting {
                format: id,
                what: "an output size in bits of",
                value: output_bits as u64,
                min: 32,
                max: G::ADDRESS_BITS as u64,
            });
        }
        Ok(Self {
            input_bits: input_bits as u8,
            output_bits: output_bits as u8,
            levels: Self::levels_for(input_bits, concatenated),
            upper: false,
            granule: PhantomData,
        })
    }

    /// The fewest levels for so many input bits.
    const fn levels_for(input_bits: u32, concatenated: u32) -> u8 {
        (input_bits - G::LOG2 - concatenated).div_ceil(G::STRIDE) as u8
    }

    const fn config(&self) -> ArmConfig {
        ArmConfig {
            granule: G::KIND,
            input_bits: self.input_bits,
            upper: self.upper,
        }
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

    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        if level + 1 == usize::from(self.levels) {
            1 << (u32::from(self.input_bits) - shift::<G>(level))
        } else {
            1 << G::STRIDE
        }
    }
}

/// Bytes that one entry at `level` spans, as a power of two (D8.2.7 to D8.2.9).
#[inline(always)]
const fn shift<G: Granule>(level: usize) -> u32 {
    G::LOG2 + G::STRIDE * level as u32
}

/// Pages, blocks, and contiguous groups of either.
#[inline(always)]
fn leaf_sizes<G: Granule>(level: usize) -> PageSizes {
    if level > G::LARGEST_BLOCK {
        return PageSizes::NONE;
    }
    let own = PageSizes::from_log2(shift::<G>(level));
    match G::contiguous_log2(level) {
        0 => own,
        group => own.or(PageSizes::from_log2(shift::<G>(level) + group)),
    }
}

/// A leaf's entry: a page is 0b11 at the lowest level, a block 0b01 above (D8.3.1).
#[inline(always)]
fn leaf<G: Granule>(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
    let mut word = VALID | bits | G::spread(pa);
    if level == 0 {
        word |= TABLE_OR_PAGE;
    }
    if log2 != shift::<G>(level) {
        word |= CONTIGUOUS;
    }
    word
}

/// A table's entry. The attributes of stage 1 that tables hand down (APTable, UXNTable, PXNTable,
/// NSTable; D8.3.1) stay 0: tables allow everything. Stage 2 has none.
#[inline(always)]
fn table<G: Granule>(table: u64) -> u64 {
    VALID | TABLE_OR_PAGE | G::spread(table)
}

/// What stands in for an entry while its size changes: blocks have nT, pages and contiguous groups
/// have nothing of the kind.
fn broken(options: &ArmOptions, level: usize, word: u64) -> u64 {
    let block = level > 0 && word & (VALID | TABLE_OR_PAGE) == VALID;
    if options.break_before_make == BreakBeforeMake::Marked && block && word & CONTIGUOUS == 0 {
        word | NT
    } else {
        0
    }
}

/// What an entry says. The reserved encodings (0b01 at the lowest level, a block where the granule
/// has none) translate nothing, as in hardware (D8.3.1).
#[inline(always)]
fn decode<G: Granule>(level: usize, word: u64) -> Entry {
    match (word & (VALID | TABLE_OR_PAGE), level) {
        (0b11, 1..) => Entry::Table(G::collect(word)),
        (0b01, 1..) if level <= G::LARGEST_BLOCK => large_or_small::<G>(level, word),
        (0b11, 0) => large_or_small::<G>(level, word),
        _ => Entry::Empty,
    }
}

#[inline(always)]
fn large_or_small<G: Granule>(level: usize, word: u64) -> Entry {
    let mut log2 = shift::<G>(level);
    // Where there are no groups the bit is reserved, and read as 0.
    if word & CONTIGUOUS != 0 {
        log2 += G::contiguous_log2(level);
    }
    Entry::Leaf {
        pa: G::collect(word) & !mask(0, log2 - 1),
        log2,
    }
}
