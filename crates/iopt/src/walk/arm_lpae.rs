//! Arm's long descriptors, as an SMMU (or a processor) reads them: VMSAv8-64, stage 1 and stage 2.
//!
//! Arm Architecture Reference Manual for A-profile, DDI 0487: chapter D8 "The AArch64 Virtual
//! Memory System Architecture", and the pseudocode of chapter J1 under `aarch64/translation`
//! (`AArch64.DecodeDescriptorType`, `AArch64.NextTableBase`, `AArch64.LeafBase`,
//! `AArch64.ContiguousSize`, `AArch64.OAOutOfRange`). SMMU version 3, IHI 0070, section 3.4.
//!
//! Levels are counted from the smallest page here; Arm's level is 3 less ours.
//!
//! A walk does not return memory types and shareability (AttrIndx, MemAttr, SH), security (NS,
//! NSTable) or nG. They say how the access is made, not whether and where. Bits that are RES0 are
//! ignored, as the pseudocode does; so is nT.
//!
//! Permission is looked at when the leaf is reached, and after its address and access flag: a
//! table that forbids writes above an invalid entry gives a translation fault (D8.15, priority of
//! faults within a stage).

use super::spec::{Entry, Shape, Spec, low_bits};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::{Above, Aperture, ArmConfig, ArmGranule, FormatId};
use crate::prot::Prot;

/// Tables of either stage: the root's format says which.
pub(super) struct ArmLpae;

/// Parameters of a table that its walk depends on.
struct Regime {
    second_stage: bool,
    /// The page, as a power of two.
    page_log2: u32,
    /// Entries hold 52 address bits: with LPA2 (TCR.DS, VTCR.DS) for 4 and 16 KiB, with LPA for
    /// 64 KiB.
    wide: bool,
    config: ArmConfig,
}

impl Regime {
    fn of(format: FormatId) -> Option<Self> {
        let (second_stage, config) = match format {
            FormatId::ArmStage1(config) => (false, config),
            FormatId::ArmStage2(config) => (true, config),
            _ => return None,
        };
        let (page_log2, wide) = match config.granule {
            ArmGranule::K4 => (12, false),
            ArmGranule::K4Lpa2 => (12, true),
            ArmGranule::K16 => (14, false),
            ArmGranule::K16Lpa2 => (14, true),
            ArmGranule::K64 => (16, false),
            ArmGranule::K64Lpa => (16, true),
        };
        Some(Self {
            second_stage,
            page_log2,
            wide,
            config,
        })
    }

    /// A descriptor has 8 bytes, a table the size of a granule (D8.2.2).
    const fn index_bits(&self) -> u32 {
        self.page_log2 - 3
    }

    /// Bytes that an entry translates, as a power of two.
    const fn shift(&self, level: u8) -> u32 {
        self.page_log2 + self.index_bits() * level as u32
    }

    /// Where the granule has blocks: `AArch64.BlockDescSupported`. Arm's level 2 always, level 1
    /// with 4 KiB; and one level more with 52 bits, in which 64 KiB needs LPA.
    const fn has_blocks(&self, level: u8) -> bool {
        let normally = if self.page_log2 == 12 { 2 } else { 1 };
        level <= normally || (self.wide && level == normally + 1)
    }

    /// The size of a contiguous group of leaves, as a power of two: `AArch64.ContiguousSize`, and
    /// D8.7.1. `None` where the bit means nothing.
    const fn group_log2(&self, level: u8) -> Option<u32> {
        match (self.page_log2, level) {
            // 16 entries: 64 KiB, 32 MiB, 16 GiB.
            (12, 0) => Some(16),
            (12, 1) => Some(25),
            (12, 2) => Some(34),
            // 128 pages of 16 KiB: 2 MiB; 32 blocks of 32 MiB: 1 GiB.
            (14, 0) => Some(21),
            (14, 1) => Some(30),
            // 32 pages of 64 KiB: 2 MiB; 32 blocks of 512 MiB: 16 GiB.
            (16, 0) => Some(21),
            (16, 1) => Some(34),
            _ => None,
        }
    }

    /// The address in a descriptor, a multiple of 2^`log2`: `AArch64.NextTableBase` and
    /// `AArch64.LeafBase`.
    const fn address(&self, word: u64, log2: u32) -> u64 {
        // Bits 47:log2 are in their places.
        let low = word & 0x0000_ffff_ffff_ffff & !low_bits(log2);
        if !self.wide {
            low
        } else if self.page_log2 == 16 {
            // 51:48 are in bits 15:12.
            low | (word >> 12 & 0xf) << 48
        } else {
            // 49:48 are in their places, 51:50 in bits 9:8.
            low | word & 0x0003_0000_0000_0000 | (word >> 8 & 0b11) << 50
        }
    }
}

