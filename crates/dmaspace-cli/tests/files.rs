//! Files that the program reads: what has no end is refused with the limit, and a pipe is as good as a file.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::{PROGRAM, dmaspace, refused, run, text};

/// A kernel's text of VT-d's tables.
const KERNEL: &str = "\
Device 0000:00:05.0 @0x1000000
IOVA_PFN           PML5E               PML4E               PDPE                PDE                 PTE
0x0000000000123 |  0x0000000000000000  0x0000000001001003  0x0000000001002003  0x0000000001003003  0x0000000200001003
";
const DOMAIN: &str = "<domain><memory unit='GiB'>4</memory></domain>";
const NODE: &str = "[[node]]\nid = 0\nmemory_mib = 1024\n";

#[test]
fn what_has_no_end_is_refused_with_the_limit() {
    for (arguments, most) in [
        (&["inspect", "--no-times", "--libvirt"][..], "10 MiB"),
        (&["numa", "--topology"], "1 MiB"),
    ] {
        for endless in ["/dev/zero", "/dev/full"] {
            let sentence = refused(dmaspace(&[arguments, &[endless]].concat()));
            let expected =
                format!("cannot read {endless}: it has more than {most}, the most that is read");
            assert_eq!(sentence, expected);
        }
    }
    let sentence = refused(dmaspace(&["tables", "check", "/dev/zero"]));
    assert!(
        sentence.starts_with("/dev/zero is no image of tables"),
        "{sentence}"
    );
    let dump = [
        "tables",
        "dump",
        "/dev/urandom",
        "--format",
        "vtd-ss",
        "--root",
        "0x1000",
    ];
    let sentence = refused(dmaspace(&dump));
    assert!(
        sentence.contains("more than 67108864 bytes of tables"),
        "{sentence}"
    );
}

#[test]
fn an_image_has_a_limit_in_a_pipe_and_in_a_file() {
    let mut image = b"IOPTIMG\n".to_vec();
    image.resize((64 << 20) + 1, 0);
    let mut command = dmaspace(&["tables", "check", "/dev/stdin"]);
    command.write_stdin(image);
    let sentence = refused(command);
    assert_eq!(
        sentence,
        "cannot read /dev/stdin: it has more than 64 MiB, the most that is read"
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tables.img");
    fs::write(&path, "IOPTIMG\n").unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len((16 << 30) + 1).unwrap();
    let sentence = refused(dmaspace(&["tables", "check", text(&path)]));
    let name = text(&path);
    let expected = format!("cannot read {name}: it has more than 16 GiB, the most that is read");
    assert_eq!(sentence, expected);
}

#[test]
fn a_pipe_is_as_good_as_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let map = ["--map", "0x40000000:1G:0x100000000"];
    let image = at("tables.img");
    let (.., status) = run(dmaspace(
        &[&["tables", "image", text(&image)], &map[..]].concat(),
    ));
    assert_eq!(status, Some(0));
    for (name, content) in [("kernel", KERNEL), ("domain", DOMAIN), ("nodes", NODE)] {
        fs::write(at(name), content).unwrap();
    }
    for (name, arguments) in [
        ("tables.img", &["tables", "dump"][..]),
        ("tables.img", &["tables", "check", "--json"]),
        ("kernel", &["tables", "dump"]),
        ("kernel", &["tables", "dump", "--device", "0000:00:05.0"]),
        ("domain", &["inspect", "--no-times", "--json", "--libvirt"]),
        ("nodes", &["numa", "--topology"]),
    ] {
        let path = at(name);
        let (of_file, stderr, status) = run(dmaspace(&[arguments, &[text(&path)]].concat()));
        assert_eq!((stderr.as_str(), status), ("", Some(0)), "{arguments:?}");
        let mut command = dmaspace(&[arguments, &["/dev/stdin"]].concat());
        command.write_stdin(fs::read(&path).unwrap());
        let (of_pipe, stderr, status) = run(command);
        assert_eq!((stderr.as_str(), status), ("", Some(0)), "{arguments:?}");
        assert_eq!(of_pipe, of_file, "{arguments:?}");
    }
}

#[test]
fn a_dump_is_no_pipe_and_a_directory_no_file() {
    let mut command = dmaspace(&[
        "tables",
        "dump",
        "/dev/stdin",
        "--format",
        "vtd-ss",
        "--root",
        "0x1000",
    ]);
    command.write_stdin(vec![0; 8192]);
    let sentence = refused(command);
    assert!(
        sentence.starts_with("/dev/stdin is a pipe or a terminal: "),
        "{sentence}"
    );
    for arguments in [
        &["inspect", "--no-times", "--libvirt", "/"][..],
        &["numa", "--topology", "/"],
        &["tables", "dump", "/"],
        &["tables", "dump", "/", "--format", "vtd-ss", "--root", "0"],
    ] {
        let sentence = refused(dmaspace(arguments));
        assert!(
            sentence.starts_with("cannot read /: Is a directory"),
            "{sentence}"
        );
    }
}

#[test]
fn a_balloon_outlives_input_without_an_end() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("balloon");
    let mut balloon = Command::new(PROGRAM)
        .args(["balloon", "--socket", text(&socket)])
        .stdin(File::open("/dev/zero").unwrap())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stderr = balloon.stderr.take().unwrap();
    BufReader::new(stderr).read_line(&mut line).unwrap();
    let ended = balloon.try_wait().unwrap();
    balloon.kill().unwrap();
    balloon.wait().unwrap();
    assert_eq!(
        line,
        "dmaspace: a line of standard input has more than 4096 bytes: no more are read\n"
    );
    assert_eq!(ended, None, "it runs on");
}
