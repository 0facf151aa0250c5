//! Apple DART, versions 1 and 2.
//!
//! There is no public specification. This file follows sources from the outside: the Asahi Linux
//! project's documentation and tools (the descriptions of the registers and entries of T8020,
//! T6000 and T8110 DARTs in m1n1's `proxyclient`), and what can be observed of the tables that
//! Linux's `io-pgtable-dart` leaves in memory and that the hardware accepts. Where a bit's meaning
//! is not known, it has the value that these tables have.
//!
//! Version 1 is that of the M1 (T8103, DART T8020): 36 bits of output addresses, pages of 16 KiB,
//! in some older units 4 KiB. Version 2 came with the M1 Pro (T6000) and holds 42 bits, shifted
//! right by four. Tables have the size of a page, entries 8 bytes; only the lowest level holds
//! leaves, and all have that one size.
//!
//! A unit has up to four root registers for a stream, for the consecutive parts of its input
//! addresses. Here these roots lie end to end: the n-th begins [`TABLE_BYTES`](Format::TABLE_BYTES)
//! times n behind the first.
//!
//! A leaf also says which part of its page may be accessed: the first and the last unit, of a
//! 4,096th of a page each. Always the whole page is allowed.

use core::fmt;

use runs::PageSizes;

use super::{Aperture, Entry, Format, FormatId, mask};
use crate::error::BuildError;
use crate::prot::Prot;

/// The entry is valid.
const VALID: u64 = 1 << 0;
/// Version 1, in a leaf: the part of the page is not looked at. Version 2: accesses are not cached;
/// the tables known have it set in every leaf that was not asked to be coherent.
const BIT_1: u64 = 1 << 1;
/// Version 1: no writes, no reads.
const V1_NO_WRITE: u64 = 1 << 7;
const V1_NO_READ: u64 = 1 << 8;
/// Version 2: no writes, no reads.
const V2_NO_WRITE: u64 = 1 << 2;
const V2_NO_READ: u64 = 1 << 3;
/// The last part of the page that may be accessed, bits 51:40; the first, bits 63:52, is 0.
const WHOLE_PAGE: u64 = mask(40, 51);
/// Version 1: address bits 35:12 in their places.
const V1_ADDRESS: u64 = mask(12, 35);
/// Version 2: address bits 41:14, shifted right by four.
const V2_ADDRESS: u64 = mask(10, 37);
const V2_ADDRESS_SHIFT: u32 = 4;

/// The versions of DART tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DartVersion {
    /// 36 bits of output addresses.
    V1,
    /// 42 bits of output addresses.
    V2,
}

/// Parameters that distinguish kinds of DART tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DartConfig {
    /// How entries are encoded.
    pub version: DartVersion,
    /// The page, which is also the size of a table, as a power of two: 14, or 12.
    pub page_log2: u8,
    /// Bits of an input address.
    pub input_bits: u8,
}

impl DartConfig {
    /// The name of the format.
    pub(super) const fn name(self) -> &'static str {
        match (self.version, self.page_log2) {
            (DartVersion::V1, 12) => "dart1-4k",
            (DartVersion::V1, _) => "dart1",
            (DartVersion::V2, _) => "dart2",
        }
    }
}

/// Version 1 with pages of 16 KiB.
pub type Dart1 = Dart<1, 14>;

/// Version 1 with pages of 4 KiB.
pub type Dart1Page4K = Dart<1, 12>;

/// Version 2, with pages of 16 KiB.
pub type Dart2 = Dart<2, 14>;

/// DART tables of two or three levels.
///
/// Table memory must lie below 2^36 for version 1 and 2^42 for version 2.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dart<const VERSION: u8, const PAGE_LOG2: u32> {
    levels: u8,
    input_bits: u8,
}

impl<const VERSION: u8, const PAGE_LOG2: u32> Dart<VERSION, PAGE_LOG2> {
    /// Bits that index one table.
    const INDEX_BITS: u32 = PAGE_LOG2 - 3;
    /// The fewest input bits that any known unit has.
    const MIN_INPUT_BITS: u32 = 32;

    /// Tables of `levels` levels, 2 or 3, for input addresses of `input_bits` bits: from 32 to
    /// what four roots translate. Units with up to 36 bits have two levels (the M1 32 or 36 bits),
    /// version 2 units with more (T602x: 42 bits) three. Where a unit's registers speak of four
    /// levels, the root registers are one of them.
    pub const fn new(levels: u8, input_bits: u8) -> Result<Self, BuildError> {
        const {
            assert!(
                (VERSION == 1 && (PAGE_LOG2 == 12 || PAGE_LOG2 == 14))
                    || (VERSION == 2 && PAGE_LOG2 == 14),
                "version 1 with 4 or 16 KiB, or version 2 with 16 KiB"
            );
        }
        if levels < Self::MIN_LEVELS || levels > Self::MAX_LEVELS {
            return Err(BuildError::Levels {
                format: Self::ID,
                levels,
            });
        }
        let max = PAGE_LOG2 + Self::INDEX_BITS * levels as u32 + 2;
        if (input_bits as u32) < Self::MIN_INPUT_BITS || input_bits as u32 > max {
            return Err(BuildError::Setting {
                format: Self::ID,
                what: "input address bits",
                value: input_bits as u64,
                min: Self::MIN_INPUT_BITS as u64,
                max: max as u64,
            });
        }
        Ok(Self { levels, input_bits })
    }

