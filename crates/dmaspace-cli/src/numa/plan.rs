//! Which domains a policy builds, where their tables lie, and what that is worth.
//!
//! Table bytes are exact: they are counted as the engine builds tables, for memory that is mapped in
//! one piece from address 0 on, in the formats that index each level with 9 bits. The throughput of
//! devices is predicted by a formula, the serial form of the model in `docs/numa.md`; it is no
//! measurement.

use std::collections::BTreeMap;

use ioas::Placement;
use iommu::NodeId;
use serde::{Serialize, Serializer};

use dmaspace::topology::{DevicePlace, LOCAL_DISTANCE, REMOTE_DISTANCE, Topology};

/// `shared`, `per-node`, `near(1)`.
pub fn name(placement: Placement) -> String {
    match placement {
        Placement::Shared => "shared".into(),
        Placement::PerNode => "per-node".into(),
        Placement::Near(node) => format!("near({})", node.0),
    }
}

fn by_name<S: Serializer>(placement: &Placement, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&name(*placement))
}

/// Leaves for which tables are counted.
pub const LEAVES: [u64; 3] = [4 << 10, 2 << 20, 1 << 30];

/// Levels of the tables: 48 bits of addresses.
const LEVELS: u32 = 4;
/// The most memory that these tables map from address 0 on, bytes.
pub const REACH: u64 = 1 << (12 + 9 * LEVELS);

/// Throughput of devices, by a formula: a page takes its time on the link, and that of its misses.
///
/// The values are those of the simulation of origin 5 (`bench/src/study/allreduce.rs`), where leaves of 4 KiB miss
/// at each page.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Bytes for which there is one translation.
    pub page_bytes: f64,
    /// Table entries read for a page.
    pub reads_per_page: f64,
    /// Time of a miss besides its reads.
    pub miss_ns: f64,
    /// A read from the unit's own node.
    pub local_ns: f64,
    /// A read from a node at [`REMOTE_DISTANCE`]; in proportion for others.
    pub remote_ns: f64,
    /// Throughput of a link that the machine does not report.
    pub link_bytes_per_second: f64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            page_bytes: 4096.0,
            reads_per_page: 1.12,
            miss_ns: 26.0,
            local_ns: 90.0,
            remote_ns: 170.0,
            link_bytes_per_second: 25e9,
        }
    }
}

impl Model {
    /// A read from a node so far away.
    pub fn read_ns(&self, distance: u32) -> f64 {
        let far = f64::from(distance.saturating_sub(LOCAL_DISTANCE));
        let step = f64::from(REMOTE_DISTANCE - LOCAL_DISTANCE);
        self.local_ns + (self.remote_ns - self.local_ns) * far / step
    }

    /// Bytes a second over a link, with tables so far away.
    pub fn bytes_per_second(&self, link_bytes_per_second: f64, distance: u32) -> f64 {
        let link_ns = self.page_bytes * 1e9 / link_bytes_per_second;
        let miss_ns = self.miss_ns + self.reads_per_page * self.read_ns(distance);
        self.page_bytes * 1e9 / (link_ns + miss_ns)
    }
}

/// Plans of all policies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The machine.
    pub topology: Topology,
    /// The memory that is mapped for all devices, from address 0 on.
    pub memory_bytes: u64,
    /// Parameters of the predictions.
    pub model: Model,
    /// `shared`, `per-node`, then `near` for each node with memory.
    pub policies: Vec<PolicyPlan>,
    /// Devices for which no unit translates; no policy is about them.
    pub untranslated: Vec<String>,
    /// Nodes with devices and without memory, and where their tables lie.
    pub without_memory: Vec<Fallback>,
    /// Groups whose devices have different nodes; they are never divided.
    pub mixed_groups: Vec<u32>,
}

/// Tables that cannot lie where they should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fallback {
    /// The node without memory.
    pub node: u32,
    /// The nearest one with memory, if there is any.
    pub tables_on: Option<u32>,
}

/// Plan of one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyPlan {
    /// The policy.
    #[serde(serialize_with = "by_name")]
    pub placement: Placement,
    /// Its domains, each with a table of its own.
    pub domains: Vec<DomainPlan>,
    /// The tables, for each size of leaves.
    pub tables: Vec<TablesPlan>,
    /// Predicted throughput of the devices, with leaves of 4 KiB.
    pub devices: Vec<Prediction>,
}

