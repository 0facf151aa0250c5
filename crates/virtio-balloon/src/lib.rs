#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For authors of monitors, who want the device; of guests' kernels, who want the driver; and of tools that read
//! or write its messages.
//!
//! A guest gives memory to its balloon by naming pages to the host. This crate has the wire formats
//! of the standard (Virtual I/O Device, VIRTIO, version 1.3, section 5.5, Traditional Memory Balloon
//! Device) and, beside them, one that names pages in bulk, which `docs/balloon-bulk.md` specifies:
//!
//! * [`MessageFormat`] is the seam of both: [`LePfns`] is the standard's, [`BitmapRecords`] is in bulk. [`MessageSource`]
//!   cuts sorted runs into messages of bounded size; decoding hands runs to a closure and counts in
//!   [`Refusals`] whatever it does not take.
//! * [`MemoryMap`] resolves runs to [`Part`]s of the guest's memory, once, [`RunCollector`] sorts and merges
//!   these across the messages of a drained queue, and [`PartialHugePages`] remembers what is not yet a whole
//!   page of the host. Decoding, resolving and collecting do not depend on each other: runs and parts go from
//!   one to the next by closures.
//! * [`Features`], [`BulkBit`] and [`InitBit`], [`Queue`] numbers in both [`Numbering`]s, [`BalloonConfig`] space, and
//!   [`Stats`].
//! * [`driver`] is the guest's end: [`BalloonDriver`], over small seams.
//! * [`Releaser`] is the seam towards devices that reach the guest's memory by themselves.
//! * With the feature `device` (which needs `std`), `device::BalloonDevice` is the host's side of all that.
//!
//! Addresses and lengths are bytes of the guest's physical address space, as [`runs::Span`]s, unless
//! a name says pages. A page *number* counts pages of 4 KiB ([`WIRE_PAGE`]), however large the guest's
//! own pages are. Nothing here allocates, and nothing panics on any input.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "device"))]
extern crate std;

mod collect;
mod config;
#[cfg(feature = "device")]
pub mod device;
mod dma;
pub mod driver;
mod features;
mod format;
mod map;
mod partial;
mod queues;
mod refusal;
mod source;
mod stats;

pub use collect::RunCollector;
pub use config::{BULK_CONFIG_BYTES, BalloonConfig, CONFIG_BYTES};
pub use dma::{KeepReason, Releaser};
pub use driver::{BalloonDriver, Wait};
pub use features::{BadBulkBit, BulkBit, Features, InitBit};
pub use format::{BitmapRecords, LePfns, MOST_DATA_BYTES, MOST_MESSAGE_BYTES, MessageFormat};
pub use map::{BadRam, MemoryMap, Part, Region, Resolver};
pub use partial::{BadRegion, PartialHugePages};
pub use queues::{Numbering, Queue};
pub use refusal::{Refusal, Refusals};
pub use source::{EncodeError, GuestPage, MessageSource, Stretches, WIRE_PAGE};
pub use stats::{ByteOrder, Stat, Stats, Tag};
