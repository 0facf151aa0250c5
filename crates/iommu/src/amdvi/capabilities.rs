//! The registers of AMD-Vi, and what they say the unit can do.
//!
//! AMD IOMMU specification (48882), section 3.4 "IOMMU MMIO Registers"; fields have its names.

use iopt::FormatId;
use runs::PageSizes;

use super::{Config, Mode};
use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::handover::UnitKind;
use crate::registers::Registers;
use crate::setup::{IdRegisters, UnitProbeError};

// Offsets. All registers have 64 bits.
pub(super) const DEVICE_TABLE: usize = 0x00;
pub(super) const COMMANDS: usize = 0x08;
pub(super) const EVENTS: usize = 0x10;
pub(super) const CONTROL: usize = 0x18;
pub(super) const EXCLUSION: usize = 0x20;
pub(super) const FEATURES: usize = 0x30;
pub(super) const COMMAND_HEAD: usize = 0x2000;
pub(super) const COMMAND_TAIL: usize = 0x2008;
pub(super) const EVENT_HEAD: usize = 0x2010;
pub(super) const EVENT_TAIL: usize = 0x2018;
pub(super) const STATUS: usize = 0x2020;

// Control Register.
/// IommuEn.
pub(super) const TRANSLATE: u64 = 1;
/// EventLogEn.
pub(super) const LOG: u64 = 1 << 2;
/// Coherent: the device table is read through the caches.
pub(super) const COHERENT: u64 = 1 << 10;
/// CmdBufEn.
pub(super) const FETCH: u64 = 1 << 12;
/// GTEn: guest tables are walked.
pub(super) const GUEST: u64 = 1 << 16;
/// HtTunEn, PassPW, ResPassPW, Isoc: what firmware knows about the machine's links.
pub(super) const LINKS: u64 = 1 << 1 | 1 << 8 | 1 << 9 | 1 << 11;

// Status Register.
/// EventOverflow: an event was lost, and no other is logged until software has restarted the log.
/// Writing 1 clears.
pub(super) const OVERFLOW: u64 = 1;
/// EventOverflow, EventLogInt, ComWaitInt: what is cleared by 1.
pub(super) const PENDING: u64 = 0b111;
/// EventLogRun.
pub(super) const LOGGING: u64 = 1 << 3;
/// CmdBufRun.
pub(super) const FETCHING: u64 = 1 << 4;

/// ComLen, EventLen: 2^8 entries of 16 bytes, the least that there can be, and one page.
pub(super) const RING_LENGTH: u64 = 8 << 56;
/// Entries of command buffer and event log.
pub(super) const RING: usize = 256;

/// An offset in a ring, from the place.
pub(super) const fn offset(place: usize) -> u64 {
    (place * 16) as u64
}

/// The place that a head or tail register names, whatever it says: fields are bits 18:4, and QEMU lets
/// its command head stand behind the last place for a while.
pub(super) fn place<R: Registers>(registers: &R, register: usize) -> usize {
    (registers.read64(register) >> 4) as usize % RING
}

/// Writes the Control Register, all but the bits that are firmware's.
pub(super) fn control<R: Registers>(registers: &R, set: u64, clear: u64) {
    let kept = registers.read64(CONTROL) & (LINKS | TRANSLATE | LOG | FETCH | COHERENT | GUEST);
    registers.write64(CONTROL, kept & !clear | set);
}

/// Contents of the Extended Feature Register. Units without it (Capability Header, EFRSup = 0) read as 0 there, and so
/// offer the least.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    features: u64,
}

impl Features {
    pub(super) fn read<R: Registers>(registers: &R) -> Result<Self, UnitProbeError> {
        let features = registers.read64(FEATURES);
        // Registers behind which no unit answers read as all ones.
        if features == u64::MAX {
            let (kind, read) = (UnitKind::AmdVi, Self { features }.read_out());
            return Err(UnitProbeError::NoUnit { kind, read });
        }
        Ok(Self { features })
    }

    const fn read_out(self) -> IdRegisters {
        IdRegisters::one("Extended Feature", self.features)
    }

    const fn bit(self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    /// IASup: all can be invalidated by one command.
    pub(super) const fn invalidates_all(self) -> bool {
        self.bit(6)
    }

    /// HASup, HDSup: host tables keep accessed and dirty bits.
    pub(super) const fn dirty(self) -> bool {
        self.bit(49) && self.bit(52)
    }

    /// HATS: the most levels of host tables.
    const fn most_levels(self) -> Option<u32> {
        match self.features >> 10 & 3 {
            3 => None,
            more => Some(4 + more as u32),
        }
    }

    fn host(self) -> Result<FormatSupport, UnitProbeError> {
        let (kind, read) = (UnitKind::AmdVi, self.read_out());
        let most = self
            .most_levels()
            .ok_or(UnitProbeError::Tables { kind, read })?;
        Ok(FormatSupport {
            format: FormatId::AmdV1,
            levels: (1 << (most + 1)) - 2,
            // Section 2.2.3: any power of two of which an entry's 52 bits can say the size.
            page_sizes: PageSizes::from_log2_range(12, 51),
        })
    }

    /// GTSup and GIoSup.
    fn guest(self) -> Result<FormatSupport, UnitProbeError> {
        if !(self.bit(4) && self.bit(48) && self.invalidates_all()) {
            let (mode, read) = ("guest tables for all requests", self.read_out());
            return Err(UnitProbeError::Mode { mode, read });
        }
        Ok(FormatSupport {
            format: FormatId::X86_64,
            levels: 1 << 4,
            page_sizes: PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30),
        })
    }

    /// PASmax, as far as GLXSup allows: 9 bits for each level of guest CR3 tables.
    fn pasid_bits(self) -> u32 {
        let most = (self.features >> 32 & 0x1f) as u32 + 1;
        let levels = (self.features >> 14 & 3) as u32 + 1;
        most.min(9 * levels.min(3)).min(20)
    }

    pub(super) fn capabilities(self, config: &Config) -> Result<UnitCapabilities, UnitProbeError> {
        let (support, pasid_bits) = match config.mode {
            Mode::Host => (self.host()?, 0),
            Mode::Guest => (self.guest()?, self.pasid_bits()),
        };
        if config.pasid_bits > pasid_bits {
            let (asked, offered) = (config.pasid_bits, pasid_bits);
            return Err(UnitProbeError::Pasids { asked, offered });
        }
        let host = config.mode == Mode::Host;
        let mut can = UnitCapabilities::new().with_format(support);
        can.output_bits = config.host_bits.min(52);
        can.input_bits = match config.mode {
            Mode::Host => config.input_bits.min(64),
            // Sign-extended addresses: all 64 bits matter.
            Mode::Guest => 64,
        };
        can.pasid_bits = config.pasid_bits;
        can.domain_bits = 16;
        // SD = 0 in our device table entries: tables are read through the caches.
        can.coherent_walks = true;
        can.dirty_tracking = host && self.dirty();
        // FC, in every leaf of a host table.
        can.snoop_control = host;
        can.device_tlbs = host && config.device_tlbs;
        can.caches_not_present = config.caches_not_present;
        Ok(can)
    }
}
