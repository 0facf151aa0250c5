//! Memory that only a kernel pins, by its address or as a file.
//!
//! A kernel wants memory to stay where it is for as long as it is mapped: [`ProcessMemory::new`] is
//! the promise.

use std::{
    ops::ControlFlow,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::Arc,
};

use anyhow::Context as _;
use hostmem::Mapping;
use ioas::{Mapper, MemoryObject, PinFailed, Pinned, ProcessMemory};
use runs::{Offset, Span};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::semantics::table::{BAD, MEMORY, PAGE, Raw, Surroundings};

/// Memory in which some cannot be pinned. It stays for good, and is not accessed here.
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
        // SAFETY: a part of what was just mapped, to which there is no reference.
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
        // SAFETY: it is never unmapped, and this process does not access it.
        Some(unsafe { ProcessMemory::new(self.address) })
    }
}

/// A mapping, unmapped when it is dropped: as long as it has registers of a device, that is open.
struct Mapped(usize, usize);

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: its owner was the last to know of it.
        let unmapped = unsafe { munmap(ptr::with_exposed_provenance_mut(self.0), self.1) };
        if let Err(error) = unmapped {
            println!("registers stay mapped: {error}");
        }
    }
}

/// Memory of `len` bytes with a page of a device's registers, from `offset` of its file on, at `at`.
pub(crate) fn with_a_page(
    device: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    at: u64,
) -> anyhow::Result<Arc<Mapping>> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without an address the kernel chooses a free one.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), len as usize, prot, MapFlags::PRIVATE) }?;
    let page = start.wrapping_byte_add(at as usize);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: it takes the place of a part of what was just mapped, to which there is no reference.
    unsafe { mmap(page, PAGE as usize, prot, flags, device, offset) }?;
    let owner = Arc::new(Mapped(start.expose_provenance(), len as usize));
    let start = NonNull::new(start.cast()).context("mapped at 0")?;
    // SAFETY: it is unmapped with its owner, and known to the mapping alone, which has atomic cells.
    Ok(Arc::new(unsafe {
        Mapping::foreign(owner, start, len, None)
    }?))
}

fn not_here() -> PinFailed {
    PinFailed::Refused("only a kernel pins this".into())
}
