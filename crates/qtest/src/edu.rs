//! QEMU's device `edu`, made for lessons: its DMA engine copies between memory and a buffer of its own.
//!
//! # Protocol
//!
//! Source, destination and count are written, then the command, whose lowest bit stays set until a
//! timer has fired 100 ms later by the virtual clock and the bytes are copied. The device does not
//! learn of a fault: the buffer is then undefined, or memory as it was. Without the option
//! `dma_mask=0xffffffffffffffff` it knows 28 bits of an address.
//!
//! Source: QEMU, docs/specs/edu, "MMIO area spec" and "DMA controller".

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{Error as MachineError, Machine};

/// The device, as [`pci::Function`](crate::pci::Function) names it.
pub const VENDOR: u16 = 0x1234;
/// See [`VENDOR`].
pub const DEVICE: u16 = 0x11e8;

/// The most bytes that the buffer takes: it has one more, but QEMU 7.2 takes a transfer that reaches it
/// for one beyond the end, and aborts.
pub const BUFFER_BYTES: u64 = 4095;

/// Identification: major and minor version above, and `ed`.
const IDENTIFICATION: u64 = 0x00;
const INTERRUPT_STATUS: u64 = 0x24;
const INTERRUPT_RAISE: u64 = 0x60;
const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
const SOURCE: u64 = 0x80;
const DESTINATION: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
/// [`COMMAND`]: starts a transfer; 0 when it is done.
const START: u64 = 1 << 0;
/// [`COMMAND`]: from the buffer to memory, not the other way.
const TO_MEMORY: u64 = 1 << 1;
/// Where the DMA engine sees the buffer.
const BUFFER: u64 = 0x40000;

/// How long a transfer takes by the virtual clock, nanoseconds.
const TRANSFER: u64 = 100_000_000;
/// How long one may take by ours: many times the same, for a clock that goes like ours.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the device did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine's command failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// There is no such device.
    #[error("{found:#x} at {base:#x} identifies no edu")]
    Absent {
        /// Where its registers should be.
        base: u64,
        /// The value found.
        found: u32,
    },
    /// Nothing at all, or more than the buffer takes.
    #[error("{len} bytes from byte {at} of the buffer, which takes {BUFFER_BYTES}")]
    Length {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// The transfer does not end.
    #[error("the transfer has not ended within {0:?}")]
    Endless(Duration),
}

/// The device.
#[derive(Clone, Copy, Debug)]
pub struct Edu<'a> {
    machine: &'a Machine,
    base: u64,
    /// The clock is moved by us.
    step: bool,
}

impl<'a> Edu<'a> {
    /// The device whose registers are at `base`.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`] when something else is there.
    pub fn new(machine: &'a Machine, base: u64) -> Result<Self, Error> {
        let found = machine.readl(base.wrapping_add(IDENTIFICATION))?;
        if found & 0xff != 0xed {
            return Err(Error::Absent { base, found });
        }
        let step = machine.clock_is_ours()?;
        Ok(Self {
            machine,
            base,
            step,
        })
    }

    /// Copies `len` bytes of memory, where the device sees `address`, to byte `at` of the buffer.
    pub fn read(&self, address: u64, at: u64, len: u64) -> Result<(), Error> {
        self.transfer(address, BUFFER.wrapping_add(at), at, len, START)
    }

    /// Copies `len` bytes from byte `at` of the buffer to memory, where the device sees `address`.
    pub fn write(&self, address: u64, at: u64, len: u64) -> Result<(), Error> {
        let command = START | TO_MEMORY;
        self.transfer(BUFFER.wrapping_add(at), address, at, len, command)
    }

    /// Raises its interrupt for the reasons in `bits`.
    pub fn raise(&self, bits: u32) -> Result<(), Error> {
        Ok(self.machine.writel(self.base + INTERRUPT_RAISE, bits)?)
    }

    /// The reasons for which its interrupt is raised.
    pub fn raised(&self) -> Result<u32, Error> {
        Ok(self.machine.readl(self.base + INTERRUPT_STATUS)?)
    }

    /// Lowers its interrupt, unless there are other reasons than those in `bits`.
    pub fn acknowledge(&self, bits: u32) -> Result<(), Error> {
        let register = self.base + INTERRUPT_ACKNOWLEDGE;
        Ok(self.machine.writel(register, bits)?)
    }

    fn transfer(&self, from: u64, to: u64, at: u64, len: u64, command: u64) -> Result<(), Error> {
        let end = at.checked_add(len);
        if len == 0 || end.is_none_or(|end| end > BUFFER_BYTES) {
            return Err(Error::Length { at, len });
        }
        let write = |register, value| self.machine.writeq(self.base + register, value);
        write(SOURCE, from)?;
        write(DESTINATION, to)?;
        write(COUNT, len)?;
        write(COMMAND, command)?;
        if self.step {
            self.machine.clock_step(TRANSFER)?;
        }
        let start = Instant::now();
        while self.machine.readq(self.base + COMMAND)? & START != 0 {
            if start.elapsed() > PATIENCE {
                return Err(Error::Endless(PATIENCE));
            }
            // One loop of QEMU answers commands and fires timers.
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}
