//! Table memory for the page tables of others and for those by hand: 4 KiB pages of this thread.
//!
//! Every page was written to before it is handed out, so that no operation pays for a first touch,
//! and none is zero: what was never used is full of [`DIRT`], and what comes back keeps what it
//! held. The page that came back last is handed out first, since it is warm.
//!
//! The physical address of a page is its address in this process, so that no crate pays for the way
//! from one to the other. Pages are never given back to the system: an address that was handed out
//! once is that of a page for as long as the process lives.
//!
//! The list is the thread's own. Some crates want an allocator that any thread may use, and one
//! wants functions without a receiver; a lock would be timed with every table.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Entries of a page.
pub const ENTRIES: usize = 512;
/// Content of pages before they are used: present in no format.
pub const DIRT: u64 = 0xD1D1_D1D1_D1D1_D1D0;
/// Pages that are taken from the system at once.
const CHUNK: usize = 1024;

/// A page, as the entries of a table.
#[repr(C, align(4096))]
pub struct Page([AtomicU64; ENTRIES]);

impl Page {
    /// A page that was used.
    pub fn dirty() -> Self {
        Self([const { AtomicU64::new(DIRT) }; ENTRIES])
    }

    /// The entry at `index` modulo [`ENTRIES`].
    #[inline(always)]
    pub fn entry(&self, index: u64) -> &AtomicU64 {
        &self.0[index as usize % ENTRIES]
    }

    /// All entries.
    #[inline(always)]
    pub fn entries(&self) -> &[AtomicU64; ENTRIES] {
        &self.0
    }

    /// All entries of a page that is not shared.
    #[inline(always)]
    pub fn entries_mut(&mut self) -> &mut [AtomicU64; ENTRIES] {
        &mut self.0
    }
}

/// The pages of a thread.
struct Pool {
    /// Addresses of the free pages; the next one to hand out is the last.
    free: ManuallyDrop<Vec<u64>>,
    /// Number of pages in use.
    in_use: usize,
    /// The first page of each [`CHUNK`].
    chunks: ManuallyDrop<Vec<u64>>,
}

thread_local! {
    // Not dropped, so that access is no more than an addition.
    static POOL: RefCell<Pool> = const {
        RefCell::new(Pool {
            free: ManuallyDrop::new(Vec::new()),
            in_use: 0,
            chunks: ManuallyDrop::new(Vec::new()),
        })
    };
}

/// Hands out a page, which is dirty; its address is a multiple of [`PAGE`].
#[inline]
pub fn allocate() -> u64 {
    POOL.with_borrow_mut(|pool| {
        pool.in_use += 1;
        loop {
            match pool.free.pop() {
                Some(at) => return at,
                None => pool.grow(),
            }
        }
    })
}

/// Takes back a page that [`allocate`] handed out and that is not used any more.
///
/// # Safety
///
/// It was handed out and not taken back since; nothing refers to it.
#[inline]
pub unsafe fn release(at: u64) {
    POOL.with_borrow_mut(|pool| {
        pool.in_use -= 1;
        pool.free.push(at);
    });
}

/// Sees to it that the next `pages` pages need nothing of the system.
pub fn reserve(pages: usize) {
    POOL.with_borrow_mut(|pool| {
        while pool.free.len() < pages {
            pool.grow();
        }
        // The list itself grows no more, either.
        pool.free.reserve(pages);
    });
}

/// Pages that this thread has handed out and not taken back.
pub fn in_use() -> usize {
    POOL.with_borrow(|pool| pool.in_use)
}

/// The page at an address.
///
/// # Safety
///
/// `at` was returned by [`allocate`], by any thread, and for as long as the reference is used the
/// page is not written to except through its atomic entries.
#[inline(always)]
pub unsafe fn page(at: u64) -> &'static Page {
    // SAFETY: the address is that of a `Page` whose address was exposed and that is never freed;
    // all writes to it are atomic, as the caller ensures.
    unsafe { &*ptr::with_exposed_provenance::<Page>(at as usize) }
}

