//! A driver's pages out of a mapping of this process: [`HostPages`].

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use hostmem::Mapping;
use runs::Span;

use crate::adapters::virtio_drivers::{DmaPages, PageSource};
use crate::dma::Iovas;
use crate::memory::Memory;
use crate::memory::host::HostMemory;
use crate::memory::ledger::Ledger;
use crate::memory::object::Cause;
#[cfg(doc)]
use crate::memory::object::MemoryObject;

/// Pages of one mapping, whose kind and memory node the caller chooses. What is allocated at a time is rounded up to a
/// power of two up to 4 MiB. Only what is mapped is pinned and charged: [over huge pages](MemoryObject::charge) each
/// allocation counts the whole page in which it lies, where the pin does.
pub struct HostPages {
    mapping: Arc<Mapping>,
    memory: Arc<Memory>,
    free: Iovas,
}

impl core::fmt::Debug for HostPages {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("HostPages")
            .field("mapping", &self.mapping)
            .finish_non_exhaustive()
    }
}

/// The mapping has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no {wanted:#x} bytes of {len:#x} are free; the longest range has {longest:#x}")]
struct Full {
    wanted: u64,
    len: u64,
    longest: u64,
}

impl HostPages {
    /// All of `mapping`, which nothing else uses, charged to `ledger`.
    pub fn new(mapping: Arc<Mapping>, ledger: &Arc<Ledger>) -> Self {
        let whole = Span::new(0, mapping.len());
        Self {
            memory: Memory::new(Arc::new(HostMemory::new(Arc::clone(&mapping))), ledger),
            free: Iovas::new(&[whole], 4096, 1),
            mapping,
        }
    }

    /// The memory of which these are parts.
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

// SAFETY: the mapping stays while the memory does, which every `DmaPages` holds; ranges that are allocated are disjoint;
// cells are stored to as zeros. The mapping begins on a page, and so does each range.
#[allow(unsafe_code)]
unsafe impl PageSource for HostPages {
    fn allocate(&self, bytes: u64) -> Result<DmaPages, Cause> {
        let found = self.free.allocate(bytes).map_err(|longest| Full {
            wanted: bytes,
            len: self.mapping.len(),
            longest,
        });
        let start = found.map_err(Box::new)?.start;
        let cells = self.mapping.cells();
        let cells = cells.get(start as usize / 8..(start + bytes) as usize / 8);
        let Some(cells) = cells else {
            return Err("a range outside of its mapping".into());
        };
        for cell in cells {
            cell.store(0, Ordering::Relaxed);
        }
        Ok(DmaPages {
            memory: Arc::clone(&self.memory),
            part: Span::new(start, bytes),
            address: NonNull::from(cells).cast(),
        })
    }

    fn free(&self, pages: DmaPages) {
        self.free.free(pages.part.start, pages.part.len);
    }
}
