//! Arm's tables (VMSAv8-64) as units see them: memory types, and the tables that each offered format stands for.
//!
//! A table's format names its input bits. A unit that walks one of 48 bits walks one of 39 as well, so it
//! offers the most; one that walks the top of the address space (TTBR1) walks the bottom as well.

use iopt::FormatId;
use iopt::format::{ArmGranule, ArmStage1, Granule, K4, K4Lpa2, K16, K16Lpa2, K64};

/// The memory types of stage 1, where [`ArmStage1`] looks for them by default.
pub(crate) const MAIR: u64 = match ArmStage1::<K4>::new(48, 48) {
    Ok(format) => format.mair(),
    Err(_) => 0,
};

/// Bytes of a page and of a table, as a power of two.
pub(crate) const fn granule_log2(granule: ArmGranule) -> u32 {
    match granule {
        ArmGranule::K4 | ArmGranule::K4Lpa2 => K4::LOG2,
        ArmGranule::K16 | ArmGranule::K16Lpa2 => K16::LOG2,
        ArmGranule::K64 | ArmGranule::K64Lpa => K64::LOG2,
    }
}

/// Address bits that a table resolves.
pub(crate) const fn stride(log2: u32) -> u32 {
    log2 - 3
}

/// Returns true if a unit that offers one format walks tables of the other.
pub(crate) fn covers(offered: FormatId, asked: FormatId) -> bool {
    let (most, config) = match (offered, asked) {
        (FormatId::ArmStage1(most), FormatId::ArmStage1(config))
        | (FormatId::ArmStage2(most), FormatId::ArmStage2(config)) => (most, config),
        _ => return offered == asked,
    };
    config.granule == most.granule
        && config.input_bits <= most.input_bits
        && config.upper <= most.upper
}

/// The numbers of levels that a table of the format can have, bit *n* for *n* levels: all bits, where the
/// format does not say.
///
/// Stage 1 has as many as its input bits take (DDI 0487, D8.2.5). The root of stage 2 resolves at least one
/// bit, and is up to 16 tables side by side (D8.2.6).
pub(crate) fn levels(format: FormatId) -> u16 {
    let (config, concatenated) = match format {
        FormatId::ArmStage1(config) => (config, 0),
        FormatId::ArmStage2(config) => (config, 4),
        _ => return u16::MAX,
    };
    let log2 = granule_log2(config.granule);
    let bits = u32::from(config.input_bits).clamp(32, 52) - log2;
    let fewest = (bits - concatenated).div_ceil(stride(log2));
    let most = match format {
        FormatId::ArmStage1(_) => fewest,
        _ => ((bits - 1) / stride(log2) + 1).min(u32::from(match config.granule {
            ArmGranule::K4 => K4::STAGE2_LEVELS,
            ArmGranule::K4Lpa2 => K4Lpa2::STAGE2_LEVELS,
            ArmGranule::K16 => K16::STAGE2_LEVELS,
            ArmGranule::K16Lpa2 => K16Lpa2::STAGE2_LEVELS,
            ArmGranule::K64 | ArmGranule::K64Lpa => K64::STAGE2_LEVELS,
        })),
    };
    (fewest..=most).fold(0, |all, levels| all | 1 << levels)
}

/// For models of units: memory of tables, and the last word that a walk has read there, its leaf.
#[cfg(test)]
pub(crate) struct Walked<'m> {
    pub(crate) memory: &'m dyn iopt::walk::WalkMemory,
    pub(crate) last: core::cell::Cell<u64>,
}

#[cfg(test)]
impl Walked<'_> {
    /// True when the leaf is used for all ASIDs: nG, bit 11 (DDI 0487, D8.16; DDI 0406, B3.5.1), or bit 17 in
    /// a section of short descriptors. Stage 2 has no such leaves.
    pub(crate) fn is_global(&self, format: FormatId, level: u8) -> bool {
        let bit = match format {
            FormatId::ArmStage1(_) => 11,
            FormatId::ArmV7s if level == 0 => 11,
            FormatId::ArmV7s => 17,
            _ => return false,
        };
        self.last.get() >> bit & 1 == 0
    }
}

#[cfg(test)]
impl iopt::walk::WalkMemory for Walked<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, iopt::walk::BadAddress> {
        let word = self.memory.read_u64(address)?;
        self.last.set(word);
        Ok(word)
    }

    fn read_u32(&self, address: u64) -> Result<u32, iopt::walk::BadAddress> {
        let word = self.memory.read_u32(address)?;
        self.last.set(word.into());
        Ok(word)
    }
}

#[cfg(test)]
mod tests {
    use iopt::format::{ArmConfig, ArmStage1, ArmStage2, K64Lpa};
    use iopt::{BuildError, Format};

    use super::*;

    #[test]
    fn levels_are_those_with_which_tables_can_be_built() {
        fn granule<G: Granule>() {
            for bits in 32..=52 {
                if let Ok(table) = ArmStage1::<G>::new(bits, G::ADDRESS_BITS) {
                    assert_eq!(levels(table.id()), 1 << table.levels(), "{bits}");
                }
                let Ok(table) = ArmStage2::<G>::new(bits, G::ADDRESS_BITS) else {
                    continue;
                };
                let all = (0..8u8).filter(|n| table.with_levels(*n).is_ok());
                let all = all.fold(0, |all, n| all | 1 << n);
                assert_eq!(levels(table.id()), all, "{bits}");
            }
        }
        granule::<K4>();
        granule::<K4Lpa2>();
        granule::<K16>();
        granule::<K16Lpa2>();
        granule::<K64>();
        granule::<K64Lpa>();
    }

    #[test]
    fn fewer_input_bits_and_the_lower_half_are_covered() -> Result<(), BuildError> {
        let most = ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 48,
            upper: true,
        };
        let id = |granule, input_bits, upper| {
            FormatId::ArmStage1(ArmConfig {
                granule,
                input_bits,
                upper,
            })
        };
        let offered = FormatId::ArmStage1(most);
        assert!(covers(offered, ArmStage1::<K4>::new(39, 40)?.id()));
        assert!(covers(offered, ArmStage1::<K4>::new(39, 40)?.upper().id()));
        assert!(!covers(id(ArmGranule::K4, 48, false), offered));
        assert!(!covers(id(ArmGranule::K4, 39, true), offered));
        assert!(!covers(offered, id(ArmGranule::K4Lpa2, 39, false)));
        assert!(!covers(offered, ArmStage2::<K4>::new(39, 40)?.id()));
        assert!(!covers(offered, FormatId::VtdSs));
        Ok(())
    }
}
