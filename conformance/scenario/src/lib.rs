//! A virtual machine's memory under random operations: the operations, the shadow model and the checks of the soak
//! (`conformance/soak`), which does them in any order for long, with steps that fail on demand.
//!
//! # The world
//!
//! [`World`] is one address space ([`ioas::Ioas`]) over tables of ours, the guest's memory, devices of units of the
//! software IOMMU, and a shadow model.
//!
//! Each operation of the world (map, take out, put back, attach, track, harvest, release, hand over, …) does three
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
//!   table page is lost. While a second process owns the tables, the walker goes on.
//! * **By each operation**: the error is one that may come; a harvest misses no page that devices have written to,
//!   and has none that they have not begun to write.
//!
//! # A second owner
//!
//! [`World::hand_over`] starts a process that calls [`succeed`], owns the address space, cuts a hole and closes it,
//! and ends everything or hands it back. How the two talk stands in its module.
//!
//! # What fails on demand
//!
//! [`Faults`]: table pages refused, a pin refused, runs unreadable, a flush without an answer.

#![forbid(unsafe_code)]

mod check;
mod devices;
mod dirty;
mod faults;
mod handover;
mod hardware;
mod model;
mod operations;
pub mod pattern;
mod ram;
mod scene;
mod world;

pub use check::{Counted, Totals};
pub use faults::{Fault, Faults};
pub use handover::{Gone, Left, Second, SuccessorError, succeed};
pub use hardware::{Hardware, Kind, TableNode, device};
pub use operations::{Alone, Harvest, INTACT};
pub use ram::Layout;
pub use scene::{Counts, Manner, Play, Scene};
pub use world::{Part, Setup, Source, World};

use ioas::Cause;

/// Bytes of an access, and of a page.
pub const PAGE: u64 = 4096;
/// The unit of our own pins: the smallest part that is given back without pinning anew.
pub const PIECE: u64 = 2 << 20;

/// Why a world did not come to be, or an operation to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The threads that are the devices cannot be had.
    #[error("cannot start the devices")]
    Devices(#[source] std::io::Error),
    /// The memory cannot be discarded.
    #[error("the memory cannot be discarded")]
    Discard(#[from] hostmem::DiscardError),
    /// The memory is no memory of a guest.
    #[error("cannot describe the memory to a balloon")]
    Ram(#[from] virtio_balloon::BadRam),
    /// There is no memory for tables.
    #[error("cannot get memory for the page tables")]
    Tables(#[source] Cause),
    /// A device cannot be attached.
    #[error("cannot attach a device")]
    Attach(#[source] ioas::AttachError),
    /// The memory cannot be mapped.
    #[error("cannot map the memory")]
    Map(#[source] ioas::MapError),
    /// It cannot be tracked what devices write to.
    #[error("cannot track what devices write to")]
    Track(#[from] ioas::TrackingError),
    /// There is no bitmap for it.
    #[error("cannot make a bitmap of pages that devices write to")]
    Pending(#[from] iopt::PendingError),
    /// What devices have written to cannot be learned.
    #[error("cannot learn what devices have written to")]
    Harvest(#[from] ioas::HarvestError),
    /// Units did not invalidate it in time.
    #[error("cannot flush what was harvested")]
    Show(#[from] iommu::FlushError),
    /// The address space cannot be handed over.
    #[error("cannot hand the address space over")]
    HandOver(#[from] ioas::HandOverError),
    /// The first owner cannot give up.
    #[error("cannot let the address space go")]
    GiveUp(#[source] ioas::UnmapError),
    /// The memory cannot be unmapped.
    #[error("cannot unmap the memory")]
    Unmap(#[source] ioas::UnmapError),
    /// The second process did not do its part.
    #[error("the second process does not own the address space")]
    Successor(#[from] SuccessorError),
    /// The description of a handover cannot be read.
    #[error("the description of the address space cannot be read")]
    Described(#[from] ioas::DecodeError),
    /// The kernel's counters and limits cannot be read.
    #[error("cannot learn the limits on locked memory")]
    Limits(#[from] hostmem::LimitsError),
    /// It cannot be read where memory lies.
    #[error("cannot learn where the memory lies")]
    Placement(#[from] hostmem::PlacementError),
}

/// An error with all its causes, as one sentence.
pub fn sentence(error: &dyn std::error::Error) -> String {
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
