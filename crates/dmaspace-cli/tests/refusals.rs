//! Requests that cannot be fulfilled are refused with a sentence and exit status 2, and nothing is done first.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::File;
use std::path::Path;

use dmaspace::iopt::FormatId;

use common::{Ordinary, dmaspace, is_root, refused, run, skipped, text};

/// clap's own refusals: the first line is the sentence, and hints follow.
fn misused(arguments: &[&str]) -> String {
    let (stdout, stderr, status) = run(dmaspace(arguments));
    assert_eq!((stdout.as_str(), status), ("", Some(2)), "{stderr}");
    stderr
}

#[test]
fn a_size_that_makes_no_sense_is_refused_with_what_would_do() {
    for (size, why) in [
        ("0", "0 bytes are nothing to map; the smallest size is 4K"),
        ("5000", "5000 bytes are no whole pages of 4K; try 4K or 8K"),
        (
            "1.5G",
            "a size has no fraction; use the next smaller unit, like 1536M for 1.5G",
        ),
        ("1GB", "unknown unit \"GB\": there are K, M, G and T"),
        ("lots", "a size is a number with K, M, G or T, like 256M"),
        (
            "99999999999T",
            "no machine has that much: it is 16 EiB or more",
        ),
    ] {
        let stderr = misused(&["check", "--size", size]);
        let expected = format!("error: invalid value '{size}' for '--size <SIZE>': {why}\n");
        assert!(stderr.starts_with(&expected), "{stderr}");
    }
}

#[test]
fn an_unknown_name_is_refused_with_what_is_offered() {
    let formats = FormatId::ALL.map(FormatId::name).join(", ");
    let formats = format!("[possible values: {formats}]");
    for (arguments, offered) in [
        (["--format", "vtd"], formats.as_str()),
        (
            ["--backing", "5k"],
            "[possible values: auto, 4k, thp, hugetlb-2m, hugetlb-1g, memfd]",
        ),
        (["--max-leaf", "3m"], "[possible values: 4k, 2m, 1g]"),
        (
            ["--backend", "type1"],
            "[possible values: software, vfio, iommufd]",
        ),
        (["--devices", "0"], "0 is not in 1..=256"),
        (["--devices", "257"], "257 is not in 1..=256"),
        (["--devices", "two"], "invalid digit found in string"),
        (["--colour", "red"], "unexpected argument '--colour' found"),
    ] {
        let stderr = misused(&["check", arguments[0], arguments[1]]);
        assert!(stderr.contains(offered), "{stderr}");
    }
    assert!(misused(&["mop"]).contains("unrecognized subcommand 'mop'"));
    assert!(misused(&[]).contains("Usage: dmaspace"));
}

#[test]
fn more_than_the_machine_has_is_refused() {
    let sentence = refused(dmaspace(&["check", "--size", "1000T"]));
    let start = "1000 TiB of memory are more than this machine has: ";
    assert!(sentence.starts_with(start), "{sentence}");
}

#[test]
fn half_a_huge_page_is_refused() {
    let sentence = refused(dmaspace(&[
        "check",
        "--size",
        "1M",
        "--backing",
        "hugetlb-2m",
    ]));
    assert!(sentence.contains("2 MiB"), "{sentence}");
}

#[test]
fn a_size_over_the_limit_is_refused_with_numbers() {
    let Some(user) = Ordinary::new("a_size_over_the_limit_is_refused_with_numbers", 0) else {
        return;
    };
    let sentence = refused(user.command(1 << 20, &["check", "--size", "2M"]));
    for number in ["2 MiB", "1 MiB allowed", "in use", "`ulimit -l`"] {
        assert!(sentence.contains(number), "{sentence}");
    }
    let sentence = refused(user.command(0, &["check"]));
    assert!(sentence.contains("allowed"), "{sentence}");
}

