//! The registers of VT-d, and what they say the unit can do.
//!
//! VT-d specification, chapter 11 "Register Descriptions": each group below names the register's
//! section by its title. "Stage" is what revisions before 4.0 called "level".

use iopt::FormatId;
use runs::PageSizes;

use super::{Config, Mode};
use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::handover::UnitKind;
use crate::registers::Registers;
use crate::setup::{IdRegisters, UnitProbeError};

// Offsets.
pub(super) const VER: usize = 0x00;
pub(super) const CAP: usize = 0x08;
pub(super) const ECAP: usize = 0x10;
pub(super) const GCMD: usize = 0x18;
pub(super) const GSTS: usize = 0x1c;
pub(super) const RTADDR: usize = 0x20;
pub(super) const CCMD: usize = 0x28;
pub(super) const FSTS: usize = 0x34;
pub(super) const PMEN: usize = 0x64;
pub(super) const IQH: usize = 0x80;
pub(super) const IQT: usize = 0x88;
pub(super) const IQA: usize = 0x90;
pub(super) const IQERCD: usize = 0xb0;

// Global Command and Global Status Register.
/// TE, TES: translation.
pub(super) const TRANSLATION: u32 = 1 << 31;
/// SRTP, RTPS: the root table's address is taken over.
pub(super) const SET_ROOT: u32 = 1 << 30;
/// WBF, WBFS: the unit's write buffers are flushed; the status is 1 as long as that lasts.
pub(super) const FLUSH_WRITES: u32 = 1 << 27;
/// QIE, QIES: the invalidation queue.
pub(super) const QUEUE: u32 = 1 << 26;
/// Bits that are states, and are written again with each command. The others are one-shot commands.
pub(super) const STATES: u32 = 0x96ff_ffff;

// Root Table Address Register, field TTM (11:10).
/// Scalable mode; legacy mode is 0.
pub(super) const SCALABLE: u64 = 1 << 10;

// Protected Memory Enable Register.
/// EPM.
pub(super) const PROTECT: u32 = 1 << 31;
/// PRS.
pub(super) const PROTECTED: u32 = 1;

/// Invalidation Queue Address Register, DW: descriptors of 256 bits.
pub(super) const WIDE: u64 = 1 << 11;

// Fault Status Register.
/// PFO: a fault was not recorded.
pub(super) const FAULTS_LOST: u32 = 1;
/// PPF: a record is pending.
pub(super) const FAULT_PENDING: u32 = 1 << 1;
/// IQE, ICE, ITE: the queue has stopped.
pub(super) const QUEUE_ERRORS: [(u32, &str); 3] = [
    (1 << 4, "IQE (invalidation queue error)"),
    (1 << 5, "ICE (invalidation completion error)"),
    (1 << 6, "ITE (invalidation time-out error)"),
];

/// Contents of the Capability and Extended Capability Registers.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    cap: u64,
    ecap: u64,
}

/// A field of `width` bits.
const fn field(word: u64, low: u32, width: u32) -> u64 {
    word >> low & ((1 << width) - 1)
}

const fn bit(word: u64, bit: u32) -> bool {
    word >> bit & 1 == 1
}

impl Features {
    pub(super) fn read<R: Registers>(registers: &R) -> Result<Self, UnitProbeError> {
        let version = registers.read32(VER);
        let (cap, ecap) = (registers.read64(CAP), registers.read64(ECAP));
        // Registers behind which no unit answers read as all ones.
        if version == 0 || version == u32::MAX || cap == u64::MAX {
            let read = IdRegisters::two(("VER", version.into()), ("CAP", cap));
            let kind = UnitKind::Vtd;
            return Err(UnitProbeError::NoUnit { kind, read });
        }
        Ok(Self { cap, ecap })
    }

    /// CM: what is not present, or faulty, may be cached.
    pub(super) const fn caching_mode(self) -> bool {
        bit(self.cap, 7)
    }

    /// RWBF: stores must be flushed out of the unit's write buffers.
    pub(super) const fn write_buffers(self) -> bool {
        bit(self.cap, 4)
    }

    /// PLMR, PHMR: there are protected memory regions.
    pub(super) const fn protected_memory(self) -> bool {
        field(self.cap, 5, 2) != 0
    }

    /// PSI: pages can be invalidated; MAMV: 2^so many at once.
    pub(super) const fn page_mask(self) -> Option<u32> {
        if bit(self.cap, 39) {
            Some(field(self.cap, 48, 6) as u32)
        } else {
            None
        }
    }

    /// DWD and DRD: what an invalidation of the IOTLB can drain, (reads, writes).
    pub(super) const fn draining(self) -> (bool, bool) {
        (bit(self.cap, 55), bit(self.cap, 54))
    }

