//! Two memory nodes with devices below each: tables lie where the devices are, over memory that is pinned
//! once, and memory is brought in where it is to be.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{Machine, Unit};
use hostmem::{Backing, KernelNodes, Mapping, Population};
use ioas::{
    Endpoint, Ioas, Ledger, NodeTables, Placement,
    iommufd::{BoundDevice, SpaceMapper},
};
use iommu::NodeId;
use iopt::Prot;
use runs::Span;
use serde_json::json;

use crate::{
    dma::{self, IOVA},
    edu::{BUFFER, Edu},
    kernel_tables,
    pci::{self, Device},
    program,
    space::{Interface as _, Iommufd, host_memory},
};

/// `edu`: QEMU, docs/specs/edu.
const EDU: (&str, &str) = ("0x1234", "0x11e8");
/// Bytes that are mapped.
const SIZE: u64 = 4 << 20;

/// The devices of each node, in the order of the nodes: none of the guest's own root bus.
pub(crate) fn devices() -> anyhow::Result<Vec<(u32, Device)>> {
    let mut found = Vec::new();
    for address in pci::names(Path::new("/sys/bus/pci/devices"))? {
        // It stays: there are a few of them.
        let device = Device(Box::leak(address.into_boxed_str()));
        let says = |file: &str| fs::read_to_string(device.path(file));
        let kind = (says("vendor")?, says("device")?);
        // Kernels without nodes have no such file.
        let node: i32 = match says("numa_node") {
            Err(error) if error.kind() == ErrorKind::NotFound => -1,
            said => said?.trim().parse()?,
        };
        if (kind.0.trim(), kind.1.trim()) == EDU
            && let Ok(node) = u32::try_from(node)
        {
            found.push((node, device));
        }
    }
    found.sort_by_key(|(node, _)| *node);
    Ok(found)
}

/// The guest sees what was planned: two nodes with memory, and devices of each.
pub(crate) fn planned(_: &Machine) -> anyhow::Result<()> {
    let memory = fs::read_to_string("/sys/devices/system/node/has_memory")?;
    ensure!(memory.trim() == "0-1", "memory is on the nodes {memory}");
    let nodes: Vec<u32> = devices()?.iter().map(|(node, _)| *node).collect();
    ensure!(
        nodes == [0, 0, 1, 1],
        "the devices are on the nodes {nodes:?}"
    );
    Ok(())
}

/// `dmaspace` reads from sysfs and from the firmware what is there: nodes of devices and of the
/// unit, and the address by which a driver names its unit.
pub(crate) fn topology(machine: &Machine) -> anyhow::Result<()> {
    let plan = program::report(&["numa", "--memory", "1G"])?;
    let list = |name: &str| plan["topology"][name].as_array().context("no topology");
    let read = |path: &Path| fs::read_to_string(path).map(|text| text.trim().to_owned());
    // Values below 0: unknown.
    let node = |path: &Path| anyhow::Ok(u32::try_from(read(path)?.parse::<i32>()?).ok());
    let devices = list("devices")?;
    ensure!(!devices.is_empty(), "no devices");
    for device in devices {
        let address = device["address"].as_str().context("no address")?;
        let path = Path::new("/sys/bus/pci/devices").join(address);
        program::says(device, "/node", &json!(node(&path.join("numa_node"))?))?;
    }
    let mut units = list("units")?.iter();
    let is_ours = |name: &str| name.starts_with(machine.unit.sysfs());
    let unit = units.find(|unit| unit["name"].as_str().is_some_and(is_ours));
    let unit = unit.context("no unit")?;
    let name = unit["name"].as_str().unwrap_or_default();
    let path = Path::new("/sys/class/iommu").join(name);
    let (at, node) = match machine.unit {
        Unit::Intel => {
            let registers = read(&path.join("intel-iommu/address"))?;
            let registers = u64::from_str_radix(&registers, 16)?;
            // QEMU's DMAR table has no RHSA.
            (json!({ "registers": registers }), None)
        }
        Unit::Amd => {
            let function = fs::read_link(path.join("device"))?;
            let function = function.file_name().context("a link to the root")?;
            let function = function.to_string_lossy();
            (
                json!({ "function": function }),
                node(&path.join("device/numa_node"))?,
            )
        }
        _ => bail!("not of this machine"),
    };
    program::says(unit, "/at", &at)?;
    program::says(unit, "/node", &json!(node))
}

