#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! * [`Machine`]: a QEMU and its commands; every wait has a bound, and a QEMU that was started here
//!   ends with its `Machine`;
//! * [`Error`]: what can go wrong, by name;
//! * [`pci`]: configuration space, enumeration, base addresses;
//! * [`edu`]: QEMU's device for lessons, whose DMA engine is programmed by registers;
//! * [`nvme`]: an NVMe controller, which finds its work in memory: who it is, blocks read and written;
//!
//! # The clock
//!
//! Where QEMU has the accelerator `qtest` and was started with it, its virtual clock stands until
//! [`Machine::clock_step`] moves it. Where it has not (Debian's builds before QEMU 11), `-qtest` works beside TCG: the
//! processor is halted by [`HALT`], and with `-icount shift=0,sleep=off` the clock goes straight to the
//! next deadline, so that a timer of 100 ms takes about one. [`Machine::clock_is_ours`] tells which.
//!
//! Source: QEMU, docs/devel/testing/qtest.

#![forbid(unsafe_code)]

pub mod edu;
mod error;
mod irq;
mod link;
mod machine;
pub mod nvme;
pub mod pci;
mod process;
mod wire;

pub use error::Error;
pub use irq::Irq;
pub use machine::{Machine, PATIENCE};

/// Firmware for QEMU's option `-bios` on x86 that stops the processor: with nothing to run, it is out
/// of the way of other users of the machine.
///
/// It is 64 KiB, what QEMU takes at least, and ends at 4 GiB. The processor begins 16 bytes before that
/// (Intel SDM volume 3, 10.1.4 "First Instruction Executed"), with `cli`, `hlt`, and a jump back to
/// `hlt`.
pub static HALT: [u8; 64 << 10] = {
    let mut bytes = [0xf4; 64 << 10];
    let [.., a, b, c, d, _, _, _, _, _, _, _, _, _, _, _, _] = &mut bytes;
    [*a, *b, *c, *d] = [0xfa, 0xf4, 0xeb, 0xfd];
    bytes
};
