//! dmaspace for C: I/O page tables of every format, and address spaces over memory of this process: over
//! such tables, over iommufd, or over a container of VFIO's type 1.
//!
//! C programs (QEMU, DPDK and SPDK are written in C) include `dmaspace.h` and link
//! `libdmaspace_capi.so` or `libdmaspace_capi.a`; `README.md` has an example. The header is made from
//! this crate by `cargo xtask header`, and its comments are the documentation of the functions. Rust
//! programs use the crate `dmaspace` itself.
//!
//! # What holds for every function
//!
//! * It returns a [`Status`], 0 or negative. After a negative one `dmaspace_last_error` has the sentence
//!   with the numbers, for this thread.
//! * What a function says it needs must not be NULL and must be aligned; if it is not, the answer is
//!   [`Status::Argument`]. That a pointer leads to what it should is the caller's business, as ever in C.
//! * A function that fails has changed nothing, unless it says otherwise. What it fills in is filled in
//!   on success only.
//! * Nothing unwinds into C: a panic, which is a bug of this library, is [`Status::Panic`]. A callback
//!   must not unwind or `longjmp` out either.
//! * A handle may be used from any thread, but by one at a time. A second one, or a callback that uses
//!   the handle that called it, gets [`Status::Busy`] and nothing happens. A handle that was destroyed
//!   must not be used.
//! * What a function creates, the caller owns and destroys with the function of that name. No pointer to
//!   the caller's arguments is kept, but for memory (`dmaspace_memory_new`, `dmaspace_table_memory`)
//!   and a callback's context, where it says so. Descriptors stay the caller's: what is needed longer than
//!   a call is duplicated.
//! * A child of `fork` does not use what its parent has made.
//!
//! # Unsafe code
//!
//! `boundary.rs` turns pointers of the caller into references; every function that C calls passes its
//! pointers there. `memory.rs` and `table_memory.rs` take memory of the caller as cells; `unit.rs`,
//! `parts.rs` and `dirty.rs` call back. What each relies on is written there, and in the header for those who call.

#![deny(unsafe_code)]
#![allow(
    clippy::missing_safety_doc,
    reason = "what a caller owes is said above once, and in the header"
)]

#[allow(unsafe_code)]
mod boundary;
#[allow(unsafe_code)]
mod dirty;
#[allow(unsafe_code)]
mod format;
#[allow(unsafe_code)]
mod kernel;
#[allow(unsafe_code)]
mod memory;
mod opened;
#[allow(unsafe_code)]
mod parts;
#[allow(unsafe_code)]
mod space;
#[allow(unsafe_code)]
mod status;
#[allow(unsafe_code)]
mod table;
#[allow(unsafe_code)]
mod table_memory;
mod translation;
#[allow(unsafe_code)]
mod unit;

#[doc(hidden)]
pub use boundary::guarded;
pub use dirty::{
    Dirty, Harvested, Written, dmaspace_dirty_destroy, dmaspace_dirty_new,
    dmaspace_space_harvest_dirty, dmaspace_space_track_dirty, dmaspace_space_untrack_dirty,
};
pub use format::{TableConfig, dmaspace_format_count, dmaspace_format_name};
pub use kernel::{
    Iommufd, dmaspace_iommufd_bind, dmaspace_iommufd_destroy, dmaspace_iommufd_new,
    dmaspace_space_attach_file, dmaspace_space_over_container, dmaspace_space_over_iommufd,
    dmaspace_space_refresh,
};
pub use memory::{Memory, dmaspace_memory_charged, dmaspace_memory_destroy, dmaspace_memory_new};
pub use parts::{
    Kept, Pin, dmaspace_pin_destroy, dmaspace_space_pin, dmaspace_space_release,
    dmaspace_space_restore,
};
pub use space::{
    DMASPACE_HITLESS_CUT, DMASPACE_PAGE_DIRTY, DMASPACE_SHARES_PINS, DMASPACE_TABLE_PLACEMENT,
    DMASPACE_UNMAP_PART, Space, SpaceInfo, dmaspace_space_attach, dmaspace_space_destroy,
    dmaspace_space_detach, dmaspace_space_flush, dmaspace_space_get_info,
    dmaspace_space_get_window, dmaspace_space_map, dmaspace_space_new, dmaspace_space_translate,
    dmaspace_space_unmap,
};
pub use status::{Status, dmaspace_last_error, dmaspace_version};
pub use table::{
    Table, TableInfo, dmaspace_table_destroy, dmaspace_table_flush, dmaspace_table_get_info,
    dmaspace_table_map, dmaspace_table_map_pages, dmaspace_table_new, dmaspace_table_translate,
    dmaspace_table_unmap, dmaspace_table_unmap_pages,
};
pub use table_memory::TableMemory;
pub use translation::{
    DMASPACE_COHERENT, DMASPACE_DEVICE, DMASPACE_EXECUTE, DMASPACE_PRIVILEGED, DMASPACE_READ,
    DMASPACE_UNCACHED, DMASPACE_WRITE, Leaf, Root, Run, Span,
};
pub use unit::{Flush, Invalidation, Released, Unit};

/// A handle may be used from any thread.
const _: () = {
    const fn from_any_thread<T: Send + Sync>() {}
    from_any_thread::<Table>();
    from_any_thread::<Iommufd>();
    from_any_thread::<Pin>();
    from_any_thread::<Dirty>();
    from_any_thread::<Memory>();
    from_any_thread::<Space>();
};
