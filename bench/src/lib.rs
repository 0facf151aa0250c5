//! Figures of this project beside others.
//!
//! * [`origins`]: the figures of the five origins on this machine; `bench origins`;
//! * `peers`, with the feature of this name: page tables beside the machine's limit, Linux's code and foreign crates;
//!   `bench tables`;
//! * `layers`, with the same feature: instructions of address spaces and drivers beside those of the table; `bench layers`;
//! * [`simulation`]: devices that do DMA and units that walk real tables, event by event;
//! * [`study`]: what was published of origin 5, simulated: which inputs are published, fitted or assumed, which rows
//!   come out, and how far they move with what is assumed;
//! * [`rings`]: memory for a balloon's rings where guest and host are one process.
//!
//! Results of a simulation are called that.

#![deny(unsafe_code)]

#[cfg(feature = "peers")]
pub mod layers;
pub mod origins;
#[cfg(feature = "peers")]
#[allow(
    unsafe_code,
    reason = "foreign crates ask for it, and tables by hand are made of it"
)]
pub mod peers;
pub mod rings;
mod sentence;
pub mod simulation;
pub mod study;
