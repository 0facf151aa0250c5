//! The registers of an SMMUv3, and what they say the unit can do.
//!
//! IHI 0070, section 6.3 "Register formats"; fields have its names. All are those of the Non-secure
//! programming interface.

use iopt::format::{
    ArmConfig, ArmGranule, ArmStage1, ArmStage2, BreakBeforeMake, K4, K4Lpa2, K16, K16Lpa2, K64,
    K64Lpa,
};
use iopt::{Format, FormatId};
use runs::PageSizes;

use super::Config;
use crate::arm;
use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::error::UnitError;
use crate::handover::UnitKind;
use crate::registers::{Registers, wait_until};
use crate::setup::{IdRegisters, UnitProbeError};

// Offsets. Registers have 32 bits but for the bases.
pub(super) const IDR0: usize = 0x00;
pub(super) const IDR1: usize = 0x04;
pub(super) const IDR3: usize = 0x0c;
pub(super) const IDR5: usize = 0x14;
pub(super) const CR0: usize = 0x20;
pub(super) const CR0ACK: usize = 0x24;
pub(super) const CR1: usize = 0x28;
pub(super) const CR2: usize = 0x2c;
pub(super) const GBPA: usize = 0x44;
pub(super) const IRQ_CTRL: usize = 0x50;
pub(super) const IRQ_CTRLACK: usize = 0x54;
pub(super) const GERROR: usize = 0x60;
pub(super) const GERRORN: usize = 0x64;
pub(super) const STRTAB_BASE: usize = 0x80;
pub(super) const STRTAB_BASE_CFG: usize = 0x88;
pub(super) const CMDQ_BASE: usize = 0x90;
pub(super) const CMDQ_PROD: usize = 0x98;
pub(super) const CMDQ_CONS: usize = 0x9c;
pub(super) const EVENTQ_BASE: usize = 0xa0;
/// In register page 1.
pub(super) const EVENTQ_PROD: usize = 0x1_00a8;
pub(super) const EVENTQ_CONS: usize = 0x1_00ac;

// CR0.
pub(super) const SMMUEN: u32 = 1;
pub(super) const EVENTQEN: u32 = 1 << 2;
pub(super) const CMDQEN: u32 = 1 << 3;
/// Translated requests of devices are checked against the stream table.
pub(super) const ATSCHK: u32 = 1 << 4;

// CR2.
/// Events for StreamIDs without an entry.
const RECINVSID: u32 = 1 << 1;
/// The processors' broadcast invalidations are not ours.
const PTM: u32 = 1 << 2;

// GBPA.
const ABORT: u32 = 1 << 20;
const UPDATE: u32 = 1 << 31;

// GERROR and GERRORN: an error is active while its bits differ.
/// CMDQ_ERR.
pub(super) const COMMAND_ERROR: u32 = 1;
/// EVENTQ_ABT_ERR.
pub(super) const EVENTS_ABORTED: u32 = 1 << 2;
/// SFM_ERR, the unit is in Service Failure Mode.
pub(super) const FAILED: u32 = 1 << 8;

/// RA and WA of the bases: allocate in the caches.
pub(super) const ALLOCATE: u64 = 1 << 62;
/// ADDR of the bases.
pub(super) const ADDRESS: u64 = (1 << 52) - 1;

/// Writes CR0, and waits until it is in force (section 6.3.9, "Additional information").
pub(super) fn control<R: Registers>(
    registers: &R,
    value: u32,
    awaited: &'static str,
) -> Result<(), UnitError> {
    registers.write32(CR0, value);
    wait_until(registers, awaited, || Ok(registers.read32(CR0ACK) == value))
}

/// Says what becomes of requests while the unit does not translate (section 6.3.14.1, "Update procedure").
pub(super) fn bypass<R: Registers>(registers: &R, abort: bool) -> Result<(), UnitError> {
    let idle = || Ok(registers.read32(GBPA) & UPDATE == 0);
    wait_until(registers, "GBPA.Update = 0", idle)?;
    let kept = registers.read32(GBPA) & !(ABORT | UPDATE);
    let value = if abort { kept | ABORT } else { kept };
    registers.write32(GBPA, value | UPDATE);
    wait_until(registers, "GBPA.Update = 0", idle)
}

