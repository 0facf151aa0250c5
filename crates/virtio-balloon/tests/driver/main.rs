//! The driver, between a fake guest and a fake device.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod fake;

mod faults;
mod initialized;
mod model;
mod rules;
