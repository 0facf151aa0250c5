//! A load on a machine, simulated: what each size of leaves and each policy gives.

use dmaspace::topology::{LOCAL_DISTANCE, Topology};
use iopt::FormatId;
use lab::simulation::{Domain, DomainError, Outcome, ReadTimes};
use lab::study::{LoadedDevice, StudyError, Traffic, under_load};
use runs::Span;
use serde::Serialize;

use super::plan::{LEAVES, Model, Plan, PolicyPlan, name};
use ioas::Placement;

/// More memory takes longer to map than an answer may take.
pub const MOST_MEMORY: u64 = 64 << 30;
/// Where memory begins: leaves of all sizes begin there.
const START: u64 = 1 << 40;

/// What was simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simulated {
    /// `simulated`: so that it is not mistaken for measured.
    pub label: &'static str,
    /// Nodes of the machine.
    pub nodes: usize,
    /// Units with devices.
    pub units: usize,
    /// Devices that a unit translates for; all of them are loaded.
    pub devices: usize,
    /// Of these, such whose link is not known.
    pub links_assumed: usize,
    /// What an assumed link carries.
    pub assumed_bytes_per_second: f64,
    /// What devices do.
    pub traffic: Traffic,
    /// The memory in which they do it.
    pub memory_bytes: u64,
    /// What came out, by leaves and policy.
    pub rows: Vec<LoadRow>,
}

/// What one policy gives with leaves of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadRow {
    /// The largest leaf.
    pub leaf_bytes: u64,
    /// `shared`, `per-node`.
    pub placement: String,
    /// Bytes a second of all devices.
    pub bytes_per_second: f64,
    /// Of the slowest device.
    pub slowest_bytes_per_second: f64,
    /// Table entries read for a request.
    pub reads_per_request: f64,
    /// The part of them on another node, 0 to 1.
    pub remote_share: f64,
    /// Bytes of all tables.
    pub table_bytes: u64,
}

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// There is no unit to walk tables.
    #[error(
        "no IOMMU unit translates for a device of this machine: describe one that has with \
         --topology FILE, as examples/topologies does"
    )]
    NoUnits,
    /// The tables were not built.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The simulation was refused.
    #[error(transparent)]
    Study(#[from] StudyError),
}

/// Simulates all devices of `topology` that a unit translates for, at work in `memory_bytes`.
///
/// # Errors
///
/// When there are none, or their tables do not fit into memory.
pub fn simulate(
    topology: &Topology,
    traffic: Traffic,
    memory_bytes: u64,
) -> Result<Simulated, SimulateError> {
    let plan = Plan::new(topology, memory_bytes);
    let all = |policy: &&PolicyPlan| !matches!(policy.placement, Placement::Near(_));
    let mut policies: Vec<&PolicyPlan> = plan.policies.iter().filter(all).collect();
    // Where all devices are near one node, a table on each is the shared one.
    policies.dedup_by(|one, other| one.domains == other.domains);
    let loaded: Vec<Vec<LoadedDevice>> = policies
        .iter()
        .map(|policy| devices(topology, policy, &plan.model))
        .collect();
    let first = loaded.first().filter(|devices| !devices.is_empty());
    let first = first.ok_or(SimulateError::NoUnits)?;
    let mut units: Vec<usize> = first.iter().map(|device| device.unit).collect();
    units.sort_unstable();
    units.dedup();
    let translated = topology.devices().iter().filter(|one| one.unit.is_some());
    let nodes: Vec<_> = topology.units().iter().map(|unit| unit.node).collect();
    let memory = Span::new(START, memory_bytes);
    let mut rows = Vec::new();
    for leaf_bytes in LEAVES.into_iter().filter(|leaf| *leaf <= memory_bytes) {
        for (policy, devices) in policies.iter().zip(&loaded) {
            let tables = |node| Domain::map(FormatId::VtdSs, memory, leaf_bytes, node);
            let domains = policy.domains.iter().map(|domain| tables(domain.node));
            let domains = domains.collect::<Result<Vec<_>, _>>()?;
            let all = domains.iter().collect();
            let reads = reads(topology, &plan.model);
            let outcomes = under_load(traffic, memory, &nodes, devices, all, reads)?;
            let table_bytes = domains.iter().map(Domain::table_bytes).sum();
            rows.push(row(leaf_bytes, policy.placement, &outcomes, table_bytes));
        }
    }
    Ok(Simulated {
        label: "simulated",
        nodes: topology.nodes().len(),
        units: units.len(),
        devices: first.len(),
        links_assumed: translated
            .filter(|device| device.link_bytes_per_second.is_none())
            .count(),
        assumed_bytes_per_second: plan.model.link_bytes_per_second,
        traffic,
        memory_bytes,
        rows,
    })
}

/// The devices of a policy with the places of their units and domains.
fn devices(topology: &Topology, policy: &PolicyPlan, model: &Model) -> Vec<LoadedDevice> {
    let loaded = topology.devices().iter().filter_map(|device| {
        let name = device.unit.as_ref()?;
        let mut units = topology.units().iter();
        let mut domains = policy.domains.iter();
        Some(LoadedDevice {
            unit: units.position(|unit| unit.name == *name)?,
            domain: domains.position(|domain| domain.devices.contains(&device.address))?,
            link_bytes_per_second: device
                .link_bytes_per_second
                .unwrap_or(model.link_bytes_per_second),
        })
    });
    loaded.collect()
}

/// What reads take, by the distance of the nodes.
fn reads(topology: &Topology, model: &Model) -> ReadTimes {
    let ids = || topology.nodes().iter().map(|node| node.id);
    let mut reads = ReadTimes::new(model.read_ns(LOCAL_DISTANCE), model.remote_ns);
    for from in ids() {
        for to in ids().filter(|to| *to != from) {
            let ns = model.read_ns(topology.distance(from, to));
            reads.pairs.insert((from, to), ns);
        }
    }
    reads
}

fn row(leaf_bytes: u64, placement: Placement, outcomes: &[Outcome], table_bytes: u64) -> LoadRow {
    let rates = outcomes.iter().map(|outcome| outcome.bytes_per_second);
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>() as f64;
    let remote = sum(|outcome| outcome.remote_reads);
    let reads = remote + sum(|outcome| outcome.local_reads);
    LoadRow {
        leaf_bytes,
        placement: name(placement),
        bytes_per_second: rates.clone().sum(),
        slowest_bytes_per_second: rates.fold(f64::INFINITY, f64::min),
        reads_per_request: reads / sum(|outcome| outcome.requests).max(1.0),
        remote_share: remote / reads.max(1.0),
        table_bytes,
    }
}
