//! A machine with a balloon, and the driver's seams in it.
//!
//! | from | what |
//! |---|---|
//! | 1 MiB | rings and buffers of the driver |
//! | 16 MiB | the pages that may go into the balloon, 192 MiB |
//! | 208 MiB | data that may not |
//!
//! All of it is one shared file, whose blocks tell what QEMU has discarded.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    process::Command,
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use conformance::qmp::Qmp;
use qtest::{
    Machine,
    pci::{self, Address},
    virtio::{self, Virtio},
};
use runs::{GuestAddr, Span};
use serde_json::{Value, json};
use tempfile::TempDir;
use virtio_balloon::{
    Driver, Features, GuestPage, Stats, Tag,
    driver::{GuestPages, Memory, QueueAddresses, Settings, Transport},
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// The machine's memory.
pub(super) const MEMORY: u64 = 256 * MIB;
/// The pages that may go into the balloon.
pub(super) const POOL: Span<GuestAddr> = Span::new(16 * MIB, 192 * MIB);
/// Data that may not.
pub(super) const OUTSIDE: Span<GuestAddr> = Span::new(208 * MIB, 2 * MIB);
const SHARED: Span<GuestAddr> = Span::new(MIB, 8 * MIB);

/// What both are filled with at first.
pub(super) const FILLED: u8 = 0x5a;

const BALLOON: Address = Address::new(0, 5, 0);

/// A QEMU with a balloon of these options.
pub(super) struct Host {
    pub(super) machine: Machine,
    pub(super) qmp: RefCell<Qmp>,
    bars: Vec<pci::Bar>,
    _directory: TempDir,
}

impl Host {
    /// Starts it. With a `clock` of its own, timers are due as soon as nothing else is to do.
    pub(super) fn start(program: &str, options: &str, clock: bool) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let firmware = directory.path().join("halt.bin");
        fs::write(&firmware, qtest::HALT)?;
        let socket = directory.path().join("qmp");
        let mut qemu = Command::new(program);
        qemu.args(["-nodefaults", "-accel", "tcg", "-m", "256M"]);
        qemu.args(["-machine", "q35,memory-backend=memory"]);
        qemu.args([
            "-object",
            "memory-backend-memfd,id=memory,size=256M,share=on",
        ]);
        qemu.args(["-object", "iothread,id=thread"]);
        if clock {
            qemu.args(["-icount", "shift=0,sleep=off"]);
        }
        qemu.arg("-bios").arg(&firmware);
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        qemu.args(["-qmp", &monitor]);
        let device = format!("virtio-balloon-pci,id=balloon,addr=5,disable-legacy=on{options}");
        qemu.args(["-device", &device]);
        let machine = Machine::start(qemu)?;
        let qmp = RefCell::new(Qmp::connect(&socket)?);
        let config = pci::Config::q35(&machine, 0xb000_0000)?;
        let mut window = pci::Window::new(0xc000_0000, 0x1000_0000);
        let bars = config.assign(BALLOON, &mut window)?;
        config.enable(BALLOON)?;
        for fill in [POOL, OUTSIDE] {
            machine.memset(fill.start, fill.len, FILLED)?;
        }
        Ok(Self {
            machine,
            qmp,
            bars,
            _directory: directory,
        })
    }

    pub(super) fn ask(&self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        self.qmp.borrow_mut().command(command, arguments)
    }

    /// Bytes that the balloon should hold.
    pub(super) fn want(&self, bytes: u64) -> anyhow::Result<()> {
        self.ask("balloon", json!({"value": MEMORY - bytes}))?;
        Ok(())
    }

    /// Bytes that it holds, by what the driver has told.
    pub(super) fn actual(&self) -> anyhow::Result<u64> {
        let balloon = self.ask("query-balloon", json!({}))?;
        let left = balloon["actual"].as_u64().context("query-balloon")?;
        Ok(MEMORY - left)
    }

    /// Bytes of the machine's memory that the host has given to it.
    pub(super) fn blocks(&self) -> anyhow::Result<u64> {
        let process = self.machine.process_id().context("QEMU's process")?;
        for file in fs::read_dir(format!("/proc/{process}/fd"))? {
            let path = file?.path();
            let Ok(target) = fs::read_link(&path) else {
                continue;
            };
            if target.to_string_lossy().starts_with("/memfd:") {
                let about = fs::metadata(&path)?;
                if about.size() == MEMORY {
                    return Ok(about.blocks() * 512);
                }
            }
        }
        anyhow::bail!("QEMU has no file of {MEMORY} bytes open")
    }

    /// Fails unless each byte of the run is `value`.
    pub(super) fn holds(&self, run: Span<GuestAddr>, value: u8) -> anyhow::Result<()> {
        let mut bytes = vec![!value; run.len as usize];
        self.machine.read(run.start, &mut bytes)?;
        let other = bytes.iter().position(|byte| *byte != value);
        ensure!(other.is_none(), "{run}: byte {other:?} is not {value:#x}");
        Ok(())
    }

    /// A driver, whose pages are the pool's, and the guest's side of it.
    pub(super) fn driver(&self, settings: Settings) -> anyhow::Result<(Taken<'_>, Pages)> {
        let config = pci::Config::ecam(&self.machine, 0xb000_0000);
        let virtio = Virtio::new(&self.machine, &config, BALLOON, &self.bars)?;
        let pages = Pages::default();
        let (device, memory) = (Device::new(virtio), Shared::new(&self.machine));
        let driver = Driver::new(device, memory, pages.clone(), settings)?;
        Ok((driver, pages))
    }
}

