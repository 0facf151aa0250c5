//! An NVMe controller's admin queue: a device that finds its work in memory, by DMA.
//!
//! Commands lie in a ring that the controller reads, completions in one that it writes, and data where a
//! command says: so one command takes three accesses by DMA, at three addresses. Unlike
//! [`edu`](crate::edu) the device tells when it cannot reach its rings; whether its data has arrived QEMU's
//! does not look.
//!
//! # Protocol
//!
//! The controller is disabled, its rings are empty pages of memory, their addresses are written, and it is
//! enabled. A command is written at the tail, then the tail to its doorbell; the completion is there when
//! its phase bit has changed, which it does with every round of the ring.
//!
//! Source: NVM Express Base Specification 1.4, sections 3.1 (registers), 4.2 and 4.6 (queue entries), 5.15
//! (Identify), 7.6.1 (initialization).

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{Error as MachineError, Machine};

/// Base class, sub-class and programming interface of such a controller, as in
/// [`pci::Function::class`](crate::pci::Function).
pub const CLASS: u32 = 0x01_08_02;

/// Bytes of a ring.
pub const RING_BYTES: u64 = 4096;
/// Bytes of what [`identify`](Nvme::identify) writes.
pub const IDENTIFY_BYTES: u64 = 4096;

// Registers.
const CAPABILITIES: u64 = 0x00;
const CONFIGURATION: u64 = 0x14;
const STATUS: u64 = 0x1c;
const QUEUE_ATTRIBUTES: u64 = 0x24;
const SUBMISSION_BASE: u64 = 0x28;
const COMPLETION_BASE: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

/// [`CONFIGURATION`]: enabled, with entries of 64 and 16 bytes.
const ENABLED: u32 = 1 | 6 << 16 | 4 << 20;
/// [`STATUS`]: ready; and broken, until the next reset.
const READY: u32 = 1;
const FATAL: u32 = 1 << 1;

/// Entries of the rings: both fit in a page.
const ENTRIES: u64 = 64;
const COMMAND_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;

/// Identify, of the controller itself.
const IDENTIFY: u32 = 0x06;
const CONTROLLER: u32 = 1;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the controller did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine's command failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// There is no such controller.
    #[error("no NVMe controller at {base:#x}: capabilities {found:#x}")]
    Absent {
        /// Where its registers should be.
        base: u64,
        /// What is there.
        found: u64,
    },
    /// The controller has given up, and must be set up anew: it could not reach its rings.
    #[error("the controller reports a fatal error: status {status:#x}")]
    Fatal {
        /// Its status register.
        status: u32,
    },
    /// It does not come to an end.
    #[error("{what} has not come within {PATIENCE:?}")]
    Endless {
        /// What was waited for.
        what: &'static str,
    },
}

/// A ring: where it is in memory, and where the controller finds it. A page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Its address in the machine's memory.
    pub address: u64,
    /// Its address for the device.
    pub device: u64,
}

/// What the controller says about a command (section 4.6.1, without phase and "do not retry").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u16);

impl Status {
    /// Done.
    pub const SUCCESS: Self = Self(0);
}

/// The controller.
#[derive(Debug)]
pub struct Nvme<'a> {
    machine: &'a Machine,
    base: u64,
    /// Bytes from one doorbell to the next.
    stride: u64,
    submission: Ring,
    completion: Ring,
    tail: u64,
    head: u64,
    phase: u16,
}

impl<'a> Nvme<'a> {
    /// Resets the controller whose registers are at `base`, and enables it with these rings.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`] when something else is there.
    pub fn new(
        machine: &'a Machine,
        base: u64,
        submission: Ring,
        completion: Ring,
    ) -> Result<Self, Error> {
        let found = machine.readq(base.wrapping_add(CAPABILITIES))?;
        // CSS: the NVM command set, which every such controller has. MQES: enough entries.
        if found == u64::MAX || found >> 37 & 1 == 0 || found & 0xffff < ENTRIES - 1 {
            return Err(Error::Absent { base, found });
        }
        let controller = Self {
            machine,
            base,
            // DSTRD.
            stride: 4 << (found >> 32 & 0xf),
            submission,
            completion,
            tail: 0,
            head: 0,
            phase: 1,
        };
        controller.configure(0, 0)?;
        for ring in [submission, completion] {
            machine.memset(ring.address, RING_BYTES, 0)?;
        }
        let attributes = (ENTRIES as u32 - 1) << 16 | (ENTRIES as u32 - 1);
        machine.writel(base + QUEUE_ATTRIBUTES, attributes)?;
        machine.writeq(base + SUBMISSION_BASE, submission.device)?;
        machine.writeq(base + COMPLETION_BASE, completion.device)?;
        controller.configure(ENABLED, READY)?;
        Ok(controller)
    }

    /// Has the controller write what it is to `data`, as it addresses memory: [`IDENTIFY_BYTES`], with
    /// its serial number from byte 4 on.
    pub fn identify(&mut self, data: u64) -> Result<Status, Error> {
        let command = self.submission.address + self.tail * COMMAND_BYTES;
        let mut words = [0; COMMAND_BYTES as usize / 4];
        words[0] = IDENTIFY;
        // PRP entry 1: a page.
        (words[6], words[7]) = (data as u32, (data >> 32) as u32);
        words[10] = CONTROLLER;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.machine.write(command, &bytes)?;
        self.tail = (self.tail + 1) % ENTRIES;
        self.machine
            .writel(self.base + DOORBELLS, self.tail as u32)?;

        // The last word: the status, and the phase in its lowest bit.
        let completion = self.completion.address + self.head * COMPLETION_BYTES;
        let status = self.wait("a completion", || {
            let status = self.machine.readw(completion + 14)?;
            Ok((status & 1 == self.phase).then_some(status))
        })?;
        self.head = (self.head + 1) % ENTRIES;
        if self.head == 0 {
            self.phase ^= 1;
        }
        let doorbell = self.base + DOORBELLS + self.stride;
        self.machine.writel(doorbell, self.head as u32)?;
        // SC and SCT.
        Ok(Status(status >> 1 & 0x7ff))
    }

    /// Writes the configuration, and waits until the controller is ready, or is not.
    fn configure(&self, configuration: u32, ready: u32) -> Result<(), Error> {
        self.machine
            .writel(self.base + CONFIGURATION, configuration)?;
        self.wait("the controller's reset", || {
            let status = self.machine.readl(self.base + STATUS)?;
            Ok((status & READY == ready).then_some(()))
        })
    }

    fn wait<T>(
        &self,
        what: &'static str,
        mut done: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let start = Instant::now();
        loop {
            if let Some(done) = done()? {
                return Ok(done);
            }
            let status = self.machine.readl(self.base + STATUS)?;
            if status & FATAL != 0 && self.machine.readl(self.base + CONFIGURATION)? & 1 != 0 {
                return Err(Error::Fatal { status });
            }
            if start.elapsed() > PATIENCE {
                return Err(Error::Endless { what });
            }
            thread::sleep(Duration::from_micros(100));
        }
    }
}
