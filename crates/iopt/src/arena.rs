//! Table memory in one stretch: an arena.
//!
//! An [`Arena`] turns a stretch of memory into table memory. A table's address is `base + offset`:
//! where the stretch is physically contiguous (a huge page, a direct map) `base` is its real
//! physical address, and hardware can walk the tables; otherwise `base` opens a window of
//! addresses at which no data lies, and the software unit walks them.
//!
//! Every address is reduced to the arena by a mask, so no content of a table, damaged or hostile,
//! leads outside of it. The size is a power of two and `base` a multiple of it.
//!
//! # Who holds a page
//!
//! Pages that were never used are handed out in order and are known to be zero. Pages that came
//! back form one list, linked through their [`Meta`]; it is used first, since its pages are warm.
//! Both are kept under a spin lock that is held for as long as it takes to cut the list.

use core::fmt;
use core::hint;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::cell::Cell;
use crate::error::NoTables;
use crate::memory::{Chain, Meta, Reserve, TableMemory};

use held::StorageCell;

/// [`Meta`] with the processor's own atomics.
pub type AtomicMeta = Meta<AtomicU64, AtomicU32>;

impl AtomicMeta {
    /// Meta of a table that is not in use; for arenas in statics.
    pub const fn new() -> Self {
        Self {
            next: AtomicU64::new(0),
            note: AtomicU32::new(0),
        }
    }
}

/// Bits of a table's address: those of the widest format, RISC-V's. A table with fewer refuses the memory
/// (`BuildError::TableAddress`).
const ADDRESS_BITS: u32 = 56;

/// The fewest tables of an arena.
const LEAST: u64 = 16;

/// The memory under an [`Arena`].
///
/// # Safety
///
/// Both functions return the same slices at each call, for as long as the value lives and also
/// after it was moved (as bytes, by the arena: it may own them by `Box`). Nothing else writes to them
/// as long as an arena holds the value, except by atomic accesses (as units do, when they set accessed
/// and dirty bits).
pub unsafe trait Storage {
    /// One entry.
    type Cell: Cell;

    /// The tables' memory, aligned to the size of a table where hardware walks it. All zero at
    /// first, but for a [`Takeover`](crate::Takeover).
    fn cells(&self) -> &[Self::Cell];
    /// A [`Meta`] for each table in it, default at first, but for a takeover.
    fn metas(&self) -> &[AtomicMeta];
}

/// Why a stretch of memory is no arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The size in bytes is not a power of two of at least 16 tables.
    #[error("an arena of {0} bytes: not a power of two, or too small")]
    Size(u64),
    /// The base address is not a multiple of the size, or the arena would end beyond 2^56.
    #[error("arena base {base:#x} is not a multiple of its size {size:#x}, or too high")]
    Base {
        /// The address.
        base: u64,
        /// The size in bytes.
        size: u64,
    },
    /// There are fewer metas than tables.
    #[error("{metas} metas for {tables} tables")]
    Metas {
        /// Tables.
        tables: usize,
        /// Metas.
        metas: usize,
    },
}

/// Where the tables of an arena and their metas lie, as long as the arena does.
#[derive(Debug)]
#[cfg_attr(not(feature = "alloc"), allow(dead_code))]
pub struct Window<'a, C> {
    place: Place<C>,
    table_log2: u32,
    lent: PhantomData<&'a C>,
}

/// The same without a promise for how long.
#[derive(Debug)]
struct Place<C> {
    cells: NonNull<C>,
    metas: NonNull<AtomicMeta>,
    /// Size in bytes − 1.
    mask: u64,
}

impl<C> Copy for Place<C> {}
impl<C> Clone for Place<C> {
    fn clone(&self) -> Self {
        *self
    }
}

// SAFETY: it leads to atomics, which may be used from any thread.
unsafe impl<C: Sync> Send for Place<C> {}
// SAFETY: as above.
unsafe impl<C: Sync> Sync for Place<C> {}

