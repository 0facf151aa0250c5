//! A machine with a unit and devices behind it.
//!
//! # Memory
//!
//! QEMU lays the memory of its nodes end to end: 2 GiB below 4 GiB, the rest from there on. A node's
//! memory can be a file that this process maps, too. So there are three nodes:
//!
//! | from | to | what |
//! |---|---|---|
//! | 0 | 4 GiB + 32 MiB | nothing of ours |
//! | [`TABLES`] | | tables and structures, shared with this process |
//! | [`DATA`] | | what devices read and write, by commands to QEMU; sparse |
//!
//! All of it lies above 4 GiB, so that an address that lost its upper half does not lead there.

use std::{
    cell::{Cell, RefCell},
    fs,
    os::fd::AsRawFd as _,
    process,
    sync::atomic::Ordering,
};

use anyhow::{Context as _, ensure};
use conformance::random::Random;
use hostmem::{Backing, Mapping};
use ioas::{HostTables, MappedStorage};
use qtest::{
    HALT, Machine,
    edu::{self, Edu},
    pci::{Address, Config, Window},
};
use runs::Span;
use tempfile::NamedTempFile;

use crate::{
    qemu::{Qemu, Unit},
    registers::Registers,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Memory for tables and structures, as the machine addresses it.
pub const TABLES: Span = Span::new(4 * GIB + 32 * MIB, 32 * MIB);
/// Memory for data.
pub const DATA: Span = Span::new(4 * GIB + 64 * MIB, 60 * GIB - 64 * MIB);
/// The memory before that: what lies below 4 GiB, and what is left up to [`TABLES`].
const LOW_BYTES: u64 = 2 * GIB + 32 * MIB;

/// The most bytes of one [`copy`](Rig::copy).
pub const LONGEST: u64 = edu::BUFFER_BYTES;

/// Where configuration space and the devices' registers lie, between the low memory and the interrupt
/// controllers.
const ECAM: u64 = 0xb000_0000;
const WINDOW: Window = Window::new(0xc000_0000, 256 * MIB);

/// The devices: two `edu`.
pub const DEVICES: [Address; 2] = [Address::new(0, 5, 0), Address::new(0, 6, 0)];

/// A machine with a unit, and the [`DEVICES`] behind it.
///
/// They may do DMA, and the unit is as it was after reset.
pub struct Rig {
    unit: Unit,
    machine: Machine,
    tables: HostTables,
    /// Where the devices' registers are.
    edus: Vec<u64>,
    random: RefCell<Random>,
    copies: Cell<u64>,
}

/// A place in memory as a device addresses it, and where it should really be.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// What the device says.
    pub iova: u64,
    /// Where that leads.
    pub address: u64,
}

/// What became of the bytes of a DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// They are where they should be.
    Copied,
    /// What was there before is still there.
    Untouched,
    /// Something else is there.
    Otherwise,
}

