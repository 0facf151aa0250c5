//! `dmaspace explain` on faults that were provoked in guests (`cargo xtask guests --keep`), where each cause is known.
//!
//! A case is a folder `provoked/MACHINE/CASE`: what a user of the machine would have, and `expect.toml`. An explanation has
//! each finding of it, and no cause besides. With `--nocapture` they are printed by cause and unit.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use iommu::log::{LogEvent, Reader, strip};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    files: Vec<String>,
    /// Causes that fit the files as well.
    allowed: Vec<String>,
    #[serde(default)]
    finding: Vec<Finding>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Finding {
    cause: String,
    devices: Option<Vec<String>>,
    address: Option<String>,
    access: Option<String>,
    /// Faults that were provoked; the kernel may have printed fewer.
    count: Option<u64>,
}

impl Expect {
    fn names(&self, cause: &str) -> bool {
        let provoked = self.finding.iter().any(|finding| finding.cause == cause);
        provoked || self.allowed.iter().any(|allowed| allowed == cause)
    }
}

impl Finding {
    fn is(&self, found: &Value) -> bool {
        let devices = self.devices.as_ref();
        let address = self.address.as_ref();
        found["cause"] == *self.cause
            && devices.is_none_or(|devices| found["devices"] == Value::from(devices.clone()))
            && address.is_none_or(|first| found["addresses"][0][0] == **first)
            && (self.access.as_ref()).is_none_or(|access| found["access"] == **access)
    }
}

/// Units, by the start of a machine's name.
const UNITS: [(&str, &[&str]); 4] = [
    ("VT-d", &["vtd", "dmar"]),
    ("AMD-Vi", &["amd-vi"]),
    ("SMMUv3", &["smmuv3"]),
    ("RISC-V", &["riscv"]),
];

/// Findings of a cause.
#[derive(Default)]
struct Recall {
    /// Findings that are due, of each unit.
    due: [usize; UNITS.len()],
    found: usize,
    wrong: usize,
}

/// Counts the findings of a report by their cause.
fn count(machine: &str, expect: &Expect, report: &Value, causes: &mut BTreeMap<String, Recall>) {
    let of = |names: &[&str]| names.iter().any(|name| machine.starts_with(name));
    let unit = UNITS.iter().position(|(_, names)| of(names)).unwrap();
    let found = report["findings"].as_array().unwrap();
    for finding in &expect.finding {
        let recall = causes.entry(finding.cause.clone()).or_default();
        recall.due[unit] += 1;
        recall.found += usize::from(found.iter().any(|found| finding.is(found)));
    }
    for found in found {
        let cause = found["cause"].as_str().unwrap();
        if !expect.names(cause) {
            causes.entry(cause.to_owned()).or_default().wrong += 1;
        }
    }
}

/// Lines of a unit's driver after the boot.
#[derive(Default)]
struct Lines {
    all: usize,
    /// Lines of which a fact was made.
    decoded: usize,
    /// The rest, without numbers.
    rest: BTreeSet<String>,
}

/// Counts a unit's lines of a log.
fn lines(log: &str, units: &mut BTreeMap<&'static str, Lines>) {
    let unit_of = |text: &str| {
        let names = [
            ("VT-d", "DMAR"),
            ("VT-d", "dmar_fault"),
            ("AMD-Vi", "AMD-Vi"),
            ("SMMUv3", "arm-smmu-v3"),
            ("SMMUv3", "arm_smmu"),
            ("RISC-V IOMMU", "riscv,iommu"),
            ("RISC-V IOMMU", "riscv-iommu"),
            ("RISC-V IOMMU", "riscv_iommu"),
        ];
        let of = names.iter().find(|(_, word)| text.contains(word));
        of.map(|(unit, _)| *unit)
    };
    let (mut reader, mut events) = (Reader::new(), Vec::new());
    for (line, number) in log.lines().zip(1..) {
        let message = strip(line);
        reader.line(&message.text, number, message.time, &mut events);
    }
    reader.finish(&mut events);
    let mut decoded = BTreeSet::new();
    for event in events {
        match event {
            LogEvent::Fault(fault) => decoded.extend(fault.lines),
            LogEvent::Suppressed(suppressed) => decoded.extend([suppressed.line]),
            LogEvent::Overflow(note) => decoded.extend([note.line]),
            LogEvent::Dump(dump) => decoded.extend(dump.lines),
            _ => {}
        }
    }
    for (line, number) in log.lines().zip(1..) {
        let text = strip(line).text;
        let Some(unit) = unit_of(&text) else {
            continue;
        };
        let unit = units.entry(unit).or_default();
        unit.all += 1;
        if decoded.contains(&number) {
            unit.decoded += 1;
        } else {
            let kind = text.replace(|c: char| c.is_ascii_digit(), "");
            unit.rest.insert(kind);
        }
    }
}

