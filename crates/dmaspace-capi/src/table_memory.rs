//! Where tables lie: memory of this process, or of the caller.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspace::hostmem::Mapping;
use dmaspace::ioas::MappedStorage;
use dmaspace::iopt::{Arena, HeapArena};

use crate::boundary::input;
use crate::status::{Failure, Result, Status};

/// The memory of a table's pages. All zero is a good choice: 1 MiB that this library takes.
///
/// Memory of the caller is a power of two of bytes, at least 16 tables, and aligned to a page of 4 KiB,
/// for units that walk the tables to the format's tables as well. It is cleared, stays the caller's, and
/// must stay mapped, and be written to by nobody else but units, until the table or the address space is
/// destroyed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TableMemory {
    /// The first byte; NULL: this library takes the memory, rounded up to a power of two.
    pub start: *mut c_void,
    /// Bytes; 0, with `start` NULL: 1 MiB.
    pub bytes: u64,
    /// The address of the first byte as units see it (for hardware: its physical address), a multiple of
    /// the size. 0, with `start` NULL: an address above all memory, for who walks the tables in software.
    pub base: u64,
}

/// What is taken without a size.
const DEFAULT_BYTES: u64 = 1 << 20;

impl TableMemory {
    /// What `pointer` leads to; NULL stands for memory that is taken.
    ///
    /// # Safety
    ///
    /// As [`input`].
    pub(crate) unsafe fn or_taken(pointer: *const Self) -> Result<Self> {
        if pointer.is_null() {
            return Ok(Self {
                start: ptr::null_mut(),
                bytes: 0,
                base: 0,
            });
        }
        // SAFETY: the caller's promise.
        unsafe { input(pointer, "memory") }.copied()
    }

    /// Memory of this process for tables of 1 KiB with entries of 4 bytes, whose addresses have at most
    /// `address_bits` bits.
    pub(crate) fn taken(&self, address_bits: u32) -> Result<HeapArena<AtomicU32, 10>> {
        if !self.start.is_null() {
            let message = "tables with entries of 4 bytes lie in memory that is taken here";
            return Err(Failure::new(Status::TableMemory, message));
        }
        // The root has 16 KiB.
        let tables = self.bytes_to_take(32 << 10)? >> 10;
        let base = self.base_or_window(address_bits);
        Ok(HeapArena::with_tables_at(tables, base)?)
    }

    /// An arena for tables of 2^`LOG2` bytes with entries of 8, whose addresses have at most
    /// `address_bits` bits.
    ///
    /// # Safety
    ///
    /// If `start` is not NULL: what this structure's documentation says of that memory.
    pub(crate) unsafe fn arena<const LOG2: u32>(
        &self,
        address_bits: u32,
    ) -> Result<Arc<Arena<MappedStorage, LOG2>>> {
        let (storage, base) = match NonNull::new(self.start.cast::<u8>()) {
            // SAFETY: the caller's promise.
            Some(start) => (unsafe { self.given(start) }?, self.base),
            None => {
                let bytes = self.bytes_to_take(16 << LOG2)?;
                let storage = MappedStorage::new(bytes, None)
                    .map_err(|cause| Failure::of(Status::TableMemory, &*cause))?;
                (storage, self.base_or_window(address_bits))
            }
        };
        Ok(Arc::new(Arena::new(storage, base)?))
    }

    /// How much is to be taken: at least `least`.
    fn bytes_to_take(&self, least: u64) -> Result<u64> {
        let bytes = match self.bytes {
            0 => DEFAULT_BYTES,
            bytes => bytes,
        };
        let rounded = bytes.max(least).checked_next_power_of_two();
        rounded.ok_or_else(|| {
            let message = format!("{bytes:#x} bytes of table memory are beyond any power of two");
            Failure::new(Status::TableMemory, message)
        })
    }

    /// The base, or the window that meets no memory of a machine of today.
    fn base_or_window(&self, address_bits: u32) -> u64 {
        match self.base {
            0 => 1 << address_bits.saturating_sub(1).min(46),
            base => base,
        }
    }

    /// # Safety
    ///
    /// As for [`arena`](Self::arena).
    unsafe fn given(&self, start: NonNull<u8>) -> Result<MappedStorage> {
        let owner = Arc::new(());
        // SAFETY: the caller answers for the memory until the handle is destroyed, and with it the
        // mapping; nobody but this library, which uses cells, and units write to it.
        let mapping = unsafe { Mapping::foreign(owner, start, self.bytes, None) }
            .map_err(|cause| Failure::of(Status::TableMemory, &cause))?;
        let cells = mapping.cells().iter();
        cells.for_each(|cell| cell.store(0, Ordering::Relaxed));
        Ok(MappedStorage::over(mapping))
    }
}
