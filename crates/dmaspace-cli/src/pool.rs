//! The keeper of pools of huge pages that commands raise: this program, by a hidden command.

use std::io;

use hostmem::keep_pool;

use crate::stop::Stop;
use crate::{exit, fail};

/// The hidden command by which this program keeps a pool of huge pages.
pub(crate) const KEEPER: &str = "pool-keeper";

/// Keeps a pool for the process at the other end of standard input and output.
pub(crate) fn keep_here() -> u8 {
    // Whoever sends signals to all of us means the other process: only its end counts.
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    match stop.shielded(|| keep_pool(io::stdin(), io::stdout())).0 {
        Ok(()) => exit::RIGHT,
        Err(error) => fail(&error, exit::WRONG),
    }
}