    /// FRO: where the fault records begin. NFR: how many there are.
    pub(super) const fn fault_records(self) -> (usize, u32) {
        let offset = field(self.cap, 24, 10) as usize * 16;
        (offset, field(self.cap, 40, 8) as u32 + 1)
    }

    /// QI.
    pub(super) const fn queue(self) -> bool {
        bit(self.ecap, 1)
    }

    /// DT: the unit answers translation requests, and invalidates in devices, for which it takes the queue.
    pub(super) const fn device_tlbs(self) -> bool {
        bit(self.ecap, 2) && self.queue()
    }

    /// DIT: invalidations in devices are counted by physical function.
    pub(super) const fn throttles(self) -> bool {
        bit(self.ecap, 41)
    }

    /// PASID and PSS: bits of a PASID, in scalable mode.
    const fn pasid_bits(self) -> u32 {
        if bit(self.ecap, 40) {
            field(self.ecap, 35, 5) as u32 + 1
        } else {
            0
        }
    }

    /// IRO: where the IVA register is; the IOTLB register follows.
    pub(super) const fn iotlb_registers(self) -> usize {
        field(self.ecap, 8, 10) as usize * 16
    }

    /// SMPWCS: in scalable mode the unit can read tables through the caches.
    pub(super) const fn snooped_walks(self) -> bool {
        bit(self.ecap, 48)
    }

    /// SSADS: the second stage can keep accessed and dirty bits.
    pub(super) const fn second_stage_dirty(self) -> bool {
        bit(self.ecap, 45)
    }

    /// Capabilities of the unit as it is configured.
    pub(super) fn capabilities(self, config: &Config) -> Result<UnitCapabilities, UnitProbeError> {
        let Self { cap, ecap } = self;
        let mode = config.mode;
        // SMTS, and the stage: SSTS or FSTS. The queue is there in every unit with scalable mode.
        let offered = match mode {
            Mode::Legacy => true,
            Mode::ScalableSecond => bit(ecap, 43) && bit(ecap, 46) && self.queue(),
            Mode::ScalableFirst => bit(ecap, 43) && bit(ecap, 47) && self.queue(),
        };
        let (format, levels) = match mode {
            // SAGAW: bit 1 for 3 levels, and so on.
            Mode::Legacy | Mode::ScalableSecond => {
                (FormatId::VtdSs, (field(cap, 9, 3) as u16) << 3)
            }
            // FS5LP.
            Mode::ScalableFirst => (FormatId::X86_64, 1 << 4 | u16::from(bit(cap, 60)) << 5),
        };
        if !offered || levels == 0 {
            let (mode, read) = (mode.name(), IdRegisters::two(("CAP", cap), ("ECAP", ecap)));
            return Err(UnitProbeError::Mode { mode, read });
        }
        let offered = match mode {
            Mode::Legacy => 0,
            // A PASID has 20 bits at most.
            Mode::ScalableSecond | Mode::ScalableFirst => self.pasid_bits().min(20),
        };
        if config.pasid_bits > offered {
            let asked = config.pasid_bits;
            return Err(UnitProbeError::Pasids { asked, offered });
        }
        let larger = match mode {
            // SSLPS.
            Mode::Legacy | Mode::ScalableSecond => field(cap, 34, 2),
            // 2 MiB always; FS1GP.
            Mode::ScalableFirst => 1 | field(cap, 56, 1) << 1,
        };
        let page_sizes =
            PageSizes::from_bits(1 << 12 | (larger & 1) << 21 | (larger >> 1 & 1) << 30);
        let support = FormatSupport {
            format,
            levels,
            page_sizes,
        };
        let mut can = UnitCapabilities::new().with_format(support);
        can.output_bits = config.host_bits.min(52);
        can.input_bits = match mode {
            // MGAW.
            Mode::Legacy | Mode::ScalableSecond => field(cap, 16, 6) as u32 + 1,
            // Sign-extended addresses: all 64 bits matter.
            Mode::ScalableFirst => 64,
        };
        // ND; 7 is reserved.
        can.domain_bits = 4 + 2 * (field(cap, 0, 3) as u32).min(6);
        // C.
        can.coherent_walks = bit(ecap, 0) && (mode == Mode::Legacy || self.snooped_walks());
        can.dirty_tracking = match mode {
            Mode::Legacy => false,
            Mode::ScalableSecond => self.second_stage_dirty(),
            Mode::ScalableFirst => true,
        };
        // SC; the bit is one of second-stage leaves.
        can.snoop_control = bit(ecap, 7) && format == FormatId::VtdSs;
        can.pasid_bits = config.pasid_bits;
        can.device_tlbs = self.device_tlbs();
        // A flush of the write buffers comes with each invalidation, so it is asked for in the same
        // way (see the module's head).
        can.caches_not_present = self.caching_mode() || self.write_buffers();
        Ok(can)
    }
}
