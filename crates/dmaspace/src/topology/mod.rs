//! What lies near what: memory nodes, PCI devices, and the IOMMU units that serve them.
//!
//! A [`Topology`] comes from one of three places, and is checked in one: [`Topology::new`], which
//! refuses what does not fit together. [`Topology::read`] takes it from the machine's sysfs,
//! [`Topology::parse`] from a [file](self#the-file), so that any machine can be planned for on any
//! other.
//!
//! # Which node counts
//!
//! It is the unit that reads page tables, so what counts for a device is the node of its unit. Where
//! that is not known it is the device's own node, and where that is not known either, none:
//! [`Topology::node_of`] is the only place that decides it.
//!
//! The kernel tells the node of a unit in one of two ways. AMD's units are PCI functions and Arm's
//! and RISC-V's are platform devices, whose `numa_node` it has from the firmware (IORT, RIMT, device
//! tree). Intel's are neither: their node stands in the DMAR table (RHSA), by the address of their
//! registers, which sysfs shows. Where the kernel does not tell, the [tables](proximity) are asked, which
//! is also what a program without Linux below it does.
//!
//! A driver cannot find its node: it is told what [`Topology::unit_node`] says.
//!
//! # The file
//!
//! TOML, of at most 1 MiB. Unknown names are refused.
//!
//! ```toml
//! [[node]]
//! id = 0
//! memory_mib = 65536          # 0 or absent: a node without memory
//! cpus = 16                   # how many
//! distances = [10, 21]        # to each node of the file, in its order; absent: 10 and 20
//!
//! [[node]]
//! id = 1
//! memory_mib = 65536
//! distances = [21, 10]
//!
//! [[unit]]
//! name = "dmar0"
//! node = 0                    # absent: not known
//! registers = 0xfed90000      # absent: not known; or function = "0000:00:00.2"
//!
//! [[device]]
//! address = "0000:17:00.0"
//! unit = "dmar0"              # absent: no unit serves it
//! node = 0                    # absent: not known
//! group = 4                   # absent: a group of its own
//! kind = "Ethernet"
//! link_gbps = 200             # absent: not known
//! emulated = "edu"            # absent: the device itself; otherwise one of QEMU's in its place
//! ```

mod file;
mod firmware;
mod sysfs;
mod unit;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use serde::Serialize;

pub use firmware::proximity;
pub use unit::UnitAddress;

/// The most nodes (`MAX_NUMNODES` of Linux on x86-64), units and devices of a topology.
pub const MOST_NODES: usize = 1024;
/// See [`MOST_NODES`].
pub const MOST_UNITS: usize = 4096;
/// See [`MOST_NODES`].
pub const MOST_DEVICES: usize = 65536;
/// The most processors of a node: Linux has at most 8,192 in all (`NR_CPUS` on x86-64).
pub const MOST_CPUS: u32 = 65536;
/// The most pairs of a node and a device: a plan has a line for each.
pub const MOST_PAIRS: usize = 1 << 20;

/// The distance of a node to itself. ACPI 6.5, section 5.2.17 "System Locality Information Table".
pub const LOCAL_DISTANCE: u32 = 10;
/// What Linux takes for other nodes when the firmware does not tell (`REMOTE_DISTANCE`).
pub const REMOTE_DISTANCE: u32 = 20;

/// Nodes, units and devices that fit together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Topology {
    nodes: Vec<Node>,
    units: Vec<UnitPlace>,
    devices: Vec<DevicePlace>,
}

/// A memory node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Its memory in bytes; 0 for a node without memory.
    pub memory_bytes: u64,
    /// How many processors it has.
    pub cpus: u32,
    /// How far each node is, in the order of the nodes; [`LOCAL_DISTANCE`] for itself. Empty when
    /// nobody tells.
    pub distances: Vec<u32>,
}