/// The errors that are active.
pub(super) fn errors<R: Registers>(registers: &R) -> u32 {
    registers.read32(GERROR) ^ registers.read32(GERRORN)
}

/// Acknowledges errors that are active.
pub(super) fn acknowledge<R: Registers>(registers: &R, errors: u32) {
    registers.write32(GERRORN, registers.read32(GERRORN) ^ errors);
}

/// Contents of the ID registers.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    idr0: u32,
    idr1: u32,
    idr3: u32,
    idr5: u32,
    /// Bits of PASIDs, of what the unit has and what is asked for.
    pub(super) pasid_bits: u32,
}

impl Features {
    pub(super) fn read<R: Registers>(
        registers: &R,
        config: &Config,
    ) -> Result<Self, UnitProbeError> {
        let idr0 = registers.read32(IDR0);
        // Registers behind which no unit answers read as all ones.
        if idr0 == u32::MAX {
            let kind = UnitKind::SmmuV3;
            let read = IdRegisters::one("SMMU_IDR0", idr0.into());
            return Err(UnitProbeError::NoUnit { kind, read });
        }
        let idr1 = registers.read32(IDR1);
        let features = Self {
            idr0,
            idr1,
            idr3: registers.read32(IDR3),
            idr5: registers.read32(IDR5),
            // SSIDSIZE.
            pasid_bits: (idr1 >> 6 & 0x1f).min(config.pasid_bits).min(20),
        };
        // STALL_MODEL.
        if idr0 >> 24 & 3 == 2 {
            let read = IdRegisters::one("SMMU_IDR0", idr0.into());
            return Err(UnitProbeError::StallsAlways { read });
        }
        // TABLES_PRESET, QUEUES_PRESET.
        if idr1 >> 29 & 3 != 0 || features.queue_log2(21, 8) == 0 {
            let read = IdRegisters::one("SMMU_IDR1", idr1.into());
            return Err(UnitProbeError::Queues { read });
        }
        // TTF: AArch64; TTENDIAN: mixed or little.
        if idr0 >> 3 & 1 == 0 || idr0 >> 21 & 3 == 3 {
            return Err(features.no_tables());
        }
        Ok(features)
    }

    fn no_tables(self) -> UnitProbeError {
        let Self { idr0, idr5, .. } = self;
        let read = IdRegisters::two(("SMMU_IDR0", idr0.into()), ("SMMU_IDR5", idr5.into()));
        let kind = UnitKind::SmmuV3;
        UnitProbeError::Tables { kind, read }
    }

    const fn has(self, bit: u32) -> bool {
        self.idr0 >> bit & 1 == 1
    }

    /// S1P.
    pub(super) const fn stage1(self) -> bool {
        self.has(1)
    }

    /// S2P.
    pub(super) const fn stage2(self) -> bool {
        self.has(0)
    }

    /// COHACC: tables, structures and queues are read and written through the processors' caches.
    pub(super) const fn coherent(self) -> bool {
        self.has(4)
    }

    /// HTTU: accessed and dirty state. The updates need memory that is cached (CD.IR0).
    pub(super) const fn dirty(self) -> bool {
        self.idr0 >> 7 & 1 == 1 && self.coherent()
    }

    /// Hyp: there are translations of EL2 to invalidate.
    pub(super) const fn hypervisor(self) -> bool {
        self.has(9)
    }

    /// ATS.
    pub(super) const fn device_tlbs(self) -> bool {
        self.has(10)
    }

    /// MSI: a CMD_SYNC can write to memory, where that is seen.
    pub(super) const fn writes_tickets(self) -> bool {
        self.has(13) && self.coherent()
    }

    /// CD2L: context descriptors in two levels.
    pub(super) const fn two_level_contexts(self) -> bool {
        self.has(19)
    }

