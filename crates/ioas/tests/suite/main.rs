//! Address spaces, by their public interface.
//!
//! One program for all of it: tables of every format are compiled once.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on stops"
)]

mod addresses;
mod batches;
mod common;
mod conversions;
mod cutting;
mod dirty;
mod dirty_model;
mod dma;
mod domains;
mod external;
mod faults;
mod given;
mod iommu;
mod kept;
mod layouts;
mod lazy;
mod listeners;
mod merging;
mod model;
mod order;
mod pins;
mod placement;
mod placement_model;
mod ranges;
mod released;
mod released_model;
mod roots;
mod threads;
mod two_domains;
mod vm_memory;
