//! A guest in QEMU, from power on to power off.
//!
//! Two serial ports: on the first the kernel and the programs say what they like, into a file; on
//! the second come the lines of [`crate::console`]. A guest that says nothing for [`PATIENCE`] is
//! ended.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, ErrorKind, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::ValueEnum as _;
use conformance::{
    initramfs::Initramfs,
    kernel::{Arch, Tables},
    newer_qemu::{MACHINE, NewerQemu},
    patch::Patch,
};

use crate::{
    console::{Line, Results},
    firmware,
    machines::{
        DISK_BLOCKS, EDU, HUGE_PAGES, IVSHMEM, IVSHMEM_BYTES, MEMORY, Machine, NVME, NVME_SERIAL,
        Unit, disk_block,
        provoked::{FUNCTIONS, MANY, PROVOKED, is_monitor},
    },
    virtio_iommu::Host,
};

/// Where a kernel has a driver of NVMe, the device is for the tests all the same.
const NO_DRIVER: &str = "initcall_blacklist=nvme_init";
/// How long a guest may be silent: many times what the longest test takes, for machines that are slow
/// or busy, and longer than a test waits, which then says for what.
pub const PATIENCE: Duration = Duration::from_secs(1200);

/// Directory of the guests, below that of the rigs.
pub fn directory(work: &Path) -> PathBuf {
    work.join("guest")
}

/// Options of a boot.
#[derive(Clone, Copy, Debug)]
pub struct Boot<'a> {
    /// The kernel's image.
    pub kernel: &'a Path,
    /// I/O page tables of the kernel.
    pub tables: Tables,
    /// Lines of ours in it.
    pub patches: &'a [Patch],
    /// The initramfs.
    pub initramfs: &'a Path,
    /// One more of a QEMU, for machines that have guests of their own.
    pub monitor: &'a [u8],
    /// Where the disk and what the guest says are kept.
    pub directory: &'a Path,
    /// Only tests whose name contains this.
    pub only: Option<&'a str>,
    /// The command line `dmaspace`, which runs here as well as in the guest.
    pub dmaspace: &'a Path,
    /// QEMU.
    pub qemu: &'a NewerQemu,
}

