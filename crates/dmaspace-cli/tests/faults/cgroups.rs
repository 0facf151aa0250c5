//! A control group that leaves less than is asked for: the kernel would kill the program where it touches the
//! page, so that it has to be refused before.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, PROGRAM, behind, refused, report, skipped, text};
use crate::turn;

/// A control group with a limit on memory, in another one of the same limit and without one of its own.
struct Group {
    outer: PathBuf,
    inner: PathBuf,
}

impl Group {
    /// `None`, and said, where groups cannot be made.
    fn new(test: &str, limit: u64) -> Option<Self> {
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        for (place, file) in places {
            let name = format!("dmaspace-test-{}", std::process::id());
            let outer = Path::new(place).join(name);
            let inner = outer.join("inner");
            // In version 2 a controller must be handed on by name.
            let _ = fs::write(Path::new(place).join("cgroup.subtree_control"), "+memory");
            if fs::create_dir(&outer).is_err() {
                continue;
            }
            let group = Self { outer, inner };
            let limited = fs::write(group.outer.join(file), limit.to_string());
            if limited.is_ok() && fs::create_dir(&group.inner).is_ok() {
                return Some(group);
            }
        }
        skipped(test, "requires root and control groups that can be made");
        None
    }

    /// The program in the inner group.
    fn command(&self, arguments: &[&str]) -> assert_cmd::Command {
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        let wrapper = ["sh", "-c", enter, text(&self.inner)];
        behind(&wrapper, Path::new(PROGRAM), arguments)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let begun = Instant::now();
        for group in [&self.inner, &self.outer] {
            // Processes that have ended leave a little later.
            while fs::remove_dir(group).is_err() && group.exists() && begun.elapsed() < PATIENCE {
                sleep(Duration::from_millis(10));
            }
        }
    }
}

#[test]
fn what_a_control_group_does_not_leave_is_refused_with_numbers_and_what_it_leaves_is_used() {
    let _turn = turn();
    let name =
        "what_a_control_group_does_not_leave_is_refused_with_numbers_and_what_it_leaves_is_used";
    let Some(group) = Group::new(name, 48 << 20) else {
        return;
    };
    let outer = text(&group.outer);
    let backing = ["check", "--backing", "memfd"];
    let found = report(group.command(&[&backing[..], &["--json"]].concat()));
    let size = found["memory"]["size_bytes"].as_u64().unwrap();
    assert!((8 << 20..48 << 20).contains(&size), "{size}");
    let reason = found["memory"]["size_reason"].as_str().unwrap();
    let suits = reason.starts_with("a part of the ") && reason.contains(outer);
    assert!(suits, "{reason}");
    report(group.command(&[&backing[..], &["--json", "--size", "32M"]].concat()));
    for (given, needs) in [
        (
            "48M",
            "needs 59 MiB, with 11 MiB for tables and threads, and ",
        ),
        (
            "64M",
            "needs 76 MiB, with 12 MiB for tables and threads, and ",
        ),
    ] {
        let said = refused(group.command(&[&backing[..], &["--size", given]].concat()));
        assert!(said.starts_with(needs), "{said}");
        let leaves = format!("the control group {outer} leaves ");
        assert!(said.contains(&leaves), "{said}");
        assert!(said.contains(" (48 MiB allowed, "), "{said}");
    }
}
