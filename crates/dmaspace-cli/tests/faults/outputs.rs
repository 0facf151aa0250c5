//! Output that is not taken: the disk is full, or the reader has left.

use iopt::TableOps as _;
use std::convert::Infallible;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::thread::sleep;
use std::time::Duration;

use dmaspace::iopt::format::VtdSs;
use dmaspace::iopt::{HeapArena, Prot, Table};
use dmaspace::runs::{PageSizes, Span};

use crate::common::{PROGRAM, end, has, is_root, names, skipped, spawn, text};
use crate::turn;

/// An image of tables.
fn image(path: &Path) {
    let memory = HeapArena::<AtomicU64, 12>::with_tables_at(16, 16 << 20).unwrap();
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21);
    let mut table = Table::with_page_sizes(VtdSs::new(4).unwrap(), &memory, sizes).unwrap();
    let run = Span::new(4 << 30, 2 << 20);
    table.map(1 << 30, &[run], Prot::RW).unwrap();
    let mut image = Vec::new();
    let mut sink = |bytes: &[u8]| {
        image.extend_from_slice(bytes);
        Ok::<_, Infallible>(())
    };
    table.write_image(&mut sink).unwrap();
    fs::write(path, image).unwrap();
}

/// All that prints.
fn commands<'a>(image: &'a str, pid: &'a str) -> Vec<Vec<&'a str>> {
    let mut commands = vec![
        vec!["check", "--size", "64K"],
        vec!["check", "--size", "64K", "--json"],
        vec!["devices"],
        vec!["devices", "--json"],
        vec!["tables", "dump", image],
        vec!["tables", "dump", image, "--json"],
        vec!["tables", "walk", image, "0x40000000"],
        vec!["tables", "diff", image, image],
        vec!["numa", "--memory", "1G"],
        vec!["numa", "--memory", "1G", "--json"],
        vec!["explain", "--machine"],
        vec!["explain", "--machine", "--json"],
    ];
    if is_root() {
        commands.push(vec!["inspect", "--pid", pid, "--no-times"]);
    }
    commands
}

#[test]
fn each_command_reports_a_full_disk_and_ends_quietly_when_its_reader_has_left() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tables.img");
    image(&path);
    let pid = std::process::id().to_string();
    for command in commands(text(&path), &pid) {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(PROGRAM)
            .args(&command)
            .stdin(Stdio::null())
            .stdout(full)
            .output();
        let output = output.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let expected =
            "dmaspace: cannot write to standard output: No space left on device (os error 28)\n";
        assert_eq!(
            (said.as_str(), output.status.code()),
            (expected, Some(2)),
            "{command:?}"
        );

        let mut child = spawn(&command);
        drop(child.stdout.take());
        let (status, said) = end(child);
        assert_eq!((said.as_str(), status.code()), ("", Some(0)), "{command:?}");
    }
    assert_eq!(names(directory.path()), ["tables.img"]);
}

/// A daemon without a reader ends as well, instead of going on unheard.
#[test]
fn a_daemon_ends_when_what_it_reports_is_not_taken() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("balloon");
    let options = ["balloon", "--socket", text(&socket)];
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(options).stdin(Stdio::null()).stdout(full);
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("No space left on device")
    );

    let mut child = spawn(&options);
    drop(child.stdout.take());
    // It notices with the next thing that it tells.
    while child.try_wait().unwrap().is_none() {
        let front = UnixStream::connect(&socket);
        let _ = front.and_then(|mut front| front.write_all(b"no message of vhost-user"));
        sleep(Duration::from_millis(5));
    }
    let (status, said) = end(child);
    assert_eq!((said.as_str(), status.code()), ("", Some(0)));
    assert_eq!(names(directory.path()), [""; 0]);
}

#[test]
fn each_file_on_a_full_disk_is_named_and_nothing_of_it_is_left() {
    let _turn = turn();
    let name = "each_file_on_a_full_disk_is_named_and_nothing_of_it_is_left";
    if !is_root() || !has(&["unshare", "mount"]) {
        return skipped(name, "requires root, unshare and mount");
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (disk, tables) = (
        directory.path().join("disk"),
        directory.path().join("tables.img"),
    );
    fs::create_dir(&disk).unwrap();
    image(&tables);
    let command = ["tables", "picture", text(&tables)];
    // A disk of its own, invisible to others, full but for an old file.
    let script = "disk=$1; shift; mount -t tmpfs -o size=64k none \"$disk\" && cd \"$disk\" \
                  && echo old > old.svg && { cat /dev/zero > rest 2> /dev/null; true; } \
                  && for svg in old.svg new.svg; do \"$0\" \"$@\" --svg $svg > /dev/null; \
                  echo \"status $?\"; done; ls -A; cat old.svg";
    let mut unshare = Command::new("unshare");
    unshare.args(["-m", "sh", "-c", script, PROGRAM, text(&disk)]);
    let output = unshare.args(command).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if !said.is_empty() && !said.contains("dmaspace") {
        return skipped(name, &said);
    }
    let expected = ["old.svg", "new.svg"].map(|svg| {
        format!("dmaspace: cannot write {svg}: No space left on device (os error 28)\n")
    });
    assert_eq!(said, expected.concat());
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "status 2\nstatus 2\nold.svg\nrest\nold\n"
    );
}
