//! Second-stage tables, as a VT-d unit reads them.
//!
//! Intel Virtualization Technology for Directed I/O, D51397 revision 5.0: section 3.7 "Second-Stage
//! Translation", section 9.8 "Second-Stage Paging Entries", section 3.7.1 "Access Rights".

use super::spec::{Entry, Shape, Spec, low_bits, shift};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// Second-stage tables.
pub(super) struct VtdSs;

impl Spec for VtdSs {
    /// Section 3.7, figures of 3-, 4- and 5-level paging; the address width is the context entry's
    /// AW. A request above it is blocked.
    fn shape(walker: &Walker) -> Option<Shape> {
        let levels = walker.root().levels;
        matches!(levels, 3..=5).then(|| Shape::of_512(Aperture::zeros(shift(levels))))
    }

    fn read(walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        // Section 3.7: an entry with R and W both 0 is not present. Bit 2 (X) is ignored by units
        // that do not support execute requests.
        if word & 0b11 == 0 {
            return Err(WalkReason::NotPresent);
        }
        // Bit 0 R, bit 1 W, in every level: the access must be allowed by all of them.
        let mut prot = Prot::empty();
        prot.set(Prot::READ, word & 0b01 != 0);
        prot.set(Prot::WRITE, word & 0b10 != 0);

        // Bit 7, PS: a page in SS-PDPTE (level 2) and SS-PDE (level 1), where the unit has the
        // size (CAP.SSLPS), otherwise reserved; reserved in SS-PML4E and SS-PML5E, ignored in
        // SS-PTE.
        let large = word & 0x80 != 0 && walker.page_sizes.contains(1 << shift(level));
        let leaf = level == 0 || (large && level <= 2);

        // Bit 62 is reserved everywhere, 51:HAW are where the unit's addresses are narrower; 63
        // and 61:52 are ignored. So are 6:3, 8 and 9 (memory type, accessed, dirty: the unit's,
        // if it has them) and 10.
        let mut reserved = 0x4000_0000_0000_0000 | walker.reserved_output();
        if leaf {
            // Bits below the page's size. Bit 11, SNP, where the unit has no snoop control.
            reserved |= low_bits(shift(level)) & !0xfff;
            if !walker.snoop_control {
                reserved |= 0x800;
            }
        } else {
            reserved |= 0x880;
        }
        if word & reserved != 0 {
            return Err(WalkReason::Reserved {
                bits: word & reserved,
            });
        }

        // Bits HAW−1:12.
        let address = word & 0x000f_ffff_ffff_f000;
        if !leaf {
            return Ok(Entry::Table {
                address,
                level: level - 1,
                prot,
            });
        }
        prot.set(Prot::COHERENT, word & 0x800 != 0);
        Ok(Entry::Leaf {
            pa: address,
            log2: shift(level),
            prot,
        })
    }

    /// Section 3.7.2 "Accessed and Dirty Flags": with SSADE in the PASID entry, bit 8 A in every
    /// entry that is used, bit 9 D by a write in the one that maps the page.
    fn marked(walker: &Walker, _level: u8, leaf: bool, word: u64, access: Access) -> u64 {
        let mut word = word;
        if walker.sets_accessed {
            word |= 1 << 8;
        }
        if walker.sets_dirty && leaf && access == Access::Write {
            word |= 1 << 9;
        }
        word
    }
}
