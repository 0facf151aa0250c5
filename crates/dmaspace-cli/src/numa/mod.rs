//! `dmaspace numa`: tables near the units that walk them: what to build where, and what it is worth.
//!
//! * [`plan`]: the domains that each [`Placement`](ioas::Placement) builds on a
//!   [`Topology`](dmaspace::topology::Topology), their tables, and what devices get, by a formula;
//! * [`GuestTopology`]: the other way, a guest that knows the nodes.

#![allow(
    unreachable_pub,
    reason = "`pub` is for other commands, tests and fuzz targets; the crate shows none of it"
)]

mod command;
mod guest;
pub mod plan;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use command::{ABOUT, EXAMPLES, NumaArgs, run};
pub use guest::{GuestError, GuestTopology};
pub use plan::Plan;