impl Spec for ArmLpae {
    const CHECKS_EACH_LEVEL: bool = false;

    fn shape(walker: &Walker) -> Option<Shape> {
        let regime = Regime::of(walker.root().format)?;
        let levels = walker.root().levels;
        let bits = u32::from(regime.config.input_bits);
        // TnSZ: at most 48 bits, 52 with 64 KiB (LVA) or LPA2 (D8.2.4). Stage 2: at most as many
        // as there are output bits, 52 with 64 KiB only with LPA (D8.2.6). At least one bit is
        // left to index the root.
        let most = if regime.wide || (regime.page_log2 == 16 && !regime.second_stage) {
            52
        } else {
            48
        };
        // The initial level of stage 2 is Arm's level 0 with 16 KiB only where there is LPA2
        // (VTCR_EL2.SL0).
        let too_high = regime.second_stage && regime.page_log2 == 14 && !regime.wide && levels > 3;
        if bits > most || levels == 0 || levels > 5 || too_high {
            return None;
        }
        let root_bits = bits.checked_sub(regime.shift(levels - 1))?;
        // Stage 2 can have up to 16 tables side by side as its root (D8.2.6).
        let side_by_side = if regime.second_stage { 4 } else { 0 };
        if root_bits == 0 || root_bits > regime.index_bits() + side_by_side {
            return None;
        }
        // Only stage 1 has an upper half (TTBR1), and then the regime has two privileges.
        let above = match (regime.config.upper, regime.second_stage) {
            (false, _) => Above::Zeros,
            (true, false) if !walker.single_privilege => Above::Ones,
            (true, _) => return None,
        };
        Some(Shape {
            aperture: Aperture { bits, above },
            page_log2: regime.page_log2,
            index_bits: regime.index_bits(),
            entry_log2: 3,
            // The root is aligned to its size, and to 64 bytes (D8.2.5, TTBR0_EL1.BADDR).
            root_log2: (root_bits + 3).max(6),
        })
    }

    fn read(walker: &Walker, iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        let Some(regime) = Regime::of(walker.root().format) else {
            return Err(WalkReason::NotPresent);
        };
        // `AArch64.DecodeDescriptorType`. Bit 0: valid. Bit 1: at the lowest level a page, and 0 is
        // a reserved encoding; above it a table or, when 0, a block. All that is none of these is
        // invalid.
        let leaf = match (word & 0b11, level) {
            (0b11, 0) => true,
            (0b11, _) => false,
            (0b01, 1..) if regime.has_blocks(level) => true,
            _ => return Err(WalkReason::NotPresent),
        };
        let log2 = if leaf {
            regime.shift(level)
        } else {
            regime.page_log2
        };
        let address = regime.address(word, log2);
        // `AArch64.OAOutOfRange`: an address size fault, before all that follows.
        if address >> walker.output_bits() != 0 {
            return Err(walker.bad_output(address));
        }
        if !leaf {
            return Ok(Entry::Table {
                address,
                level: level - 1,
                prot: table_prot(walker, &regime, word),
            });
        }
        // Bit 10, AF. Where the unit does not set it (TCR.HA, CD.HA, STE.S2HA), an access flag
        // fault.
        if word & 0x400 == 0 && !walker.sets_accessed {
            return Err(WalkReason::AccessFlag);
        }
        let prot = if regime.second_stage {
            stage_2_prot(walker, word)
        } else {
            stage_1_prot(walker, word)
        };
        let (pa, log2) = group(walker, &regime, iova, level, word, address);
        Ok(Entry::Leaf { pa, log2, prot })
    }

    /// Hardware update (D8.5): with HA, AF of the leaf (D8.5.1); with HD as well, a write to a leaf
    /// with DBM clears AP\[2\] in stage 1 and sets S2AP\[1\] in stage 2 (D8.5.2). IHI 0070, section
    /// 3.13 "Translation table entry Access flag and dirty state". Access flags of tables
    /// (FEAT_HAFT) are not kept. Only the entry that was read is marked in a contiguous group
    /// (D8.7.1).
    fn marked(walker: &Walker, _level: u8, leaf: bool, word: u64, access: Access) -> u64 {
        if !leaf || !walker.sets_accessed {
            return word;
        }
        let word = word | 1 << 10;
        if !walker.keeps_dirty() || access != Access::Write || word >> 51 & 1 == 0 {
            return word;
        }
        match walker.root().format {
            FormatId::ArmStage2(_) => word | 1 << 7,
            _ => word & !(1 << 7),
        }
    }
}

