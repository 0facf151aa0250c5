//! The first process of the guest: uses the disk and the engine, and says on the second serial port what it found.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use device_rig::engine::{self, ADDRESS, COMMAND, DATA, FETCH, STATUS};
use device_rig::guest_side::{
    FILE_BYTES, FILES, FIO, INSIDE, MACHINES, Machine, OPERATIONS, OUTSIDE, QUEUES, TESTS, THREADS,
    fill,
};
use guest::start::{self, RESULTS, say};
use rustix::fs::OFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

const DISK: &str = "/dev/vda";
const SYSFS: &str = "/sys/block/vda";
const PLACE: &str = "/tmp/disk";
const PROGRAM: &str = "/bin/fio";
/// How long a device may take to come or go, in a machine that is emulated.
const PATIENCE: Duration = Duration::from_secs(120);

type Test = fn(&Machine) -> anyhow::Result<()>;

const FUNCTIONS: [Test; 5] = [queues, remount, verify, replug, outside];

fn main() -> ExitCode {
    let done = start::mount().and_then(|()| {
        let mut results = start::results()?;
        let all = run(&mut results);
        say(
            &mut results,
            &match all {
                Ok(()) => "end".to_owned(),
                Err(error) => format!("failed: {error:#}"),
            },
        )
    });
    if let Err(error) = done {
        println!("init: {error:#}");
    }
    start::power_off()
}

fn run(results: &mut File) -> anyhow::Result<()> {
    let words = fs::read_to_string("/proc/cmdline")?;
    let name = start::word(&words, "dmaspace.machine").context("no machine is named")?;
    let machine = MACHINES.iter().find(|machine| machine.name == name);
    let machine = machine.context("no such machine")?;
    fs::create_dir_all(PLACE)?;
    let asked: Option<(&str, Test)> = Path::new(PROGRAM).exists().then_some((FIO, fio));
    for (name, test) in TESTS.into_iter().zip(FUNCTIONS).chain(asked) {
        let begun = Instant::now();
        let line = match test(machine) {
            Ok(()) => format!("ok {name} {}", begun.elapsed().as_millis()),
            Err(error) => format!("wrong {name}: {error:#}"),
        };
        say(results, &line)?;
    }
    Ok(())
}

/// Asks the rig to do something, and waits until it has.
fn ask(question: &str) -> anyhow::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(RESULTS)?;
    // Otherwise the answer is sent back.
    let mut how = tcgetattr(&port)?;
    how.make_raw();
    tcsetattr(&port, OptionalActions::Now, &how)?;
    let mut reader = BufReader::new(port.try_clone()?);
    writeln!({ port }, "ask {question}")?;
    let mut answer = String::new();
    reader.read_line(&mut answer)?;
    ensure!(answer.trim_end() == "done", "the rig says {answer:?}");
    Ok(())
}

fn until(what: &str, done: impl Fn() -> bool) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !done() {
        ensure!(begun.elapsed() < PATIENCE, "{what}: not in time");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn attach() -> anyhow::Result<()> {
    until("the disk comes", || Path::new(DISK).exists())?;
    mount(DISK, PLACE, "ext4", MountFlags::empty(), None).context("the disk is not mounted")
}

fn detach() -> anyhow::Result<()> {
    unmount(PLACE, UnmountFlags::empty()).context("the disk is not unmounted")
}

fn file(number: u64) -> PathBuf {
    Path::new(PLACE).join(format!("file{number}"))
}

fn queues(_: &Machine) -> anyhow::Result<()> {
    until("the disk comes", || Path::new(SYSFS).exists())?;
    let queues = fs::read_dir(format!("{SYSFS}/mq"))?.count();
    ensure!(queues == usize::from(QUEUES), "{queues} queues");
    Ok(())
}

fn check_files() -> anyhow::Result<()> {
    let mut right = vec![0; FILE_BYTES];
    for number in 0..FILES {
        fill(number, &mut right);
        let found = fs::read(file(number))?;
        ensure!(found == right, "file {number} is another one");
    }
    Ok(())
}

fn remount(_: &Machine) -> anyhow::Result<()> {
    attach()?;
    let mut bytes = vec![0; FILE_BYTES];
    for number in 0..FILES {
        fill(number, &mut bytes);
        let mut file = File::create(file(number))?;
        file.write_all(&bytes)?;
        file.sync_all()?;
    }
    detach()?;
    attach()?;
    check_files()
}

/// A buffer for direct I/O.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(len: usize) -> Self {
        let bytes = vec![0; len + 4096];
        let at = bytes.as_ptr().align_offset(4096);
        Self(bytes, at)
    }

    fn slice(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[self.1..][..len]
    }
}

