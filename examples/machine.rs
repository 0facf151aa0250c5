//! Stand-in for the machine in the examples, so that they run anywhere: QEMU, worked from outside over the qtest
//! protocol. No code runs in it; the example is what an operating system would be.
//!
//! Parts that such a system has, and that come from this file here:
//!
//! * memory that the unit sees too: [`Machine::table_memory`]. A kernel has its direct map of all memory, and a page
//!   allocator from which it takes a stretch;
//! * page frames for buffers: [`Machine::frames`]. A kernel's allocator says where they are;
//! * the unit's registers: [`Machine::registers`]. A kernel maps them uncached, and has volatile accesses: see
//!   [`iommu::Registers`];
//! * a device that does DMA: QEMU's NVMe controller with a disk of 1 MiB, by [`qtest::nvme`]. A kernel has its own
//!   driver.
//!
//! The machine has 128 MiB, which are shared with this process. Of them 32 MiB are for tables and structures.

#![forbid(unsafe_code)]

use std::{
    error::Error,
    fs,
    os::fd::AsRawFd as _,
    process::{self, Command},
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::Duration,
};

#[cfg(feature = "virtio-drivers")]
#[path = "machine/in_process.rs"]
pub mod in_process;

use dmaspace::{Backing, Mapping, Pa, Span};
use iommu::DeviceId;
use iommu::iopt::{Arena, AtomicMeta};
use qtest::{
    HALT,
    nvme::{self, Nvme, Ring},
    pci::{Address, Config, Window},
};
use tempfile::NamedTempFile;

const MIB: u64 = 1 << 20;

/// From the beginning of memory: firmware and device tree lie elsewhere.
const STRETCH: u64 = 64 * MIB;
const STRETCH_BYTES: u64 = 32 * MIB;

/// The device: an NVMe controller at 00:05.0.
pub const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// Memory for page tables, and for the unit's structures and queues.
pub type TableMemory = Arc<Arena<(&'static [AtomicU64], &'static [AtomicMeta])>>;

/// A kind of machine.
#[derive(Clone, Copy, Debug)]
pub struct Board {
    program: &'static str,
    arguments: &'static [&'static str],
    /// Instructions that stop the processor; none for a PC, whose [`HALT`] is larger.
    firmware: &'static [u32],
    /// Start of memory.
    ram: u64,
    /// Address of PCI's configuration space, and the one where a PC's is placed.
    ecam: u64,
    /// Start of the addresses for registers of PCI functions.
    window: u64,
}

/// A PC.
pub const PC: Board = Board {
    program: "qemu-system-x86_64",
    arguments: &["-machine", "q35,memory-backend=ram"],
    firmware: &[],
    ram: 0,
    ecam: 0xb000_0000,
    window: 0xc000_0000,
};

/// QEMU's machine `virt` for Arm, with an SMMU of version 3.
pub const ARM: Board = Board {
    program: "qemu-system-aarch64",
    arguments: &[
        "-machine",
        "virt,iommu=smmuv3,highmem-ecam=off,memory-backend=ram",
        "-cpu",
        "max",
    ],
    // `wfi`, and back to it.
    firmware: &[0xd503_207f, 0x17ff_ffff],
    ram: 0x4000_0000,
    ecam: 0x3f00_0000,
    window: 0x1000_0000,
};

/// QEMU's machine `virt` for RISC-V.
pub const RISCV: Board = Board {
    program: "qemu-system-riscv64",
    arguments: &["-machine", "virt,memory-backend=ram"],
    // `wfi`, and back to it.
    firmware: &[0x1050_0073, 0xffdf_f06f],
    ram: 0x8000_0000,
    ecam: 0x3000_0000,
    window: 0x4000_0000,
};

/// A machine after reset. Its device may do DMA.
#[derive(Debug)]
pub struct Machine {
    qtest: Arc<qtest::Machine>,
    board: Board,
    memory: &'static Mapping,
    window: Window,
    controller: u64,
    _disk: NamedTempFile,
}

impl Machine {
    /// Starts one with a unit by QEMU's option `-device`: the first of these that this QEMU has, or the board's own where
    /// there is none.
    pub fn start(board: Board, units: &[&str]) -> Result<Self, Box<dyn Error>> {
        let Some((first, others)) = units.split_first() else {
            return Self::start_with(board, &[]);
        };
        let started = Self::start_with(board, &["-device", first]);
        match others {
            [] => started,
            _ => started.or_else(|_| Self::start(board, others)),
        }
    }

