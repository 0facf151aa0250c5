//! Page tables of others beside ours, doing the same work in one run: the loop that stores the same
//! entries, which is the machine's limit; Linux's own code; foreign crates.

pub mod clock;
pub mod crates;
pub mod field;
pub mod limit;
pub mod linux;
pub mod memory;
mod others;
pub mod ours;
pub mod peer;
pub mod places;
mod plot;
pub mod reasons;
pub mod report;
pub mod results;
pub mod rows;
pub mod run;
pub mod stats;
pub mod work;
