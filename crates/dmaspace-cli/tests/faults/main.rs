//! What goes wrong around the program: it is killed, nobody takes what it says, the machine refuses.
//!
//! What is asserted where is told in `docs/faults.md`.

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
