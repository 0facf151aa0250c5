//! `dmaspace check` on real memory, as a program: what it says, and how it ends.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{
    Ordinary, PATIENCE, PROGRAM, behind, dmaspace, end, has, is_root, names, refused, report, run,
    skipped, spawn, text,
};
use dmaspace::hostmem::Machine;
use serde_json::Value;

/// The machine's memory is one, its pool is one, and so is an ordinary user's limit: jobs take
/// turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed has let go of everything all the same.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Small enough for any limit on locked memory, large enough for a huge page.
const SMALL: &str = "4M";

fn number(report: &Value, pointer: &str) -> u64 {
    let value = report.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("no number at {pointer}: {report:#}"))
}

fn right(report: &Value, size: u64, devices: u64) {
    assert_eq!(number(report, "/memory/size_bytes"), size);
    assert_eq!(number(report, "/dma/devices"), devices);
    for zero in ["wrong_bytes", "faults_unexpected", "reached_in_holes"] {
        assert_eq!(number(report, &format!("/dma/{zero}")), 0);
    }
    assert!(number(report, "/dma/read_bytes") >= size * devices);
    assert!(number(report, "/memory/charged_bytes") >= size);
    for step in report["steps"].as_array().unwrap() {
        assert!(
            step["right"] == true && number(step, "/took_ns") > 0,
            "{step}"
        );
    }
}

