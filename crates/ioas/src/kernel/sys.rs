//! The calls to the kernel that VFIO and iommufd share.
//!
//! [`call`] takes the structures in which the kernel follows no address ([`Plain`]), so that it is
//! safe with whatever they hold; those that hold one have a function each, which takes the memory
//! itself. Only memory for a device to use comes in as a bare address: [`call_with`] is for these
//! few callers, which are `unsafe` themselves and say what must hold.

#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use runs::{Iova, Span};

use crate::kernel_error::{KernelError, Result};

/// `_IO(';', number)` of `include/uapi/asm-generic/ioctl.h`. VFIO and iommufd share the type, and
/// neither puts a direction or a size into its numbers.
pub(crate) const fn request(number: u8) -> u32 {
    (b';' as u32) << 8 | number as u32
}

/// A structure that an ioctl takes.
///
/// # Safety
///
/// `Self` is `repr(C)`, has no padding, begins with a `u32` for its own size, and any bits of it
/// are a value. Given one for `REQUEST`, the kernel reads and writes no more of it than that size
/// says, and nothing else of this process but what lies behind addresses that it holds.
pub(crate) unsafe trait Argument {
    /// The ioctl's name.
    const OPERATION: &'static str;
    /// Its number.
    const REQUEST: u32;
}

/// A structure that holds no address which the kernel follows.
///
/// # Safety
///
/// For all values of the fields, the kernel reads and writes nothing of this process but the structure.
pub(crate) unsafe trait Plain: Argument {}

/// States for each structure its ioctl, and whether it is plain.
macro_rules! arguments {
    ($($kind:ident $type:ty: $operation:literal = $number:expr;)*) => {
        #[cfg(test)]
        pub(crate) const ARGUMENTS: &[(&str, u32)] =
            &[$((<$type as Argument>::OPERATION, <$type as Argument>::REQUEST)),*];

        $(
        // SAFETY: generated from the kernel's header by bindgen, or put together from such
        // structures with `repr(C)`: all integers, size first, padding spelt out. The header says
        // of this ioctl that it takes this structure.
        unsafe impl Argument for $type {
            const OPERATION: &'static str = $operation;
            const REQUEST: u32 = request($number);
        }
        arguments!(@$kind $type);
        )*
    };
    (@plain $type:ty) => {
        // SAFETY: it holds no address, or none that the kernel follows with the size that `call`
        // announces; see the table.
        unsafe impl Plain for $type {}
    };
    (@addressed $type:ty) => {};
}
pub(crate) use arguments;

pub(crate) fn refused(operation: &'static str, error: &io::Error) -> KernelError {
    KernelError::Refused {
        operation,
        // Only errors of the standard library itself have no number.
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Result of a call, or the reason of its refusal.
pub(crate) fn check(operation: &'static str, result: libc::c_int) -> Result<u32> {
    u32::try_from(result).map_err(|_| refused(operation, &io::Error::last_os_error()))
}

/// Opens a device node for reading and writing.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => Ok(file.into()),
        Err(cause) => Err(KernelError::Open {
            path: path.into(),
            cause,
        }),
    }
}

/// Calls the ioctl that `argument` belongs to; returns what it returns.
///
/// # Safety
///
/// The kernel may use the memory at the addresses in `argument` as the ioctl's description says, for as long as it
/// says.
pub(crate) unsafe fn call_with<T: Argument>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<u32> {
    let address = std::ptr::from_mut(argument);
    // SAFETY: an `Argument` begins with a `u32` for its size.
    unsafe { address.cast::<u32>().write(size_of::<T>() as u32) };
    // SAFETY: the kernel keeps to the size just written, so to `argument`, which this call borrows
    // alone; the caller answers for the addresses in it. Of a descriptor of another kind of file
    // the request number is refused, since no other driver has this type and numbers.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), T::REQUEST as libc::Ioctl, address) };
    check(T::OPERATION, result)
}

/// Calls the ioctl that `argument` belongs to; returns what it returns.
pub(crate) fn call<T: Plain>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<u32> {
    // SAFETY: the kernel follows no address in a plain structure.
    unsafe { call_with(fd, argument) }
}

/// Refuses a bitmap that has no bit for each page of `range`, where the kernel is not told how long
/// it is. Its bit number of an address is the distance from `range.start` divided by `page`.
pub(crate) fn check_bitmap(range: Span<Iova>, page: u64, words: usize) -> Result<()> {
    let last = range.len.checked_sub(1).filter(|_| page.is_power_of_two());
    match last.map(|last| last / page / 64) {
        Some(word) if word < words as u64 => Ok(()),
        _ => Err(KernelError::Bitmap { range, page, words }),
    }
}
