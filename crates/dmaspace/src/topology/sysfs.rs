//! The machine's topology, as sysfs shows it.
//!
//! Source: Linux `Documentation/ABI/stable/sysfs-devices-node`, `Documentation/ABI/testing/
//! sysfs-bus-pci`, `sysfs-class-iommu` and `sysfs-class-iommu-intel-iommu`.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use hostmem::{read_at_most, text_at_most};

use super::{DevicePlace, Node, Topology, TopologyError, UnitAddress, UnitPlace, proximity};
use crate::devices::{DeviceState, DevicesReport, Places};

/// The longest file that is read, one of the firmware's tables among them: more than any machine's.
const MOST: u64 = 1 << 20;

pub(super) fn read(places: &Places) -> Result<Topology, TopologyError> {
    let nodes = nodes(&places.sys.join("devices/system/node"))?;
    let known: BTreeSet<u32> = nodes.iter().map(|node| node.id).collect();
    // A node that is not online is as good as none.
    let online = |node: Option<u32>| node.filter(|node| known.contains(node));
    let listed = DevicesReport::read(places)?.devices.into_iter();
    let devices: Vec<_> = listed
        .filter(|device| device.state != DeviceState::Bridge)
        .map(|device| {
            let path = places.sys.join("bus/pci/devices").join(&device.address);
            DevicePlace {
                kind: device.class,
                node: online(device.node),
                unit: device.unit,
                group: device.group,
                link_bytes_per_second: link(&path),
                emulated: None,
                address: device.address,
            }
        })
        .collect();
    let class = places.sys.join("class/iommu");
    let mut names: BTreeSet<String> = names(&class)?.into_iter().collect();
    names.extend(devices.iter().filter_map(|device| device.unit.clone()));
    let tables = ["DMAR", "IORT", "RIMT"].map(|name| {
        let path = places.sys.join("firmware/acpi/tables").join(name);
        table(&path)
    });
    let units = names.into_iter().map(|name| {
        let path = class.join(&name);
        let at = UnitAddress::shown(&path, &name);
        UnitPlace {
            node: online(unit_node(&path, at.as_ref(), &tables)),
            name,
            at,
        }
    });
    Topology::new(nodes, units.collect(), devices)
}

/// The nodes that are online; one when the kernel tells none.
fn nodes(directory: &Path) -> Result<Vec<Node>, TopologyError> {
    let found = names(directory)?;
    let numbers = found.iter().filter_map(|name| {
        let number = name.strip_prefix("node")?.parse::<u32>().ok()?;
        Some((number, directory.join(name)))
    });
    let mut nodes: Vec<_> = numbers
        .map(|(id, path)| {
            let mut cpu_list = text(&path.join("cpulist")).unwrap_or_default();
            let cpus = count(&cpu_list);
            if cpus == 0 {
                cpu_list.clear();
            }
            Node {
                id,
                memory_bytes: memory(&path),
                cpus,
                cpu_list,
                distances: numbers_in(&text(&path.join("distance")).unwrap_or_default()),
            }
        })
        .collect();
    if nodes.is_empty() {
        nodes.push(Node::default());
    }
    // The distances are in the order of the numbers.
    nodes.sort_by_key(|node| node.id);
    let count = nodes.len();
    for node in &mut nodes {
        if node.distances.len() != count {
            node.distances.clear();
        }
    }
    Ok(nodes)
}

/// `Node 0 MemTotal:  12345 kB`, in bytes.
fn memory(node: &Path) -> u64 {
    let text = text(&node.join("meminfo")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let kib = line.and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Count of the numbers in a list like `0-15,32-47`.
pub(super) fn count(list: &str) -> u32 {
    let parts = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    parts.fold(0, u32::saturating_add)
}

fn numbers_in(text: &str) -> Vec<u32> {
    let numbers = text.split_whitespace();
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// The node of the unit's own device, or what the firmware's tables say of the unit.
fn unit_node(unit: &Path, at: Option<&UnitAddress>, tables: &[Vec<u8>]) -> Option<u32> {
    let own = || text(&unit.join("device/numa_node"))?.parse().ok();
    let told = || tables.iter().find_map(|table| proximity(table, at?));
    own().or_else(told)
}

/// A table; empty when it is not there or only root may read it: then nodes are not known.
fn table(path: &Path) -> Vec<u8> {
    read_at_most(path, MOST).unwrap_or_default()
}

/// Rate of the link of a device: `16.0 GT/s PCIe` on so many lanes.
///
/// PCI Express Base Specification 6.0, sections 4.2.1 (8b/10b up to 5 GT/s), 4.2.2 (128b/130b up to
/// 32 GT/s), 4.2.3 (flits of 256 bytes, of which 236 carry packets).
fn link(device: &Path) -> Option<f64> {
    let speed = text(&device.join("current_link_speed"))?;
    let rate: f64 = speed.split_whitespace().next()?.parse().ok()?;
    let lanes: u32 = text(&device.join("current_link_width"))?.parse().ok()?;
    let share = match rate {
        ..6.0 => 8.0 / 10.0,
        6.0..50.0 => 128.0 / 130.0,
        _ => 236.0 / 256.0,
    };
    // Virtual functions and devices of the root complex have no lanes.
    let bytes = rate * 1e9 * f64::from(lanes) * share / 8.0;
    (bytes > 0.0 && bytes < 1e15).then_some(bytes)
}

/// The names in a directory; none when it is not there.
fn names(directory: &Path) -> Result<Vec<String>, TopologyError> {
    let failed = |source| TopologyError::Read {
        path: directory.into(),
        source,
    };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

pub(super) fn text(path: &Path) -> Option<String> {
    let text = text_at_most(path, MOST).ok()?;
    Some(text.trim().into())
}
