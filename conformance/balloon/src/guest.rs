//! A guest, from power on to power off: User-Mode Linux, or a machine of QEMU.
//!
//! Two consoles: on one `init.sh` takes commands; what the kernel says goes to a file.
//! The guest's memory is one unlinked file, of which the machine counts the pages that are there: what
//! the balloon gives back is seen in this number, not believed from anybody's report.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use conformance::initramfs::Initramfs;
use conformance::inputs;
use conformance::kernel::{Arch, Kernel, MODULE, Tables, UML_DEBUG};
use conformance::newer_qemu::NewerQemu;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tempfile::TempDir;

use crate::{qemu, registers};

/// The modules with a driver of the balloon: Linux's own, and ours.
const MODULES: [&str; 2] = ["virtio_balloon.ko", MODULE];
const BUSYBOX: &str = "/bin/busybox";
/// How long a guest may take to boot, and a command to be done: many times what either takes, for
/// machines that are slow or busy.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Lines that are shown of what the kernel said, when something failed.
const TAIL: usize = 30;

/// A driver of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Linux's own.
    Stock,
    /// Ours, by page numbers.
    Pages,
    /// Ours, by messages in bulk.
    Bulk,
}

impl Driver {
    /// All.
    pub const ALL: [Self; 3] = [Self::Stock, Self::Pages, Self::Bulk];

    /// As a line says it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stock => "Linux's driver",
            Self::Pages => "ours, by page numbers",
            Self::Bulk => "ours, in bulk",
        }
    }

    /// The module, for `insmod`, with its arguments.
    pub const fn module(self) -> &'static str {
        match self {
            Self::Stock => "/virtio_balloon.ko",
            Self::Pages => "/dmaspace_balloon.ko bulk_bit=-1",
            Self::Bulk => "/dmaspace_balloon.ko",
        }
    }

    /// The module's file.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Stock => "/virtio_balloon.ko",
            Self::Pages | Self::Bulk => "/dmaspace_balloon.ko",
        }
    }
}

/// Parts of a guest.
#[derive(Clone, Debug)]
pub struct Parts {
    pub(crate) kernel: PathBuf,
    /// Boots it; none, if it is a program.
    qemu: Option<NewerQemu>,
    /// The memory of guests in QEMU is huge pages of 2 MiB.
    pub huge: bool,
    /// MiB that the kernel needs for itself, beside what guests are to have.
    own: u32,
    initramfs: Vec<u8>,
    /// Words for every kernel.
    words: Vec<String>,
}

impl Parts {
    /// Packs it of what `cargo xtask linux` left of this kernel below `work`, with these words for it.
    ///
    /// # Errors
    ///
    /// When something is missing, or not what the sources say, which is named.
    pub fn find(wanted: Kernel, work: &Path, words: &[String]) -> anyhow::Result<Self> {
        let kernel = wanted.current(Tables::Stock, &inputs::root(), work)?;
        wanted.current_module(&inputs::root(), work)?;
        let qemu = match wanted.arch {
            Arch::Um => None,
            Arch::X86 | Arch::Arm | Arch::RiscV => Some(NewerQemu::fetch(wanted.arch, work)?),
        };
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        let mut archive = Initramfs::new()?;
        archive.program("init", include_bytes!("init.sh"))?;
        archive.program("bin/busybox", &read(Path::new(BUSYBOX))?)?;
        for module in MODULES {
            archive.program(module, &read(&wanted.modules(work).join(module))?)?;
        }
        let initramfs = archive.finish()?;
        Ok(Self {
            kernel,
            qemu,
            huge: false,
            own: if wanted.name == UML_DEBUG.name { 64 } else { 0 },
            initramfs,
            words: words.to_vec(),
        })
    }

    /// True when guests are machines of QEMU.
    pub const fn emulated(&self) -> bool {
        self.qemu.is_some()
    }
}

/// The device of a guest's balloon.
#[derive(Clone, Copy, Debug)]
pub enum Attached<'a> {
    /// A vhost-user device at this socket.
    VhostUser(&'a Path),
    /// QEMU's own.
    Qemu {
        /// The socket at which it is led.
        monitor: &'a Path,
        /// True if it has free page reporting.
        reporting: bool,
    },
}

/// A guest while it runs; it and all its processes are ended when it is dropped.
#[derive(Debug)]
pub struct Guest {
    kernel: Child,
    commands: ChildStdin,
    lines: mpsc::Receiver<String>,
    next: u32,
    /// The one that is the guest's memory, by its link below `/proc`.
    memory: PathBuf,
    directory: TempDir,
}

