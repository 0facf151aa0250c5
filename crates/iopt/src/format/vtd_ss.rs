//! The second stage of Intel VT-d.
//!
//! Intel Virtualization Technology for Directed I/O, architecture specification (D51397), revision
//! 5.0: section 3.7 "Second-Stage Translation" and section 9.8 "Second-Stage Paging Entries".
//!
//! There is no present bit: an entry is present when R or W is set (X counts only where the unit
//! honours it, which it is not asked to here). The unit may read tables without snooping the
//! processor's caches; that is the unit's affair, not this file's.

use runs::PageSizes;

use super::{Aperture, Entry, Format, FormatId, mask};
use crate::error::BuildError;
use crate::prot::Prot;

/// R, reads allowed.
const READ: u64 = 1 << 0;
/// W, writes allowed.
const WRITE: u64 = 1 << 1;
/// Present: reads or writes are allowed (section 9.8).
const PRESENT: u64 = READ | WRITE;
/// PS, a leaf at level 1 or 2.
const PAGE_SIZE: u64 = 1 << 7;
/// A, accessed, where the unit keeps these bits.
const ACCESSED: u64 = 1 << 8;
/// D, dirty, where the unit keeps these bits.
const DIRTY: u64 = 1 << 9;
/// SNP, accesses are snooped whatever the device asks for. Only in leaves, and reserved where the
/// unit has no snoop control (ECAP.SC).
const SNOOP: u64 = 1 << 11;
/// Page address, or next table address; bits at and above the unit's host address width are
/// reserved.
const ADDRESS: u64 = mask(12, 51);

/// VT-d second-stage tables of three to five levels; leaves of 4 KiB, 2 MiB and 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VtdSs {
    levels: u8,
}

impl VtdSs {
    /// Tables of three (39 bits), four (48 bits) or five levels (57 bits).
    pub const fn new(levels: u8) -> Result<Self, BuildError> {
        if levels < Self::MIN_LEVELS || levels > Self::MAX_LEVELS {
            return Err(BuildError::Levels {
                format: Self::ID,
                levels,
            });
        }
        Ok(Self { levels })
    }
}

impl Default for VtdSs {
    /// Four levels: 48 bits.
    fn default() -> Self {
        Self { levels: 4 }
    }
}

impl Format for VtdSs {
    const ID: FormatId = FormatId::VtdSs;
    const ENTRY_BYTES: usize = 8;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = 3;
    const MAX_LEVELS: u8 = 5;
    const OUTPUT_BITS: u32 = 52;
    const HARDWARE_BITS: u64 = ACCESSED | DIRTY;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.levels
    }

    #[inline(always)]
    fn aperture(&self) -> Aperture {
        Aperture::zeros(12 + 9 * u32::from(self.levels))
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        if level < 3 {
            PageSizes::from_log2(Self::shift(level))
        } else {
            PageSizes::NONE
        }
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        // Execute permission and memory types have a meaning only where the unit supports them, and
        // privilege none.
        let other = Prot::EXECUTE | Prot::PRIVILEGED | Prot::DEVICE | Prot::UNCACHED;
        if prot.intersects(other) || !prot.intersects(Prot::RW) {
            return None;
        }
        let mut bits = 0;
        for (flag, bit) in [
            (Prot::READ, READ),
            (Prot::WRITE, WRITE),
            (Prot::COHERENT, SNOOP),
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
            (Prot::COHERENT, SNOOP),
        ]
        .into_iter()
        .filter(|(_, bit)| word & bit != 0)
        .map(|(flag, _)| flag)
        .collect()
    }

    #[inline(always)]
    fn leaf(level: usize, pa: u64, _log2: u32, bits: u64) -> u64 {
        if level == 0 {
            pa | bits
        } else {
            pa | bits | PAGE_SIZE
        }
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << log2
    }

    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        // Permissions are the AND of all levels: tables allow everything.
        READ | WRITE | table & ADDRESS
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
        let large = if level < 3 { PAGE_SIZE } else { 0 };
        // Tables first, by one comparison: every walk asks for them.
        if level > 0 && matches!(word & (PRESENT | large), 1..=PRESENT) {
            return Entry::Table(word & ADDRESS);
        }
        if level > 2 || Self::is_empty(word) {
            return Entry::Empty;
        }
        let log2 = Self::shift(level);
        Entry::Leaf {
            pa: word & ADDRESS & !((1 << log2) - 1),
            log2,
        }
    }
}
