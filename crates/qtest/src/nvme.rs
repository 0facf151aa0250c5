//! An NVMe controller: a device that finds its work in memory, by DMA.
//!
//! Commands lie in a ring that the controller reads, completions in one that it writes, and data where a
//! command says: so one command takes three accesses by DMA, at three addresses. Data of more than two pages take a
//! fourth: the command leads to a list of their addresses. Unlike
//! [`edu`](crate::edu) the device tells when it cannot reach its rings or a list; whether its data has arrived QEMU's
//! does not look.
//!
//! # Protocol
//!
//! The controller is disabled, its rings are empty pages of memory, their addresses are written, and it is
//! enabled. A command is written at the tail, then the tail to its doorbell; the completion is there when
//! its phase bit has changed, which it does with every round of the ring.
//!
//! Source: NVM Express Base Specification 1.4, sections 3.1 (registers), 4.2 and 4.6 (queue entries), 4.3 (PRP
//! lists), 5.3 and 5.4 (creation of queues), 5.15 (Identify), 6.9 (Read), 6.15 (Write), 7.6.1 (initialization).

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
/// Bytes of a block of QEMU's disks, unless asked for others.
pub const BLOCK_BYTES: u64 = 512;
/// Bytes of a page: what the controller is configured for.
pub const PAGE_BYTES: u64 = 4096;
/// The most pages of one transfer: one in the command, the others in a list of one page.
pub const MOST_PAGES: u64 = 1 + PAGE_BYTES / 8;

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
/// Creation of queues, of which each is in one piece.
const CREATE_SUBMISSION: u32 = 0x01;
const CREATE_COMPLETION: u32 = 0x05;
const CONTIGUOUS: u32 = 1;
/// Reads and writes of blocks, of the first disk.
const WRITE: u32 = 0x01;
const READ: u32 = 0x02;
const NAMESPACE: u32 = 1;

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
        /// The value found.
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
        /// The condition.
        what: &'static str,
    },
    /// The queues for blocks were not [created](Nvme::create_queues).
    #[error("there are no queues for blocks")]
    NoQueues,
    /// Data that one command cannot transfer.
    #[error(
        "{bytes:#x} bytes at {device:#x}: no whole blocks, none, or in more than {MOST_PAGES} pages"
    )]
    Data {
        /// Its address for the device.
        device: u64,
        /// Its length, bytes.
        bytes: u64,
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

/// Memory of a transfer: consecutive addresses of the device, page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// The first address for the device, a multiple of 4.
    pub device: u64,
    /// The length in bytes: whole [blocks](BLOCK_BYTES), at most [`MOST_PAGES`].
    pub bytes: u64,
    /// A page for the list of addresses, which is written when the data take more than two pages.
    pub list: Ring,
}

/// Status of a command (section 4.6.1, without phase and "do not retry").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u16);

impl Status {
    /// Done.
    pub const SUCCESS: Self = Self(0);
}

/// A pair of rings, and how far both sides are.
#[derive(Debug)]
struct Queue {
    number: u32,
    submission: Ring,
    completion: Ring,
    tail: u64,
    head: u64,
    phase: u16,
}

impl Queue {
    const fn new(number: u32, submission: Ring, completion: Ring) -> Self {
        Self {
            number,
            submission,
            completion,
            tail: 0,
            head: 0,
            phase: 1,
        }
    }

    fn clear(&self, machine: &Machine) -> Result<(), Error> {
        for ring in [self.submission, self.completion] {
            machine.memset(ring.address, RING_BYTES, 0)?;
        }
        Ok(())
    }
}

/// Words of a command.
type Command = [u32; COMMAND_BYTES as usize / 4];

/// A command of this code, with the PRP entries 1 and 2.
fn command(code: u32, entries: [u64; 2]) -> Command {
    let mut words = [0; COMMAND_BYTES as usize / 4];
    words[0] = code;
    for (nth, entry) in entries.into_iter().enumerate() {
        words[6 + 2 * nth] = entry as u32;
        words[7 + 2 * nth] = (entry >> 32) as u32;
    }
    words
}

/// The controller.
#[derive(Debug)]
pub struct Nvme<'a> {
    registers: Registers<'a>,
    admin: Queue,
    blocks: Option<Queue>,
}

