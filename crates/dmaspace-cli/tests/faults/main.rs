//! Failures around the program: it is killed, its output is not taken, the machine refuses.
//!
//! `docs/faults.md` lists the failures and the tests that assert them.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod cgroups;
mod killed;
mod outputs;
mod shrunk;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The machine's pool is one, and each user's limit, too: tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