/// An IOMMU unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnitPlace {
    /// Its name: `dmar0`, `ivhd0`, `smmu3.0x0000000009050000`.
    pub name: String,
    /// Its node, when somebody tells.
    pub node: Option<u32>,
    /// Where it is, when somebody tells.
    pub at: Option<UnitAddress>,
}

/// A PCI device, no bridge.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DevicePlace {
    /// Domain, bus, device and function: `0000:00:05.0`.
    pub address: String,
    /// What it is, in words; may be empty.
    pub kind: String,
    /// Its own node, when somebody tells.
    pub node: Option<u32>,
    /// The unit that serves it; `None` when none does.
    pub unit: Option<String>,
    /// Its IOMMU group, which is never divided; `None` for one of its own.
    pub group: Option<u32>,
    /// What its link carries in one direction, bytes a second; `None` when nobody tells.
    pub link_bytes_per_second: Option<f64>,
    /// A device of QEMU's, with options, which stands for it in a guest: `edu`.
    pub emulated: Option<String>,
}

/// Why there is no such topology.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file of the machine, or of the user, cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The machine's devices cannot be listed.
    #[error(transparent)]
    Devices(#[from] crate::devices::DevicesError),
    /// The file is longer than any topology.
    #[error("the file has {bytes} bytes, and a topology at most {most}")]
    TooLong {
        /// Its size.
        bytes: u64,
        /// The most that is read.
        most: u64,
    },
    /// The file is no TOML, or does not say what a topology says.
    #[error("line {line}: {message}")]
    Syntax {
        /// The line, from 1 on.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// There are no nodes.
    #[error("there is no node")]
    NoNodes,
    /// There are too many of them.
    #[error("{count} {what}, and at most {most} are taken")]
    TooMany {
        /// `nodes`, `units`, `devices`.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// Two have the same name.
    #[error("there are two of {what} {name}")]
    Twice {
        /// `node`, `unit`, `device`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// A name has characters that no name has, or too many.
    #[error("{name:?} is no {what}")]
    BadName {
        /// What it should name.
        what: &'static str,
        /// What it is.
        name: String,
    },
    /// Something lies on a node that is not there.
    #[error("{what} lies on node {node}, which is not there")]
    NoSuchNode {
        /// What lies there.
        what: String,
        /// The node.
        node: u32,
    },
    /// A unit has registers at an address of its own and is a PCI function.
    #[error("{unit} has registers and a PCI function: it is told by one of them")]
    TwoAddresses {
        /// The unit.
        unit: String,
    },
    /// A device is served by a unit that is not there.
    #[error("{device} is served by {unit}, which is not there")]
    NoSuchUnit {
        /// The device.
        device: String,
        /// The unit.
        unit: String,
    },
    /// The distances are not one for each node, or not what distances are.
    #[error("node {node} has the distances {distances:?}: {why}")]
    Distances {
        /// The node.
        node: u32,
        /// What it has.
        distances: Vec<u32>,
        /// What is wrong.
        why: String,
    },
    /// A link carries nothing, or more than any link.
    #[error("the link of {device} carries {bytes_per_second} bytes a second, which none does")]
    Link {
        /// The device.
        device: String,
        /// What was said.
        bytes_per_second: f64,
    },
}

impl Topology {
    /// Takes what fits together; sorts by number, name and address.
    ///
    /// # Errors
    ///
    /// What does not fit is named, the first of it.
    pub fn new(
        nodes: Vec<Node>,
        units: Vec<UnitPlace>,
        devices: Vec<DevicePlace>,
    ) -> Result<Self, TopologyError> {
        check(&nodes, &units, &devices)?;
        let mut new = Self {
            nodes,
            units,
            devices,
        };
        new.sort();
        Ok(new)
    }

    /// The machine's, from what lies below `places.sys`.
    ///
    /// A kernel that tells no nodes has one, 0, of unknown size (0 bytes) and with no distances.
    ///
    /// # Errors
    ///
    /// When what is there cannot be read. What is missing is only not known.
    pub fn read(places: &crate::devices::Places) -> Result<Self, TopologyError> {
        sysfs::read(places)
    }

    /// From the text of a [file](self#the-file).
    ///
    /// # Errors
    ///
    /// With the line where that is known.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        file::parse(text)
    }

    /// From a [file](self#the-file).
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse), and when it cannot be read.
    pub fn load(path: &std::path::Path) -> Result<Self, TopologyError> {
        file::load(path)
    }

    /// The nodes, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The units, by name.
    pub fn units(&self) -> &[UnitPlace] {
        &self.units
    }

    /// The devices, by address.
    pub fn devices(&self) -> &[DevicePlace] {
        &self.devices
    }

    /// The node that counts for `device`: that of its unit, or its own, or none.
    pub fn node_of(&self, device: &DevicePlace) -> Option<u32> {
        let name = device.unit.as_deref();
        let mut units = self.units.iter();
        let unit = name.and_then(|name| units.find(|unit| unit.name == name));
        unit.and_then(|unit| unit.node).or(device.node)
    }

    /// How far `to` is from `from`; [`REMOTE_DISTANCE`] between different nodes of which nobody
    /// tells.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if from == to {
            return LOCAL_DISTANCE;
        }
        let place = |id| self.nodes.iter().position(|node| node.id == id);
        let told = || self.nodes.get(place(from)?)?.distances.get(place(to)?);
        told().copied().unwrap_or(REMOTE_DISTANCE)
    }

    /// Where tables for walks from `node` can lie at best: there, or, if it has no memory, on the
    /// nearest node that has, the lowest number first. `None` when no node is known to have memory.
    pub fn nearest_memory(&self, node: u32) -> Option<u32> {
        let with_memory = self.nodes.iter().filter(|node| node.memory_bytes > 0);
        with_memory
            .map(|memory| (self.distance(node, memory.id), memory.id))
            .min()
            .map(|(_, id)| id)
    }

    /// The memory of all nodes in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let sizes = self.nodes.iter().map(|node| node.memory_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    fn sort(&mut self) {
        // Distances are by place, so they move with the nodes.
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.sort_by_key(|place| self.nodes.get(*place).map(|node| node.id));
        let moved = order.iter().filter_map(|place| {
            let node = self.nodes.get(*place)?;
            let distances = order.iter().filter_map(|to| node.distances.get(*to));
            Some(Node {
                distances: distances.copied().collect(),
                ..node.clone()
            })
        });
        self.nodes = moved.collect();
        self.units.sort_by(|a, b| a.name.cmp(&b.name));
        // Domains of more than four digits come last.
        let key = |device: &DevicePlace| (device.address.len(), device.address.clone());
        self.devices.sort_by_key(key);
    }
}

