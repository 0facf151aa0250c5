//! `SIGKILL` in the middle: no pins, no charges, no huge pages, no processes, no files.
//!
//! The kernel drops pins of a process that is gone some time later, so that it is asked again and
//! again. Pins are looked for by the charge of a user who has no other processes: `io_unaccount_mem()`
//! of `io_uring/rsrc.c` is called where the pages are unpinned. Is nearly all of the limit to be had
//! again, nothing is pinned.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::common::{
    Ordinary, PATIENCE, PROGRAM, available, end, is_root, names, pool, pool_is_again, run, skipped,
    spawn, text,
};
use crate::turn;

/// What the user may lock, and nearly all of that.
const LIMIT: u64 = 8 << 20;
const NEARLY: &str = "7M";

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
        let (_, said, status) = run(user.command(LIMIT, &["map", "--size", NEARLY]));
        if status == Some(0) {
            return;
        }
        assert!(begun.elapsed() < patience, "{what}: {said}");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_map_that_is_killed_at_any_stage_leaves_nothing_pinned_and_no_file() {
    let _turn = turn();
    let name = "a_map_that_is_killed_at_any_stage_leaves_nothing_pinned_and_no_file";
    let Some(user) = Ordinary::new(name, 8) else {
        return;
    };
    let directory = directory();
    let svg = directory.path().join("layout.svg");
    let begin = |backing, stage| {
        let options = ["-v", "map", "--size", NEARLY, "--backing", backing];
        let mut child = user.spawn(LIMIT, &[&options[..], &["--svg", text(&svg)]].concat());
        until_said(&mut child, &format!("progress: {stage} "));
        child
    };
    // From the check on to the end, with unmap and unpin shortly before it.
    let mut child = begin("4k", "DMA check");
    let begun = Instant::now();
    assert!(child.wait().unwrap().success());
    let (rest, soon) = (begun.elapsed(), Duration::from_millis(2));
    fs::remove_file(&svg).unwrap();
    for (backing, stage, after, most) in [
        ("4k", "populate", Duration::ZERO, soon),
        ("memfd", "pin", Duration::ZERO, soon),
        ("4k", "map", Duration::ZERO, soon),
        ("memfd", "DMA check", Duration::ZERO, rest / 2),
        ("4k", "DMA check", rest / 10 * 8, rest / 10),
        ("memfd", "DMA check", rest / 10 * 9, rest / 10),
    ] {
        let mut child = begin(backing, stage);
        sleep(after + jitter(most));
        kill(&mut child);
        nothing_is_left(&user, stage);
        let left = names(directory.path());
        assert!(left.is_empty() || left == ["layout.svg"], "{left:?}");
    }
}

/// A small life.
const LIFE: [&str; 6] = ["life", "--size", "1M", "--backing", "memfd", "--offsets"];

#[test]
fn a_life_that_is_killed_takes_its_second_process_along() {
    let _turn = turn();
    let name = "a_life_that_is_killed_takes_its_second_process_along";
    let Some(user) = Ordinary::new(name, 9) else {
        return;
    };
    // Balloon and handover are in it.
    let begun = Instant::now();
    let (status, said) = end(spawn(&LIFE));
    assert!(status.success(), "{said}");
    let all = begun.elapsed();
    for eighth in [2, 5] {
        let mut child = user.spawn(LIMIT, &LIFE);
        sleep(all * eighth / 8 + jitter(all / 8));
        kill(&mut child);
        nothing_is_left(&user, &format!("killed at {eighth}/8 of {all:?}"));
    }
    // As soon as there are two.
    let mut child = user.spawn(LIMIT, &LIFE);
    if second(&user, &mut child).is_some() {
        sleep(jitter(Duration::from_millis(20)));
    }
    kill(&mut child);
    nothing_is_left(&user, "killed in the handover");
}

/// The process that a life has started, once it is there.
fn second(user: &Ordinary, first: &mut Child) -> Option<u32> {
    while first.try_wait().unwrap().is_none() {
        let found = processes(user.user());
        if let Some(second) = found.into_iter().find(|pid| *pid != first.id()) {
            return Some(second);
        }
    }
    None
}

