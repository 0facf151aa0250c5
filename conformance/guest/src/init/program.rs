//! The command line `dmaspace` on this kernel: `map` with the software unit and for the machine's
//! devices, and `devices`.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, ensure};
use guest::machines::{EDU, Machine, NVME};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::{pci::Device, semantics::table::RESERVED};

const PROGRAM: &str = "/bin/dmaspace";

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
    // Of a job with something wrong there is a report, which says what.
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

/// The report of a map with tables placed by this policy.
pub(crate) fn placed(policy: &str) -> anyhow::Result<Value> {
    let size = SIZE.to_string();
    let report = report(&["map", "--size", &size, "--placement", policy])?;
    for (what, expected) in [
        ("/placement/policy", json!(policy)),
        ("/placement/misplaced", json!([])),
        ("/charge/charged_bytes", json!(SIZE)),
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
    let mut arguments = vec![
        "map",
        "--backend",
        "vfio",
        "--size",
        &size,
        "--placement",
        policy,
    ];
    arguments.extend(devices.iter().flat_map(|device| ["--device", device.0]));
    let report = report(&arguments)?;
    let charged = SIZE * domains.len() as u64;
    for (what, expected) in [
        ("/placement/policy", json!(policy)),
        ("/charge/charged_bytes", json!(charged)),
        ("/dma/devices", json!(devices.len())),
        ("/dma/wrong_bytes", json!(0)),
        ("/dma/neighbour_reached", json!(0)),
        ("/backend/mappings/made", json!(domains.len())),
        ("/backend/mappings/left", json!(0)),
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
    let before = report["charge"]["before"]["locked_bytes"].as_u64();
    let mapped = before.context("no counter")? + charged;
    says(&report, "/charge/mapped/locked_bytes", &json!(mapped))
}

/// The same by an interface of the kernel, for `edu`, which copies samples. Which `counter` of the
/// kernel is charged, and what `/proc/self/status` shows of it, depends on the interface.
pub(crate) fn map_by(backend: &str, backing: &str) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let report = report(&[
        "map",
        "--backend",
        backend,
        "--device",
        EDU,
        "--size",
        &SIZE.to_string(),
        "--backing",
        backing,
    ])?;
    let cdev = Device(EDU).cdev()?;
    let (counter, counted, available, cdev) = match backend {
        "vfio" => ("mm->locked_vm", "locked_bytes", json!(65_534), Value::Null),
        _ => ("mm->pinned_vm", "pinned_bytes", Value::Null, json!(cdev)),
    };
    let before = report["charge"]["before"][counted].as_u64();
    let mapped = before.context("no counter")? + SIZE;
    for (what, expected) in [
        ("/backend/name", json!(backend)),
        ("/backend/device/address", json!(EDU)),
        ("/backend/device/group", json!(Device(EDU).group()?)),
        ("/backend/device/cdev", cdev),
        ("/backend/granule_bytes", json!(4096)),
        (
            "/backend/windows/0/last",
            json!(format!("{:#x}", RESERVED.start - 1)),
        ),
        ("/backend/mappings/made", json!(1)),
        ("/backend/mappings/available", available),
        ("/backend/mappings/left", json!(0)),
        ("/memory/backing", json!(backing)),
        ("/memory/size_bytes", json!(SIZE)),
        ("/charge/counter", json!(counter)),
        ("/charge/charged_bytes", json!(SIZE)),
        (&format!("/charge/mapped/{counted}"), json!(mapped)),
        ("/charge/after", report["charge"]["before"].clone()),
        ("/dma/sample/engine", json!("edu")),
        ("/dma/sample/copies", json!(16)),
        ("/dma/sample/compared_bytes", json!(SIZE)),
        ("/dma/read_bytes", json!(16 * 2048)),
        ("/dma/written_bytes", json!(16 * 2048)),
        ("/dma/wrong_bytes", json!(0)),
        ("/dma/neighbour_accesses", json!(4)),
        ("/dma/neighbour_reached", json!(0)),
        // What the kernel does not tell.
        ("/tables", Value::Null),
        ("/layout", Value::Null),
        ("/memory/runs", Value::Null),
        ("/compared", Value::Null),
    ] {
        says(&report, what, &expected)?;
    }
    Ok(())
}

/// A signal while the device copies ends the program, which gives the device back: the tests behind
/// this one have it.
pub(crate) fn interrupted(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let mut child = Command::new(PROGRAM)
        .args(["-v", "map", "--backend", "vfio", "--device", EDU])
        .args(["--size", "32M"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("dmaspace cannot be started")?;
    let mut lines = BufReader::new(child.stderr.take().context("no stderr")?).lines();
    let reached = lines.any(|line| line.is_ok_and(|line| line.contains("DMA check")));
    ensure!(reached, "it has not come to the DMA check");
    kill_process(Pid::from_child(&child), Signal::INT)?;
    let said: Vec<String> = lines.collect::<Result<_, _>>()?;
    let output = child.wait_with_output()?;
    ensure!(output.status.code() == Some(130), "{}", output.status);
    ensure!(output.stdout.is_empty(), "it has reported");
    let last = said.last().context("it has said nothing")?;
    ensure!(last.contains("interrupted; nothing is left"), "{last}");
    Ok(())
}

/// The figures of a group, after checking that there are some of this operation and format.
fn measured(group: &str, wanted: &[(&str, &str)]) -> anyhow::Result<()> {
    let file = format!("/tmp/{group}.json");
    let output = Command::new(PROGRAM)
        .args(["bench", group, "--quick", "--json", &file])
        // Little: it is emulated.
        .args(["--memory", "8M"])
        .output()
        .context("dmaspace cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    let figures: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    let rows = figures["groups"][0]["rows"].as_array().context("no rows")?;
    for (op, format) in wanted {
        let of = |row: &&Value| row["op"] == *op && row["format"] == *format;
        let row = rows.iter().find(of);
        let row = row.with_context(|| {
            format!("no {op} by {format:?}: {}", figures["groups"][0]["not_run"])
        })?;
        ensure!(row["samples"].as_u64() > Some(0), "{row}");
    }
    Ok(())
}

/// `bench numa` has what it measures beside what it simulates, where there are two nodes.
pub(crate) fn bench_numa(_: &Machine) -> anyhow::Result<()> {
    let walk = "walk by a processor, measured: tables";
    let [near, far] = ["near", "far"].map(|tables| format!("{walk} {tables}"));
    measured(
        "numa",
        &[("both sockets", "vtd-ss"), (&near, ""), (&far, "")],
    )
}

/// `bench pin` measures VFIO and iommufd where a device is ready for them.
pub(crate) fn bench_pin(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    measured(
        "pin",
        &[("map for DMA", "vfio"), ("map for DMA", "iommufd")],
    )
}

/// Memory is mapped for a device that nobody here can have do DMA, and that is said.
pub(crate) fn without_a_driver(_: &Machine) -> anyhow::Result<()> {
    Device(NVME).bind_to_vfio()?;
    for backend in ["vfio", "iommufd"] {
        let report = report(&[
            "map",
            "--backend",
            backend,
            "--device",
            NVME,
            "--size",
            "4M",
        ])?;
        for (what, expected) in [
            ("/backend/device/address", json!(NVME)),
            ("/backend/mappings/made", json!(1)),
            ("/backend/mappings/left", json!(0)),
            ("/charge/charged_bytes", json!(4 << 20)),
            ("/dma/not_checked", json!("no driver for 1b36:0010 here")),
            ("/dma/sample", Value::Null),
            ("/dma/read_bytes", json!(0)),
            ("/times/dma_check_ns", Value::Null),
        ] {
            says(&report, what, &expected)?;
        }
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

/// `devices` says how a device is bound, and `map` refuses it with the same commands; when that was
/// done, `devices` says in how many ways it can be used.
pub(crate) fn devices(_: &Machine) -> anyhow::Result<()> {
    let device = Device(NVME);
    let before = listed(device)?;
    says(&before, "/state", &json!("bind"))?;
    says(&before, "/driver", &Value::Null)?;
    says(&before, "/group", &json!(device.group()?))?;
    says(&before, "/unit", &json!(device.link("iommu")?))?;
    let commands = before["bind"].as_array().context("no commands")?;
    let commands: Vec<&str> = commands.iter().filter_map(Value::as_str).collect();
    for backend in ["vfio", "iommufd"] {
        let (output, said) = run(&["map", "--backend", backend, "--device", NVME])?;
        ensure!(output.status.code() == Some(2), "{}: {said}", output.status);
        let expected = format!("bound to no driver; as root: {}", commands.join(" && "));
        ensure!(said.ends_with(&expected), "{said}");
    }
    for command in commands {
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
