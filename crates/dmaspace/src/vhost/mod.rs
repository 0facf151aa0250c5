//! vhost-user back ends for monitors such as QEMU: a memory balloon as a program of its own, and a virtual IOMMU over
//! the address spaces of the process that serves it.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use dmaspace::vhost::{BalloonJob, Command, BackendEvent, Operator};
//!
//! /// Has no commands, and prints what happens.
//! struct Printer;
//!
//! impl Operator for Printer {
//!     fn next(&mut self, patience: Duration) -> Option<Command> {
//!         std::thread::sleep(patience);
//!         None
//!     }
//!
//!     fn tell(&mut self, event: &BackendEvent) {
//!         println!("{event:?}");
//!     }
//! }
//!
//! let job = BalloonJob { socket: "/run/balloon".into(), target: 1 << 30, stats: None, bulk: None, reporting: true };
//! job.run(&mut Printer)?;
//! Ok::<_, dmaspace::vhost::BalloonError>(())
//! ```
//!
//! The program [`dmaspace balloon`](https://github.com/dmaspace/dmaspace/blob/main/docs/balloon-monitor.md) is this balloon.
//!
//! [`BalloonJob`] listens on a socket, serves one front end after the other, and keeps the device's
//! state between them. It sees the guest's memory by the files that the front end
//! shares, and nothing else of the front end: **devices that another program gives to the guest are not
//! asked before memory is given back**. A guest with a passed-through device must not have this balloon
//! beside it; there the balloon belongs in the monitor ([`virtio_balloon::device`]), where it asks
//! by [`virtio_balloon::Releaser`].
//!
//! Messages of a front end are not trusted. The files that they bring are memory (of `tmpfs`
//! or `hugetlbfs`), events, local sockets to be called by, and the socket of its channel; any other ends the link by name. None is
//! waited for, whatever the front end does with it ([`PeerFile`](hostmem::PeerFile)), so that the next one is served. It can also
//! make a file shorter whose pages are mapped here, and the next look at them is a signal (`SIGBUS`) that ends a program which
//! has not asked for anything else. A program that calls
//! [`ShrinkWatch::install`](hostmem::ShrinkWatch::install), as `dmaspace balloon` does, goes on: the look finds zeros, the link
//! ends with [`MemoryLost`], and the next front end is served. Files with the seal `F_SEAL_SHRINK`, as those of QEMU's
//! `memory-backend-memfd`, cannot be made shorter, and are not watched. What devices have pinned of such a file stays pinned and
//! theirs until it is unmapped.
//!
//! [`Iommu`] is virtio's IOMMU for such a monitor, on address spaces of this process. [`Balloon`] is the balloon beside
//! it: memory that the guest has mapped stays, and all other memory may go, with devices passed through.
//!
//! [`Link`] is the layer below, for other devices: one front end on `vhost-user-backend`, with the message
//! that tells of a changed configuration, which `vhost` does not send.

mod channel;
mod device;
mod event;
mod iommu;
mod job;
mod link;
mod socket;
mod vring;
mod watched;

pub use device::{Balloon, BalloonHost};
pub use event::{BackendEvent, BalloonReport, StatsReport};
pub use iommu::{Iommu, IommuHost};
pub use job::{BalloonError, BalloonJob, Command, Operator};
pub use link::{Backend, BackendMemory, Link, LinkError, MOST_QUEUE_SIZE};
pub use vring::{Vring, VringGuard};
pub use watched::MemoryLost;

/// An error with all its causes, as one sentence.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_said_once() {
        let source = std::io::Error::from_raw_os_error(13);
        let said = sentence(&LinkError::System(source));
        assert_eq!(
            said,
            "cannot serve the front end: Permission denied (os error 13)"
        );
    }
}
