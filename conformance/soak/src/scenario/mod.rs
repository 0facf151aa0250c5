//! A virtual machine's memory: the operations, the shadow model and the checks of the soak, with steps that fail on demand.
//!
//! # The world
//!
//! [`World`] is one address space ([`ioas::Ioas`]) over tables of ours, the guest's memory, devices of units of the
//! software IOMMU, and a shadow model.
//!
//! Each operation of the world (map, take out, put back, attach, track, harvest, release, …) does three
//! things: it says at which pages devices may find anything, calls the address space, and changes the model by what
//! came of it. The model has, for each page of device addresses, the page of memory that it leads to, the rights,
//! and whether it is taken out or released. From that follow what devices may expect, what is pinned, and what is
//! charged.
//!
//! # The checks
//!
//! * **By devices**, all the time ([`Scene`]): a page that is mapped is found, with exactly its bytes, and can be
//!   written exactly if that is allowed; a hole faults, and everything does for a device that is detached. Devices
//!   read, compare and write whole pages. A frame is there only while an owner has it pinned: one that is reached
//!   without is counted.
//! * **By a check** ([`World::check`]), between two operations, while no access is under way: the independent walker
//!   finds in every domain what the model says, page by page; areas and pins are those of the model, page by page;
//!   what is charged is compared in bytes; what the kernel counts as locked or pinned is exactly what is pinned; no
//!   table page is lost.
//! * **By each operation**: the error is one that may come; a harvest misses no page that devices have written to,
//!   and has none that they have not begun to write.
//!
//! # What fails on demand
//!
//! [`Faults`]: table pages refused, a pin refused, runs unreadable, a flush without an answer.

mod check;
mod devices;
mod dirty;
mod faults;
mod hardware;
mod model;
mod operations;
mod pattern;
mod ram;
mod scene;
mod world;

pub use check::{Counted, Totals};
pub(crate) use faults::Fault;
pub(crate) use hardware::Kind;
pub(crate) use operations::INTACT;
pub(crate) use ram::Layout;
pub(crate) use world::{Setup, Source, World};

use ioas::Cause;

/// Bytes of an access, and of a page.
pub(crate) use shadow::PAGE;

/// Why a world did not come to be, or an operation to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The memory cannot be discarded.
    #[error("the memory cannot be discarded")]
    Discard(#[from] hostmem::DiscardError),
    /// The memory is no memory of a guest.
    #[error("cannot describe the memory to a balloon")]
    Ram(#[from] virtio_balloon::BadRam),
    /// There is no memory for tables.
    #[error("cannot get memory for the page tables")]
    Tables(#[source] Cause),
    /// There is no bitmap for it.
    #[error("cannot make a bitmap of pages that devices write to")]
    Pending(#[from] iopt::PendingError),
    /// Pages that devices have written to cannot be learned.
    #[error("cannot read dirty pages")]
    Harvest(#[from] ioas::HarvestError),
    /// Units did not invalidate it in time.
    #[error("cannot flush harvested pages")]
    Show(#[from] iommu::FlushError),
    /// The kernel's counters and limits cannot be read.
    #[error("cannot learn the limits on locked memory")]
    Limits(#[from] hostmem::LimitsError),
}

/// An error with all its causes, as one sentence.
pub(crate) fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some messages quote their cause already.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