/// Permissions that a table's entry leaves to the leaves below it (D8.4.1, hierarchical permissions).
fn table_prot(walker: &Walker, regime: &Regime, word: u64) -> Prot {
    let mut prot = Prot::RW | Prot::EXECUTE;
    // Stage 2 tables have no attributes.
    if regime.second_stage {
        return prot;
    }
    let bit = |n: u32| word >> n & 1 != 0;
    // Bit 62, APTable[1]: no writes.
    prot.set(Prot::WRITE, !bit(62));
    if walker.single_privilege {
        // Bit 60, XNTable. APTable[0] and PXNTable are RES0.
        prot.set(Prot::EXECUTE, !bit(60));
    } else {
        // Bit 61, APTable[0]: no unprivileged accesses.
        prot.set(Prot::PRIVILEGED, bit(61));
        // Bit 60, UXNTable; bit 59, PXNTable.
        let never = if walker.privileged { bit(59) } else { bit(60) };
        prot.set(Prot::EXECUTE, !never);
    }
    prot
}

/// Permissions of a stage 1 leaf (D8.4.1), for the requests that the walker is made for.
fn stage_1_prot(walker: &Walker, word: u64) -> Prot {
    let bit = |n: u32| word >> n & 1 != 0;
    let mut prot = Prot::READ;
    // Bit 7, AP[2]: read-only; bit 51, DBM: where the unit keeps dirty state (HD), writable all the
    // same (D8.5.2).
    let writable = !bit(7) || (bit(51) && walker.keeps_dirty());
    prot.set(Prot::WRITE, writable);
    if walker.single_privilege {
        // Bit 54, XN. Bit 6 is RES1, bit 53 RES0.
        prot.set(Prot::EXECUTE, !bit(54));
        return prot;
    }
    // Bit 6, AP[1]: unprivileged accesses too.
    prot.set(Prot::PRIVILEGED, !bit(6));
    // Bit 54, UXN; bit 53, PXN. Memory that unprivileged requests can write is never executable
    // for privileged ones.
    let never = if walker.privileged {
        bit(53) || (bit(6) && writable)
    } else {
        bit(54)
    };
    prot.set(Prot::EXECUTE, !never);
    prot
}

/// Permissions of a stage 2 leaf (D8.4.2).
fn stage_2_prot(walker: &Walker, word: u64) -> Prot {
    let bit = |n: u32| word >> n & 1 != 0;
    let mut prot = Prot::empty();
    // Bit 6, S2AP[0]: reads. Bit 7, S2AP[1]: writes, or with DBM, where the unit keeps dirty
    // state, that the page is dirty (D8.5.2).
    prot.set(Prot::READ, bit(6));
    prot.set(Prot::WRITE, bit(7) || (bit(51) && walker.keeps_dirty()));
    // Bits 54:53, XN[1:0] (FEAT_XNX): 00 all may execute, 01 the unprivileged, 10 none, 11 the
    // privileged. Without XNX bit 53 is RES0, and bit 54 is XN. Memory that cannot be read is
    // not executed.
    let executable = if walker.privileged {
        bit(54) == bit(53)
    } else {
        !bit(54)
    };
    prot.set(Prot::EXECUTE, executable && bit(6));
    prot
}

/// The leaf, or the contiguous group that it says it is one of (bit 52; D8.7.1).
///
/// The bit is a hint, and only this one entry is read. It is followed where the entry's address
/// agrees with its place in the group, where the group lies within the aperture, and where the
/// unit has the size; otherwise the leaf stands for itself, as the architecture permits.
fn group(
    walker: &Walker,
    regime: &Regime,
    iova: u64,
    level: u8,
    word: u64,
    address: u64,
) -> (u64, u32) {
    let own = regime.shift(level);
    let hint = word >> 52 & 1 != 0;
    match regime.group_log2(level) {
        Some(log2)
            if hint
                && log2 <= u32::from(regime.config.input_bits)
                && walker.page_sizes.contains(1 << log2)
                && (address ^ iova) & low_bits(log2) & !low_bits(own) == 0 =>
        {
            (address & !low_bits(log2), log2)
        }
        _ => (address, own),
    }
}