    /// STALL_MODEL: faults may stall, or not.
    pub(super) const fn can_stall(self) -> bool {
        self.idr0 >> 24 & 3 == 0
    }

    /// ST_LEVEL: stream tables in two levels.
    pub(super) const fn two_level_streams(self) -> bool {
        self.idr0 >> 27 & 3 == 1
    }

    /// The highest StreamID: SIDSIZE.
    pub(super) const fn last_stream(self) -> u32 {
        match self.idr1 & 0x3f {
            bits @ 0..32 => (1 << bits) - 1,
            _ => u32::MAX,
        }
    }

    /// ATTR_TYPES_OVR: stream table entries say something about memory types.
    pub(super) const fn overrides_types(self) -> bool {
        self.idr1 >> 27 & 1 == 1
    }

    /// Entries of a queue as a power of two: at most what fits a page, and what CMDQS (21) or EVENTQS (16)
    /// says.
    pub(super) const fn queue_log2(self, field: u32, page: u32) -> u32 {
        let most = self.idr1 >> field & 0x1f;
        if most < page { most } else { page }
    }

    /// RIL: TLB invalidations of ranges.
    pub(super) const fn ranges(self) -> bool {
        self.idr3 >> 10 & 1 == 1
    }

    /// OAS, as fields of that kind have it.
    pub(super) const fn output_size(self) -> u64 {
        // Sizes that later versions add exceed the reach of tables of 64-bit entries.
        let size = self.idr5 & 7;
        if size < 6 { size as u64 } else { 6 }
    }

    /// Bits of an output address.
    const fn output_bits(self) -> u32 {
        [32, 36, 40, 42, 44, 48, 52][self.output_size() as usize]
    }

    /// ASID16 and VMID16, as far as both are used.
    const fn domain_bits(self) -> u32 {
        let short = (self.stage1() && !self.has(12)) || (self.stage2() && !self.has(18));
        if short { 8 } else { 16 }
    }

    /// The VMID of all of stage 1: the last. Stage 2 must have others (section 3.17); a unit without
    /// stage 2 has none.
    pub(super) const fn stage1_vmid(self) -> u16 {
        match (self.stage2(), self.domain_bits()) {
            (false, _) => 0,
            (true, 8) => 0xff,
            (true, _) => 0xffff,
        }
    }

    /// Cacheability and shareability of what the unit reads, as all fields of that kind have them, from bit
    /// 0 on: inner and outer write-back, inner shareable; or not cached.
    pub(super) const fn attributes(self) -> u64 {
        if self.coherent() { 0b11_01_01 } else { 0 }
    }

    /// CR1: tables, queues.
    pub(super) const fn cr1(self) -> u32 {
        let attributes = self.attributes() as u32;
        attributes << 6 | attributes
    }

    /// CR2, with PTM where there are broadcasts (BTM).
    pub(super) const fn cr2(self) -> u32 {
        if self.has(5) {
            RECINVSID | PTM
        } else {
            RECINVSID
        }
    }

    /// The most input bits of tables with a granule, where the unit has it.
    fn input_bits(self, granule: ArmGranule, second: bool) -> Option<u32> {
        let (bit, wide) = match granule {
            ArmGranule::K4 => (4, true),
            ArmGranule::K16 => (5, true),
            ArmGranule::K64 => (6, true),
            // DS.
            ArmGranule::K4Lpa2 => (4, self.idr5 >> 7 & 1 == 1),
            ArmGranule::K16Lpa2 => (5, self.idr5 >> 7 & 1 == 1),
            ArmGranule::K64Lpa => (6, self.output_bits() == 52),
        };
        if self.idr5 >> bit & 1 == 0 || !wide {
            return None;
        }
        let narrow = matches!(granule, ArmGranule::K4 | ArmGranule::K16);
        Some(if second {
            // IAS (section 3.4): of AArch32 tables, where there are any, 40 bits at least.
            let input = self.output_bits().max(if self.has(2) { 40 } else { 32 });
            let most = match granule {
                ArmGranule::K4 | ArmGranule::K16 | ArmGranule::K64 => 48,
                _ => 52,
            };
            input.min(most)
        } else if narrow || self.idr5 >> 10 & 3 == 0 {
            // VAX = 0, or entries of 48 bits.
            48
        } else {
            52
        })
    }

