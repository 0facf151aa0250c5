//! The device `edu`, whose DMA engine moves bytes between memory and a buffer of its own, and which interrupts when it is
//! told to.
//!
//! Source: QEMU, docs/specs/edu, "MMIO area spec" and "DMA controller".

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use guest::machines;
use ioas::vfio::{DeviceRegisters, VfioDevice, config};
use runs::Span;

use crate::host::Endpoint;

/// The most bytes that one transfer moves: half of the buffer, since QEMU 7.2 takes one that goes to
/// its very end for one beyond it, and ends.
pub(crate) const BUFFER: u64 = 2048;

/// Identification: major and minor version above, and this.
const IDENTIFICATION: u64 = 0x00;
const EDU: u32 = 0xed;
/// Bits for which it interrupts.
const RAISED: u64 = 0x24;
const RAISE: u64 = 0x60;
const ACKNOWLEDGE: u64 = 0x64;
pub(crate) const SOURCE: u64 = 0x80;
pub(crate) const DESTINATION: u64 = 0x88;
pub(crate) const COUNT: u64 = 0x90;
pub(crate) const COMMAND: u64 = 0x98;
/// Command: starts a transfer; 0 when it is done.
pub(crate) const START: u64 = 1 << 0;
/// Command: from the buffer to memory, not the other way.
pub(crate) const TO_MEMORY: u64 = 1 << 1;
/// Where the DMA engine sees the buffer.
pub(crate) const BUFFER_ADDRESS: u64 = 0x40000;

/// A transfer takes a tenth of a second by the guest's clock.
const PATIENCE: Duration = Duration::from_secs(60);

/// The device, allowed to do DMA.
pub(crate) struct Edu {
    registers: DeviceRegisters,
    /// On a machine where the host does its DMA.
    by_host: Option<Endpoint>,
}

impl Edu {
    pub(crate) fn new(device: &VfioDevice) -> anyhow::Result<Self> {
        let space = device.config()?;
        let command: u16 = device.read(&space, config::COMMAND)?;
        device.write(&space, config::COMMAND, command | config::COMMAND_MEMORY)?;
        device.set_bus_master(true)?;
        let bar = device.region(0)?;
        let registers = device.map(&bar, Span::new(0, 4096))?;
        let found: u32 = registers.read(IDENTIFICATION)?;
        ensure!(found & 0xff == EDU, "{found:#x} identifies no edu");
        let by_host = Endpoint::of_this_machine(machines::EDU)?;
        Ok(Self { registers, by_host })
    }

    /// Has it interrupt: adds to the bits for which it does.
    pub(crate) fn raise(&self, bits: u32) -> anyhow::Result<()> {
        Ok(self.registers.write(RAISE, bits)?)
    }

    /// Bits for which it interrupts.
    pub(crate) fn raised(&self) -> anyhow::Result<u32> {
        Ok(self.registers.read(RAISED)?)
    }

    /// Takes bits away; without any left the wire is down, while messages are disabled.
    pub(crate) fn acknowledge(&self, bits: u32) -> anyhow::Result<()> {
        Ok(self.registers.write(ACKNOWLEDGE, bits)?)
    }

    /// Fills the first `len` bytes of the buffer from `iova`. What the device reads where nothing
    /// is mapped is not said.
    pub(crate) fn read(&self, iova: u64, len: u64) -> anyhow::Result<()> {
        self.read_while(iova, len, &mut nap)
    }

    /// The same; does `meanwhile` once, and again and again until it is done.
    pub(crate) fn read_while(
        &self,
        iova: u64,
        len: u64,
        meanwhile: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.transfer(iova, BUFFER_ADDRESS, len, START, meanwhile)
    }

    /// Writes the first `len` bytes of the buffer to `iova`; does not learn of a fault.
    pub(crate) fn write(&self, iova: u64, len: u64) -> anyhow::Result<()> {
        self.write_while(iova, len, &mut nap)
    }

    /// The same; does `meanwhile` once, and again and again until it is done.
    pub(crate) fn write_while(
        &self,
        iova: u64,
        len: u64,
        meanwhile: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.transfer(BUFFER_ADDRESS, iova, len, START | TO_MEMORY, meanwhile)
    }

    /// Begins to write the first `len` bytes of the buffer to `iova`.
    pub(crate) fn begin_write(&self, iova: u64, len: u64) -> anyhow::Result<()> {
        self.begin(BUFFER_ADDRESS, iova, len, START | TO_MEMORY)
    }

    fn begin(&self, from: u64, to: u64, len: u64, command: u64) -> anyhow::Result<()> {
        self.registers.write(SOURCE, from)?;
        self.registers.write(DESTINATION, to)?;
        self.registers.write(COUNT, len)?;
        Ok(self.registers.write(COMMAND, command)?)
    }

    fn transfer(
        &self,
        from: u64,
        to: u64,
        len: u64,
        command: u64,
        meanwhile: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        ensure!(len <= BUFFER, "{len} bytes in one transfer");
        if let Some(endpoint) = self.by_host {
            // A fault is not learnt of.
            match command & TO_MEMORY {
                0 => endpoint.read(from, len)?,
                _ => endpoint.write(to, len)?,
            };
            return meanwhile();
        }
        self.begin(from, to, len, command)?;
        let start = Instant::now();
        // Once in any case: on a busy host the transfer may have ended before the first look.
        loop {
            meanwhile()?;
            if self.registers.read::<u64>(COMMAND)? & START == 0 {
                return Ok(());
            }
            ensure!(start.elapsed() < PATIENCE, "no end of a transfer");
        }
    }
}

fn nap() -> anyhow::Result<()> {
    thread::sleep(Duration::from_millis(1));
    Ok(())
}
