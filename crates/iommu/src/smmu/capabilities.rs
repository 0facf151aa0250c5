//! The registers of an SMMU, and what they say the unit can do.
//!
//! Arm SMMU architecture (IHI 0062); fields have its names, and section numbers are those of issue B: 10.6
//! for global register space 0, 11.2 for space 1, 15.5 for the context banks. Newer registers and fields
//! (CBA2R, TCR2, TLBIIPAS2, extended stream ids, AArch64 tables) are under the register's name in later
//! issues.
//!
//! The space is cut in pages of 4 or 64 KiB (IDR1.PAGESIZE). Global register spaces 0 and 1 are its
//! first two; context banks have a page each, from the middle of the space on (IDR1.NUMPAGENDXB).

use core::ops::RangeInclusive;

use iopt::format::{
    ArmConfig, ArmGranule, ArmStage1, ArmStage2, ArmV7s, BreakBeforeMake, Format, FormatId, K4,
    K16, K64,
};
use runs::PageSizes;

use super::Version;
use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::handover::UnitKind;
use crate::registers::Registers;
use crate::setup::{IdRegisters, UnitProbeError};

// Global register space 0.
pub(super) const CR0: usize = 0x00;
pub(super) const IDR0: usize = 0x20;
pub(super) const IDR1: usize = 0x24;
pub(super) const IDR2: usize = 0x28;
pub(super) const GFAR: usize = 0x40;
pub(super) const GFSR: usize = 0x48;
pub(super) const GFSYNR0: usize = 0x50;
pub(super) const GFSYNR1: usize = 0x54;
pub(super) const TLBIVMID: usize = 0x64;
pub(super) const TLBIALLNSNH: usize = 0x68;
pub(super) const TLBIALLH: usize = 0x6c;
pub(super) const TLBGSYNC: usize = 0x70;
pub(super) const TLBGSTATUS: usize = 0x74;
pub(super) const SMR: usize = 0x800;
pub(super) const S2CR: usize = 0xc00;

// Global register space 1, from its beginning.
pub(super) const CBAR: usize = 0x000;
pub(super) const CBFRSYNRA: usize = 0x400;
pub(super) const CBA2R: usize = 0x800;

// A context bank, from its beginning.
pub(super) const SCTLR: usize = 0x00;
pub(super) const TCR2: usize = 0x10;
pub(super) const TTBR0: usize = 0x20;
pub(super) const TTBR1: usize = 0x28;
pub(super) const TCR: usize = 0x30;
pub(super) const CONTEXTIDR: usize = 0x34;
pub(super) const MAIR0: usize = 0x38;
pub(super) const MAIR1: usize = 0x3c;
pub(super) const FSR: usize = 0x58;
pub(super) const FAR: usize = 0x60;
pub(super) const FSYNR0: usize = 0x68;
pub(super) const TLBIVA: usize = 0x600;
pub(super) const TLBIASID: usize = 0x610;
pub(super) const TLBIVAL: usize = 0x620;
pub(super) const TLBIIPAS2: usize = 0x630;
pub(super) const TLBIIPAS2L: usize = 0x638;
pub(super) const TLBSYNC: usize = 0x7f0;
pub(super) const TLBSTATUS: usize = 0x7f4;

// CR0 (10.6.3).
/// CLIENTPD: nothing is translated, everything passes.
pub(super) const BYPASS: u32 = 1;
/// EXIDENABLE: stream ids and masks of 16 bits.
pub(super) const EXTENDED: u32 = 1 << 3;
/// USFCFG: a stream that matches nothing faults.
pub(super) const STRICT: u32 = 1 << 10;
/// GFRE and GCFGFRE (global faults are answered with an abort), VMIDPNE and PTM (VMIDs and TLBs are ours,
/// and not the processors'), SMCFCFG (a stream that matches twice faults). No interrupts, no stalls, VMIDs
/// of 8 bits.
pub(super) const TRANSLATE: u32 = STRICT | 1 << 1 | 1 << 4 | 1 << 11 | 1 << 12 | 1 << 21;
/// TRANSIENTCFG, MemAttr, MTCFG, SHCFG, RACFG, WACFG, NSCFG: the attributes of what passes, which firmware
/// knows.
pub(super) const ATTRIBUTES: u32 = 0x3fdf_00c0;

/// The most that there can be of stream mapping registers, and of context banks (IDR0.NUMSMRG,
/// IDR1.NUMCB).
pub(super) const MOST: usize = 128;

/// How the unit reads a table (FSR.FORMAT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// AArch32 short descriptors.
    Short,
    /// AArch32 long descriptors.
    Long,
    /// AArch64.
    Long64,
}

/// The geometry of a table: what is offered of it, and its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) scheme: Scheme,
    pub(super) second: bool,
    /// The smallest page, as a power of two.
    pub(super) page: u32,
    /// Bits that a table resolves.
    pub(super) stride: u32,
    pub(super) input_bits: u32,
}

impl Shape {
    /// Bytes that an entry at `level` spans, as a power of two.
    pub(super) const fn shift(self, level: u32) -> u32 {
        self.page + self.stride * level
    }
}

