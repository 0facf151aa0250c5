//! RISC-V page tables as a RISC-V IOMMU walks them: Sv39, Sv48, Sv57 for the first stage, and
//! Sv39x4, Sv48x4, Sv57x4 for the second.
//!
//! The RISC-V Instruction Set Manual, volume II "Privileged Architecture", version 20240411:
//! section 10.4 "Sv39", 10.5 "Sv48", 10.6 "Sv57" (the entry: figure "Sv39 page table entry"),
//! chapter 11 "Svnapot", chapter 12 "Svpbmt", chapter 13 "Svinval" (not used here), section 18.5
//! "Two-Stage Address Translation" in the chapter on the hypervisor extension. RISC-V IOMMU
//! Architecture Specification 1.0: section 2.1 "Device-Directory-Table" (fields SADE, GADE of
//! DC.tc, iohgatp and fsc), "Process-context fields" (ENS, SUM), section 2.3 "Process to translate an IOVA".
//!
//! An entry holds a page *number* in bits 53:10, so addresses are shifted right by two. An entry
//! with R, W and X all 0 leads to a table; any other is a leaf. G (bit 5) is never set: such a leaf holds in
//! all address spaces, so other domains' devices would find it, and IOTINVAL.VMA for one of them spares it
//! (IOMMU specification, table "IOTINVAL.VMA operands and operations"). Tables have 512 entries; the root
//! of the second stage has four times as many, contiguous and aligned to 16 KiB, for two more bits
//! of guest-physical address.

use runs::PageSizes;

use super::{Aperture, Entry, Format, FormatId, mask};
use crate::error::BuildError;
use crate::prot::Prot;

/// V, valid.
const VALID: u64 = 1 << 0;
/// R, readable.
const READ: u64 = 1 << 1;
/// W, writable; without R it is a reserved encoding (section 10.3.1).
const WRITE: u64 = 1 << 2;
/// X, executable.
const EXECUTE: u64 = 1 << 3;
/// U, accessible to user requests. Every second-stage access counts as one (section 18.5.1).
const USER: u64 = 1 << 4;
/// A, accessed.
const ACCESSED: u64 = 1 << 6;
/// D, dirty.
const DIRTY: u64 = 1 << 7;
/// PPN, the page number: address bits 55:12. Bits 9:8 are software's, 60:54 reserved.
const PAGE_NUMBER: u64 = mask(10, 53);
/// How far an address is shifted to the right in an entry.
const ADDRESS_SHIFT: u32 = 2;
/// PBMT = 1 (NC): not cached, idempotent, weakly ordered, as main memory (chapter 12).
const UNCACHED: u64 = 1 << 61;
/// PBMT = 2 (IO): not cached, not idempotent, strongly ordered.
const IO: u64 = 2 << 61;
/// PBMT, bits 62:61; 0 leaves the memory's own attributes, 3 is reserved.
const MEMORY_TYPE: u64 = mask(61, 62);
/// N: the page is part of a larger one, whose size is in the low bits of the page number (chapter
/// 11). Only 64 KiB is defined: PPN\[3:0\] = 1000, in sixteen equal entries of level 0.
const NAPOT: u64 = 1 << 63;
const NAPOT_64K: u64 = 0b1000 << 10;
const NAPOT_64K_MASK: u64 = 0b1111 << 10;

/// First-stage tables: Sv39, Sv48, Sv57.
pub type RiscV = RiscVTables<false>;

/// Second-stage tables: Sv39x4, Sv48x4, Sv57x4.
pub type RiscVG = RiscVTables<true>;

/// RISC-V tables of three to five levels; leaves of 4 KiB, 64 KiB (Svnapot), 2 MiB, 1 GiB, 512 GiB
/// and 256 TiB. A unit without Svnapot is given a table whose page sizes leave out 64 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiscVTables<const SECOND_STAGE: bool> {
    levels: u8,
    hardware_updates: bool,
    memory_types: bool,
    supervisor: bool,
}

impl<const SECOND_STAGE: bool> RiscVTables<SECOND_STAGE> {
    /// Tables of three levels (Sv39), four (Sv48) or five (Sv57), for a unit that neither updates
    /// A and D by itself nor has Svpbmt.
    pub const fn new(levels: u8) -> Result<Self, BuildError> {
        if levels < Self::MIN_LEVELS || levels > Self::MAX_LEVELS {
            return Err(BuildError::Levels {
                format: Self::ID,
                levels,
            });
        }
        Ok(Self {
            levels,
            hardware_updates: false,
            memory_types: false,
            supervisor: false,
        })
    }

    /// Sets whether the unit sets A and D (DC.tc.SADE for the first stage, GADE for the
    /// second). If not, an access to a leaf without A, or a write to one without D, faults; so
    /// both are set from the beginning.
    pub const fn with_hardware_updates(mut self, on: bool) -> Self {
        self.hardware_updates = on;
        self
    }

