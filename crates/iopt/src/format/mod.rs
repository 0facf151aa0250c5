//! Formats: data and small pure functions.
//!
//! A format says how one entry is encoded and decoded and which sizes a level can hold; the
//! [`engine`](crate::engine) owns every algorithm. Level 0 is the level of the smallest page.
//!
//! An entry is computed as `u64` whatever its width. *Empty* is the entry 0, which every format
//! reads as "not present"; a format whose hardware reads 0 as present cannot be added.
//!
//! A leaf may take several neighbouring entries of its table (a *group*); their number follows from
//! the leaf's size. In some formats all entries of a group are equal (AMD v1, ARMv7, RISC-V), in
//! others each holds its own address ([`Format::GROUPS_ADVANCE`]: ARM's contiguous entries).

mod amdv1;
mod arm_lpae;
mod armv7s;
mod dart;
mod riscv;
mod vtd_ss;
mod x86_64;

use core::fmt;

use runs::{Iova, PageSizes, Span};

use crate::prot::Prot;

pub use amdv1::AmdV1;
pub use arm_lpae::{
    ArmConfig, ArmGranule, ArmOptions, ArmStage1, ArmStage2, ArmTables, Granule, K4, K4Lpa2, K16,
    K16Lpa2, K64, K64Lpa, Shareability,
};
pub use armv7s::ArmV7s;
pub use dart::{Dart, Dart1, Dart1Page4K, Dart2, DartConfig, DartVersion};
pub use riscv::{RiscV, RiscVG, RiscVTables};
pub use vtd_ss::VtdSs;
pub use x86_64::X86_64;

/// The formats by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FormatId {
    /// AMD I/O page tables, version 1 ("host" tables).
    AmdV1,
    /// x86-64 tables: AMD version 2 and the first stage of VT-d.
    X86_64,
    /// The second stage of VT-d.
    VtdSs,
    /// Stage 1 of Arm's VMSAv8-64 (LPAE).
    ArmStage1(ArmConfig),
    /// Stage 2 of Arm's VMSAv8-64 (LPAE).
    ArmStage2(ArmConfig),
    /// ARMv7 short descriptors.
    ArmV7s,
    /// RISC-V Sv39, Sv48, Sv57.
    RiscV,
    /// RISC-V Sv39x4, Sv48x4, Sv57x4: the second stage, with a root of 16 KiB.
    RiscVG,
    /// Apple DART.
    Dart(DartConfig),
}

impl FormatId {
    /// The formats of Intel's and AMD's units: those that need no configuration but the levels, have
    /// tables of 4 KiB, and that the software unit and the command line offer.
    /// [`AnyTable`](crate::AnyTable) builds more; [`named::FORMATS`](crate::named::FORMATS) has all names.
    pub const ALL: [Self; 3] = [Self::AmdV1, Self::X86_64, Self::VtdSs];

    /// The name, as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AmdV1 => "amdv1",
            Self::X86_64 => "x86-64",
            Self::VtdSs => "vtd-ss",
            Self::ArmStage1(config) => config.granule.stage1_name(),
            Self::ArmStage2(config) => config.granule.stage2_name(),
            Self::ArmV7s => "armv7-short",
            Self::RiscV => "riscv",
            Self::RiscVG => "riscv-g",
            Self::Dart(config) => config.name(),
        }
    }

    /// The format of [`ALL`](Self::ALL) with this name. Other names: [`named::root`](crate::named::root).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|id| id.name() == name)
    }
}

impl fmt::Display for FormatId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a table begins and how it is to be read: what a unit needs to walk it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Root {
    /// The format.
    pub format: FormatId,
    /// Address of the top table, as the unit receives it: with the encryption bit where tables are
    /// encrypted ([`AmdV1::with_encrypted_tables`]). Its encoding in a register is the driver's.
    pub address: u64,
    /// Number of levels.
    pub levels: u8,
}

/// The addresses that a table translates: those of which `bits` bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aperture {
    /// Bits of an input address.
    pub bits: u32,
    /// Required value of the bits above.
    pub above: Above,
}

/// The bits of an input address above those that index the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Above {
    /// All 0: the bottom of the address space.
    Zeros,
    /// All 1: the top of the address space (ARM's TTBR1).
    Ones,
    /// Copies of the highest bit that counts: half at the bottom, half at the top (x86-64).
    Sign,
}

impl Aperture {
    /// The addresses below 2^`bits`.
    pub const fn zeros(bits: u32) -> Self {
        Self {
            bits,
            above: Above::Zeros,
        }
    }

