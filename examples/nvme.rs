//! An NVMe disk from user space: the identity of the controller, and a block of its disk.
//!
//! For authors of drivers in user space; `docs/guides/driver.md` leads through it. The
//! controller must be bound to `vfio-pci` (`dmaspace devices` says how). Nothing is written to the disk.
//!
//!     cargo run -p dmaspace-examples --example nvme -- 0000:01:00.0 iommufd 0
//!
//! Source: NVM Express Base Specification 2.0: 3.1.3 "Controller Properties", 3.5.1 "Memory-based Controller
//! Initialization", 4.2 "Completion Queue Entry", 5 "Admin Command Set"; NVM Command Set Specification 1.0,
//! 3.2.4 "Read command".

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use dmaspace::vfio::{Container, ContainerMapper, DeviceRegisters, Group, VfioDevice, config};
use dmaspace::{Backing, HostMemory, Ioas, Iommufd, Mapping, Memory, Prot, Span, Type1};

/// Device address of the beginning of our memory: any address that its unit translates.
const IOVA: u64 = 0x1_0000_0000;
const PAGE: u64 = 4096;

/// Our memory, a page for each: queues, and what the device writes.
const ADMIN: u64 = 0;
const IO: u64 = 2 * PAGE;
const DATA: u64 = 4 * PAGE;
const BYTES: u64 = 5 * PAGE;

// 3.1.3: offsets of the properties.
const CAPABILITIES: u64 = 0x00;
const CONFIGURATION: u64 = 0x14;
const STATUS: u64 = 0x1c;
const ADMIN_QUEUE_ATTRIBUTES: u64 = 0x24;
const ADMIN_SUBMISSION_QUEUE: u64 = 0x28;
const ADMIN_COMPLETION_QUEUE: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

/// Configuration: enabled; pages of 4 KiB; entries of 64 bytes to submit, and of 16 to complete.
const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
const READY: u32 = 1;
const FATAL: u32 = 2;
/// Entries of each queue: the least that every controller takes, and enough for one command at a time.
const ENTRIES: u32 = 2;
/// Time that a command may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens the controller at a PCI address, does `job` with it, and gives everything back.
fn with_controller<T>(
    address: &str,
    way: &str,
    job: impl FnOnce(&VfioDevice, &Mapping) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if way == "iommufd" {
        let iommufd = Iommufd::open()?;
        let space = Ioas::over(&iommufd)?;
        let bound = iommufd.device(address)?;
        space.attach(bound.clone())?;
        let done = in_space(&space, &bound.device, job)?;
        space.detach(&bound)?;
        space.close()?;
        return Ok(done);
    }
    let space = match way {
        "vfio" => Ioas::over(&Type1::open()?)?,
        // The same calls, answered by iommufd.
        "compat" => {
            let file = File::options().read(true).write(true).open(Iommufd::PATH)?;
            Ioas::over_mapper(ContainerMapper::new(Container::from_fd(file.into())?))
        }
        _ => bail!("{way} is none of vfio, compat, iommufd"),
    };
    let group = Arc::new(Group::of_device(address)?);
    space.attach(group.clone())?;
    let device = group.device(address)?;
    // iommufd's compatibility layer reports capabilities only after a device is opened.
    space.refresh()?;
    let done = in_space(&space, &device, job)?;
    // A group can be detached only when its devices are closed.
    drop(device);
    space.detach(&group)?;
    space.close()?;
    Ok(done)
}

/// Maps our memory for the device while `job` runs.
fn in_space<T>(
    space: &Ioas,
    device: &VfioDevice,
    job: impl FnOnce(&VfioDevice, &Mapping) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, BYTES, None)?);
    mapping.populate(&mut |_| ControlFlow::Continue(()))?;
    let memory = Memory::new(Arc::new(HostMemory::new(mapping.clone())), &space.ledger()?);
    space.map(IOVA, &memory, Span::new(0, BYTES), Prot::RW)?;
    let done = job(device, &mapping);
    // Also after an error: without bus mastering there is no DMA, so memory can be unmapped.
    device.set_bus_master(false)?;
    space.unmap(Span::new(IOVA, BYTES))?;
    done
}

/// A command, as far as it differs from all zeros: 4.1 "Submission Queue Entry".
#[derive(Default)]
struct Command {
    opcode: u8,
    namespace: u32,
    /// Data pointer: a device address.
    data: u64,
    /// Double words 10 to 12.
    words: [u32; 3],
}

