//! Which policy pays where: leaves of all sizes, two to eight nodes, 16 devices.
//!
//! The devices are spread evenly over the nodes, each node has one unit, and all devices work in the
//! same 4 GiB. With a shared table it lies on node 0; `near(node)` is a shared table on that node and
//! comes out the same. Units, links and times are those of [`allreduce`](super::allreduce()).
//!
//! Leaves of 64 KiB and 32 MiB are contiguous groups of Arm's stage 2, which the unit keeps as one
//! entry; the others are VT-d's.

use std::fmt;

use iopt::FormatId;
use iopt::format::{ArmConfig, ArmGranule};
use runs::{Iova, Span};
use serde::Serialize;

use super::StudyError;
use crate::simulation::{DeviceModel, Domain, Order, Outcome, ReadTimes, Simulation, UnitModel};

/// Nodes of a column.
const NODES: [u32; 3] = [2, 4, 8];
/// Leaves of a row.
const LEAVES: [u64; 5] = [4 << 10, 64 << 10, 2 << 20, 32 << 20, 1 << 30];
const DEVICES: u64 = 16;
const MEMORY: Span<Iova> = Span::new(1 << 32, 4 << 30);
const STREAMS: u64 = 16;
const BUFFER: u64 = 4 << 20;

/// What devices do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// Each device goes through 16 buffers of 4 MiB, page by page, one page at a time.
    Streams,
    /// Each device has 64 reads of 512 bytes under way, anywhere.
    Random,
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Streams => "streams",
            Self::Random => "random",
        })
    }
}

/// What came out, all simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeatMap {
    /// How many devices there are.
    pub devices: u64,
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
    let unit = |node| UnitModel {
        node: Some(node),
        iotlb_entries: 64,
        upper_entries: [14; 5],
        walks: 5,
        miss_ns: 26.0,
    };
    let device = |place: u64| {
        let node = (place % u64::from(nodes)) as usize;
        let buffers = (0..STREAMS)
            .map(|stream| Span::new(MEMORY.start + (place * STREAMS + stream) * BUFFER, BUFFER));
        let device = DeviceModel {
            unit: node,
            domain: node.min(domains.len() - 1),
            request_bytes: 4096,
            outstanding: 1,
            link_bytes_per_second: 25e9,
            latency_ns: 0.0,
            tlb: None,
            streams: buffers.collect(),
            order: Order::Sequential,
            peer: None,
        };
        match traffic {
            Traffic::Streams => device,
            Traffic::Random => DeviceModel {
                request_bytes: 512,
                outstanding: 64,
                latency_ns: 490.0,
                streams: vec![MEMORY],
                order: Order::Random,
                ..device
            },
        }
    };
    let simulation = Simulation {
        units: (0..nodes).map(unit).collect(),
        devices: (0..DEVICES).map(device).collect(),
        domains,
        reads: ReadTimes {
            local_ns: 90.0,
            remote_ns: 170.0,
        },
        seed: 1,
        warm_up: 500,
        requests: 1500,
    };
    Ok(simulation.run()?)
}
