//! `dmaspace life` over the interfaces of the kernel, with `edu`, which copies all the time.

use std::{process::Command, thread};

use anyhow::{Context as _, ensure};
use guest::machines::EDU;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde_json::{Value, json};

use crate::{limit::limited, pci::Device, program::says};

/// Bytes of the virtual machine's memory.
const SIZE: u64 = 32 << 20;
/// The limit on locked memory: a user is charged for both owners, and for a little besides.
const LIMIT: u64 = 2 * SIZE + (2 << 20);

/// What each step has come to: done, or refused for want of this.
type Steps = [(&'static str, Option<&'static str>); 14];

/// What all of them refuse in the same way, but for the tables of each node.
const fn steps(roots: &'static str) -> Steps {
    let (cut, leaves) = (Some("hitless_cut"), Some("table_placement"));
    [
        ("memory", None),
        ("pin", None),
        ("roots", Some(roots)),
        ("dma", None),
        ("hole", cut),
        ("close", None),
        ("track", leaves),
        ("harvest", Some("page_dirty")),
        ("merge", leaves),
        ("inflate", None),
        ("deflate", None),
        ("hand-over", None),
        ("successor", cut),
        ("tear-down", None),
    ]
}

pub(crate) fn by_type1() -> anyhow::Result<()> {
    let report = unprivileged("vfio")?;
    lived(&report, &steps("node_tables"))?;
    says(&report, "/memory/counter", &json!("mm->locked_vm"))
}

pub(crate) fn by_iommufd() -> anyhow::Result<()> {
    let report = unprivileged("iommufd")?;
    lived(&report, &steps("table_placement"))?;
    says(&report, "/memory/counter", &json!("user->locked_vm"))
}

/// What iommufd maps for a privileged process is not handed over, and that is said; as text, for people to
/// read in the log.
pub(crate) fn privileged() -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let output = life("iommufd").output()?;
    let shown = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{shown}");
    ensure!(output.status.success(), "{}: {said}{shown}", output.status);
    for line in [
        "refused; stays with this process",
        "as pinned by it for good",
        "outside the holes: 0;",
        "OK  every check held",
    ] {
        ensure!(shown.contains(line), "no {line:?} in {shown}");
    }
    Ok(())
}

fn life(backend: &str) -> Command {
    let mut command = Command::new("/bin/dmaspace");
    // Wide enough that no note is wrapped.
    command.env("COLUMNS", "200");
    command.args(["life", "--backend", backend, "--device", EDU]);
    command.args(["--size", &SIZE.to_string(), "--backing", "memfd"]);
    command
}

/// The report of a life without the privilege to lock without limit, with a limit that is enough. Programs
/// that a thread starts cannot get back what was taken from its bounding set.
fn unprivileged(backend: &'static str) -> anyhow::Result<Value> {
    Device(EDU).bind_to_vfio()?;
    let run = move || -> anyhow::Result<Value> {
        remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK)?;
        let mut command = life(backend);
        let output = command.arg("--json").output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let report = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{}: {said}{report}", output.status);
        serde_json::from_slice(&output.stdout).context("no report")
    };
    let done = limited(LIMIT, || thread::spawn(run).join())?;
    done.map_err(|_| anyhow::anyhow!("panicked"))?
}

/// Every step is done, or refused by name; no byte was wrong, no fault where no hole was, and nothing is
/// left.
fn lived(report: &Value, expected: &Steps) -> anyhow::Result<()> {
    let steps = report["steps"].as_array().context("no steps")?;
    ensure!(steps.len() == expected.len(), "{} steps", steps.len());
    for (step, (name, refused)) in steps.iter().zip(expected) {
        says(step, "/step", &json!(name))?;
        says(step, "/right", &json!(true)).with_context(|| step.to_string())?;
        let found = step["refused"]["capability"].as_str();
        ensure!(found == *refused, "{name}: {found:?}, not {refused:?}");
        let said = step["refused"]["error"].as_str().unwrap_or_default();
        ensure!(
            refused.is_none() || said.contains(" cannot "),
            "{name}: {said:?}"
        );
    }
    let seven_of_eight = json!(SIZE / 8 * 7);
    says(&steps[9], "/bytes", &seven_of_eight)?;
    says(&steps[10], "/bytes", &seven_of_eight)?;
    for (what, expected) in [
        ("/devices/0/address", json!(EDU)),
        ("/memory/size_bytes", json!(SIZE)),
        ("/dma/wrong_bytes", json!(0)),
        ("/dma/faults_outside_holes", json!(0)),
        ("/dma/reached_in_holes", json!(0)),
        ("/left/ledger_bytes", json!(0)),
        (
            "/left/kernel",
            json!({"locked_bytes": 0, "pinned_bytes": 0}),
        ),
        ("/left/successor_ledger_bytes", json!(0)),
        (
            "/left/successor_kernel",
            json!({"locked_bytes": 0, "pinned_bytes": 0}),
        ),
        ("/left/areas", json!(0)),
    ] {
        says(report, what, &expected)?;
    }
    let at_least = |what: &str, least: u64| {
        let found = report["dma"][what].as_u64().unwrap_or(0);
        ensure!(found >= least, "{what}: {found}");
        Ok(())
    };
    at_least("accesses", 48)?;
    at_least("faults_in_holes", 2)
}
