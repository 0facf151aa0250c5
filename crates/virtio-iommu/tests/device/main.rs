//! The device, seen from its driver and from its endpoints.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod access;
mod bypass;
mod dirty;
mod faults;
#[path = "../../../virtio-balloon/tests/guest/faulty.rs"]
mod faulty;
#[path = "../guest/mod.rs"]
mod guest;
mod hostile;
mod life;
mod mappings;
mod model;
mod spec;
mod status;
mod wire;
