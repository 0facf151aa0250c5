//! A machine with a unit and devices behind it.
//!
//! # Memory
//!
//! QEMU lays the memory of its nodes end to end, all but the first piece of it from 4 GiB on. A node's
//! memory can be a file that this process maps, too. So there are four nodes; here with the addresses of
//! a [`Place::Near`]:
//!
//! | from | what |
//! |---|---|
//! | | nothing of ours, up to 4 GiB + 32 MiB |
//! | 4 GiB + 32 MiB | structures, and tables of 4 KiB; shared with this process |
//! | 4 GiB + 64 MiB | larger tables; shared with this process |
//! | 4 GiB + 96 MiB | what devices read and write, by commands to QEMU; sparse, to 64 GiB |
//!
//! All of it lies above 4 GiB, so that an address that lost its upper half does not lead there.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use anyhow::{Context as _, ensure};
use conformance::qmp::Qmp;
use fastrand::Rng;
use hostmem::{Backing, Mapping};
use ioas::{HostTables, MappedStorage};
use iopt::Arena;
use qtest::{
    Machine,
    edu::{self, Edu},
    nvme::{self, Nvme, Ring},
    pci::{Address, Config},
};
use runs::{Pa, Span};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    lives::Counts,
    qemu::{Board, Kind, Qemu, Unit},
    registers::{Busy, Registers},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Bytes of each of the two kinds of shared memory.
const SHARED: u64 = 32 * MIB;

/// The most bytes of one [`copy`](Rig::copy).
pub const LONGEST: u64 = edu::BUFFER_BYTES;

/// The devices: two `edu`, and an NVMe controller.
pub const DEVICES: [Address; 3] = [
    Address::new(0, 5, 0),
    Address::new(0, 6, 0),
    Address::new(0, 7, 0),
];

/// The controller among them.
pub const NVME: usize = 2;

/// Its serial number, as it tells it.
pub const SERIAL: &[u8; 20] = b"dmaspace            ";

/// The monitor's socket.
const MONITOR: &str = "monitor";

/// Where all memory of ours lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// From 4 GiB on.
    Near,
    /// From 8 TiB on.
    High,
}

impl Place {
    const fn base(self) -> u64 {
        match self {
            Self::Near => 4 * GIB,
            Self::High => 8 << 40,
        }
    }

    /// Structures and tables of 4 KiB.
    pub const fn structures(self) -> Span<Pa> {
        Span::new(self.base() + SHARED, SHARED)
    }

    pub(crate) const fn large_tables(self) -> Span<Pa> {
        Span::new(self.base() + 2 * SHARED, SHARED)
    }

    /// Memory for data.
    pub const fn data(self) -> Span<Pa> {
        Span::new(self.base() + 3 * SHARED, 60 * GIB - 3 * SHARED)
    }
}

/// Larger tables than those of 4 KiB, or other use of their memory.
pub(crate) enum LargeTables {
    /// Data.
    None(Arc<Mapping>),
    K16(Arc<Arena<MappedStorage, 14>>),
    K64(Arc<Arena<MappedStorage, 16>>),
}

/// A machine with a unit, and the [`DEVICES`] behind it.
///
/// They may do DMA, and the unit is as it was after reset.
pub struct Rig {
    qemu: Qemu,
    unit: Unit,
    kind: Kind,
    place: Place,
    machine: Arc<Machine>,
    /// Files of the machine: its monitor's socket, dumps.
    files: TempDir,
    structures: Arc<HostTables>,
    large: LargeTables,
    /// Where the registers of the unit and of the devices are.
    base: u64,
    devices: Vec<u64>,
    /// Why a register could not be reached.
    failed: Arc<OnceLock<qtest::Error>>,
    random: RefCell<Rng>,
    copies: Cell<u64>,
    leaves: RefCell<BTreeMap<u64, u64>>,
    costs: RefCell<Vec<(&'static str, u64, u64)>>,
    life: Cell<Option<Counts>>,
    round: u64,
    dmaspace: PathBuf,
}

/// A place in memory as a device addresses it, and where it should really be.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Device address.
    pub iova: u64,
    /// Where that leads.
    pub address: u64,
}

