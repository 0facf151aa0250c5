//! The engine beside a plain model, over every format.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[macro_use]
mod suite;

mod exclusive;
mod shared;
