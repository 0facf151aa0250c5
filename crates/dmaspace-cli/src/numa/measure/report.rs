//! What was measured, as it is told.

use serde::Serialize;

use super::{Eviction, dma};

/// Nanoseconds: the middle of all samples, and what a tenth of them is below and above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the samples take no longer.
    pub median_ns: f64,
    /// A tenth takes no longer.
    pub low_ns: f64,
    /// A tenth takes this long or longer.
    pub high_ns: f64,
}

impl Spread {
    /// Of samples in nanoseconds; zeros for none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().saturating_sub(1);
        let at = |tenths: usize| samples.get(last * tenths / 10).copied().unwrap_or(0.0);
        Self {
            median_ns: at(5),
            low_ns: at(1),
            high_ns: at(9),
        }
    }
}

/// A node, and what of the measurement it takes part in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MeasuredNode {
    /// Its number.
    pub id: u32,
    /// How many of its processors this process may run on.
    pub cpus: usize,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of tables that lie on it, each page of which was asked for; 0 when nothing was walked there.
    pub table_bytes: u64,
    /// How many of them are in huge pages; `None` when the kernel does not tell. Elsewhere a processor
    /// must look for the address of the table as well.
    pub huge_bytes: Option<u64>,
    /// Why nobody walks from it.
    pub no_walks: Option<String>,
    /// Why there are no tables on it.
    pub no_tables: Option<String>,
}

/// Walks from one node of tables on one node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WalkTimes {
    /// The node of the processors.
    pub cpu_node: u32,
    /// The node of the tables.
    pub table_node: u32,
    /// How far it is, as the firmware tells: 10 for the same node.
    pub distance: u32,
    /// How many samples were taken.
    pub samples: usize,
    /// Walks of a sample.
    pub walks: u64,
    /// Reads of a walk, as the walker counts them.
    pub reads_per_walk: f64,
    /// What a walk takes when its reads go to memory.
    pub memory: Spread,
    /// What it takes when they go to caches.
    pub caches: Spread,
}

impl WalkTimes {
    /// What one read takes that goes to memory, with its part of the walker's own work, nanoseconds.
    pub fn read_ns(&self) -> f64 {
        self.memory.median_ns / self.reads_per_walk
    }
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasureReport {
    /// Why nothing was: `one node`.
    pub not_run: Option<String>,
    /// The nodes.
    pub nodes: Vec<MeasuredNode>,
    /// How caches were emptied.
    pub eviction: Eviction,
    /// Walks, by the node of the processors, then of the tables.
    pub walks: Vec<WalkTimes>,
    /// DMA by devices that were named.
    pub dma: Vec<dma::DmaTimes>,
}
