//! Tables near the units that walk them: what to build where, and what it is worth.
//!
//! * [`plan`]: the domains that each [`Placement`](ioas::Placement) builds on a
//!   [`Topology`](crate::topology::Topology), their tables, and what devices get, by a formula;
//! * [`GuestTopology`]: the other way, a guest that knows the nodes;
//! * [`Simulation`]: devices that do DMA and units that walk real tables, event by event;
//! * [`study`]: what was published, simulated: which inputs are published, fitted or assumed, which
//!   rows come out, and how far they move with what is assumed;
//! * [`measure`]: real tables on each node of this machine, walked from each.
//!
//! Only [`measure`] measures. What comes out of a simulation is called that.

mod guest;
pub mod measure;
pub mod plan;
pub mod simulation;
pub mod study;

pub use guest::{GuestDevice, GuestError, GuestNode, GuestTopology};
pub use measure::Measurement;
pub use plan::Plan;
pub use simulation::Simulation;