impl Boot<'_> {
    /// Boots `machine`, shows its results as they come, and tells what became of its tests.
    ///
    /// # Errors
    ///
    /// When QEMU cannot be started, or its files cannot be made. A guest that fails is no error but
    /// has [faults](Results::faults).
    pub fn run(&self, machine: &Machine) -> anyhow::Result<Results<'static>> {
        let mut results = Results::new(machine.tests(self.only));
        let host = (machine.unit == Unit::Virtio).then(|| Host::new(self.directory));
        let mut host = host.transpose()?;
        let ours = host.iter().flat_map(Host::arguments);
        let mut guest = Guest::start(&mut self.command(machine, ours)?, Line::parse)?;
        if let Some(host) = &mut host {
            host.connect()?;
        }
        while !results.done() {
            match guest.lines.recv_timeout(PATIENCE) {
                Ok(Line::Ask(question)) => {
                    let answer = match &mut host {
                        Some(host) => host.answer(&question),
                        None => "nobody is here".into(),
                    };
                    guest.answer(&answer)?;
                }
                Ok(line) => {
                    if !matches!(line, Line::Run(_) | Line::Keep(..)) {
                        println!("  {}: {line}", machine.name);
                    }
                    results.take(&line);
                }
                Err(RecvTimeoutError::Timeout) => {
                    results.fault(format!("silent for {} s", PATIENCE.as_secs()));
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // Lines after the last word are wrong, and the end of all is the power off.
        if results.done() {
            while let Ok(line) = guest.lines.recv_timeout(PATIENCE) {
                results.take(&line);
            }
        }
        drop(guest);
        if let Some(Err(error)) = host.map(Host::end) {
            results.fault(format!("the host: {error:#}"));
        }
        Ok(results)
    }

    /// Where the first serial port of `machine` goes, and what QEMU itself says.
    pub fn logs(&self, machine: &Machine) -> [PathBuf; 2] {
        ["log", "qemu.log"].map(|kind| self.directory.join(format!("{}.{kind}", machine.name)))
    }

    fn command(
        &self,
        machine: &Machine,
        ours: impl Iterator<Item = String>,
    ) -> anyhow::Result<Command> {
        let disk = self.directory.join(format!("{}.disk", machine.name));
        let blocks = (0..DISK_BLOCKS).flat_map(disk_block);
        fs::write(&disk, blocks.collect::<Vec<u8>>())
            .with_context(|| disk.display().to_string())?;
        let [log, qemu_log] = self.logs(machine);
        remove(&log)?;
        let qemu_log = File::create(&qemu_log)?;
        let mut words = format!(
            "{} panic=-1 {NO_DRIVER} hugepages={HUGE_PAGES} {} {} {} dmaspace.machine={}",
            arch(machine.unit).1,
            machine.unit.kernel(),
            machine.kernel(),
            self.tables.word(),
            machine.name
        );
        if !self.patches.is_empty() {
            let names = self.patches.iter().filter_map(Patch::to_possible_value);
            let names: Vec<_> = names.map(|name| name.get_name().to_owned()).collect();
            words += &format!(" dmaspace.patches={}", names.join(","));
        }
        if let Some(only) = self.only {
            words += &format!(" dmaspace.only={only}");
        }
        // 64 bits of DMA address; 28 without it.
        let edu = |address| {
            format!(
                "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr={}",
                slot(address)
            )
        };
        let many = PROVOKED
            .iter()
            .any(|provoked| provoked.name == machine.name);
        let many = MANY.iter().filter(|_| many);
        let many = many.flat_map(|address| ["-device".into(), edu(address)]);
        let functions = FUNCTIONS.map(slot);
        let functions = is_monitor(machine.name).then(|| {
            let [first, second] = functions;
            [
                format!("edu,bus=pcie.0,addr={first},multifunction=on"),
                format!("virtio-rng-pci,bus=pcie.0,addr={second}"),
            ]
        });
        let functions = functions.into_iter().flatten();
        let functions = functions.flat_map(|function| ["-device".into(), function]);
        let mut command = self.qemu.command();
        command
            .args(MACHINE)
            .args(["-m", "2G"])
            .args(ours)
            .args(self.board(machine)?)
            .args(["-device".into(), edu(EDU)])
            .args(many)
            .args(functions)
            .arg("-drive")
            .arg(format!(
                "if=none,id=disk,format=raw,file={}",
                disk.display()
            ))
            .arg("-device")
            .arg(format!(
                "nvme,drive=disk,serial={NVME_SERIAL},bus=pcie.0,addr={}",
                slot(NVME)
            ))
            .arg("-object")
            .arg(format!(
                "memory-backend-ram,id=shared,size={IVSHMEM_BYTES},share=on"
            ))
            .arg("-device")
            .arg(format!(
                "ivshmem-plain,memdev=shared,bus=pcie.0,addr={}",
                slot(IVSHMEM)
            ))
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(results(machine.unit))
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs_of(machine)?)
            .arg("-append")
            .arg(words)
            // It tells of each fault.
            .stderr(qemu_log);
        Ok(command)
    }

    /// The initramfs of `machine`: with its own table of firmware before, and QEMU behind, if it has them.
    fn initramfs_of(&self, machine: &Machine) -> anyhow::Result<PathBuf> {
        let table = firmware::dmar(machine.name);
        if table.is_none() && !is_monitor(machine.name) {
            return Ok(self.initramfs.to_owned());
        }
        let mut first = Initramfs::default();
        if let Some(table) = table {
            first.program("kernel/firmware/acpi/DMAR.aml", &table)?;
        }
        let mut all = first.finish()?;
        all.extend(fs::read(self.initramfs)?);
        if is_monitor(machine.name) {
            all.extend(self.monitor);
        }
        let path = self.directory.join(format!("{}.initramfs", machine.name));
        fs::write(&path, all).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// The arguments for the IOMMU of `machine`, and for its nodes with the devices below each.
    fn board(&self, machine: &Machine) -> anyhow::Result<Vec<String>> {
        let Some(nodes) = machine.nodes else {
            let unit = machine.unit.qemu().iter();
            return Ok(unit.map(ToString::to_string).collect());
        };
        let topology = self.directory.join(format!("{}.toml", machine.name));
        fs::write(&topology, nodes)?;
        // The host may have one node only.
        let output = Command::new(self.dmaspace)
            .args(["numa", "--emit=qemu", "--viommu", "--no-bind"])
            .arg(format!("--memory={MEMORY}"))
            .arg("--topology")
            .arg(&topology)
            .output()
            .with_context(|| self.dmaspace.display().to_string())?;
        ensure!(
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned()
        );
        // Lines of a shell.
        let said = String::from_utf8(output.stdout)?;
        let words = said.split_whitespace().filter(|word| *word != "\\");
        Ok(words.map(ToOwned::to_owned).collect())
    }
}

/// Architecture of a machine behind `unit`, and its kernel's words for the first serial port and the clock.
pub fn arch(unit: Unit) -> (Arch, &'static str) {
    match unit {
        Unit::Smmu1 | Unit::Smmu2 => (Arch::Arm, "console=ttyAMA0"),
        Unit::RiscV => (Arch::RiscV, "console=ttyS0"),
        _ => (Arch::X86, "console=ttyS0 no_timer_check"),
    }
}

/// The second serial port: the board's, but RISC-V's has only one.
pub(crate) const fn results(unit: Unit) -> &'static [&'static str] {
    match unit {
        Unit::RiscV => &[
            "-chardev",
            "stdio,id=results",
            "-device",
            "pci-serial,chardev=results,addr=09.0",
        ],
        _ => &["-serial", "stdio"],
    }
}

