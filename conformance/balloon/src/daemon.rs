//! `dmaspace balloon` as a program of its own, led and heard over its pipes.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::checks::Balloon;
use crate::guest::{PATIENCE, until};

/// The program; ended when it is dropped.
#[derive(Debug)]
pub struct Daemon {
    program: Child,
    lines: ChildStdin,
    events: mpsc::Receiver<Value>,
    /// Events not waited for yet.
    heard: VecDeque<Value>,
    /// The latest of the kind `balloon`.
    balloon: Value,
}

impl Daemon {
    /// Starts `program` with this socket and these options, and waits until it listens.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub fn start(program: &Path, socket: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            // Offered to every driver; Linux's own does not know it.
            .args(["balloon", "--json", "--bulk-bit", "23", "--socket"])
            .arg(socket)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| program.display().to_string())?;
        let (Some(lines), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the daemon has no pipes");
        };
        let (sender, events) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let event = line.ok().and_then(|line| serde_json::from_str(&line).ok());
                if event.is_none_or(|event| sender.send(event).is_err()) {
                    break;
                }
            }
        });
        let mut daemon = Self {
            program: child,
            lines,
            events,
            heard: VecDeque::new(),
            balloon: Value::Null,
        };
        daemon.wait_for("listening")?;
        Ok(daemon)
    }

    /// Gives it a line.
    ///
    /// # Errors
    ///
    /// When it has gone.
    pub fn say(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.lines, "{line}").context("the daemon has gone")
    }

    /// The next event of this kind; those before it are passed over.
    ///
    /// # Errors
    ///
    /// When none comes.
    pub fn wait_for(&mut self, kind: &str) -> anyhow::Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            while let Some(event) = self.heard.pop_front() {
                if event["event"] == kind {
                    return Ok(event);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.hear(left)? {
                bail!("no event `{kind}` in {} s", PATIENCE.as_secs());
            }
        }
    }

    /// Forgets what happened so far.
    ///
    /// # Errors
    ///
    /// When the daemon has gone.
    pub fn forget(&mut self) -> anyhow::Result<()> {
        while self.hear(Duration::ZERO)? {}
        self.heard.clear();
        Ok(())
    }

    /// A count of the latest report of the balloon.
    ///
    /// # Errors
    ///
    /// When there was none.
    pub fn count(&mut self, name: &str) -> anyhow::Result<u64> {
        while self.hear(Duration::ZERO)? {}
        let count = self.balloon[name].as_u64();
        count.with_context(|| format!("no `{name}` in {}", self.balloon))
    }

    /// Waits for an event; false when none comes in time.
    fn hear(&mut self, patience: Duration) -> anyhow::Result<bool> {
        match self.events.recv_timeout(patience) {
            Ok(event) => {
                if event["event"] == "balloon" {
                    self.balloon = event.clone();
                }
                self.heard.push_back(event);
                Ok(true)
            }
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => bail!("the daemon has gone"),
        }
    }

    /// Sends SIGINT, and waits for the end.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn interrupt(&mut self) -> anyhow::Result<ExitStatus> {
        let pid = i32::try_from(self.program.id())
            .ok()
            .and_then(Pid::from_raw);
        kill_process(pid.context("the daemon has no number")?, Signal::INT)?;
        until("the end of the daemon", || Ok(self.program.try_wait()?))
    }
}

impl Balloon for Daemon {
    fn set_target(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.say(&format!("target {bytes}"))
    }

    fn actual(&mut self) -> anyhow::Result<u64> {
        self.count("actual_bytes")
    }

    fn exchanged(&mut self) -> anyhow::Result<Option<[u64; 2]>> {
        let given = self.count("inflated_bytes")?;
        Ok(Some([given, self.count("deflated_bytes")?]))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has come to its end already unless something went wrong.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
