//! A root as people name it: the format's name and its configuration.

use alloc::string::{String, ToString as _};

use crate::format::{ArmConfig, ArmGranule, DartConfig, DartVersion};
use crate::walk::Walker;
use crate::{FormatId, Root};

/// The names of all formats.
pub const FORMATS: [&str; 21] = [
    "amdv1",
    "x86-64",
    "vtd-ss",
    "arm-s1-4k",
    "arm-s1-4k-lpa2",
    "arm-s1-16k",
    "arm-s1-16k-lpa2",
    "arm-s1-64k",
    "arm-s1-64k-lpa",
    "arm-s2-4k",
    "arm-s2-4k-lpa2",
    "arm-s2-16k",
    "arm-s2-16k-lpa2",
    "arm-s2-64k",
    "arm-s2-64k-lpa",
    "armv7-short",
    "riscv",
    "riscv-g",
    "dart1",
    "dart1-4k",
    "dart2",
];

/// Why there is no such root.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// No format has this name.
    #[error("no format is called {name:?}; there are {}", FORMATS.join(", "))]
    Name {
        /// The name.
        name: String,
    },
    /// The format's input addresses are what it says.
    #[error("{name} does not accept --input-bits: its levels imply them")]
    InputBits {
        /// The format.
        name: String,
    },
    /// Only Arm's first stage has tables for the top of the address space.
    #[error("{name} has no tables of their own for the top of the address space")]
    Upper {
        /// The format.
        name: String,
    },
    /// The format has no such table.
    #[error("{name} has no tables of {levels} levels for {input_bits} input bits")]
    Levels {
        /// The format.
        name: String,
        /// The levels.
        levels: u8,
        /// Bits of input addresses.
        input_bits: u8,
    },
    /// The format has no table for so many input bits.
    #[error("{name} has no tables for {input_bits} input bits")]
    Bits {
        /// The format.
        name: String,
        /// Bits of input addresses.
        input_bits: u8,
    },
}

/// The root of a table at `address`.
///
/// `levels` are those that the unit has. Without them it is 4 for Intel's, AMD's and RISC-V's
/// formats, and for the others the fewest with which `input_bits` can be translated, as Linux chooses
/// them. `input_bits` (64 − TnSZ; by default 48, for DART 32) are for Arm's long descriptors and DART,
/// `upper` for Arm's TTBR1.
///
/// # Errors
///
/// When the format has no such table.
pub fn root(
    name: &str,
    address: u64,
    levels: Option<u8>,
    input_bits: Option<u8>,
    upper: bool,
) -> Result<Root, RootError> {
    let (format, sized) =
        format(name, input_bits, upper).ok_or(RootError::Name { name: name.into() })?;
    let name = || name.to_string();
    if !sized && input_bits.is_some() {
        return Err(RootError::InputBits { name: name() });
    }
    if upper && !matches!(format, FormatId::ArmStage1(_)) {
        return Err(RootError::Upper { name: name() });
    }
    let bits = match format {
        FormatId::ArmStage1(config) | FormatId::ArmStage2(config) => config.input_bits,
        FormatId::Dart(config) => config.input_bits,
        _ => 64,
    };
    let with = |levels| Root {
        format,
        address,
        levels,
    };
    let exists = |levels| Walker::new(with(levels)).aperture().is_some();
    match levels {
        Some(levels) if exists(levels) => Ok(with(levels)),
        Some(levels) => Err(RootError::Levels {
            name: name(),
            levels,
            input_bits: bits,
        }),
        None if !sized && exists(4) => Ok(with(4)),
        None => {
            let fewest = (1..=6).find(|levels| exists(*levels));
            fewest.map(with).ok_or(RootError::Bits {
                name: name(),
                input_bits: bits,
            })
        }
    }
}

/// The format, and whether its input addresses are configured.
fn format(name: &str, input_bits: Option<u8>, upper: bool) -> Option<(FormatId, bool)> {
    use ArmGranule::{K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa};
    let arm = [K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa]
        .into_iter()
        .flat_map(|granule| {
            let config = ArmConfig {
                granule,
                input_bits: input_bits.unwrap_or(48),
                upper,
            };
            [FormatId::ArmStage1(config), FormatId::ArmStage2(config)]
        });
    let dart = [
        (DartVersion::V1, 14),
        (DartVersion::V1, 12),
        (DartVersion::V2, 14),
    ]
    .map(|(version, page_log2)| {
        FormatId::Dart(DartConfig {
            version,
            page_log2,
            input_bits: input_bits.unwrap_or(32),
        })
    });
    let plain = [FormatId::ArmV7s, FormatId::RiscV, FormatId::RiscVG];
    let sized = arm.chain(dart).map(|format| (format, true));
    let mut all = FormatId::ALL
        .into_iter()
        .chain(plain)
        .map(|format| (format, false))
        .chain(sized);
    all.find(|(format, _)| format.name() == name)
}

