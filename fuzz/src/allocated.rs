//! Allocation counts for each thread, and a limit for all of them together.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator. Where more than `MOST` bytes are allocated at a time, by all threads, it has no
/// more, and the program ends.
pub struct Counting<const MOST: u64>;

thread_local! {
    // Counts of this thread alone: the test harness allocates when it likes.
    static BYTES: Cell<u64> = const { Cell::new(0) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// Bytes that are allocated now, by all threads.
static NOW: AtomicU64 = AtomicU64::new(0);

fn count(bytes: usize) {
    BYTES.set(BYTES.get() + bytes as u64);
    CALLS.set(CALLS.get() + 1);
}

impl<const MOST: u64> Counting<MOST> {
    /// Counts `more` bytes instead of `less`; false when that is too much.
    fn change(less: usize, more: usize) -> bool {
        count(more);
        let (less, more) = (less as u64, more as u64);
        let before = NOW.fetch_add(more, Ordering::Relaxed);
        NOW.fetch_sub(less, Ordering::Relaxed);
        before.saturating_add(more) <= MOST
    }

    fn give_back(bytes: usize) {
        NOW.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it is, or is refused; counting allocates nothing.
unsafe impl<const MOST: u64> GlobalAlloc for Counting<MOST> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !Self::change(0, layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the one that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::change(0, layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !Self::change(layout.size(), size) {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::give_back(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Counts the allocations of `f` on this thread, bytes and calls, whatever it frees.
pub fn counted<T>(f: impl FnOnce() -> T) -> (T, u64, u64) {
    let before = (BYTES.get(), CALLS.get());
    let value = f();
    let after = (BYTES.get(), CALLS.get());
    (value, after.0 - before.0, after.1 - before.1)
}

/// The result of `f`, which allocates at most `most` bytes on this thread.
pub fn within<T>(most: u64, f: impl FnOnce() -> T) -> T {
    let (value, bytes, _) = counted(f);
    assert!(
        bytes <= most,
        "{bytes} bytes were allocated, and at most {most} may be"
    );
    value
}