impl<C: Cell> Place<C> {
    /// See [`TableMemory::entries`]. There are `least` bytes: where that is a constant, most tables are
    /// known to fit.
    ///
    /// # Safety
    ///
    /// The storage from which an arena took this place lives for `'a`, and has `least` bytes.
    #[inline(always)]
    unsafe fn entries<'a>(self, least: u64, table: u64, count: usize) -> &'a [C] {
        let bytes = count as u64 * C::BYTES as u64;
        let fits = bytes <= least || bytes.wrapping_sub(1) <= self.mask;
        if !count.is_power_of_two() || !fits {
            return &[];
        }
        let offset = table & self.mask & !(bytes - 1);
        // SAFETY: `bytes` and the arena's size are powers of two and `offset` is a multiple of the
        // one below the other, so `[offset, offset + bytes)` lies inside the storage, which lives
        // (the caller's promise) and stays in place (contract of `Storage`). Cells are only accessed
        // atomically.
        unsafe { core::slice::from_raw_parts(self.cells.as_ptr().byte_add(offset as usize), count) }
    }

    /// See [`TableMemory::meta`].
    ///
    /// # Safety
    ///
    /// The storage from which an arena with tables of 2^`log2` bytes took this place lives for `'a`.
    #[inline(always)]
    unsafe fn meta<'a>(self, log2: u32, table: u64) -> &'a AtomicMeta {
        let page = (table & self.mask) >> log2;
        // SAFETY: `Arena::with_table_size` has seen that there is a meta for every page below the arena's size,
        // to which the mask has reduced `page`; the storage lives (the caller's promise).
        unsafe { self.metas.add(page as usize).as_ref() }
    }
}

/// Table memory in one stretch, for tables of 2^`TABLE_LOG2` bytes.
///
/// # Table memory in statics
///
/// ```
/// use core::sync::atomic::AtomicU64;
///
/// use iopt::format::VtdSs;
/// use iopt::{Arena, AtomicMeta, Prot, Table, TableOps as _};
/// use runs::Span;
///
/// /// A power of two, at least 16.
/// const TABLES: usize = 64;
///
/// /// Aligned to its own size.
/// #[repr(align(0x4_0000))]
/// struct Tables([AtomicU64; TABLES * 512]);
///
/// static CELLS: Tables = Tables([const { AtomicU64::new(0) }; TABLES * 512]);
/// static METAS: [AtomicMeta; TABLES] = [const { AtomicMeta::new() }; TABLES];
///
/// # fn physical(_: *const AtomicU64) -> u64 { 0x4000_0000 }
/// // Where the unit sees them. `physical` stands for the kernel's own; the result is aligned to the size, too.
/// let base = physical(CELLS.0.as_ptr());
/// let arena = Arena::new((&CELLS.0[..], &METAS[..]), base)?;
/// let mut table = Table::new(VtdSs::new(4)?, &arena)?;
///
/// table.map(0x1000, &[Span::new(0x8000_0000, 4096)], Prot::RW)?;
/// assert_eq!(table.translate(0x1234), Some(0x8000_0234));
/// # Ok::<_, Box<dyn core::error::Error>>(())
/// ```
pub struct Arena<S: Storage, const TABLE_LOG2: u32 = 12> {
    place: Place<S::Cell>,
    base: u64,
    lock: AtomicBool,
    // Written under the lock only.
    free_head: AtomicU64,
    free: AtomicU64,
    /// Offset of the first byte that was never handed out.
    unused: AtomicU64,
    /// The memory node of all its pages, where it is known.
    node: Option<u32>,
    storage: StorageCell<S>,
}

impl<S: Storage> Arena<S> {
    /// An arena of tables of 4 KiB over `storage`, whose first byte has the address `base` for units and
    /// walkers.
    pub fn new(storage: S, base: u64) -> Result<Self, ArenaError> {
        Self::with_table_size(storage, base)
    }
}

impl<S: Storage, const TABLE_LOG2: u32> Arena<S, TABLE_LOG2> {
    const TABLE: u64 = 1 << TABLE_LOG2;

