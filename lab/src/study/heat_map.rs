//! Which policy pays where: leaves of all sizes, two to eight nodes, 16 devices.
//!
//! The devices are spread evenly over the nodes, each node has one unit, and all devices work in the
//! same 4 GiB. With a shared table it lies on node 0; `near(node)` is a shared table on that node and
//! comes out the same. Units and times are those of [`under_load`].
//!
//! Leaves of 64 KiB and 32 MiB are contiguous groups of Arm's stage 2, which the unit keeps as one
//! entry; the others are VT-d's.

use iopt::FormatId;
use iopt::format::{ArmConfig, ArmGranule};
use runs::{Iova, Span};
use serde::Serialize;

use super::StudyError;
use super::load::{LoadedDevice, Traffic, under_load};
use crate::simulation::{Domain, Outcome, ReadTimes};

/// Nodes of a column.
const NODES: [u32; 3] = [2, 4, 8];
/// Leaves of a row.
const LEAVES: [u64; 5] = [4 << 10, 64 << 10, 2 << 20, 32 << 20, 1 << 30];
const DEVICES: u32 = 16;
const MEMORY: Span<Iova> = Span::new(1 << 32, 4 << 30);

/// What came out, all simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeatMap {
    /// How many devices there are.
    pub devices: u32,
    /// The memory that all of them work in, in bytes.
    pub memory_bytes: u64,
    /// One for each traffic, leaf and number of nodes.
    pub cells: Vec<Heat>,
}

/// One leaf on so many nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Heat {
    /// What the devices do.
    pub traffic: Traffic,
    /// The largest leaf.
    pub leaf_bytes: u64,
    /// How many nodes there are.
    pub nodes: u32,
    /// Bytes a second of all devices, with a shared table.
    pub shared_bytes_per_second: f64,
    /// With a table on each node.
    pub per_node_bytes_per_second: f64,
    /// Of the slowest device, with a shared table.
    pub shared_slowest_bytes_per_second: f64,
    /// With a table on each node.
    pub per_node_slowest_bytes_per_second: f64,
    /// Table entries read for each request, with a shared table.
    pub reads_per_request: f64,
    /// The part of them that is remote, with a shared table, 0 to 1.
    pub remote_share: f64,
    /// Bytes of the shared table.
    pub shared_table_bytes: u64,
    /// Bytes of all tables, with one on each node.
    pub per_node_table_bytes: u64,
}

impl Heat {
    /// How many times the bytes a second with a table on each node.
    pub fn gain(&self) -> f64 {
        self.per_node_bytes_per_second / self.shared_bytes_per_second
    }
}

/// Simulates all of it.
///
/// # Errors
///
/// When there is no memory for the tables: at most 70 MiB at a time.
pub fn heat_map() -> Result<HeatMap, StudyError> {
    let mut cells = Vec::new();
    let most = NODES.into_iter().max().unwrap_or(0);
    for leaf in LEAVES {
        let tables = |node| Domain::map(format(leaf), MEMORY, leaf, Some(node));
        let tables = (0..most).map(tables).collect::<Result<Vec<_>, _>>()?;
        for traffic in [Traffic::Streams, Traffic::Random] {
            for nodes in NODES {
                cells.push(heat(traffic, leaf, nodes, &tables)?);
            }
        }
    }
    cells.sort_by_key(|cell| (cell.traffic == Traffic::Random, cell.leaf_bytes, cell.nodes));
    Ok(HeatMap {
        devices: DEVICES,
        memory_bytes: MEMORY.len,
        cells,
    })
}

fn format(leaf: u64) -> FormatId {
    match leaf {
        0x1_0000 | 0x200_0000 => FormatId::ArmStage2(ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 48,
            upper: false,
        }),
        _ => FormatId::VtdSs,
    }
}

fn heat(traffic: Traffic, leaf: u64, nodes: u32, all: &[Domain]) -> Result<Heat, StudyError> {
    let all: Vec<&Domain> = all.iter().take(nodes as usize).collect();
    let bytes = |tables: &[&Domain]| tables.iter().map(|table| table.table_bytes()).sum();
    let one = vec![*all.first().ok_or(StudyError::NoOutcome)?];
    let (shared_table_bytes, per_node_table_bytes) = (bytes(&one), bytes(&all));
    let shared = outcomes(traffic, nodes, one)?;
    let per_node = outcomes(traffic, nodes, all)?;
    let rates = |outcomes: &[Outcome]| -> (f64, f64) {
        let rates = outcomes.iter().map(|outcome| outcome.bytes_per_second);
        (rates.clone().sum(), rates.fold(f64::INFINITY, f64::min))
    };
    let ((shared_sum, shared_slowest), (per_node_sum, per_node_slowest)) =
        (rates(&shared), rates(&per_node));
    let sum = |of: fn(&Outcome) -> u64| shared.iter().map(of).sum::<u64>() as f64;
    let remote = sum(|outcome| outcome.remote_reads);
    let reads = remote + sum(|outcome| outcome.local_reads);
    Ok(Heat {
        traffic,
        leaf_bytes: leaf,
        nodes,
        shared_bytes_per_second: shared_sum,
        per_node_bytes_per_second: per_node_sum,
        shared_slowest_bytes_per_second: shared_slowest,
        per_node_slowest_bytes_per_second: per_node_slowest,
        reads_per_request: reads / sum(|outcome| outcome.requests),
        remote_share: remote / reads.max(1.0),
        shared_table_bytes,
        per_node_table_bytes,
    })
}

/// With one table for all, or one for each node.
fn outcomes(
    traffic: Traffic,
    nodes: u32,
    domains: Vec<&Domain>,
) -> Result<Vec<Outcome>, StudyError> {
    let units: Vec<_> = (0..nodes).map(Some).collect();
    let device = |place: u32| {
        let unit = (place % nodes) as usize;
        LoadedDevice {
            unit,
            domain: unit.min(domains.len() - 1),
            link_bytes_per_second: 25e9,
        }
    };
    let devices: Vec<_> = (0..DEVICES).map(device).collect();
    let reads = ReadTimes::new(90.0, 170.0);
    under_load(traffic, MEMORY, &units, &devices, domains, reads)
}
