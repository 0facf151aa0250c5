#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For monitors and user-space drivers that give memory to a device, and for tools that inspect its backing.
//!
//! A [`Mapping`] is a memory object of this process, made of one kind of [`Backing`]. A [`Population`]
//! brings in the pages of many at once. A [`Pinner`] pins a part of one for the long term. The [`Pin`]
//! is charged to a [`Counter`] of the kernel and is the only one that yields physical runs, since
//! pinning may move pages: pin first, then look.
//!
//! A file from an untrusted process is a [`PeerFile`] first: a [`PeerEvent`] never blocks, and a [`ShrinkWatch`] watches
//! memory files that become shorter.
//!
//! All lengths, offsets and addresses are bytes unless a name says otherwise. The state of the machine is
//! read, not changed, with one exception: [`RaisedPool`]. A signal handler is installed only on request:
//! [`ShrinkWatch::install`].

#![cfg(target_os = "linux")]
#![deny(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("hostmem counts memory in 64 bits and needs a 64-bit machine");

mod at_most;
mod backing;
mod buffers;
#[allow(unsafe_code)]
mod bus_error;
#[allow(unsafe_code)]
mod caches;
mod cgroup;
mod charge;
mod discard;
mod frames;
#[cfg(feature = "vm-memory")]
#[allow(unsafe_code)]
mod guest_region;
mod limits;
mod live_update;
mod machine;
mod mapping;
mod nodes;
mod pagemap_reader;
#[allow(unsafe_code)]
mod peer;
mod pin;
mod pinner;
mod pool;
mod populate;
mod population;
mod process;
mod procfs;
mod refusal;
#[allow(unsafe_code)]
mod rings;
mod shrink_watch;
mod source;
mod stretches;
#[allow(unsafe_code)]
mod sys;
mod windows;

pub use at_most::{TooLong, read_at_most, rest_at_most, text_at_most};
pub use backing::{Backing, Choice, UnknownBacking};
pub use caches::{can_evict, evict, largest_cache};
pub use cgroup::CgroupLimit;
pub use discard::{
    Call, CountError, Discard, DiscardError, DiscardRefusal, Discarded, Freed, FreedBy,
};
pub use frames::{Frames, FramesError};
#[cfg(feature = "vm-memory")]
pub use guest_region::GuestRegionError;
pub use limits::{Counter, InUse, Limits, LimitsError};
pub use live_update::{LiveUpdate, LiveUpdateError};
pub use machine::{HugeSize, Machine, Pool, ThpMode};
pub use mapping::{Mapping, MappingError};
pub use nodes::{Folios, KernelNodes, NodePolicy, PlacementError};
pub use peer::{PeerEvent, PeerFile, PeerKind};
pub use pin::{Pin, Steps, UnpinError};
pub use pinner::{PinKind, Pinner, PinnerError};
pub use pool::{PoolError, RaisedPool};
pub use populate::PopulateError;
pub use population::Population;
pub use process::{PageRun, ProcessPages};
pub use procfs::ProcfsError;
pub use refusal::PinError;
pub use shrink_watch::{Lost, ShrinkWatch, WatchError};
pub use source::FrameSource;
