//! Regression test of the fuzz targets: every file of `fuzz/corpus` through the body of its target.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(dead_code, unreachable_pub, reason = "every test that counts has it")]
#[path = "../../../fuzz/src/allocated.rs"]
mod allocated;
#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use allocated::Counting;

#[global_allocator]
static ALLOCATOR: Counting<{ 512 << 20 }> = Counting;

replay::tests!("dmaspace_vfio_user", fuzz_bodies::TARGETS, changed);