impl At {
    /// Some bytes further on.
    pub const fn plus(self, bytes: u64) -> Self {
        Self {
            iova: self.iova + bytes,
            address: self.address + bytes,
        }
    }
}

/// Fate of the bytes of a DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// They are where they should be.
    Copied,
    /// The old bytes are still there.
    Untouched,
    /// Something else is there.
    Otherwise,
}

impl Rig {
    /// Starts a machine with `unit`, and memory for tables of a kind. `dmaspace` is the command line.
    pub fn start(
        qemu: &Qemu,
        unit: Unit,
        kind: Kind,
        place: Place,
        round: u64,
        dmaspace: &Path,
    ) -> anyhow::Result<Self> {
        let board = unit.board();
        let files = tempfile::tempdir()?;
        let mut command = qemu.program().command();
        command.args(["-nodefaults", "-no-user-config"]);
        command.args(board.arguments());
        // No processor runs, and time passes only as a check says.
        command.args(["-accel", "qtest"]);
        let monitor = files.path().join(MONITOR);
        let monitor = format!("unix:{},server=on,wait=off", monitor.display());
        command.args(["-qmp", &monitor]);
        let low = board.memory_below(place.structures().start);
        let bytes = low + 2 * SHARED + place.data().len;
        command.args(["-m", &format!("{}M", bytes / MIB)]);
        let ram =
            |name: &str, size: u64| format!("memory-backend-ram,id={name},size={size},reserve=off");
        let [structures, large] = [
            Mapping::new(Backing::Memfd, SHARED, None)?,
            Mapping::new(Backing::Memfd, SHARED, None)?,
        ];
        let shared = |name: &str, mapping: &Mapping| {
            let file = mapping.fd().context("shared memory has no file")?;
            let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
            anyhow::Ok(format!(
                "memory-backend-file,id={name},size={SHARED},share=on,mem-path={path}"
            ))
        };
        let nodes = [
            (ram("low", low), "low"),
            (shared("structures", &structures)?, "structures"),
            (shared("large", &large)?, "large"),
            (ram("data", place.data().len), "data"),
        ];
        for (nth, (object, node)) in nodes.iter().enumerate() {
            command.args(["-object", object]);
            let processor = match nth < board.processors() {
                true => format!(",cpus={nth}"),
                false => String::new(),
            };
            let node = format!("node,nodeid={nth},memdev={node}{processor}");
            command.args(["-numa", &node]);
        }
        // Before the devices that are behind it.
        command.args(unit.arguments());
        for (nth, device) in DEVICES.into_iter().enumerate() {
            let slot = device.requester_id() >> 3;
            let device = match nth {
                NVME => format!("nvme,addr={slot:#x},serial=dmaspace"),
                _ => format!("edu,addr={slot:#x},dma_mask=0xffffffffffffffff"),
            };
            command.args(["-device", &device]);
        }
        let machine = Arc::new(Machine::start(command)?);

        let config = match board {
            Board::Q35 => Config::q35(&machine, board.ecam())?,
            Board::ArmVirt | Board::RiscvVirt => Config::ecam(&machine, board.ecam()),
        };
        let mut window = board.window();
        let mut devices = Vec::new();
        for device in DEVICES {
            let bars = config.assign(device, &mut window)?;
            let bar = bars
                .first()
                .with_context(|| format!("{device} has no BAR"))?;
            config.enable(device)?;
            devices.push(bar.address);
        }
        let base = unit.registers(&config, &mut window)?;
        let at = place.large_tables().start;
        let storage = MappedStorage::over;
        let large = match kind.table_log2() {
            14 => LargeTables::K16(Arc::new(Arena::with_table_size(storage(large), at)?)),
            16 => LargeTables::K64(Arc::new(Arena::with_table_size(storage(large), at)?)),
            _ => LargeTables::None(Arc::new(large)),
        };
        let at = place.structures().start;
        let rig = Self {
            qemu: qemu.clone(),
            unit,
            kind,
            place,
            machine,
            files,
            structures: Arc::new(HostTables::new(MappedStorage::over(structures), at)?),
            large,
            base,
            devices,
            failed: Arc::default(),
            random: RefCell::new(Rng::with_seed(1)),
            copies: Cell::new(0),
            leaves: RefCell::default(),
            costs: RefCell::default(),
            life: Cell::default(),
            round,
            dmaspace: dmaspace.to_owned(),
        };
        rig.memory_is_where_it_should_be()?;
        Ok(rig)
    }

