//! RISC-V tables, as an IOMMU (or a hart) reads them: Sv39, Sv48 and Sv57, and the second stage
//! Sv39x4, Sv48x4 and Sv57x4.
//!
//! The RISC-V Instruction Set Manual, volume II: Privileged Architecture: chapter "Supervisor-Level
//! ISA", sections "Virtual Address Translation Process", "Sv39", "Sv48", "Sv57"; chapter "Svnapot
//! Extension for NAPOT Translation Contiguity"; chapter "Svpbmt Extension for Page-Based Memory
//! Types"; chapter "Hypervisor Extension", section "Guest Physical Address Translation". RISC-V
//! IOMMU Architecture Specification, version 1.0: sections "Device-context fields" (iohgatp,
//! SADE, GADE) and "Process-context fields" (SUM).
//!
//! Everything that is wrong with an entry is a page fault here; the walk names which it was. Bits
//! that are reserved fault, as the translation process says in its third step; bits 60:59 are
//! reserved too, since the walker does not have the extension that gives them to software
//! (Svrsw60t59b).

use super::spec::{Entry, Shape, Spec, low_bits, shift};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// Tables of the first stage or, if `SECOND`, of the second.
pub(super) struct RiscV<const SECOND: bool>;

/// Reserved in every entry: 60:54.
const RESERVED: u64 = 0x1fc0_0000_0000_0000;
/// Reserved in an entry that leads to a table: bits 7 D, 6 A, 4 U; 62:61 PBMT; 63 N.
const RESERVED_IN_TABLES: u64 = 0xe000_0000_0000_00d0;
/// Bits 62:61, PBMT.
const MEMORY_TYPE: u64 = 0x6000_0000_0000_0000;
/// Bit 63, N.
const NAPOT: u64 = 0x8000_0000_0000_0000;

impl<const SECOND: bool> Spec for RiscV<SECOND> {
    /// Three levels translate 39 bits, four 48, five 57; the bits above repeat the highest. In the
    /// second stage the root has 2 index bits more, is of 16 KiB and aligned to that, and the bits
    /// above are 0.
    fn shape(walker: &Walker) -> Option<Shape> {
        let levels = walker.root().levels;
        if !matches!(levels, 3..=5) {
            return None;
        }
        Some(if SECOND {
            Shape {
                root_log2: 14,
                ..Shape::of_512(Aperture::zeros(shift(levels) + 2))
            }
        } else {
            Shape::of_512(Aperture::signed(shift(levels)))
        })
    }

    fn read(walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        // Step 3. Bit 0 V: while it is 0 all other bits are ignored.
        if word & 1 == 0 {
            return Err(WalkReason::NotPresent);
        }
        reserved(word & RESERVED)?;
        // Bits 3 X, 2 W, 1 R: what can be written but not read is a reserved encoding.
        let (readable, writable, executable) = (word & 2 != 0, word & 4 != 0, word & 8 != 0);
        if writable && !readable {
            return Err(WalkReason::Reserved { bits: 4 });
        }
        // Bits 53:10, the page number.
        let address = (word >> 10 & 0x0fff_ffff_ffff) << 12;

        // Step 4. Neither readable nor executable: it leads to a table.
        if !readable && !executable {
            reserved(word & RESERVED_IN_TABLES)?;
            let Some(below) = level.checked_sub(1) else {
                return Err(WalkReason::NextLevel { next: 0 });
            };
            return Ok(Entry::Table {
                address,
                level: below,
                prot: Prot::RW | Prot::EXECUTE,
            });
        }

        // Svpbmt: 0 as the memory is, 1 not cacheable, 2 I/O, 3 reserved.
        if word & MEMORY_TYPE != 0 && !walker.svpbmt || word & MEMORY_TYPE == MEMORY_TYPE {
            return Err(WalkReason::Reserved {
                bits: word & MEMORY_TYPE,
            });
        }
        let (pa, log2) = if word & NAPOT != 0 {
            // Svnapot, table "Page table entry encodings when pte.N = 1": one size at the lowest
            // level, 64 KiB, with 0b1000 in the lowest four bits of the page number (13:10).
            if level != 0 || !walker.page_sizes.contains(1 << 16) {
                return Err(WalkReason::Reserved { bits: NAPOT });
            }
            if word & 0x3c00 != 0x2000 {
                return Err(WalkReason::Reserved {
                    bits: NAPOT | word & 0x3c00,
                });
            }
            (address & !0xffff, 16)
        } else {
            // Step 5: a superpage is a multiple of its size.
            let below = address & low_bits(shift(level));
            reserved(below >> 12 << 10)?;
            (address, shift(level))
        };

        let mut prot = Prot::empty();
        prot.set(Prot::READ, readable);
        prot.set(Prot::EXECUTE, executable);
        // Bit 7, D. Where the unit does not set it (SADE, GADE; Svadu), a write to a clean page
        // faults.
        let clean = word & 0x80 == 0;
        prot.set(Prot::WRITE, writable && (!clean || walker.keeps_dirty()));
        // Bit 4, U.
        let user = word & 0x10 != 0;
        if SECOND {
            // All accesses are user accesses to the second stage.
            if !user {
                prot = Prot::empty();
            }
        } else if !user {
            prot |= Prot::PRIVILEGED;
        } else if walker.privileged {
            // User pages are open to privileged requests only with SUM, and never for execution.
            prot.remove(Prot::EXECUTE);
            if !walker.supervisor_user_access {
                prot = Prot::empty();
            }
        }
        prot.set(Prot::UNCACHED, word & MEMORY_TYPE == 0x2000_0000_0000_0000);
        prot.set(Prot::DEVICE, word & MEMORY_TYPE == 0x4000_0000_0000_0000);

        // Bit 6, A.
        if word & 0x40 == 0 && !walker.sets_accessed {
            return Err(WalkReason::AccessFlag);
        }
        Ok(Entry::Leaf { pa, log2, prot })
    }

    /// Step 7: where the unit updates (SADE, GADE; Svadu), bit 6 A of the leaf, and by a store bit 7
    /// D. Both are reserved in entries that lead to tables. Only the entry that was read is marked
    /// among the sixteen of a NAPOT page (chapter "Svnapot Extension").
    fn marked(walker: &Walker, _level: u8, leaf: bool, word: u64, access: Access) -> u64 {
        if !leaf || !walker.sets_accessed {
            word
        } else if walker.sets_dirty && access == Access::Write {
            word | 0xc0
        } else {
            word | 0x40
        }
    }
}

fn reserved(bits: u64) -> Result<(), WalkReason> {
    if bits == 0 {
        Ok(())
    } else {
        Err(WalkReason::Reserved { bits })
    }
}
