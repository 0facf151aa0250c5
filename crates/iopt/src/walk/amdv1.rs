//! Host tables of AMD-Vi ("version 1"), as an AMD IOMMU reads them.
//!
//! AMD I/O Virtualization Technology (IOMMU) Specification, 48882 revision 3.08, section 2.2.3
//! "I/O Page Tables for Host Translations". Points that it leaves open are noted beside the
//! line.

use super::spec::{Entry, Shape, Spec, low_bits, shift};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// Host tables.
pub(super) struct AmdV1;

impl Spec for AmdV1 {
    /// Section 2.2.2.1 "Device Table Entry Format", field Mode: 1 to 6 levels. Section 2.2.3: input
    /// bits above the top level's must be 0; the sixth level has 7 bits left, up to bit 63.
    fn shape(walker: &Walker) -> Option<Shape> {
        let levels = walker.root().levels;
        let bits = match levels {
            1..=5 => shift(levels),
            6 => 64,
            _ => return None,
        };
        Some(Shape::of_512(Aperture::zeros(bits)))
    }

    fn read(_walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        // Figures "I/O Page Translation Entry" and "I/O Page Directory Entry", bit 0 PR: while it
        // is 0 all other bits are ignored.
        if word & 1 == 0 {
            return Err(WalkReason::NotPresent);
        }
        // Bit 61 IR and bit 62 IW, in directory entries too: an access must be allowed by every
        // level. Bit 63 is ignored, as are 1 to 4, 7 and 8; 5 (accessed) and 6 (dirty, in
        // translation entries) belong to the unit.
        let mut prot = Prot::empty();
        prot.set(Prot::READ, word & 0x2000_0000_0000_0000 != 0);
        prot.set(Prot::WRITE, word & 0x4000_0000_0000_0000 != 0);
        // Bits 51:12, the address of the table or page.
        let address = word & 0x000f_ffff_ffff_f000;

        // Bits 11:9, Next Level.
        match (word >> 9) & 7 {
            0 => {
                reserved(word & PTE_RESERVED)?;
                // A page of the level's default size. The address bits below the size have no
                // stated meaning; they are not part of the page's address here.
                let log2 = shift(level);
                Ok(leaf(word, address & !low_bits(log2), log2, prot))
            }
            7 => {
                reserved(word & PTE_RESERVED)?;
                // Table "Page Size Encodings": the lowest address bit that is 0, from bit 12 up,
                // ends the size; for bit n the page has 2^(n+1) bytes. It must be more than this
                // level's default size and less than the next level's.
                let Some(zero) = (12..52).find(|bit| address >> bit & 1 == 0) else {
                    return Err(WalkReason::PageSize { log2: 64 });
                };
                let log2 = zero + 1;
                if log2 <= shift(level) || log2 >= shift(level + 1) {
                    return Err(WalkReason::PageSize { log2 });
                }
                Ok(leaf(word, address & !low_bits(log2), log2, prot))
            }
            next => {
                // Directory entries: bits 60:52 are reserved.
                reserved(word & 0x1ff0_0000_0000_0000)?;
                // The specification counts levels from 1. Levels may be skipped, but the next one
                // must be lower than this one.
                let next = next as u8 - 1;
                if next >= level {
                    return Err(WalkReason::NextLevel { next });
                }
                Ok(Entry::Table {
                    address,
                    level: next,
                    prot,
                })
            }
        }
    }

    /// Section 2.2.2.1, field HAD: accessed, or accessed and dirty bits. Figures as above: bit 5 A
    /// in directory and translation entries, bit 6 D in translation entries only, where writes set
    /// it. Only the entry that was read is marked among the equal entries of a larger page.
    fn marked(walker: &Walker, _level: u8, leaf: bool, word: u64, access: Access) -> u64 {
        let mut word = word;
        if walker.sets_accessed {
            word |= 1 << 5;
        }
        if walker.sets_dirty && leaf && access == Access::Write {
            word |= 1 << 6;
        }
        word
    }
}

/// Translation entries: bits 58:52 are reserved; 59 (U) and 60 (FC) have a meaning.
const PTE_RESERVED: u64 = 0x07f0_0000_0000_0000;

fn reserved(bits: u64) -> Result<(), WalkReason> {
    if bits == 0 {
        Ok(())
    } else {
        Err(WalkReason::Reserved { bits })
    }
}

/// Bit 60 FC: accesses are coherent whatever the device asks for.
fn leaf(word: u64, pa: u64, log2: u32, mut prot: Prot) -> Entry {
    prot.set(Prot::COHERENT, word & 0x1000_0000_0000_0000 != 0);
    Entry::Leaf { pa, log2, prot }
}
