//! Arenas on the heap.

use alloc::alloc::{Layout, alloc_zeroed};
use alloc::boxed::Box;

use super::*;
use crate::wide::WideCell;

/// The base address of [`HeapTables::with_tables`]: above any memory that a machine of today
/// has.
const WINDOW: u64 = 1 << 46;

/// Zeroed memory from the heap. A large allocation takes memory from the system only as it is
/// touched.
#[derive(Debug)]
pub struct HeapStorage<C = WideCell> {
    cells: Box<[C]>,
    metas: Box<[AtomicMeta]>,
}

/// An [`Arena`] on the heap, for tables of 2^`TABLE_LOG2` bytes with cells `C`: [`WideCell`] or
/// [`AtomicU64`], [`AtomicU32`].
pub type HeapArena<C, const TABLE_LOG2: u32> = Arena<HeapStorage<C>, TABLE_LOG2>;

/// An [`Arena`] on the heap, for tables of 4 KiB with entries of 8 bytes.
pub type HeapTables = HeapArena<WideCell, 12>;

impl<C: Cell + AllZero, const TABLE_LOG2: u32> HeapArena<C, TABLE_LOG2> {
    /// Room for at least `tables` tables, in a window of addresses from 64 TiB on.
    pub fn with_tables(tables: u64) -> Result<Self, ArenaError> {
        Self::with_tables_at(tables, WINDOW)
    }

    /// Room for at least `tables` tables, in a window of addresses from `base` on.
    pub fn with_tables_at(tables: u64, base: u64) -> Result<Self, ArenaError> {
        let tables = tables.clamp(16, 1 << 40).next_power_of_two();
        let size = tables << TABLE_LOG2;
        let entries = (size / C::BYTES as u64) as usize;
        let storage = HeapStorage::new(entries, tables as usize).ok_or(ArenaError::Size(size))?;
        Self::with_table_size(storage, base)
    }
}

impl<C: AllZero> HeapStorage<C> {
    /// Room for `entries` entries in `tables` tables; `None` when the heap has no such room.
    pub fn new(entries: usize, tables: usize) -> Option<Self> {
        Some(Self {
            cells: zeroed(entries)?,
            metas: zeroed(tables)?,
        })
    }
}

/// A type for which all bytes zero is a value. Sealed: the cells of [`HeapArena`], and [`AtomicMeta`].
pub trait AllZero {}
impl AllZero for AtomicU64 {}
impl AllZero for AtomicU32 {}
impl AllZero for WideCell {}
impl AllZero for AtomicMeta {}

fn zeroed<T: AllZero>(len: usize) -> Option<Box<[T]>> {
    let layout = Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return None;
    }
    // SAFETY: the layout has a size.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    let slice = core::ptr::slice_from_raw_parts_mut(start.as_ptr().cast::<T>(), len);
    // SAFETY: the memory comes from the global allocator with the layout of `[T; len]`, which
    // is the one with which the box will free it, and zero bytes are values of `T`.
    Some(unsafe { Box::from_raw(slice) })
}

// SAFETY: boxed slices stay where they are when the box moves, and no other code can reach them.
unsafe impl<C: Cell + AllZero> Storage for HeapStorage<C> {
    type Cell = C;

    fn cells(&self) -> &[C] {
        &self.cells
    }

    fn metas(&self) -> &[AtomicMeta] {
        &self.metas
    }
}
