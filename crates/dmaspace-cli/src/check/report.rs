//! Results of a check, with names that are stable and end in their unit.

use dmaspace::devices::DeviceReport;
use hostmem::Mapping;
use ioas::Unsupported;
use serde::Serialize;

use super::{Because as _, CheckError};
use crate::json::hex;
use crate::size::SizeClass;

macro_rules! steps {
    ($($step:ident: $name:literal,)+) => {
        /// The steps, in their order. Each back end has those that it can try.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum Step {
            #[default]
            $($step,)+
        }

        impl Step {
            /// The name in the table.
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$step => $name,)+
                }
            }
        }
    };
}

steps! {
    Memory: "memory",
    Attach: "attach",
    Pin: "pin",
    FindRuns: "find runs",
    Map: "map",
    Dma: "DMA",
    Limit: "limit",
    Nodes: "nodes",
    Hole: "hole",
    CloseHole: "close hole",
    Track: "track",
    Harvest: "harvest",
    Merge: "merge",
    Release: "release",
    Restore: "restore",
    Unmap: "unmap",
    Close: "close",
    Times: "times",
}

/// The result of a step: a line of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Done {
    pub(super) step: Step,
    /// Bytes that it moved.
    pub(super) bytes: u64,
    /// Nanoseconds of the operation itself, without what is compared after it.
    pub(super) took_ns: u64,
    /// The comparison, and what it found.
    pub(super) checked: String,
    /// The refusal of the back end, if it was one.
    pub(super) refused: Option<Refused>,
    /// All of it was as it had to be.
    pub(super) right: bool,
}

impl Done {
    pub(super) fn new(bytes: u64, took_ns: u64, right: bool, checked: impl Into<String>) -> Self {
        Self {
            step: Step::default(),
            bytes,
            took_ns,
            checked: checked.into(),
            refused: None,
            right,
        }
    }
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Refused {
    /// The [capability](ioas::Capability) that is missing; `None` for a limit.
    pub(super) capability: Option<&'static str>,
    /// The error as it stands.
    pub(super) error: String,
}

impl From<Unsupported> for Refused {
    fn from(cause: Unsupported) -> Self {
        Self {
            capability: Some(cause.what.name()),
            error: crate::output::sentence(&cause),
        }
    }
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct CheckReport {
    /// `software`, `vfio`, `iommufd`.
    pub(super) backend: &'static str,
    pub(super) memory: MemoryReport,
    /// The page tables; `None` where they are the kernel's, which does not show them.
    pub(super) tables: Option<TablesReport>,
    /// Which devices share a page table; `None` unless it was asked.
    pub(super) placement: Option<PlacementReport>,
    /// The interface of the kernel, and the devices.
    pub(super) kernel: Option<KernelReport>,
    pub(super) steps: Vec<Done>,
    /// Accesses of the devices; `None` where they do no DMA.
    pub(super) dma: Option<DmaReport>,
    /// The same map by runs and by pages; `None` with the kernel's tables.
    pub(super) compared: Option<Compared>,
    /// Times of memory of several sizes and backings, if they were asked for.
    pub(super) times: Vec<TimesReport>,
    /// Counters at the end.
    pub(super) left: FinalCounters,
}

impl CheckReport {
    /// Every step, every byte and every counter was right.
    pub(super) fn is_right(&self) -> bool {
        let dma = self.dma.as_ref().is_none_or(DmaReport::is_right);
        dma && self.left == FinalCounters::default() && self.steps.iter().all(|done| done.right)
    }
}

/// The memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct MemoryReport {
    pub(super) size_bytes: u64,
    /// The reason for that size, if none was asked for.
    pub(super) size_reason: Option<String>,
    /// The kind of its pages: `4k`, `thp`, `hugetlb-2m`, `hugetlb-1g`, `memfd`.
    pub(super) backing: &'static str,
    /// The reason for that kind, if none was asked for.
    pub(super) backing_reason: Option<String>,
    /// Bytes in huge pages.
    pub(super) huge_bytes: u64,
    pub(super) nodes: Vec<NodeShare>,
    /// Physical runs; `None` where the kernel finds them.
    pub(super) runs: Option<u64>,
    /// The source of physical addresses: `pagemap`, `file-offset` and `synthetic`, which are not real, or `kernel`.
    pub(super) addresses: &'static str,
    /// The same as a sentence.
    pub(super) addresses_reason: String,
    /// The way of pinning: `io_uring`, `mlock`, `kernel`.
    pub(super) pin: String,
    /// The reason if that is not io_uring.
    pub(super) pin_reason: Option<String>,
    /// The kernel's counter that is charged.
    pub(super) counter: &'static str,
    pub(super) charged_bytes: u64,
    /// Steps in which they were charged.
    pub(super) charge_steps: u64,
    /// The limit; `None` without one.
    pub(super) limit_bytes: Option<u64>,
    /// The kernel's counters while it was mapped.
    pub(super) mapped: Counted,
}

/// Bytes on a memory node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct NodeShare {
    /// The node; `None` where the kernel does not say.
    pub(super) node: Option<u32>,
    pub(super) bytes: u64,
}

pub(super) const LIES: &str = "cannot learn where the memory lies";

