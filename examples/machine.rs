//! What stands for the machine in the examples, so that they run anywhere: QEMU, worked from outside over
//! the qtest protocol. No code runs in it; the example is what an operating system would be.
//!
//! What such a system has, and here comes from this file:
//!
//! * memory that the unit sees too: [`Machine::stretch`]. A kernel has its direct map of all memory, and a
//!   page allocator from which it takes a stretch;
//! * the unit's registers: [`Machine::registers`]. A kernel maps them uncached, and has volatile accesses:
//!   the example `smmu` shows these;
//! * a device that does DMA: QEMU's `edu`, which copies between memory and a buffer of its own.
//!
//! The machine has 128 MiB, which are shared with this process. Of them 32 MiB are for tables and structures.

#![forbid(unsafe_code)]

use std::{
    error::Error,
    fs,
    os::fd::AsRawFd as _,
    process::{self, Command},
    sync::atomic::AtomicU64,
    thread,
    time::Duration,
};

#[cfg(feature = "virtio-drivers")]
#[path = "machine/in_process.rs"]
pub mod in_process;

use dmaspace::{Backing, Mapping};
use iommu::DeviceId;
use qtest::{
    HALT,
    edu::Edu,
    pci::{Address, Config, Window},
};
use tempfile::NamedTempFile;

const MIB: u64 = 1 << 20;

/// From the beginning of memory: firmware and device tree lie elsewhere.
const STRETCH: u64 = 64 * MIB;
const STRETCH_BYTES: u64 = 32 * MIB;

/// The device: `edu` at 00:05.0.
pub const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// A kind of machine.
#[derive(Clone, Copy, Debug)]
pub struct Board {
    program: &'static str,
    arguments: &'static [&'static str],
    /// Instructions that stop the processor; none for a PC, whose [`HALT`] is larger.
    firmware: &'static [u32],
    /// Where memory begins.
    ram: u64,
    /// Where PCI's configuration space is, and where a PC's is placed.
    ecam: u64,
    /// Where registers of PCI functions can be.
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
    qtest: qtest::Machine,
    board: Board,
    memory: Mapping,
    window: Window,
    edu: u64,
}

impl Machine {
    /// Starts one, with more options for QEMU: the unit, which comes before the device.
    pub fn start(board: Board, unit: &[&str]) -> Result<Self, Box<dyn Error>> {
        let mut qemu = Command::new(board.program);
        qemu.args(["-nodefaults", "-no-user-config"]);
        qemu.args(board.arguments);
        // The clock goes from deadline to deadline: a transfer of `edu` does not take 100 ms.
        qemu.args([
            "-accel",
            "tcg",
            "-icount",
            "shift=0,sleep=off",
            "-m",
            "128M",
        ]);
        let memory = Mapping::new(Backing::Memfd, 128 * MIB, None)?;
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
        qemu.args(["-device", "edu,addr=5,dma_mask=0xffffffffffffffff"]);
        let qtest = qtest::Machine::start(qemu)?;
        let mut machine = Self {
            qtest,
            board,
            memory,
            window: Window::new(board.window, 256 * MIB),
            edu: 0,
        };
        if board.program == PC.program {
            Config::q35(&machine.qtest, board.ecam)?;
        }
        machine.edu = machine.place(Address::new(0, 5, 0))?;
        Ok(machine)
    }

    /// PCI's configuration space.
    pub const fn pci(&self) -> Config<'_> {
        Config::ecam(&self.qtest, self.board.ecam)
    }

    /// Gives addresses to a PCI function's registers, lets it do DMA, and says where the first ones are.
    pub fn place(&mut self, function: Address) -> Result<u64, Box<dyn Error>> {
        let config = Config::ecam(&self.qtest, self.board.ecam);
        let bars = config.assign(function, &mut self.window)?;
        config.enable(function)?;
        Ok(bars.first().ok_or("no registers")?.address)
    }

    /// A stretch of physical memory that is unused: all zero, a power of two in size, and at a multiple of
    /// that.
    pub fn stretch(&self) -> &[AtomicU64] {
        let first = (STRETCH / 8) as usize;
        let last = first + (STRETCH_BYTES / 8) as usize;
        self.memory.cells().get(first..last).unwrap_or_default()
    }

    /// The stretch's physical address.
    pub const fn stretch_at(&self) -> u64 {
        self.board.ram + STRETCH
    }

    /// Registers from a physical address on.
    pub const fn registers(&self, base: u64) -> Registers<'_> {
        let machine = &self.qtest;
        Registers { machine, base }
    }

    /// Writes to physical memory, `at` bytes from its beginning on. The physical address.
    pub fn store(&self, at: u64, bytes: &[u8]) -> Result<u64, qtest::Error> {
        let address = self.board.ram + at;
        self.qtest.write(address, bytes)?;
        Ok(address)
    }

    /// What is there, as text.
    pub fn load(&self, address: u64, len: usize) -> Result<String, qtest::Error> {
        let mut bytes = vec![0; len];
        self.qtest.read(address, &mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Has the device read `len` bytes and write them somewhere else; these are addresses as it sees them.
    /// It does not learn of a fault.
    pub fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), qtest::edu::Error> {
        let edu = Edu::new(&self.qtest, self.edu)?;
        edu.read(from, 0, len)?;
        edu.write(to, 0, len)
    }
}

/// Registers of a machine that is worked from outside. A command and its answer are in order with every
/// store of this process, so there are no barriers here.
#[derive(Clone, Copy, Debug)]
pub struct Registers<'a> {
    machine: &'a qtest::Machine,
    base: u64,
}

impl iommu::Registers for Registers<'_> {
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