impl Rig {
    /// Starts a machine with `unit`.
    pub fn start(qemu: &Qemu, unit: Unit) -> anyhow::Result<Self> {
        let firmware = NamedTempFile::new()?;
        fs::write(firmware.path(), HALT)?;
        let shared = Mapping::new(Backing::Memfd, TABLES.len, None)?;
        let file = shared.fd().context("shared memory has no file")?;
        let file = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        let mut command = qemu.command();
        command.args(["-nodefaults", "-no-user-config", "-machine", "q35"]);
        // The clock goes from deadline to deadline, so that a device's timer fires at once.
        command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off"]);
        command.arg("-bios").arg(firmware.path());
        let bytes = LOW_BYTES + TABLES.len + DATA.len;
        command.args(["-m", &format!("{}M", bytes / MIB)]);
        let ram =
            |name: &str, size: u64| format!("memory-backend-ram,id={name},size={size},reserve=off");
        let tables = format!(
            "memory-backend-file,id=tables,size={},share=on,mem-path={file}",
            TABLES.len
        );
        let nodes = [
            (ram("low", LOW_BYTES), "low,cpus=0"),
            (tables, "tables"),
            (ram("data", DATA.len), "data"),
        ];
        for (nth, (object, node)) in nodes.iter().enumerate() {
            command.args(["-object", object]);
            command.args(["-numa", &format!("node,nodeid={nth},memdev={node}")]);
        }
        // Before the devices that are behind it.
        let argument = qemu.unit(unit);
        let argument = argument.with_context(|| format!("this QEMU has no {}", unit.name()))?;
        command.args(["-device", &argument]);
        for device in DEVICES {
            let slot = device.requester_id() >> 3;
            let device = format!("edu,addr={slot:#x},dma_mask=0xffffffffffffffff");
            command.args(["-device", &device]);
        }
        let machine = Machine::start(command)?;

        let config = Config::q35(&machine, ECAM)?;
        let mut window = WINDOW;
        let mut edus = Vec::new();
        for device in DEVICES {
            let bars = config.assign(device, &mut window)?;
            let [bar] = bars[..] else {
                anyhow::bail!("{device} has the base addresses {bars:?}");
            };
            config.enable(device)?;
            Edu::new(&machine, bar.address)?;
            edus.push(bar.address);
        }
        let tables = HostTables::new(MappedStorage::over(shared), TABLES.start)?;
        let rig = Self {
            unit,
            machine,
            tables,
            edus,
            random: RefCell::new(Random::new(1)),
            copies: Cell::new(0),
        };
        rig.memory_is_where_it_should_be()?;
        Ok(rig)
    }

    /// The unit.
    pub const fn unit(&self) -> Unit {
        self.unit
    }

    /// The machine.
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Memory for tables and structures, at [`TABLES`]. All of it is zero at first.
    pub const fn tables(&self) -> &HostTables {
        &self.tables
    }

    /// Registers at `base`.
    pub const fn registers(&self, base: u64) -> Registers<'_> {
        Registers::new(&self.machine, base)
    }

    /// Copies made so far.
    pub const fn copies(&self) -> u64 {
        self.copies.get()
    }

    /// Has one of the [`DEVICES`] read `len` bytes at one place and write them to the other, and looks what is
    /// there then. Both places hold random bytes before.
    pub fn copy(&self, device: usize, from: At, to: At, len: u64) -> anyhow::Result<Seen> {
        let edu = self.edus.get(device).context("there is no such device")?;
        let edu = Edu::new(&self.machine, *edu)?;
        let random = || -> Vec<u8> {
            let mut random = self.random.borrow_mut();
            (0..len).map(|_| random.word() as u8).collect()
        };
        let (wanted, before) = (random(), random());
        self.machine.write(from.address, &wanted)?;
        self.machine.write(to.address, &before)?;
        edu.read(from.iova, 0, len)?;
        edu.write(to.iova, 0, len)?;
        self.copies.set(self.copies.get() + 1);
        let mut found = vec![0; wanted.len()];
        self.machine.read(to.address, &mut found)?;
        Ok(match found {
            found if found == wanted => Seen::Copied,
            found if found == before => Seen::Untouched,
            _ => Seen::Otherwise,
        })
    }

    /// The first and the last table are in the machine's memory where we think, and what is before and
    /// behind them is not shared.
    fn memory_is_where_it_should_be(&self) -> anyhow::Result<()> {
        let cells = self.tables.storage().mapping().cells();
        let last = TABLES.start + TABLES.len - 8;
        for (address, cell) in [(TABLES.start, cells.first()), (last, cells.last())] {
            let cell = cell.context("there are no tables")?;
            let mark = self.random.borrow_mut().word();
            cell.store(mark, Ordering::Relaxed);
            let found = self.machine.readq(address)?;
            ensure!(found == mark, "{found:#x} at {address:#x}, not {mark:#x}");
            self.machine.writeq(address, 0)?;
            let found = cell.load(Ordering::Relaxed);
            ensure!(found == 0, "{found:#x} is left at {address:#x}");
        }
        for address in [TABLES.start - 8, DATA.start, DATA.start + DATA.len - 8] {
            let mark = self.random.borrow_mut().word();
            self.machine.writeq(address, mark)?;
            let found = self.machine.readq(address)?;
            ensure!(found == mark, "{found:#x} at {address:#x}, not {mark:#x}");
            self.machine.writeq(address, 0)?;
        }
        Ok(())
    }
}
