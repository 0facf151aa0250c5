//! The command line `dmaspace` on this kernel: `map` with the software unit, and `devices`.

use std::{fs, process::Command};

use anyhow::{Context as _, ensure};
use guest::machines::{Machine, NVME};
use serde_json::{Value, json};

use crate::pci::Device;

/// Bytes that are mapped.
const SIZE: u64 = 32 << 20;

pub(crate) fn small_pages(_: &Machine) -> anyhow::Result<()> {
    map("4k", 0)
}

pub(crate) fn transparent_huge_pages(_: &Machine) -> anyhow::Result<()> {
    map("thp", SIZE)
}

pub(crate) fn huge_pages(_: &Machine) -> anyhow::Result<()> {
    map("hugetlb-2m", SIZE)
}

/// The report of a command that succeeds.
fn report(arguments: &[&str]) -> anyhow::Result<Value> {
    let output = Command::new("/bin/dmaspace")
        .args(arguments)
        .arg("--json")
        .output()
        .context("dmaspace cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        said.trim()
    );
    serde_json::from_slice(&output.stdout).context("no report")
}

/// Looks whether a report says this.
fn says(report: &Value, what: &str, expected: &Value) -> anyhow::Result<()> {
    let found = report.pointer(what).unwrap_or(&Value::Null);
    ensure!(found == expected, "{what} is {found}, not {expected}");
    Ok(())
}

/// Looks whether `huge` bytes lie in huge pages, all was written and nothing was wrong.
fn map(backing: &str, huge: u64) -> anyhow::Result<()> {
    let report = report(&["map", "--size", &SIZE.to_string(), "--backing", backing])?;
    for (what, expected) in [
        ("/memory/backing", json!(backing)),
        ("/memory/size_bytes", json!(SIZE)),
        ("/memory/huge_bytes", json!(huge)),
        // Real frames: this is root.
        ("/memory/addresses", json!("pagemap")),
        ("/charge/pin", json!("io_uring")),
        ("/charge/charged_bytes", json!(SIZE)),
        ("/dma/written_bytes", json!(SIZE)),
        ("/dma/wrong_bytes", json!(0)),
        ("/dma/faults", json!(0)),
    ] {
        says(&report, what, &expected)?;
    }
    Ok(())
}

/// What `devices` says of one.
fn listed(device: Device) -> anyhow::Result<Value> {
    let report = report(&["devices"])?;
    says(&report, "/vfio", &json!(true))?;
    says(&report, "/iommufd", &json!(true))?;
    let all = report["devices"].as_array().context("no list of devices")?;
    let one = all.iter().find(|one| one["address"] == device.0);
    one.cloned()
        .with_context(|| format!("{} is not on the list", device.0))
}

/// `devices` says how a device is bound; when that was done, in how many ways it can be used.
pub(crate) fn devices(_: &Machine) -> anyhow::Result<()> {
    let device = Device(NVME);
    let before = listed(device)?;
    says(&before, "/state", &json!("bind"))?;
    says(&before, "/driver", &Value::Null)?;
    says(&before, "/group", &json!(device.group()?))?;
    says(&before, "/unit", &json!(device.link("iommu")?))?;
    for command in before["bind"].as_array().context("no commands")? {
        let command = command.as_str().unwrap_or_default();
        // There is no shell here; they are all of one kind.
        let (text, path) = command
            .strip_prefix("echo ")
            .and_then(|rest| rest.split_once(" > "))
            .with_context(|| format!("not understood: {command}"))?;
        fs::write(path, text).with_context(|| command.to_owned())?;
    }
    let after = listed(device)?;
    says(&after, "/state", &json!("ready"))?;
    says(&after, "/driver", &json!("vfio-pci"))?;
    says(
        &after,
        "/ways",
        &json!(["type1", "compatibility", "iommufd"]),
    )?;
    says(&after, "/cdev", &json!(device.cdev()?))?;
    says(&after, "/bind", &json!([]))
}
