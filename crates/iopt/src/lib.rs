#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For authors of kernels and hypervisors, who fill an IOMMU's tables; of monitors that emulate one, who walk a
//! guest's; and of tools that read tables out of a dump.
//!
//! A [`Table`] translates device addresses (*iova*) to physical memory, in the bytes that an IOMMU
//! reads. It is filled and emptied by **runs**: one descent per leaf table,
//! the largest leaves that fit, all or nothing.
//!
//! * [`Table`], its operations [`TableOps`], [`SharedTable`] for many threads, and their protocol: [`engine`];
//! * the layout of entries: [`format`](mod@format), one file per format, each citing its
//!   specification;
//! * where tables lie: the seam [`TableMemory`] and the [`Arena`];
//! * hooks around that memory, for units that do not snoop caches, for counts and for checks:
//!   [`observe`];
//! * the flush before memory is used again: [`Gather`]; and readers that may still be in it: [`reclaim`];
//! * dirty pages, until they are acknowledged: [`Pending`];
//! * [`AnyTable`], when the format is known only at run time;
//! * [`image`]: all tables in a file, and back;
//! * [`Takeover`]: tables that another process has left in memory;
//! * [`walk`]: walkers over any memory, for every format, which mark entries as accessed and dirty if
//!   told to; written from the specifications (DART's from what others observed) and sharing nothing
//!   with the formats' encoders.
//!
//! Addresses and lengths are bytes. Nothing here allocates, blocks, or panics on any input. The
//! crate is `no_std` without an allocator; the feature `alloc` adds `HeapTables`, `AnyTable` and
//! all else that is kept on the heap, the feature `std` locks around it, and readers known by
//! thread.
//!
//! All `unsafe` code is in three places: the arena (`arena.rs`, `arena/erased.rs`, `arena/heap.rs`, `arena/held.rs`)
//! reduces addresses to slices of atomics; `wide.rs`, `wide/avx.rs` handle entries in a row, by inline assembly where
//! the processor has vectors; `reclaim` keeps a list of threads (`threads.rs`) and calls Linux's `membarrier`
//! (`membarrier.rs`).

#![no_std]
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(feature = "alloc")]
mod any;
#[allow(unsafe_code)]
mod arena;
mod cell;
pub mod engine;
mod error;
pub mod format;
mod gather;
#[cfg(feature = "alloc")]
pub mod geometry;
pub mod image;
mod memory;
#[cfg(feature = "alloc")]
pub mod named;
pub mod observe;
mod pending;
mod prot;
pub mod reclaim;
mod takeover;
pub mod walk;
#[allow(unsafe_code)]
mod wide;

#[cfg(feature = "alloc")]
pub use any::{
    AnyAdopted, AnyCell, AnyMemory, AnyOps, AnyOwner, AnyPlanned, AnyTable, ErasableMemory,
};
pub use arena::{Arena, ArenaError, AtomicMeta, Storage};
#[cfg(feature = "alloc")]
pub use arena::{HeapArena, HeapStorage, HeapTables};
pub use cell::{Cell, Series};
pub use engine::{
    Bound, Damage, DamageKind, Inside, Interruption, Leaf, Leaves, NoRuns, Nodes, Planned,
    Progress, RunSink, SharedTable, Table, TableOps, Wants, WithDirty,
};
pub use error::{
    BrokenPlan, BuildError, DirtyError, NoTables, PageSizeError, ProtectError, RangeError,
    ResizeError, TableMapError, TableUnmapError,
};
pub use format::{Above, Aperture, Format, FormatId, Root};
pub use gather::{Flushed, Gather, Invalidation};
pub use memory::{Chain, Meta, Reserve, TABLE_BYTES, TableMemory};
pub use pending::{Pending, PendingError, PendingHarvest};
pub use prot::Prot;
pub use takeover::{AdoptError, Adopted, Takeover};
pub use wide::WideCell;
