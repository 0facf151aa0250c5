//! The host's side of a guest with a balloon: wants memory in it and out of it again, and looks whether
//! the machine's memory, which is a file, becomes smaller.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use conformance::qmp::Qmp;
use serde_json::{Value, json};

use crate::{
    machines::{BALLOON, BALLOONED, BULK_BIT, Balloon, MEMORY, TOUCHED},
    qemu::{PATIENCE, remove, shared_memory, slot},
};

/// Bytes of the machine that may have memory beside what the guest was asked to use: QEMU's own.
const SLACK: u64 = 64 << 20;

/// Where QEMU and we meet, below the directory of the machine.
#[derive(Debug)]
pub struct Meeting {
    balloon: Balloon,
    monitor: PathBuf,
    socket: PathBuf,
    daemon: Option<Daemon>,
}

impl Meeting {
    /// Before QEMU starts that plays `machine`. `dmaspace` is the command line for this one.
    ///
    /// # Errors
    ///
    /// When the daemon does not start.
    pub fn new(
        balloon: Balloon,
        machine: &str,
        directory: &Path,
        dmaspace: &Path,
    ) -> anyhow::Result<Self> {
        // Machines with balloons run at the same time.
        let [monitor, socket] =
            ["qmp", "vhost"].map(|kind| directory.join(format!("{machine}.{kind}")));
        for left in [&monitor, &socket] {
            remove(left)?;
        }
        let daemon = match balloon {
            Balloon::Qemu => None,
            Balloon::VhostUser => Some(Daemon::start(dmaspace, &socket)?),
        };
        Ok(Self {
            balloon,
            monitor,
            socket,
            daemon,
        })
    }

    /// QEMU's arguments for it.
    pub fn arguments(&self) -> Vec<String> {
        let monitor = format!("unix:{},server=on,wait=off", self.monitor.display());
        let mut arguments = shared_memory().to_vec();
        arguments.extend(["-qmp".into(), monitor]);
        let slot = slot(BALLOON);
        match self.balloon {
            Balloon::Qemu => {
                let device = format!("virtio-balloon-pci,id=balloon,addr={slot}");
                arguments.extend(["-device".into(), device]);
            }
            Balloon::VhostUser => {
                let socket = format!("socket,id=socket,path={}", self.socket.display());
                let device = format!(
                    "vhost-user-test-device-pci,chardev=socket,virtio-id=5,num_vqs=5,\
                     config_size=32,addr={slot}"
                );
                arguments.extend(["-chardev".into(), socket, "-device".into(), device]);
            }
        }
        arguments
    }

    /// Leads the balloon while the guest, which has begun with its first test, runs. What is returned
    /// is to be kept until the guest has ended: QEMU does not survive its device.
    ///
    /// # Errors
    ///
    /// What was not as it should be.
    pub fn lead(mut self, qemu: u32) -> anyhow::Result<Self> {
        let Some(daemon) = &mut self.daemon else {
            let mut qmp = Monitor(Qmp::connect(&self.monitor)?);
            fill_and_empty(qemu, &mut qmp)?;
            // For the test of a signal: full once more. Who ends empties it, whatever is wanted.
            let value = MEMORY - BALLOONED;
            qmp.0.command("balloon", json!({"value": value}))?;
            return Ok(self);
        };
        fill_and_empty(qemu, daemon)?;
        Ok(self)
    }
}

/// Whoever has the balloon's device.
trait Device {
    /// Wants so many bytes in the balloon, and returns when they are there.
    fn want(&mut self, bytes: u64) -> anyhow::Result<()>;

    /// Asks for statistics. Returns how much memory the guest says it has.
    fn total(&mut self) -> anyhow::Result<u64>;
}

/// QEMU.
struct Monitor(Qmp);

impl Device for Monitor {
    fn want(&mut self, bytes: u64) -> anyhow::Result<()> {
        let left = json!({"value": MEMORY - bytes});
        self.0.command("balloon", left)?;
        let reached = |said: &Value| said["actual"] == MEMORY - bytes;
        self.0.until("query-balloon", &json!({}), reached)?;
        Ok(())
    }

