//! Stage 2: from intermediate physical addresses to physical ones (VTTBR).

use runs::PageSizes;

use super::super::{Aperture, BreakBeforeMake, Entry, Format, FormatId};
use super::{AF, ArmConfig, ArmOptions, DBM, Geometry, Granule, VALID, WAS_DIRTY};
use crate::error::BuildError;
use crate::prot::Prot;

/// MemAttr[3:0], the memory type (D8.6.5).
const MEM_ATTR_SHIFT: u32 = 2;
/// S2AP[0], reads allowed (D8.4.2).
const S2AP_READ: u64 = 1 << 6;
/// S2AP[1], writes allowed (D8.4.2); with DBM: dirty (D8.5.2).
const S2AP_WRITE: u64 = 1 << 7;
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

/// The most tables that can stand side by side as the root, as a power of two (D8.2.6).
const CONCATENATED: u32 = 4;

/// Stage 2 tables with granule `G`.
///
/// Up to 16 tables may stand side by side as the root, which saves a level. Leaves know no
/// privilege.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmStage2<G> {
    geometry: Geometry<G>,
    options: ArmOptions,
    forced_write_back: bool,
}

impl<G: Granule> ArmStage2<G> {
    /// What the name says, with output addresses as wide as the granule has them.
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
        let max = G::ADDRESS_BITS;
        match Geometry::new(Self::ID, input_bits, output_bits, max, CONCATENATED) {
            Ok(geometry) => Ok(Self {
                geometry,
                options: ArmOptions::PLAIN,
                forced_write_back: false,
            }),
            Err(cause) => Err(cause),
        }
    }

    /// With so many levels: the root must resolve at least one bit, and consist of at most 16
    /// tables (D8.2.6).
    pub const fn with_levels(mut self, levels: u8) -> Result<Self, BuildError> {
        let input_bits = self.geometry.input_bits as u32;
        // The most levels leave one bit for the root.
        let most = (input_bits - G::LOG2 - 1) / G::STRIDE + 1;
        let most = if most as u8 > G::STAGE2_LEVELS {
            G::STAGE2_LEVELS
        } else {
            most as u8
        };
        let fewest = Geometry::<G>::levels_for(input_bits, CONCATENATED);
        if levels < fewest || levels > most {
            return Err(BuildError::Levels {
                format: Self::ID,
                levels,
            });
        }
        self.geometry.levels = levels;
        Ok(self)
    }

    /// With these options.
    pub const fn with_options(mut self, options: ArmOptions) -> Self {
        self.options = options;
        self
    }

    /// For a unit that forces write-back (STE.S2FWB, HCR_EL2.FWB): [`Prot::COHERENT`] can be
    /// expressed.
    pub const fn with_forced_write_back(mut self) -> Self {
        self.forced_write_back = true;
        self
    }
}

impl<G: Granule> Format for ArmStage2<G> {
    const ID: FormatId = FormatId::ArmStage2(ArmConfig {
        granule: G::KIND,
        input_bits: G::ADDRESS_BITS as u8,
        upper: false,
    });
    const ENTRY_BYTES: usize = 8;
    const TABLE_BYTES: u64 = 1 << G::LOG2;
    const GRANULE_LOG2: u32 = G::LOG2;
    const MIN_LEVELS: u8 = Geometry::<G>::levels_for(32, CONCATENATED);
    const MAX_LEVELS: u8 = G::STAGE2_LEVELS;
    const OUTPUT_BITS: u32 = G::ADDRESS_BITS;
    // S2AP[1] changes only where DBM is set; it is a permission elsewhere.
    const HARDWARE_BITS: u64 = AF | S2AP_WRITE | WAS_DIRTY;
    const ACCESSED: u64 = AF;
    const CLEAN: Option<(u64, u64)> = Some((WAS_DIRTY | S2AP_WRITE, 0));
    const GROUPS_ADVANCE: bool = true;
    const LINEAR_LOG2: u32 = G::LINEAR_LOG2;

    fn id(&self) -> FormatId {
        FormatId::ArmStage2(self.geometry.config())
    }

    #[inline(always)]
    fn levels(&self) -> u8 {
        self.geometry.levels
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        u32::from(self.geometry.output_bits)
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.options.break_before_make
    }

    #[inline(always)]
    fn aperture(&self) -> Aperture {
        self.geometry.aperture()
    }

    #[inline(always)]
    fn shift(level: usize) -> u32 {
        super::shift::<G>(level)
    }

    #[inline(always)]
    fn entries(&self, level: usize) -> usize {
        self.geometry.entries(level)
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        super::leaf_sizes::<G>(level)
    }

    #[inline]
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
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
        let mut bits = AF
            | mem_attr << MEM_ATTR_SHIFT
            | self.options.shareability_bits::<G>(device || uncached);
        if prot.contains(Prot::READ) {
            bits |= S2AP_READ;
        }
        if prot.contains(Prot::WRITE) {
            bits |= if self.options.dirty { DBM } else { S2AP_WRITE };
        }
        if !executable {
            bits |= XN;
        }
        Some(bits)
    }

    fn prot(&self, _level: usize, word: u64) -> Prot {
        let mem_attr = word >> MEM_ATTR_SHIFT & 0b1111;
        // Without FWB two bits say that it is a device's, with FWB one (D8.6.5, D8.6.6).
        let memory = if self.forced_write_back {
            0b0100
        } else {
            0b1100
        };
        let marked = self.options.dirty && word & DBM != 0;
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

    #[inline(always)]
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        super::leaf::<G>(level, pa, log2, bits)
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        1 << log2
    }

    #[inline(always)]
    fn table(&self, _level: usize, table: u64) -> u64 {
        super::table::<G>(table)
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        super::decode::<G>(level, word)
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        word & VALID == 0
    }

    fn broken(&self, level: usize, word: u64) -> u64 {
        super::broken(&self.options, level, word)
    }

    #[inline]
    fn keeps_dirty(&self) -> bool {
        self.options.dirty
    }

    /// It keeps dirty state and S2AP\[1\] is 1 (D8.5.2), or did so before it became read-only.
    #[inline(always)]
    fn is_dirty(word: u64) -> bool {
        word & (DBM | S2AP_WRITE) == DBM | S2AP_WRITE || word & WAS_DIRTY != 0
    }

    #[inline(always)]
    fn cleaned(word: u64) -> u64 {
        let clean = if word & DBM != 0 {
            word & !S2AP_WRITE
        } else {
            word
        };
        clean & !WAS_DIRTY
    }

    #[inline(always)]
    fn dirtied(word: u64) -> u64 {
        if word & DBM != 0 {
            word | S2AP_WRITE
        } else {
            word | WAS_DIRTY
        }
    }
}