    /// The command line `dmaspace`.
    pub(crate) fn dmaspace(&self) -> &Path {
        &self.dmaspace
    }

    /// The emulator.
    pub(crate) const fn qemu(&self) -> &Qemu {
        &self.qemu
    }

    /// The unit.
    pub const fn unit(&self) -> Unit {
        self.unit
    }

    /// The tables that it is to walk.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Memory for data.
    pub const fn data(&self) -> Span<Pa> {
        self.place.data()
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The machine, shared with registers.
    pub(crate) fn machine_shared(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    /// Memory that is shared with this process beside that for structures: of larger tables, or else for data.
    pub(crate) const fn shared_at(&self) -> Span<Pa> {
        self.place.large_tables()
    }

    /// Memory for structures and tables of 4 KiB. All of it is zero at first.
    pub const fn structures(&self) -> &Arc<HostTables> {
        &self.structures
    }

    /// The same memory as a successor of this process would have it: mapped a second time.
    pub(crate) fn structures_again(&self) -> anyhow::Result<MappedStorage> {
        let file = self.structures.storage().mapping().fd();
        let file = file.context("shared memory has no file")?;
        let mapping = Mapping::of_file(file.try_clone_to_owned()?)?;
        Ok(MappedStorage::over(mapping))
    }

    /// Where that memory lies for the unit.
    pub const fn structures_at(&self) -> Span<Pa> {
        self.place.structures()
    }

    pub(crate) const fn large_tables(&self) -> &LargeTables {
        &self.large
    }

    /// A dump of the machine's memory for tables, as QEMU's `pmemsave` makes it, and the address of its
    /// first byte. The next one takes its place.
    pub fn dump(&self) -> anyhow::Result<(PathBuf, u64)> {
        let memory = match self.large {
            LargeTables::None(_) => self.place.structures(),
            LargeTables::K16(_) | LargeTables::K64(_) => self.place.large_tables(),
        };
        let file = self.files.path().join("memory.bin");
        let arguments = json!({"val": memory.start, "size": memory.len, "filename": &file});
        Qmp::connect(&self.files.path().join(MONITOR))?.command("pmemsave", arguments)?;
        Ok((file, memory.start))
    }

    /// The unit's registers.
    pub fn registers(&self) -> Registers {
        Registers::new(Arc::clone(&self.machine), self.base, self.failed.clone())
    }

    /// The unit's registers, with a copy by DMA after each access to them, once that is wanted.
    pub(crate) fn busy_registers(&self, from: At, to: At) -> Busy<'_> {
        Busy::new(self.registers(), &self.machine, self.devices[0], from, to)
    }

    /// Counts copies that were made otherwise.
    pub(crate) fn add_copies(&self, count: u64) {
        self.copies.set(self.copies.get() + count);
    }

    /// Copies made so far.
    pub const fn copies(&self) -> u64 {
        self.copies.get()
    }

    /// How many of them were noted to go through leaves of each size.
    pub fn leaves(&self) -> BTreeMap<u64, u64> {
        self.leaves.borrow().clone()
    }

    /// Notes that a copy went through leaves of these sizes.
    pub fn note(&self, sizes: impl IntoIterator<Item = u64>) {
        let mut leaves = self.leaves.borrow_mut();
        sizes
            .into_iter()
            .for_each(|size| *leaves.entry(size).or_default() += 1);
    }

    /// Notes what a flush took.
    pub fn cost(&self, what: &'static str, commands: u64, waits: u64) {
        self.costs.borrow_mut().push((what, commands, waits));
    }

    /// Noted costs: of which flush, commands, waits.
    pub fn costs(&self) -> Vec<(&'static str, u64, u64)> {
        self.costs.borrow().clone()
    }

    /// Notes what a life had.
    pub(crate) fn live(&self, counts: Counts) {
        self.life.set(Some(counts));
    }

    /// The counts that were noted.
    pub const fn life(&self) -> Option<Counts> {
        self.life.get()
    }

    /// Which of many runs this is, from 0 on: checks with random choices make others in each.
    pub const fn round(&self) -> u64 {
        self.round
    }

    /// Tells whether all registers could always be reached.
    pub fn finish(&self) -> anyhow::Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(error) => anyhow::bail!("a register: {error}"),
        }
    }

    /// Random bytes.
    pub fn bytes(&self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.random.borrow_mut().fill(&mut bytes);
        bytes
    }

    /// Has one of the `edu` read `len` bytes at one place and write them to the other.
    pub fn dma(&self, device: usize, from: u64, to: u64, len: u64) -> anyhow::Result<()> {
        let edu = self.edu(device)?;
        edu.read(from, 0, len)?;
        edu.write(to, 0, len)?;
        self.copies.set(self.copies.get() + 1);
        Ok(())
    }

    /// One of the `edu`.
    pub(crate) fn edu(&self, device: usize) -> anyhow::Result<Edu<'_>> {
        let base = self.devices.get(device);
        let base = base.context("there is no such device")?;
        Ok(Edu::new(&self.machine, *base)?)
    }

    /// The NVMe controller, set up with these rings.
    pub fn nvme(&self, submission: Ring, completion: Ring) -> Result<Nvme<'_>, nvme::Error> {
        Nvme::new(&self.machine, self.devices[NVME], submission, completion)
    }

    /// Has one of the `edu` read `len` bytes at one place and write them to the other, and looks
    /// what is there then. Both places hold random bytes before.
    pub fn copy(&self, device: usize, from: At, to: At, len: u64) -> anyhow::Result<Seen> {
        let (wanted, before) = (self.bytes(len), self.bytes(len));
        self.machine.write(from.address, &wanted)?;
        self.machine.write(to.address, &before)?;
        self.dma(device, from.iova, to.iova, len)?;
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
        let (structures, data) = (self.place.structures(), self.data());
        let cells = self.structures.storage().mapping().cells();
        let last = structures.last() - 7;
        for (address, cell) in [(structures.start, cells.first()), (last, cells.last())] {
            let cell = cell.context("there are no tables")?;
            let mark = self.random.borrow_mut().u64(..);
            cell.store(mark, Ordering::Relaxed);
            let found = self.machine.readq(address)?;
            ensure!(found == mark, "{found:#x} at {address:#x}, not {mark:#x}");
            self.machine.writeq(address, 0)?;
            let found = cell.load(Ordering::Relaxed);
            ensure!(found == 0, "{found:#x} is left at {address:#x}");
        }
        for address in [structures.start - 8, data.start, data.start + data.len - 8] {
            let mark = self.random.borrow_mut().u64(..);
            self.machine.writeq(address, mark)?;
            let found = self.machine.readq(address)?;
            ensure!(found == mark, "{found:#x} at {address:#x}, not {mark:#x}");
            self.machine.writeq(address, 0)?;
        }
        Ok(())
    }
}
