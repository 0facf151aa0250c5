//! QEMU's emulated IOMMUs, and devices that do DMA through them.
//!
//! A [`Rig`] is a machine in [`QEMU`](Qemu) with a [unit](Unit) and devices behind it. No code runs in
//! it: this program works it from outside, over the qtest protocol. The machine's memory for tables and
//! structures is memory of this process, too, so `iopt` and a driver store to it as they do to their
//! own, and the unit walks what was stored. [`Registers`] are the unit's. What a DMA has done is seen in
//! the machine's memory.
//!
//! The [`checks`] are run by the program `units`, each on a machine of its own; so are those of [`cpu`],
//! for which QEMU's processors walk tables.

#![forbid(unsafe_code)]

mod board;
mod case;
pub mod checks;
pub mod cpu;
mod drivers;
mod gate;
mod handed;
pub mod lives;
mod qemu;
mod registers;
pub mod report;
mod rig;
mod tables;

pub(crate) use case::id;
pub use qemu::{Board, Denied, Kind, Qemu, Tells, Unit};
pub use registers::Registers;
pub use rig::{At, DEVICES, LONGEST, NVME, Place, Rig, SERIAL, Seen};