#[cfg(test)]
mod tests {
    use core::mem::discriminant;

    use runs::PageSizes;

    use super::*;
    use crate::{AnyTable, BuildError, HeapTables};

    /// Any configuration of Arm's formats.
    const ARM: ArmConfig = ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 48,
        upper: false,
    };
    /// Any configuration of DART.
    const DART: DartConfig = DartConfig {
        version: DartVersion::V1,
        page_log2: 14,
        input_bits: 32,
    };

    /// A format of each variant. A variant that is not listed does not compile.
    macro_rules! one_of_each {
        ($($plain:ident)* ; $($configured:ident($config:expr))*) => {{
            let formats = [$(FormatId::$plain,)* $(FormatId::$configured($config),)*];
            for format in formats {
                let ($(FormatId::$plain)|* | $(FormatId::$configured(_))|*) = format;
            }
            formats
        }};
    }

    #[test]
    fn every_variant_has_a_name_a_number_and_tables() {
        let named = FORMATS.map(|name| root(name, 0, None, None, false).unwrap());
        let all = one_of_each! {
            AmdV1 X86_64 VtdSs ArmV7s RiscV RiscVG; ArmStage1(ARM) ArmStage2(ARM) Dart(DART)
        };
        for format in all {
            let same = |root: &Root| discriminant(&root.format) == discriminant(&format);
            assert!(named.iter().any(same), "FORMATS lacks {format}");
        }
        for Root { format, levels, .. } in named {
            let read = FormatId::from_bytes(format.to_bytes());
            assert_eq!(read, Some(format), "from_bytes lacks {format}");
            // Low: DART's first version has 36 bits of addresses.
            let memory = HeapTables::with_tables_at(64, 1 << 20).unwrap();
            let table = AnyTable::new(format, levels, PageSizes::from_bits(u64::MAX), memory);
            let entry_bytes = match table {
                Ok(_) => 8,
                // Memory of another width or size is refused only after the format is found.
                Err(BuildError::TableMemory { wanted, .. }) => wanted.0 as u64,
                Err(error) => panic!("{format}: {error}"),
            };
            let walker = Walker::new(Root {
                format,
                address: 0,
                levels,
            });
            assert_eq!(walker.entry_bytes(), Some(entry_bytes), "{format}");
        }
    }

    #[test]
    fn every_name_is_a_format_with_tables() {
        for name in FORMATS {
            let found = root(name, 0x8000, None, None, false).unwrap();
            assert_eq!(found.format.name(), name);
        }
    }

    #[test]
    fn levels_are_the_fewest_unless_the_format_has_its_own() {
        let levels = |name, bits| root(name, 0, None, bits, false).unwrap().levels;
        assert_eq!(levels("vtd-ss", None), 4);
        assert_eq!(levels("armv7-short", None), 2);
        assert_eq!(levels("arm-s1-4k", None), 4);
        assert_eq!(levels("arm-s1-4k", Some(39)), 3);
        // Sixteen tables side by side.
        assert_eq!(levels("arm-s2-4k", Some(43)), 3);
        assert_eq!(levels("arm-s1-64k", Some(42)), 2);
    }

    #[test]
    fn what_does_not_exist_is_refused_by_name() {
        let refusal =
            |name, levels, bits, upper| root(name, 0, levels, bits, upper).unwrap_err().to_string();
        assert!(refusal("vtd", None, None, false).contains("vtd-ss, arm-s1-4k"));
        assert_eq!(
            refusal("vtd-ss", Some(6), None, false),
            "vtd-ss has no tables of 6 levels for 64 input bits"
        );
        assert!(refusal("vtd-ss", None, Some(48), false).contains("--input-bits"));
        assert!(refusal("arm-s2-4k", None, None, true).contains("top"));
        assert!(refusal("arm-s1-4k", None, Some(60), false).contains("60 input bits"));
    }
}