/// Starts the kernel, with as many registers as it knows of.
fn start(mut kernel: Command) -> anyhow::Result<Child> {
    if !registers::are_too_many() {
        return kernel
            .spawn()
            .context("the guest's kernel cannot be started");
    }
    // Refusals hold for a thread, and for what it starts.
    let started = thread::spawn(move || {
        registers::refuse()?;
        kernel
            .spawn()
            .context("the guest's kernel cannot be started")
    });
    started
        .join()
        .map_err(|_| anyhow!("the guest's kernel cannot be started"))?
}

impl Guest {
    /// Boots a guest of `mib` MiB with this balloon, with more `words` for the kernel. The driver is not loaded yet.
    ///
    /// # Errors
    ///
    /// When it does not come up in time; what it said is in the message.
    pub fn boot(
        parts: &Parts,
        mib: u32,
        balloon: Attached<'_>,
        words: &[&str],
    ) -> anyhow::Result<Self> {
        let mib = mib + parts.own;
        let directory = tempfile::tempdir()?;
        let initramfs = directory.path().join("initramfs");
        fs::write(&initramfs, &parts.initramfs)?;
        let log = directory.path().join("log");
        let words = parts
            .words
            .iter()
            .map(String::as_str)
            .chain(words.iter().copied());
        let mut kernel = match (&parts.qemu, balloon) {
            (Some(qemu), _) => {
                let words = words.collect::<Vec<_>>().join(" ");
                qemu::command(qemu, parts, &initramfs, mib, balloon, &log, &words)
            }
            (None, Attached::VhostUser(socket)) => {
                let mut kernel = Command::new(&parts.kernel);
                kernel
                    .arg(format!("mem={mib}M"))
                    .arg(format!("initrd={}", initramfs.display()))
                    .arg(format!("uml_dir={}", directory.path().display()))
                    .args(["umid=guest", "con=null", "con0=fd:0,fd:1", "terminal=tty0"])
                    .args(["ssl=null", "ssl0=null,fd:2", "console=ttyS0", "panic=1"])
                    // 5: the balloon's type of device.
                    .arg(format!("virtio_uml.device={}:5", socket.display()))
                    .args(registers::words())
                    .args(words)
                    .stderr(File::create(&log)?);
                kernel
            }
            (None, Attached::Qemu { .. }) => bail!("User-Mode Linux has no device of QEMU's"),
        };
        kernel
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        let mut kernel = start(kernel)?;
        let pipes = (kernel.stdin.take(), kernel.stdout.take());
        let (sender, lines) = mpsc::channel();
        let (Some(commands), Some(output)) = pipes else {
            bail!("the guest has no console");
        };
        // Ends with the guest, which closes its output.
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut bytes = Vec::new();
            while output
                .read_until(b'\n', &mut bytes)
                .is_ok_and(|len| len > 0)
            {
                let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                if sender.send(line).is_err() {
                    break;
                }
                bytes.clear();
            }
        });
        let mut guest = Self {
            kernel,
            commands,
            lines,
            next: 0,
            memory: PathBuf::new(),
            directory,
        };
        guest.answer("#ready")?;
        guest.memory = guest.find_memory()?;
        Ok(guest)
    }

    /// Has the guest do `command`, a line of its shell, and returns what it said.
    ///
    /// # Errors
    ///
    /// When it fails, or does not end in time.
    pub fn run(&mut self, command: &str) -> anyhow::Result<String> {
        self.next += 1;
        let number = self.next;
        writeln!(self.commands, "{number} {command}").context("the guest has gone")?;
        let (said, status) = self.answer(&format!("#{number} "))?;
        if status != "0" {
            self.complaints()?;
        }
        ensure!(
            status == "0",
            "`{command}` ended with status {status} in the guest: {said}; its kernel:\n  | {}",
            self.tail()
        );
        Ok(said)
    }

    /// [`run`](Self::run), and a number of what it said.
    ///
    /// # Errors
    ///
    /// Errors of [`run`](Self::run), and when it said something else.
    pub fn number(&mut self, command: &str) -> anyhow::Result<u64> {
        let said = self.run(command)?;
        said.trim()
            .parse()
            .with_context(|| format!("`{command}` said {said:?}"))
    }

    /// True when its devices can be removed, and it can sleep.
    ///
    /// # Errors
    ///
    /// When it does not say.
    pub fn has_pci(&mut self) -> anyhow::Result<bool> {
        Ok(self.run("ls /sys/bus")?.contains("pci"))
    }

    /// Bytes of the guest's memory that the machine holds pages for.
    ///
    /// # Errors
    ///
    /// When the guest has gone.
    pub fn held(&self) -> anyhow::Result<u64> {
        let memory = fs::metadata(&self.memory).context("the guest's memory")?;
        // Always of 512 bytes (stat(2)).
        Ok(512 * memory.blocks())
    }

    /// Bytes of the guest's memory.
    ///
    /// # Errors
    ///
    /// When the guest has gone.
    pub fn memory_bytes(&self) -> anyhow::Result<u64> {
        Ok(fs::metadata(&self.memory)
            .context("the guest's memory")?
            .len())
    }

    /// Log of the kernel.
    pub fn log(&self) -> String {
        let said = fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Fails when the kernel complained of itself: checks that it makes when it is built with them, and others.
    ///
    /// # Errors
    ///
    /// The first complaint, with what was said last.
    pub fn complaints(&self) -> anyhow::Result<()> {
        const SIGNS: [&str; 9] = [
            "BUG",
            "WARNING:",
            "Oops",
            "KASAN",
            "memory corruption",
            "page allocation failure",
            "bad page",
            "possible recursive locking",
            "possible circular locking",
        ];
        let log = self.log();
        let mut lines = log.lines();
        let bad = lines.find(|line| SIGNS.iter().any(|sign| line.contains(sign)));
        match bad {
            Some(line) => bail!("the guest's kernel complains: {line}\n  | {}", self.tail()),
            None => Ok(()),
        }
    }

    /// The end of what the kernel said, for people.
    pub fn tail(&self) -> String {
        let said = self.log();
        let lines: Vec<&str> = said.lines().collect();
        let last = lines.get(lines.len().saturating_sub(TAIL)..);
        last.unwrap_or_default().join("\n  | ")
    }

    /// Output up to the line that begins with `end`, and the rest of this line.
    fn answer(&mut self, end: &str) -> anyhow::Result<(String, String)> {
        let deadline = Instant::now() + PATIENCE;
        let mut said = String::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => match line.strip_prefix(end) {
                    Some(rest) => return Ok((said, rest.to_owned())),
                    None => said = said + &line + "\n",
                },
                Err(RecvTimeoutError::Timeout) => bail!(
                    "the guest did not say {end:?} in {} s, but {said:?}; its kernel:\n  | {}",
                    PATIENCE.as_secs(),
                    self.tail()
                ),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.kernel.wait()?;
                    bail!(
                        "the guest has gone ({status}); its kernel:\n  | {}",
                        self.tail()
                    )
                }
            }
        }
    }

    /// The largest of the files that it has open and that have no name any more.
    fn find_memory(&self) -> anyhow::Result<PathBuf> {
        let open = format!("/proc/{}/fd", self.kernel.id());
        let files = fs::read_dir(&open).with_context(|| open.clone())?;
        let unlinked = files.filter_map(|file| {
            let path = file.ok()?.path();
            let target = fs::read_link(&path).ok()?;
            let gone = target
                .as_os_str()
                .as_encoded_bytes()
                .ends_with(b" (deleted)");
            let size = fs::metadata(&path).ok()?.len();
            gone.then_some((size, path))
        });
        let largest = unlinked.max_by_key(|(size, _)| *size);
        largest
            .map(|(_, path)| path)
            .context("the guest's memory is no file")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let group = i32::try_from(self.kernel.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            // Nothing in it is worth an orderly end.
            let _ = kill_process_group(group, Signal::KILL);
            let _ = self.kernel.wait();
            // Its processes let go of the guest's memory by themselves, and soon.
            let deadline = Instant::now() + PATIENCE;
            while test_kill_process_group(group).is_ok() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Asks `step` again and again until it has an answer.
///
/// # Errors
///
/// Errors of `step`, and when it has no answer after [`PATIENCE`]: `what` says what was waited for.
pub fn until<T>(
    what: &str,
    mut step: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = step()? {
            return Ok(done);
        }
        ensure!(
            Instant::now() < deadline,
            "{what} did not happen in {} s",
            PATIENCE.as_secs()
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use conformance::kernel::UML;

    use super::*;

    #[test]
    fn a_module_of_which_nothing_says_what_it_was_built_of_is_not_packed() {
        let work = tempfile::tempdir().unwrap();
        let work = work.path();
        let refusal = || format!("{:#}", Parts::find(UML, work, &[]).unwrap_err());
        assert_eq!(
            refusal(),
            "there is no such kernel: `cargo xtask linux --kernel um`"
        );
        fs::create_dir_all(UML.modules(work)).unwrap();
        fs::write(UML.image(work), "").unwrap();
        let options = UML.directory(work).join("built-from.config");
        fs::write(options, UML.built_from()).unwrap();
        fs::write(UML.modules(work).join(MODULE), "").unwrap();
        let said = refusal();
        assert!(
            said.starts_with("`cargo xtask linux --kernel um` comes first: there is no record"),
            "{said}"
        );
    }
}
