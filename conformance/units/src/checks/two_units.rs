//! Two SMMUv3 on one machine, each on a memory node of its own, and a device behind each: one address space has a table
//! on each unit's node. QEMU has that since 10.2; its PCs have one unit.

use std::{
    os::fd::AsRawFd as _,
    process,
    sync::{Arc, OnceLock},
};

use anyhow::{Context as _, ensure};
use hostmem::{Backing, Mapping};
use ioas::{
    Cause, DomainIds, FixedRuns, HostTables, Ioas, Iommu, Ledger, MappedStorage, Memory, Placement,
    TableBuilder,
};
use iommu::{DeviceId, NodeId, SmmuV3, Unit as _, smmuv3};
use iopt::Prot;
use qtest::{
    Machine,
    edu::Edu,
    pci::{Address, Config, Window},
};
use runs::{Pa, Span};

use crate::{Board, Registers, Rig};

const MIB: u64 = 1 << 20;
/// Bytes of each node: one of data, then one for each unit's tables.
const NODE: u64 = 32 * MIB;
/// Where the first begins.
const RAM: u64 = 1 << 30;
/// Where QEMU places the units' registers.
const UNITS: [u64; 2] = [0x0c00_0000, 0x0c02_0000];
/// A device on the first bus; one behind a port of the second, whose buses begin at 8.
const DEVICES: [Address; 2] = [Address::new(0, 5, 0), Address::new(9, 0, 0)];
/// Registers of what is behind the port.
const BEHIND: u64 = 0x2000_0000;
const IOVA: u64 = 0x1_0000_0000;
const BYTES: u64 = 64;

/// Where the tables of a unit are.
const fn node_of(unit: usize) -> Span<Pa> {
    Span::new(RAM + (1 + unit as u64) * NODE, NODE)
}

fn start(rig: &Rig, shared: &[Mapping]) -> anyhow::Result<Machine> {
    let mut command = rig.qemu().program().command();
    command.args(["-nodefaults", "-no-user-config", "-accel", "qtest"]);
    command.args(["-machine", "virt,highmem-ecam=off", "-cpu", "max"]);
    command.args(["-m", &format!("{}M", 3 * NODE / MIB)]);
    let data = format!("memory-backend-ram,id=node0,size={NODE}");
    command.args(["-object", &data]);
    for (nth, mapping) in (1..).zip(shared) {
        let file = mapping.fd().context("shared memory has no file")?;
        let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        let object = "memory-backend-file,share=on";
        let object = format!("{object},id=node{nth},size={NODE},mem-path={path}");
        command.args(["-object", &object]);
    }
    for nth in 0..3 {
        let processor = if nth == 0 { ",cpus=0" } else { "" };
        let node = format!("node,nodeid={nth},memdev=node{nth}{processor}");
        command.args(["-numa", &node]);
    }
    for device in [
        "pxb-pcie,id=far,bus_nr=8,bus=pcie.0,addr=8,numa_node=2",
        "arm-smmuv3,primary-bus=pcie.0,id=first",
        "arm-smmuv3,primary-bus=far,id=second",
        "edu,bus=pcie.0,addr=5,dma_mask=0xffffffffffffffff",
        "pcie-root-port,id=behind,bus=far,chassis=1,addr=0",
        "edu,bus=behind,addr=0,dma_mask=0xffffffffffffffff",
    ] {
        command.args(["-device", device]);
    }
    Ok(Machine::start(command)?)
}

/// Bus numbers and window of the port at 08:00.0 (PCI-to-PCI Bridge Architecture Specification, 3.2), then the
/// registers of both devices.
fn place(machine: &Machine) -> anyhow::Result<[u64; 2]> {
    let ecam = Board::ArmVirt.ecam();
    let config = Config::ecam(machine, ecam);
    let port = Address::new(8, 0, 0);
    let registers = ecam + (u64::from(port.requester_id()) << 12);
    machine.writel(registers + 0x18, 9 << 16 | 9 << 8 | 8)?;
    let megabyte = (BEHIND >> 16) as u32;
    machine.writel(registers + 0x20, megabyte << 16 | megabyte)?;
    config.enable(port)?;
    let mut windows = [Board::ArmVirt.window(), Window::new(BEHIND, MIB)];
    let mut bases = [0; 2];
    for ((device, window), base) in DEVICES.into_iter().zip(&mut windows).zip(&mut bases) {
        let bars = config.assign(device, window)?;
        *base = bars.first().context("a device without registers")?.address;
        config.enable(device)?;
    }
    Ok(bases)
}

