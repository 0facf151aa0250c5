//! Memory that goes through a balloon: with devices on it, and over vhost-user.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod dma;
mod host;
#[cfg(feature = "vhost-user")]
mod vhost;
