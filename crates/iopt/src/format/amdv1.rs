//! AMD I/O page tables, version 1.
//!
//! AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, revision 3.08:
//! section 2.2.3 "I/O Page Tables for Host Translations", tables 14 to 17 and figures 7 to 9.
//!
//! Tables have 512 entries of 8 bytes. The Next Level field of an entry says what it is: 0, a leaf
//! of the level's own size; 1 to 6, a table of that many levels; 7, a leaf whose size is encoded
//! in its address: for 2^n bytes the address bits from 12 to n−2 are 1 and bit n−1 is 0. A leaf of
//! 2^k times the level's own size takes 2^k equal entries.
//!
//! Tables may lie in encrypted memory: AMD64 Architecture Programmer's Manual, volume 2, section
//! 7.10 "Secure Memory Encryption".

use runs::PageSizes;

use super::{Aperture, ENCRYPTED_TABLE_BITS, Entry, Format, FormatId, encryptable, mask};
use crate::error::BuildError;
use crate::prot::Prot;

/// PR, present: table 17.
const PRESENT: u64 = 1 << 0;
/// A, accessed, set by the unit where host access support is on.
const ACCESSED: u64 = 1 << 5;
/// D, dirty, set by the unit where host dirty support is on.
const DIRTY: u64 = 1 << 6;
/// Next Level: tables 15 and 16.
const NEXT_LEVEL: u64 = mask(9, 11);
const NEXT_LEVEL_SHIFT: u32 = 9;
/// Next Level 7: the page size is encoded in the address.
const SIZE_IN_ADDRESS: u64 = 7;
/// Page address, or next table address.
const ADDRESS: u64 = mask(12, 51);
/// FC, force coherent: no-snoop requests are snooped.
const FORCE_COHERENT: u64 = 1 << 60;
/// IR, read permission.
const READ: u64 = 1 << 61;
/// IW, write permission.
const WRITE: u64 = 1 << 62;

/// AMD I/O page tables, version 1: up to six levels, any power of two from 4 KiB as leaf size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmdV1<const ENCRYPTED: bool = false> {
    levels: u8,
    /// The C-bit, or 0.
    encryption: u64,
}

encryptable! {
    AmdV1,
    /// Tables of `levels` levels, 1 to 6; n levels translate 12 + 9 n bits, six all 64.
}

impl<const ENCRYPTED: bool> AmdV1<ENCRYPTED> {
    /// The largest leaf of `level`, as a power of two; below the level's own size where it has none.
    const fn last_log2(level: usize) -> u32 {
        let half = 12 + 9 * level as u32 + 8;
        if half > 51 { 51 } else { half }
    }
}

impl<const ENCRYPTED: bool> Format for AmdV1<ENCRYPTED> {
    const ID: FormatId = FormatId::AmdV1;
    const ENTRY_BYTES: usize = 8;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = 1;
    const MAX_LEVELS: u8 = 6;
    const OUTPUT_BITS: u32 = 52;
    const HARDWARE_BITS: u64 = ACCESSED | DIRTY;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    /// The Mode field of the device table entry (section 2.2.2.1) tells the levels, and the upper
    /// levels of a table are tables as any.
    const GROWS: bool = true;

