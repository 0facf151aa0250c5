//! Stage 2: from intermediate physical addresses to physical ones (VTTBR).

use super::{AF, ArmOptions, ArmStage2, DBM, Format, Granule, Stage, WRITABLE_OR_NOT};
#[cfg(feature = "alloc")]
use super::{ArmConfig, FormatId};
use crate::error::BuildError;
use crate::prot::Prot;

/// MemAttr[3:0], the memory type (D8.6.5).
const MEM_ATTR_SHIFT: u32 = 2;
/// S2AP[0], reads allowed (D8.4.2).
const S2AP_READ: u64 = 1 << 6;
/// S2AP[1], writes allowed (D8.4.2); with DBM: dirty (D8.5.2).
const S2AP_WRITE: u64 = WRITABLE_OR_NOT;
/// XN[1:0] at 54:53. 0b10: no instruction fetches at all, with FEAT_XNX and without (D8.4.2).
const XN: u64 = 0b10 << 53;
const XN_FIELD: u64 = 0b11 << 53;

/// MemAttr without FWB: Device-nGnRE (D8.6.5, MemAttr[3:2] 0b00).
const DEVICE: u64 = 0b0001;
/// MemAttr without FWB: inner and outer write-back; stage 1 may ask for less.
const WRITE_BACK: u64 = 0b1111;
/// MemAttr without FWB: inner and outer non-cacheable (D8.6.5). With FWB: non-cacheable, whatever
/// stage 1, or the device, asks for (D8.6.6).
const NON_CACHEABLE: u64 = 0b0101;
/// MemAttr with FWB: what stage 1, or the device, asks for (D8.6.6).
const AS_ASKED: u64 = 0b0111;
/// MemAttr with FWB: write-back, whatever stage 1, or the device, asks for.
const FORCED_WRITE_BACK: u64 = 0b0110;

/// Settings of the unit for stage 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage2 {
    forced_write_back: bool,
}

impl<G: Granule> ArmStage2<G> {
    /// Creates the format that `config` names, with output addresses as wide as the granule has them.
    #[cfg(feature = "alloc")]
    pub(crate) fn of(config: ArmConfig, levels: u8) -> Result<Self, BuildError> {
        if config.upper {
            // Only stage 1 has a second root for the top of the address space.
            return Err(BuildError::Setting {
                format: FormatId::ArmStage2(config),
                what: "a root for the top",
                value: 1,
                min: 0,
                max: 0,
            });
        }
        Self::new(u32::from(config.input_bits), G::ADDRESS_BITS)?.with_levels(levels)
    }

    /// Tables for 2^`input_bits` addresses, of 32 bits at least, with output addresses of
    /// `output_bits` bits. As few levels as that takes, with tables side by side as the root.
    pub const fn new(input_bits: u32, output_bits: u32) -> Result<Self, BuildError> {
        let stage = Stage2 {
            forced_write_back: false,
        };
        Self::of_stage(stage, input_bits, output_bits)
    }

    /// With so many levels: the root must resolve at least one bit, and consist of at most 16
    /// tables (D8.2.6).
    pub const fn with_levels(mut self, levels: u8) -> Result<Self, BuildError> {
        let input_bits = self.input_bits as u32;
        // The most levels leave one bit for the root.
        let most = (input_bits - G::LOG2 - 1) / G::STRIDE + 1;
        let most = if most as u8 > Self::MAX_LEVELS {
            Self::MAX_LEVELS
        } else {
            most as u8
        };
        let fewest = Self::levels_for(input_bits);
        if levels < fewest || levels > most {
            return Err(BuildError::Levels {
                format: Self::ID,
                levels,
            });
        }
        self.levels = levels;
        Ok(self)
    }

    /// For a unit that forces write-back (STE.S2FWB, HCR_EL2.FWB): [`Prot::COHERENT`] can be
    /// expressed.
    pub const fn with_forced_write_back(mut self) -> Self {
        self.stage.forced_write_back = true;
        self
    }
}

impl Stage for Stage2 {
    const FIRST: bool = false;
    // D8.2.6: up to 16.
    const CONCATENATED: u32 = 4;
    const WRITABLE: u64 = S2AP_WRITE;

    #[inline]
    fn leaf_bits<G: Granule>(&self, options: &ArmOptions, prot: Prot) -> Option<u64> {
        let device = prot.contains(Prot::DEVICE);
        let executable = prot.contains(Prot::EXECUTE);
        let coherent = prot.contains(Prot::COHERENT);
        let uncached = prot.contains(Prot::UNCACHED);
        // Privilege means nothing to stage 2; instructions are fetched only from memory that can be
        // read (D8.4.2), and not from devices (D8.6.1); what is forced is memory that is cached.
        if !prot.intersects(Prot::RW)
            || prot.contains(Prot::PRIVILEGED)
            || executable && (device || !prot.contains(Prot::READ))
            || coherent && (device || uncached || !self.forced_write_back)
            || device && uncached
        {
            return None;
        }
        let mem_attr = match (device, self.forced_write_back) {
            (true, _) => DEVICE,
            (false, _) if uncached => NON_CACHEABLE,
            (false, false) => WRITE_BACK,
            (false, true) if coherent => FORCED_WRITE_BACK,
            (false, true) => AS_ASKED,
        };
        let mut bits =
            AF | mem_attr << MEM_ATTR_SHIFT | options.shareability_bits::<G>(device || uncached);
        if prot.contains(Prot::READ) {
            bits |= S2AP_READ;
        }
        if prot.contains(Prot::WRITE) {
            bits |= if options.dirty { DBM } else { S2AP_WRITE };
        }
        if !executable {
            bits |= XN;
        }
        Some(bits)
    }

    fn prot(&self, word: u64, marked: bool) -> Prot {
        let mem_attr = word >> MEM_ATTR_SHIFT & 0b1111;
        // Without FWB two bits say that it is a device's, with FWB one (D8.6.5, D8.6.6).
        let memory = if self.forced_write_back {
            0b0100
        } else {
            0b1100
        };
        let forced = self.forced_write_back && mem_attr == FORCED_WRITE_BACK;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, word & S2AP_READ != 0);
        prot.set(Prot::WRITE, word & S2AP_WRITE != 0 || marked);
        prot.set(Prot::EXECUTE, word & XN_FIELD == 0 && word & S2AP_READ != 0);
        prot.set(Prot::DEVICE, mem_attr & memory == 0);
        prot.set(Prot::COHERENT, forced);
        prot.set(Prot::UNCACHED, mem_attr == NON_CACHEABLE);
        prot
    }
}
