//! `dmaspace explain` as it is called: files, standard input, folders, archives, mixtures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

/// Files of different machines, with the device that each names and the causes that each alone has.
const FILES: [(&str, &str, &[&str]); 9] = [
    (
        "amd.log",
        "[   35.1] nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000d address=0x7ff49550 flags=0x0070]\n",
        &["fault.permission", "fault.wrong-direction"],
    ),
    (
        "intel.log",
        "[  100.1] DMAR: [DMA Write NO_PASID] Request device [02:00.0] fault addr 0x0 [fault reason 0x05] PTE Write access is not set\n",
        &["fault.no-access", "fault.null-address"],
    ),
    (
        "refused.log",
        "[  220.1] vfio-pci 0000:03:00.0: Firmware has requested this device have a 1:1 IOMMU mapping, rejecting configuring the device without a 1:1 mapping. Contact your platform vendor.\n",
        &["firmware.one-to-one"],
    ),
    (
        "groups.txt",
        "4 0000:04:00.0 020000 8086:1521 vfio-pci\n4 0000:04:00.1 020000 8086:1521 igb\n",
        &["group.inseparable", "group.not-viable"],
    ),
    (
        "error.txt",
        "cannot limit locked memory of process 101 to 18253611008: Operation not permitted\n",
        &["memlock.cannot-raise"],
    ),
    (
        "layout.txt",
        "A ram 0x0 0xfee01000\n0x00000000fee00000 0x00000000feefffff msi\n",
        &["layout.overlaps-reserved"],
    ),
    (
        "cmdline",
        "root=/dev/sda1 iommu=pt iommu.passthrough=0\n",
        &["option.repeated"],
    ),
    (
        "trace.txt",
        "1 map 0x1000 0x1000 rw fd\n2 map 0x1000 0x2000 rw fd\n",
        &["trace.map-overlap"],
    ),
    (
        "series.txt",
        "# target 4096\nA 0 1000 4000 4000\nA 1 1100 3900 3900\n",
        &["balloon.slow"],
    ),
];

fn explain(folder: &Path, arguments: &[&str]) -> Value {
    let mut command = Command::cargo_bin("dmaspace").unwrap();
    let output = command
        .current_dir(folder)
        .args(["explain", "--json"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn files() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, text, _) in FILES {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn causes(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().unwrap();
    let mut causes: Vec<String> = findings
        .iter()
        .map(|one| one["cause"].as_str().unwrap().to_owned())
        .collect();
    causes.sort();
    causes
}

#[test]
fn each_file_has_its_causes() {
    let folder = files();
    for (name, _, expected) in FILES {
        let report = explain(folder.path(), &[name]);
        assert_eq!(causes(&report), expected, "{name}");
        for finding in report["findings"].as_array().unwrap() {
            let evidence = finding["evidence"].as_array().unwrap();
            assert!(!evidence.is_empty(), "{finding}");
            for place in evidence {
                assert!(place.as_str().unwrap().starts_with(name), "{place}");
            }
            assert!(!finding["source"].as_str().unwrap().is_empty(), "{finding}");
        }
    }
}

#[test]
fn files_of_different_machines_are_not_joined() {
    let folder = files();
    let mut random = fastrand::Rng::with_seed(45);
    for _ in 0..60 {
        let mut chosen: Vec<_> = FILES.iter().collect();
        random.shuffle(&mut chosen);
        chosen.truncate(random.usize(2..5));
        let names: Vec<&str> = chosen.iter().map(|(name, ..)| *name).collect();
        let report = explain(folder.path(), &names);
        let mut expected: Vec<String> = chosen
            .iter()
            .flat_map(|(.., causes)| causes.iter().map(|cause| (*cause).to_owned()))
            .collect();
        expected.sort();
        assert_eq!(causes(&report), expected, "{names:?}");
        for finding in report["findings"].as_array().unwrap() {
            let mut places: Vec<&str> = finding["evidence"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|place| place.as_str()?.split(':').next())
                .collect();
            places.dedup();
            assert_eq!(places.len(), 1, "{finding}");
        }
    }
}

#[test]
fn folders_and_standard_input_are_taken() {
    let folder = files();
    let parent = folder.path().parent().unwrap();
    let name = folder.path().file_name().unwrap().to_str().unwrap();
    let all: Vec<&str> = FILES.iter().map(|(name, ..)| *name).collect();
    let of_folder = explain(parent, &[name]);
    assert_eq!(causes(&of_folder), causes(&explain(folder.path(), &all)));
    let mut command = Command::cargo_bin("dmaspace").unwrap();
    let output = command
        .args(["explain", "--json"])
        .write_stdin(FILES[0].1)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(causes(&report), FILES[0].2);
}

#[test]
fn unknown_input_is_named_and_a_missing_file_is_refused() {
    let folder = files();
    fs::write(
        folder.path().join("other.txt"),
        "nothing of this is about memory\n",
    )
    .unwrap();
    let report = explain(folder.path(), &["other.txt"]);
    assert_eq!(report["findings"], Value::Array(vec![]));
    assert!(
        report["notes"][0]
            .as_str()
            .unwrap()
            .contains("not recognized")
    );
    let mut command = Command::cargo_bin("dmaspace").unwrap();
    let output = command
        .args(["explain", "/nowhere/at/all"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere/at/all"));
}
