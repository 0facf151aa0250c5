//! Registers of a device, mapped into this process.
//!
//! Each access is checked and then done by one volatile load or store. The mapping is no memory of
//! the program: no object lives in it, and no reference to it is ever made.

#![allow(unsafe_code)]

use std::boxed::Box;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use runs::{Offset, Span};

use crate::kernel::sys::refused;
use crate::kernel::{KernelError, Result};
use crate::memory::object::{MemoryObject, PinFailed, Pinned, ProcessMemory};

/// Registers of a device, or its memory, mapped until it is dropped.
///
/// Accesses are volatile, so one access in the program is one access of its size by the
/// processor. Registers are little-endian (PCI), whatever the processor is.
///
/// They are a [`MemoryObject`] for VFIO's type 1, which finds them by their address in this process:
/// so another device reaches them (peer to peer). A back end with tables of its own needs to know
/// where they are: [`FixedRuns`](crate::FixedRuns).
#[derive(Debug)]
pub struct DeviceRegisters {
    start: NonNull<u8>,
    len: u64,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for DeviceRegisters {}
// SAFETY: the mapping is no memory of the program: no object lives in it, and no reference to it
// is ever made. Each volatile access is one aligned load or store of the processor, so that
// accesses of several threads come one after the other, as those of several processors to a
// device always do.
unsafe impl Sync for DeviceRegisters {}

mod sealed {
    /// Any bits are a value.
    pub trait Sealed: Copy {}
}

/// A register of 1, 2, 4 or 8 bytes.
pub trait Register: sealed::Sealed {
    /// The bytes of one, in memory.
    type Bytes: AsRef<[u8]> + AsMut<[u8]> + Default;

    /// The value of a register that was read as `self` by the processor, or the other way round.
    #[must_use]
    fn little_endian(self) -> Self;

    /// The value whose bytes, lowest first, are `bytes`.
    fn from_bytes(bytes: Self::Bytes) -> Self;

    /// The bytes, lowest first.
    fn to_bytes(self) -> Self::Bytes;
}

macro_rules! registers {
    ($($type:ty)*) => {$(
        impl sealed::Sealed for $type {}

        impl Register for $type {
            type Bytes = [u8; size_of::<$type>()];

            fn little_endian(self) -> Self {
                self.to_le()
            }

            fn from_bytes(bytes: Self::Bytes) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn to_bytes(self) -> Self::Bytes {
                self.to_le_bytes()
            }
        }
    )*};
}
registers!(u8 u16 u32 u64);

/// Refuses a register that is not aligned or does not lie within `len` bytes.
pub(crate) fn check_register<T: Register>(offset: u64, len: u64) -> Result<()> {
    let size = size_of::<T>() as u64;
    if offset % size != 0 {
        return Err(KernelError::Unaligned { offset, size });
    }
    check_part(Span::new(offset, size), len)
}

/// Refuses a part that is empty or does not lie within `len` bytes.
pub(crate) fn check_part(part: Span<Offset>, len: u64) -> Result<()> {
    if Span::new(0, len).covers(&part) {
        Ok(())
    } else {
        Err(KernelError::Outside { part, len })
    }
}

impl DeviceRegisters {
    /// The bytes `part` of a file, shared with other holders.
    pub(crate) fn map(file: &File, part: Span<Offset>, read: bool, write: bool) -> Result<Self> {
        const OPERATION: &str = "mmap";
        let (Ok(offset), Ok(len)) = (libc::off_t::try_from(part.start), usize::try_from(part.len))
        else {
            return Err(refused(
                OPERATION,
                &io::Error::from_raw_os_error(libc::EOVERFLOW),
            ));
        };
        let prot =
            if read { libc::PROT_READ } else { 0 } | if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: without MAP_FIXED the kernel chooses a free address, so no memory in use is
        // touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                prot,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        match NonNull::new(start.cast()) {
            Some(start) if start.as_ptr() != libc::MAP_FAILED.cast() => Ok(Self {
                start,
                len: part.len,
            }),
            _ => Err(refused(OPERATION, &io::Error::last_os_error())),
        }
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True when there are none, which the kernel does not map.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address at which this process has them, for a mapping that lets one device reach
    /// another's registers (peer to peer).
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Reads the register at `offset` bytes.
    ///
    /// The signal SIGBUS ends a process that reads while the device's memory is switched off, and
    /// SIGSEGV one that reads what was mapped for writing only.
    ///
    /// # Errors
    ///
    /// [`KernelError::Outside`], [`KernelError::Unaligned`].
    pub fn read<T: Register>(&self, offset: u64) -> Result<T> {
        check_register::<T>(offset, self.len)?;
        // SAFETY: the register lies inside of the mapping, which is page-aligned, so that the
        // register is aligned; any bits are a `T`.
        let value = unsafe {
            self.start
                .byte_add(offset as usize)
                .cast::<T>()
                .read_volatile()
        };
        Ok(value.little_endian())
    }

    /// Writes the register at `offset` bytes.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn write<T: Register>(&self, offset: u64, value: T) -> Result<()> {
        check_register::<T>(offset, self.len)?;
        // SAFETY: as for `read`; no reference to the mapping exists.
        unsafe {
            self.start
                .byte_add(offset as usize)
                .cast::<T>()
                .write_volatile(value.little_endian());
        }
        Ok(())
    }
}

impl Drop for DeviceRegisters {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and nothing borrows it. The call cannot fail for a
        // whole mapping but for want of kernel memory, and then leaves it mapped, which is sound.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len as usize) };
    }
}

impl MemoryObject for DeviceRegisters {
    fn len(&self) -> u64 {
        self.len
    }

    /// Registers are no memory, and are not charged.
    fn charge(&self, _part: Span<Offset>) -> u64 {
        0
    }

    fn is_mmio(&self) -> bool {
        true
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> core::result::Result<Box<dyn Pinned>, PinFailed> {
        let why = "where registers are physically is not known by their address in this process";
        Err(PinFailed::Refused(why.into()))
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        // SAFETY: they stay mapped until this value is dropped, and are accessed by volatile
        // accesses only.
        Some(unsafe { ProcessMemory::new(self.address()) })
    }
}
