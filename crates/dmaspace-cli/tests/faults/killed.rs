//! `SIGKILL` in the middle: no pins, no charges, no processes, no files.
//!
//! The kernel drops pins of a process that is gone some time later, so that it is asked again and
//! again. Pins are looked for by the charge of a user who has no other processes: `io_unaccount_mem()`
//! of `io_uring/rsrc.c` is called where the pages are unpinned. Is nearly all of the limit to be had
//! again, nothing is pinned.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::common::{Ordinary, PATIENCE, PROGRAM, names, run, text};
use crate::turn;

/// Bytes that the user may lock, and more than half of that.
const LIMIT: u64 = 8 << 20;
const NEARLY: &str = "5M";

/// A directory for everybody.
pub(crate) fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    directory
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    let status = child.wait().unwrap();
    // It may have come to its end before.
    assert!(
        status.signal() == Some(9) || status.success(),
        "{status} of a killed process"
    );
}

/// Waits until a line of what it says on stderr holds `words`; what is said later is dropped.
fn until_said(child: &mut Child, words: &str) {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let found = lines.any(|line| line.unwrap().contains(words));
    assert!(found, "it never says {words:?}");
}

/// A moment between nothing and `most` after, another one with each run.
fn jitter(most: Duration) -> Duration {
    let now = std::time::SystemTime::now();
    let nanos = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    most.mul_f64(f64::from(nanos.subsec_nanos() % 1000) / 1000.0)
}

/// Identities of the processes of a user.
fn processes(user: &str) -> Vec<u32> {
    let of_user = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        let mut lines = status.iter().flat_map(|status| status.lines());
        lines.any(|line| line.split_whitespace().take(2).eq(["Uid:", user]))
    };
    let all = names(Path::new("/proc")).into_iter();
    all.filter_map(|name| name.parse().ok())
        .filter(of_user)
        .collect()
}

/// No process of the user is there any more, and nothing is pinned.
fn nothing_is_left(user: &Ordinary, what: &str) {
    let begun = Instant::now();
    let patience = Duration::from_secs(600);
    while !processes(user.user()).is_empty() {
        assert!(begun.elapsed() < patience, "{what}: a process goes on");
        sleep(Duration::from_millis(5));
    }
    loop {
        let (_, said, status) = run(user.command(LIMIT, &["check", "--size", NEARLY]));
        if status == Some(0) {
            return;
        }
        assert!(begun.elapsed() < patience, "{what}: {said}");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_check_that_is_killed_at_any_step_leaves_nothing_pinned_and_no_file() {
    let _turn = turn();
    let name = "a_check_that_is_killed_at_any_step_leaves_nothing_pinned_and_no_file";
    let Some(user) = Ordinary::new(name, 8) else {
        return;
    };
    let directory = directory();
    let file = directory.path().join("report.json");
    for (backing, step) in [
        ("memfd", "attach"),
        ("4k", "find runs"),
        ("4k", "DMA"),
        ("memfd", "hole"),
        ("4k", "harvest"),
        ("memfd", "release"),
        ("4k", "restore"),
        ("memfd", "unmap"),
        ("4k", "close"),
    ] {
        let options = ["-v", "check", "--size", "4M", "--backing", backing];
        let options = [&options[..], &["--report", text(&file)]].concat();
        let mut child = user.spawn(LIMIT, &options);
        until_said(&mut child, &format!("check::job: {step}"));
        sleep(jitter(Duration::from_millis(20)));
        kill(&mut child);
        nothing_is_left(&user, step);
        let left = names(directory.path());
        assert!(left.is_empty() || left == ["report.json"], "{left:?}");
    }
}

/// A balloon's daemon that listens, with a directory of its own for temporary files.
pub(crate) fn daemon(socket: &Path, temporary: &Path) -> (Child, impl FnMut(&str) -> String) {
    let mut command = Command::new(PROGRAM);
    command.args(["balloon", "--socket", text(socket)]);
    command.env("TMPDIR", temporary).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = move |words: &str| {
        let found = lines.by_ref().map(Result::unwrap);
        let mut found = found.skip_while(|line| !line.contains(words));
        found.next().unwrap_or_else(|| panic!("no {words:?}"))
    };
    (child, said)
}

/// A front end that has asked for the features and has got them.
fn front_end(socket: &Path) -> UnixStream {
    let mut front = UnixStream::connect(socket).unwrap();
    front.set_read_timeout(Some(PATIENCE)).unwrap();
    let get_features = [1u32, 1, 0];
    let bytes: Vec<u8> = get_features
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    front.write_all(&bytes).unwrap();
    front.read_exact(&mut [0; 20]).unwrap();
    front
}

#[test]
fn a_daemon_that_is_killed_leaves_a_socket_that_the_next_one_replaces_and_nothing_else() {
    let _turn = turn();
    let (directory, temporary) = (directory(), directory());
    let socket = directory.path().join("balloon");
    for connected in [false, true] {
        let (mut child, mut said) = daemon(&socket, temporary.path());
        said("listening on");
        let front = connected.then(|| front_end(&socket));
        if connected {
            said("connected");
            sleep(jitter(Duration::from_millis(5)));
        }
        kill(&mut child);
        if let Some(mut front) = front {
            // The monitor sees it.
            front.set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(front.read(&mut [0; 16]).unwrap_or(0), 0);
        }
        assert_eq!(names(directory.path()), ["balloon"]);
        assert_eq!(names(temporary.path()), [""; 0]);
    }
    // The next one takes its place, and loses front ends without ado.
    let (mut child, mut said) = daemon(&socket, temporary.path());
    said("listening on");
    for _ in 0..3 {
        drop(front_end(&socket));
        said("disconnected");
    }
    let asked = Command::new("kill").arg(child.id().to_string()).status();
    assert!(asked.unwrap().success());
    assert!(child.wait().unwrap().success());
    assert_eq!(names(directory.path()), [""; 0]);
    assert_eq!(names(temporary.path()), [""; 0]);
}
