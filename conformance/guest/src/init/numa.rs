//! Two memory nodes with devices below each: tables lie where the devices are, over memory that is pinned
//! once.

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use anyhow::{Context as _, ensure};
use guest::machines::Machine;
use hostmem::Backing;
use ioas::{
    Ioas, Kernel, Ledger, NodeTables, Placement,
    iommufd::{BoundDevice, SpaceMapper},
};
use iommu::NodeId;
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{self, IOVA},
    edu::{BUFFER, Edu},
    pci::{self, Device},
    program,
    space::{Interface as _, Iommufd, host_memory},
};

/// `edu`: QEMU, docs/specs/edu.
const EDU: (&str, &str) = ("0x1234", "0x11e8");
/// Bytes that are mapped.
const SIZE: u64 = 4 << 20;
/// What the kernel tells of the tables of VT-d.
const TABLES: &str = "/sys/kernel/debug/iommu/intel";

/// The devices of each node, in the order of the nodes: none of the guest's own root bus.
fn devices() -> anyhow::Result<Vec<(u32, Device)>> {
    let mut found = Vec::new();
    for address in pci::names(Path::new("/sys/bus/pci/devices"))? {
        // It stays: there are a few of them.
        let device = Device(Box::leak(address.into_boxed_str()));
        let says = |file: &str| fs::read_to_string(device.path(file));
        let kind = (says("vendor")?, says("device")?);
        let node: i32 = says("numa_node")?.trim().parse()?;
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

/// The kernel takes the wish, and says of each page that it is there.
pub(crate) fn own_tables(_: &Machine) -> anyhow::Result<()> {
    let tables = NodeTables::new(SIZE, 1 << 46);
    for node in [0, 1] {
        let memory = tables.memory(Some(NodeId(node)));
        memory.map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let found = tables.look();
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

/// `dmaspace map` with devices on both nodes: a domain for each, with tables that lie there, for memory
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
    let bytes = |report: &serde_json::Value| report["tables"]["table_bytes"].as_u64();
    ensure!(
        bytes(&report) == bytes(&shared).map(|bytes| 2 * bytes),
        "{:?} and {:?} bytes of tables",
        bytes(&report),
        bytes(&shared)
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
    let mut space = Ioas::over_kernel(Kernel::new(SpaceMapper::new(&owner)?, None));
    space.set_placement(Placement::PerNode)?;
    let ledger = Ledger::unlimited();
    let memory = dma::memory(Backing::Anon4K, SIZE)?;
    let before = pinned()?;
    let whole = Span::new(0, SIZE);
    let object = host_memory(&memory, &ledger)?;
    space.map(IOVA, &object, whole, Prot::RW, &mut ())?;
    let devices = devices()?;
    let bound = devices.iter().map(|(node, device)| {
        device.bind_to_vfio()?;
        let bound = Arc::new(Iommufd::attachable(&owner, *device)?);
        space.attach_near(bound.clone(), Some(NodeId(*node)))?;
        Ok(bound)
    });
    let bound = bound.collect::<anyhow::Result<Vec<Arc<BoundDevice>>>>()?;
    let places = space.backend().mapper().places();
    let nodes: Vec<_> = places
        .iter()
        .map(|place| (place.node, place.devices.len()))
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
        let root = root(*device)?;
        let found = node_of(root)?;
        ensure!(
            found == *node,
            "the root {root:#x} of {} is on node {found}",
            device.0
        );
    }
    // What is left of a node keeps its table, and the last one takes it along.
    for (nth, bound) in bound.iter().enumerate() {
        space.detach(bound)?;
        let left = space.backend().mapper().places().len();
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

/// The address of the root of a device's tables, as the kernel tells it.
///
/// Source: Linux, `drivers/iommu/intel/debugfs.c`: `Device 0000:01:00.0 @0x1234000`.
fn root(device: Device) -> anyhow::Result<u64> {
    let file = Path::new(TABLES)
        .join(device.0)
        .join("domain_translation_struct");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let first = text.lines().next().unwrap_or_default();
    let (_, address) = first
        .split_once("@0x")
        .with_context(|| format!("no root in {first:?}"))?;
    let digits = address.split_whitespace().next().unwrap_or_default();
    Ok(u64::from_str_radix(digits, 16)?)
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