    #[inline(always)]
    fn grown_to(self, levels: u8) -> Option<Self> {
        let known = (Self::MIN_LEVELS..=Self::MAX_LEVELS).contains(&levels);
        known.then_some(Self { levels, ..self })
    }

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.levels
    }

    #[inline(always)]
    fn aperture(&self) -> Aperture {
        let bits = (12 + 9 * u32::from(self.levels)).min(64);
        Aperture::zeros(bits)
    }

    /// From the level's own size to half a table. An entry holds 52 address bits, and the largest
    /// size whose encoding leaves a 0 in them is 2^52 with all ones below bit 51.
    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        PageSizes::from_log2_range(Self::shift(level), Self::last_log2(level))
    }

    #[inline(always)]
    fn table_bits(&self) -> u32 {
        if ENCRYPTED {
            ENCRYPTED_TABLE_BITS
        } else {
            Self::OUTPUT_BITS
        }
    }

    #[inline(always)]
    fn root_address(&self, root: u64) -> u64 {
        root | self.encryption
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        // There is no bit for execution, for privileged requests or for memory types.
        let other = Prot::EXECUTE | Prot::PRIVILEGED | Prot::DEVICE | Prot::UNCACHED;
        if prot.intersects(other) || !prot.intersects(Prot::RW) {
            return None;
        }
        let mut bits = PRESENT;
        for (flag, bit) in [
            (Prot::READ, READ),
            (Prot::WRITE, WRITE),
            (Prot::COHERENT, FORCE_COHERENT),
        ] {
            if prot.contains(flag) {
                bits |= bit;
            }
        }
        Some(bits)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        [
            (Prot::READ, READ),
            (Prot::WRITE, WRITE),
            (Prot::COHERENT, FORCE_COHERENT),
        ]
        .into_iter()
        .filter(|(_, bit)| word & bit != 0)
        .map(|(flag, _)| flag)
        .collect()
    }

    #[inline(always)]
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        if log2 == Self::shift(level) {
            pa | bits
        } else {
            // Ones from bit 12 to bit log2 − 2.
            let size = ((1 << (log2 - 1)) - 1) & ADDRESS;
            pa | size | SIZE_IN_ADDRESS << NEXT_LEVEL_SHIFT | bits
        }
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << log2
    }

    #[inline(always)]
    fn table(&self, level: usize, table: u64) -> u64 {
        // Permissions are the AND of all levels (section 2.2.3): tables allow everything.
        // A table reached from level n of ours has n levels.
        PRESENT
            | READ
            | WRITE
            | (level as u64) << NEXT_LEVEL_SHIFT
            | table & Self::TABLE
            | self.encryption
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & PRESENT == 0
    }

    #[inline]
    fn keeps_dirty(&self) -> bool {
        true
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        if Self::is_empty(word) {
            return Entry::Empty;
        }
        let next = (word & NEXT_LEVEL) >> NEXT_LEVEL_SHIFT;
        // A page at the sixth level would be larger than all output addresses: units fault.
        if level > 4 && matches!(next, 0 | SIZE_IN_ADDRESS) {
            return Entry::Empty;
        }
        match next {
            0 => {
                let log2 = Self::shift(level);
                Entry::Leaf {
                    pa: word & ADDRESS & !((1 << log2) - 1),
                    log2,
                }
            }
            SIZE_IN_ADDRESS => {
                // The lowest 0 from bit 12 on stands one below the size.
                let log2 = (word | mask(0, 11)).trailing_ones() + 1;
                // A size that this level cannot hold is read as the nearest that it can.
                let log2 = log2.clamp(Self::shift(level), Self::last_log2(level));
                Entry::Leaf {
                    pa: word & ADDRESS & !((1 << log2) - 1),
                    log2,
                }
            }
            _ => Entry::Table(word & Self::TABLE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_a_level_cannot_hold_is_none_of_its_sizes() {
        for level in 0..6 {
            for ones in 0..=64 {
                let address = 1u64.checked_shl(ones).map_or(u64::MAX, |bit| bit - 1) & !0xfff;
                for next in [0, SIZE_IN_ADDRESS] {
                    let word = address & !NEXT_LEVEL | next << NEXT_LEVEL_SHIFT | PRESENT;
                    match <AmdV1>::decode(level, word) {
                        Entry::Leaf { pa, log2 } => {
                            assert!(<AmdV1>::leaf_sizes(level).contains(1 << log2), "{word:#x}");
                            assert_eq!(pa & ((1 << log2) - 1), 0, "{word:#x}");
                        }
                        // 2^57 bytes and more do not lie in 52 address bits.
                        entry => assert_eq!((level, entry), (5, Entry::Empty), "{word:#x}"),
                    }
                }
            }
        }
    }
}