/// Contents of IDR0, IDR1 and IDR2 (10.6.1).
#[derive(Clone, Copy, Debug)]
pub struct Features {
    version: Version,
    idr0: u32,
    idr1: u32,
    idr2: u32,
    /// The bits that a stream id can have, once they were looked for.
    pub(super) ids: u16,
}

/// A field of `width` bits.
const fn field(word: u32, low: u32, width: u32) -> u32 {
    word >> low & ((1 << width) - 1)
}

/// A size of addresses (IDR2: IAS, OAS, UBS). A bus of 49 bits has 48 and a sign.
const fn size(field: u32) -> u32 {
    match field {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        _ => 48,
    }
}

impl Features {
    pub(super) fn read<R: Registers>(
        registers: &R,
        version: Version,
    ) -> Result<Self, UnitProbeError> {
        let [idr0, idr1, idr2] = [IDR0, IDR1, IDR2].map(|place| registers.read32(place));
        // Registers behind which no unit answers read as all ones.
        if idr0 == u32::MAX || idr0 | idr1 == 0 {
            let read = IdRegisters::two(("IDR0", idr0.into()), ("IDR1", idr1.into()));
            let kind = UnitKind::Smmu;
            return Err(UnitProbeError::NoUnit { kind, read });
        }
        let features = Self {
            version,
            idr0,
            idr1,
            idr2,
            ids: 0,
        };
        let (streams, banks) = (features.streams(), features.banks());
        if streams == 0 || banks == 0 {
            return Err(UnitProbeError::NoRoom { streams, banks });
        }
        Ok(features)
    }

    pub(super) fn is_v2(self) -> bool {
        self.version == Version::V2
    }

    /// SMS: streams are matched; otherwise their ids are indices.
    pub(super) const fn matches(self) -> bool {
        self.idr0 >> 27 & 1 == 1
    }

    /// EXIDS.
    pub(super) fn extended(self) -> bool {
        self.is_v2() && self.matches() && self.idr0 >> 8 & 1 == 1
    }

    /// CTTW: tables are read through the processors' caches.
    pub(super) const fn coherent(self) -> bool {
        self.idr0 >> 14 & 1 == 1
    }

    /// The bits of a stream id: NUMSIDB, or 16 where ids are extended.
    pub(super) fn stream_bits(self) -> u16 {
        let bits = match self.extended() {
            true => 16,
            false => field(self.idr0, 9, 4),
        };
        ((1u32 << bits) - 1) as u16
    }

    /// How many stream mapping registers there are.
    pub(super) fn streams(self) -> usize {
        let count = match self.matches() {
            true => field(self.idr0, 0, 8) as usize,
            false => usize::from(self.stream_bits()) + 1,
        };
        count.min(MOST)
    }

    /// Pages in half of the space, as a power of two.
    const fn pages_log2(self) -> u32 {
        field(self.idr1, 28, 3) + 1
    }

    /// How many context banks there are.
    pub(super) fn banks(self) -> usize {
        let count = field(self.idr1, 0, 8) as usize;
        count.min(1 << self.pages_log2()).min(MOST)
    }

    /// How many of them, the first ones, only know stage 2.
    pub(super) fn second_only(self) -> usize {
        (field(self.idr1, 16, 8) as usize).min(self.banks())
    }

    const fn page_log2(self) -> u32 {
        if self.idr1 >> 31 == 1 { 16 } else { 12 }
    }

    /// A register of global register space 1 for context bank `n`.
    pub(super) const fn global1(self, register: usize, n: usize) -> usize {
        (1 << self.page_log2()) + register + 4 * n
    }

    /// A register of context bank `n`.
    pub(super) const fn bank(self, n: usize, register: usize) -> usize {
        (((1 << self.pages_log2()) + n) << self.page_log2()) + register
    }

    /// IAS: bits of an intermediate address, which is what stage 1 gives also where stage 2 is
    /// bypassed.
    const fn ipa_bits(self) -> u32 {
        size(field(self.idr2, 0, 4))
    }

    /// OAS.
    const fn pa_bits(self) -> u32 {
        size(field(self.idr2, 4, 4))
    }

    /// UBS. Before version 2 the registers do not say it, and stage 1 knows 32 bits only.
    fn input_bits(self) -> u32 {
        match self.version {
            Version::V1 => self.ipa_bits(),
            Version::V2 => size(field(self.idr2, 8, 4)),
        }
    }

    /// PASize: what the unit gives out, behind the stage.
    pub(super) const fn output_size(self, second: bool) -> u32 {
        let (oas, ias) = (field(self.idr2, 4, 4), field(self.idr2, 0, 4));
        let least = if second || oas < ias { oas } else { ias };
        if least > 5 { 5 } else { least }
    }

    /// S1TS, S2TS.
    const fn stage(self, second: bool) -> bool {
        let bit = if second { 29 } else { 30 };
        self.idr0 >> bit & 1 == 1
    }

