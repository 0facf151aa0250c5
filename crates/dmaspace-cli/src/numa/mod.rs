//! `dmaspace numa`: tables near the units that walk them: what to build where, and what it is worth.
//!
//! * [`plan`]: the domains that each [`Placement`](ioas::Placement) builds on a
//!   [`Topology`](dmaspace::topology::Topology), their tables, and what devices get, by a formula;
//! * [`GuestTopology`]: the other way, a guest that knows the nodes;
//! * [`simulate`]: a load on a machine, by the simulation that is in the [`lab`], with the studies that it reproduces.
//!
//! Results of a simulation are called that.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod command;
mod guest;
pub mod plan;
mod simulate;
mod svg;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use command::{NumaCommand, Published, run};
pub use guest::{GuestError, GuestTopology};
pub use plan::Plan;
pub use simulate::{LoadRow, MOST_MEMORY, SimulateError, Simulated, simulate};