#[test]
fn a_life_whose_second_process_is_killed_says_so_and_leaves_nothing() {
    let _turn = turn();
    let name = "a_life_whose_second_process_is_killed_says_so_and_leaves_nothing";
    let Some(user) = Ordinary::new(name, 7) else {
        return;
    };
    for more in [0, 20] {
        let mut child = user.spawn(LIMIT, &LIFE);
        let Some(second) = second(&user, &mut child) else {
            continue;
        };
        sleep(jitter(Duration::from_millis(20)) + Duration::from_millis(more));
        let mut killed = Command::new("kill");
        killed.args(["-KILL", &second.to_string()]);
        let _ = killed.stderr(Stdio::null()).status().unwrap();
        let (status, said) = end(child);
        // It may have come to its end before.
        if !status.success() {
            assert_eq!(status.code(), Some(1), "{said}");
            let expected = "dmaspace: the second process does not own the address space: ";
            assert!(said.starts_with(expected), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        nothing_is_left(&user, &format!("the second process after {more} ms"));
    }
}

#[test]
fn a_pool_of_huge_pages_is_put_back_by_its_keeper() {
    let _turn = turn();
    let name = "a_pool_of_huge_pages_is_put_back_by_its_keeper";
    if !is_root() || available() < 2 << 30 {
        return skipped(name, "requires root and 2 GiB of memory");
    }
    let before = pool();
    let options = |command| [command, "--size", "256M", "--backing", "hugetlb-2m"];
    let mut raised = 0;
    for command in ["map", "life"] {
        for millis in [5, 20, 60, 150, 300] {
            let mut program = Command::new(PROGRAM);
            program.args(options(command)).stdin(Stdio::null());
            program.stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = program.process_group(0).spawn().unwrap();
            sleep(Duration::from_millis(millis));
            raised += u32::from(pool() > before);
            // Not only the process: all of its group, as a terminal or a service manager does it.
            let group = format!("-{}", child.id());
            let killed = Command::new("kill").args(["-KILL", "--", &group]).status();
            assert!(killed.unwrap().success());
            child.wait().unwrap();
            pool_is_again(before);
        }
    }
    if raised == 0 {
        skipped(name, "the pool was never seen raised");
    }
}

/// The process that keeps the pool of `program`, once it is there.
fn keeper(program: &mut Child) -> Option<u32> {
    while program.try_wait().unwrap().is_none() {
        let parent = format!("PPid:\t{}", program.id());
        let is_keeper = |pid: &u32| {
            let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
            let (status, command) = (read("status"), read("cmdline"));
            status.is_ok_and(|status| status.lines().any(|line| line == parent))
                && command.is_ok_and(|command| command.contains("pool-keeper"))
        };
        let all = names(Path::new("/proc")).into_iter();
        let mut all = all.filter_map(|name| name.parse().ok());
        if let Some(keeper) = all.find(is_keeper) {
            return Some(keeper);
        }
    }
    None
}

#[test]
fn a_program_whose_keeper_is_killed_puts_the_pool_back_itself_and_names_the_cause() {
    let _turn = turn();
    let name = "a_program_whose_keeper_is_killed_puts_the_pool_back_itself_and_names_the_cause";
    if !is_root() || available() < 2 << 30 {
        return skipped(name, "requires root and 2 GiB of memory");
    }
    let before = pool();
    let mut named = 0;
    for (command, size, moments) in [("map", "64M", &[0, 2, 10, 100][..]), ("life", "32M", &[50])] {
        for &millis in moments {
            let options = [command, "--size", size, "--backing", "hugetlb-2m"];
            let mut child = spawn(&options);
            let Some(keeper) = keeper(&mut child) else {
                continue;
            };
            sleep(Duration::from_millis(millis));
            let mut killed = Command::new("kill");
            killed.args(["-KILL", &keeper.to_string()]);
            let _ = killed.stderr(Stdio::null()).status().unwrap();
            let (status, said) = end(child);
            pool_is_again(before);
            // The keeper may have done its part before.
            if !status.success() {
                assert_eq!(status.code(), Some(1), "{said}");
                let expected = "dmaspace: the process that keeps the pool of huge pages ended with \
                                signal: 9 (SIGKILL); this process has restored the pool\n";
                assert_eq!(said, expected);
                named += 1;
            }
        }
    }
    if named == 0 {
        skipped(name, "no keeper was killed in time");
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
