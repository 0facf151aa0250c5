//! The shape of a format's tables as numbers, to count tables and leaves without building any.
//!
//! The numbers are those of [`Format`], looked up once for a format that is known only at run
//! time.

use alloc::vec::Vec;

use crate::format::{
    AmdV1, ArmConfig, ArmGranule, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2,
    DartConfig, DartVersion, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, VtdSs,
    X86_64,
};
use crate::{Aperture, BuildError, Format, FormatId};
use runs::PageSizes;

/// The shape of the tables of one format with a number of levels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The format.
    pub format: FormatId,
    /// The addresses that a table translates.
    pub aperture: Aperture,
    /// The sizes of leaves.
    pub page_sizes: PageSizes,
    /// Bytes of a table below the root.
    pub table_bytes: u64,
    /// Bytes of the root.
    pub root_bytes: u64,
    /// The levels, from that of the smallest page up.
    pub levels: Vec<Level>,
}

/// One level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Bytes that one entry translates, as a power of two.
    pub shift: u32,
    /// The sizes of leaves that an entry, or several, can have here.
    pub leaves: PageSizes,
}

impl Geometry {
    /// The shape of `format` with `levels` levels.
    ///
    /// # Errors
    ///
    /// When there is no such table.
    pub fn new(format: FormatId, levels: u8) -> Result<Self, BuildError> {
        match format {
            FormatId::AmdV1 => AmdV1::new(levels).map(of),
            FormatId::X86_64 => X86_64::new(levels).map(of),
            FormatId::VtdSs => VtdSs::new(levels).map(of),
            FormatId::ArmStage1(config) => match config.granule {
                ArmGranule::K4 => stage1::<K4>(config),
                ArmGranule::K4Lpa2 => stage1::<K4Lpa2>(config),
                ArmGranule::K16 => stage1::<K16>(config),
                ArmGranule::K16Lpa2 => stage1::<K16Lpa2>(config),
                ArmGranule::K64 => stage1::<K64>(config),
                ArmGranule::K64Lpa => stage1::<K64Lpa>(config),
            },
            FormatId::ArmStage2(config) => match config.granule {
                ArmGranule::K4 => stage2::<K4>(config, levels),
                ArmGranule::K4Lpa2 => stage2::<K4Lpa2>(config, levels),
                ArmGranule::K16 => stage2::<K16>(config, levels),
                ArmGranule::K16Lpa2 => stage2::<K16Lpa2>(config, levels),
                ArmGranule::K64 => stage2::<K64>(config, levels),
                ArmGranule::K64Lpa => stage2::<K64Lpa>(config, levels),
            },
            FormatId::ArmV7s => Ok(of(<ArmV7s>::new())),
            FormatId::RiscV => RiscV::new(levels).map(of),
            FormatId::RiscVG => RiscVG::new(levels).map(of),
            FormatId::Dart(config) => dart(config, levels),
        }
        .and_then(|shape| {
            if shape.levels.len() == usize::from(levels) {
                Ok(shape)
            } else {
                Err(BuildError::Levels { format, levels })
            }
        })
    }

    /// The lowest level whose entries, or groups of entries, can be leaves of `size` bytes.
    pub fn level_of(&self, size: u64) -> Option<usize> {
        self.levels
            .iter()
            .position(|level| level.leaves.contains(size))
    }
}

fn of<F: Format>(format: F) -> Geometry {
    let levels = usize::from(format.levels());
    Geometry {
        format: format.id(),
        aperture: format.aperture(),
        page_sizes: F::page_sizes(format.levels()),
        table_bytes: F::TABLE_BYTES,
        root_bytes: (format.entries(levels - 1) * F::ENTRY_BYTES) as u64,
        levels: (0..levels)
            .map(|level| Level {
                shift: F::shift(level),
                leaves: F::leaf_sizes(level),
            })
            .collect(),
    }
}

fn stage1<G: Granule>(config: ArmConfig) -> Result<Geometry, BuildError> {
    let format = ArmStage1::<G>::new(config.input_bits.into(), G::ADDRESS_BITS)?;
    Ok(of(if config.upper { format.upper() } else { format }))
}

fn stage2<G: Granule>(config: ArmConfig, levels: u8) -> Result<Geometry, BuildError> {
    let format = ArmStage2::<G>::new(config.input_bits.into(), G::ADDRESS_BITS)?;
    format.with_levels(levels).map(of)
}

fn dart(config: DartConfig, levels: u8) -> Result<Geometry, BuildError> {
    match (config.version, config.page_log2) {
        (DartVersion::V1, 12) => Dart1Page4K::new(levels, config.input_bits).map(of),
        (DartVersion::V1, _) => Dart1::new(levels, config.input_bits).map(of),
        (DartVersion::V2, _) => Dart2::new(levels, config.input_bits).map(of),
    }
}
