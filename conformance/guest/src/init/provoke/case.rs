//! Case of the corpus: the files that a user of this machine would have, and the causes that were provoked.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rustix::fs::OFlags;

use crate::{host::keep, pci};

/// Longer than the interval in which Linux prints ten messages of a kind (`DEFAULT_RATELIMIT_INTERVAL`), so that no case
/// suppresses messages of the next.
const INTERVAL: Duration = Duration::from_millis(5500);
/// Time in which a fault is printed: many times what it takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time after the last line in which another one would come.
const QUIET: Duration = Duration::from_millis(700);

/// A finding that an explanation of the case has.
pub(super) struct Expected {
    pub(super) cause: &'static str,
    pub(super) device: Option<String>,
    pub(super) address: Option<u64>,
    pub(super) access: Option<&'static str>,
    /// Faults that were provoked.
    pub(super) count: Option<u64>,
}

impl Expected {
    /// A cause, and nothing more of it.
    pub(super) const fn new(cause: &'static str) -> Self {
        Self {
            cause,
            device: None,
            address: None,
            access: None,
            count: None,
        }
    }
}

/// The kernel's log.
pub(super) struct Log(File);

impl Log {
    fn open() -> anyhow::Result<Self> {
        let path = "/dev/kmsg";
        let log = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path);
        Ok(Self(log.context(path)?))
    }

    /// The lines since the last call, as `dmesg` prints them.
    fn lines(&mut self) -> String {
        let mut lines = String::new();
        // A record a read, until there is none.
        let mut record = [0; 8192];
        while let Ok(len) = self.0.read(&mut record) {
            let text = String::from_utf8_lossy(&record[..len]);
            let Some((head, message)) = text.split_once(';') else {
                continue;
            };
            let time = head.split(',').nth(2).and_then(|time| time.parse().ok());
            let time: u64 = time.unwrap_or_default();
            let message = message.lines().next().unwrap_or_default();
            let message = message.replace("(root@vm) ", "");
            let (seconds, rest) = (time / 1_000_000, time % 1_000_000);
            lines.push_str(&format!("[{seconds:5}.{rest:06}] {message}\n"));
        }
        lines
    }
}

/// A case that was begun.
pub(super) struct Case {
    name: &'static str,
    log: Log,
    files: Vec<String>,
    allowed: Vec<&'static str>,
    expected: Vec<Expected>,
}

impl Case {
    /// Begins a case: the log from here on is its own.
    pub(super) fn new(name: &'static str) -> anyhow::Result<Self> {
        thread::sleep(INTERVAL);
        let mut log = Log::open()?;
        log.0.seek(SeekFrom::End(0))?;
        Ok(Self {
            name,
            log,
            files: Vec::new(),
            allowed: Vec::new(),
            expected: Vec::new(),
        })
    }

    /// The same with the log from the start of the machine.
    pub(super) fn since_the_start(name: &'static str) -> anyhow::Result<Self> {
        let log = Log::open()?;
        Ok(Self {
            log,
            ..Self::new(name)?
        })
    }

    pub(super) fn expect(&mut self, finding: Expected) {
        self.expected.push(finding);
    }

    /// Further causes that fit what is in the files, though they were not provoked.
    pub(super) fn allow(&mut self, causes: &'static [&'static str]) {
        self.allowed.extend(causes);
    }

    /// Adds a text, unless there is none.
    pub(super) fn text(&mut self, file: &str, text: &str) -> anyhow::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.files.push(file.to_owned());
        keep(&format!("{}/{file}", self.name), text)
    }

    /// Adds a table of firmware, as `acpidump` prints it.
    pub(super) fn table(&mut self, name: &str) -> anyhow::Result<()> {
        let path = Path::new("/sys/firmware/acpi/tables").join(name);
        let table = fs::read(&path).with_context(|| path.display().to_string())?;
        let mut text = format!("{name} @ 0x0000000000000000\n");
        for (nth, bytes) in table.chunks(16).enumerate() {
            let hex: String = bytes.iter().map(|byte| format!(" {byte:02X}")).collect();
            text += &format!("    {:04X}:{hex:48}\n", nth * 16);
        }
        self.text(&format!("{}.txt", name.to_lowercase()), &text)
    }

    /// Adds a file of the machine.
    pub(super) fn file(&mut self, file: &str, path: &str) -> anyhow::Result<()> {
        let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
        self.text(file, &text)
    }

    /// Waits for `lines` lines of the log that say `word`, and for the end of what follows, and ends the case.
    pub(super) fn end(mut self, lines: usize, word: &str) -> anyhow::Result<()> {
        let mut said = String::new();
        let start = Instant::now();
        let mut last = start;
        loop {
            let new = self.log.lines();
            if !new.is_empty() {
                last = Instant::now();
                said += &new;
            }
            let found = said.lines().filter(|line| line.contains(word)).count();
            if found >= lines && last.elapsed() > QUIET {
                break;
            }
            if start.elapsed() > PATIENCE {
                bail!("{found} lines with {word:?}, not {lines}: {said}");
            }
            thread::sleep(Duration::from_millis(20));
        }
        if !said.is_empty() {
            self.text("dmesg.txt", &said)?;
        }
        let listed = |names: &[&str]| {
            let quoted: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
            quoted.join(", ")
        };
        let files: Vec<_> = self.files.iter().map(String::as_str).collect();
        let mut text = format!("files = [{}]\n", listed(&files));
        text += &format!("allowed = [{}]\n", listed(&self.allowed));
        for one in &self.expected {
            text += &format!("\n[[finding]]\ncause = {:?}\n", one.cause);
            if let Some(device) = &one.device {
                text += &format!("devices = [{device:?}]\n");
            }
            if let Some(address) = one.address {
                text += &format!("address = \"{address:#x}\"\n");
            }
            if let Some(access) = one.access {
                text += &format!("access = {access:?}\n");
            }
            if let Some(count) = one.count {
                text += &format!("count = {count}\n");
            }
        }
        keep(&format!("{}/expect.toml", self.name), &text)
    }
}

/// Members of groups, a line each: group, device, class, vendor and device, driver.
pub(super) fn groups() -> anyhow::Result<String> {
    let root = Path::new("/sys/kernel/iommu_groups");
    let mut all = String::new();
    for group in pci::names(root)? {
        for device in pci::names(&root.join(&group).join("devices"))? {
            let path = Path::new("/sys/bus/pci/devices").join(&device);
            let read = |name: &str| fs::read_to_string(path.join(name));
            let Ok(class) = read("class") else {
                // No function of PCI.
                continue;
            };
            let hex = |text: String| text.trim().trim_start_matches("0x").to_owned();
            let driver = fs::read_link(path.join("driver")).ok();
            let driver = driver.as_deref().and_then(Path::file_name);
            let driver = driver.map_or("-".into(), |name| name.to_string_lossy());
            all += &format!(
                "{group} {device} {} {}:{} {driver}\n",
                hex(class),
                hex(read("vendor")?),
                hex(read("device")?)
            );
        }
    }
    Ok(all)
}
