//! An entry of a table: an atomic integer. On x86-64 many equal ones are stored by one instruction.

use core::arch::asm;
use core::slice;
use core::sync::atomic::AtomicU64;

use iopt::{Cell, Series};

/// From so many on `rep stosq` is faster than stores of their own, which it takes some dozens of cycles to begin with.
#[cfg(target_arch = "x86_64")]
const MANY: usize = 64;

/// Units that read through the caches see the entries that were stored before those that are stored from here on. On Arm
/// they are in the outer shareable domain (DDI 0487, section B2.3, "DMB"), further out than the ordering of atomics
/// reaches; on RISC-V they observe main memory as harts do (unprivileged specification, "FENCE"); on x86-64 they see all stores in order.
#[inline(always)]
pub(crate) fn order_for_units() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier changes nothing.
    unsafe {
        asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: a barrier changes nothing.
    unsafe {
        asm!("fence w, w", options(nostack, preserves_flags));
    }
}

#[repr(transparent)]
pub(crate) struct Entry(AtomicU64);

impl Cell for Entry {
    const BYTES: usize = <AtomicU64 as Cell>::BYTES;

    #[inline(always)]
    fn get(&self) -> u64 {
        self.0.get()
    }

    #[inline(always)]
    fn get_acquire(&self) -> u64 {
        self.0.get_acquire()
    }

    #[inline(always)]
    fn set(&self, word: u64) {
        self.0.set(word);
    }

    #[inline(always)]
    fn set_release(&self, word: u64) {
        self.0.set_release(word);
    }

    #[inline(always)]
    fn exchange(&self, word: u64) -> u64 {
        self.0.exchange(word)
    }

    #[inline(always)]
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0.set_if(old, new)
    }

    /// Kernels do not have vector registers, and this is what Linux does (`memset64`). Each quadword that is aligned is
    /// stored at once; in which order is open (Intel SDM, volume 3, sections 9.1.1 and 9.2.4; AMD APM, volume 2, section
    /// 7.3.2).
    #[inline(always)]
    fn set_series(cells: &[Self], series: Series) {
        #[cfg(target_arch = "x86_64")]
        if series.stride == 0 && cells.len() >= MANY {
            // SAFETY: the cells may be written through a shared reference, and this writes them all and no more. The
            // direction flag is clear on entry.
            unsafe {
                asm!(
                    "rep stosq",
                    inout("rcx") cells.len() => _,
                    inout("rdi") cells.as_ptr() => _,
                    in("rax") series.next,
                    options(nostack, preserves_flags),
                );
            }
            return;
        }
        // SAFETY: an entry is an `AtomicU64` and nothing else.
        let cells = unsafe { slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) };
        AtomicU64::set_series(cells, series);
    }
}
