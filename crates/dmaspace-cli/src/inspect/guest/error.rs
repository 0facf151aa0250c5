//! Why a machine's configuration cannot be understood.

use thiserror::Error;

use super::SMALL;
use crate::size::{self, LARGEST_PAGE, SizeError};

/// Why a machine's configuration cannot be understood.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A quote does not close.
    #[error("the command line has a quote that does not close")]
    Quotes,
    /// The first word names another program.
    #[error(
        "{program:?} is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm"
    )]
    NotQemu {
        /// Its name.
        program: String,
    },
    /// An option of another program.
    #[error("-{option} is not an option of QEMU")]
    Option {
        /// Without `-`.
        option: String,
    },
    /// A word that begins with another character than the hyphen, as text processors write it.
    #[error("{word:?} begins with a dash that is no hyphen; an option begins with -")]
    Dash {
        /// The word.
        word: String,
    },
    /// The last option.
    #[error("-{option} needs a value")]
    NoValue {
        /// The option.
        option: String,
    },
    /// A size that is none.
    #[error("{of}: {value:?} is no size")]
    Size {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// Why.
        source: SizeError,
    },
    /// A value that is not known.
    #[error("{of}: {value:?} is not known; known are {known}")]
    Value {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// The known values.
        known: &'static str,
    },
    /// A number that is none, or out of its range.
    #[error("{of}: {value:?} is no number from {least} to {most}")]
    Number {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// More memory than there can be.
    #[error("{of}: {} is more than {}", size::bytes(*.bytes), size::bytes(*.most))]
    Memory {
        /// The option or element.
        of: String,
        /// Its value; 64 bits at most.
        bytes: u64,
        /// The most.
        most: u64,
    },
    /// Pages of no size that pages have.
    #[error("{of}: {} is no size of pages, which have a power of two from {} to {}",
        size::bytes(*.bytes), size::bytes(SMALL), size::bytes(LARGEST_PAGE))]
    Pages {
        /// The option or element.
        of: String,
        /// Its value.
        bytes: u64,
    },
    /// No address of a PCI device.
    #[error("{of}: {value:?} is no PCI address like 0000:01:00.0")]
    Address {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
    },
    /// More of something than there can be.
    #[error("there are more than {most} of {of}")]
    Many {
        /// The element.
        of: String,
        /// The most.
        most: usize,
    },
    /// An object's properties are no JSON.
    #[error("-{option}: the value is damaged JSON")]
    Json {
        /// The option.
        option: String,
        /// Where.
        source: serde_json::Error,
    },
    /// A memory object is used and not defined.
    #[error("memory object {id:?} is used, and no -object defines it")]
    NoObject {
        /// Its name.
        id: String,
    },
    /// The memory is not on the line.
    #[error("the line says nothing of memory, and {variable} stands for options that may")]
    Elsewhere {
        /// The variable.
        variable: String,
    },
    /// The text is no XML.
    #[error("the XML is damaged near byte {at}")]
    Xml {
        /// Where.
        at: u64,
        /// The error in the XML.
        source: quick_xml::Error,
    },
    /// The root is another element.
    #[error("the root element is <{found}>; libvirt's is <domain>")]
    NotADomain {
        /// Its name.
        found: String,
    },
    /// More than one document.
    #[error("the XML has a second root element, <{found}>")]
    SecondRoot {
        /// Its name.
        found: String,
    },
    /// Elements within elements.
    #[error("elements are nested deeper than {most}")]
    Deep {
        /// As deep as is read.
        most: usize,
    },
    /// There is no memory.
    #[error("there is no <memory> with a size")]
    NoMemory,
}
