//! The bodies of the fuzz targets, which the tests of `iopt` replay the corpus through as well.

#[path = "../../crates/iopt/tests/fuzz_bodies/mod.rs"]
pub mod fuzz_bodies;