/// The kernel takes the wish, and says of each page that it is there: on the node of each device.
pub(crate) fn own_tables(_: &Machine) -> anyhow::Result<()> {
    let tables = NodeTables::new(SIZE, 1 << 46);
    for (node, _) in devices()? {
        let memory = tables.memory(Some(NodeId(node)));
        memory.map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let found = tables.nodes();
    let expected = [0, 1].map(|node| (Some(NodeId(node)), vec![(Some(node), SIZE)]));
    ensure!(found == expected, "the tables are at {found:?}");
    let misplaced = tables.misplaced();
    ensure!(misplaced.is_empty(), "{misplaced:?}");
    // There is no third one.
    tables
        .memory(Some(NodeId(2)))
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    let misplaced = tables.misplaced();
    ensure!(misplaced.len() == 1, "{misplaced:?}");
    Ok(())
}

/// `dmaspace check` with devices on both nodes: a domain for each, with tables that lie there, for memory
/// that is charged once.
pub(crate) fn program(_: &Machine) -> anyhow::Result<()> {
    let report = program::placed("per-node")?;
    let domains = report["placement"]["domains"].as_array();
    let domains = domains.context("no domains")?;
    ensure!(domains.len() == 2, "{} domains", domains.len());
    for (node, domain) in (0..).zip(domains) {
        let found = domain["nodes"].as_array().context("no nodes")?;
        let there = found
            .iter()
            .all(|share| share["node"].as_u64() == Some(node));
        ensure!(there && domain["node"].as_u64() == Some(node), "{domain}");
    }
    let shared = program::placed("shared")?;
    let pages = |report: &serde_json::Value| report["tables"]["table_pages"].as_u64();
    ensure!(
        pages(&report) == pages(&shared).map(|pages| 2 * pages),
        "{:?} and {:?} pages of tables",
        pages(&report),
        pages(&shared)
    );
    Ok(())
}

/// Pinned bytes of this process.
fn pinned() -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("VmPin:"));
    let words = line.context("no VmPin")?.trim().trim_end_matches(" kB");
    Ok(words.parse::<u64>()? << 10)
}

/// In one address space the devices of each node have a page table, which the kernel has put there; all
/// reach the same memory, which is pinned once.
pub(crate) fn iommufd(_: &Machine) -> anyhow::Result<()> {
    let owner = Iommufd::file()?;
    let space = Ioas::over_mapper(SpaceMapper::new(&owner)?);
    space.set_placement(Placement::PerNode)?;
    let ledger = Ledger::unlimited();
    let memory = dma::memory(Backing::Anon4K, SIZE)?;
    let before = pinned()?;
    let whole = Span::new(0, SIZE);
    let object = host_memory(&memory, &ledger)?;
    space.map(IOVA, &object, whole, Prot::RW)?;
    let devices = devices()?;
    let bound = devices.iter().map(|(node, device)| {
        device.bind_to_vfio()?;
        let bound = Arc::new(Iommufd::attachable(&owner, *device)?);
        space.attach(Endpoint::from(bound.clone()).near(Some(NodeId(*node))))?;
        Ok(bound)
    });
    let bound = bound.collect::<anyhow::Result<Vec<Arc<BoundDevice>>>>()?;
    let places = space.places();
    let nodes: Vec<_> = places
        .iter()
        .map(|place| (place.node, place.endpoints.len()))
        .collect();
    let expected = [(Some(NodeId(0)), 2), (Some(NodeId(1)), 2)];
    ensure!(nodes == expected, "the tables are {places:?}");
    let now = pinned()? - before;
    ensure!(now == SIZE, "{now:#x} bytes are pinned");
    ensure!(
        ledger.in_use() == SIZE,
        "{:#x} bytes are charged",
        ledger.in_use()
    );

    // Each copies through its own table: what one has written the next one reads.
    for (nth, bound) in (0..).zip(&bound) {
        let edu = Edu::new(&bound.device)?;
        edu.read(IOVA + nth * BUFFER, BUFFER)?;
        edu.write(IOVA + (nth + 1) * BUFFER, BUFFER)?;
    }
    let words = BUFFER / 8;
    dma::check(memory.cells(), |nth| {
        if nth / words <= devices.len() as u64 {
            nth % words
        } else {
            nth
        }
    })?;

    for (node, device) in &devices {
        lie_on(*node, &tables_of(*device)?)?;
    }
    // Devices that stay on a node keep its table, and the last one takes it along.
    for (nth, bound) in bound.iter().enumerate() {
        space.detach(bound)?;
        let left = space.places().len();
        ensure!(left == [2, 1, 1, 0][nth], "{left} tables");
    }
    ensure!(
        pinned()? == before,
        "{:#x} bytes stay pinned",
        pinned()? - before
    );
    ensure!(
        memory.cells()[0].load(Ordering::Relaxed) != 0,
        "the memory is gone"
    );
    Ok(())
}