    /// [`new`](Arena::new) for tables of another size than 4 KiB, which the arena's type names.
    pub fn with_table_size(storage: S, base: u64) -> Result<Self, ArenaError> {
        let storage = StorageCell::new(storage);
        let (cells, metas) = (storage.get().cells(), storage.get().metas());
        let size = size_of_val(cells) as u64;
        if !size.is_power_of_two() || size < LEAST * Self::TABLE {
            return Err(ArenaError::Size(size));
        }
        let last = base.checked_add(size - 1);
        if base & (size - 1) != 0 || last.is_none_or(|last| last >> ADDRESS_BITS != 0) {
            return Err(ArenaError::Base { base, size });
        }
        let tables = (size >> TABLE_LOG2) as usize;
        if metas.len() < tables {
            return Err(ArenaError::Metas {
                tables,
                metas: metas.len(),
            });
        }
        Ok(Self {
            place: Place {
                cells: NonNull::from(cells).cast(),
                metas: NonNull::from(metas).cast(),
                mask: size - 1,
            },
            base,
            lock: AtomicBool::new(false),
            free_head: AtomicU64::new(0),
            free: AtomicU64::new(0),
            unused: AtomicU64::new(0),
            node: None,
            storage,
        })
    }

    /// An arena with no page to give: all are in use, or may be.
    pub(crate) fn used_up(storage: S, base: u64) -> Result<Self, ArenaError> {
        let arena = Self::with_table_size(storage, base)?;
        arena.unused.set(arena.size());
        Ok(arena)
    }

    /// Makes a page free that was not.
    pub(crate) fn add_free(&self, page: u64) {
        let mut chain = Chain::empty();
        chain.push(self, page);
        self.reclaim(chain);
    }

    /// Says on which memory node it lies.
    pub const fn on_node(mut self, node: Option<u32>) -> Self {
        self.node = node;
        self
    }

    /// The memory under it.
    pub const fn storage(&self) -> &S {
        self.storage.get()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.place.mask + 1
    }

    /// Address of the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// True when `address` lies inside.
    pub fn contains(&self, address: u64) -> bool {
        address & !self.place.mask == self.base
    }

    /// Tables that are handed out or reserved.
    pub fn in_use(&self) -> u64 {
        self.locked(|| (self.unused.get() >> TABLE_LOG2) - self.free.get())
    }

    /// The entry at `address`, as a unit reads it; `None` outside the arena or when the address is
    /// not a multiple of the entry's size.
    pub fn read(&self, address: u64) -> Option<u64> {
        self.cell(address).map(Cell::get_acquire)
    }

    /// The cell at `address`.
    pub(crate) fn cell(&self, address: u64) -> Option<&S::Cell> {
        if !self.contains(address) || address % S::Cell::BYTES as u64 != 0 {
            return None;
        }
        self.entries(address, 1).first()
    }

    fn locked<T>(&self, f: impl FnOnce() -> T) -> T {
        let mut round = 0;
        while self
            .lock
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            pause(round);
            round += 1;
        }
        let result = f();
        self.lock.store(false, Ordering::Release);
        result
    }

    /// Puts tables, of which there is at least one, in front of the list.
    #[inline(never)]
    fn put_back(&self, chain: &Chain) {
        self.locked(|| {
            self.meta(chain.tail).next.set(self.free_head.get());
            self.free_head.set(chain.head);
            self.free.set(self.free.get() + chain.count);
        });
    }

    fn available(&self) -> u64 {
        self.free.get() + ((self.size() - self.unused.get()) >> TABLE_LOG2)
    }
}

impl<S: Storage, const TABLE_LOG2: u32> TableMemory for Arena<S, TABLE_LOG2> {
    type Cell = S::Cell;
    type Link = AtomicU64;
    type Count = AtomicU32;
    const TABLE_BYTES: u64 = Self::TABLE;

    #[inline(always)]
    fn entries(&self, table: u64, count: usize) -> &[S::Cell] {
        // SAFETY: the storage lives as long as `self`, and `with_table_size` has seen that it has so many tables.
        unsafe { self.place.entries(LEAST << TABLE_LOG2, table, count) }
    }

    #[inline(always)]
    fn meta(&self, table: u64) -> &AtomicMeta {
        // SAFETY: as above.
        unsafe { self.place.meta(TABLE_LOG2, table) }
    }

