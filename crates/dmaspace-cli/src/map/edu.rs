//! QEMU's device `edu`: the one device of a machine whose registers are known here.
//!
//! Its DMA engine moves bytes between memory and a buffer of its own, a tenth of a second each time.
//! It does not learn of faults. Of an address it uses the bits of its `dma_mask`, which are 28 if
//! QEMU is not told otherwise (`-device edu,dma_mask=0xffffffffffffffff`), and cannot be read.
//!
//! Source: QEMU, docs/specs/edu, "MMIO area spec" and "DMA controller".

use std::ops::ControlFlow;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use ioas::KernelError;
use ioas::vfio::{Device, Registers, config};
use runs::Span;

use super::JobError;
use super::sampled::{Copier, PLACE};

/// Vendor and device, as [`DeviceReport::id`](dmaspace::devices::DeviceReport::id) has them.
pub(crate) const ID: &str = "1234:11e8";
pub(crate) const NAME: &str = "edu";

/// Identification: major and minor version above, and this.
const IDENTIFICATION: u64 = 0x00;
const EDU: u32 = 0xed;
const SOURCE: u64 = 0x80;
const DESTINATION: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
/// Command: starts a transfer; 0 when it is done.
const START: u64 = 1 << 0;
/// Command: from the buffer to memory, not the other way.
const TO_MEMORY: u64 = 1 << 1;
/// Where the DMA engine sees the buffer, which has 4096 bytes. Only the first half is used: QEMU 7.2
/// takes a transfer that goes to the very end for one beyond it, and ends.
const BUFFER_ADDRESS: u64 = 0x40000;
const _: () = assert!(PLACE <= 2048);

/// Many times the tenth of a second, for machines that are slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// The device, allowed to do DMA for as long as this is there.
pub(crate) struct Edu<'a> {
    device: &'a Device,
    registers: Registers,
}

impl<'a> Edu<'a> {
    pub(crate) fn new(device: &'a Device) -> Result<Self, JobError> {
        let space = device.config()?;
        let command: u16 = device.read(&space, config::COMMAND)?;
        device.write(&space, config::COMMAND, command | config::COMMAND_MEMORY)?;
        let bar = device.region(0)?;
        let registers = device.map(&bar, Span::new(0, 4096))?;
        let found: u32 = registers.read(IDENTIFICATION)?;
        if found & 0xff != EDU {
            return Err(JobError::NoEdu { found });
        }
        let edu = Self { device, registers };
        device.set_bus_master(true)?;
        Ok(edu)
    }

    fn transfer(
        &self,
        [from, to, command]: [u64; 3],
        iova: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), JobError> {
        // What the processor has stored before is there for the device, and the other way round.
        fence(Ordering::SeqCst);
        self.start(from, to, command)?;
        let started = Instant::now();
        while self.registers.read::<u64>(COMMAND)? & START != 0 {
            if go_on().is_break() {
                return Err(JobError::Interrupted);
            }
            if started.elapsed() > PATIENCE {
                let (bytes, seconds) = (PLACE, PATIENCE.as_secs());
                return Err(JobError::Stuck {
                    iova,
                    bytes,
                    seconds,
                });
            }
            thread::sleep(Duration::from_millis(1));
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn start(&self, from: u64, to: u64, command: u64) -> Result<(), KernelError> {
        self.registers.write(SOURCE, from)?;
        self.registers.write(DESTINATION, to)?;
        self.registers.write(COUNT, PLACE)?;
        self.registers.write(COMMAND, command)
    }
}

impl Copier for Edu<'_> {
    fn read(
        &mut self,
        iova: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), JobError> {
        self.transfer([iova, BUFFER_ADDRESS, START], iova, go_on)
    }

    fn write(
        &mut self,
        iova: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), JobError> {
        self.transfer([BUFFER_ADDRESS, iova, START | TO_MEMORY], iova, go_on)
    }
}

impl Drop for Edu<'_> {
    fn drop(&mut self) {
        // What is under way reaches no memory then. If it fails, there are still the tables.
        let _ = self.device.set_bus_master(false);
    }
}
