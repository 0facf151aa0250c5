//! A machine whose processor stands still and translates when it is asked.
//!
//! # Protocol
//!
//! The processor is stopped before its first instruction. What it is to walk is said in two ways:
//! registers are [written](Processor::set) through the debugger stub where that can be done; where not
//! (Arm's system registers), a few instructions in the machine's memory write them, which the processor
//! does [one by one](Processor::run). Then [`translate`](Processor::translate) asks QEMU's monitor where
//! an address leads (`gva2gpa`). It walks the tables anew each time, fills no TLB, changes no table and
//! raises no fault; there need not be memory where a translation leads.
//!
//! # Memory
//!
//! | where | what |
//! |---|---|
//! | from [`Architecture::memory`] on | nothing of ours but a few instructions |
//! | [`Architecture::tables`] | tables, a memory file of this process |
//! | behind them | what the instructions read and write; sparse |

use std::{
    cell::{Cell, RefCell},
    fs,
    os::fd::AsRawFd as _,
    process,
    sync::atomic::Ordering,
};

use anyhow::{Context as _, bail, ensure};
use hostmem::{Backing, Mapping};
use ioas::MappedStorage;
use iopt::Arena;
use qtest::{HALT, Machine};
use runs::{Pa, Span};

use super::{Architecture, Emulator, gdb::Stub};

const MIB: u64 = 1 << 20;

/// Where in low memory instructions are put.
const CODE: u64 = MIB;

/// A machine with a processor that was never started.
pub(super) struct Processor {
    architecture: Architecture,
    round: u64,
    machine: Machine,
    stub: RefCell<Stub>,
    questions: Cell<u64>,
}

/// Memory for tables of 2^`LOG2` bytes, shared with the machine, at [`Architecture::tables`].
pub(super) type Tables<const LOG2: u32> = Arena<MappedStorage, LOG2>;

impl Processor {
    /// Starts a machine with a processor of this model (`-cpu`), and with memory for tables.
    pub(super) fn start<const LOG2: u32>(
        emulator: Emulator<'_>,
        architecture: Architecture,
        model: &str,
    ) -> anyhow::Result<(Self, Tables<LOG2>)> {
        let shared = Mapping::new(Backing::Memfd, architecture.tables().len, None)?;
        let processor = Self::with_memory(emulator, architecture, model, &shared)?;
        let storage = MappedStorage::over(shared);
        let tables = Arena::with_table_size(storage, architecture.tables().start)?;
        Ok((processor, tables))
    }

