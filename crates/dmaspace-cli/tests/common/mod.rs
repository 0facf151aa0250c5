//! Shared parts of the suites of the command line.

// Each suite is a program of its own and uses a part of this.
#![allow(dead_code, reason = "shared by several suites")]

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use tempfile::TempDir;

/// Nothing here takes nearly as long; a test that hangs must not hang the suite.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_dmaspace");

/// The program, with these arguments, and nothing of the caller's taste in output.
pub(crate) fn dmaspace(arguments: &[&str]) -> Command {
    clean(Command::new(PROGRAM), arguments)
}

/// The program behind another one that calls it.
pub(crate) fn behind(wrapper: &[&str], program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg(program);
    clean(command, arguments)
}

fn clean(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments).timeout(PATIENCE);
    command.env_remove("RUST_LOG").env_remove("NO_COLOR");
    command.env_remove("COLUMNS").env("LC_ALL", "C.UTF-8");
    command
}

/// Runs it and returns standard output, standard error and the status.
pub(crate) fn run(mut command: Command) -> (String, String, Option<i32>) {
    let output: Output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        text(output.stdout),
        text(output.stderr),
        output.status.code(),
    )
}

/// The report in JSON of a run that succeeded.
pub(crate) fn report(command: Command) -> serde_json::Value {
    let (stdout, stderr, status) = run(command);
    assert_eq!(status, Some(0), "{stderr}");
    assert_eq!(stderr, "");
    serde_json::from_str(&stdout).unwrap()
}

/// A refusal: status 2, nothing on stdout, one line on stderr, which is returned.
pub(crate) fn refused(command: Command) -> String {
    let (stdout, stderr, status) = run(command);
    assert_eq!(stdout, "");
    assert_eq!(status, Some(2), "{stderr}");
    let line = stderr.strip_suffix('\n').unwrap().to_string();
    assert!(!line.contains('\n'), "more than a sentence: {line}");
    line.strip_prefix("dmaspace: ").unwrap().to_string()
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// True when all these programs are there.
pub(crate) fn has(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    programs.iter().all(|program| {
        std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
    })
}

/// Says past the test harness, which keeps what passing tests print, that a test did nothing.
pub(crate) fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED {test}: {why}\n");
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// The program as an ordinary user with a limit on locked memory of its own; `None`, and said,
/// where that cannot be had.
pub(crate) struct Ordinary {
    directory: TempDir,
    user: String,
}

impl Ordinary {
    /// `nth` tells the users of one suite apart: the kernel counts locked memory by user.
    pub(crate) fn new(test: &str, nth: u32) -> Option<Self> {
        if !is_root() || !has(&["prlimit", "setpriv"]) {
            skipped(test, "requires root, prlimit and setpriv");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = directory.path().join("dmaspace");
        // Copied by another process: a child that another test forks meanwhile would inherit our
        // descriptor, and a file that is open for writing cannot be executed.
        let mut copy = Command::new("cp");
        copy.args([PROGRAM, text(&program)]).assert().success();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let user = 100_000 + std::process::id() % 100_000 * 10 + nth;
        Some(Self {
            directory,
            user: user.to_string(),
        })
    }

    /// The user's number.
    pub(crate) fn user(&self) -> &str {
        &self.user
    }

    pub(crate) fn command(&self, memlock: u64, arguments: &[&str]) -> Command {
        let wrapper = self.wrapper(memlock);
        let wrapper: Vec<_> = wrapper.iter().map(String::as_str).collect();
        let mut command = behind(&wrapper, &self.program(), arguments);
        command.current_dir("/");
        command
    }

    /// The program under way: the wrappers become it.
    pub(crate) fn spawn(&self, memlock: u64, arguments: &[&str]) -> Child {
        let wrapper = self.wrapper(memlock);
        let mut command = std::process::Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(self.program());
        command.args(arguments).current_dir("/");
        under_way(&mut command)
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("dmaspace")
    }

    fn wrapper(&self, memlock: u64) -> Vec<String> {
        let user = &self.user;
        let words = format!(
            "prlimit --memlock={memlock}:{memlock} setpriv --reuid {user} --regid {user} --clear-groups"
        );
        words.split(' ').map(str::to_owned).collect()
    }
}

/// The names in a directory.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(crate) fn text(path: &Path) -> &str {
    OsStr::to_str(path.as_os_str()).unwrap()
}

/// Bytes of memory that the machine could give.
pub(crate) fn available() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

/// Pages of 2 MiB in the machine's pool.
pub(crate) fn pool() -> u64 {
    let path = PathBuf::from("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    fs::read_to_string(path).map_or(0, |text| text.trim().parse().unwrap())
}

/// Waits for the pool's size: another process may be using the pool for a moment.
pub(crate) fn pool_is_again(before: u64) {
    let begun = Instant::now();
    while pool() != before {
        assert!(
            begun.elapsed() < PATIENCE,
            "the pool holds {} pages, not {before}",
            pool()
        );
        thread::sleep(Duration::from_millis(50));
    }
}

/// The program under way, with pipes for what it says.
pub(crate) fn spawn(options: &[&str]) -> Child {
    under_way(std::process::Command::new(PROGRAM).args(options))
}

fn under_way(command: &mut std::process::Command) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the end, but not for ever, and returns what was said on stderr.
pub(crate) fn end(mut child: Child) -> (ExitStatus, String) {
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
        }
        assert!(begun.elapsed() <= PATIENCE, "it does not end");
        thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    (status, said)
}