    /// How the unit reads tables of a format; `None` where it does not.
    pub(super) fn shape(self, format: FormatId) -> Option<Shape> {
        // PTFS: 0 for all AArch32 tables, 1 for long descriptors only, 2 for none.
        let aarch32 = field(self.idr0, 24, 2);
        let (second, config) = match format {
            FormatId::ArmV7s => {
                let offered = aarch32 == 0 && self.stage(false);
                return offered.then_some(Shape {
                    scheme: Scheme::Short,
                    second: false,
                    page: 12,
                    stride: 8,
                    input_bits: 32,
                });
            }
            FormatId::ArmStage1(config) => (false, config),
            FormatId::ArmStage2(config) => (true, config),
            _ => return None,
        };
        // PTFSv8_4kB, 16kB, 64kB.
        let (page, bit) = match config.granule {
            ArmGranule::K4 => (12, 12),
            ArmGranule::K16 => (14, 13),
            ArmGranule::K64 => (16, 14),
            _ => return None,
        };
        let (scheme, most) = match (self.is_v2() && self.idr2 >> bit & 1 == 1, second) {
            (true, false) => (Scheme::Long64, self.input_bits()),
            (true, true) => (Scheme::Long64, self.ipa_bits()),
            (false, _) if page != 12 || aarch32 > 1 => return None,
            (false, false) => (Scheme::Long, 32),
            (false, true) => (Scheme::Long, self.ipa_bits().min(40)),
        };
        let input_bits = u32::from(config.input_bits);
        // Fewer than 32 are not what this project's tables have.
        let fits = (32..=most).contains(&input_bits) && !config.upper;
        (fits && self.stage(second)).then_some(Shape {
            scheme,
            second,
            page,
            stride: page - 3,
            input_bits,
        })
    }

    /// How many levels a table can have (DDI 0487, D8.2.5 for stage 1, D8.2.6 for stage 2: the root is
    /// up to 16 tables, and the first level is only there for wide addresses).
    pub(super) fn levels(self, shape: Shape) -> RangeInclusive<u32> {
        let Shape { page, stride, .. } = shape;
        if shape.scheme == Scheme::Short {
            return 2..=2;
        }
        let below = shape.input_bits - page;
        if !shape.second {
            let levels = below.div_ceil(stride);
            return levels..=levels;
        }
        let most = match (shape.scheme, page) {
            (Scheme::Long64, 12) if self.pa_bits() >= 44 => 4,
            (Scheme::Long64, 14) if self.pa_bits() < 42 => 2,
            (Scheme::Long64, 16) if self.pa_bits() < 44 => 2,
            _ => 3,
        };
        (below - 4).div_ceil(stride)..=((below - 1) / stride + 1).min(most)
    }

    /// All that there is of a format.
    fn support(self, format: FormatId, sizes: PageSizes) -> Option<FormatSupport> {
        let shape = self.shape(format)?;
        let narrower = (32..=shape.input_bits).map(|input_bits| Shape {
            input_bits,
            ..shape
        });
        Some(FormatSupport {
            format,
            levels: narrower
                .flat_map(|shape| self.levels(shape))
                .fold(0, |all, levels| all | 1 << levels),
            page_sizes: sizes,
        })
    }

    pub(super) fn capabilities(self) -> Result<UnitCapabilities, UnitProbeError> {
        // The most input bits first.
        let stages = |granule, first: PageSizes, second: PageSizes| {
            let widest = move |format: fn(ArmConfig) -> FormatId, sizes| {
                let config = |input_bits| ArmConfig {
                    granule,
                    input_bits,
                    upper: false,
                };
                (32..=48)
                    .rev()
                    .find_map(|bits| self.support(format(config(bits)), sizes))
            };
            [
                widest(FormatId::ArmStage1, first),
                widest(FormatId::ArmStage2, second),
            ]
        };
        let offered = [
            stages(
                ArmGranule::K4,
                ArmStage1::<K4>::page_sizes(4),
                ArmStage2::<K4>::page_sizes(4),
            ),
            stages(
                ArmGranule::K16,
                ArmStage1::<K16>::page_sizes(4),
                ArmStage2::<K16>::page_sizes(3),
            ),
            stages(
                ArmGranule::K64,
                ArmStage1::<K64>::page_sizes(3),
                ArmStage2::<K64>::page_sizes(3),
            ),
            [
                self.support(FormatId::ArmV7s, <ArmV7s>::page_sizes(2)),
                None,
            ],
        ];
        let mut can = UnitCapabilities::new();
        for support in offered.into_iter().flatten().flatten() {
            can = can.with_format(support);
        }
        if can.formats[0].is_none() {
            let Self { idr0, idr2, .. } = self;
            let read = IdRegisters::two(("IDR0", idr0.into()), ("IDR2", idr2.into()));
            let kind = UnitKind::Smmu;
            return Err(UnitProbeError::Tables { kind, read });
        }
        can.output_bits = match self.stage(false) {
            true => self.pa_bits().min(self.ipa_bits()),
            false => self.pa_bits(),
        };
        can.input_bits = self.input_bits();
        // A domain is tagged with the number of its context bank.
        can.domain_bits = 32;
        can.coherent_walks = self.coherent();
        // The architecture is older than the other ways.
        can.break_before_make = BreakBeforeMake::Always;
        Ok(can)
    }
}
