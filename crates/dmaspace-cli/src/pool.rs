//! Pools of huge pages: the keeper of those that commands raise, which is this program by a hidden command, and the
//! lines of a shell that raise one.

use std::io;

use hostmem::keep_pool;

use crate::stop::Stop;
use crate::{exit, fail};

/// The hidden command by which this program keeps a pool of huge pages.
pub(crate) const KEEPER: &str = "pool-keeper";

/// The lines of a shell that raise the pool of this file: others may have pages of it.
pub(crate) fn raise(file: &str, pages: u64) -> [String; 2] {
    [
        format!("pool={file}"),
        format!("echo $(($(cat $pool) + {pages})) > $pool"),
    ]
}

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
