//! Bodies of the fuzz targets: `fuzz/` calls these functions with the bytes that it generates,
//! `tests/corpus.rs` with the ones it kept.
//!
//! One target for the reader of kernel logs, and one for each driver: the bytes are a unit that is hostile or broken
//! (`hostile.rs`, and how a good one would answer in `units/`), and the calls of the driver (`play.rs`). Each takes any
//! bytes, and panics when something does not hold.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
mod hostile;
mod kernel_log;
mod play;
mod units;

pub use bytes::{Bytes, Target};
pub use play::OUTCOMES;

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 6] = [
    ("unit_vtd", units::vtd::play),
    ("unit_amdvi", units::amdvi::play),
    ("unit_smmuv3", units::smmuv3::play),
    ("unit_riscv", units::riscv::play),
    ("unit_smmu", units::smmu::play),
    ("kernel_log", kernel_log::decode),
];
