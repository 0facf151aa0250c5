//! The device, between a guest and seams that record their calls.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[path = "../guest/faulty.rs"]
mod faulty;
#[allow(unreachable_pub, reason = "the fuzz target of the device has it, too")]
#[path = "../guest/mod.rs"]
mod guest;

mod dma;
mod faults;
mod features;
mod free;
mod hostile;
mod huge;
mod initialized;
mod memory;
mod model;
