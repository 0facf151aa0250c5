//! Regression test of the fuzz targets: every file of `fuzz/corpus` through the body of its target.
//! Further inputs are changed files, and ones that are long or have no end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(dead_code, unreachable_pub, reason = "every test that counts has it")]
#[path = "../../../fuzz/src/allocated.rs"]
mod allocated;
#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use std::error::Error as _;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use allocated::{Counting, within};
use dmaspace_cli::inside::{KernelTextError, TableFile, areas};

#[global_allocator]
static ALLOCATOR: Counting<{ 512 << 20 }> = Counting;

replay::tests!("dmaspace_cli", fuzz_bodies::TARGETS, changed);

#[test]
fn an_image_without_an_end_is_not_read_to_it() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let writing = std::thread::spawn(move || {
        let _ = writer.write_all(b"IOPTIMG\n");
        while writer.write_all(&[0; 65536]).is_ok() {}
    });
    // 64 MiB are read, into a buffer that doubles.
    let opened = within(300 << 20, || TableFile::open(Path::new(&path), None));
    drop(reader);
    writing.join().unwrap();
    let error = opened.unwrap_err();
    let cause = error.source().unwrap().to_string();
    assert_eq!(cause, "it has more than 64 MiB, the most that is read");
}

#[test]
fn the_devices_of_a_kernels_text_have_an_end() {
    let text = "Device a @0x0\n".repeat((1 << 16) + 1);
    let path = tempfile::NamedTempFile::new().unwrap();
    path.as_file().write_all(text.as_bytes()).unwrap();
    let error = within(128 << 20, || TableFile::open(path.path(), None)).unwrap_err();
    let cause = KernelTextError::ManyDevices;
    let said = error.source().map(ToString::to_string);
    assert_eq!(said, Some(cause.to_string()));
}

#[test]
fn what_a_terminal_would_obey_names_no_device() {
    let text = b"Device 0000:\x1b]0;owned\x07 @0x1000\n";
    let path = tempfile::NamedTempFile::new().unwrap();
    path.as_file().write_all(text).unwrap();
    let error = TableFile::open(path.path(), None).unwrap_err();
    assert!(error.is_damage(), "{error}");
}

#[test]
fn areas_take_as_much_as_their_lines() {
    let smaps = "0-1 r 0 0 0\n".repeat(10_000);
    let found = within(64 * smaps.len() as u64, || areas(&smaps));
    assert_eq!(found.len(), 10_000);
}
