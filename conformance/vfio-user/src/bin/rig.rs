//! Boots Linux in QEMU with the devices, and looks at what they and the disk say afterwards.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use conformance::initramfs::Initramfs;
use conformance::kernel::{Arch, GUEST};
use conformance::newer_qemu::{MACHINE, NewerQemu};
use conformance::qmp::Qmp;
use device_rig::guest_side::{
    FILE_BYTES, FILES, FIO, INSIDE, MACHINES, Machine, OPERATIONS, OUTSIDE, QUEUES, TESTS, THREADS,
    fill,
};
use serde_json::json;

/// Boots Linux in QEMU with a disk and a DMA engine in processes of their own.
#[derive(Parser)]
struct Options {
    /// Where the kernel, QEMU and what they say lie.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/conformance")]
    work: PathBuf,
    /// The guest's first process.
    #[arg(long, value_name = "PROGRAM")]
    init: PathBuf,
    /// The program of the devices.
    #[arg(long, value_name = "PROGRAM")]
    device: PathBuf,
    /// Has this machine's fio verify the disk in the guest, too.
    #[arg(long)]
    fio: bool,
    /// Only this machine.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Exit status when there is no kernel.
const NOT_THERE: u8 = 3;
/// How long a guest may be silent.
const PATIENCE: Duration = Duration::from_secs(300);
/// Bytes of the disk.
const DISK: u64 = 32 << 20;
const MEMORY: &str = "512M";

fn main() -> ExitCode {
    let options = Options::parse();
    let Some(kernel) = GUEST.kept(&options.work) else {
        eprintln!("there is no kernel: `cargo xtask linux --kernel guest`");
        return ExitCode::from(NOT_THERE);
    };
    match run(&options, &kernel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options, kernel: &Path) -> anyhow::Result<()> {
    let qemu = NewerQemu::fetch(Arch::X86, &options.work)?;
    let directory = options.work.join("vfio-user");
    fs::create_dir_all(&directory)?;
    let initramfs = directory.join("initramfs");
    let mut archive = Initramfs::new()?;
    archive.with_libraries("init", &options.init)?;
    if options.fio {
        archive.with_libraries("bin/fio", Path::new("/usr/bin/fio"))?;
    }
    fs::write(&initramfs, archive.finish()?)?;
    let only = options.only.as_deref();
    let machines = MACHINES
        .iter()
        .filter(|machine| only.is_none_or(|only| only == machine.name));
    let machines: Vec<_> = machines.collect();
    ensure!(!machines.is_empty(), "no machine has this name");
    let boot = Boot {
        qemu: &qemu,
        kernel,
        initramfs: &initramfs,
        directory: &directory,
        device: &options.device,
        tests: TESTS
            .into_iter()
            .chain(options.fio.then_some(FIO))
            .collect(),
    };
    let mut failed = Vec::new();
    // One after the other: QEMU's processors share their threads' time with the devices.
    for machine in machines {
        if let Err(error) = boot.run(machine) {
            println!("{}: FAILED {error:#}", machine.name);
            failed.push(machine.name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

struct Boot<'a> {
    qemu: &'a NewerQemu,
    kernel: &'a Path,
    initramfs: &'a Path,
    directory: &'a Path,
    device: &'a Path,
    tests: Vec<&'static str>,
}

/// A process, ended when dropped, and the lines that it says.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be started", command.get_program().display()))?;
        let output = child.stdout.take().context("no output")?;
        let (sender, lines) = mpsc::channel();
        // Ends with the process.
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut output = BufReader::new(output);
            while output.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                let line = String::from_utf8_lossy(&bytes).trim().to_owned();
                bytes.clear();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines })
    }

    fn line(&self) -> anyhow::Result<String> {
        Ok(self.lines.recv_timeout(PATIENCE)?)
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        let input = self.child.stdin.as_mut().context("no input")?;
        writeln!(input, "done").context("it takes no answer")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended already unless something went wrong, or it is a device.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Counts of a device's client.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    maps: u64,
    unmaps: u64,
    refused: u64,
    requests: u64,
    gathered: u64,
    ms: u64,
}

impl Left {
    /// `left: ...` as the device has it.
    fn of(line: &str) -> Option<Self> {
        let numbers = line.strip_prefix("left: ")?.split(", ");
        let mut left = Self::default();
        for number in numbers {
            let (value, name) = number.split_once(' ')?;
            let value = value.parse().ok()?;
            match name {
                "maps" => left.maps = value,
                "unmaps" => left.unmaps = value,
                "refused" => left.refused = value,
                "disk requests" => left.requests = value,
                "gathered" => left.gathered = value,
                "ms" => left.ms = value,
                _ => {}
            }
        }
        Some(left)
    }
}

/// Lines of a device.
#[derive(Default)]
struct Said {
    clients: Vec<Left>,
    faults: Vec<String>,
}

impl Said {
    /// Waits until its next client has gone, of which nothing is left then; the device listens for another.
    fn client(&mut self, device: &Process) -> anyhow::Result<()> {
        let left = loop {
            let line = device.line()?;
            match line.strip_prefix("fault ") {
                Some(fault) => self.faults.push(fault.to_owned()),
                None => break Left::of(&line).with_context(|| format!("a device says: {line}"))?,
            }
        };
        let kept = device.line()?;
        ensure!(kept.starts_with("kept: 0 maps, 0 files"), "{kept}");
        ensure!(left.refused == 0, "requests were refused");
        self.clients.push(left);
        Ok(())
    }
}

impl Boot<'_> {
    fn path(&self, machine: &Machine, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", machine.name))
    }

    fn run(&self, machine: &Machine) -> anyhow::Result<()> {
        let disk = self.path(machine, "disk");
        let file = File::create(&disk)?;
        file.set_len(DISK)?;
        succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk))?;
        let [disk_socket, engine_socket] = ["disk.sock", "engine.sock"];
        let sockets = [disk_socket, engine_socket].map(|kind| self.path(machine, kind));
        let mut device = Command::new(self.device);
        device
            .arg("--socket")
            .arg(&sockets[0])
            .args(["disk", "--file"]);
        device.arg(&disk).args(["--queues", &QUEUES.to_string()]);
        device.args(machine.line.then_some("--intx"));
        let disk_device = Process::start(&mut device)?;
        let mut device = Command::new(self.device);
        device.arg("--socket").arg(&sockets[1]).arg("engine");
        let engine = Process::start(&mut device)?;
        for device in [&disk_device, &engine] {
            ensure!(device.line()? == "ready", "a device is not ready");
        }
        let (mut disk_said, mut engine_said) = (Said::default(), Said::default());
        let (moves, moving) = match machine.line {
            true => (&mut disk_said, &disk_device),
            false => (&mut engine_said, &engine),
        };
        self.guest(machine, &sockets, || moves.client(moving))?;
        disk_said.client(&disk_device)?;
        engine_said.client(&engine)?;
        self.check_devices(machine, &disk_said, &engine_said)?;
        self.check_disk(machine, &disk)?;
        fs::remove_file(&disk)?;
        Ok(())
    }

    /// The device `vfio-user-pci` on `socket`.
    fn device(socket: &Path, id: &str, bus: &str) -> serde_json::Value {
        json!({
            "driver": "vfio-user-pci",
            "socket": {"type": "unix", "path": socket},
            "id": id,
            "bus": bus,
        })
    }

    /// From power on to power off. `gone` returns when the device that comes and goes has lost its client.
    fn guest(
        &self,
        machine: &Machine,
        sockets: &[PathBuf; 2],
        mut gone: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let [log, qemu_log, monitor] =
            ["log", "qemu.log", "qmp"].map(|kind| self.path(machine, kind));
        // The hot-plugged device is behind a port.
        let (disk_bus, engine_bus, moves) = match machine.line {
            true => ("root5", "pcie.0", ("disk", &sockets[0])),
            false => ("pcie.0", "root5", ("engine", &sockets[1])),
        };
        let mut command = self.qemu.command();
        command
            .args(MACHINE)
            .args(["-m", MEMORY, "-object"])
            .arg(format!(
                "memory-backend-memfd,id=ram,size={MEMORY},share=on"
            ))
            .args(["-machine", "memory-backend=ram"])
            .args(machine.unit)
            .args([
                "-device",
                "pcie-root-port,id=root5,chassis=1,bus=pcie.0,addr=5",
            ])
            .arg("-device")
            .arg(Self::device(&sockets[0], "disk", disk_bus).to_string())
            .arg("-device")
            .arg(Self::device(&sockets[1], "engine", engine_bus).to_string())
            // Each map and unmap that QEMU sends, to be compared with those that arrive.
            .args(["-msg", "timestamp=on", "-trace", "vfio_user_dma_*", "-D"])
            .arg(self.path(machine, "trace"))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(["-serial", "stdio", "-kernel"])
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 no_timer_check panic=-1 {} dmaspace.machine={}",
                machine.kernel, machine.name
            ))
            .stderr(File::create(&qemu_log)?);
        let begun = Instant::now();
        let mut guest = Process::start(&mut command)?;
        let mut qmp = Qmp::connect(&monitor)?;
        let mut passed = Vec::new();
        loop {
            let line = guest
                .line()
                .with_context(|| format!("the guest says nothing more: {}", log.display()))?;
            match line.split_once(' ') {
                Some(("ok", test)) => {
                    println!("{}: ok {test} ms", machine.name);
                    passed.extend(test.split(' ').next().map(str::to_owned));
                }
                Some(("ask", "unplug")) => {
                    qmp.command("device_del", json!({"id": moves.0}))?;
                    guest.answer()?;
                }
                Some(("ask", "plug")) => {
                    let device = Self::device(moves.1, moves.0, "root5");
                    // QEMU closes the socket last of all that it removes of a device. One that is added before is refused by the
                    // server, which has a client, and ends QEMU (11.1.3) by an assertion (`error_setv`).
                    gone()?;
                    qmp.command("device_add", device)?;
                    guest.answer()?;
                }
                _ if line == "end" => break,
                _ => bail!("{line}"),
            }
        }
        ensure!(passed == self.tests, "only {passed:?}");
        guest.child.wait()?;
        let said = fs::read_to_string(&qemu_log)?;
        ensure!(said.is_empty(), "QEMU says: {said}");
        println!(
            "{}: {} ok, {} s from power on to power off",
            machine.name,
            passed.len(),
            begun.elapsed().as_secs()
        );
        Ok(())
    }

    /// Checks the devices' counts after QEMU's end: both of the disk's clients, and the engine's.
    fn check_devices(&self, machine: &Machine, disk: &Said, engine: &Said) -> anyhow::Result<()> {
        let disks = &disk.clients;
        let Some(left) = disks.first() else {
            bail!("the disk had no client");
        };
        println!("{}: disk {left:?}", machine.name);
        ensure!(
            disk.faults.is_empty(),
            "faults of the disk: {:?}",
            disk.faults
        );
        ensure!(left.gathered > 0, "no request was gathered");
        if machine.iommu {
            // Each direct read or write is mapped by itself.
            let least = THREADS * OPERATIONS;
            ensure!(
                left.maps >= least,
                "{} maps for {least} requests",
                left.maps
            );
        } else {
            ensure!(left.maps < 100, "{} maps", left.maps);
        }
        let faults = &engine.faults;
        let all = || disks.iter().chain(&engine.clients);
        let arrived = |count: fn(&Left) -> u64| all().map(count).sum::<u64>();
        let trace = fs::read_to_string(self.path(machine, "trace"))?;
        let sent = |name: &str| trace.lines().filter(|line| line.contains(name)).count() as u64;
        let (maps, unmaps) = (sent("vfio_user_dma_map"), sent("vfio_user_dma_unmap"));
        ensure!(
            (maps, unmaps) == (arrived(|left| left.maps), arrived(|left| left.unmaps)),
            "QEMU has sent {maps} maps and {unmaps} unmaps"
        );
        if machine.iommu {
            let [maps, unmaps] = ["vfio_user_dma_map", "vfio_user_dma_unmap"];
            println!(
                "{}: in the busiest second {} maps and {} unmaps",
                machine.name,
                busiest(&trace, maps),
                busiest(&trace, unmaps)
            );
        }
        faults
            .iter()
            .for_each(|fault| println!("{}: {fault}", machine.name));
        let mut expected = vec![OUTSIDE];
        expected.extend(machine.iommu.then_some(INSIDE));
        let named = expected.iter().zip(faults);
        let named = named.filter(|(at, fault)| fault.contains(&format!("read of {at:#x}")));
        ensure!(
            named.count() == expected.len() && faults.len() == expected.len(),
            "other faults than at {expected:x?}"
        );
        Ok(())
    }

    /// The file system, by programs of others, and each file.
    fn check_disk(&self, machine: &Machine, disk: &Path) -> anyhow::Result<()> {
        succeed(
            Command::new("e2fsck")
                .args(["-f", "-n"])
                .arg(disk)
                .stdout(Stdio::null())
                .stderr(Stdio::null()),
        )?;
        let mut right = vec![0; FILE_BYTES];
        for number in 0..FILES {
            let output = Command::new("debugfs")
                .args(["-R", &format!("cat /file{number}")])
                .arg(disk)
                .stderr(Stdio::null())
                .output()?;
            fill(number, &mut right);
            ensure!(
                output.stdout == right,
                "file {number} is another one on the disk"
            );
        }
        println!(
            "{}: the file system and {FILES} files are right",
            machine.name
        );
        Ok(())
    }
}

/// How many lines of `trace` with this word belong to one second, at most: `DATETHH:MM:SS.FRACTIONZ WORD ...`.
fn busiest(trace: &str, word: &str) -> usize {
    let lines = trace.lines().filter(|line| line.contains(word));
    let seconds = lines.filter_map(|line| line.split_once('.'));
    let mut counts = BTreeMap::new();
    for (second, _) in seconds {
        *counts.entry(second).or_insert(0) += 1;
    }
    counts.into_values().max().unwrap_or(0)
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().display().to_string();
    let status = command.status().with_context(|| name.clone())?;
    ensure!(status.success(), "{name} ended with {status}");
    Ok(())
}
