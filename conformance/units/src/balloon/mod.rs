//! The balloon's driver against QEMU's device.
//!
//! A `machine::Host` is a machine without a processor at work; the driver reaches its memory and its
//! device by commands to QEMU (`qtest`). What the device believes is asked at QEMU's monitor, and what it has
//! done is seen in the machine's memory: what was discarded reads as 0, and the file behind it has fewer
//! blocks. Each check has a machine of its own.

mod checks;
mod machine;

pub use checks::{CHECKS, Check};
