//! Images: all tables of one [`Table`](crate::Table) in a file.
//!
//! For debugging, for tools, and for tables that have to survive their process. An image holds every
//! table page with its address and the words in it (accessed and dirty bits too), and what is needed
//! to read them: the format with its configuration, levels, page sizes. `dmaspace tables` reads images.
//!
//! # The file
//!
//! All numbers are little-endian. New formats take the next number, never a used one; the version
//! stays. Version 1:
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic: `IOPTIMG` and a line feed |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | bytes of this header: 80 |
//! | 16 | 8 | bytes of the whole file |
//! | 24 | 2 | format: 1 AMD v1, 2 x86-64, 3 VT-d second stage, 4 Arm stage 1, 5 Arm stage 2, 6 ARMv7 short, 7 RISC-V, 8 RISC-V second stage, 9 DART |
//! | 26 | 6 | its configuration. Arm: granule (0 4K, 1 4K LPA2, 2 16K, 3 16K LPA2, 4 64K, 5 64K LPA), input bits, 1 for the upper half. DART: version, page as a power of two, input bits. Zeroes behind that |
//! | 32 | 1 | levels, 1 to 6 |
//! | 33 | 1 | bytes of an entry: 4 or 8 |
//! | 34 | 1 | bits of an output address |
//! | 35 | 1 | bits of an input address |
//! | 36 | 1 | the input bits above: 0 zeroes, 1 ones, 2 copies of the highest |
//! | 37 | 1 | the bit that marks addresses of tables as encrypted in entries, 0 where none does |
//! | 38 | 2 | zeroes |
//! | 40 | 8 | page sizes that the table uses: bit *n* for 2^*n* bytes |
//! | 48 | 8 | address of the root, a multiple of its size, without the bit of encryption |
//! | 56 | 4 | bytes of the root, a power of two |
//! | 60 | 4 | bytes of every other table, a power of two |
//! | 64 | 8 | number of other tables |
//! | 72 | 8 | zeroes |
//! | 80 | | the root's entries |
//! | | | for each other table, by ascending address: address (8), level (1; 0 is that of the smallest page, the root is at *levels* − 1), zeroes (7), entries |
//! | | 4 | CRC-32C (polynomial 0x1EDC6F41, RFC 3720) of everything before |
//!
//! # Reading
//!
//! [`Image::parse`] refuses what is damaged or of another version; [`Image::check`] refuses what is
//! not of an expected format and configuration, or no tree: an entry that the format does not write,
//! a link to nowhere, a table to which two links lead or none. An image that was only parsed can be
//! walked ([`WalkMemory`](crate::walk::WalkMemory)), whatever its tables say. [`Image::restore`] builds the tables anew at
//! other addresses; [`Takeover`](crate::Takeover) puts them where they were.

mod crc;
mod error;
mod parse;
mod restore;
mod write;

pub use error::ImageError;
pub use parse::Image;

use crate::format::{Above, ArmConfig, ArmGranule, DartConfig, DartVersion, Format, FormatId};

const MAGIC: &[u8; 8] = b"IOPTIMG\n";
const VERSION: u32 = 1;
/// Bytes of the header.
const HEADER: usize = 80;
/// Bytes before the entries of a table other than the root.
const RECORD: usize = 16;
/// Bytes of the checksum.
const CHECKSUM: usize = 4;

const GRANULES: [ArmGranule; 6] = [
    ArmGranule::K4,
    ArmGranule::K4Lpa2,
    ArmGranule::K16,
    ArmGranule::K16Lpa2,
    ArmGranule::K64,
    ArmGranule::K64Lpa,
];

impl FormatId {
    /// Its number and configuration as an [image](self) has them.
    pub fn to_bytes(self) -> [u8; 8] {
        let arm = |number, config: ArmConfig| {
            let granule = GRANULES.iter().position(|kind| *kind == config.granule);
            let granule = granule.unwrap_or(usize::from(u8::MAX)) as u8;
            let upper = config.upper.into();
            [number, 0, granule, config.input_bits, upper, 0, 0, 0]
        };
        match self {
            Self::AmdV1 => [1, 0, 0, 0, 0, 0, 0, 0],
            Self::X86_64 => [2, 0, 0, 0, 0, 0, 0, 0],
            Self::VtdSs => [3, 0, 0, 0, 0, 0, 0, 0],
            Self::ArmStage1(config) => arm(4, config),
            Self::ArmStage2(config) => arm(5, config),
            Self::ArmV7s => [6, 0, 0, 0, 0, 0, 0, 0],
            Self::RiscV => [7, 0, 0, 0, 0, 0, 0, 0],
            Self::RiscVG => [8, 0, 0, 0, 0, 0, 0, 0],
            Self::Dart(config) => {
                let version = match config.version {
                    DartVersion::V1 => 1,
                    DartVersion::V2 => 2,
                };
                [9, 0, version, config.page_log2, config.input_bits, 0, 0, 0]
            }
        }
    }

    /// The format that is [written](Self::to_bytes) so.
    pub fn from_bytes(bytes: [u8; 8]) -> Option<Self> {
        let [number, _, a, b, c, ..] = bytes;
        let arm = || {
            Some(ArmConfig {
                granule: *GRANULES.get(usize::from(a))?,
                input_bits: b,
                upper: c == 1,
            })
        };
        let id = match number {
            1 => Self::AmdV1,
            2 => Self::X86_64,
            3 => Self::VtdSs,
            4 => Self::ArmStage1(arm()?),
            5 => Self::ArmStage2(arm()?),
            6 => Self::ArmV7s,
            7 => Self::RiscV,
            8 => Self::RiscVG,
            9 => Self::Dart(DartConfig {
                version: match a {
                    1 => DartVersion::V1,
                    2 => DartVersion::V2,
                    _ => return None,
                },
                page_log2: b,
                input_bits: c,
            }),
            _ => return None,
        };
        // Other content of the bytes is of a later version.
        (id.to_bytes() == bytes).then_some(id)
    }
}

/// The number of the bit that marks addresses of tables as encrypted; 0 where none does.
fn encode_encryption<F: Format>(format: &F) -> u8 {
    match format.root_address(0) {
        0 => 0,
        mask => mask.trailing_zeros() as u8,
    }
}

const fn encode_above(above: Above) -> u8 {
    match above {
        Above::Zeros => 0,
        Above::Ones => 1,
        Above::Sign => 2,
    }
}