/// A domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainPlan {
    /// The node on which its tables lie; `None` where that is left to chance.
    pub node: Option<u32>,
    /// Addresses of its devices.
    pub devices: Vec<String>,
    /// Names of the units that walk its tables.
    pub units: Vec<String>,
}

/// All tables of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TablesPlan {
    /// The largest leaf.
    pub leaf_bytes: u64,
    /// Bytes on each node.
    pub nodes: Vec<NodeBytes>,
    /// Entries that a map of all memory writes, and an unmap clears.
    pub entries: u64,
}

/// Bytes on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NodeBytes {
    /// The node; `None` where that is left to chance.
    pub node: Option<u32>,
    /// The bytes.
    pub bytes: u64,
}

/// Throughput of a device, by the formula.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Its address.
    pub address: String,
    /// The node from which its tables are walked.
    pub node: Option<u32>,
    /// The node on which they lie.
    pub tables_on: Option<u32>,
    /// Predicted bytes a second; `None` where one of both is not known.
    pub bytes_per_second: Option<f64>,
}

impl Plan {
    /// Plans for `memory_bytes` that all devices reach.
    pub fn new(topology: &Topology, memory_bytes: u64) -> Self {
        let translated = |device: &&DevicePlace| device.unit.is_some();
        let (devices, others): (Vec<_>, Vec<_>) = topology.devices().iter().partition(translated);
        let placed = place_groups(topology, &devices);
        let nodes = topology.nodes();
        let near = nodes.iter().filter(|node| node.memory_bytes > 0);
        let placements = [Placement::Shared, Placement::PerNode].into_iter();
        let placements = placements.chain(near.map(|node| Placement::Near(NodeId(node.id))));
        let model = Model::default();
        let policies = placements
            .map(|placement| policy(topology, &placed, placement, memory_bytes, &model))
            .collect();
        let mut walked: Vec<u32> = placed.iter().filter_map(|placed| placed.node).collect();
        walked.sort_unstable();
        walked.dedup();
        let fallbacks = walked.into_iter().filter_map(|node| {
            let tables_on = topology.nearest_memory(node);
            (tables_on != Some(node)).then_some(Fallback { node, tables_on })
        });
        let mut mixed: Vec<u32> = placed
            .iter()
            .filter(|placed| topology.node_of(placed.device) != placed.node)
            .filter_map(|placed| placed.device.group)
            .collect();
        mixed.dedup();
        Self {
            topology: topology.clone(),
            memory_bytes,
            model,
            policies,
            untranslated: others.iter().map(|device| device.address.clone()).collect(),
            without_memory: fallbacks.collect(),
            mixed_groups: mixed,
        }
    }
}

/// A device and the node that counts for its group.
struct Placed<'a> {
    device: &'a DevicePlace,
    node: Option<u32>,
}

/// The node of a group is that of the first of its devices of which it is known.
fn place_groups<'a>(topology: &Topology, devices: &[&'a DevicePlace]) -> Vec<Placed<'a>> {
    let mut groups: BTreeMap<u32, u32> = BTreeMap::new();
    for device in devices {
        if let (Some(group), Some(node)) = (device.group, topology.node_of(device)) {
            groups.entry(group).or_insert(node);
        }
    }
    let placed = devices.iter().map(|device| {
        let of_group = device.group.and_then(|group| groups.get(&group).copied());
        let node = of_group.or_else(|| topology.node_of(device));
        Placed { device, node }
    });
    placed.collect()
}

