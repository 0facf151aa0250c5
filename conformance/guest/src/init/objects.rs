//! Memory that only a kernel pins, by its address or as a file.
//!
//! A kernel wants memory to stay where it is for as long as it is mapped: [`ProcessMemory::new`] is
//! the promise.

use std::{
    ops::ControlFlow,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    ptr,
};

use ioas::{Mapper, MemoryObject, PinFailed, Pinned, ProcessMemory};
use runs::{Offset, Span};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use crate::semantics::table::{BAD, MEMORY, PAGE, Raw, Surroundings};

/// A dma-buf over memory of a device.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    pub(crate) file: OwnedFd,
    pub(crate) len: u64,
}

impl MemoryObject for DmaBuf {
    fn len(&self) -> u64 {
        self.len
    }

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
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Err(not_here())
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_fd(), 0))
    }
}

/// Memory in which some cannot be pinned. It stays for good, and nobody looks at it.
#[derive(Debug)]
pub(crate) struct Patchwork {
    address: u64,
}

impl Patchwork {
    /// The memory that rows map.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: without an address the kernel chooses a free one.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), MEMORY as usize, prot, flags) }?;
        let none = start.wrapping_byte_add(BAD as usize);
        // SAFETY: a part of what was just mapped, of which nobody holds a reference.
        unsafe { mprotect(none, PAGE as usize, MprotectFlags::empty()) }?;
        let address = start.addr() as u64;
        Ok(Self { address })
    }

    /// A kernel whose rows map this memory.
    pub(crate) fn raw<K: Mapper>(
        &self,
        space: K,
        devices: Vec<K::Device>,
        around: Box<dyn Surroundings<K>>,
    ) -> Raw<K> {
        // SAFETY: it is never unmapped, and has as many bytes.
        unsafe { Raw::new(space, devices, self.address, around) }
    }
}

impl MemoryObject for Patchwork {
    fn len(&self) -> u64 {
        MEMORY
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Err(not_here())
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        // SAFETY: it is never unmapped, and nobody looks at it.
        Some(unsafe { ProcessMemory::new(self.address) })
    }
}

fn not_here() -> PinFailed {
    PinFailed::Refused("only a kernel pins this".into())
}
