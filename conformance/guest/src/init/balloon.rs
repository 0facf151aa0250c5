//! `dmaspace balloon-guest`: the balloon's device is driven from here, whoever it is; what it shall hold
//! the host decides, which looks at its side of it.

use std::{
    io::{BufRead as _, BufReader, Lines},
    process::{Child, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{BALLOON, BALLOONED, BULK_BIT, Machine, TOUCHED};
use hostmem::{Backing, Mapping};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use crate::pci::Device;

const PROGRAM: &str = "/bin/dmaspace";

/// Bytes beside the balloon that must stay what they are.
const OUTSIDE: u64 = 64 << 20;

/// The program while it runs.
struct Driver {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Driver {
    fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        // `virtio-pci` has it, for the kernel's own driver of a balloon, which is not here.
        Device(BALLOON).unbind()?;
        let mut child = Command::new(PROGRAM)
            .args(["balloon-guest", "--device", BALLOON, "--json"])
            .args(["--reserve", "64M"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .context("dmaspace cannot be started")?;
        let output = child.stdout.take().context("no stdout")?;
        let lines = BufReader::new(output).lines();
        Ok(Self { child, lines })
    }

    /// The next that it tells; `None` at its end.
    fn next(&mut self) -> anyhow::Result<Option<Value>> {
        let Some(line) = self.lines.next() else {
            return Ok(None);
        };
        let line = line?;
        println!("balloon-guest: {line}");
        Ok(Some(serde_json::from_str(&line)?))
    }

    /// Reads until so much is in the balloon, whatever the host wants by then.
    fn until(&mut self, bytes: u64) -> anyhow::Result<()> {
        while let Some(event) = self.next()? {
            ensure!(event["event"] != "trouble", "{event}");
            if event["actual_bytes"] == bytes {
                return Ok(());
            }
        }
        bail!("it ended before there were {bytes} bytes in the balloon");
    }

    /// Reads to its end, which must be a good one, with as much memory available as `before`.
    fn gives_back(mut self, before: u64) -> anyhow::Result<()> {
        let mut last = Value::Null;
        while let Some(event) = self.next()? {
            ensure!(event["event"] != "trouble", "{event}");
            last = event;
        }
        let status = self.child.wait()?;
        let ended = status.success() && last["event"] == "ended";
        ensure!(ended, "{status}: {last}");
        let after = available()?;
        ensure!(
            after + (64 << 20) > before,
            "{before} bytes were available, {after} in the end"
        );
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Memory of this process in which each word says where it is.
fn filled(bytes: u64) -> anyhow::Result<Mapping> {
    let memory = Mapping::new(Backing::Thp, bytes, None)?;
    memory.populate(&mut |_| ControlFlow::Continue(()))?;
    for (n, cell) in memory.cells().iter().enumerate() {
        cell.store(!(n as u64), Ordering::Relaxed);
    }
    Ok(memory)
}

fn is_intact(memory: &Mapping) -> bool {
    let mut cells = memory.cells().iter().enumerate();
    cells.all(|(n, cell)| cell.load(Ordering::Relaxed) == !(n as u64))
}

fn available() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .context("no MemAvailable")?
        .parse()?;
    Ok(kib << 10)
}

/// Fills the balloon and empties it, as the host wants it; memory beside it stays what it is, and all of
/// the guest can be used afterwards.
fn follows(arguments: &[&str], bulk: bool) -> anyhow::Result<()> {
    // The host has given memory to all of this: it can be seen to take some back.
    drop(filled(TOUCHED)?);
    let outside = filled(OUTSIDE)?;
    let before = available()?;
    let mut driver = Driver::start(&[&["--until-empty"], arguments].concat())?;
    let begun = driver.next()?.context("it ended at once")?;
    ensure!(
        begun["event"] == "begun" && begun["bulk"] == bulk,
        "{begun}"
    );
    // The host looks at the memory of a full balloon, and empties it when it has seen enough.
    driver.until(BALLOONED)?;
    driver.gives_back(before)?;
    ensure!(is_intact(&outside), "memory beside the balloon has changed");
    let again = filled(TOUCHED)?;
    ensure!(is_intact(&again), "memory that came back is not memory");
    Ok(())
}

pub(crate) fn qemus(_: &Machine) -> anyhow::Result<()> {
    follows(&[], false)
}

pub(crate) fn in_bulk(_: &Machine) -> anyhow::Result<()> {
    follows(&["--bulk-bit", &BULK_BIT.to_string()], true)
}

/// The host wants the balloon full again, which the program is not allowed to finish.
pub(crate) fn signal(_: &Machine) -> anyhow::Result<()> {
    let before = available()?;
    let mut driver = Driver::start(&[])?;
    driver.until(BALLOONED)?;
    let pid = Pid::from_child(&driver.child);
    kill_process(pid, Signal::INT)?;
    driver.gives_back(before)?;
    Ok(())
}