    /// The same with options for the unit, which comes before the device.
    fn start_with(board: Board, unit: &[&str]) -> Result<Self, Box<dyn Error>> {
        let mut qemu = Command::new(board.program);
        qemu.args(["-nodefaults", "-no-user-config"]);
        qemu.args(board.arguments);
        qemu.args([
            "-accel",
            "tcg",
            "-icount",
            "shift=0,sleep=off",
            "-m",
            "128M",
        ]);
        // There until the end of the program, as a machine's memory is.
        let memory: &Mapping = Box::leak(Box::new(Mapping::new(Backing::Memfd, 128 * MIB, None)?));
        let file = memory.fd().ok_or("memory without a file")?.as_raw_fd();
        let (process, bytes) = (process::id(), memory.len());
        let path = format!("/proc/{process}/fd/{file}");
        let ram = format!("memory-backend-file,id=ram,size={bytes},share=on,mem-path={path}");
        qemu.args(["-object", &ram]);
        let firmware = NamedTempFile::new()?;
        let words = board.firmware.iter().flat_map(|word| word.to_le_bytes());
        let code = match board.firmware {
            [] => HALT.to_vec(),
            _ => words.collect(),
        };
        fs::write(firmware.path(), code)?;
        qemu.arg("-bios").arg(firmware.path());
        qemu.args(unit);
        let disk = NamedTempFile::new()?;
        disk.as_file().set_len(MIB)?;
        let drive = format!("if=none,id=disk,format=raw,file={}", disk.path().display());
        qemu.args(["-drive", &drive]);
        qemu.args(["-device", "nvme,addr=5,serial=dmaspace,drive=disk"]);
        let qtest = Arc::new(qtest::Machine::start(qemu)?);
        let mut machine = Self {
            qtest,
            board,
            memory,
            window: Window::new(board.window, 256 * MIB),
            controller: 0,
            _disk: disk,
        };
        if board.program == PC.program {
            Config::q35(&machine.qtest, board.ecam)?;
        }
        machine.controller = machine.place(Address::new(0, 5, 0))?;
        Ok(machine)
    }

    /// Gives addresses to the registers of the first PCI function of this class, lets it do DMA, and says where they are.
    pub fn find(&mut self, class: u32) -> Result<u64, Box<dyn Error>> {
        let functions = Config::ecam(&self.qtest, self.board.ecam).functions(0)?;
        let found = functions.iter().find(|function| function.class == class);
        self.place(found.ok_or("no such PCI function")?.address)
    }

    fn place(&mut self, function: Address) -> Result<u64, Box<dyn Error>> {
        let config = Config::ecam(&self.qtest, self.board.ecam);
        let bars = config.assign(function, &mut self.window)?;
        config.enable(function)?;
        Ok(bars.first().ok_or("no registers")?.address)
    }

    /// Memory that the unit sees, for its structures and for page tables: an unused stretch of physical memory, all zero,
    /// a power of two in size and at a multiple of that. Something is noted beside each page; allocation and addresses
    /// are arithmetic.
    pub fn table_memory(&self) -> Result<TableMemory, Box<dyn Error>> {
        let first = (STRETCH / 8) as usize;
        let last = first + (STRETCH_BYTES / 8) as usize;
        let stretch = self.memory.cells().get(first..last).unwrap_or_default();
        let notes: Vec<_> = (0..stretch.len() / 512)
            .map(|_| AtomicMeta::new())
            .collect();
        let memory = Arena::new((stretch, &*notes.leak()), self.board.ram + STRETCH)?;
        Ok(Arc::new(memory))
    }

    /// So many page frames, `at` bytes from the beginning of memory on.
    pub const fn frames(&self, at: u64, pages: u64) -> Span<Pa> {
        Span::new(self.board.ram + at, pages * 4096)
    }

    /// Registers from a physical address on.
    pub fn registers(&self, base: u64) -> Registers {
        let machine = Arc::clone(&self.qtest);
        Registers { machine, base }
    }

    /// Writes to physical memory, run after run.
    pub fn store(&self, runs: &[Span<Pa>], bytes: &[u8]) -> Result<(), qtest::Error> {
        let mut rest = bytes;
        for run in runs {
            let (part, behind) = rest.split_at(rest.len().min(run.len as usize));
            self.qtest.write(run.start, part)?;
            rest = behind;
        }
        Ok(())
    }

    /// All bytes that are there, run after run.
    pub fn load(&self, runs: &[Span<Pa>]) -> Result<Vec<u8>, qtest::Error> {
        let mut bytes = Vec::new();
        for run in runs {
            let start = bytes.len();
            bytes.resize(start + run.len as usize, 0);
            self.qtest.read(run.start, &mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// The controller, enabled with these rings.
    pub fn nvme(&self, submission: Ring, completion: Ring) -> Result<Nvme<'_>, nvme::Error> {
        Nvme::new(&self.qtest, self.controller, submission, completion)
    }
}

/// Registers of a machine that is worked from outside. A command and its answer are in order with every
/// store of this process, so there are no barriers here.
#[derive(Clone, Debug)]
pub struct Registers {
    machine: Arc<qtest::Machine>,
    base: u64,
}

impl iommu::Registers for Registers {
    type Lock = iommu::SpinLock;

    // A bus without an answer reads as all ones.
    fn read32(&self, offset: usize) -> u32 {
        let value = self.machine.readl(self.base + offset as u64);
        value.unwrap_or(u32::MAX)
    }

    fn read64(&self, offset: usize) -> u64 {
        let value = self.machine.readq(self.base + offset as u64);
        value.unwrap_or(u64::MAX)
    }

    fn write32(&self, offset: usize, value: u32) {
        let _ = self.machine.writel(self.base + offset as u64, value);
    }

    fn write64(&self, offset: usize, value: u64) {
        let _ = self.machine.writeq(self.base + offset as u64, value);
    }

    /// A second at most.
    fn wait(&self, round: u32) -> bool {
        thread::sleep(Duration::from_millis(u64::from(round > 0)));
        round < 1000
    }
}
