//! The command line `dmaspace` on this kernel: `check` with the software unit and for the machine's devices, and
//! `devices`.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, Machine, NVME};
use rustix::{
    process::{Pid, Signal, kill_process},
    thread::{CapabilitySet, remove_capability_from_bounding_set},
};
use serde_json::{Value, json};

use crate::{limit::limited, pci::Device, semantics::table::RESERVED};

const PROGRAM: &str = "/bin/dmaspace";

/// Bytes that are mapped.
const SIZE: u64 = 32 << 20;

pub(crate) fn small_pages(_: &Machine) -> anyhow::Result<()> {
    check("4k", 0)
}

pub(crate) fn transparent_huge_pages(_: &Machine) -> anyhow::Result<()> {
    check("thp", SIZE)
}

pub(crate) fn huge_pages(_: &Machine) -> anyhow::Result<()> {
    check("hugetlb-2m", SIZE)
}

fn run(arguments: &[&str]) -> anyhow::Result<(Output, String)> {
    let output = Command::new(PROGRAM)
        .args(arguments)
        .arg("--json")
        .output()
        .context("dmaspace cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Ok((output, said))
}

/// The report of a command that succeeds.
pub(crate) fn report(arguments: &[&str]) -> anyhow::Result<Value> {
    let (output, said) = run(arguments)?;
    // A failed job has a report, too, which names the failure.
    let report = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{}: {said}{report}", output.status);
    serde_json::from_str(&report).context("no report")
}

/// Looks whether a report says this.
pub(crate) fn says(report: &Value, what: &str, expected: &Value) -> anyhow::Result<()> {
    let found = report.pointer(what).unwrap_or(&Value::Null);
    ensure!(found == expected, "{what} is {found}, not {expected}");
    Ok(())
}

/// Looks whether `huge` bytes lie in huge pages, and every step was right.
fn check(backing: &str, huge: u64) -> anyhow::Result<()> {
    let report = report(&["check", "--size", &SIZE.to_string(), "--backing", backing])?;
    for (what, expected) in [
        ("/memory/backing", json!(backing)),
        ("/memory/size_bytes", json!(SIZE)),
        ("/memory/huge_bytes", json!(huge)),
        // Real frames: this is root.
        ("/memory/addresses", json!("pagemap")),
        ("/memory/pin", json!("io_uring")),
        ("/memory/charged_bytes", json!(SIZE)),
        ("/memory/charge_steps", json!(1)),
        ("/dma/wrong_bytes", json!(0)),
        ("/dma/faults_unexpected", json!(0)),
        ("/dma/reached_in_holes", json!(0)),
    ] {
        says(&report, what, &expected)?;
    }
    steps(&report, &[])
}

/// All steps were right; those that are named here were refused, for want of this, and no others.
fn steps(report: &Value, refused: &[(&str, Option<&str>)]) -> anyhow::Result<()> {
    let steps = report["steps"].as_array().context("no steps")?;
    for step in steps {
        says(step, "/right", &json!(true)).with_context(|| step.to_string())?;
    }
    let found = steps.iter().filter(|step| !step["refused"].is_null());
    let found: Vec<_> = found
        .map(|step| {
            let capability = step["refused"]["capability"].as_str();
            (step["step"].as_str().unwrap_or_default(), capability)
        })
        .collect();
    ensure!(found == refused, "refused {found:?}, not {refused:?}");
    Ok(())
}

/// Refusals of both interfaces of the kernel on units that cannot tell what is dirty.
const REFUSED: [(&str, Option<&str>); 4] = [
    ("nodes", Some("table_placement")),
    ("hole", Some("hitless_cut")),
    ("track", Some("table_placement")),
    ("harvest", Some("page_dirty")),
];

/// The report of a check with tables placed by this policy.
pub(crate) fn placed(policy: &str) -> anyhow::Result<Value> {
    let size = SIZE.to_string();
    let report = report(&["check", "--size", &size, "--placement", policy])?;
    for (what, expected) in [
        ("/placement/policy", json!(policy)),
        ("/placement/misplaced", json!([])),
        ("/memory/charged_bytes", json!(SIZE)),
        ("/dma/wrong_bytes", json!(0)),
    ] {
        says(&report, what, &expected)?;
    }
    Ok(report)
}

/// The same by containers, for devices of several nodes: of each domain, the node and how many devices
/// it has. Memory is charged for each.
pub(crate) fn placed_by_vfio(
    policy: &str,
    devices: &[Device],
    domains: &[(Option<u32>, u64)],
) -> anyhow::Result<()> {
    let size = SIZE.to_string();
    let mut arguments = vec!["check", "--backend", "vfio", "--size", &size];
    arguments.extend(["--placement", policy]);
    arguments.extend(devices.iter().flat_map(|device| ["--device", device.0]));
    let report = report(&arguments)?;
    let charged = SIZE * domains.len() as u64;
    for (what, expected) in [
        ("/placement/policy", json!(policy)),
        ("/memory/charged_bytes", json!(charged)),
        ("/memory/mapped/locked_bytes", json!(charged)),
        ("/kernel/mappings", json!(domains.len())),
        ("/left/mappings", json!(0)),
    ] {
        says(&report, what, &expected)?;
    }
    for (nth, (node, devices)) in domains.iter().enumerate() {
        for (what, expected) in [
            ("node", json!(node)),
            ("devices", json!(devices)),
            ("charged_bytes", json!(SIZE)),
        ] {
            says(
                &report,
                &format!("/placement/domains/{nth}/{what}"),
                &expected,
            )?;
        }
    }
    Ok(())
}

/// A check by an interface of the kernel. Which `counter` of the kernel is charged, and what `/proc/self/status` shows of
/// it, depends on the interface.
pub(crate) fn check_by(backend: &str, backing: &str, device: &'static str) -> anyhow::Result<()> {
    Device(device).bind_to_vfio()?;
    let size = SIZE.to_string();
    let report = report(&[
        "check",
        "--backend",
        backend,
        "--device",
        device,
        "--size",
        &size,
        "--backing",
        backing,
    ])?;
    let (counter, counted, most) = match backend {
        "vfio" => ("mm->locked_vm", "locked_bytes", json!(65_535)),
        _ => ("mm->pinned_vm", "pinned_bytes", Value::Null),
    };
    for (what, expected) in [
        ("/backend", json!(backend)),
        ("/kernel/devices/0/address", json!(device)),
        ("/kernel/devices/0/group", json!(Device(device).group()?)),
        ("/kernel/granule_bytes", json!(4096)),
        (
            "/kernel/windows/0/last",
            json!(format!("{:#x}", RESERVED.start - 1)),
        ),
        ("/kernel/mappings", json!(1)),
        ("/kernel/most_mappings", most),
        ("/memory/backing", json!(backing)),
        ("/memory/size_bytes", json!(SIZE)),
        ("/memory/counter", json!(counter)),
        ("/memory/charged_bytes", json!(SIZE)),
        (&format!("/memory/mapped/{counted}"), json!(SIZE)),
        ("/left/kernel/locked_bytes", json!(0)),
        ("/left/kernel/pinned_bytes", json!(0)),
        // Not told by the kernel, or not done.
        ("/tables", Value::Null),
        ("/memory/runs", Value::Null),
        ("/compared", Value::Null),
        ("/dma", Value::Null),
    ] {
        says(&report, what, &expected)?;
    }
    steps(&report, &REFUSED)
}

/// A check without the privilege to lock without limit: the kernel refuses what goes over it, and nothing of that is
/// left. Programs that a thread starts cannot get back what was taken from its bounding set.
pub(crate) fn meets_the_limit(backend: &'static str) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let size = SIZE.to_string();
    let run = move || -> anyhow::Result<Value> {
        remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK)?;
        report(&[
            "check",
            "--backend",
            backend,
            "--device",
            EDU,
            "--size",
            &size,
        ])
    };
    let done = limited(SIZE + (4 << 20), || thread::spawn(run).join())?;
    let report = done.map_err(|_| anyhow::anyhow!("panicked"))??;
    let counter = match backend {
        "vfio" => "mm->locked_vm",
        _ => "user->locked_vm",
    };
    says(&report, "/memory/counter", &json!(counter))?;
    steps(&report, &[&[("limit", None)], &REFUSED[..]].concat())
}

