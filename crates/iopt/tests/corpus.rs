//! Regression test of the fuzz targets: every file of `fuzz/corpus` through the body of its target.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

replay::tests!("iopt", fuzz_bodies::TARGETS);