/// A submission queue, and the completion queue in the page behind it.
struct Queue {
    number: u64,
    /// Offset in our memory.
    at: u64,
    /// Commands so far.
    sent: u32,
}

/// A controller that is ready.
struct Controller<'a> {
    registers: DeviceRegisters,
    memory: &'a Mapping,
    /// Bytes from a doorbell to the next.
    stride: u64,
    admin: Queue,
    io: Queue,
}

impl Controller<'_> {
    /// Sends a command, and waits until the controller has done it.
    fn send(&mut self, to_io: bool, command: &Command) -> anyhow::Result<()> {
        let queue = if to_io { &mut self.io } else { &mut self.admin };
        let slot = queue.sent % ENTRIES;
        // The phase bit turns with each pass through the queue, and was 0 at first.
        let phase = u64::from(queue.sent / ENTRIES + 1) & 1;
        queue.sent += 1;
        let tail = queue.sent % ENTRIES;
        let identifier = queue.sent & 0xffff;
        let entry = queue.at + u64::from(slot) * 64;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [word10, word11, word12] = command.words;
        let words = [
            pair(
                u32::from(command.opcode) | identifier << 16,
                command.namespace,
            ),
            0,
            0,
            command.data,
            0,
            pair(word10, word11),
            pair(word12, 0),
            0,
        ];
        for (nth, word) in (0..).zip(words) {
            store(self.memory, entry + 8 * nth, word)?;
        }
        // The device must find the entry when it hears of it.
        fence(Ordering::SeqCst);
        let doorbell = DOORBELLS + 2 * queue.number * self.stride;
        self.registers.write(doorbell, tail)?;
        let start = Instant::now();
        let completion = queue.at + PAGE + u64::from(slot) * 16 + 8;
        let word = loop {
            let word = load(self.memory, completion)?;
            if word >> 48 & 1 == phase {
                break word;
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "no completion after {PATIENCE:?}"
            );
            thread::sleep(Duration::from_micros(100));
        };
        // And we must see what it wrote before it said so.
        fence(Ordering::SeqCst);
        self.registers.write(doorbell + self.stride, tail)?;
        let (found, status) = (word >> 32 & 0xffff, word >> 49);
        ensure!(
            found == u64::from(identifier),
            "{found} was completed, not {identifier}"
        );
        ensure!(
            status == 0,
            "opcode {:#x} ended with status {status:#x}",
            command.opcode
        );
        Ok(())
    }
}

impl<'a> Controller<'a> {
    /// Resets the controller, gives it queues in `memory`, and has it run.
    fn start(device: &VfioDevice, memory: &'a Mapping) -> anyhow::Result<Self> {
        let space = device.config()?;
        let command: u16 = device.read(&space, config::COMMAND)?;
        device.write(&space, config::COMMAND, command | config::COMMAND_MEMORY)?;
        let registers = device.map(&device.region(0)?, Span::new(0, 2 * PAGE))?;
        let capabilities: u64 = registers.read(CAPABILITIES)?;
        ensure!(capabilities >> 48 & 0xf == 0, "it takes no pages of 4 KiB");
        let stride = 4 << (capabilities >> 32 & 0xf);
        ensure!(4 * stride <= PAGE, "its doorbells are {stride} bytes apart");
        registers.write(CONFIGURATION, 0_u32)?;
        until(&registers, |status| status & READY == 0).context("it does not stop")?;
        registers.write(ADMIN_QUEUE_ATTRIBUTES, (ENTRIES - 1) | (ENTRIES - 1) << 16)?;
        registers.write(ADMIN_SUBMISSION_QUEUE, IOVA + ADMIN)?;
        registers.write(ADMIN_COMPLETION_QUEUE, IOVA + ADMIN + PAGE)?;
        // Not before it was stopped: its last user may have left it running.
        device.set_bus_master(true)?;
        registers.write(CONFIGURATION, ENABLE)?;
        until(&registers, |status| status & (READY | FATAL) != 0).context("it does not start")?;
        let status: u32 = registers.read(STATUS)?;
        ensure!(status & FATAL == 0, "it has failed: status {status:#x}");
        let queue = |number, at| Queue {
            number,
            at,
            sent: 0,
        };
        let (admin, io) = (queue(0, ADMIN), queue(1, IO));
        let mut controller = Self {
            registers,
            memory,
            stride,
            admin,
            io,
        };
        controller.make_io_queues()?;
        Ok(controller)
    }

