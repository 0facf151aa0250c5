//! The registers of a RISC-V IOMMU, and what they say the unit can do.
//!
//! RISC-V IOMMU Architecture Specification, chapter "Memory-mapped register interface"; fields have its
//! names. `capabilities.NL` and `capabilities.S` are from the chapter "IOMMU Extensions".

use iopt::FormatId;
use runs::PageSizes;

use super::Config;
use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::error::UnitError;
use crate::handover::UnitKind;
use crate::registers::{Registers, wait_until};
use crate::setup::{IdRegisters, UnitProbeError};

// Offsets. Registers with a second number in the specification's table have 64 bits: CAPABILITIES, DDTP,
// CQB, FQB; the others 32.
pub(super) const CAPABILITIES: usize = 0;
pub(super) const FCTL: usize = 8;
pub(super) const DDTP: usize = 16;
pub(super) const CQB: usize = 24;
pub(super) const CQH: usize = 32;
pub(super) const CQT: usize = 36;
pub(super) const FQB: usize = 40;
pub(super) const FQH: usize = 48;
pub(super) const FQT: usize = 52;
pub(super) const CQCSR: usize = 72;
pub(super) const FQCSR: usize = 76;
pub(super) const PQCSR: usize = 80;

/// fctl.BE and fctl.GXL: memory is read in big-endian order, second-stage tables have 32-bit entries.
pub(super) const FOREIGN: u32 = 1 | 1 << 2;

/// ddtp.iommu_mode.
pub(super) const MODE: u64 = 0xf;
pub(super) const OFF: u64 = 0;
pub(super) const BARE: u64 = 1;
/// ddtp.busy.
const DDTP_BUSY: u64 = 1 << 4;
/// ddtp.PPN.
pub(super) const DDTP_PPN: u64 = ((1 << 44) - 1) << 10;

// cqcsr, fqcsr, pqcsr.
/// cqen, fqen, pqen.
pub(super) const ENABLE: u32 = 1;
/// cqon, fqon, pqon.
pub(super) const ON: u32 = 1 << 16;
const BUSY: u32 = 1 << 17;
/// cqmf, cmd_to, cmd_ill, fence_w_ip; writing 1 clears.
pub(super) const COMMAND_ERRORS: u32 = 0b1111 << 8;
/// fqmf and fqof, pqmf and pqof; writing 1 clears.
pub(super) const LOST: u32 = 0b11 << 8;

/// A page number where registers and directory entries have it, bits 53:10.
pub(super) const fn page_number(address: u64) -> u64 {
    address >> 2 & DDTP_PPN
}

