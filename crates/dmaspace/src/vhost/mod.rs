//! The balloon for monitors that speak vhost-user: a device in a program of its own.
//!
//! [`BalloonJob`] listens on a socket, serves one front end after the other, and keeps the device's
//! state between them ([`device`](self)). It sees the guest's memory by the files that the front end
//! shares, and nothing else of the front end: **devices that another program gives to the guest are not
//! asked before memory is given back**. A guest with a passed-through device must not have this balloon
//! beside it; there the device belongs into the monitor (`virtio_balloon::device`), where it asks
//! by `virtio_balloon::Dma`.
//!
//! A front end's messages are taken for what they are, whatever is in them and whatever files they bring. One thing
//! is in its hands: it can make a file shorter whose pages the balloon has mapped, and the next look at a ring
//! that was in it ends the program (`SIGBUS`), as with every back end that maps its guest's memory. The balloon
//! serves that front end alone, so nobody else is hit; and a memory file with the seal `F_SEAL_SHRINK`, as QEMU's
//! `memory-backend-memfd` has, cannot be made shorter.
//!
//! [`Iommu`] is virtio's IOMMU for such a monitor, on address spaces of this process.
//!
//! [`Link`] is the layer below, for other devices: one front end on `vhost-user-backend`, with the message
//! that tells of a changed configuration, which `vhost` does not send.

mod channel;
mod device;
mod event;
mod iommu;
mod job;
mod link;

pub use event::{BalloonReport, Event, StatsReport};
pub use iommu::{Iommu, IommuHost};
pub use job::{BalloonError, BalloonJob, Command, Operator};
pub use link::{Backend, Link, LinkError, MOST_QUEUE_SIZE, Memory, Vring};
