//! A client of QEMU's qtest protocol.
//!
//! For authors of drivers, and of device models in QEMU, who test without a kernel.
//!
//! A program owns a QEMU and works its machine from outside: reads and writes its memory and the
//! registers of its devices, its ports and its clock, and hears of its interrupt lines. No code runs
//! inside. So a driver can be shown on a device model from another project, in milliseconds and
//! without a kernel.
//!
//! ```no_run
//! use std::{fs, process::Command};
//!
//! use qtest::{Machine, edu::Edu, pci};
//!
//! // The processor stops at its first instruction; timers fire as soon as they are set.
//! fs::write("halt.bin", qtest::HALT)?;
//! let mut qemu = Command::new("qemu-system-x86_64");
//! qemu.args(["-nodefaults", "-machine", "q35", "-accel", "tcg", "-icount", "shift=0,sleep=off"]);
//! qemu.args(["-m", "128M", "-bios", "halt.bin", "-device", "edu,addr=5"]);
//! let machine = Machine::start(qemu)?;
//!
//! // PCI is not set up yet.
//! let config = pci::Config::q35(&machine, 0xb000_0000)?;
//! let mut window = pci::Window::new(0xc000_0000, 0x1000_0000);
//! let address = pci::Address::new(0, 5, 0);
//! let bars = config.assign(address, &mut window)?;
//! config.enable(address)?;
//!
//! // The device copies through a buffer of its own.
//! let edu = Edu::new(&machine, bars[0].address)?;
//! machine.write(0x10_0000, b"sixteen bytes ..")?;
//! edu.read(0x10_0000, 0, 16)?;
//! edu.write(0x20_0000, 0, 16)?;
//! let mut bytes = [0; 16];
//! machine.read(0x20_0000, &mut bytes)?;
//! assert_eq!(&bytes, b"sixteen bytes ..");
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is where
//!
//! * [`Machine`]: a QEMU and its commands; every wait has a bound, and a QEMU that was started here
//!   ends with its `Machine`;
//! * [`Error`]: what can go wrong, by name;
//! * [`pci`]: configuration space, enumeration, base addresses;
//! * [`edu`]: QEMU's device for lessons, whose DMA engine is programmed by registers;
//! * [`nvme`]: the admin queue of an NVMe controller, which finds its work in memory;
//! * [`virtio`]: features, configuration and queues of a virtio device.
//!
//! # The clock
//!
//! Where QEMU has the accelerator `qtest` and was started with it, its virtual clock stands until
//! [`Machine::clock_step`] moves it. Where it has not (Debian's builds), `-qtest` works beside TCG: the
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
pub mod virtio;
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
