//! System calls that fail, each one once: strace puts the error in the place of the call.
//!
//! Left out are calls before our code begins (the loader and the runtime of Rust end the process there),
//! `brk`, which tells of a failure in another way than by an error, and the calls that end threads. strace
//! counts for each thread.

use std::collections::BTreeMap;
use std::process::{Command, Output};

use crate::common::{PROGRAM, has, skipped};
use crate::turn;

/// Calls, and an error that each may end in.
const CALLS: [(&str, &str); 26] = [
    ("openat", "EMFILE"),
    ("read", "EIO"),
    ("pread64", "EIO"),
    ("write", "ENOSPC"),
    ("statx", "EACCES"),
    ("mmap", "ENOMEM"),
    ("munmap", "ENOMEM"),
    ("mprotect", "ENOMEM"),
    ("madvise", "ENOMEM"),
    ("mlock", "ENOMEM"),
    ("mbind", "EIO"),
    ("move_pages", "ENOMEM"),
    ("memfd_create", "EMFILE"),
    ("ftruncate", "ENOSPC"),
    ("fallocate", "ENOSPC"),
    ("fcntl", "EPERM"),
    ("ioctl", "ENOTTY"),
    ("io_uring_setup", "ENOMEM"),
    ("io_uring_register", "ENOMEM"),
    ("sched_getaffinity", "EINVAL"),
    ("sched_setaffinity", "EINVAL"),
    ("getcpu", "EINVAL"),
    ("prlimit64", "EPERM"),
    ("clone3", "EAGAIN"),
    ("pipe2", "EMFILE"),
    ("poll", "EINTR"),
];

const JOBS: [&[&str]; 2] = [
    &["check", "--size", "64K", "--backing", "4k"],
    &["check", "--size", "64K", "--backing", "memfd"],
];

fn traced(options: &[&str], arguments: &[&str]) -> Output {
    let mut command = Command::new("strace");
    command.args(["-f", "-o", "/dev/null"]).args(options);
    command.arg(PROGRAM).args(arguments).env_remove("RUST_LOG");
    command.output().unwrap()
}

/// How often each call is made.
fn counts(arguments: &[&str]) -> Option<BTreeMap<String, u64>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = file.path().to_str().unwrap();
    let done = traced(&["-c", "-o", output], arguments);
    let table = std::fs::read_to_string(file.path()).unwrap();
    let rows = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let count = words.get(3)?.parse().ok()?;
        Some((words.last()?.to_string(), count))
    });
    let counts: BTreeMap<_, _> = rows.collect();
    (done.status.success() && counts.contains_key("openat")).then_some(counts)
}

/// Each call that is to fail: of which job, which one, and how.
fn faults() -> Option<Vec<(&'static [&'static str], String)>> {
    let before = counts(&["--version"])?;
    let mut faults = Vec::new();
    for job in JOBS {
        let counts = counts(job)?;
        for (call, error) in CALLS {
            let of = |counts: &BTreeMap<String, u64>| counts.get(call).copied().unwrap_or(0);
            for nth in of(&before) + 1..=of(&counts) {
                faults.push((job, format!("inject={call}:error={error}:when={nth}")));
            }
        }
    }
    Some(faults)
}

/// The job comes to its end, or says in a sentence why not.
fn look(job: &[&str], fault: &str) {
    let output = traced(&["-e", fault], job);
    let said = String::from_utf8_lossy(&output.stderr);
    let what = format!("{job:?} {fault}: {}: {said}", output.status);
    assert!(matches!(output.status.code(), Some(0..=2)), "{what}");
    assert!(said.lines().count() <= 1, "{what}");
    if said.is_empty() {
        // A step that was not done whole is no error, but the verdict of a check.
        let found = String::from_utf8_lossy(&output.stdout);
        let verdict = found.contains("\nWRONG ");
        assert_eq!(output.status.success(), !verdict, "{what}{found}");
    } else {
        let whole = said.starts_with("dmaspace: ") && said.ends_with('\n');
        assert!(whole && !output.status.success(), "{what}");
    }
}

#[test]
fn some_of_all_system_calls_that_fail_once_are_reported_or_do_not_matter() {
    let _turn = turn();
    let name = "some_of_all_system_calls_that_fail_once_are_reported_or_do_not_matter";
    let Some(faults) = has(&["strace"]).then(faults).flatten() else {
        return skipped(name, "takes strace, and that it may trace");
    };
    // Others with each run, unless that is to be as the one before.
    let step = (faults.len() / 8).max(1);
    let seed = std::env::var("PROPTEST_RNG_SEED").ok();
    let seed = seed.and_then(|seed| seed.parse().ok());
    let first = seed.unwrap_or_else(|| std::process::id() as usize) % step;
    for (job, fault) in faults.iter().skip(first).step_by(step) {
        look(job, fault);
    }
}

#[test]
#[ignore = "takes minutes: every system call, where the test above takes eight"]
fn every_system_call_that_fails_once_is_reported_or_does_not_matter() {
    let _turn = turn();
    let faults = faults().unwrap();
    assert!(faults.len() > 200, "{}", faults.len());
    for (job, fault) in &faults {
        look(job, fault);
    }
}