impl Pool {
    /// Takes more pages from the system and writes to all of them.
    #[cold]
    fn grow(&mut self) {
        let pages: Box<[Page]> = (0..CHUNK).map(|_| Page::dirty()).collect();
        let pages = Box::leak(pages);
        let first = pages.as_mut_ptr().expose_provenance() as u64;
        // In ascending order, at first, below what is free and warm.
        let more = (0..CHUNK as u64).rev().map(|n| first + n * PAGE);
        self.free.splice(0..0, more);
        self.chunks.push(first);
    }
}

/// Gives back tables of x86-64, down from the one at `table`, which is of `level` (0 the lowest).
///
/// # Safety
///
/// `table` and the tables under it were handed out by [`allocate`], each is linked once, and they
/// are not used any more.
pub unsafe fn release_tree(table: u64, level: u32) {
    if level > 0 {
        // SAFETY: a table that nothing else uses.
        for entry in unsafe { page(table) }.entries() {
            let entry = entry.load(Ordering::Relaxed);
            if entry & 1 != 0 && entry & 1 << 7 == 0 {
                // SAFETY: a present entry that is no leaf links a table, as the caller says.
                unsafe { release_tree(entry & ADDRESS, level - 1) };
            }
        }
    }
    // SAFETY: handed out, and linked nowhere else.
    unsafe { release(table) };
}

/// The address in an entry of x86-64: bits 51 to 12 (AMD64 Architecture Programmer's Manual volume
/// 2, "Page-Translation-Table Entry Fields").
pub(crate) const ADDRESS: u64 = ((1 << 52) - 1) & !(PAGE - 1);

/// The memory of this thread's pages, for independent walkers.
#[cfg(test)]
pub(crate) struct Reader;

#[cfg(test)]
impl iopt::walk::WalkMemory for Reader {
    fn read_u64(&self, address: u64) -> Result<u64, iopt::walk::BadAddress> {
        let at = address & !(PAGE - 1);
        let len = CHUNK as u64 * PAGE;
        let ours = |pool: &RefCell<Pool>| {
            let pool = pool.borrow();
            pool.chunks
                .iter()
                .any(|chunk| at.wrapping_sub(*chunk) < len)
        };
        if !POOL.with(ours) {
            return Err(iopt::walk::BadAddress { address });
        }
        // SAFETY: a page of this thread's pool, and this thread only reads now.
        let page = unsafe { page(at) };
        Ok(page.entry(address / 8).load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_dirty_aligned_and_handed_out_last_first() {
        let before = in_use();
        let (one, two) = (allocate(), allocate());
        assert_ne!(one, two);
        assert_eq!((one | two) % PAGE, 0);
        assert_eq!(in_use(), before + 2);
        // SAFETY: both were just handed out, and only atomics are used.
        let pages = unsafe { [page(one), page(two)] };
        for page in pages {
            let dirty = |entry: &AtomicU64| entry.load(Ordering::Relaxed) == DIRT;
            assert!(page.entries().iter().all(dirty));
        }
        pages[0].entry(5).store(7, Ordering::Relaxed);
        // SAFETY: handed out above; no reference is used from here on but those taken below.
        unsafe {
            release(two);
            release(one);
        }
        assert_eq!(allocate(), one);
        // SAFETY: handed out again.
        assert_eq!(unsafe { page(one) }.entry(5).load(Ordering::Relaxed), 7);
        assert_eq!(allocate(), two);
        // SAFETY: handed out above, not used any more.
        unsafe {
            release(two);
            release(one);
        }
        assert_eq!(in_use(), before);
    }

    #[test]
    fn more_pages_than_a_chunk_are_all_different() {
        reserve(CHUNK + 1);
        let mut pages: Vec<u64> = (0..2 * CHUNK + 1).map(|_| allocate()).collect();
        pages.sort_unstable();
        assert!(pages.windows(2).all(|two| two[0] + PAGE <= two[1]));
        for at in pages {
            // SAFETY: handed out above, each once.
            unsafe { release(at) };
        }
    }
}