/// Differences between a report and what is expected.
fn differences(expect: &Expect, report: &Value) -> Vec<String> {
    let found = report["findings"].as_array().unwrap();
    let mut all = Vec::new();
    for finding in &expect.finding {
        let of_it: Vec<_> = found.iter().filter(|found| finding.is(found)).collect();
        if of_it.is_empty() {
            all.push(format!("{} is missing", finding.cause));
        }
        let Some(provoked) = finding.count else {
            continue;
        };
        let counted: u64 = of_it
            .iter()
            .filter_map(|found| found["count"].as_u64())
            .sum();
        let exact = of_it.iter().all(|found| found["count_exact"] == true);
        let right = match exact {
            true => counted == provoked,
            false => counted > 0 && counted <= provoked,
        };
        if !right {
            let bound = if exact { "exactly" } else { "at least" };
            all.push(format!(
                "{}: {bound} {counted}, not {provoked}",
                finding.cause
            ));
        }
    }
    for found in found {
        let cause = found["cause"].as_str().unwrap();
        if !expect.names(cause) {
            all.push(format!("{cause} is wrong: {}", found["text"]));
        }
    }
    for note in report["notes"].as_array().unwrap() {
        let note = note.as_str().unwrap();
        if note.contains("not decoded") {
            all.push(note.to_owned());
        }
    }
    all
}

fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).unwrap_or_else(|error| panic!("{}: {error}", of.display()));
    let mut all: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.is_dir());
    all.sort();
    all
}

#[test]
fn each_cause_that_was_provoked_is_named_and_none_that_was_not() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/provoked");
    let mut wrong = Vec::new();
    let (mut cases, mut findings) = (0, 0);
    let (mut causes, mut units) = (BTreeMap::new(), BTreeMap::new());
    for machine in folders(&corpus) {
        for case in folders(&machine) {
            let expect = fs::read_to_string(case.join("expect.toml")).unwrap();
            let expect: Expect = toml::from_str(&expect).unwrap();
            let output = Command::cargo_bin("dmaspace")
                .unwrap()
                .current_dir(&case)
                .args(["explain", "--json"])
                .args(&expect.files)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}: {output:?}", case.display());
            let report = serde_json::from_slice(&output.stdout).unwrap();
            for difference in differences(&expect, &report) {
                let name = case.strip_prefix(&corpus).unwrap().display();
                wrong.push(format!("{name}: {difference}"));
            }
            let name = machine.file_name().unwrap().to_str().unwrap();
            count(name, &expect, &report, &mut causes);
            let log = fs::read_to_string(case.join("dmesg.txt")).unwrap_or_default();
            // Lines of a boot tell of no fault.
            if !log.contains("Linux version") {
                lines(&log, &mut units);
            }
            cases += 1;
            findings += expect.finding.len();
        }
    }
    println!("{cases} cases, {findings} findings");
    for (cause, Recall { due, found, wrong }) in causes {
        let due = due.map(|due| {
            if due == 0 {
                String::new()
            } else {
                due.to_string()
            }
        });
        println!("| `{cause}` | {} | {found} | {wrong} |", due.join(" | "));
    }
    for (unit, Lines { all, decoded, rest }) in units {
        println!("| {unit} | {all} | {decoded} | {rest:?} |");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        cases >= 104 && findings >= 136,
        "{cases} cases, {findings} findings"
    );
}

#[test]
fn a_difference_is_seen() {
    let expect = r#"
        files = []
        allowed = ["fault.null-address"]
        [[finding]]
        cause = "fault.not-mapped"
        devices = ["0000:00:05.0"]
        address = "0x1000"
        access = "write"
        count = 3
    "#;
    let expect: Expect = toml::from_str(expect).unwrap();
    let report = |cause: &str, address: &str, count: u64, exact: bool, note: &str| {
        serde_json::json!({
            "findings": [{
                "cause": cause, "devices": ["0000:00:05.0"], "addresses": [[address, address]],
                "access": "write", "count": count, "count_exact": exact, "text": "",
            }],
            "notes": [note],
        })
    };
    let of = |cause, address, count, exact, note| {
        differences(&expect, &report(cause, address, count, exact, note)).len()
    };
    assert_eq!(of("fault.not-mapped", "0x1000", 3, true, ""), 0);
    assert_eq!(of("fault.not-mapped", "0x1000", 2, false, ""), 0);
    assert_eq!(of("fault.not-mapped", "0x1000", 2, true, ""), 1);
    assert_eq!(of("fault.not-mapped", "0x1000", 4, false, ""), 1);
    assert_eq!(
        of(
            "fault.not-mapped",
            "0x1000",
            3,
            true,
            "dmesg.txt:1: not decoded"
        ),
        1
    );
    // Missing, and with no count.
    assert_eq!(of("fault.not-mapped", "0x2000", 3, true, ""), 2);
    assert_eq!(of("fault.null-address", "0x1000", 3, true, ""), 2);
    assert_eq!(of("fault.no-access", "0x1000", 3, true, ""), 3);
}