fn check(
    nodes: &[Node],
    units: &[UnitPlace],
    devices: &[DevicePlace],
) -> Result<(), TopologyError> {
    for (what, count, most) in [
        ("nodes", nodes.len(), MOST_NODES),
        ("units", units.len(), MOST_UNITS),
        ("devices", devices.len(), MOST_DEVICES),
        (
            "pairs of a node and a device",
            nodes.len().saturating_mul(devices.len()),
            MOST_PAIRS,
        ),
    ] {
        if count > most {
            return Err(TopologyError::TooMany { what, count, most });
        }
    }
    if nodes.is_empty() {
        return Err(TopologyError::NoNodes);
    }
    let ids = once("node", nodes.iter().map(|node| node.id))?;
    for node in nodes {
        if node.cpus > MOST_CPUS {
            return Err(TopologyError::TooMany {
                what: "processors of a node",
                count: node.cpus as usize,
                most: MOST_CPUS as usize,
            });
        }
        distances(node, nodes)?;
    }
    let there = |what: &dyn Fn() -> String, node: Option<u32>| match node {
        Some(node) if !ids.contains(&node) => Err(TopologyError::NoSuchNode { what: what(), node }),
        _ => Ok(()),
    };
    let names = once("unit", units.iter().map(|unit| unit.name.as_str()))?;
    for unit in units {
        name("name of a unit", &unit.name, "._:@-")?;
        there(&|| unit.name.clone(), unit.node)?;
        if let Some(UnitAddress::Function(address)) = &unit.at {
            pci_address(address)?;
        }
    }
    once(
        "unit with",
        units.iter().filter_map(|unit| unit.at.as_ref()),
    )?;
    once("device", devices.iter().map(|device| &device.address))?;
    for device in devices {
        pci_address(&device.address)?;
        there(&|| device.address.clone(), device.node)?;
        if let Some(unit) = device.unit.as_deref().filter(|unit| !names.contains(unit)) {
            return Err(TopologyError::NoSuchUnit {
                device: device.address.clone(),
                unit: unit.into(),
            });
        }
        name("kind of a device", &format!("-{}", device.kind), " ._:/()-")?;
        if let Some(emulated) = &device.emulated {
            name("device of QEMU", emulated, ",=._:-")?;
        }
        // From a bit a second to more than PCI Express carries in any version.
        let plausible = |rate: &f64| (0.125..1e15).contains(rate);
        if let Some(rate) = device.link_bytes_per_second.filter(|rate| !plausible(rate)) {
            return Err(TopologyError::Link {
                device: device.address.clone(),
                bytes_per_second: rate,
            });
        }
    }
    Ok(())
}