/// QEMU's arguments for memory that other programs can have as a file.
pub(crate) fn shared_memory() -> [String; 4] {
    let memory = format!("memory-backend-memfd,id=ram,size={MEMORY},share=on");
    let [object, machine, backend] =
        ["-object", "-machine", "memory-backend=ram"].map(String::from);
    [object, memory, machine, backend]
}

/// Where a device sits on its bus, as QEMU says it.
pub(crate) fn slot(address: &str) -> &str {
    address.trim_start_matches("0000:00:")
}

/// Removes a file that may have been left behind.
pub(crate) fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

/// QEMU while it runs; ended when dropped.
pub(crate) struct Guest<L> {
    qemu: Child,
    input: Option<ChildStdin>,
    /// Lines from the port of the results.
    pub(crate) lines: mpsc::Receiver<L>,
}

impl<L: Send + 'static> Guest<L> {
    /// Starts it, to be read line by line by `parse`.
    pub(crate) fn start(
        command: &mut Command,
        parse: fn(&str) -> Option<L>,
    ) -> anyhow::Result<Self> {
        let mut qemu = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("QEMU cannot be started")?;
        let (sender, lines) = mpsc::channel();
        if let Some(output) = qemu.stdout.take() {
            // Ends with QEMU, which closes its output.
            thread::spawn(move || {
                let mut bytes = Vec::new();
                let mut output = BufReader::new(output);
                while output.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                    let line = parse(&String::from_utf8_lossy(&bytes));
                    if line.is_some_and(|line| sender.send(line).is_err()) {
                        break;
                    }
                    bytes.clear();
                }
            });
        }
        let input = qemu.stdin.take();
        Ok(Self { qemu, input, lines })
    }

    /// Answers a question of the guest.
    fn answer(&mut self, answer: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("no stdin")?;
        writeln!(input, "{answer}").context("the guest takes no answer")
    }
}

impl<L> Drop for Guest<L> {
    fn drop(&mut self) {
        // It is gone already unless something went wrong.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
