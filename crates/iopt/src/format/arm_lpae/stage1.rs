//! Stage 1: the tables of TTBR0 and TTBR1.

#[cfg(feature = "alloc")]
use super::ArmConfig;
use super::{AF, ArmOptions, ArmStage1, DBM, Format, Granule, Stage, WRITABLE_OR_NOT};
use crate::error::BuildError;
use crate::prot::Prot;

/// AttrIndx[2:0], which field of MAIR has the memory type (D8.6.1).
const ATTR_INDEX_SHIFT: u32 = 2;
/// AP[1], requests of the lower privilege (EL0) are allowed (D8.4.1).
const AP_UNPRIVILEGED: u64 = 1 << 6;
/// AP[2], read-only (D8.4.1); with DBM: clean (D8.5.2).
const AP_READ_ONLY: u64 = WRITABLE_OR_NOT;
/// nG, not global: only for requests with the table's ASID (D8.16, "Global and process-specific"). Always
/// set: a global leaf would be found by devices of all domains, and survive a TLB invalidation by ASID.
const NOT_GLOBAL: u64 = 1 << 11;
/// PXN, no privileged instruction fetches (D8.4.1).
const PXN: u64 = 1 << 53;
/// UXN, no unprivileged instruction fetches (D8.4.1).
const UXN: u64 = 1 << 54;

/// MAIR attribute of normal memory, inner and outer write-back, read- and write-allocate (MAIR_EL1,
/// 0b1111_1111).
const MAIR_WRITE_BACK: u64 = 0xff;
/// MAIR attribute Device-nGnRE (MAIR_EL1, 0b0000_0100).
const MAIR_DEVICE: u64 = 0x04;
/// MAIR attribute of normal memory, inner and outer non-cacheable (MAIR_EL1, 0b0100_0100).
const MAIR_NON_CACHEABLE: u64 = 0x44;

/// Where the fields of MAIR are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage1 {
    memory_index: u8,
    device_index: u8,
    uncached_index: u8,
}

impl<G: Granule> ArmStage1<G> {
    /// Creates the format that `config` names, with output addresses as wide as the granule has them.
    #[cfg(feature = "alloc")]
    pub(crate) fn of(config: ArmConfig) -> Result<Self, BuildError> {
        let format = Self::new(u32::from(config.input_bits), G::ADDRESS_BITS)?;
        Ok(if config.upper { format.upper() } else { format })
    }

    /// Tables for the lowest 2^`input_bits` addresses (TTBR0), of 32 bits at least, with output
    /// addresses of `output_bits` bits. As many levels as that takes.
    ///
    /// MAIR has memory at index 0, devices at index 1 and memory that is not cached at index 2, as
    /// [`mair`](Self::mair) says.
    pub const fn new(input_bits: u32, output_bits: u32) -> Result<Self, BuildError> {
        let stage = Stage1 {
            memory_index: 0,
            device_index: 1,
            uncached_index: 2,
        };
        Self::of_stage(stage, input_bits, output_bits)
    }

    /// For the highest addresses instead (TTBR1).
    pub const fn upper(mut self) -> Self {
        self.upper = true;
        self
    }

    /// With the fields of MAIR, 0 to 7, that hold the types of memory, of devices and of memory that
    /// is not cached. Where the second is the first, [`Prot::DEVICE`] is refused; where the third is
    /// one of the others, [`Prot::UNCACHED`].
    pub const fn with_attribute_indices(
        mut self,
        memory: u8,
        device: u8,
        uncached: u8,
    ) -> Result<Self, BuildError> {
        let mut value = if memory > device { memory } else { device };
        if uncached > value {
            value = uncached;
        }
        if value > 7 {
            return Err(BuildError::Setting {
                format: Self::ID,
                what: "a MAIR index of",
                value: value as u64,
                min: 0,
                max: 7,
            });
        }
        self.stage = Stage1 {
            memory_index: memory,
            device_index: device,
            uncached_index: uncached,
        };
        Ok(self)
    }

    /// Value of MAIR for these tables, the other fields being 0 (Device-nGnRnE): write-back
    /// memory, Device-nGnRE and non-cacheable memory, each at its index.
    pub const fn mair(&self) -> u64 {
        let stage = self.stage;
        let mut mair = MAIR_WRITE_BACK << (8 * stage.memory_index as u32);
        if stage.has_devices() {
            mair |= MAIR_DEVICE << (8 * stage.device_index as u32);
        }
        if stage.has_uncached() {
            mair |= MAIR_NON_CACHEABLE << (8 * stage.uncached_index as u32);
        }
        mair
    }
}

impl Stage1 {
    const fn has_devices(&self) -> bool {
        self.device_index != self.memory_index
    }

    const fn has_uncached(&self) -> bool {
        self.uncached_index != self.memory_index && self.uncached_index != self.device_index
    }
}

impl Stage for Stage1 {
    const FIRST: bool = true;
    const CONCATENATED: u32 = 0;
    const WRITABLE: u64 = 0;

    #[inline]
    fn leaf_bits<G: Granule>(&self, options: &ArmOptions, prot: Prot) -> Option<u64> {
        let device = prot.contains(Prot::DEVICE);
        let uncached = prot.contains(Prot::UNCACHED);
        let executable = prot.contains(Prot::EXECUTE);
        let privileged = prot.contains(Prot::PRIVILEGED);
        // There is no write-only leaf, nothing that forces a device to snoop, and instructions are
        // not fetched from devices (D8.6.1).
        if !prot.contains(Prot::READ)
            || prot.contains(Prot::COHERENT)
            || device && (executable || uncached || !self.has_devices())
            || uncached && !self.has_uncached()
        {
            return None;
        }
        let index = match (device, uncached) {
            (true, _) => self.device_index,
            (false, true) => self.uncached_index,
            (false, false) => self.memory_index,
        };
        let mut bits = AF
            | NOT_GLOBAL
            | u64::from(index) << ATTR_INDEX_SHIFT
            | options.shareability_bits::<G>(device || uncached);
        if !privileged {
            bits |= AP_UNPRIVILEGED;
        }
        if !prot.contains(Prot::WRITE) {
            bits |= AP_READ_ONLY;
        } else if options.dirty {
            bits |= DBM | AP_READ_ONLY;
        }
        // Where unprivileged requests may not read they could still execute (D8.4.1): UXN.
        if !executable || privileged {
            bits |= UXN;
        }
        if !executable {
            bits |= PXN;
        }
        Some(bits)
    }

    fn prot(&self, word: u64, marked: bool) -> Prot {
        let privileged = word & AP_UNPRIVILEGED == 0;
        let not_executable = if privileged { PXN } else { UXN | PXN };
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, word & AP_READ_ONLY == 0 || marked);
        prot.set(Prot::EXECUTE, word & not_executable == 0);
        prot.set(Prot::PRIVILEGED, privileged);
        let index = word >> ATTR_INDEX_SHIFT & 7;
        let has = |kind, at: u8| kind && index == u64::from(at);
        prot.set(Prot::DEVICE, has(self.has_devices(), self.device_index));
        prot.set(
            Prot::UNCACHED,
            has(self.has_uncached(), self.uncached_index),
        );
        prot
    }
}