/// All of them, if none is there twice.
fn once<T: Ord + ToString>(
    what: &'static str,
    all: impl Iterator<Item = T>,
) -> Result<BTreeSet<T>, TopologyError> {
    let mut seen = BTreeSet::new();
    for name in all {
        if seen.contains(&name) {
            let name = name.to_string();
            return Err(TopologyError::Twice { what, name });
        }
        seen.insert(name);
    }
    Ok(seen)
}

/// Letters, digits and what else is named, and not too many: it goes into command lines, XML and
/// pictures.
fn name(what: &'static str, name: &str, also: &str) -> Result<(), TopologyError> {
    let good = |c: char| c.is_ascii_alphanumeric() || also.contains(c);
    if (1..=128).contains(&name.len()) && name.chars().all(good) {
        return Ok(());
    }
    let name = name.into();
    Err(TopologyError::BadName { what, name })
}

fn pci_address(text: &str) -> Result<(), TopologyError> {
    if is_address(text) {
        return Ok(());
    }
    Err(TopologyError::BadName {
        what: "address of a PCI device, like 0000:00:05.0",
        name: text.into(),
    })
}

/// `0000:00:05.0`; domains may have up to eight digits.
fn is_address(text: &str) -> bool {
    let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        digits.contains(&text.len()) && text.bytes().all(digit)
    };
    let mut parts = text.split(':');
    let (Some(domain), Some(bus), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((slot, function)) = rest.split_once('.') else {
        return false;
    };
    let slot_fits = u8::from_str_radix(slot, 16).is_ok_and(|slot| slot < 32);
    let function_fits = matches!(function.as_bytes(), [b'0'..=b'7']);
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(slot, 2..=2) && slot_fits && function_fits
}

fn distances(node: &Node, nodes: &[Node]) -> Result<(), TopologyError> {
    let list = &node.distances;
    let wrong = |why: String| TopologyError::Distances {
        node: node.id,
        distances: list.clone(),
        why,
    };
    if list.is_empty() {
        return Ok(());
    }
    if list.len() != nodes.len() {
        return Err(wrong(format!("there are {} nodes", nodes.len())));
    }
    for (distance, to) in list.iter().zip(nodes) {
        let right = if to.id == node.id {
            *distance == LOCAL_DISTANCE
        } else {
            // ACPI 6.5, 5.2.17: below 10 is reserved; 255 is out of reach.
            (LOCAL_DISTANCE..255).contains(distance)
        };
        if !right {
            return Err(wrong(format!("{distance} to node {}", to.id)));
        }
    }
    Ok(())
}