/// The driver in a machine of QEMU.
pub(super) type Taken<'a> = Driver<Device<'a>, Shared<'a>, Pages>;

/// The way to the device.
#[derive(Debug)]
pub(super) struct Device<'a> {
    virtio: Virtio<'a>,
    begun: Instant,
    /// How often the device was told of something.
    pub(super) notified: u64,
}

impl<'a> Device<'a> {
    fn new(virtio: Virtio<'a>) -> Self {
        Self {
            virtio,
            begun: Instant::now(),
            notified: 0,
        }
    }
}

impl Transport for Device<'_> {
    type Error = virtio::Error;

    fn reset(&mut self) -> Result<(), Self::Error> {
        self.virtio.reset()?;
        self.virtio
            .add_status(virtio::ACKNOWLEDGE | virtio::DRIVER)?;
        Ok(())
    }

    fn offered(&mut self) -> Result<Features, Self::Error> {
        self.virtio.offered().map(Features)
    }

    fn accept(&mut self, features: Features) -> Result<bool, Self::Error> {
        self.virtio.accept(features.0)?;
        let status = self.virtio.add_status(virtio::FEATURES_OK)?;
        Ok(status & virtio::FEATURES_OK != 0)
    }

    fn begin(&mut self) -> Result<(), Self::Error> {
        self.virtio.add_status(virtio::DRIVER_OK)?;
        Ok(())
    }

    fn broken(&mut self) -> Result<bool, Self::Error> {
        Ok(self.virtio.status()? & virtio::NEEDS_RESET != 0)
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), Self::Error> {
        let mut at = offset;
        for field in bytes.chunks_mut(4) {
            let value = self.virtio.read_config(at)?.to_le_bytes();
            field.copy_from_slice(&value[..field.len()]);
            at += 4;
        }
        Ok(())
    }

    fn generation(&mut self) -> Result<u32, Self::Error> {
        self.virtio.generation().map(u32::from)
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), Self::Error> {
        self.virtio.write_config(offset, value)
    }

    fn queue_size(&mut self, queue: u16) -> Result<u16, Self::Error> {
        self.virtio.queue_size(queue)
    }

    fn enable_queue(
        &mut self,
        queue: u16,
        size: u16,
        at: QueueAddresses,
    ) -> Result<(), Self::Error> {
        let addresses = [at.descriptors, at.available, at.used];
        self.virtio.enable_queue(queue, size, addresses)
    }

    fn notify(&mut self, queue: u16) -> Result<(), Self::Error> {
        self.notified += 1;
        self.virtio.notify(queue)
    }

    fn wait(&mut self, _queue: u16, most: Duration) -> Result<(), Self::Error> {
        // No interrupts here: the next look is a command of its own.
        thread::sleep(most.min(Duration::from_micros(20)));
        Ok(())
    }

    fn now(&mut self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
    }
}

