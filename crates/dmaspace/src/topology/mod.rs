//! Locality: memory nodes, PCI devices, and the IOMMU units that serve them.
//!
//! A [`Topology`] comes from one of three places, and is checked in one: [`Topology::new`], which
//! refuses inconsistent contents. [`Topology::read`] takes it from the machine's sysfs,
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
//! registers, which sysfs shows. Where the kernel does not tell, the [tables](proximity) are read, as
//! they are by a program without Linux below it.
//!
//! A driver cannot find its node: its user passes the result of [`Topology::unit_node`].
//!
//! # The file
//!
//! TOML, of at most 1 MiB. Unknown names are refused.
//!
//! ```toml
//! [[node]]
//! id = 0
//! memory_mib = 65536          # 0 or absent: a node without memory
//! cpus = 16                   # how many, or which: "0-15"
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

mod check;
mod file;
mod firmware;
mod sysfs;
mod unit;

use std::io;
use std::path::PathBuf;

use serde::Serialize;

use check::{LINKS, check};

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
/// The most memory of a node, bytes: RISC-V has 56 bits of physical addresses (Privileged Specification, section "Sv39"), and
/// x86-64 and Arm have 52.
pub const MOST_MEMORY: u64 = 1 << 56;
/// The most pairs of a node and a device: a plan has a line for each.
pub const MOST_PAIRS: usize = 1 << 20;

/// The distance of a node to itself. ACPI 6.5, section 5.2.17 "System Locality Information Table".
pub const LOCAL_DISTANCE: u32 = 10;
/// Linux's distance of other nodes when the firmware gives none (`REMOTE_DISTANCE`).
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
    /// Number of processors.
    pub cpus: u32,
    /// Their numbers as the kernel lists them: `0-15,32-47`. Empty when they are not known.
    pub cpu_list: String,
    /// Distance of each node, in the order of the nodes; [`LOCAL_DISTANCE`] for itself. Empty when not known.
    pub distances: Vec<u32>,
}

/// An IOMMU unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnitPlace {
    /// Its name: `dmar0`, `ivhd0`, `smmu3.0x0000000009050000`.
    pub name: String,
    /// Its node, if known.
    pub node: Option<u32>,
    /// Its address, if known.
    pub at: Option<UnitAddress>,
}

/// A PCI device, no bridge.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DevicePlace {
    /// Domain, bus, device and function: `0000:00:05.0`.
    pub address: String,
    /// Kind of device, in words; may be empty.
    pub kind: String,
    /// Its own node, if known.
    pub node: Option<u32>,
    /// The unit that serves it; `None` when none does.
    pub unit: Option<String>,
    /// Its IOMMU group, which is never divided; `None` for one of its own.
    pub group: Option<u32>,
    /// Rate of its link in one direction, bytes a second; `None` when not known.
    pub link_bytes_per_second: Option<f64>,
    /// A device of QEMU's, with options, which stands for it in a guest: `edu`.
    pub emulated: Option<String>,
}

/// Failure to read a topology.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file of the machine, or of the user, cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
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
        /// The parser's message.
        message: String,
    },
    /// There are no nodes.
    #[error("the topology has no node")]
    NoNodes,
    /// There are too many of them.
    #[error("{count} {what}, and at most {most} are taken")]
    TooMany {
        /// `nodes`, `units`, `devices`.
        what: &'static str,
        /// Number given.
        count: usize,
        /// Largest number.
        most: usize,
    },
    /// A number is larger than any machine has.
    #[error("{what} is {value}, and at most {most} is taken")]
    TooLarge {
        /// Its name: `the number of node 3`.
        what: String,
        /// The number.
        value: u64,
        /// The largest that is taken.
        most: u64,
    },
    /// Two have the same name.
    #[error("{what} {name} is defined twice")]
    Twice {
        /// `node`, `unit`, `device`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// A name has characters that no name has, or too many.
    #[error("{name:?} is no {what}")]
    BadName {
        /// Kind of thing that it should name.
        what: &'static str,
        /// The refused name.
        name: String,
    },
    /// Something lies on a node that is not there.
    #[error("{what} lies on node {node}, which is not there")]
    NoSuchNode {
        /// The unit or device that lies there.
        what: String,
        /// The node.
        node: u32,
    },
    /// A unit has registers at an address of its own and is a PCI function.
    #[error("{unit} has registers and a PCI function: only one of them may be given")]
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
        /// Its distances.
        distances: Vec<u32>,
        /// Defect of the distances.
        why: String,
    },
    /// A link carries nothing, or more than any link.
    #[error(
        "the link of {device} carries {bytes_per_second} bytes a second, which none does: from {} to {} are taken",
        LINKS.start, LINKS.end
    )]
    Link {
        /// The device.
        device: String,
        /// The given rate.
        bytes_per_second: f64,
    },
}

impl Topology {
    /// Takes what fits together; sorts by number, name and address.
    ///
    /// # Errors
    ///
    /// The first defect found.
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

    /// Distance of `to` from `from`; [`REMOTE_DISTANCE`] between different nodes whose distance is not known.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if from == to {
            return LOCAL_DISTANCE;
        }
        let place = |id| self.nodes.iter().position(|node| node.id == id);
        let told = || self.nodes.get(place(from)?)?.distances.get(place(to)?);
        told().copied().unwrap_or(REMOTE_DISTANCE)
    }

    /// Best node for tables for walks from `node`: itself, or, if it has no memory, the
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
