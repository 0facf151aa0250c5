//! Words of every format's tables, put together by hand from the specifications.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod amd_intel;
mod arm_lpae;
mod armv7s;
mod dart;
mod encrypted;
mod riscv;
mod words;
