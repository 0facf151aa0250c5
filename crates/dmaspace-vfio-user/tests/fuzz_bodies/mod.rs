//! Bodies of the fuzz targets: `fuzz/` calls these functions with any bytes that it comes upon, `tests/corpus.rs` with
//! those that it came upon before.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
mod client;

pub use bytes::{Bytes, Target};

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 1] = [("vfio_user", client::messages)];
