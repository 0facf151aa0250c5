//! QEMU's monitor: commands and answers as lines of JSON.
//!
//! Ours and not `qapi`, which compiles a type for each command and event of QEMU, of which the rigs use a handful.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The connection.
#[derive(Debug)]
pub struct Qmp {
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to a QEMU that listens there, or will soon.
    ///
    /// # Errors
    ///
    /// When no program listens, or it is no QEMU.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Err(_) if begun.elapsed() < PATIENCE => sleep(Duration::from_millis(10)),
                connected => break connected.context("QEMU's monitor")?,
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut qmp = Self {
            lines: BufReader::new(stream),
        };
        let greeting = qmp.line()?;
        ensure!(greeting.get("QMP").is_some(), "no greeting: {greeting}");
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn line(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        let bytes = self.lines.read_line(&mut line).context("the monitor")?;
        ensure!(bytes > 0, "QEMU has closed its monitor");
        Ok(serde_json::from_str(&line)?)
    }

    /// Result of a command. Events on the way are left out.
    ///
    /// # Errors
    ///
    /// Error of QEMU, or its silence.
    pub fn command(&mut self, name: &str, arguments: Value) -> anyhow::Result<Value> {
        let command = json!({"execute": name, "arguments": arguments});
        writeln!(self.lines.get_mut(), "{command}")?;
        loop {
            let mut answer = self.line()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
        }
    }

    /// Asks until `done` is content with what the command returns.
    ///
    /// # Errors
    ///
    /// As [`command`](Self::command), and when that takes too long.
    pub fn until(
        &mut self,
        name: &str,
        arguments: &Value,
        done: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let begun = Instant::now();
        loop {
            let value = self.command(name, arguments.clone())?;
            if done(&value) {
                return Ok(value);
            }
            ensure!(begun.elapsed() < PATIENCE, "{name} still says {value}");
            sleep(Duration::from_millis(1));
        }
    }
}
