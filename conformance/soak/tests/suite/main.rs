//! The programs of this package, for seconds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod limits;
mod soak;