    fn with_memory(
        emulator: Emulator<'_>,
        architecture: Architecture,
        model: &str,
        shared: &Mapping,
    ) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let (firmware, socket) = (directory.path().join("halt"), directory.path().join("gdb"));
        let file = shared.fd().context("shared memory has no file")?;
        let file = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        let mut command = emulator.qemu.command();
        command.args(["-nodefaults", "-no-user-config", "-accel", "tcg", "-S"]);
        command.args(["-machine", architecture.machine(), "-cpu", model, "-gdb"]);
        command.arg(format!("unix:{},server=on,wait=off", socket.display()));
        match architecture {
            Architecture::X86_64 => {
                fs::write(&firmware, HALT)?;
                command.arg("-bios").arg(&firmware);
            }
            Architecture::RiscV => {
                command.args(["-bios", "none"]);
            }
            Architecture::ArmV7 | Architecture::ArmV8 => {}
        }
        let (tables, data) = (architecture.tables(), architecture.data());
        let low = architecture.low_bytes();
        command.args(["-m", &format!("{}M", (low + tables.len + data.len) / MIB)]);
        let ram =
            |name: &str, size: u64| format!("memory-backend-ram,id={name},size={size},reserve=off");
        let shared_ram = format!(
            "memory-backend-file,id=tables,size={},share=on,mem-path={file}",
            tables.len
        );
        let nodes = [
            (ram("low", low), "low"),
            (shared_ram, "tables"),
            (ram("data", data.len), "data"),
        ];
        // RISC-V's nodes have a processor each.
        let processors = if architecture == Architecture::RiscV {
            nodes.len()
        } else {
            1
        };
        command.args(["-smp", &processors.to_string()]);
        for (nth, (object, node)) in nodes.iter().enumerate() {
            command.args(["-object", object]);
            let mut node = format!("node,nodeid={nth},memdev={node}");
            if nth < processors {
                node = format!("{node},cpus={nth}");
            }
            command.args(["-numa", &node]);
        }
        let machine = Machine::start(command)?;
        let stub = Stub::connect(&socket)?;
        let processor = Self {
            architecture,
            round: emulator.round,
            machine,
            stub: RefCell::new(stub),
            questions: Cell::new(0),
        };
        processor.memory_is_where_it_should_be(shared)?;
        Ok(processor)
    }

    /// The machine around it.
    pub(super) const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Which random choices are made.
    pub(super) const fn round(&self) -> u64 {
        self.round
    }

    /// Questions that were answered.
    pub(super) const fn questions(&self) -> u64 {
        self.questions.get()
    }

    /// Value of a register.
    pub(super) fn get(&self, register: &str) -> anyhow::Result<u64> {
        Ok(self.stub.borrow_mut().register(register)?)
    }

    /// Writes registers, in this order.
    pub(super) fn set(&self, registers: &[(&str, u64)]) -> anyhow::Result<()> {
        for (name, value) in registers {
            self.stub.borrow_mut().set_register(name, *value)?;
        }
        Ok(())
    }

    /// Has the processor do these instructions, of which none is a jump, with these registers; it must
    /// be addressing memory directly up to the last one.
    pub(super) fn run(&self, code: &[u32], registers: &[(&str, u64)]) -> anyhow::Result<()> {
        let at = self.architecture.code();
        for (instruction, address) in code.iter().zip((at..).step_by(4)) {
            self.machine.writel(address, *instruction)?;
        }
        self.set(registers)?;
        self.set(&[("pc", at)])?;
        for address in (at..).step_by(4).skip(1).take(code.len()) {
            self.step()?;
            let found = self.get("pc")?;
            ensure!(
                found == address,
                "the instruction before {address:#x} led to {found:#x}"
            );
        }
        Ok(())
    }

    /// Has the processor do one instruction.
    pub(super) fn step(&self) -> anyhow::Result<()> {
        Ok(self.stub.borrow_mut().step()?)
    }

    /// Where `address` leads, by the tables as they are now; `None` when a load from there would fault.
    pub(super) fn translate(&self, address: u64) -> anyhow::Result<Option<u64>> {
        let command = format!("gva2gpa {address:#x}");
        let answer = self.stub.borrow_mut().monitor(&command)?;
        self.questions.set(self.questions.get() + 1);
        let answer = answer.trim_end();
        if answer == "Unmapped" {
            return Ok(None);
        }
        // 0 is printed without `0x`.
        let found = answer.strip_prefix("gpa: ");
        let found = found.map(|number| number.trim_start_matches("0x"));
        let found = found.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        match found {
            Some(found) => Ok(Some(found)),
            None => bail!("`{command}`: {answer}"),
        }
    }

    /// The first and the last table are in the machine's memory where we think, and what is before and
    /// behind them is not shared.
    fn memory_is_where_it_should_be(&self, shared: &Mapping) -> anyhow::Result<()> {
        const MARK: u64 = 0x5ca1_ab1e_0ddb_a115;
        let (tables, data) = (self.architecture.tables(), self.architecture.data());
        let (first, last) = (tables.start, tables.last() - 7);
        for (address, cell) in [
            (first, shared.cells().first()),
            (last, shared.cells().last()),
        ] {
            let cell = cell.context("there are no tables")?;
            cell.store(MARK, Ordering::Relaxed);
            let found = self.machine.readq(address)?;
            ensure!(found == MARK, "{found:#x} at {address:#x}, not {MARK:#x}");
            for outside in [tables.start - 8, data.start, data.last() - 7] {
                self.machine.writeq(outside, !MARK)?;
                let found = self.machine.readq(outside)?;
                ensure!(
                    found == !MARK,
                    "{found:#x} at {outside:#x}, not {:#x}",
                    !MARK
                );
            }
            ensure!(
                cell.swap(0, Ordering::Relaxed) == MARK,
                "not only {address:#x}"
            );
        }
        Ok(())
    }
}

impl Architecture {
    /// QEMU's machine.
    const fn machine(self) -> &'static str {
        match self {
            Self::X86_64 => "q35",
            Self::ArmV8 | Self::ArmV7 | Self::RiscV => "virt",
        }
    }

    /// Where its memory begins. That of x86-64 has its second half above 4 GiB.
    const fn memory(self) -> u64 {
        match self {
            Self::X86_64 => 0,
            Self::ArmV8 | Self::ArmV7 => 1 << 30,
            Self::RiscV => 2 << 30,
        }
    }

    /// Where instructions are put.
    pub(super) const fn code(self) -> u64 {
        self.memory() + CODE
    }

    /// Memory for tables: above 4 GiB, so that an address that lost its upper half does not lead there;
    /// ARMv7's tables must lie below.
    pub(super) const fn tables(self) -> Span<Pa> {
        let start = match self {
            Self::X86_64 | Self::ArmV8 | Self::RiscV => (4 << 30) + 32 * MIB,
            Self::ArmV7 => 2 << 30,
        };
        Span::new(start, 32 * MIB)
    }

    /// Memory for data.
    pub(super) const fn data(self) -> Span<Pa> {
        let start = self.tables().start + self.tables().len;
        let end = match self {
            Self::X86_64 | Self::ArmV8 | Self::RiscV => 64 << 30,
            Self::ArmV7 => 3 << 30,
        };
        Span::new(start, end - start)
    }

    /// The memory before the tables. What x86-64 does not have below 4 GiB (2 GiB are left out for
    /// devices) lies above.
    const fn low_bytes(self) -> u64 {
        let before = self.tables().start - self.memory();
        match self {
            Self::X86_64 => before - (2 << 30),
            Self::ArmV8 | Self::ArmV7 | Self::RiscV => before,
        }
    }
}
