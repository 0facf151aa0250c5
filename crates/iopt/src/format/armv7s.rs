//! ARMv7 short descriptors, as an Arm SMMU (or a Cortex-A) walks them.
//!
//! Arm Architecture Reference Manual, ARMv7-A and ARMv7-R edition (DDI 0406C): section B3.5.1
//! "Short-descriptor translation table format descriptors", B3.7 "Memory access control", B3.8
//! "Memory region attributes". Arm System Memory Management Unit Architecture Specification,
//! version 2 (IHI 0062D), chapter 2.
//!
//! Entries have 32 bits. The first-level table has 4,096 of them (16 KiB) for 1 MiB each, a
//! second-level table 256 (1 KiB) for 4 KiB each. A supersection of 16 MiB and a large page of
//! 64 KiB take sixteen equal entries.
//!
//! Output addresses have 32 bits. The optional bits 39:32 of a supersection are not used: pages of
//! other sizes cannot have them.
//!
//! AP\[0\] is always set. Where the access flag is enabled (SCTLR.AFE) it is that flag, and AP\[2:1\]
//! say what they say here; where it is not, the same words mean the same in the model of three
//! bits (B3.7.1, tables B3-8 and B3-9).
//!
//! Memory types are written for a unit without TEX remapping (table B3-10). With it (B3.8.3), the
//! same words select the regions 7 (normal), 4 (not cached) and 1 (device).

use runs::PageSizes;

use super::{Aperture, BreakBeforeMake, Entry, Format, FormatId, mask};
use crate::prot::Prot;

/// Bits 1:0. 00 is a fault at both levels.
const TYPE: u64 = 0b11;
/// First level: a second-level table. Second level: a large page.
const TYPE_1: u64 = 0b01;
/// First level: a section or supersection (bit 0 is PXN). Second level: a small page (bit 0: XN).
const TYPE_2: u64 = 0b10;
/// First level: this section is a supersection.
const SUPERSECTION: u64 = 1 << 18;
/// First level: the domain of a section or of a table's pages. A supersection's is 0.
const DOMAIN_SHIFT: u32 = 5;
/// Base address of a second-level table.
const TABLE: u64 = mask(10, 31);

// The fields of a small page. All other leaves hold the same ones, some of them elsewhere.

/// XN, execute never.
const NO_EXECUTE: u64 = 1 << 0;
/// B and C, with TEX the memory type.
const BUFFERABLE: u64 = 1 << 2;
const CACHEABLE: u64 = 1 << 3;
/// AP\[0\]: the access flag.
const ACCESS_FLAG: u64 = 1 << 4;
/// AP\[1\]: unprivileged requests are allowed.
const UNPRIVILEGED: u64 = 1 << 5;
/// TEX\[2:0\].
const TEX: u64 = mask(6, 8);
const TEX_0: u64 = 1 << 6;
/// AP\[2\]: no writes.
const READ_ONLY: u64 = 1 << 9;
/// S, shareable; of normal memory.
const SHAREABLE: u64 = 1 << 10;
/// nG, the translation belongs to one address space. Always set: others would be found by devices of all
/// domains, and survive a TLB invalidation by ASID (B3.9.1 "Global and process-specific translation table entries").
const NOT_GLOBAL: u64 = 1 << 11;

/// TEX, C and B: normal memory, write-back, write-allocate; normal, not cached; device.
const MEMORY_TYPE: u64 = TEX | CACHEABLE | BUFFERABLE;
const NORMAL: u64 = TEX_0 | CACHEABLE | BUFFERABLE;
const NORMAL_UNCACHED: u64 = TEX_0;
const DEVICE: u64 = BUFFERABLE;
/// The other type without caching: strongly ordered.
const STRONGLY_ORDERED: u64 = 0;

/// The fields of a small page from bit 4 to 11, which in a section begin at bit 10.
const SECTION_FIELDS: u64 = mask(4, 11);
const SECTION_SHIFT: u32 = 6;
/// XN of a section.
const SECTION_NO_EXECUTE_SHIFT: u32 = 4;
/// XN and TEX of a large page.
const LARGE_NO_EXECUTE_SHIFT: u32 = 15;
const LARGE_TEX_SHIFT: u32 = 6;

/// ARMv7 short-descriptor tables: 32 bits of input and of output addresses; leaves of 4 KiB,
/// 64 KiB, 1 MiB and, in domain 0, 16 MiB.
///
/// `DOMAIN` is the domain of everything that is mapped, 0 to 15. It is part of the type because
/// supersections are always of domain 0: a table of another domain has none.
///
/// Table memory must lie below 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmV7s<const DOMAIN: u8 = 0> {
    shareable: bool,
}

impl<const DOMAIN: u8> ArmV7s<DOMAIN> {
    /// Tables whose memory is shareable.
    pub const fn new() -> Self {
        const {
            assert!(DOMAIN < 16, "there are 16 domains");
        }
        Self { shareable: true }
    }

    /// Sets whether normal memory is shareable (S).
    pub const fn with_shareable(mut self, on: bool) -> Self {
        self.shareable = on;
        self
    }

