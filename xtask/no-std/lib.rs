//! The lower crates without `std` and without an allocator.
//!
//! The compiler refuses this library when one of its dependencies pulls in `std`, since the panic handler exists twice then,
//! and when one of them allocates without the feature `ioas`, since there is no allocator. It is built and not run: the kernel
//! modules in `linux` run these crates without `std`.

#![no_std]

#[cfg(feature = "ioas")]
use ioas as _;
use {iommu as _, iopt as _, runs as _, virtio_balloon as _};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[cfg(feature = "ioas")]
mod memory {
    use core::alloc::{GlobalAlloc, Layout};

    /// An allocator that has nothing.
    struct Empty;

    // SAFETY: it hands out no memory.
    unsafe impl GlobalAlloc for Empty {
        unsafe fn alloc(&self, _: Layout) -> *mut u8 {
            core::ptr::null_mut()
        }

        unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
    }

    #[global_allocator]
    static EMPTY: Empty = Empty;
}