/// The driver's memory in the machine.
#[derive(Debug)]
pub(super) struct Shared<'a> {
    machine: &'a Machine,
    next: u64,
}

impl<'a> Shared<'a> {
    const fn new(machine: &'a Machine) -> Self {
        let next = SHARED.start;
        Self { machine, next }
    }
}

impl Memory for Shared<'_> {
    type Error = virtio::Error;
    type Words = Vec<u64>;
    type Bytes = Vec<u8>;

    fn words(&mut self, count: usize) -> Option<Vec<u64>> {
        Some(vec![0; count])
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        Some(vec![0; count])
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        let address = self.next;
        let len = len.next_multiple_of(PAGE);
        if !SHARED.covers(&Span::new(address, len)) {
            return None;
        }
        self.machine.memset(address, len, 0).ok()?;
        self.next += len;
        Some(address)
    }

    fn free(&mut self, _memory: Span<GuestAddr>) {
        // There is more than a few lives of a driver need.
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Self::Error> {
        Ok(self.machine.read(address, bytes)?)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        Ok(self.machine.write(address, bytes)?)
    }

    // QEMU does one command after the other: there is nothing to put into order.
    fn load(&self, address: u64) -> Result<u16, Self::Error> {
        Ok(self.machine.readw(address)?)
    }

    fn store(&self, address: u64, value: u16) -> Result<(), Self::Error> {
        Ok(self.machine.writew(address, value)?)
    }

    fn fence(&self) {}
}

/// The pool's pages: numbers of those that are free.
#[derive(Clone, Debug)]
pub(super) struct Pages(Rc<RefCell<BTreeSet<u64>>>);

impl Default for Pages {
    fn default() -> Self {
        let pages = POOL.start / PAGE..(POOL.start + POOL.len) / PAGE;
        Self(Rc::new(RefCell::new(pages.collect())))
    }
}

impl Pages {
    /// From now on only every second page of so many bytes at the front is free, and 2 MiB behind them.
    pub(super) fn scatter(&self, bytes: u64) {
        let end = (POOL.start + bytes) / PAGE;
        let block = end..end + 2 * MIB / PAGE;
        let free = |nr: &u64| block.contains(nr) || *nr < end && nr.is_multiple_of(2);
        self.0.borrow_mut().retain(free);
    }

    /// Bytes that are free.
    pub(super) fn free(&self) -> u64 {
        self.0.borrow().len() as u64 * PAGE
    }
}

impl GuestPages for Pages {
    fn page(&self) -> GuestPage {
        GuestPage::SIZE_4K
    }

    fn span(&self) -> Span<GuestAddr> {
        POOL
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let mut free = self.0.borrow_mut();
        let count = bytes / PAGE;
        let fits = |start: &&u64| {
            start.is_multiple_of(count)
                && free.range(**start..**start + count).count() as u64 == count
        };
        let start = *free.iter().find(fits)?;
        (start..start + count).for_each(|nr| {
            free.remove(&nr);
        });
        Some(start * PAGE)
    }

    fn give_back(&mut self, run: Span<GuestAddr>) {
        let pages = run.start / PAGE..(run.start + run.len) / PAGE;
        self.0.borrow_mut().extend(pages);
    }

    fn stats(&mut self) -> Stats {
        let mut stats = Stats::default();
        stats.set(Tag::FreeMemory, self.free());
        stats.set(Tag::TotalMemory, MEMORY);
        stats.set(Tag::OomKills, 7);
        stats
    }
}