    /// The fields of a leaf at `level` where a small page has them.
    fn fields(level: usize, word: u64) -> u64 {
        if level > 0 {
            word >> SECTION_SHIFT & SECTION_FIELDS
                | word & (CACHEABLE | BUFFERABLE)
                | word >> SECTION_NO_EXECUTE_SHIFT & NO_EXECUTE
        } else if word & TYPE == TYPE_1 {
            word & mask(2, 11) & !TEX
                | word >> LARGE_TEX_SHIFT & TEX
                | word >> LARGE_NO_EXECUTE_SHIFT & NO_EXECUTE
        } else {
            word & mask(0, 11) & !TYPE_2
        }
    }
}

impl<const DOMAIN: u8> Default for ArmV7s<DOMAIN> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const DOMAIN: u8> Format for ArmV7s<DOMAIN> {
    const ID: FormatId = FormatId::ArmV7s;
    const ENTRY_BYTES: usize = 4;
    const TABLE_BYTES: u64 = 1024;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = 2;
    const MAX_LEVELS: u8 = 2;
    const OUTPUT_BITS: u32 = 32;
    /// The unit sets no bit: the access flag is set from the beginning, and there is no dirty bit.
    const HARDWARE_BITS: u64 = 0;

    #[inline(always)]
    fn levels(&self) -> u8 {
        2
    }

    /// ARM Architecture Reference Manual, ARMv7-A (DDI 0406), B3.10.1 "General TLB maintenance
    /// requirements": two sizes at once in a TLB are unpredictable.
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    /// The first table of TTBR0 with TTBCR.N = 0.
    #[inline(always)]
    fn aperture(&self) -> Aperture {
        Aperture::zeros(32)
    }

    #[inline(always)]
    fn shift(level: usize) -> u32 {
        if level == 0 { 12 } else { 20 }
    }

    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        if level == 0 { 256 } else { 4096 }
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        let own = PageSizes::from_log2(Self::shift(level));
        match level {
            0 => own.or(PageSizes::from_log2(16)),
            1 if DOMAIN == 0 => own.or(PageSizes::from_log2(24)),
            1 => own,
            _ => PageSizes::NONE,
        }
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        // Present entries can be read, and there is no bit that forces snooping.
        if !prot.contains(Prot::READ) || prot.contains(Prot::COHERENT) {
            return None;
        }
        let memory_type = match (prot.contains(Prot::DEVICE), prot.contains(Prot::UNCACHED)) {
            (true, true) => return None,
            (true, false) => DEVICE,
            (false, true) => NORMAL_UNCACHED,
            (false, false) => NORMAL,
        };
        let mut bits = ACCESS_FLAG | NOT_GLOBAL | memory_type;
        for (set, bit) in [
            (!prot.contains(Prot::WRITE), READ_ONLY),
            (!prot.contains(Prot::EXECUTE), NO_EXECUTE),
            (!prot.contains(Prot::PRIVILEGED), UNPRIVILEGED),
            (self.shareable, SHAREABLE),
        ] {
            if set {
                bits |= bit;
            }
        }
        Some(bits)
    }

    fn prot(&self, level: usize, word: u64) -> Prot {
        let fields = Self::fields(level, word);
        let memory_type = fields & MEMORY_TYPE;
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, fields & READ_ONLY == 0);
        prot.set(Prot::EXECUTE, fields & NO_EXECUTE == 0);
        prot.set(Prot::PRIVILEGED, fields & UNPRIVILEGED == 0);
        prot.set(
            Prot::DEVICE,
            memory_type == DEVICE || memory_type == STRONGLY_ORDERED,
        );
        prot.set(Prot::UNCACHED, memory_type == NORMAL_UNCACHED);
        prot
    }

    #[inline(always)]
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        if level > 0 {
            let section = pa
                | (bits & SECTION_FIELDS) << SECTION_SHIFT
                | bits & (CACHEABLE | BUFFERABLE)
                | (bits & NO_EXECUTE) << SECTION_NO_EXECUTE_SHIFT
                | TYPE_2;
            if log2 == 24 {
                section | SUPERSECTION
            } else {
                section | u64::from(DOMAIN) << DOMAIN_SHIFT
            }
        } else if log2 == 16 {
            pa | bits & !(TEX | NO_EXECUTE)
                | (bits & TEX) << LARGE_TEX_SHIFT
                | (bits & NO_EXECUTE) << LARGE_NO_EXECUTE_SHIFT
                | TYPE_1
        } else {
            pa | bits | TYPE_2
        }
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << log2
    }

    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        table & TABLE | u64::from(DOMAIN) << DOMAIN_SHIFT | TYPE_1
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & TYPE == 0
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        let log2 = match (level, word & TYPE) {
            (_, 0) => return Entry::Empty,
            (0, TYPE_1) => 16,
            (0, _) => 12,
            (_, TYPE_1) => return Entry::Table(word & TABLE),
            _ if word & SUPERSECTION != 0 => 24,
            _ => 20,
        };
        Entry::Leaf {
            pa: word & mask(log2, 31),
            log2,
        }
    }
}