#[test]
fn huge_pages_that_are_not_free_are_refused_with_the_line_that_adds_them() {
    let size = format!("{}M", 2 * (common::pool() + 1));
    let options = ["check", "--size", &size, "--backing", "hugetlb-2m"];
    let sentence = refused(dmaspace(&options));
    let line = "> /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    assert!(
        sentence.contains("as root: echo ") && sentence.ends_with(line),
        "{sentence}"
    );
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_the_check() {
    let directory = tempfile::tempdir().unwrap();
    let here = text(directory.path());
    // The size would be refused as well, so the target was looked at before.
    let refusal = |target: &str| {
        refused(dmaspace(&[
            "check", "--size", "999999T", "--report", target,
        ]))
    };
    assert_eq!(refusal(here), format!("{here} is a directory: name a file"));
    let missing = format!("{here}/no/report.json");
    assert_eq!(
        refusal(&missing),
        format!("cannot write {missing}: there is no directory {here}/no")
    );
    assert!(refusal("/proc/report.json").starts_with("cannot write /proc/report.json: "));
    if is_root() {
        assert!(refusal("/proc/version").starts_with("cannot write /proc/version: "));
    }
}

#[test]
fn a_directory_that_is_not_ours_is_refused() {
    let Some(user) = Ordinary::new("a_directory_that_is_not_ours_is_refused", 2) else {
        return;
    };
    for target in ["/report.json", "/etc/passwd"] {
        let sentence = refused(user.command(8 << 20, &["check", "--report", target]));
        assert!(sentence.contains("Permission denied"), "{sentence}");
    }
    assert!(!Path::new("/report.json").exists());
}

/// Before anything else is looked at: the size would be refused by the job, too.
#[test]
fn options_that_do_not_go_together_are_refused_by_name() {
    let refusal = |options: &[&str]| {
        refused(dmaspace(
            &[&["check", "--size", "999999T"], options].concat(),
        ))
    };
    assert_eq!(
        refusal(&["--device", "0000:00:05.0"]),
        "--device requires --backend vfio or iommufd: the software IOMMU has devices of its own"
    );
    for name in ["vfio", "iommufd"] {
        assert_eq!(
            refusal(&["--backend", name]),
            format!("--backend {name} requires --device ADDRESS; `dmaspace devices` lists them")
        );
        for (option, value) in [
            ("--format", "vtd-ss"),
            ("--max-leaf", "4k"),
            ("--devices", "2"),
        ] {
            let options = ["--backend", name, "--device", "00:05.0", option, value];
            let expected = format!("{option} means nothing with --backend {name}: ");
            let sentence = refusal(&options);
            assert!(sentence.starts_with(&expected), "{sentence}");
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    for name in ["vfio", "iommufd"] {
        let options = ["check", "--backend", name, "--device", "ffff:ff:1f.7"];
        assert_eq!(
            refused(dmaspace(&options)),
            "no PCI device has the address \"ffff:ff:1f.7\"; `dmaspace devices` lists those \
             there are"
        );
    }
}

/// Devices that could be used are left alone: they are in use by others.
#[test]
fn a_device_of_this_machine_that_cannot_be_used_is_refused_with_the_cause() {
    let name = "a_device_of_this_machine_that_cannot_be_used_is_refused_with_the_cause";
    let listed = common::report(dmaspace(&["devices", "--json"]));
    let devices = listed["devices"].as_array().unwrap();
    let Some(device) = devices.iter().find(|device| device["state"] != "ready") else {
        return skipped(name, "takes a PCI device that is not ready");
    };
    let address = device["address"].as_str().unwrap();
    for backend in ["vfio", "iommufd"] {
        let options = ["check", "--backend", backend, "--device", address];
        let sentence = refused(dmaspace(&options));
        let causes = [address, "there is no /dev/"];
        assert!(
            causes.iter().any(|cause| sentence.contains(cause)),
            "{sentence}"
        );
    }
}

#[test]
fn help_and_version_go_to_stdout_and_a_full_one_is_reported() {
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["check", "--help"],
        &["check", "-h"],
    ] {
        let (stdout, stderr, status) = run(dmaspace(arguments));
        assert_eq!((stderr.as_str(), status), ("", Some(0)));
        assert!(stdout.contains("dmaspace"), "{stdout}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(common::PROGRAM);
        let output = command.args(arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("No space left on device"), "{stderr}");
    }
    let (stdout, ..) = run(dmaspace(&["--version"]));
    assert_eq!(
        stdout,
        concat!("dmaspace ", env!("CARGO_PKG_VERSION"), "\n")
    );
}