/// A volunteer's report for a device names it by its numbers alone.
pub(crate) fn reported(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let file = "/tmp/report.json";
    let output = Command::new(PROGRAM)
        .args(["check", "--backend", "iommufd", "--device", EDU])
        .args(["--size", "4M", "--report", file])
        .output()
        .context("dmaspace cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    let text = fs::read_to_string(file)?;
    ensure!(!text.contains(EDU) && !text.contains("0x"), "{text}");
    let report: Value = serde_json::from_str(&text)?;
    says(&report, "/devices", &json!(["1234:11e8"]))?;
    let units = report["units"].as_array().context("no units")?;
    ensure!(!units.is_empty(), "{text}");
    says(&report, "/right", &json!(true))
}

/// A signal while memory is mapped ends the program, or comes after its work was done. Either way it gives the device
/// back: the tests behind this one have it.
pub(crate) fn interrupted(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let file = "/tmp/interrupted.json";
    let mut child = Command::new(PROGRAM)
        .args(["-v", "check", "--backend", "vfio", "--device", EDU])
        .args(["--size", "32M", "--report", file])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("dmaspace cannot be started")?;
    let mut lines = BufReader::new(child.stderr.take().context("no stderr")?).lines();
    let reached = lines.any(|line| line.is_ok_and(|line| line.contains("check::job: map")));
    ensure!(reached, "it has not come to the map");
    kill_process(Pid::from_child(&child), Signal::INT)?;
    let said: Vec<String> = lines.collect::<Result<_, _>>()?;
    let output = child.wait_with_output()?;
    let last = said.last().context("it has said nothing")?;
    match output.status.code() {
        Some(0) => ensure!(fs::exists(file)?, "it has written no report: {last}"),
        Some(130) if last.contains("nothing is left pinned") => {
            ensure!(output.stdout.is_empty(), "it has reported");
            ensure!(!fs::exists(file)?, "it has written a report");
        }
        // The kernel may give up first; and while the program reports there is nothing to give back.
        Some(130) => ensure!(last.contains("interrupted"), "{last}"),
        _ => bail!("{}: {last}", output.status),
    }
    let group = Path::new("/dev/vfio").join(Device(EDU).group()?.to_string());
    fs::File::open(&group).with_context(|| format!("{} is still in use", group.display()))?;
    Ok(())
}

/// Entry of a device in `devices`.
fn listed(device: Device) -> anyhow::Result<Value> {
    let report = report(&["devices"])?;
    says(&report, "/vfio", &json!(true))?;
    says(&report, "/iommufd", &json!(true))?;
    let all = report["devices"].as_array().context("no list of devices")?;
    let one = all.iter().find(|one| one["address"] == device.0);
    one.cloned()
        .with_context(|| format!("{} is not on the list", device.0))
}

/// Commands that `devices` has for the device's group.
fn commands(device: Device) -> anyhow::Result<Vec<String>> {
    let report = report(&["devices"])?;
    let groups = report["groups"].as_array().context("no groups")?;
    let number = json!(device.group()?);
    let group = groups.iter().find(|group| group["group"] == number);
    let group = group.context("the device's group is not on the list")?;
    let commands = group["bind"].as_array().context("no commands")?;
    let commands = commands.iter().filter_map(Value::as_str);
    Ok(commands.map(str::to_owned).collect())
}

/// `devices` says how a device is bound, and `check` refuses it with the same commands; when that was
/// done, `devices` says in how many ways it can be used.
pub(crate) fn devices(_: &Machine) -> anyhow::Result<()> {
    let device = Device(NVME);
    let before = listed(device)?;
    says(&before, "/state", &json!("bind"))?;
    says(&before, "/driver", &Value::Null)?;
    says(&before, "/group", &json!(device.group()?))?;
    says(&before, "/unit", &json!(device.link("iommu")?))?;
    let bind = commands(device)?;
    for backend in ["vfio", "iommufd"] {
        let (output, said) = run(&["check", "--backend", backend, "--device", NVME])?;
        ensure!(output.status.code() == Some(2), "{}: {said}", output.status);
        let expected = format!("bound to no driver; as root: {}", bind.join(" && "));
        ensure!(said.ends_with(&expected), "{said}");
    }
    for command in &bind {
        // There is no shell here; they are all of one kind.
        let (text, path) = command
            .strip_prefix("echo ")
            .and_then(|rest| rest.split_once(" > "))
            .with_context(|| format!("not understood: {command}"))?;
        fs::write(path, text).with_context(|| command.clone())?;
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
    let left = commands(device)?;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}
