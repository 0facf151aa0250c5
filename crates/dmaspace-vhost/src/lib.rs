#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! [`BalloonJob`] listens on a socket, serves one front end after the other, and keeps the device's
//! state between them ([`device`](self)). It sees the guest's memory by the files that the front end
//! shares, and nothing else of the front end: **devices that another program gives to the guest are not
//! asked before memory is given back**. A guest with a passed-through device must not have this balloon
//! beside it; there the device belongs into the monitor (`virtio_balloon::device`), where it asks
//! by `virtio_balloon::Dma`.
//!
//! A front end's messages are taken for what they are, whatever is in them. The files that they bring are memory (of `tmpfs`
//! or `hugetlbfs`), events, local sockets to be called by, and the socket of its channel; any other ends the link by name. None is
//! waited for, whatever the front end does with it ([`PeerFile`](hostmem::PeerFile)), so that the next one is served. It can also
//! make a file shorter whose pages are mapped here, and the next look at them is a signal (`SIGBUS`) that ends a program which
//! has not asked for anything else. A program that calls
//! [`ShrinkWatch::install`](hostmem::ShrinkWatch::install), as `dmaspace balloon` does, goes on: the look finds zeros, the link
//! ends with [`MemoryLost`], and the next front end is served. Files with the seal `F_SEAL_SHRINK`, as those of QEMU's
//! `memory-backend-memfd`, cannot be made shorter, and are not watched. What devices have pinned of such a file stays pinned and
//! theirs until it is unmapped.
//!
//! [`Iommu`] is virtio's IOMMU for such a monitor, on address spaces of this process.
//!
//! [`Link`] is the layer below, for other devices: one front end on `vhost-user-backend`, with the message
//! that tells of a changed configuration, which `vhost` does not send.

#![forbid(unsafe_code)]

mod channel;
mod device;
mod event;
mod iommu;
mod job;
mod link;
mod socket;
mod vring;
mod watched;

pub use event::{BalloonReport, Event, StatsReport};
pub use iommu::{Iommu, IommuHost};
pub use job::{BalloonError, BalloonJob, Command, Operator};
pub use link::{Backend, Link, LinkError, MOST_QUEUE_SIZE, Memory};
pub use vring::{Vring, VringGuard};
pub use watched::MemoryLost;
