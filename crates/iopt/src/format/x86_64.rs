//! x86-64 tables as IOMMUs walk them: AMD version 2 tables and the first stage of VT-d.
//!
//! AMD64 Architecture Programmer's Manual, volume 2, section 5.3 "Long-Mode Page Translation";
//! AMD I/O Virtualization Technology Specification (48882), section 2.2.4 "I/O Page Tables for
//! Guest Translations"; Intel VT-d specification (D51397), revision 5.0, section 9.7
//! "First-Stage Paging Entries" and section 3.6 "First-Stage Translation".
//!
//! Tables may lie in encrypted memory: APM volume 2, section 7.10 "Secure Memory Encryption".
//!
//! Addresses are sign-extended: the upper half of the tables serves the top of the address space.

use runs::PageSizes;

use super::{Aperture, ENCRYPTED_TABLE_BITS, Entry, Format, FormatId, encryptable, mask};
use crate::error::BuildError;
use crate::prot::Prot;

/// P, present; a present page can be read.
const PRESENT: u64 = 1 << 0;
/// R/W, writes allowed.
const WRITE: u64 = 1 << 1;
/// U/S, user requests allowed; all requests without a privileged PASID are user requests.
const USER: u64 = 1 << 2;
/// A, accessed.
const ACCESSED: u64 = 1 << 5;
/// D, dirty.
const DIRTY: u64 = 1 << 6;
/// PS, a leaf at level 1 or 2.
const PAGE_SIZE: u64 = 1 << 7;
/// Page address, or next table address.
const ADDRESS: u64 = mask(12, 51);
/// NX (XD in VT-d), no instruction fetches.
const NO_EXECUTE: u64 = 1 << 63;

/// x86-64 tables of four or five levels; leaves of 4 KiB, 2 MiB and 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X86_64<const ENCRYPTED: bool = false> {
    levels: u8,
    /// The C-bit, or 0.
    encryption: u64,
}

encryptable! {
    X86_64,
    /// Tables of four levels (48 bits) or five (57 bits).
}

impl<const ENCRYPTED: bool> Format for X86_64<ENCRYPTED> {
    const ID: FormatId = FormatId::X86_64;
    const ENTRY_BYTES: usize = 8;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = 4;
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
        Aperture::signed(12 + 9 * u32::from(self.levels))
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        if level < 3 {
            PageSizes::from_log2(Self::shift(level))
        } else {
            PageSizes::NONE
        }
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
        // A present page can be read, so there is no write-only one; and there is no bit that
        // forces snooping (VT-d has one for the whole table, in the PASID entry). Memory types come
        // from the PAT, which units need not honour.
        let other = Prot::COHERENT | Prot::DEVICE | Prot::UNCACHED;
        if !prot.contains(Prot::READ) || prot.intersects(other) {
            return None;
        }
        let mut bits = PRESENT;
        if prot.contains(Prot::WRITE) {
            bits |= WRITE;
        }
        if !prot.contains(Prot::PRIVILEGED) {
            bits |= USER;
        }
        if !prot.contains(Prot::EXECUTE) {
            bits |= NO_EXECUTE;
        }
        Some(bits)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, word & WRITE != 0);
        prot.set(Prot::PRIVILEGED, word & USER == 0);
        prot.set(Prot::EXECUTE, word & NO_EXECUTE == 0);
        prot
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
        // Permissions are the AND of all levels: tables allow everything. A is set at once, so
        // that the unit need not write it.
        PRESENT | WRITE | USER | ACCESSED | table & Self::TABLE | self.encryption
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
        if level > 0 && word & (PRESENT | large) == PRESENT {
            return Entry::Table(word & Self::TABLE);
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