/// The controller's registers.
#[derive(Clone, Copy, Debug)]
struct Registers<'a> {
    machine: &'a Machine,
    base: u64,
    /// Bytes from one doorbell to the next.
    stride: u64,
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
        let registers = Registers {
            machine,
            base,
            // DSTRD.
            stride: 4 << (found >> 32 & 0xf),
        };
        registers.configure(0, 0)?;
        let admin = Queue::new(0, submission, completion);
        admin.clear(machine)?;
        let attributes = (ENTRIES as u32 - 1) << 16 | (ENTRIES as u32 - 1);
        machine.writel(base + QUEUE_ATTRIBUTES, attributes)?;
        machine.writeq(base + SUBMISSION_BASE, submission.device)?;
        machine.writeq(base + COMPLETION_BASE, completion.device)?;
        registers.configure(ENABLED, READY)?;
        Ok(Self {
            registers,
            admin,
            blocks: None,
        })
    }

    /// Has the controller write what it is to `data`, as it addresses memory: [`IDENTIFY_BYTES`], with
    /// its serial number from byte 4 on.
    pub fn identify(&mut self, data: u64) -> Result<Status, Error> {
        let mut words = command(IDENTIFY, [data, 0]);
        words[10] = CONTROLLER;
        self.registers.submit(&mut self.admin, &words)
    }

    /// Creates the queues by which blocks are read and written, with these rings.
    pub fn create_queues(&mut self, submission: Ring, completion: Ring) -> Result<Status, Error> {
        const NUMBER: u32 = 1;
        let queue = Queue::new(NUMBER, submission, completion);
        queue.clear(self.registers.machine)?;
        let created = [
            (CREATE_COMPLETION, completion, CONTIGUOUS),
            (CREATE_SUBMISSION, submission, NUMBER << 16 | CONTIGUOUS),
        ];
        for (code, ring, flags) in created {
            let mut words = command(code, [ring.device, 0]);
            words[10] = (ENTRIES as u32 - 1) << 16 | NUMBER;
            words[11] = flags;
            let status = self.registers.submit(&mut self.admin, &words)?;
            if status != Status::SUCCESS {
                return Ok(status);
            }
        }
        self.blocks = Some(queue);
        Ok(Status::SUCCESS)
    }

    /// Has the controller read blocks of its first disk, from `block` on, and write them to `data`.
    ///
    /// # Errors
    ///
    /// [`Error::NoQueues`], [`Error::Data`].
    pub fn read(&mut self, block: u64, data: Data) -> Result<Status, Error> {
        self.transfer(READ, block, data)
    }

    /// Has the controller write `data` to blocks of its first disk, from `block` on.
    ///
    /// # Errors
    ///
    /// [`Error::NoQueues`], [`Error::Data`].
    pub fn write(&mut self, block: u64, data: Data) -> Result<Status, Error> {
        self.transfer(WRITE, block, data)
    }

    /// Disables the controller: it does no more DMA.
    pub fn stop(self) -> Result<(), Error> {
        self.registers.configure(0, 0)
    }

    fn transfer(&mut self, code: u32, block: u64, data: Data) -> Result<Status, Error> {
        let mut words = command(code, self.entries(data)?);
        words[1] = NAMESPACE;
        (words[10], words[11]) = (block as u32, (block >> 32) as u32);
        words[12] = (data.bytes / BLOCK_BYTES) as u32 - 1;
        let queue = self.blocks.as_mut().ok_or(Error::NoQueues)?;
        self.registers.submit(queue, &words)
    }

    /// The PRP entries of a command that transfers `data` (section 4.3): the first page, and the second page or a
    /// list of the others.
    fn entries(&self, data: Data) -> Result<[u64; 2], Error> {
        let Data {
            device,
            bytes,
            list,
        } = data;
        let end = device.checked_add(bytes);
        let pages = end.map(|end| end.div_ceil(PAGE_BYTES) - device / PAGE_BYTES);
        let whole = bytes > 0 && bytes % BLOCK_BYTES == 0 && device % 4 == 0;
        let pages = pages.filter(|pages| whole && *pages <= MOST_PAGES);
        let pages = pages.ok_or(Error::Data { device, bytes })?;
        let page = |nth| (device / PAGE_BYTES + nth) * PAGE_BYTES;
        Ok(match pages {
            1 => [device, 0],
            2 => [device, page(1)],
            _ => {
                let others: Vec<u8> = (1..pages).flat_map(|n| page(n).to_le_bytes()).collect();
                self.registers.machine.write(list.address, &others)?;
                [device, list.device]
            }
        })
    }
}

impl Registers<'_> {
    /// Gives a command to the controller, and waits for its end.
    fn submit(&self, queue: &mut Queue, words: &Command) -> Result<Status, Error> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let command = queue.submission.address + queue.tail * COMMAND_BYTES;
        self.machine.write(command, &bytes)?;
        queue.tail = (queue.tail + 1) % ENTRIES;
        let doorbell = self.base + DOORBELLS + 2 * u64::from(queue.number) * self.stride;
        self.machine.writel(doorbell, queue.tail as u32)?;

        // The last word: the status, and the phase in its lowest bit.
        let completion = queue.completion.address + queue.head * COMPLETION_BYTES;
        let status = self.wait("a completion", || {
            let status = self.machine.readw(completion + 14)?;
            Ok((status & 1 == queue.phase).then_some(status))
        })?;
        queue.head = (queue.head + 1) % ENTRIES;
        if queue.head == 0 {
            queue.phase ^= 1;
        }
        self.machine
            .writel(doorbell + self.stride, queue.head as u32)?;
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
