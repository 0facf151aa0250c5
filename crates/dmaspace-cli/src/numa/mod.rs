//! `dmaspace numa`: tables near the units that walk them: what to build where, and what it is worth.
//!
//! * [`plan`]: the domains that each [`Placement`](ioas::Placement) builds on a
//!   [`Topology`](dmaspace::topology::Topology), their tables, and what devices get, by a formula;
//! * [`GuestTopology`]: the other way, a guest that knows the nodes;
//! * [`measure`]: real tables on each node of this machine, walked from each;
//! * [`simulate`]: a load on a machine, by the simulation that is in the [`lab`], with the studies that it reproduces.
//!
//! Only [`measure`] measures. What comes out of a simulation is called that.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod command;
mod guest;
pub mod measure;
pub mod plan;
mod simulate;
mod svg;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use command::{NumaCommand, Published, run};
pub use guest::{GuestError, GuestTopology};
pub use measure::Measurement;
pub use plan::Plan;
pub use simulate::{LoadRow, MOST_MEMORY, SimulateError, Simulated, simulate};
