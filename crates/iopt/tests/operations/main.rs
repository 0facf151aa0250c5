//! Promises of a table's operations, one at a time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[macro_use]
mod watched;

mod accessed;
mod any;
// Its record is under a lock of the standard library.
#[cfg(feature = "std")]
mod broken;
mod check;
mod counted;
mod dirty;
mod ends;
mod flush;
mod grow;
mod inside;
mod keep;
mod kernel;
mod moved;
mod planned;
mod progress;
mod protect;
mod regressions;
mod sizes;
mod threads;
