//! Why an image is refused.

use crate::engine::Damage;
use crate::error::BuildError;
use crate::format::FormatId;

/// Why an image is refused. Nothing has been built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file does not begin as an image does.
    #[error("this is not an image of tables")]
    Magic,
    /// It is of a version that this crate does not know.
    #[error("an image of version {0}, which is not known")]
    Version(u32),
    /// It is longer or shorter than it says.
    #[error("an image of {said} bytes, of which {there} are there")]
    Length {
        /// Bytes that it should have.
        said: u64,
        /// Bytes that it has.
        there: u64,
    },
    /// Its bytes have changed since it was written.
    #[error("the image is damaged: checksum {found:#010x}, not {said:#010x}")]
    Checksum {
        /// The stated value.
        said: u32,
        /// The value computed from its bytes.
        found: u32,
    },
    /// A field of the header has a value that it cannot have.
    #[error("the image's header: {field}")]
    Header {
        /// The field.
        field: &'static str,
    },
    /// The tables are of another format.
    #[error("an image of {found} tables, not of {expected}")]
    Format {
        /// The image's.
        found: FormatId,
        /// The one that was expected.
        expected: FormatId,
    },
    /// The tables are configured otherwise.
    #[error("an image with {what} {found:#x}, not {expected:#x}")]
    Configuration {
        /// Which setting.
        what: &'static str,
        /// The image's value.
        found: u64,
        /// The one that was expected.
        expected: u64,
    },
    /// A table lies at an address where none can be: misaligned, twice, or out of order.
    #[error("the image has a table at {table:#x}, where none can be")]
    Address {
        /// The address.
        table: u64,
    },
    /// No entry leads to this table.
    #[error("nothing leads to the image's table at {table:#x}")]
    Unlinked {
        /// Its address.
        table: u64,
    },
    /// An entry is not what it should be.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The memory for which the tables are meant does not reach there, or has another table there.
    #[error("the memory has no free table at {table:#x}")]
    Taken {
        /// Address of the table.
        table: u64,
    },
    /// The tables cannot be built in this memory.
    #[error(transparent)]
    Build(#[from] BuildError),
}