/// See the module.
pub(super) fn nodes(rig: &Rig) -> anyhow::Result<()> {
    let shared = [
        Mapping::new(Backing::Memfd, NODE, None)?,
        Mapping::new(Backing::Memfd, NODE, None)?,
    ];
    let machine = Arc::new(start(rig, &shared)?);
    let bases = place(&machine)?;
    let failed = Arc::new(OnceLock::new());
    let mut tables = Vec::new();
    for (nth, mapping) in shared.into_iter().enumerate() {
        let storage = MappedStorage::over(mapping);
        tables.push(Arc::new(HostTables::new(storage, node_of(nth).start)?));
    }
    let mut units = Vec::new();
    for (nth, base) in UNITS.into_iter().enumerate() {
        let registers = Registers::new(Arc::clone(&machine), base, Arc::clone(&failed));
        let config = smmuv3::Config {
            node: Some(NodeId(1 + nth as u32)),
            ..smmuv3::Config::default()
        };
        let unit = SmmuV3::new(registers, Arc::clone(&tables[nth]), config)?;
        unit.enable()?;
        units.push(Arc::new(unit));
    }
    let memories = tables.clone();
    let of_node = move |node: Option<NodeId>| {
        let nth = node.map_or(0, |node| node.0 as usize - 1);
        let memory = memories.get(nth).cloned();
        memory.ok_or_else(|| Cause::from("a node without memory for tables"))
    };
    let ids = DomainIds::new(16);
    let builder = TableBuilder::on_nodes(of_node, ids, [rig.kind().format]);
    let iommus = units.iter();
    let iommus = iommus.map(|unit| Iommu::with_builder(Arc::clone(unit), builder.clone()));
    let iommus: Vec<_> = iommus.collect();

    let structures: Vec<u64> = tables.iter().map(|tables| tables.in_use()).collect();
    let options = Ioas::options().placement(Placement::PerNode);
    let space = options.over(&iommus[0])?;
    // Pages far apart, so that each table has several tables.
    let data = RAM + NODE / 2;
    for nth in 0..4 {
        let run = Span::<Pa>::new(data + nth * MIB, 4096);
        let memory = Memory::new(Arc::new(FixedRuns::new([run], 4096)?), &Ledger::unlimited());
        space.map(IOVA + (nth << 30), &memory, Span::new(0, 4096), Prot::RW)?;
    }
    let device = |nth: usize| DeviceId(DEVICES[nth].requester_id().into());
    for (nth, iommu) in iommus.iter().enumerate() {
        space.attach(iommu.device(device(nth)))?;
    }

    let places = space.places();
    let nodes: Vec<_> = places.iter().map(|place| place.tables).collect();
    ensure!(nodes == [Some(NodeId(1)), Some(NodeId(2))], "{places:?}");
    let roots = space.tables(|_, table| (table.root().address, table.tables()));
    for (nth, (root, count)) in roots.into_iter().enumerate() {
        ensure!(
            node_of(nth).contains(root),
            "the root {root:#x} of unit {nth}"
        );
        let there = tables[nth].in_use() - structures[nth];
        ensure!(
            count <= there,
            "{count} tables, of which {there} on their node"
        );
    }

    for (nth, base) in bases.into_iter().enumerate() {
        let edu = Edu::new(&machine, base)?;
        for page in 0..4 {
            let (from, to) = (page, (page + 1) % 4);
            let wanted = rig.bytes(BYTES);
            machine.write(data + from * MIB, &wanted)?;
            edu.read(IOVA + (from << 30), 0, BYTES)?;
            edu.write(IOVA + (to << 30), 0, BYTES)?;
            let mut found = vec![0; BYTES as usize];
            machine.read(data + to * MIB, &mut found)?;
            ensure!(found == wanted, "device {nth}, page {from} to {to}");
            rig.add_copies(1);
        }
        units[nth].drain_faults(&mut |_| ());
    }
    // One unmap is flushed by both units.
    space.unmap(Span::new(IOVA, 4096))?;
    for (nth, base) in bases.into_iter().enumerate() {
        Edu::new(&machine, base)?.read(IOVA, 0, BYTES)?;
        for (other, unit) in units.iter().enumerate() {
            let mut faults = Vec::new();
            unit.drain_faults(&mut |fault| faults.extend(space.locate(fault)));
            ensure!(
                faults.is_empty() != (other == nth),
                "unit {other}, device {nth}: {faults:?}"
            );
            for located in faults {
                let fault = located.fault;
                let right = fault.device == device(nth) && fault.iova & !0xfff == IOVA;
                ensure!(right, "{located}");
            }
        }
    }
    space.close()?;
    for unit in units {
        unit.disable()?;
    }
    let error = failed.get();
    ensure!(error.is_none(), "a register: {error:?}");
    Ok(())
}
