//! Benchmarks, simulations and studies.
//!
//! * [`bench`](mod@bench): the figures of the five origins on this machine; `dmaspace bench`;
//! * [`simulation`]: devices that do DMA and units that walk real tables, event by event;
//! * [`study`]: what was published, simulated: which inputs are published, fitted or assumed, which rows come
//!   out, and how far they move with what is assumed; `dmaspace numa simulate --published`;
//! * [`plot`]: curves and bars, for the page of `dmaspace bench` and for docs/performance.md;
//! * [`rings`]: memory for a balloon's rings where guest and host are one process;
//! * `peers`, with the feature of this name: page tables of others beside ours; `cargo xtask bench-tables`.
//!
//! What comes out of a simulation is called that.

#![deny(unsafe_code)]

pub mod bench;
#[cfg(feature = "peers")]
#[allow(
    unsafe_code,
    reason = "foreign crates ask for it, and tables by hand are made of it"
)]
pub mod peers;
pub mod plot;
pub mod rings;
mod sentence;
pub mod simulation;
pub mod study;