/// Switches a queue, and waits until its status follows. Off, its errors are cleared, too.
pub(super) fn switch<R: Registers>(
    registers: &R,
    (csr, name, errors): (usize, &'static str, u32),
    on: bool,
) -> Result<(), UnitError> {
    wait_until(registers, name, || Ok(registers.read32(csr) & BUSY == 0))?;
    registers.write32(csr, if on { ENABLE } else { errors });
    let wanted = if on { ON } else { 0 };
    wait_until(registers, name, || {
        Ok(registers.read32(csr) & (BUSY | ON) == wanted)
    })
}

/// LOG2SZ-1 and PPN of a queue's base register, for 2^`log2` entries.
pub(super) const fn base(page: u64, log2: u32) -> u64 {
    page_number(page) | (log2 - 1) as u64
}

/// Tells the unit the page of a queue of 2^`log2` entries, which is not in use.
pub(super) fn set_base<R: Registers>(
    registers: &R,
    (offset, register): (usize, &'static str),
    page: u64,
    log2: u32,
) -> Result<(), UnitError> {
    let base = base(page, log2);
    // The unit may not have the size or the address (WARL).
    registers.write64(offset, base);
    let value = registers.read64(offset);
    if value & (DDTP_PPN | 0x1f) != base {
        return Err(UnitError::Refused { register, value });
    }
    Ok(())
}

/// Writes `ddtp`, and returns mode and page number when the unit is done.
pub(super) fn point<R: Registers>(registers: &R, value: u64) -> Result<u64, UnitError> {
    let idle = || Ok(registers.read64(DDTP) & DDTP_BUSY == 0);
    wait_until(registers, "ddtp.busy = 0", idle)?;
    registers.write64(DDTP, value);
    wait_until(registers, "ddtp.busy = 0", idle)?;
    Ok(registers.read64(DDTP) & (MODE | DDTP_PPN))
}

/// Contents of the register `capabilities`.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    capabilities: u64,
}

impl Features {
    pub(super) fn read<R: Registers>(registers: &R) -> Result<Self, UnitProbeError> {
        let capabilities = registers.read64(CAPABILITIES);
        let read = IdRegisters::one("capabilities", capabilities);
        // Registers behind which no unit answers read as all ones.
        if capabilities == u64::MAX || capabilities >> 4 & 0xf != 1 {
            let kind = UnitKind::Riscv;
            return Err(UnitProbeError::NoUnit { kind, read });
        }
        let features = Self { capabilities };
        // END: there are both orders.
        if registers.read32(FCTL) & 1 == 1 && !features.bit(27) {
            return Err(UnitProbeError::BigEndian { read });
        }
        Ok(features)
    }

    const fn bit(self, bit: u32) -> bool {
        self.capabilities >> bit & 1 == 1
    }

    /// MSI_FLAT: device contexts are extended ones.
    pub(super) const fn extended(self) -> bool {
        self.bit(22)
    }

    /// AMO_HWAD: accessed and dirty bits are set.
    pub(super) const fn dirty(self) -> bool {
        self.bit(24)
    }

    /// Svpbmt.
    pub(super) const fn memory_types(self) -> bool {
        self.bit(15)
    }

    /// NL: entries above the leaves can be invalidated by address.
    pub(super) const fn upper_levels(self) -> bool {
        self.bit(42)
    }

    /// The pages of one command, as a power of two: S, ranges.
    ///
    /// Without it a command names an address, and the specification has all of the leaf there go. QEMU
    /// 10.0 keeps a large leaf in pieces of 4 KiB and drops the one that was named; so 4 KiB are counted on.
    pub(super) const fn most_pages(self) -> u32 {
        if self.bit(43) { super::command::ALL } else { 0 }
    }

    /// Levels of the process directory for these bits: the fewest that hold them, or the most that there
    /// are (PD8, PD17, PD20), and the bits that they hold.
    pub(super) fn process_levels(self, bits: u32) -> Option<(u32, u32)> {
        let mut offered = [(1, 8, 38), (2, 17, 39), (3, 20, 40)]
            .into_iter()
            .filter(|(_, _, bit)| bits > 0 && self.bit(*bit));
        offered
            .clone()
            .find(|(_, holds, _)| *holds >= bits)
            .or_else(|| offered.next_back())
            .map(|(levels, holds, _)| (levels, holds))
    }

    pub(super) fn capabilities(self, config: &Config) -> Result<UnitCapabilities, UnitProbeError> {
        let capabilities = self.capabilities;
        let mut can = UnitCapabilities::new();
        // Sv39, Sv48, Sv57 from bit 9 on, the second stage from bit 17 on: 3, 4 and 5 levels.
        for (format, first) in [(FormatId::RiscV, 9), (FormatId::RiscVG, 17)] {
            let levels = (capabilities >> first & 7) as u16;
            let Some(most) = levels.checked_ilog2() else {
                continue;
            };
            let large = (2..=most + 3).fold(PageSizes::from_log2(12), |sizes, level| {
                sizes.or(PageSizes::from_log2(3 + 9 * level))
            });
            can = can.with_format(FormatSupport {
                format,
                levels: levels << 3,
                // Svnapot is in every unit.
                page_sizes: large.or(PageSizes::from_log2(16)),
            });
        }
        if can.formats.iter().all(Option::is_none) {
            let read = IdRegisters::one("capabilities", capabilities);
            let kind = UnitKind::Riscv;
            return Err(UnitProbeError::Tables { kind, read });
        }
        // PAS.
        can.output_bits = ((capabilities >> 32 & 0x3f) as u32).min(56);
        // GSCID has 16 bits, PSCID 20.
        can.domain_bits = 16;
        // Process directories are for first-stage tables.
        let first = can.format(FormatId::RiscV).is_some();
        let processes = self.process_levels(config.pasid_bits).filter(|_| first);
        can.pasid_bits = processes.map_or(0, |(_, holds)| holds.min(config.pasid_bits));
        can.device_tlbs = self.bit(25);
        can.dirty_tracking = self.dirty();
        Ok(can)
    }
}
