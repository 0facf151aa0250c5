//! Failures around the program: it is killed, its output is not taken, the machine refuses.
//!
//! Failures that are injected in other crates, below `crates`; *at each n*: the first call fails, in another run the
//! second, and so on:
//!
//! - a table page, at each n (`iopt/tests/model`, `ioas/tests/suite`): the table is unchanged; no pin, charge or table is
//!   left
//! - a pin, its runs, the limit, at each n (`ioas/tests/suite`, `dmaspace/tests/balloon/dma.rs`): all or nothing; memory
//!   that a balloon cannot restore is reported and retried
//! - a flush; a unit that is silent, slow or wrong (`ioas/tests/suite`, `iommu/src/*/tests/broken.rs`): memory stays pinned,
//!   charged and unused until a flush succeeds
//! - a call to VFIO or iommufd, at each n (`ioas/tests/kernel`): the kernel's mappings match ours
//! - the guest's side of a queue, at each n (`virtio-balloon/tests/driver/faults.rs`): reported; no page is lost, or used
//!   while the device may have it
//! - the device's side, rings and buffers outside memory, each access, at each n (`virtio-balloon/tests/device`,
//!   `virtio-iommu/tests/device/access.rs`): refused and counted, or still in the ring; the rest is processed
//! - a monitor or client that leaves in a message, sends nonsense, shrinks its memory file, does not read, or passes other
//!   files (`dmaspace/tests/vhost`, `dmaspace-vfio-user/tests/suite`): refused by name, or the session ends; nothing waits,
//!   and the next is served
//! - no descriptor left for a connection (`dmaspace/tests/vhost_descriptors.rs`): reported once, served when there is one

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod cgroups;
mod killed;
mod outputs;
mod shrunk;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The machine's pool is one, and each user's limit, too: tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
