//! What a walk of page tables takes, near and far: measured on this machine.
//!
//! For each node with memory the engine fills tables on it ([`ioas::NodeTables`], which asks the kernel
//! page by page where they lie), and for each node with processors a thread that may only run there
//! walks them, by `iopt`'s walker:
//!
//! 1. The tables map 512 pages of 4 KiB, scattered over all addresses that four levels have. Each page
//!    is mapped to the address at which the walk after it begins: a chain through the tables, whose
//!    every read needs the result of the one before. Processors cannot run ahead of it.
//! 2. A sample is 32 walks in random order. No two of them read the same 128 bytes of any table, which
//!    is what prefetchers take at a time.
//! 3. Before each sample what it is to read is taken out of the caches ([`Eviction`] says how), so
//!    all reads go to memory. Afterwards the same walks are done again, from caches: what is left
//!    then is the walker.
//!
//! Samples of the nodes alternate, so what else the machine does falls on all of them. The median of
//! all samples is shown, with the first and the ninth decile.
//!
//! These are reads by processors. A unit has other ways to memory, so what stands here is how far one
//! node is from the other, and not what a unit takes. What a device gets is measured with
//! [`dma`].

mod chain;
pub mod dma;
mod report;
pub(crate) mod text;

use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use hostmem::{Backing, KernelNodes, Mapping, MappingError, NodePolicy, PopulateError};
use ioas::NodeTables;
use iommu::NodeId;
use serde::Serialize;

use dmaspace::devices::Places;
use dmaspace::topology::{Topology, TopologyError};

pub use chain::ChainError;
use chain::{Chain, TABLE_BYTES};
pub use report::{MeasureReport, MeasuredNode, Spread, WalkTimes};

/// Addresses of tables, beyond those that walks begin at.
const TABLE_WINDOW: u64 = 1 << 50;

/// How caches are emptied before each sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    /// An instruction takes each line that will be read out of all caches (`CLFLUSH`).
    Lines,
    /// As many bytes of other memory are read, twice what the largest cache has.
    Buffer {
        /// Bytes.
        bytes: u64,
    },
}

impl Eviction {
    /// What is taken where no cache tells its size.
    const UNKNOWN_CACHE: u64 = 128 << 20;

    /// The best that there is on this machine.
    pub fn of_this_machine() -> Self {
        if hostmem::can_evict() {
            Self::Lines
        } else {
            let largest = hostmem::largest_cache().unwrap_or(Self::UNKNOWN_CACHE);
            Self::Buffer { bytes: 2 * largest }
        }
    }

    /// How often all walks are done: less where each time takes long.
    const fn rounds(self) -> u32 {
        match self {
            Self::Lines => 32,
            Self::Buffer { .. } => 1,
        }
    }
}

/// A machine to be measured: this one, or this one with nodes that a test has made up.
#[derive(Clone, Debug)]
pub struct Measurement<P = KernelNodes> {
    /// Its nodes.
    pub topology: Topology,
    /// The processors of each node, by its number, on which this process may run.
    pub processors: Vec<(u32, Vec<u32>)>,
    /// How memory is placed, and looked for.
    pub policy: P,
    /// How caches are emptied.
    pub eviction: Eviction,
}

