//! One entry in memory.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One entry of a table, as it lies in memory: an atomic integer, because a device, the software
/// unit and the dirty logic read and write a linked table at any time.
///
/// The engine computes with `u64`; a cell of a narrower format keeps the low bits. The cell is a
/// type parameter so that a checker of thread interleavings can bring its own.
pub trait Cell {
    /// Size of the entry in bytes.
    const BYTES: usize;

    /// Reads the entry, relaxed.
    fn get(&self) -> u64;
    /// Reads the entry; what its writer released is visible afterwards.
    fn get_acquire(&self) -> u64;
    /// Writes the entry, relaxed.
    fn set(&self, word: u64);
    /// Writes the entry; everything stored before is visible to whoever reads it by
    /// [`get_acquire`](Self::get_acquire), or follows it as hardware does.
    fn set_release(&self, word: u64);
    /// Replaces the entry and returns the old one, so that no bit that hardware sets is lost.
    fn exchange(&self, word: u64) -> u64;
    /// Replaces the entry if it is `old`; the entry found otherwise is the error.
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64>;

    /// A sequentially consistent fence.
    #[inline(always)]
    fn fence() {
        core::sync::atomic::fence(Ordering::SeqCst);
    }
}

macro_rules! atomic_cell {
    ($atomic:ty, $int:ty) => {
        impl Cell for $atomic {
            const BYTES: usize = size_of::<$int>();

            #[inline(always)]
            fn get(&self) -> u64 {
                u64::from(self.load(Ordering::Relaxed))
            }

            #[inline(always)]
            fn get_acquire(&self) -> u64 {
                u64::from(self.load(Ordering::Acquire))
            }

            #[inline(always)]
            fn set(&self, word: u64) {
                self.store(word as $int, Ordering::Relaxed);
            }

            #[inline(always)]
            fn set_release(&self, word: u64) {
                self.store(word as $int, Ordering::Release);
            }

            #[inline(always)]
            fn exchange(&self, word: u64) -> u64 {
                u64::from(self.swap(word as $int, Ordering::AcqRel))
            }

            #[inline(always)]
            fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
                self.compare_exchange(
                    old as $int,
                    new as $int,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                )
                .map(|_| ())
                .map_err(u64::from)
            }
        }
    };
}

atomic_cell!(AtomicU64, u64);
atomic_cell!(AtomicU32, u32);
