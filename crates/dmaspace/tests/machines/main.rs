//! Reports, plans and computations for made-up machines.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod devices;
mod files;
mod topology;
