//! Refusals of the kernel, or of this layer before it.

use std::io;
use std::path::PathBuf;
use std::string::String;

use iopt::Prot;
use runs::{Iova, Offset, Span};

use crate::memory::object::Cause;

/// Result of the layers over the kernel's ioctls.
pub(crate) type Result<T> = core::result::Result<T, KernelError>;

/// Failure of a call to the kernel. The back ends give a number its meaning for one operation, since
/// they know their requests.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A device node cannot be opened.
    #[error("cannot open {}", .path.display())]
    Open {
        /// Its path.
        path: PathBuf,
        /// Cause.
        #[source]
        cause: io::Error,
    },
    /// No driver of VFIO has the device.
    #[error(
        "{device} is not bound to a driver of VFIO, as vfio-pci (driverctl set-override {device} vfio-pci)"
    )]
    NotBound {
        /// Its address.
        device: String,
    },
    /// The device has no IOMMU group: there is no such device, or no IOMMU translates for it.
    #[error("{device} has no IOMMU group")]
    NoGroup {
        /// Its address.
        device: String,
    },
    /// The kernel has VFIO, but no IOMMU of type 1.
    #[error("the kernel has no VFIO type 1 (the module vfio_iommu_type1)")]
    NoType1,
    /// The kernel refused.
    #[error("{operation} was refused: {}", io::Error::from_raw_os_error(*.errno))]
    Refused {
        /// The ioctl or system call, as the kernel's headers name it.
        operation: &'static str,
        /// The error number.
        errno: i32,
    },
    /// The kernel speaks another version of VFIO than 0, the only one so far.
    #[error("the kernel speaks VFIO {found}, not 0")]
    Version {
        /// Its version.
        found: u32,
    },
    /// The kernel's answer does not hold together.
    #[error("the answer to {operation} is inconsistent")]
    Answer {
        /// The ioctl.
        operation: &'static str,
        /// Defect of the answer.
        #[source]
        problem: AnswerError,
    },
    /// A part that is empty or does not lie inside of a device's region.
    #[error("{part} lies outside of a region of {len:#x} bytes")]
    Outside {
        /// Offset and length in the region, bytes.
        part: Span<Offset>,
        /// Length of the region, bytes.
        len: u64,
    },
    /// A register at an offset that is not a multiple of its size.
    #[error("no register of {size} bytes lies at offset {offset:#x}")]
    Unaligned {
        /// The offset, bytes.
        offset: u64,
        /// The register's size, bytes.
        size: u64,
    },
    /// The device does not let this part of a region be mapped.
    #[error("the device does not let {part} of region {region} be mapped")]
    NotMappable {
        /// The region's index.
        region: u32,
        /// Offset and length in the region, bytes.
        part: Span<Offset>,
    },
    /// The kernel refused interrupts of a device: they are not there, another index has triggers, or the descriptor is no
    /// eventfd.
    #[error(
        "VFIO_DEVICE_SET_IRQS was refused for {count} interrupts from {start} on of index {index}, which has {there}: {}",
        io::Error::from_raw_os_error(*.errno)
    )]
    Interrupts {
        /// The index, a kind of interrupts.
        index: u32,
        /// The first one.
        start: u32,
        /// Number of them.
        count: u32,
        /// Interrupts that the device has at this index; 0 where it has no such index.
        there: u32,
        /// The error number.
        errno: i32,
    },
    /// The kernel has fewer interrupts for the device than wanted, and has set up none of them.
    #[error(
        "{wanted} interrupts of index {index} are wanted, and the kernel has {available} for the device"
    )]
    TooManyInterrupts {
        /// The index, a kind of interrupts.
        index: u32,
        /// Interrupts from the first of the index to the last of the request.
        wanted: u32,
        /// Number that a request may have.
        available: u32,
    },
    /// The interface knows no other permissions than reading and writing.
    #[error("the kernel maps for reading and writing, not for \"{prot}\"")]
    Prot {
        /// Requested access.
        prot: Prot,
    },
    /// A bitmap that has no bit for each page of the range.
    #[error("a bitmap of {words} words has no bit for each page of {page:#x} bytes in {range}")]
    Bitmap {
        /// The range of device addresses.
        range: Span<Iova>,
        /// The size of a page, bytes; a power of two in a bitmap that is well formed.
        page: u64,
        /// Words of 64 bits that there are.
        words: usize,
    },
    /// Memory that is neither in this process nor a file of a kind that the interface maps.
    #[error("the memory is neither in this process nor in a file that the kernel maps")]
    NoSource,
    /// Error of a [`Mapper`](super::Mapper) that is no error number of the kernel.
    #[error("it was not mapped or unmapped")]
    Mapper(#[source] Cause),
    /// A device's name that holds a zero byte.
    #[error("a device's name has no zero bytes")]
    Name,
}

/// Flaw in an answer of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// It ends before something that it announces.
    #[error("{len} bytes end before the structure at {offset:#x}")]
    Truncated {
        /// Offset of what is missing, bytes.
        offset: usize,
        /// Length of the answer, bytes.
        len: usize,
    },
    /// Its chain of capabilities has more links than there is room for: it is a loop.
    #[error("its capabilities form a loop")]
    Loop,
    /// It grows with every call, or is larger than any real one.
    #[error("it asks for {len} bytes, and for more after each call")]
    Endless {
        /// The length that it claims last, bytes.
        len: usize,
    },
}