/// A table that was made for a device of one node stays there when a device of the other node uses it.
pub(crate) fn lent(_: &Machine) -> anyhow::Result<()> {
    let owner = Iommufd::file()?;
    let space = Ioas::over_mapper(SpaceMapper::new(&owner)?);
    space.set_placement(Placement::PerNode)?;
    let memory = dma::memory(Backing::Anon4K, SIZE)?;
    let object = host_memory(&memory, &Ledger::unlimited())?;
    space.map(IOVA, &object, Span::new(0, SIZE), Prot::RW)?;
    let devices = devices()?;
    let on = |wanted: u32| devices.iter().find(|(node, _)| *node == wanted);
    let (Some((_, guest)), Some((_, maker))) = (on(0), on(1)) else {
        anyhow::bail!("the devices are {devices:?}");
    };
    let mut bound = Vec::new();
    for device in [maker, guest] {
        device.bind_to_vfio()?;
        let opened = Arc::new(Iommufd::attachable(&owner, *device)?);
        space.attach(Endpoint::from(opened.clone()).near(Some(NodeId(1))))?;
        bound.push(opened);
    }
    let places = space.places();
    ensure!(places.len() == 1, "the tables are {places:?}");
    let tables = [tables_of(*maker)?, tables_of(*guest)?];
    ensure!(tables[0] == tables[1], "{tables:x?}");
    lie_on(1, &tables[1])?;
    let edu = Edu::new(&bound[1].device)?;
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + BUFFER, BUFFER)?;
    drop(edu);
    let words = BUFFER / 8;
    dma::check(memory.cells(), |nth| {
        if nth / words <= 1 { nth % words } else { nth }
    })?;
    Ok(space.close()?)
}

/// Threads that populate: the processors that each may use, and the one on which it has run last.
///
/// Source: Linux, Documentation/filesystems/proc.rst, tables 1-2 and 1-4.
fn workers() -> anyhow::Result<BTreeSet<(String, u32)>> {
    let mut found = BTreeSet::new();
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let read = |file| fs::read_to_string(task.join(file));
        // It may have ended.
        let (Ok(status), Ok(stat)) = (read("status"), read("stat")) else {
            continue;
        };
        let line = |name| status.lines().find_map(|line| line.strip_prefix(name));
        if line("Name:").map(str::trim) != Some("populate") {
            continue;
        }
        let allowed = line("Cpus_allowed_list:").context("no Cpus_allowed_list")?;
        // Words after the name in brackets; the first of them is the third.
        let (_, words) = stat.rsplit_once(')').context("no name")?;
        let processor = words.split_whitespace().nth(39 - 3);
        let processor = processor.context("no processor")?.parse()?;
        found.insert((allowed.trim().to_owned(), processor));
    }
    Ok(found)
}