    fn window(&self) -> Option<Window<'_, S::Cell>> {
        Some(Window {
            place: self.place,
            table_log2: TABLE_LOG2,
            lent: PhantomData,
        })
    }

    fn last_address(&self) -> u64 {
        self.base | self.place.mask
    }

    fn node(&self, _table: u64) -> Option<u32> {
        self.node
    }

    #[inline]
    fn wait(&self, round: u32) {
        pause(round);
    }

    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        self.locked(|| {
            let available = self.available();
            if count > available {
                return Err(NoTables {
                    needed: count.saturating_mul(Self::TABLE),
                    available: available * Self::TABLE,
                });
            }
            let recycled = count.min(self.free.get());
            let head = self.free_head.get();
            let mut rest = head;
            for _ in 0..recycled {
                rest = self.meta(rest).next.get();
            }
            self.free_head.set(rest);
            self.free.set(self.free.get() - recycled);
            let fresh = count - recycled;
            let unused = self.unused.get();
            self.unused.set(unused + fresh * Self::TABLE);
            Ok(Reserve {
                head,
                recycled,
                zeroed: 0,
                next_fresh: self.base + unused,
                fresh,
            })
        })
    }

    fn allocate(&self, bytes: usize) -> Result<u64, NoTables> {
        let bytes = (bytes as u64).next_power_of_two().max(Self::TABLE);
        if bytes == Self::TABLE {
            let mut reserve = self.reserve(1)?;
            let Some((table, zeroed)) = reserve.take(self) else {
                return Err(NoTables {
                    needed: bytes,
                    available: 0,
                });
            };
            if !zeroed {
                self.entries(table, Self::TABLE as usize / S::Cell::BYTES)
                    .iter()
                    .for_each(|c| c.set(0));
            }
            return Ok(table);
        }
        // Larger roots come from memory that was never used; what alignment leaves over goes to
        // the list.
        self.locked(|| {
            let unused = self.unused.get();
            let start = unused.next_multiple_of(bytes);
            if start + bytes > self.size() {
                let available = self.available() * Self::TABLE;
                return Err(NoTables {
                    needed: bytes,
                    available,
                });
            }
            for offset in (unused..start).step_by(Self::TABLE as usize) {
                self.meta(offset).next.set(self.free_head.get());
                self.free_head.set(self.base + offset);
                self.free.set(self.free.get() + 1);
            }
            self.unused.set(start + bytes);
            Ok(self.base + start)
        })
    }

    fn give_back(&self, mut reserve: Reserve) {
        let mut chain = Chain::empty();
        while let Some((table, _)) = reserve.take(self) {
            chain.push(self, table);
        }
        self.reclaim(chain);
    }

    #[inline]
    fn reclaim(&self, chain: Chain) {
        // Most reserves of a single page have nothing left over.
        if !chain.is_empty() {
            self.put_back(&chain);
        }
    }
}

/// A moment of waiting for another thread, the `round`th in a row. The other thread may need
/// this processor: where there is a scheduler, this thread soon yields.
#[cold]
fn pause(round: u32) {
    #[cfg(feature = "std")]
    if round >= 32 {
        return std::thread::yield_now();
    }
    let _ = round;
    hint::spin_loop();
}

impl<S: Storage, const TABLE_LOG2: u32> fmt::Debug for Arena<S, TABLE_LOG2> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("base", &format_args!("{:#x}", self.base))
            .field("size", &(self.place.mask + 1))
            .finish_non_exhaustive()
    }
}

// SAFETY: slices borrowed for as long as the value lives never change or move; exclusive use of
// what is borrowed is the borrower's, through atomics only.
unsafe impl<C: Cell> Storage for (&[C], &[AtomicMeta]) {
    type Cell = C;

    fn cells(&self) -> &[C] {
        self.0
    }

    fn metas(&self) -> &[AtomicMeta] {
        self.1
    }
}

/// Table memory from the heap, for tests, tools and user-space programs.
#[cfg(feature = "alloc")]
pub use heap::{HeapArena, HeapStorage, HeapTables};

#[cfg(feature = "alloc")]
pub(crate) mod erased;
#[cfg(feature = "alloc")]
mod heap;
mod held;

#[cfg(all(test, feature = "alloc"))]
mod tests;
