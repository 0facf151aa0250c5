//! What is said, planned and computed of machines that are made up.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod devices;
mod files;
mod topology;