    /// 5.27.1.5 "Number of Queues", 5.4 "Create I/O Completion Queue", 5.5 "Create I/O Submission Queue".
    fn make_io_queues(&mut self) -> anyhow::Result<()> {
        let shape = 1 | (ENTRIES - 1) << 16;
        // In one piece; the submission queue also says which queue its completions go to.
        let (whole, whole_to_1) = (1, 1 | 1 << 16);
        for (opcode, data, words) in [
            (0x09, 0, [7, 0, 0]),
            (0x05, IOVA + IO + PAGE, [shape, whole, 0]),
            (0x01, IOVA + IO, [shape, whole_to_1, 0]),
        ] {
            let command = Command {
                opcode,
                namespace: 0,
                data,
                words,
            };
            self.send(false, &command)?;
        }
        Ok(())
    }

    /// It does no DMA any more.
    fn stop(self) -> anyhow::Result<()> {
        self.registers.write(CONFIGURATION, 0_u32)?;
        until(&self.registers, |status| status & READY == 0).context("it does not stop")
    }
}

impl Controller<'_> {
    /// 5.17 "Identify": what the controller says of itself, or of its first namespace.
    fn identify(&mut self, controller: bool) -> anyhow::Result<Vec<u8>> {
        let (namespace, what) = if controller { (0, 1) } else { (1, 0) };
        let words = [what, 0, 0];
        self.send(
            false,
            &Command {
                opcode: 0x06,
                namespace,
                data: IOVA + DATA,
                words,
            },
        )?;
        bytes(self.memory, DATA, PAGE)
    }

    /// The bytes of a block of the first namespace.
    fn read(&mut self, block: u64) -> anyhow::Result<Vec<u8>> {
        let namespace = self.identify(false)?;
        let blocks = u64::from_le_bytes(field(&namespace, 0)?);
        ensure!(
            block < blocks,
            "it has {blocks} blocks, and none of number {block}"
        );
        // FLBAS says which format is used, and byte 2 of a format the logarithm of its size.
        let [format] = field(&namespace, 26)?;
        let [shift] = field(&namespace, 128 + 4 * usize::from(format & 0xf) + 2)?;
        ensure!((9..=12).contains(&shift), "blocks of 2^{shift} bytes");
        let words = [block as u32, (block >> 32) as u32, 0];
        self.send(
            true,
            &Command {
                opcode: 0x02,
                namespace: 1,
                data: IOVA + DATA,
                words,
            },
        )?;
        bytes(self.memory, DATA, 1 << shift)
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, way, block] = &arguments[..] else {
        println!("nvme ADDRESS vfio|compat|iommufd BLOCK; `dmaspace devices` lists addresses");
        return Ok(());
    };
    let block: u64 = block.parse().context("no number of a block")?;
    with_controller(address, way, |device, memory| {
        let mut controller = Controller::start(device, memory)?;
        let identity = controller.identify(true)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        println!("serial {}", text(&field::<20>(&identity, 4)?));
        println!("model {}", text(&field::<40>(&identity, 24)?));
        let data = controller.read(block)?;
        println!("block {block} of {} bytes", data.len());
        for row in data.chunks(32) {
            let row: Vec<String> = row.iter().map(|byte| format!("{byte:02x}")).collect();
            println!("{}", row.concat());
        }
        controller.stop()
    })
}

/// Waits until the status is as wanted.
fn until(registers: &DeviceRegisters, reached: impl Fn(u32) -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    while !reached(registers.read(STATUS)?) {
        ensure!(start.elapsed() < PATIENCE, "waited for {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

// The device may write at any time, so all is atomic cells. They are little-endian, as it sees them.

fn store(memory: &Mapping, at: u64, value: u64) -> anyhow::Result<()> {
    let cell = memory
        .cells()
        .get(at as usize / 8)
        .context("beyond the memory")?;
    cell.store(value.to_le(), Ordering::Relaxed);
    Ok(())
}

fn load(memory: &Mapping, at: u64) -> anyhow::Result<u64> {
    let cell = memory
        .cells()
        .get(at as usize / 8)
        .context("beyond the memory")?;
    Ok(u64::from_le(cell.load(Ordering::Relaxed)))
}

fn bytes(memory: &Mapping, at: u64, len: u64) -> anyhow::Result<Vec<u8>> {
    let words = (at..at + len).step_by(8).map(|at| load(memory, at));
    let words: Vec<u64> = words.collect::<Result<_, _>>()?;
    Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// `N` bytes of an answer.
fn field<const N: usize>(answer: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    let bytes = answer.get(at..at + N).context("beyond the answer")?;
    Ok(bytes.try_into()?)
}