    /// 2^`bits` addresses, sign-extended.
    pub const fn signed(bits: u32) -> Self {
        Self {
            bits,
            above: Above::Sign,
        }
    }

    /// The stretches that it consists of, none longer than 2^63 bytes.
    pub fn spans(self) -> impl Iterator<Item = Span<Iova>> {
        let half = 1u64 << (self.bits.clamp(1, 64) - 1);
        let top = 0u64.wrapping_sub(half);
        let (first, second) = match self.above {
            Above::Sign => (Span::new(0, half), Some(Span::new(top, half))),
            Above::Zeros if self.bits < 64 => (Span::new(0, half * 2), None),
            Above::Ones if self.bits < 64 => (Span::new(top - half, half * 2), None),
            Above::Zeros | Above::Ones => (Span::new(0, half), Some(Span::new(half, half))),
        };
        core::iter::once(first).chain(second)
    }

    /// True when every address of the range is translated. A range is never split between the
    /// lower and the upper half of a sign-extended aperture.
    #[inline]
    pub const fn covers(self, range: &Span<Iova>) -> bool {
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return false;
        }
        let (first, last) = (range.start, range.last());
        match self.above {
            Above::Sign => {
                // The bits above the ones that count, and the highest of these, are all 0 or
                // all 1. From 1 to 64 bits count. The mask is what processors do to shifts
                // anyhow.
                let above = self.bits.wrapping_sub(1) & 63;
                let (first, last) = (first as i64 >> above, last as i64 >> above);
                first == last && (first == 0 || first == -1)
            }
            Above::Zeros => self.bits >= 64 || last >> self.bits == 0,
            Above::Ones => self.bits >= 64 || !first >> self.bits == 0,
        }
    }

    /// The input address without the bits above the aperture: what indexes the tables.
    #[inline(always)]
    pub(crate) const fn strip(self, iova: u64) -> u64 {
        if self.bits >= 64 {
            iova
        } else {
            iova & ((1 << self.bits) - 1)
        }
    }

    /// The reverse of [`strip`](Self::strip).
    #[inline(always)]
    pub(crate) const fn extend(self, stripped: u64) -> u64 {
        if self.bits >= 64 {
            return stripped;
        }
        let ones = match self.above {
            Above::Zeros => false,
            Above::Ones => true,
            Above::Sign => stripped >> (self.bits - 1) & 1 == 1,
        };
        if ones {
            stripped | !((1 << self.bits) - 1)
        } else {
            stripped
        }
    }
}

impl fmt::Display for Aperture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.above {
            Above::Zeros => "",
            Above::Ones => ", at the top",
            Above::Sign => ", sign-extended",
        };
        write!(f, "the {}-bit address space{kind}", self.bits)
    }
}

/// Demand of a unit when the size of a translation changes while it is in use: a table takes a
/// large leaf's place, or the other way round, with the same addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BreakBeforeMake {
    /// The old entry is emptied and flushed before the new one is written: there is a moment
    /// without a translation (Arm, level 0).
    Always,
    /// The entry may be changed in place through a marked form in which no cached copy is kept, at
    /// the risk of a fault meanwhile (Arm, level 1, nT).
    Marked,
    /// The entry may be changed in place (Arm, level 2); the flush comes after it.
    NotNeeded,
}

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: accesses fault.
    Empty,
    /// The next lower table is at this address.
    Table(u64),
    /// A leaf of 2^`log2` bytes at `pa`.
    Leaf {
        /// Physical address, a multiple of the size.
        pa: u64,
        /// Size as a power of two.
        log2: u32,
    },
}

