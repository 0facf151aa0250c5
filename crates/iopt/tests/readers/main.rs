//! Readers of tables that stand already: walkers, images, a process that takes them over.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod image;
mod takeover;
mod walk;
