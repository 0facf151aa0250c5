//! Why is this machine slow: how a process's memory is backed, what mapping it for a device costs, which
//! change would help most, and on which node page tables should lie.
//!
//! For somebody with a machine that is there already; `docs/guides/slow-machine.md` says how to read it. The
//! same is on the command line: `dmaspace inspect`, `dmaspace numa plan`. Nothing is changed, and the process
//! is not stopped.
//!
//!     cargo run -p dmaspace-examples --example slow_machine -- $(pidof qemu-system-x86_64)

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context as _, ensure};
use dmaspace::devices::Places;
use dmaspace::inspect::{ProcessReport, inspect};
use dmaspace::numa::Plan;
use dmaspace::topology::Topology;
use hostmem::{Backing, Mapping};
use runs::Bytes;

/// Memory that is made to be looked at when no process is named.
const OWN: u64 = 16 << 20;

fn main() -> anyhow::Result<()> {
    if let Some(pid) = std::env::args().nth(1) {
        let pid = pid.parse().context("no number of a process")?;
        let report = inspect(pid, true)?;
        show(&report);
        return places(report.mappable_bytes);
    }
    println!(
        "no process was named: this one, with {} in small pages",
        Bytes(OWN)
    );
    let memory = Mapping::new(Backing::Anon4K, OWN, None)?;
    memory.populate(&mut |_| ControlFlow::Continue(()))?;
    let report = inspect(std::process::id(), false)?;
    show(&report);
    ensure!(report.present_bytes >= OWN, "not all of it is seen");
    for cost in &report.costs {
        ensure!(
            cost.leaf_count >= cost.runs.max(1),
            "{}: too few leaves",
            cost.format
        );
    }
    places(report.mappable_bytes)
}

/// What there is, what it costs, what would help.
fn show(report: &ProcessReport) {
    let bytes = Bytes(report.present_bytes);
    println!(
        "{} ({}): {bytes} that a device could be given",
        report.name, report.pid
    );
    for missing in &report.missing {
        println!("  not known: {}: {}", missing.what, missing.why);
    }
    for entries in &report.entries {
        println!(
            "  {} in pages of {}",
            Bytes(entries.bytes),
            Bytes(entries.page_bytes)
        );
    }
    for cost in &report.costs {
        println!(
            "  {}: {} runs, {} leaves, {} of tables, an IOTLB of 64 reaches {}",
            cost.format,
            cost.runs,
            cost.leaf_count,
            Bytes(cost.table_bytes),
            Bytes(cost.reach_64_bytes)
        );
    }
    for advice in &report.advice {
        println!("  found: {}", advice.finding);
        println!("  change: {}", advice.setting);
    }
}

/// Where page tables would lie by each policy, on this machine and on one with two sockets.
fn places(memory: u64) -> anyhow::Result<()> {
    let two = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/two-sockets.toml");
    let two = Topology::load(&two)?;
    match Topology::read(&Places::default()) {
        Ok(here) => plan("this machine", &here, memory),
        // Not every machine shows its devices.
        Err(error) => println!("this machine: {error}"),
    }
    plan("two sockets", &two, memory);
    Ok(())
}

fn plan(name: &str, topology: &Topology, memory: u64) {
    println!(
        "{name}: {} nodes, {} devices",
        topology.nodes().len(),
        topology.devices().len()
    );
    for policy in Plan::new(topology, memory).policies {
        let remote = policy
            .devices
            .iter()
            .filter(|device| device.node != device.tables_on);
        println!(
            "  {:?}: {} tables, {} devices walk remote ones",
            policy.placement,
            policy.domains.len(),
            remote.count()
        );
    }
}