/// One hardware format.
///
/// `level` is a constant wherever the engine calls these functions, so a `match` on it costs
/// nothing.
pub trait Format: Copy + fmt::Debug + Send + Sync + 'static {
    /// Which format this is.
    const ID: FormatId;
    /// Bytes of an entry.
    const ENTRY_BYTES: usize;
    /// Bytes of a table; the root may be smaller or larger.
    const TABLE_BYTES: u64 = 4096;
    /// The smallest page, as a power of two.
    const GRANULE_LOG2: u32;
    /// The fewest levels that a table can have.
    const MIN_LEVELS: u8;
    /// The most levels that a table can have.
    const MAX_LEVELS: u8;
    /// Bits of an output address.
    const OUTPUT_BITS: u32;
    /// Bits of a leaf that change by themselves, or with its dirty state.
    const HARDWARE_BITS: u64;
    /// The bit that hardware sets in a leaf that it uses; 0 where there is none.
    const ACCESSED: u64 = 0;
    /// The bit that hardware sets in a leaf that it writes to; 0 where there is none, or where it is
    /// not as simple as that.
    const DIRTY: u64 = 0;
    /// In a group the dirty bit of an entry is about what that entry translates, and not about the group.
    const DIRTY_BY_ENTRY: bool = false;
    /// How many entries are seen to be clean at once, where there is a way: when none of the first
    /// bits is set in any of them, and all of the second are set in each. That must be enough to be
    /// clean; it need not be necessary.
    const CLEAN: Option<(u64, u64)> = if Self::DIRTY == 0 {
        None
    } else {
        Some((Self::DIRTY, 0))
    };

    /// The address in an entry is in one piece within aligned blocks of 2^this output bytes: from
    /// one block to the next [`stride`](Self::stride) does not lead. 64: everywhere.
    const LINEAR_LOG2: u32 = 64;

    /// True when each entry of a group holds its own address; false when all are equal.
    const GROUPS_ADVANCE: bool = false;

    /// True when a table can get more levels while it is in use: see
    /// [`Table::grow`](crate::Table::grow). All its tables have then the same number of entries, also
    /// the root, and its addresses begin at 0.
    const GROWS: bool = false;

    /// The same with another number of levels; `None` where the format has no such table, or does
    /// not [grow](Self::GROWS).
    fn grown_to(self, levels: u8) -> Option<Self> {
        let _ = levels;
        None
    }

    /// The format with what this table was configured to: what a unit needs to walk it.
    fn id(&self) -> FormatId {
        Self::ID
    }

    /// Levels of this table.
    fn levels(&self) -> u8;

    /// Bits of an output address of this table, at most [`OUTPUT_BITS`](Self::OUTPUT_BITS).
    #[inline(always)]
    fn output_bits(&self) -> u32 {
        Self::OUTPUT_BITS
    }

    /// Bits of a table's address: all table memory must lie below.
    #[inline(always)]
    fn table_bits(&self) -> u32 {
        self.output_bits()
    }

    /// Returns the plain address `root`, with the encryption bit where there is one. Nothing else is
    /// added: an [image](crate::image) takes what is added for that bit, and a driver encodes its
    /// register.
    #[inline(always)]
    fn root_address(&self, root: u64) -> u64 {
        root
    }

    /// Demand of the unit when an entry's size changes while it is in use:
    /// [`Always`](BreakBeforeMake::Always) where leaves have several sizes and the specification says
    /// nothing.
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::NotNeeded
    }

    /// The same format for a unit that demands `demand`, where that is an option of the format.
    #[must_use]
    fn demanding(self, demand: BreakBeforeMake) -> Self {
        let _ = demand;
        self
    }

    /// The addresses that this table translates.
    fn aperture(&self) -> Aperture;

    /// Bytes that one entry at `level` spans, as a power of two; by default, of tables of 512
    /// entries over pages of 4 KiB.
    #[inline(always)]
    fn shift(level: usize) -> u32 {
        12 + 9 * level as u32
    }

    /// Entries of a table at `level`, a power of two, by default 512. Only the root's may depend on
    /// `self`.
    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        let _ = level;
        512
    }

    /// The leaf sizes that an entry, or a group of entries, at `level` can have.
    fn leaf_sizes(level: usize) -> PageSizes;

    /// The permission and attribute bits of a leaf; `None` when the format cannot express them.
    fn leaf_bits(&self, prot: Prot) -> Option<u64>;

    /// The permissions that a leaf's bits express.
    fn prot(&self, level: usize, word: u64) -> Prot;

    /// The entry of a leaf of 2^`log2` bytes at `pa`, with the bits from
    /// [`leaf_bits`](Self::leaf_bits).
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64;

    /// Returns the difference between a leaf's entry and the entry of the leaf behind it in
    /// memory.
    fn stride(log2: u32) -> u64;

    /// The entry at `level` that leads to the table at `table`, one level below.
    fn table(&self, level: usize, table: u64) -> u64;

    /// Decodes the entry at `level`. Total: any word gives an answer.
    fn decode(level: usize, word: u64) -> Entry;

    /// True when hardware reads the entry as not present.
    fn is_empty(word: u64) -> bool;

    /// Returns the stand-in for the entry `word` while sizes change, where the unit asks for
    /// break-before-make: 0, which translates nothing, or the marked entry (Arm, level 1, nT).
    fn broken(&self, level: usize, word: u64) -> u64 {
        let _ = (level, word);
        0
    }

    /// True when the unit notes in the leaves of this table that it has written to their pages.
    #[inline]
    fn keeps_dirty(&self) -> bool {
        false
    }

    /// True when the leaf was written to since it was made or [`cleaned`](Self::cleaned). Each
    /// entry of a group speaks for itself: the group is dirty when one of them is.
    #[inline(always)]
    fn is_dirty(word: u64) -> bool {
        word & Self::DIRTY != 0
    }

    /// The leaf's entry, clean.
    #[inline(always)]
    fn cleaned(word: u64) -> u64 {
        word & !Self::DIRTY
    }

    /// The leaf's entry, or the bits of one, as hardware leaves it after a write.
    #[inline(always)]
    fn dirtied(word: u64) -> u64 {
        word | Self::DIRTY
    }

    /// All leaf sizes of a table with `levels` levels.
    fn page_sizes(levels: u8) -> PageSizes {
        (0..usize::from(levels)).fold(PageSizes::NONE, |all, level| {
            all.or(Self::leaf_sizes(level))
        })
    }
}

