//! Why an image is refused.

use core::fmt;

use crate::engine::Damage;
use crate::error::BuildError;
use crate::format::FormatId;

/// Why an image is refused. Nothing has been built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageError {
    /// The file does not begin as an image does.
    Magic,
    /// It is of a version that this crate does not know.
    Version(u32),
    /// It is longer or shorter than it says.
    Length {
        /// Bytes that it should have.
        said: u64,
        /// Bytes that it has.
        there: u64,
    },
    /// Its bytes have changed since it was written.
    Checksum {
        /// What it says.
        said: u32,
        /// What its bytes give.
        found: u32,
    },
    /// A field of the header has a value that it cannot have.
    Header {
        /// The field.
        field: &'static str,
    },
    /// The tables are of another format.
    Format {
        /// The image's.
        found: FormatId,
        /// The one that was expected.
        expected: FormatId,
    },
    /// The tables are configured otherwise.
    Configuration {
        /// Which setting.
        what: &'static str,
        /// The image's value.
        found: u64,
        /// The one that was expected.
        expected: u64,
    },
    /// A table lies at an address where none can be: misaligned, twice, or out of order.
    Address {
        /// The address.
        table: u64,
    },
    /// No entry leads to this table.
    Unlinked {
        /// Its address.
        table: u64,
    },
    /// An entry is not what it should be.
    Damage(Damage),
    /// The memory for which the tables are meant does not reach there, or has another table there.
    Taken {
        /// Address of the table.
        table: u64,
    },
    /// The tables cannot be built in this memory.
    Build(BuildError),
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("this is not an image of tables"),
            Self::Version(version) => {
                write!(f, "an image of version {version}, which is not known")
            }
            Self::Length { said, there } => {
                write!(f, "an image of {said} bytes, of which {there} are there")
            }
            Self::Checksum { said, found } => {
                write!(
                    f,
                    "the image is damaged: checksum {found:#010x}, not {said:#010x}"
                )
            }
            Self::Header { field } => write!(f, "the image's header: {field}"),
            Self::Format { found, expected } => {
                write!(f, "an image of {found} tables, not of {expected}")
            }
            Self::Configuration {
                what,
                found,
                expected,
            } => write!(f, "an image with {what} {found:#x}, not {expected:#x}"),
            Self::Address { table } => {
                write!(f, "the image has a table at {table:#x}, where none can be")
            }
            Self::Unlinked { table } => {
                write!(f, "nothing leads to the image's table at {table:#x}")
            }
            Self::Damage(damage) => damage.fmt(f),
            Self::Taken { table } => {
                write!(f, "the memory has no free table at {table:#x}")
            }
            Self::Build(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for ImageError {}

impl From<Damage> for ImageError {
    fn from(damage: Damage) -> Self {
        Self::Damage(damage)
    }
}

impl From<BuildError> for ImageError {
    fn from(cause: BuildError) -> Self {
        Self::Build(cause)
    }
}