/// Memory of both nodes is brought in at once, on each by a worker that runs there, whichever node this
/// thread runs on.
pub(crate) fn populated(_: &Machine) -> anyhow::Result<()> {
    // Two chunks of 64 MiB: at the first report, both workers have one to report.
    const LEN: u64 = 128 << 20;
    // The machine has a processor on each node.
    let mut expected = BTreeSet::new();
    for node in [0, 1] {
        let processors = KernelNodes.processors(node);
        let [only] = processors[..] else {
            bail!("node {node} has the processors {processors:?}");
        };
        expected.insert((only.to_string(), only));
    }
    for nodes in [[0, 1], [1, 0]] {
        let small = Mapping::new(Backing::Anon4K, LEN, Some(nodes[0]))?;
        let huge = Mapping::new(Backing::Thp, LEN, Some(nodes[1]))?;
        let mut population = Population::new([&small, &huge]);
        let (mut told, mut seen, began) = (Vec::new(), None, Instant::now());
        population.run(&mut |done| {
            // Workers move to their processors in a moment.
            while told.is_empty() {
                let found = workers();
                let there = found.as_ref().is_ok_and(|found| *found == expected);
                let late = began.elapsed() > Duration::from_secs(100);
                seen = Some(found);
                if there || late {
                    break;
                }
                thread::yield_now();
            }
            told.push(done);
            ControlFlow::Continue(())
        })?;
        let seen = seen.context("nothing was told")??;
        ensure!(
            seen == expected,
            "workers run on {seen:?}, not on {expected:?}"
        );
        let steps = [1, 2, 3, 4].map(|chunks| chunks * (64 << 20));
        ensure!(told == steps, "told: {told:?}");
        for (mapping, node) in [&small, &huge].into_iter().zip(nodes) {
            let found = mapping.nodes()?;
            ensure!(
                found == [(Some(node), LEN)],
                "{} of node {node}: {found:?}",
                mapping.backing()
            );
        }
    }
    Ok(())
}

/// Looks whether each of these addresses is on `node`.
pub(crate) fn lie_on(node: u32, tables: &BTreeSet<u64>) -> anyhow::Result<()> {
    for table in tables {
        let found = node_of(*table)?;
        ensure!(found == node, "the table {table:#x} is on node {found}");
    }
    Ok(())
}

/// The addresses of all tables of a device, as the kernel tells them: the root, and what every entry leads
/// to that is no leaf.
///
/// Source: Linux, `drivers/iommu/intel/debugfs.c`: `Device 0000:01:00.0 @0x1234000`, then a line for each
/// leaf, with its first page and the entries of five levels down to it.
pub(crate) fn tables_of(device: Device) -> anyhow::Result<BTreeSet<u64>> {
    let file = kernel_tables::file(device);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let (_, root) = first
        .split_once("@0x")
        .with_context(|| format!("no root in {first:?}"))?;
    let root = root.split_whitespace().next().unwrap_or_default();
    let mut tables = BTreeSet::from([u64::from_str_radix(root, 16)?]);
    let mut leaves = 0;
    for line in lines {
        let words = line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("0x"));
        let words: Result<Vec<u64>, _> = words.map(|word| u64::from_str_radix(word, 16)).collect();
        // The page, then the entries; a level that is not there, or lies below the leaf, is 0.
        let words = words?.into_iter().skip(1).filter(|entry| *entry != 0);
        let entries: Vec<u64> = words.collect();
        if let [upper @ .., _leaf] = &entries[..] {
            leaves += 1;
            // VT-d D51397, 9.8: the address of the table in bits 12 to 51.
            tables.extend(upper.iter().map(|entry| entry & 0x000f_ffff_ffff_f000));
        }
    }
    ensure!(
        leaves > 0 && tables.len() > 2,
        "{} tables in {text}",
        tables.len()
    );
    Ok(tables)
}

/// The node that has the block of memory with this address.
///
/// Source: Linux, Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-devices-memory.
fn node_of(address: u64) -> anyhow::Result<u32> {
    let size = fs::read_to_string("/sys/devices/system/memory/block_size_bytes")?;
    let size = u64::from_str_radix(size.trim(), 16)?;
    let block = format!("memory{}", address / size);
    let has =
        |node: &u32| Path::new(&format!("/sys/devices/system/node/node{node}/{block}")).exists();
    [0, 1]
        .into_iter()
        .find(has)
        .with_context(|| format!("{block} is on no node"))
}