/// Where table memory ends when tables are encrypted: the lowest C-bit of any processor (families
/// 17h to 19h have it at 47 or 51).
const ENCRYPTED_TABLE_BITS: u32 = 47;

/// The constructors of a format whose tables can be in encrypted memory.
macro_rules! encryptable {
    ($format:ident, $(#[$new:meta])*) => {
        impl $format {
            $(#[$new])*
            pub const fn new(levels: u8) -> Result<Self, BuildError> {
                let format = Self::ID;
                if levels < Self::MIN_LEVELS || levels > Self::MAX_LEVELS {
                    return Err(BuildError::Levels { format, levels });
                }
                let encryption = 0;
                Ok(Self { levels, encryption })
            }

            /// The same with tables in encrypted memory: `bit`, 47 to 51, is the processor's C-bit (APM
            /// volume 2, section 7.10.1: CPUID Fn8000_001F, EBX\[5:0\]). It is set in the root's address
            /// ([`Root::address`](super::Root::address)) and in every entry that leads to a table. Table
            /// memory must lie below 2^47, the lowest C-bit that a processor has.
            ///
            /// Addresses of leaves are stored as given: a run whose addresses have the bit set is encrypted
            /// memory to the device. A run without it (registers, shared memory) is not.
            pub const fn with_encrypted_tables(self, bit: u32) -> Result<$format<true>, BuildError> {
                if bit < ENCRYPTED_TABLE_BITS || bit > 51 {
                    return Err(BuildError::Setting {
                        format: Self::ID,
                        what: "encryption bit",
                        value: bit as u64,
                        min: ENCRYPTED_TABLE_BITS as u64,
                        max: 51,
                    });
                }
                let (levels, encryption) = (self.levels, 1 << bit);
                Ok($format { levels, encryption })
            }
        }

        impl<const ENCRYPTED: bool> $format<ENCRYPTED> {
            /// The address of a table in an entry. A constant, so that code that follows an entry
            /// does not load the bit.
            const TABLE: u64 = match ENCRYPTED {
                true => mask(12, ENCRYPTED_TABLE_BITS - 1),
                false => ADDRESS,
            };
        }

        impl Default for $format {
            /// Four levels: 48 bits.
            fn default() -> Self {
                let (levels, encryption) = (4, 0);
                Self { levels, encryption }
            }
        }
    };
}
use encryptable;

/// The bits `[low, high]` of an entry.
pub(crate) const fn mask(low: u32, high: u32) -> u64 {
    (u64::MAX >> (63 - high)) & (u64::MAX << low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Addresses near the edges of apertures, and any.
    fn address() -> impl Strategy<Value = u64> {
        let near = (0..64u32, -3..3i64).prop_map(|(bit, by)| (1u64 << bit).wrapping_add(by as u64));
        let high = (0..64u32, -3..3i64)
            .prop_map(|(bit, by)| 0u64.wrapping_sub(1 << bit).wrapping_add(by as u64));
        prop_oneof![near, high, any::<u64>()]
    }

    proptest! {
        /// The stretches of an aperture are the model.
        #[test]
        fn an_aperture_covers_what_its_stretches_cover(
            bits in 12..=64u32,
            above in prop_oneof![Just(Above::Zeros), Just(Above::Ones), Just(Above::Sign)],
            start in address(),
            len in address(),
        ) {
            let aperture = Aperture { bits, above };
            let range = Span::new(start, len);
            let inside = Span::<Iova>::checked(start, len).is_some();
            let whole = bits == 64 && above != Above::Sign;
            let covered = inside && (whole || aperture.spans().any(|span| span.covers(&range)));
            prop_assert_eq!(aperture.covers(&range), covered);
        }
    }
}