    /// Sets whether the unit has Svpbmt: without it [`Prot::DEVICE`] and [`Prot::UNCACHED`] are
    /// refused.
    pub const fn with_memory_types(mut self, on: bool) -> Self {
        self.memory_types = on;
        self
    }
}

impl RiscVTables<false> {
    /// Sets whether there are requests of supervisor privilege: requests with a PASID that ask for it, where
    /// the process context allows it (PC.ta.ENS, SUM). Without it [`Prot::PRIVILEGED`] is refused: no request
    /// would reach such a leaf.
    pub const fn with_supervisor_requests(mut self, on: bool) -> Self {
        self.supervisor = on;
        self
    }
}

impl<const SECOND_STAGE: bool> Default for RiscVTables<SECOND_STAGE> {
    /// Three levels: 39 bits, or 41 for the second stage.
    fn default() -> Self {
        Self {
            levels: 3,
            hardware_updates: false,
            memory_types: false,
            supervisor: false,
        }
    }
}

impl<const SECOND_STAGE: bool> Format for RiscVTables<SECOND_STAGE> {
    const ID: FormatId = if SECOND_STAGE {
        FormatId::RiscVG
    } else {
        FormatId::RiscV
    };
    const ENTRY_BYTES: usize = 8;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = 3;
    const MAX_LEVELS: u8 = 5;
    const OUTPUT_BITS: u32 = 56;
    const HARDWARE_BITS: u64 = ACCESSED | DIRTY;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.levels
    }

    /// First stage, section 10.4.1: the bits above repeat the highest one. Second stage, section
    /// 18.5.1: they are 0.
    #[inline(always)]
    fn aperture(&self) -> Aperture {
        let bits = 12 + 9 * u32::from(self.levels);
        if SECOND_STAGE {
            Aperture::zeros(bits + 2)
        } else {
            Aperture::signed(bits)
        }
    }

    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        if SECOND_STAGE && level + 1 == usize::from(self.levels) {
            2048
        } else {
            512
        }
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        let own = PageSizes::from_log2(Self::shift(level));
        if level == 0 {
            own.or(PageSizes::from_log2(16))
        } else {
            own
        }
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        // W needs R, and at least one of R and X makes the entry a leaf.
        let writable = prot.contains(Prot::WRITE);
        if !prot.intersects(Prot::READ | Prot::EXECUTE)
            || (writable && !prot.contains(Prot::READ))
            || (prot.contains(Prot::PRIVILEGED) && !self.supervisor)
        {
            return None;
        }
        let typed = Prot::DEVICE | Prot::UNCACHED;
        if (prot.intersects(typed) && !self.memory_types)
            || prot.contains(typed)
            || prot.contains(Prot::COHERENT)
        {
            return None;
        }
        let mut bits = VALID;
        for (flag, bit) in [
            (Prot::READ, READ),
            (Prot::WRITE, WRITE),
            (Prot::EXECUTE, EXECUTE),
            (Prot::DEVICE, IO),
            (Prot::UNCACHED, UNCACHED),
        ] {
            if prot.contains(flag) {
                bits |= bit;
            }
        }
        if !prot.contains(Prot::PRIVILEGED) {
            bits |= USER;
        }
        if !self.hardware_updates {
            bits |= if writable { ACCESSED | DIRTY } else { ACCESSED };
        }
        Some(bits)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        let mut prot = Prot::empty();
        prot.set(Prot::READ, word & READ != 0);
        prot.set(Prot::WRITE, word & WRITE != 0);
        prot.set(Prot::EXECUTE, word & EXECUTE != 0);
        prot.set(Prot::PRIVILEGED, word & USER == 0);
        prot.set(Prot::DEVICE, word & MEMORY_TYPE == IO);
        prot.set(Prot::UNCACHED, word & MEMORY_TYPE == UNCACHED);
        prot
    }

    #[inline(always)]
    fn leaf(_level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        let word = pa >> ADDRESS_SHIFT | bits;
        if log2 == 16 {
            word | NAPOT | NAPOT_64K
        } else {
            word
        }
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << (log2 - ADDRESS_SHIFT)
    }

    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        // Section 10.3.1: A, D and U of such an entry are reserved, and R, W, X are 0; chapters 11
        // and 12: so are N and PBMT.
        VALID | (table >> ADDRESS_SHIFT) & PAGE_NUMBER
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & VALID == 0
    }

    #[inline]
    fn keeps_dirty(&self) -> bool {
        self.hardware_updates
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        if Self::is_empty(word) {
            return Entry::Empty;
        }
        let address = (word & PAGE_NUMBER) << ADDRESS_SHIFT;
        if word & (READ | WRITE | EXECUTE) == 0 {
            return Entry::Table(address);
        }
        let group = level == 0 && word & (NAPOT | NAPOT_64K_MASK) == NAPOT | NAPOT_64K;
        let log2 = if group { 16 } else { Self::shift(level) };
        Entry::Leaf {
            pa: address & !((1 << log2) - 1),
            log2,
        }
    }
}