    /// The levels that stage 2 can begin at: the highest takes an output size (DDI 0487,
    /// `AArch64.S2InvalidSL`).
    fn stage2_levels(self, granule: ArmGranule, all: u16) -> u16 {
        let (levels, least) = match granule {
            ArmGranule::K4 | ArmGranule::K4Lpa2 => (4, 44),
            ArmGranule::K16 | ArmGranule::K16Lpa2 => (3, 42),
            ArmGranule::K64 | ArmGranule::K64Lpa => (3, 44),
        };
        if self.output_bits() < least {
            all & !(1 << levels)
        } else {
            all
        }
    }

    fn with_granule(
        self,
        can: UnitCapabilities,
        granule: ArmGranule,
        sizes: [PageSizes; 2],
    ) -> UnitCapabilities {
        let config = |input_bits: u32, upper| ArmConfig {
            granule,
            input_bits: input_bits as u8,
            upper,
        };
        // All levels that a table of the format can have.
        let all = |format: fn(ArmConfig) -> FormatId, most: u32| {
            (32..=most).fold(0, |all, bits| {
                all | arm::levels(format(config(bits, false)))
            })
        };
        let [first, second] = sizes;
        let mut can = can;
        if let (true, Some(bits)) = (self.stage1(), self.input_bits(granule, false)) {
            can = can.with_format(FormatSupport {
                format: FormatId::ArmStage1(config(bits, true)),
                levels: all(FormatId::ArmStage1, bits),
                page_sizes: first,
            });
        }
        if let (true, Some(bits)) = (self.stage2(), self.input_bits(granule, true)) {
            can = can.with_format(FormatSupport {
                format: FormatId::ArmStage2(config(bits, false)),
                levels: self.stage2_levels(granule, all(FormatId::ArmStage2, bits)),
                page_sizes: second,
            });
        }
        can
    }

    pub(super) fn capabilities(self, config: &Config) -> Result<UnitCapabilities, UnitProbeError> {
        let mut can = UnitCapabilities::new();
        macro_rules! granules {
            ($($granule:ident)*) => {$({
                let first = ArmStage1::<$granule>::page_sizes(ArmStage1::<$granule>::MAX_LEVELS);
                let second = ArmStage2::<$granule>::page_sizes(ArmStage2::<$granule>::MAX_LEVELS);
                can = self.with_granule(can, ArmGranule::$granule, [first, second]);
            })*};
        }
        granules!(K4 K16 K64 K4Lpa2 K16Lpa2 K64Lpa);
        if can.formats.iter().all(Option::is_none) {
            return Err(self.no_tables());
        }
        // Tables of 4 and 16 KiB have 48 bits of an address but with DS, and those of 64 KiB as many as OAS.
        let wide = [ArmGranule::K4Lpa2, ArmGranule::K16Lpa2, ArmGranule::K64Lpa];
        let wide = wide
            .into_iter()
            .any(|granule| self.input_bits(granule, false).is_some());
        can.output_bits = self.output_bits().min(if wide { 52 } else { 48 });
        // Section 3.4.1: all of 64 bits are looked at.
        can.input_bits = 64;
        can.domain_bits = self.domain_bits();
        can.pasid_bits = if self.stage1() { self.pasid_bits } else { 0 };
        can.device_tlbs = self.device_tlbs() && config.device_tlbs;
        can.coherent_walks = self.coherent();
        can.dirty_tracking = self.dirty();
        can.snoop_control = false;
        // Section 3.21.1: only valid translations are cached.
        can.caches_not_present = false;
        // BBML.
        can.break_before_make = match self.idr3 >> 11 & 3 {
            0 => BreakBeforeMake::Always,
            1 => BreakBeforeMake::Marked,
            _ => BreakBeforeMake::NotNeeded,
        };
        Ok(can)
    }
}
