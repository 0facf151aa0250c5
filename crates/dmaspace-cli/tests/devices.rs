//! `dmaspace devices` on this machine, whatever it has.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::File;
use std::path::Path;

use common::{dmaspace, names, report, run};

#[test]
fn every_device_of_the_bus_is_listed_once() {
    let bus = Path::new("/sys/bus/pci/devices");
    let mut expected = if bus.exists() { names(bus) } else { Vec::new() };
    let found = report(dmaspace(&["devices", "--json"]));
    let devices = found["devices"].as_array().unwrap();
    let mut listed: Vec<_> = devices
        .iter()
        .map(|device| device["address"].as_str().unwrap().to_string())
        .collect();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);

    let (text, stderr, status) = run(dmaspace(&["devices"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    for address in expected {
        let line = format!("  {address}  ");
        assert!(text.lines().any(|found| found.starts_with(&line)), "{text}");
    }
}

#[test]
fn a_full_disk_is_reported() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(common::PROGRAM);
    let output = command.arg("devices").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