/// Bytes of memory by node.
pub(super) fn nodes(mapping: &Mapping) -> Result<Vec<NodeShare>, CheckError> {
    let shares = mapping.nodes().failed(LIES)?.into_iter();
    let share = |(node, bytes)| NodeShare { node, bytes };
    Ok(shares.map(share).collect())
}

/// Counters of the kernel for this process, as `/proc/self/status` has it: `VmLck`, `VmPin`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counted {
    pub(super) locked_bytes: u64,
    pub(super) pinned_bytes: u64,
}

/// Page tables of our own.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct TablesReport {
    /// The format: `vtd-ss`, `x86-64`, `amdv1`.
    pub(super) format: &'static str,
    pub(super) levels: u8,
    /// Leaves by size, of the first table.
    pub(super) leaves: Vec<SizeClass>,
    /// Pages of all tables.
    pub(super) table_pages: u64,
    /// Their bytes by memory node.
    pub(super) nodes: Vec<NodeShare>,
}

/// Which devices share a page table, and where it lies.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct PlacementReport {
    /// `shared`, `per-node`, `near:1`.
    pub(super) policy: String,
    /// The page tables.
    pub(super) domains: Vec<DomainReport>,
    /// Table memory that is not on the node that was wanted: a sentence for each node.
    pub(super) misplaced: Vec<String>,
}

/// A page table, and the devices that share it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct DomainReport {
    /// The node of its devices; `None` where that is not known.
    pub(super) node: Option<u32>,
    /// The number of devices.
    pub(super) devices: u64,
    /// Bytes of its tables; `None` for the kernel's.
    pub(super) table_bytes: Option<u64>,
    /// Bytes that are charged for it alone; `None` where all share a charge.
    pub(super) charged_bytes: Option<u64>,
    /// Where its tables lie, asked page by page; `None` for the kernel's.
    pub(super) nodes: Option<Vec<NodeShare>>,
}

/// An interface of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct KernelReport {
    pub(super) devices: Vec<DeviceReport>,
    /// Both ends of a mapping are multiples of this.
    pub(super) granule_bytes: u64,
    /// Sizes of pages; `None` where it does not tell.
    pub(super) page_sizes_bytes: Option<Vec<u64>>,
    /// Device addresses that can be mapped.
    pub(super) windows: Vec<WindowReport>,
    /// Names of the [capabilities](ioas::Capabilities) that it lacks.
    pub(super) lacks: Vec<&'static str>,
    /// Mappings that the memory took.
    pub(super) mappings: u64,
    /// The most that there can be; `None` without a limit.
    pub(super) most_mappings: Option<u64>,
}

/// A stretch of device addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct WindowReport {
    #[serde(with = "hex")]
    pub(super) first: u64,
    #[serde(with = "hex")]
    pub(super) last: u64,
}

/// All accesses of the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct DmaReport {
    /// The number of devices.
    pub(super) devices: u32,
    /// Bytes that they read and compared.
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
    /// Bytes that were not what they had to be.
    pub(super) wrong_bytes: u64,
    /// Faults where nothing was mapped, which had to be.
    pub(super) faults_expected: u64,
    /// Faults where memory was mapped.
    pub(super) faults_unexpected: u64,
    /// Accesses that got through where nothing was mapped.
    pub(super) reached_in_holes: u64,
}

impl DmaReport {
    /// Nothing was wrong so far.
    pub(super) const fn is_right(&self) -> bool {
        self.wrong_bytes == 0 && self.faults_unexpected == 0 && self.reached_in_holes == 0
    }
}

/// A map measured several times, in two ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Compared {
    pub(super) rounds: u64,
    /// A call for each run, nanoseconds.
    pub(super) by_runs_ns: Spread,
    /// A call for each page, nanoseconds.
    pub(super) by_page_ns: Spread,
    /// The second divided by the first, in each round.
    pub(super) ratio: Spread,
}

/// A median, and the middle half of the samples around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Spread {
    /// The median; of an even number the middle between the two in the middle.
    pub(super) median: f64,
    /// The lower quartile.
    pub(super) lower: f64,
    /// The upper quartile.
    pub(super) upper: f64,
}

impl Spread {
    /// Quartiles of samples in any order; zeros of none.
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |place: usize| samples.get(place).copied().unwrap_or_default();
        let last = samples.len().saturating_sub(1);
        Self {
            median: f64::midpoint(at(last / 2), at(samples.len() / 2)),
            lower: at(last / 4),
            upper: at(last - last / 4),
        }
    }
}

/// Medians of mapping and unmapping memory of one size and backing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct TimesReport {
    /// The kind of its pages.
    pub(super) backing: &'static str,
    pub(super) size_bytes: u64,
    /// Pinning it; 0 where the kernel pins as it maps.
    pub(super) pin_ns: u64,
    /// Finding runs and filling tables; of a kernel the whole call.
    pub(super) map_ns: u64,
    /// Unmapping, flushing and unpinning.
    pub(super) unmap_ns: u64,
    /// The reason if it could not be had.
    pub(super) refused: Option<String>,
}

/// Counters that are to be zero at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct FinalCounters {
    /// Bytes in the ledger.
    pub(super) charged_bytes: u64,
    /// Bytes of the memory that are held.
    pub(super) held_bytes: u64,
    /// Pages of tables.
    pub(super) table_pages: u64,
    /// Mappings of the kernel.
    pub(super) mappings: u64,
    /// The kernel's counters.
    pub(super) kernel: Counted,
}