/// Why it was not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The machine does not tell its nodes.
    #[error("cannot learn the nodes of this machine")]
    Topology(#[from] TopologyError),
    /// There is no memory for tables.
    #[error("cannot get memory for the tables of node {node}")]
    Memory {
        /// The node.
        node: u32,
        /// Why.
        source: ioas::Cause,
    },
    /// Tables cannot be filled, or do not say what was put into them.
    #[error("the tables of node {node}")]
    Chain {
        /// The node.
        node: u32,
        /// Why.
        source: ChainError,
    },
    /// A thread cannot be had, or not where it should run.
    #[error("no thread can run on the processors {processors:?} of node {node}")]
    Thread {
        /// The node.
        node: u32,
        /// Its processors.
        processors: Vec<u32>,
        /// Why.
        source: io::Error,
    },
    /// A thread has come to grief.
    #[error("the thread of node {node} has panicked")]
    Panicked {
        /// The node.
        node: u32,
    },
    /// There is no memory to empty caches with.
    #[error("cannot get {bytes} bytes of memory to empty the caches with")]
    Buffer {
        /// How many.
        bytes: u64,
        /// Why.
        source: MappingError,
    },
    /// That memory cannot be brought in.
    #[error("cannot bring in the memory to empty the caches with")]
    Populate(#[from] PopulateError),
    /// A device does not do what was asked of it.
    #[error(transparent)]
    Dma(#[from] crate::map::JobError),
}

impl MeasureError {
    /// True when the request is at fault and not this program: a device that cannot be used.
    pub const fn is_input(&self) -> bool {
        matches!(self, Self::Dma(error) if error.is_input())
    }
}

impl Measurement {
    /// This machine.
    ///
    /// # Errors
    ///
    /// When its nodes cannot be learnt.
    pub fn of_this_machine(places: &Places) -> Result<Self, MeasureError> {
        let topology = Topology::read(places)?;
        let processors = topology.nodes().iter();
        let processors = processors.map(|node| (node.id, KernelNodes.processors(node.id)));
        Ok(Self {
            processors: processors.collect(),
            topology,
            policy: KernelNodes,
            eviction: Eviction::of_this_machine(),
        })
    }
}

impl<P: NodePolicy + Clone + Send + Sync + 'static> Measurement<P> {
    /// Measures walks, and the DMA of `devices`, by their addresses, if any are named. With one node
    /// there is nothing to compare, and the report says so.
    ///
    /// # Errors
    ///
    /// See [`MeasureError`]. A node that cannot take part is no error: the report names it.
    pub fn run(&self, devices: &[String]) -> Result<MeasureReport, MeasureError> {
        let mut report = MeasureReport {
            not_run: None,
            nodes: self.nodes(),
            eviction: self.eviction,
            walks: Vec::new(),
            dma: Vec::new(),
        };
        if report.nodes.len() < 2 {
            report.not_run = Some("one node".into());
            return Ok(report);
        }
        // What cannot be used is told before anything takes time.
        let devices = dma::Devices::open(devices)?;
        let tables = NodeTables::with_nodes(TABLE_BYTES, TABLE_WINDOW, self.policy.clone());
        let chains = self.chains(&tables, &mut report.nodes)?;
        for (node, cpus) in &self.processors {
            if !cpus.is_empty() {
                report.walks.extend(self.walks_from(*node, cpus, &chains)?);
            }
        }
        report.dma = devices.measure()?;
        Ok(report)
    }

    /// The nodes, before there are tables.
    fn nodes(&self) -> Vec<MeasuredNode> {
        let cpus = |id: u32| {
            let mut nodes = self.processors.iter();
            let found = nodes.find(|(node, _)| *node == id);
            found.map_or(0, |(_, cpus)| cpus.len())
        };
        let nodes = self.topology.nodes().iter().map(|node| MeasuredNode {
            id: node.id,
            cpus: cpus(node.id),
            memory_bytes: node.memory_bytes,
            table_bytes: 0,
            huge_bytes: None,
            no_walks: match (cpus(node.id), node.cpus) {
                (0, 0) => Some("it has no processors".into()),
                (0, there) => Some(format!("this process may run on none of its {there}")),
                _ => None,
            },
            no_tables: None,
        });
        nodes.collect()
    }

    /// Tables on each node that takes them; the others learn why not.
    fn chains(
        &self,
        tables: &NodeTables,
        nodes: &mut [MeasuredNode],
    ) -> Result<Vec<(u32, Chain)>, MeasureError> {
        let with_memory = self.policy.memory_nodes();
        let mut chains = Vec::new();
        for node in nodes {
            let id = node.id;
            if !with_memory.contains(&id) {
                node.no_tables = Some("it has no memory".into());
                continue;
            }
            let memory = tables.memory(Some(NodeId(id)));
            let memory = memory.map_err(|source| MeasureError::Memory { node: id, source })?;
            let mut misplaced = tables.misplaced().into_iter();
            if let Some(elsewhere) = misplaced.find(|tables| tables.node == NodeId(id)) {
                node.no_tables = Some(elsewhere.to_string());
                continue;
            }
            node.table_bytes = memory.size();
            let mapping = memory.storage().mapping();
            node.huge_bytes = mapping.folios().ok().map(|folios| folios.huge);
            let chain = Chain::new(memory);
            let chain = chain.map_err(|source| MeasureError::Chain { node: id, source })?;
            chains.push((id, chain));
        }
        Ok(chains)
    }

    /// Walks all tables from the processors of `node`.
    fn walks_from(
        &self,
        node: u32,
        cpus: &[u32],
        chains: &[(u32, Chain)],
    ) -> Result<Vec<WalkTimes>, MeasureError> {
        let failed = |source| MeasureError::Thread {
            node,
            processors: cpus.into(),
            source,
        };
        thread::scope(|scope| {
            let name = thread::Builder::new().name(format!("walks {node}"));
            let walks = move || {
                KernelNodes.run_on(cpus).map_err(failed)?;
                self.walks_here(node, chains)
            };
            let thread = name.spawn_scoped(scope, walks).map_err(failed)?;
            thread.join().map_err(|_| MeasureError::Panicked { node })?
        })
    }

    /// Walks all tables from where this thread runs.
    fn walks_here(
        &self,
        node: u32,
        chains: &[(u32, Chain)],
    ) -> Result<Vec<WalkTimes>, MeasureError> {
        let caches = Caches::new(self.eviction)?;
        let mut samples: Vec<Vec<chain::Sample>> = chains.iter().map(|_| Vec::new()).collect();
        for _ in 0..self.eviction.rounds() {
            for part in 0..chain::SAMPLES {
                for ((table_node, chain), samples) in chains.iter().zip(&mut samples) {
                    let sample = chain.sample(part, |cells| caches.empty(cells));
                    let node = *table_node;
                    samples.push(sample.map_err(|source| MeasureError::Chain { node, source })?);
                }
            }
        }
        let rows = chains
            .iter()
            .zip(samples)
            .map(|((table_node, _), samples)| {
                let reads: u64 = samples.iter().map(|sample| sample.reads).sum();
                let walks = samples.len() as u64 * chain::WALKS;
                let spread = |ns: fn(&chain::Sample) -> u64| {
                    let each = samples
                        .iter()
                        .map(|sample| ns(sample) as f64 / chain::WALKS as f64);
                    Spread::of(each.collect())
                };
                WalkTimes {
                    cpu_node: node,
                    table_node: *table_node,
                    distance: self.topology.distance(node, *table_node),
                    samples: samples.len(),
                    walks: chain::WALKS,
                    reads_per_walk: reads as f64 / walks as f64,
                    memory: spread(|sample| sample.memory_ns),
                    caches: spread(|sample| sample.caches_ns),
                }
            });
        Ok(rows.collect())
    }
}

/// Empties caches.
struct Caches(Option<Mapping>);

impl Caches {
    fn new(eviction: Eviction) -> Result<Self, MeasureError> {
        let Eviction::Buffer { bytes } = eviction else {
            return Ok(Self(None));
        };
        let buffer = Mapping::new(Backing::Anon4K, bytes, None);
        let buffer = buffer.map_err(|source| MeasureError::Buffer { bytes, source })?;
        buffer.populate(&mut |_| ControlFlow::Continue(()))?;
        Ok(Self(Some(buffer)))
    }

    /// Takes `cells` out of the caches.
    fn empty<'a>(&self, cells: impl Iterator<Item = &'a AtomicU64>) {
        match &self.0 {
            // Where it cannot, there is a buffer.
            None => {
                hostmem::evict(cells);
            }
            Some(buffer) => {
                // A cell of each line of 64 bytes.
                let lines = buffer.cells().iter().step_by(8);
                let sum = lines.fold(0u64, |sum, cell| sum ^ cell.load(Ordering::Relaxed));
                std::hint::black_box(sum);
            }
        }
    }
}

/// `CLFLUSH`, or how much was read instead.
impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lines => f.write_str("each line that is read is flushed first (CLFLUSH)"),
            Self::Buffer { bytes } => {
                write!(f, "{} of other memory are read first", runs::Bytes(*bytes))
            }
        }
    }
}
