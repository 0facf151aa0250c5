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

/// The count of the first finding, and whether it is exact.
fn counted(report: &Value) -> (u64, bool) {
    let first = &report["findings"][0];
    (
        first["count"].as_u64().unwrap(),
        first["count_exact"].as_bool().unwrap(),
    )
}

/// A fault on two lines, as kernels before 4.2 print it.
const OLD: &str = "DMAR:[DMA Write] Request device [02:00.0] fault addr 1000 \nDMAR:[fault reason 05] PTE Write access is not set\n";

#[test]
fn a_fault_that_dmesg_and_a_journal_show_is_one() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let fault = |address: u64| {
        format!(
            "DMAR: [DMA Write NO_PASID] Request device [02:00.0] fault addr {address:#x} [fault reason 0x05] PTE Write access is not set"
        )
    };
    let dmesg = |faults: &[(u64, u64)]| {
        let line =
            |(second, address): &(u64, u64)| format!("[  {second}.100000] {}\n", fault(*address));
        faults.iter().map(line).collect::<String>()
    };
    let journal = |faults: &[(u64, u64)]| {
        let line = |(second, address): &(u64, u64)| {
            format!("Nov 27 16:37:{second} box kernel: {}\n", fault(*address))
        };
        faults.iter().map(line).collect::<String>()
    };
    // The ring buffer has lost the first one, the journal was written out before the last one.
    let (early, same, late) = ((10, 0x1000), (11, 0x2000), (12, 0x3000));
    write("dmesg.txt", &dmesg(&[same, same, late]));
    write("journal.txt", &journal(&[early, same, same]));
    let both = explain(folder.path(), &["dmesg.txt", "journal.txt"]);
    assert_eq!(counted(&both), (4, true), "{both}");
    let evidence = both["findings"][0]["evidence"].to_string();
    assert!(evidence.contains("dmesg.txt") && evidence.contains("journal.txt"));
    let one = explain(folder.path(), &["dmesg.txt"]);
    assert_eq!(counted(&one), (3, true));
    // Two boots, which both logs count from, with the same fault.
    write("before.txt", &dmesg(&[(50, 0x2000)]));
    let boots = explain(folder.path(), &["dmesg.txt", "before.txt"]);
    let counts: Vec<_> = boots["findings"].as_array().unwrap().iter().collect();
    assert_eq!(
        counts
            .iter()
            .filter(|one| one["cause"] == "fault.no-access")
            .count(),
        2
    );
    // Messages that were kept back are the same, too.
    let kept = "dmar_fault: 30 callbacks suppressed\n";
    write("dmesg.txt", &format!("{}[  13.1] {kept}", dmesg(&[same])));
    write(
        "journal.txt",
        &format!("{}Nov 27 16:37:13 box kernel: {kept}", journal(&[same])),
    );
    let both = explain(folder.path(), &["dmesg.txt", "journal.txt"]);
    assert_eq!(counted(&both), (11, false));
}

#[test]
fn a_fault_on_several_lines_is_one_and_messages_of_the_boot_are_none() {
    let folder = TempDir::new().unwrap();
    let write = |text: &str| fs::write(folder.path().join("dmesg.txt"), text).unwrap();
    let boot = "[    0.5] DMAR: fault reporting enabled\n[    0.6] arm-smmu-v3 x: Disabling IOMMU fault\n\
                [    0.7] net_ratelimit: 33 callbacks suppressed\n[    0.8] vfio_pci_mmap_fault: 4 callbacks suppressed\n";
    write(boot);
    let none = explain(folder.path(), &["dmesg.txt"]);
    assert_eq!(none["findings"], Value::Array(Vec::new()), "{none}");
    let about = none["notes"].to_string();
    assert!(!about.contains("not decoded"), "{about}");
    for (text, count) in [
        (OLD.to_owned(), 1),
        (format!("{OLD}{OLD}"), 2),
        (
            "[  12.1] *** gpu fault: iova=0000000000001000 flags=1 (0,0,0,0)\n".to_owned(),
            1,
        ),
        (
            "[  12.1] qcom-tbu 15185000.tbu: ATOS translation timed out!\n".to_owned(),
            1,
        ),
        (
            "[  12.1] acpi NVDA200C:00: VINTF0: failed to enable, STATUS=0x00000000\n".to_owned(),
            1,
        ),
    ] {
        write(&format!("{boot}{text}"));
        let report = explain(folder.path(), &["dmesg.txt"]);
        assert_eq!(counted(&report), (count, true), "{text}: {report}");
    }
}

#[test]
fn a_reserved_region_behind_a_path_is_of_its_group() {
    let folder = TempDir::new().unwrap();
    let regions = "/sys/kernel/iommu_groups/7/reserved_regions:0x000000007b000000 0x000000007f7fffff direct\n\
                   /sys/kernel/iommu_groups/8/reserved_regions:0x00000000fee00000 0x00000000feefffff msi\n";
    fs::write(folder.path().join("regions.txt"), regions).unwrap();
    fs::write(
        folder.path().join("groups.txt"),
        "7 0000:03:00.0 020000 8086:1521 vfio-pci\n",
    )
    .unwrap();
    let report = explain(folder.path(), &["regions.txt", "groups.txt"]);
    assert_eq!(causes(&report), ["firmware.one-to-one"]);
    assert_eq!(report["findings"][0]["devices"][0], "0000:03:00.0");
}

#[test]
fn this_machine_is_read_together_with_files() {
    let folder = files();
    let report = explain(folder.path(), &["--machine", "error.txt"]);
    assert!(
        causes(&report).contains(&"memlock.cannot-raise".to_owned()),
        "{report}"
    );
    let read = report["files"].to_string();
    assert!(
        read.contains("/proc/cmdline") && read.contains("error.txt"),
        "{read}"
    );
}
