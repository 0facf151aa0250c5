//! The back ends over a kernel's mappings, against a plain model of the kernel; and the semantics of
//! mapping on all back ends.

#![cfg(all(feature = "vfio", feature = "iommufd"))]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on stops"
)]

mod any;
mod containers;
mod devices;
mod dirty;
mod maps;
#[cfg(feature = "vfio-ioctls")]
mod ops;
mod pieces;
mod plain_kernel;
mod released;
mod semantics;
