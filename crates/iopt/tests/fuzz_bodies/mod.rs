//! Bodies of the fuzz targets: `fuzz/` calls these functions with the bytes that it generates,
//! `tests/corpus.rs` with the ones it kept.
//!
//! Each takes any bytes, and panics when something does not hold.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
mod decode;
mod formats;
mod readers;
mod walk;

pub use bytes::{Bytes, Target};

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 11] = [
    ("decode_amdv1", decode::amdv1),
    ("decode_x86_64", decode::x86_64),
    ("decode_vtd_ss", decode::vtd_ss),
    ("decode_arm_stage1", decode::arm_stage1),
    ("decode_arm_stage2", decode::arm_stage2),
    ("decode_armv7s", decode::armv7s),
    ("decode_riscv", decode::riscv),
    ("decode_riscv_g", decode::riscv_g),
    ("decode_dart", decode::dart),
    ("readers", readers::readers),
    ("walk", walk::walk),
];