    fn total(&mut self) -> anyhow::Result<u64> {
        let path = "/machine/peripheral/balloon";
        let every = json!({"path": path, "property": "guest-stats-polling-interval", "value": 1});
        self.0.command("qom-set", every)?;
        let what = json!({"path": path, "property": "guest-stats"});
        let total = |said: &Value| said["stats"]["stat-total-memory"].as_u64();
        // All ones until there are some.
        let known = |said: &Value| total(said).is_some_and(|bytes| bytes != u64::MAX);
        let said = self.0.until("qom-get", &what, known)?;
        total(&said).context("no statistics")
    }
}

/// Has the balloon filled and emptied, and looks at it in between.
fn fill_and_empty(qemu: u32, device: &mut dyn Device) -> anyhow::Result<()> {
    let begun = Instant::now();
    while blocks(qemu)? < TOUCHED {
        let waits = begun.elapsed() < PATIENCE;
        ensure!(waits, "the guest does not write to its memory");
        thread::sleep(Duration::from_millis(20));
    }
    device.want(BALLOONED)?;
    let left = blocks(qemu)?;
    let most = MEMORY - BALLOONED + SLACK;
    ensure!(
        left <= most,
        "{left} bytes of the machine have memory with a full balloon, {most} at most"
    );
    let total = device.total()?;
    let sane = total > MEMORY / 2 && total < MEMORY;
    ensure!(sane, "the guest says that it has {total} bytes");
    device.want(0)
}

/// Bytes of the machine's memory that the host has given to it.
fn blocks(qemu: u32) -> anyhow::Result<u64> {
    for file in fs::read_dir(format!("/proc/{qemu}/fd"))? {
        let path = file?.path();
        let is_memory = fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
        if is_memory
            && let Ok(about) = fs::metadata(&path)
            && about.size() == MEMORY
        {
            return Ok(about.blocks() * 512);
        }
    }
    bail!("QEMU has no file of {MEMORY} bytes open")
}

/// `dmaspace balloon` while it runs.
#[derive(Debug)]
struct Daemon {
    child: Child,
    input: ChildStdin,
    events: mpsc::Receiver<Value>,
}

impl Daemon {
    fn start(dmaspace: &Path, socket: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(dmaspace)
            .args(["balloon", "--json", "--bulk-bit", &BULK_BIT.to_string()])
            .arg("--socket")
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("dmaspace balloon cannot be started")?;
        let input = child.stdin.take().context("no stdin")?;
        let output = child.stdout.take().context("no stdout")?;
        let (sender, events) = mpsc::channel();
        // Ends with the daemon, which closes its output.
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let event = line.ok().and_then(|line| serde_json::from_str(&line).ok());
                if event.is_none_or(|event| sender.send(event).is_err()) {
                    break;
                }
            }
        });
        let mut daemon = Self {
            child,
            input,
            events,
        };
        daemon.until(|event| event["event"] == "listening")?;
        Ok(daemon)
    }

    fn until(&mut self, mut done: impl FnMut(&Value) -> bool) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut last = Value::Null;
        while let Some(left) = PATIENCE.checked_sub(begun.elapsed()) {
            let Ok(event) = self.events.recv_timeout(left) else {
                break;
            };
            let kind = event["event"].as_str().unwrap_or_default();
            let wrong = ["refused", "not_discarded", "disconnected"].contains(&kind);
            ensure!(!wrong, "{event}");
            if done(&event) {
                return Ok(());
            }
            last = event;
        }
        bail!("the daemon came no further than {last}")
    }
}

impl Device for Daemon {
    fn want(&mut self, bytes: u64) -> anyhow::Result<()> {
        writeln!(self.input, "target {bytes}")?;
        self.until(|event| event["target_bytes"] == bytes && event["actual_bytes"] == bytes)
    }

    fn total(&mut self) -> anyhow::Result<u64> {
        writeln!(self.input, "stats")?;
        let mut total = 0;
        self.until(|event| {
            let said = event["total_bytes"].as_u64();
            total = said.unwrap_or_default();
            event["event"] == "stats" && said.is_some()
        })?;
        Ok(total)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