/// Each thread writes pieces of random lengths past the page cache, reads others back, and at the end all of them.
fn verify(_: &Machine) -> anyhow::Result<()> {
    const BLOCK: u64 = 4096;
    const BLOCKS: u64 = 256;
    let worker = |thread: u64| -> anyhow::Result<()> {
        let path = Path::new(PLACE).join(format!("direct{thread}"));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        options.custom_flags(OFlags::DIRECT.bits() as i32);
        let file = options.open(path)?;
        file.set_len(BLOCK * BLOCKS)?;
        // Seed of each block: 0 for zeros.
        let mut seeds = vec![0_u64; BLOCKS as usize];
        let mut buffer = Aligned::new(16 * BLOCK as usize);
        let mut right = vec![0; BLOCK as usize];
        let mut random = thread + 1;
        let mut next = |below: u64| {
            let mut word = [0; 8];
            fill(random, &mut word);
            random = u64::from_le_bytes(word);
            random % below
        };
        let mut check = |buffer: &[u8], first: u64, seeds: &[u64]| {
            for (block, found) in (first..).zip(buffer.chunks_exact(BLOCK as usize)) {
                match seeds[block as usize] {
                    0 => right.fill(0),
                    seed => fill(seed, &mut right),
                }
                ensure!(found == right, "block {block} of thread {thread}");
            }
            Ok(())
        };
        for operation in 0..OPERATIONS {
            let blocks = 1 + next(16);
            let first = next(BLOCKS - blocks + 1);
            let bytes = buffer.slice((blocks * BLOCK) as usize);
            if next(2) == 0 {
                for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK as usize)) {
                    let seed = thread << 48 | operation << 16 | (block + 1);
                    seeds[block as usize] = seed;
                    fill(seed, bytes);
                }
                file.write_all_at(bytes, first * BLOCK)?;
            } else {
                file.read_exact_at(bytes, first * BLOCK)?;
                check(bytes, first, &seeds)?;
            }
        }
        for first in (0..BLOCKS).step_by(16) {
            let bytes = buffer.slice(16 * BLOCK as usize);
            file.read_exact_at(bytes, first * BLOCK)?;
            check(bytes, first, &seeds)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let worker = &worker;
        let threads: Vec<_> = (1..=THREADS)
            .map(|thread| scope.spawn(move || worker(thread)))
            .collect();
        let mut ends = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("panicked")));
        ends.try_for_each(|end| end)
    })?;
    check_files()
}

/// A device goes and comes: the disk, whose file system is not mounted then, or the engine, while the disk is in use.
fn replug(machine: &Machine) -> anyhow::Result<()> {
    let there = || match machine.line {
        true => Path::new(SYSFS).exists(),
        false => engine_config().is_ok(),
    };
    ensure!(there(), "no device");
    if machine.line {
        detach()?;
    }
    ask("unplug")?;
    until("the device goes", || !there())?;
    if !machine.line {
        check_files()?;
        detach()?;
    }
    ask("plug")?;
    until("the device comes", there)?;
    attach()?;
    check_files()?;
    detach()
}

/// The configuration space of the engine.
fn engine_config() -> anyhow::Result<File> {
    for entry in fs::read_dir("/sys/bus/pci/devices")? {
        let path = entry?.path();
        let word = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        let is = |text: String, number: u16| text.trim_end() == format!("{number:#06x}");
        if is(word("vendor"), engine::VENDOR) && is(word("device"), engine::DEVICE) {
            let mut options = OpenOptions::new();
            let config = options.read(true).write(true).open(path.join("config"));
            return Ok(config?);
        }
    }
    anyhow::bail!("no engine")
}

/// Has the engine read a word: whether it could.
fn reaches(config: &File, at: u64) -> anyhow::Result<bool> {
    let put = |offset: u64, word: u32| config.write_all_at(&word.to_le_bytes(), offset);
    put(ADDRESS, at as u32)?;
    put(ADDRESS + 4, (at >> 32) as u32)?;
    put(DATA, 0)?;
    put(STATUS, u32::MAX)?;
    put(COMMAND, FETCH)?;
    let mut status = [0; 4];
    config.read_exact_at(&mut status, STATUS)?;
    match u32::from_le_bytes(status) {
        0 => Ok(true),
        1 => Ok(false),
        other => anyhow::bail!("the engine says {other:#x}"),
    }
}

fn outside(machine: &Machine) -> anyhow::Result<()> {
    let config = engine_config()?;
    ensure!(
        !reaches(&config, OUTSIDE)?,
        "there is memory at {OUTSIDE:#x}"
    );
    let inside = reaches(&config, INSIDE)?;
    // No driver has mapped anything for the engine.
    ensure!(inside != machine.iommu, "memory at {INSIDE:#x}: {inside}");
    Ok(())
}

/// A check by fio: threads with many requests under way write blocks of all lengths past the page cache, each
/// place once, and read each back with its checksum.
fn fio(_: &Machine) -> anyhow::Result<()> {
    attach()?;
    let mut command = Command::new(PROGRAM);
    command.args(["--directory", PLACE]);
    command.args(["--name=verify", "--thread", "--numjobs=4", "--size=4m"]);
    command.args(["--rw=randwrite", "--bsrange=4k-128k", "--direct=1"]);
    command.args(["--ioengine=io_uring", "--iodepth=16", "--fallocate=none"]);
    command.args(["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64"]);
    command.arg("--group_reporting");
    let output = command.output().context("fio cannot be started")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    println!("{said}{complained}");
    ensure!(output.status.success(), "fio ended with {}", output.status);
    check_files()?;
    detach()
}
