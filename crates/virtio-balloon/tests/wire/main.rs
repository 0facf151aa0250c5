//! Wire formats beside each other, beside hostile bytes and beside their document.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod common;
#[allow(unreachable_pub, reason = "public to fuzz targets")]
#[path = "../fuzz_bodies/mod.rs"]
mod fuzz_bodies;

mod bitmaps;
mod formats;
mod hostile;
mod sizes;
