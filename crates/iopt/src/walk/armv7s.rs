//! ARMv7 short descriptors, as an SMMU (or a processor) reads them.
//!
//! Arm Architecture Reference Manual, ARMv7-A and ARMv7-R edition, DDI 0406C: section B3.5
//! "Short-descriptor translation table format", B3.7 "Memory access control". The base register
//! translates all 4 GiB (TTBCR.N is 0).
//!
//! Domains are not looked at: an SMMU treats every entry as one of a client domain. A walk does
//! not return memory types and shareability (TEX, C, B, S), which depend on the remap registers,
//! nG or NS. Bits that should be zero are ignored. Only the entry that the address selects is
//! read among the sixteen equal ones of a supersection or large page.

use super::spec::{Entry, Shape, Spec};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// Short descriptors.
pub(super) struct ArmV7s;

impl Spec for ArmV7s {
    /// Section B3.5.2: a fault at the first level comes before the second is read, but
    /// permissions are those of the leaf.
    const CHECKS_EACH_LEVEL: bool = false;

    /// B3.5.4: bits 31:20 index the first level, of 16 KiB and aligned to that; bits 19:12 the
    /// second, of 1 KiB. An entry has 4 bytes.
    fn shape(walker: &Walker) -> Option<Shape> {
        (walker.root().levels == 2).then(|| Shape {
            aperture: Aperture::zeros(32),
            page_log2: 12,
            index_bits: 8,
            entry_log2: 2,
            root_log2: 14,
        })
    }

    fn read(walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        let bit = |n: u32| word >> n & 1 != 0;
        let never = Prot::EXECUTE;
        if level > 0 {
            // B3.5.1, figure "Short-descriptor first-level descriptor formats".
            match word & 0b11 {
                0b00 => return Err(WalkReason::NotPresent),
                0b01 => {
                    // Bits 31:10; bit 2, PXN.
                    let mut prot = Prot::RW | Prot::EXECUTE;
                    prot.set(never, !(bit(2) && walker.privileged));
                    return Ok(Entry::Table {
                        address: word & 0xffff_fc00,
                        level: 0,
                        prot,
                    });
                }
                _ => {}
            }
            // Bit 18: a supersection. Bits 31:24 are in their places, 35:32 in 23:20, 39:36 in 8:5.
            let (pa, log2) = if bit(18) {
                let extended = (word >> 20 & 0xf) << 32 | (word >> 5 & 0xf) << 36;
                (word & 0xff00_0000 | extended, 24)
            } else {
                (word & 0xfff0_0000, 20)
            };
            // AP[2] 15, AP[1:0] 11:10, XN 4, PXN 0.
            let mut prot = access(walker, bit(15), word >> 10 & 0b11)?;
            if bit(4) || (bit(0) && walker.privileged) {
                prot.remove(never);
            }
            return Ok(Entry::Leaf { pa, log2, prot });
        }
        // Figure "Short-descriptor second-level descriptor formats". AP[2] 9, AP[1:0] 5:4 in both;
        // XN 15 in a large page, 0 in a small one.
        let (pa, log2, execute_never) = match word & 0b11 {
            0b00 => return Err(WalkReason::NotPresent),
            0b01 => (word & 0xffff_0000, 16, bit(15)),
            _ => (word & 0xffff_f000, 12, bit(0)),
        };
        let mut prot = access(walker, bit(9), word >> 4 & 0b11)?;
        if execute_never {
            prot.remove(never);
        }
        Ok(Entry::Leaf { pa, log2, prot })
    }

    /// B3.7.4 "Hardware management of the access flag" (SCTLR.HA): AP\[0\] of the leaf, where it is
    /// the access flag: bit 10 at the first level, bit 4 at the second. Only the entry that was
    /// read is marked among sixteen equal ones. There is no dirty state.
    fn marked(walker: &Walker, level: u8, leaf: bool, word: u64, _access: Access) -> u64 {
        match (leaf && walker.access_flag && walker.sets_accessed, level) {
            (false, _) => word,
            (true, 0) => word | 1 << 4,
            (true, _) => word | 1 << 10,
        }
    }
}

/// Permissions by AP\[2\] and AP\[1:0\] (B3.7.1). Readable memory is executable (B3.7.2).
fn access(walker: &Walker, ap2: bool, ap10: u64) -> Result<Prot, WalkReason> {
    let (all, read) = (Prot::RW | Prot::EXECUTE, Prot::READ | Prot::EXECUTE);
    if walker.access_flag {
        // Table "VMSAv7 MMU access permissions, AP[2:1]". AP[0] is the access flag.
        if ap10 & 0b01 == 0 && !walker.sets_accessed {
            return Err(WalkReason::AccessFlag);
        }
        let mut prot = if ap2 { read } else { all };
        prot.set(Prot::PRIVILEGED, ap10 & 0b10 == 0);
        return Ok(prot);
    }
    // Table "VMSAv7 MMU access permissions, AP[2:0]".
    Ok(match (ap2, ap10) {
        (false, 0b01) => all | Prot::PRIVILEGED,
        (false, 0b10) if walker.privileged => all,
        (false, 0b10) => read,
        (false, 0b11) => all,
        (true, 0b01) => read | Prot::PRIVILEGED,
        (true, 0b10 | 0b11) => read,
        // 000 no access; 100 is reserved, and allows none here.
        _ => Prot::empty(),
    })
}