#[test]
fn without_options_it_does_all_and_reports_it_on_one_screen() {
    let _turn = turn();
    let (stdout, stderr, status) = run(dmaspace(&["check"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    assert!(stdout.lines().count() <= 40, "{stdout}");
    let last = "OK  every byte was right, and everything was given back";
    assert_eq!(stdout.lines().last(), Some(last));
    assert!(!stdout.contains('\x1b'), "no colour in a pipe");
}

#[test]
fn every_largest_leaf_and_many_devices() {
    let _turn = turn();
    for leaf in ["4k", "2m", "1g"] {
        let options = ["check", "--json", "--size", SMALL, "--max-leaf", leaf];
        let report = report(dmaspace(&options));
        right(&report, 4 << 20, 2);
        if leaf == "4k" {
            let leaves = report.pointer("/tables/leaves").unwrap();
            assert_eq!(leaves.as_array().unwrap().len(), 1);
            assert_eq!(number(&report, "/tables/leaves/0/count"), 1024);
        }
    }
    let options = ["check", "--json", "--size", "64K", "--devices", "256"];
    right(&report(dmaspace(&options)), 64 << 10, 256);
}

#[test]
fn tables_are_placed_as_they_are_wanted_or_it_says_so() {
    let _turn = turn();
    let nodes = Machine::probe().unwrap().nodes;
    let near = format!("near:{}", nodes[0]);
    for policy in ["shared", "per-node", &near] {
        let options = ["--size", SMALL, "--placement", policy];
        let found = report(dmaspace(&[&["check", "--json"], &options[..]].concat()));
        right(&found, 4 << 20, 2);
        assert_eq!(found.pointer("/placement/policy").unwrap(), policy);
        assert!(number(&found, "/placement/domains/0/devices") > 0);
        let (stdout, stderr, status) = run(dmaspace(&[&["check"], &options[..]].concat()));
        assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
        assert!(
            stdout.contains(&format!("\n  placement   {policy}: ")),
            "{stdout}"
        );
        assert!(!stdout.contains("  misplaced "), "{stdout}");
    }
    let refusal = refused(dmaspace(&["check", "--placement", "near:4095"]));
    let start = format!(
        "the machine has no memory on node 4095; nodes that have: {}",
        nodes[0]
    );
    assert!(refusal.starts_with(&start), "{refusal}");
    let (_, stderr, status) = run(dmaspace(&["check", "--placement", "near"]));
    assert_eq!(status, Some(2));
    assert!(
        stderr.contains("`shared`, `per-node`, or `near:N`"),
        "{stderr}"
    );
}

#[test]
fn an_ordinary_user_gets_what_the_limit_leaves_and_the_reason() {
    let _turn = turn();
    let name = "an_ordinary_user_gets_what_the_limit_leaves_and_the_reason";
    let Some(user) = Ordinary::new(name, 3) else {
        return;
    };
    let found = report(user.command(8 << 20, &["check", "--json"]));
    let size = number(&found, "/memory/size_bytes");
    assert!((1 << 20..=8 << 20).contains(&size), "{size}");
    right(&found, size, 2);
    assert!(found.pointer("/memory/size_reason").unwrap().is_string());
    assert_ne!(found.pointer("/memory/addresses").unwrap(), "pagemap");
    let (stdout, _, status) = run(user.command(8 << 20, &["check", "--size", SMALL]));
    assert_eq!(status, Some(0));
    assert!(stdout.contains("NOT REAL"), "{stdout}");
    assert!(stdout.contains("limit 8 MiB"), "{stdout}");
    let options = ["check", "--json", "--size", SMALL, "--backing", "memfd"];
    right(&report(user.command(8 << 20, &options)), 4 << 20, 2);
    // A part of it could not be unpinned.
    let refusal = refused(user.command(8 << 20, &["check", "--size", "7M"]));
    assert!(refusal.contains("needs 7 MiB, and 2 MiB more"), "{refusal}");
    // The default of many distributions for long.
    let found = report(user.command(64 << 10, &["check", "--json"]));
    let size = number(&found, "/memory/size_bytes");
    assert!((16 << 10..64 << 10).contains(&size), "{size}");
    right(&found, size, 2);
}

/// The report is whole, and beside it lies nothing.
#[test]
fn a_report_is_written_and_printed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    for _ in 0..2 {
        let options = ["check", "--size", "64K", "--report", text(&path)];
        let (stdout, stderr, status) = run(dmaspace(&options));
        assert_eq!((stderr.as_str(), status), ("", Some(0)));
        let written = fs::read_to_string(&path).unwrap();
        let (shown, printed) = stdout.split_once("\nwritten to ").unwrap();
        assert!(shown.ends_with("everything was given back\n"), "{stdout}");
        assert_eq!(printed.split_once(":\n").unwrap().1, written);
        let json: Value = serde_json::from_str(&written).unwrap();
        assert!(number(&json, "/times/0/map_ns") > 0);
        assert_eq!(names(directory.path()), ["report.json"]);
    }
    let both = ["check", "--json", "--report", text(&path)];
    assert_eq!(run(dmaspace(&both)).2, Some(2));
}

#[test]
fn a_report_on_a_full_device_is_refused_and_the_result_is_printed_all_the_same() {
    let _turn = turn();
    let options = ["check", "--size", "64K", "--report", "/dev/full"];
    let (stdout, stderr, status) = run(dmaspace(&options));
    assert_eq!(status, Some(2));
    assert!(stdout.contains("OK  every byte was right"));
    let expected = "dmaspace: cannot write /dev/full: No space left on device (os error 28)\n";
    assert_eq!(stderr, expected);
}

#[test]
fn a_full_disk_keeps_the_old_report_and_nothing_half_written() {
    let _turn = turn();
    let name = "a_full_disk_keeps_the_old_report_and_nothing_half_written";
    if !is_root() || !has(&["unshare", "mount"]) {
        return skipped(name, "requires root, unshare and mount");
    }
    let directory = tempfile::tempdir().unwrap();
    // A disk of its own, in no other mount namespace, full but for the old report.
    let script = "mount -t tmpfs -o size=64k none \"$1\" && cd \"$1\" && echo old > old.json \
                  && { cat /dev/zero > rest 2> /dev/null; true; } \
                  && { \"$0\" check --size 64K --report old.json > /dev/null; echo \"status $?\"; \
                  \"$0\" check --size 64K --report new.json > /dev/null; echo \"status $?\"; \
                  ls -A; cat old.json; }";
    let mut command = Command::new("unshare");
    let command = command.args(["-m", "sh", "-c", script, PROGRAM, text(directory.path())]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    if !stderr.is_empty() && !stderr.contains("dmaspace") {
        return skipped(name, &stderr);
    }
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        stdout, "status 2\nstatus 2\nold.json\nrest\nold\n",
        "{stderr}"
    );
    assert_eq!(stderr.matches("No space left on device").count(), 2);
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
}

#[test]
fn a_full_stdout_is_reported_and_a_closed_one_is_fine() {
    let _turn = turn();
    for options in [
        &["check", "--size", SMALL][..],
        &["check", "--size", SMALL, "--json"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(PROGRAM)
            .args(options)
            .stdout(full)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(
            String::from_utf8(output.stderr).unwrap(),
            "dmaspace: cannot write to standard output: No space left on device (os error 28)\n"
        );

        let mut child = spawn(options);
        drop(child.stdout.take());
        let (status, stderr) = end(child);
        assert_eq!((stderr.as_str(), status.code()), ("", Some(0)));
    }
}

#[test]
fn a_full_stderr_does_not_matter() {
    let _turn = turn();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(PROGRAM);
    let status = command
        .args(["-v", "check", "--size", "999999T"])
        .stderr(full)
        .status();
    assert_eq!(status.unwrap().code(), Some(2));
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
    assert!(status.success());
}

/// A signal at a step under way, of which standard error tells on request.
#[test]
fn a_signal_ends_a_check_at_any_step_and_nothing_is_left() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    for (step, signals) in [
        ("attach", &["INT"][..]),
        ("DMA", &["INT", "INT", "TERM"]),
        ("harvest", &["HUP"]),
        ("restore", &["TERM"]),
    ] {
        let options = ["-v", "check", "--size", "32M", "--report", text(&path)];
        let mut child = spawn(&options);
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let words = format!("check::job: {step}");
        let reached = lines.any(|line| line.unwrap().contains(&words));
        assert!(reached, "it never comes to {step}");
        for signal_name in signals {
            signal(&child, signal_name);
        }
        let said = lines.map(Result::unwrap);
        let said: Vec<_> = said.filter(|line| line.starts_with("dmaspace: ")).collect();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{step}: {said:?}");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("dmaspace: interrupted"), "{said:?}");
        assert_eq!(names(directory.path()), [""; 0], "{step}");
    }
}

/// Output as a terminal sees it.
fn on_a_terminal(settings: &str, options: &str) -> Option<String> {
    if !has(&["script"]) {
        return None;
    }
    let command = format!("{settings} '{PROGRAM}' {options}");
    let arguments = ["-qec", &command, "/dev/null"];
    let mut command = assert_cmd::Command::new("script");
    command.args(arguments).timeout(PATIENCE);
    command.env_remove("NO_COLOR").env("TERM", "xterm-256color");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_terminal_shows_colour_and_the_step_under_way() {
    let _turn = turn();
    let name = "a_terminal_shows_colour_and_the_step_under_way";
    let Some(shown) = on_a_terminal("", "check --size 64K") else {
        return skipped(name, "takes script");
    };
    assert!(shown.contains("\x1b[1;32mOK\x1b[0m"), "{shown:?}");
    let (steps, rest) = shown.rsplit_once("\r\x1b[K").unwrap();
    assert!(steps.contains("restore"), "{steps:?}");
    assert!(
        rest.starts_with("  memory"),
        "nothing of it stays: {rest:?}"
    );
    let plain = on_a_terminal("NO_COLOR=1", "check --size 64K 2> /dev/null").unwrap();
    assert!(!plain.contains('\x1b'), "{plain:?}");
}

#[test]
fn what_is_being_done_is_reported_on_request() {
    let _turn = turn();
    for (flag, filter) in [(&["-v"][..], ""), (&[], "dmaspace=debug")] {
        let mut command = dmaspace(&[flag, &["check", "--size", "64K"]].concat());
        command.env("RUST_LOG", filter);
        let (_, stderr, status) = run(command);
        assert_eq!(status, Some(0));
        for stage in ["attach", "DMA", "restore"] {
            let line = format!("check::job: {stage}\n");
            assert!(stderr.contains(&line), "{stderr}");
        }
    }
    let mut command = dmaspace(&["check", "--size", "64K"]);
    command.env("RUST_LOG", "dmaspace=loud");
    let (_, stderr, status) = run(command);
    assert_eq!(status, Some(0));
    assert!(
        stderr.starts_with("dmaspace: RUST_LOG=dmaspace=loud is ignored: "),
        "{stderr}"
    );
}

#[test]
fn a_wrapper_is_no_obstacle() {
    let _turn = turn();
    let command = behind(
        &["env", "-i"],
        PROGRAM.as_ref(),
        &["check", "--json", "--size", "64K"],
    );
    right(&report(command), 64 << 10, 2);
}
