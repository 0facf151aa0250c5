//! What the fuzz targets do with bytes: `fuzz/` calls these functions with whatever it comes upon,
//! `tests/corpus.rs` with what it came upon before.
//!
//! Each takes any bytes, and panics when something does not hold, or when more is allocated for them than
//! is said.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
mod machine;
mod successor;
mod tables;
mod text;

use crate::allocated::within;

pub use bytes::{Bytes, Target};

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 6] = [
    ("tables_file", tables::file),
    ("topology_file", text::topology),
    ("acpi_tables", text::acpi),
    ("proc_text", text::proc),
    ("machine_files", machine::files),
    ("successor", successor::second),
];
