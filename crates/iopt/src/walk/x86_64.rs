//! x86-64 tables, as AMD-Vi reads its guest tables ("version 2") and VT-d its first stage.
//!
//! AMD64 Architecture Programmer's Manual, volume 2 (24593), section 5.3 "Long-Mode Page
//! Translation"; AMD I/O Virtualization Technology Specification (48882), revision 3.08, section
//! 2.2.4 "I/O Page Tables for Guest Translations"; Intel VT-d (D51397), revision 5.0, section 3.6
//! "First-Stage Translation" and section 9.7 "First-Stage Paging Entries".
//!
//! They agree on every bit that is read here. Where they differ (bit 8 of the two upper levels must
//! be zero for AMD and is ignored by Intel; caching types; bit 10, extended access) the bit is
//! ignored.

use super::spec::{Entry, Shape, Spec, low_bits, shift};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// x86-64 tables.
pub(super) struct X86_64;

impl Spec for X86_64 {
    /// VT-d section 3.6, APM section 5.3.1 "Canonical Address Access": the bits above the top level's
    /// repeat its highest bit.
    fn shape(walker: &Walker) -> Option<Shape> {
        let levels = walker.root().levels;
        matches!(levels, 4 | 5).then(|| Shape::of_512(Aperture::signed(shift(levels))))
    }

    fn read(walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        // Bit 0 P: while it is 0 all other bits are ignored.
        if word & 1 == 0 {
            return Err(WalkReason::NotPresent);
        }
        // APM section 5.6 "Page-Protection Checks", VT-d section 3.6.1 "Access Rights": what is
        // present can be read; bit 1 R/W, bit 2 U/S and bit 63 NX (XD) combine over the levels.
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, word & 0b010 != 0);
        prot.set(Prot::PRIVILEGED, word & 0b100 == 0);
        prot.set(Prot::EXECUTE, word >> 63 == 0);

        // Bit 7, PS: a page at level 2 (PDPE) and level 1 (PDE) where the unit has the size,
        // otherwise it must be zero; at level 0 it is PAT.
        let large = word & 0x80 != 0 && walker.page_sizes.contains(1 << shift(level));
        let leaf = level == 0 || (large && level <= 2);

        // Address bits from the unit's width up; 62:52 are available to software.
        let mut reserved = walker.reserved_output();
        if !leaf {
            reserved |= 0x80;
        } else if level > 0 {
            // Bits below the page's size, but for bit 12, which is PAT in a large page.
            reserved |= low_bits(shift(level)) & !0x1fff;
        }
        if word & reserved != 0 {
            return Err(WalkReason::Reserved {
                bits: word & reserved,
            });
        }

        // Bits 51:12.
        let address = word & 0x000f_ffff_ffff_f000;
        if !leaf {
            return Ok(Entry::Table {
                address,
                level: level - 1,
                prot,
            });
        }
        let log2 = shift(level);
        Ok(Entry::Leaf {
            pa: address & !low_bits(log2),
            log2,
            prot,
        })
    }

    /// APM section 5.4.2 "Accessed (A) Bit" and "Dirty (D) Bit"; AMD-Vi section 2.2.4; VT-d section
    /// 3.6.2 "Accessed, Extended Accessed, and Dirty Flags": bit 5 A in every entry that is used,
    /// bit 6 D by a write in the one that maps the page. The unit has no setting for it. Bit 10,
    /// extended accessed (VT-d, PASID entry, EAFE), is not kept.
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