    const fn config(input_bits: u8) -> DartConfig {
        DartConfig {
            version: if VERSION == 1 {
                DartVersion::V1
            } else {
                DartVersion::V2
            },
            page_log2: PAGE_LOG2 as u8,
            input_bits,
        }
    }

    #[inline(always)]
    const fn encode(address: u64) -> u64 {
        if VERSION == 1 {
            address & V1_ADDRESS
        } else {
            address >> V2_ADDRESS_SHIFT & V2_ADDRESS
        }
    }
}

impl<const VERSION: u8, const PAGE_LOG2: u32> fmt::Debug for Dart<VERSION, PAGE_LOG2> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dart")
            .field("version", &VERSION)
            .field("page_log2", &PAGE_LOG2)
            .field("levels", &self.levels)
            .field("input_bits", &self.input_bits)
            .finish()
    }
}

impl<const VERSION: u8, const PAGE_LOG2: u32> Default for Dart<VERSION, PAGE_LOG2> {
    /// Two levels, 32 bits.
    fn default() -> Self {
        Self {
            levels: 2,
            input_bits: 32,
        }
    }
}

impl<const VERSION: u8, const PAGE_LOG2: u32> Format for Dart<VERSION, PAGE_LOG2> {
    const ID: FormatId = FormatId::Dart(Self::config(32));
    const ENTRY_BYTES: usize = 8;
    const TABLE_BYTES: u64 = 1 << PAGE_LOG2;
    const GRANULE_LOG2: u32 = PAGE_LOG2;
    const MIN_LEVELS: u8 = 2;
    const MAX_LEVELS: u8 = 3;
    const OUTPUT_BITS: u32 = if VERSION == 1 { 36 } else { 42 };
    /// No bit is known to be set by the unit.
    const HARDWARE_BITS: u64 = 0;

    fn id(&self) -> FormatId {
        FormatId::Dart(Self::config(self.input_bits))
    }

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.levels
    }

    #[inline(always)]
    fn aperture(&self) -> Aperture {
        Aperture::zeros(u32::from(self.input_bits))
    }

    #[inline(always)]
    fn shift(level: usize) -> u32 {
        PAGE_LOG2 + Self::INDEX_BITS * level as u32
    }

    /// The root has as many as the input bits index: part of a table, or up to four of them.
    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        if level + 1 == usize::from(self.levels) {
            1 << u32::from(self.input_bits).saturating_sub(Self::shift(level))
        } else {
            1 << Self::INDEX_BITS
        }
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        if level == 0 {
            PageSizes::from_log2(PAGE_LOG2)
        } else {
            PageSizes::NONE
        }
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        let known = if VERSION == 1 {
            Prot::RW
        } else {
            Prot::RW | Prot::COHERENT
        };
        if !prot.intersects(Prot::RW) || !known.contains(prot) {
            return None;
        }
        let (no_write, no_read) = if VERSION == 1 {
            (V1_NO_WRITE, V1_NO_READ)
        } else {
            (V2_NO_WRITE, V2_NO_READ)
        };
        let mut bits = VALID | WHOLE_PAGE;
        for (flag, bit) in [
            (Prot::WRITE, no_write),
            (Prot::READ, no_read),
            (Prot::COHERENT, BIT_1),
        ] {
            if !prot.contains(flag) {
                bits |= bit;
            }
        }
        Some(bits)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        let (no_write, no_read) = if VERSION == 1 {
            (V1_NO_WRITE, V1_NO_READ)
        } else {
            (V2_NO_WRITE, V2_NO_READ)
        };
        let mut prot = Prot::empty();
        prot.set(Prot::WRITE, word & no_write == 0);
        prot.set(Prot::READ, word & no_read == 0);
        prot.set(Prot::COHERENT, VERSION == 2 && word & BIT_1 == 0);
        prot
    }

    #[inline(always)]
    fn leaf(_level: usize, pa: u64, _log2: u32, bits: u64) -> u64 {
        Self::encode(pa) | bits
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        if VERSION == 1 {
            1 << log2
        } else {
            1 << (log2 - V2_ADDRESS_SHIFT)
        }
    }

    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        Self::encode(table) | VALID
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & VALID == 0
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        if Self::is_empty(word) {
            return Entry::Empty;
        }
        let address = if VERSION == 1 {
            word & V1_ADDRESS
        } else {
            (word & V2_ADDRESS) << V2_ADDRESS_SHIFT
        };
        let address = address & !((1 << PAGE_LOG2) - 1);
        if level == 0 {
            Entry::Leaf {
                pa: address,
                log2: PAGE_LOG2,
            }
        } else {
            Entry::Table(address)
        }
    }
}
