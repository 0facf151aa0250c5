//! The tests of `reclaim`, in a process that asked for fences at its start.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[path = "../reclaim/by_thread.rs"]
mod by_thread;

/// Before the first table is shared.
fn choose() {
    assert!(
        iopt::reclaim::use_fences(),
        "something else was chosen before"
    );
}
