//! `dmaspace map` on real memory.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{
    Ordinary, PATIENCE, PROGRAM, available, behind, dmaspace, end, has, is_root, names, pool,
    pool_is_again, refused, report, run, skipped, spawn, text,
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

fn check(report: &Value, size: u64, devices: u64) {
    assert_eq!(number(report, "/memory/size_bytes"), size);
    assert_eq!(number(report, "/dma/devices"), devices);
    assert_eq!(number(report, "/dma/wrong_bytes"), 0);
    assert_eq!(number(report, "/dma/faults"), 0);
    assert!(number(report, "/dma/read_bytes") >= size);
    assert!(number(report, "/dma/written_bytes") >= size);
    assert!(number(report, "/dma/neighbour_accesses") > 0);
    assert!(number(report, "/times/map_ns") > 0);
    assert!(number(report, "/charge/charged_bytes") >= size);
    let stretches = report.pointer("/layout").and_then(Value::as_array).unwrap();
    let mapped: u64 = stretches.iter().map(|s| number(s, "/len_bytes")).sum();
    assert_eq!(mapped, size);
}

#[test]
fn without_options_it_maps_and_says_what_happened() {
    let _turn = turn();
    let (stdout, stderr, status) = run(dmaspace(&["map"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    for section in ["memory", "charge", "tables", "times", "DMA check"] {
        assert!(stdout.lines().any(|line| line == section), "{stdout}");
    }
    let last = "OK  every byte was right, and everything was given back";
    assert_eq!(stdout.lines().last(), Some(last));
    assert!(!stdout.contains('\x1b'), "no colour in a pipe");
}

#[test]
fn every_format_and_every_largest_leaf() {
    let _turn = turn();
    for format in ["vtd-ss", "x86-64", "amdv1"] {
        for leaf in ["4k", "2m", "1g"] {
            let options = ["--size", SMALL, "--format", format, "--max-leaf", leaf];
            let report = report(dmaspace(&[&["map", "--json"], &options[..]].concat()));
            check(&report, 4 << 20, 2);
            assert_eq!(report.pointer("/tables/format").unwrap(), format);
            if leaf == "4k" {
                let leaves = report.pointer("/tables/leaves").unwrap();
                assert_eq!(leaves.as_array().unwrap().len(), 1);
                assert_eq!(number(&report, "/tables/leaves/0/count"), 1024);
                assert_eq!(number(&report, "/tables/leaves/0/from_bytes"), 4096);
            }
        }
    }
}

#[test]
fn every_backing_that_takes_no_pool() {
    let _turn = turn();
    for backing in ["4k", "thp", "memfd", "auto"] {
        let options = ["map", "--json", "--size", SMALL, "--backing", backing];
        let report = report(dmaspace(&options));
        check(&report, 4 << 20, 2);
        let reason = report.pointer("/memory/backing_reason").unwrap();
        assert_eq!(reason.is_string(), backing == "auto", "{report:#}");
    }
}

#[test]
fn one_device_three_and_many() {
    let _turn = turn();
    for devices in [1, 3, 256] {
        let name = devices.to_string();
        let size = if devices > 3 { "64K" } else { SMALL };
        let options = ["map", "--json", "--size", size, "--devices", &name];
        let report = report(dmaspace(&options));
        check(
            &report,
            if devices > 3 { 64 << 10 } else { 4 << 20 },
            devices,
        );
    }
}

#[test]
fn tables_are_placed_as_they_are_wanted_or_it_says_so() {
    let _turn = turn();
    let nodes = Machine::probe().unwrap().nodes;
    let near = format!("near:{}", nodes[0]);
    for policy in ["shared", "per-node", &near] {
        let options = ["--size", SMALL, "--placement", policy];
        let found = report(dmaspace(&[&["map", "--json"], &options[..]].concat()));
        check(&found, 4 << 20, 2);
        assert_eq!(found.pointer("/placement/policy").unwrap(), policy);
        assert!(number(&found, "/placement/domains/0/devices") > 0);
        let (stdout, stderr, status) = run(dmaspace(&[&["map"], &options[..]].concat()));
        assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
        assert!(
            stdout.contains(&format!("\nplacement\n  policy      {policy}: ")),
            "{stdout}"
        );
        assert!(!stdout.contains("  misplaced "), "{stdout}");
    }
    let refusal = refused(dmaspace(&["map", "--placement", "near:4095"]));
    let start = format!(
        "the machine has no memory on node 4095; nodes that have: {}",
        nodes[0]
    );
    assert!(refusal.starts_with(&start), "{refusal}");
    let (_, stderr, status) = run(dmaspace(&["map", "--placement", "near"]));
    assert_eq!(status, Some(2));
    assert!(
        stderr.contains("`shared`, `per-node`, or `near:N`"),
        "{stderr}"
    );
}

#[test]
fn the_smallest_size_is_one_page() {
    let _turn = turn();
    check(
        &report(dmaspace(&["map", "--json", "--size", "4K"])),
        4096,
        2,
    );
}

#[test]
fn an_ordinary_user_gets_what_the_limit_leaves_and_the_reason() {
    let _turn = turn();
    let name = "an_ordinary_user_gets_what_the_limit_leaves_and_the_reason";
    let Some(user) = Ordinary::new(name, 3) else {
        return;
    };
    let found = report(user.command(8 << 20, &["map", "--json"]));
    let size = number(&found, "/memory/size_bytes");
    assert!((1 << 20..=8 << 20).contains(&size), "{size}");
    check(&found, size, 2);
    assert!(found.pointer("/memory/size_reason").unwrap().is_string());
    assert_ne!(found.pointer("/memory/addresses").unwrap(), "pagemap");
    let (stdout, _, status) = run(user.command(8 << 20, &["map", "--size", SMALL]));
    assert_eq!(status, Some(0));
    assert!(stdout.contains("NOT REAL"), "{stdout}");
    assert!(stdout.contains("of the limit of 8 MiB"), "{stdout}");
    let options = ["map", "--json", "--size", SMALL, "--backing", "memfd"];
    check(&report(user.command(8 << 20, &options)), 4 << 20, 2);
    // The default of many distributions for long.
    let found = report(user.command(64 << 10, &["map", "--json"]));
    let size = number(&found, "/memory/size_bytes");
    assert!((16 << 10..64 << 10).contains(&size), "{size}");
    check(&found, size, 2);
}

#[test]
fn huge_pages_are_added_and_taken_out_again() {
    let _turn = turn();
    let name = "huge_pages_are_added_and_taken_out_again";
    if !is_root() || available() < 2 << 30 {
        return skipped(name, "requires root and 2 GiB of memory");
    }
    let before = pool();
    let options = ["map", "--json", "--size", "64M", "--backing", "hugetlb-2m"];
    let report = report(dmaspace(&options));
    check(&report, 64 << 20, 2);
    assert_eq!(number(&report, "/memory/huge_bytes"), 64 << 20);
    let large = report.pointer("/tables/leaves").unwrap();
    assert!(
        large
            .as_array()
            .unwrap()
            .iter()
            .all(|leaf| number(leaf, "/from_bytes") >= 2 << 20),
        "{large:#}"
    );
    pool_is_again(before);
}

/// The drawing is whole, and beside it lies nothing.
#[test]
fn the_address_space_is_drawn() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layout.svg");
    for _ in 0..2 {
        let options = ["map", "--size", SMALL, "--svg", text(&path)];
        let (stdout, stderr, status) = run(dmaspace(&options));
        assert_eq!((stderr.as_str(), status), ("", Some(0)));
        assert!(stdout.contains("DMA check"));
        let svg = fs::read_to_string(&path).unwrap();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("4 MiB in vtd-ss tables"));
        assert_eq!(names(directory.path()), ["layout.svg"]);
    }
}

#[test]
fn a_drawing_on_a_full_device_is_refused_and_the_report_is_printed_all_the_same() {
    let _turn = turn();
    let options = ["map", "--size", SMALL, "--svg", "/dev/full"];
    let (stdout, stderr, status) = run(dmaspace(&options));
    assert_eq!(status, Some(2));
    assert!(stdout.contains("OK  every byte was right"));
    let expected = "dmaspace: cannot write /dev/full: No space left on device (os error 28)\n";
    assert_eq!(stderr, expected);
}

#[test]
fn a_full_disk_keeps_the_old_drawing_and_nothing_half_written() {
    let _turn = turn();
    let name = "a_full_disk_keeps_the_old_drawing_and_nothing_half_written";
    if !is_root() || !has(&["unshare", "mount"]) {
        return skipped(name, "requires root, unshare and mount");
    }
    let directory = tempfile::tempdir().unwrap();
    // A disk of its own, seen by nobody else, full but for the old drawing.
    let script = "mount -t tmpfs -o size=64k none \"$1\" && cd \"$1\" && echo old > old.svg \
                  && { cat /dev/zero > rest 2> /dev/null; true; } \
                  && { \"$0\" map --size 4M --svg old.svg > /dev/null; echo \"status $?\"; \
                  \"$0\" map --size 4M --svg new.svg > /dev/null; echo \"status $?\"; \
                  ls -A; cat old.svg; }";
    let mut command = Command::new("unshare");
    let command = command.args(["-m", "sh", "-c", script, PROGRAM, text(directory.path())]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    if !stderr.is_empty() && !stderr.contains("dmaspace") {
        return skipped(name, &stderr);
    }
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        stdout, "status 2\nstatus 2\nold.svg\nrest\nold\n",
        "{stderr}"
    );
    assert_eq!(stderr.matches("No space left on device").count(), 2);
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
}

#[test]
fn a_full_stdout_is_reported_and_a_closed_one_is_fine() {
    let _turn = turn();
    for options in [
        &["map", "--size", SMALL][..],
        &["map", "--size", SMALL, "--json"],
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
        .args(["-v", "map", "--size", "999999T"])
        .stderr(full)
        .status();
    assert_eq!(status.unwrap().code(), Some(2));
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
    assert!(status.success());
}

/// Before that the kernel would end it, with nothing to unwind.
fn until_signals_are_caught(child: &Child) {
    const SIGINT: u64 = 1 << 1;
    let status = format!("/proc/{}/status", child.id());
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let status = fs::read_to_string(&status).unwrap();
        let mut caught = status.lines().filter_map(|l| l.strip_prefix("SigCgt:\t"));
        let mask = u64::from_str_radix(caught.next().unwrap(), 16).unwrap();
        if mask & SIGINT != 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it catches no signals");
}

#[test]
fn a_signal_ends_a_job_and_nothing_is_left() {
    let _turn = turn();
    let name = "a_signal_ends_a_job_and_nothing_is_left";
    if !is_root() || available() < 4 << 30 {
        return skipped(name, "requires root and 4 GiB of memory");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layout.svg");
    let before = pool();
    // From the first stages to the DMA check, which is the longest.
    for (backing, after, names_of_signals) in [
        ("4k", 30, &["INT"][..]),
        ("4k", 300, &["INT", "INT", "TERM"]),
        ("thp", 700, &["HUP"]),
        ("hugetlb-2m", 10, &["TERM"]),
        ("hugetlb-2m", 300, &["INT"]),
    ] {
        let options = [
            "map",
            "--size",
            "2G",
            "--backing",
            backing,
            "--svg",
            text(&path),
        ];
        let child = spawn(&options);
        until_signals_are_caught(&child);
        std::thread::sleep(Duration::from_millis(after));
        for signal_name in names_of_signals {
            signal(&child, signal_name);
        }
        let (status, said) = end(child);
        let what = format!("{backing} after {after} ms: {said}");
        if status.code() == Some(2) && said.contains("more huge pages") {
            skipped(name, &what);
            continue;
        }
        assert_eq!(status.code(), Some(130), "{what}");
        assert!(said.starts_with("dmaspace: interrupted"), "{what}");
        assert_eq!(said.lines().count(), 1, "{what}");
        assert_eq!(names(directory.path()), [""; 0], "{what}");
        pool_is_again(before);
    }
}

/// Also where no memory is taken: no group goes on, writes a file, or leaves huge pages in the pool.
#[test]
fn a_signal_ends_each_group_of_a_bench_and_nothing_is_left() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let files = ["figures.json", "page.html"].map(|name| directory.path().join(name));
    let [json, html] = files.each_ref().map(|path| text(path));
    let before = pool();
    for (group, after) in [
        ("pin", 20),
        ("pin", 300),
        ("map", 100),
        ("balloon", 100),
        ("tables", 50),
        ("numa", 0),
    ] {
        let child = spawn(&["bench", group, "--quick", "--json", json, "--html", html]);
        until_signals_are_caught(&child);
        std::thread::sleep(Duration::from_millis(after));
        signal(&child, "INT");
        let (status, said) = end(child);
        let what = format!("{group} after {after} ms: {said}");
        assert_eq!(status.code(), Some(130), "{what}");
        assert!(said.starts_with("dmaspace: interrupted"), "{what}");
        assert_eq!(said.lines().count(), 1, "{what}");
        assert_eq!(names(directory.path()), [""; 0], "{what}");
        pool_is_again(before);
    }
}

/// What clears a line of a terminal, as only the bar does.
const CLEARED: &str = "\r\x1b[2K";

/// What a terminal sees.
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
fn a_terminal_shows_colour_and_the_progress_of_long_work() {
    let _turn = turn();
    let name = "a_terminal_shows_colour_and_the_progress_of_long_work";
    let Some(short) = on_a_terminal("", "map --size 64K") else {
        return skipped(name, "takes script");
    };
    assert!(short.contains("\x1b[1;32mOK\x1b[0m"), "{short:?}");
    assert!(!short.contains(CLEARED), "no bar for short work: {short:?}");
    let plain = on_a_terminal("NO_COLOR=1", "map --size 64K").unwrap();
    assert!(!plain.contains('\x1b'), "{plain:?}");
    if is_root() && available() > 2 << 30 {
        let long = on_a_terminal("", "map --size 128M --backing 4k").unwrap();
        let (bar, rest) = long.rsplit_once(CLEARED).unwrap();
        assert!(bar.contains("DMA check  "), "the stage is named: {bar:?}");
        assert!(bar.contains("of 640.00 MiB"), "{bar:?}");
        assert!(
            rest.starts_with("\x1b[1mmemory"),
            "nothing of it stays: {rest:?}"
        );
    } else {
        skipped(name, "long work requires root and 2 GiB of memory");
    }
}

#[test]
fn a_bar_is_never_drawn_into_a_pipe() {
    let _turn = turn();
    if !is_root() || available() < 2 << 30 {
        return skipped(
            "a_bar_is_never_drawn_into_a_pipe",
            "requires root and 2 GiB",
        );
    }
    let begun = Instant::now();
    let (_, stderr, status) = run(dmaspace(&["map", "--size", "128M", "--backing", "4k"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    assert!(begun.elapsed() > Duration::from_millis(500), "it was long");
}

#[test]
fn what_is_being_done_is_reported_on_request() {
    let _turn = turn();
    for (flag, filter) in [(&["-v"][..], ""), (&[], "dmaspace=debug")] {
        let mut command = dmaspace(&[flag, &["map", "--size", "64K"]].concat());
        command.env("RUST_LOG", filter);
        let (_, stderr, status) = run(command);
        assert_eq!(status, Some(0));
        for stage in ["populate", "DMA check"] {
            assert!(stderr.contains(stage), "{stderr}");
        }
    }
    let mut command = dmaspace(&["map", "--size", "64K"]);
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
        &["map", "--json", "--size", "64K"],
    );
    check(&report(command), 64 << 10, 2);
}