fn policy(
    topology: &Topology,
    placed: &[Placed<'_>],
    placement: Placement,
    memory_bytes: u64,
    model: &Model,
) -> PolicyPlan {
    let first = placed.iter().find_map(|placed| placed.node);
    let home = |node: Option<u32>| node.and_then(|node| topology.nearest_memory(node));
    let tables_on = |placed: &Placed<'_>| {
        // The policy decides which devices share a table, and where that lies.
        let node = placed.node.map(NodeId);
        let first = first.map(NodeId);
        let domain = if placement.joins(first, node) {
            first
        } else {
            node
        };
        home(placement.tables(domain).map(|node| node.0))
    };
    let mut domains: Vec<DomainPlan> = Vec::new();
    let mut devices = Vec::new();
    for placed in placed {
        let (device, node) = (placed.device, tables_on(placed));
        let domain = match domains.iter_mut().find(|domain| domain.node == node) {
            Some(domain) => domain,
            None => {
                domains.push(DomainPlan {
                    node,
                    devices: Vec::new(),
                    units: Vec::new(),
                });
                let Some(new) = domains.last_mut() else {
                    continue;
                };
                new
            }
        };
        domain.devices.push(device.address.clone());
        let unit = device
            .unit
            .iter()
            .filter(|unit| !domain.units.contains(unit));
        let unit: Vec<_> = unit.cloned().collect();
        domain.units.extend(unit);
        let from = topology.node_of(device);
        let link = device.link_bytes_per_second;
        let link = link.unwrap_or(model.link_bytes_per_second);
        let predicted = from
            .zip(node)
            .map(|(from, node)| model.bytes_per_second(link, topology.distance(from, node)));
        devices.push(Prediction {
            address: device.address.clone(),
            node: from,
            tables_on: node,
            bytes_per_second: predicted,
        });
    }
    // Unknown comes last.
    domains.sort_by_key(|domain| domain.node.map_or(u64::MAX, u64::from));
    let tables = LEAVES.map(|leaf_bytes| {
        let (bytes, entries) = tables(memory_bytes, leaf_bytes);
        let nodes = domains.iter().map(|domain| NodeBytes {
            node: domain.node,
            bytes,
        });
        TablesPlan {
            leaf_bytes,
            nodes: nodes.collect(),
            entries: entries * domains.len() as u64,
        }
    });
    PolicyPlan {
        placement,
        domains,
        tables: tables.into(),
        devices,
    }
}

/// Bytes of the tables that map `memory` bytes from address 0 on in leaves of up to `leaf` bytes, and
/// how many entries are written into them: leaves, and the links of tables but the root.
///
/// The rest at the end, less than a leaf, takes the next smaller leaves, in one table a level.
pub fn tables(memory: u64, leaf: u64) -> (u64, u64) {
    let (mut tables, mut leaves) = (0u64, 0u64);
    for level in 0..LEVELS {
        let shift = 12 + 9 * level;
        let span = 1u64 << (shift + 9);
        // Memory that leaves of this level or tables below it cover, under tables of this level.
        let over = if 1 << shift > leaf {
            memory
        } else if span > leaf {
            leaves += memory >> shift;
            memory
        } else {
            let over = memory & (span - 1);
            leaves += over >> shift;
            over
        };
        tables += if level + 1 == LEVELS {
            1
        } else {
            over.div_ceil(span)
        };
    }
    (tables << 12, leaves + tables.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use iopt::{AnyTable, FormatId, HeapTables, Prot, TABLE_BYTES};
    use runs::{PageSizes, Span};

    use super::*;

    /// The counts are those of tables that the engine builds.
    #[test]
    fn tables_are_counted_as_the_engine_builds_them() {
        let (kib, mib, gib) = (1 << 10, 1 << 20, 1 << 30);
        let sizes = [
            4 * kib,
            2 * mib - 4 * kib,
            2 * mib,
            5 * mib,
            gib,
            gib + 12 * kib,
            3 * gib + mib,
        ];
        for memory in sizes.into_iter().chain([513 * 2 * mib, 2 * gib - 4 * kib]) {
            for leaf in LEAVES {
                let memory_of_tables = Arc::new(HeapTables::with_tables(2048).unwrap());
                let sizes = PageSizes::from_bits(u64::MAX).up_to(leaf);
                let table = AnyTable::new(FormatId::VtdSs, 4, sizes, memory_of_tables).unwrap();
                table.map(0, &[Span::new(0, memory)], Prot::RW).unwrap();
                let built = table.tables() * TABLE_BYTES;
                let mut leaves = 0;
                table.for_each_leaf(Span::new(0, memory), |_| leaves += 1);
                let entries = leaves + table.tables() - 1;
                assert_eq!(
                    tables(memory, leaf),
                    (built, entries),
                    "{memory:#x} {leaf:#x}"
                );
            }
        }
    }

    /// GB/s of the allreduce of origin 5, simulated (docs/numa.md): tables on another node, and on the unit's.
    #[test]
    fn the_formula_agrees_with_the_simulation() {
        for (simulated, distance) in [(24.5, 20), (32.1, 10)] {
            // GB/s of a NIC from GB/s of the allreduce: 8 GPUs, 4 NICs.
            let nic = simulated * 1e9 * 2.0 * 7.0 / 8.0 / 4.0;
            let formula = Model::default().bytes_per_second(25e9, distance);
            assert!((formula / nic - 1.0).abs() < 0.02, "{formula} {nic}");
        }
    }
}
