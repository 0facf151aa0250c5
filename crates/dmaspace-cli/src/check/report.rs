//! Results of a check, with names that are stable and end in their unit.

use hostmem::{Counter, Limits, LimitsError, Mapping, PlacementError};
use ioas::Unsupported;
use serde::Serialize;

use crate::json::hex;
use crate::size::SizeClass;

/// The steps, in their order. Each back end has those that it can try.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Memory is taken and brought in.
    #[default]
    Memory,
    /// Devices are attached.
    Attach,
    /// Memory is pinned and charged.
    Pin,
    /// Its physical runs are found.
    FindRuns,
    /// The page tables are filled; by a kernel, which pins in the same call.
    Map,
    /// Devices read, compare and write everything.
    Dma,
    /// More is mapped than the limit on locked memory leaves.
    Limit,
    /// Tables are wanted on each memory node.
    Nodes,
    /// A page is taken out of the largest leaf.
    Hole,
    /// It is put back.
    CloseHole,
    /// Leaves are split, and what devices write to is tracked.
    Track,
    /// Dirty pages are harvested.
    Harvest,
    /// Tracking ends, and leaves are merged.
    Merge,
    /// A balloon takes most of the memory.
    Release,
    /// It gives the memory back.
    Restore,
    /// Memory is unmapped and unpinned.
    Unmap,
    /// The address space ends.
    Close,
    /// The map is compared with one by pages, and other memory is timed.
    Times,
}

impl Step {
    /// The name in the table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Attach => "attach",
            Self::Pin => "pin",
            Self::FindRuns => "find runs",
            Self::Map => "map",
            Self::Dma => "DMA",
            Self::Limit => "limit",
            Self::Nodes => "nodes",
            Self::Hole => "hole",
            Self::CloseHole => "close hole",
            Self::Track => "track",
            Self::Harvest => "harvest",
            Self::Merge => "merge",
            Self::Release => "release",
            Self::Restore => "restore",
            Self::Unmap => "unmap",
            Self::Close => "close",
            Self::Times => "times",
        }
    }
}

/// The result of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Done {
    /// The step.
    pub step: Step,
    /// Bytes that it moved.
    pub bytes: u64,
    /// Nanoseconds of the operation itself, without what is compared after it.
    pub took_ns: u64,
    /// The comparison, and what it found.
    pub checked: String,
    /// The refusal of the back end, if it was one.
    pub refused: Option<Refused>,
    /// All of it was as it had to be.
    pub right: bool,
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The [capability](ioas::Capability) that is missing; `None` for a limit.
    pub capability: Option<&'static str>,
    /// The error as it stands.
    pub error: String,
}

impl From<Unsupported> for Refused {
    fn from(cause: Unsupported) -> Self {
        Self {
            capability: Some(cause.what.name()),
            error: cause.to_string(),
        }
    }
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckReport {
    /// `software`, `vfio`, `iommufd`.
    pub backend: &'static str,
    /// The memory.
    pub memory: MemoryReport,
    /// The page tables; `None` where they are the kernel's, which does not show them.
    pub tables: Option<TablesReport>,
    /// Which devices share a page table; `None` unless it was asked.
    pub placement: Option<PlacementReport>,
    /// The interface of the kernel, and the devices.
    pub kernel: Option<KernelReport>,
    /// The steps.
    pub steps: Vec<Done>,
    /// Accesses of the devices; `None` where they do no DMA.
    pub dma: Option<DmaReport>,
    /// The same map by runs and by pages; `None` with the kernel's tables.
    pub compared: Option<Compared>,
    /// Times of memory of several sizes and backings, if they were asked for.
    pub times: Vec<TimesReport>,
    /// Counters at the end.
    pub left: Left,
}

impl CheckReport {
    /// Every step, every byte and every counter was right.
    pub fn is_right(&self) -> bool {
        let dma = self.dma.as_ref().is_none_or(DmaReport::is_right);
        dma && self.left == Left::default() && self.steps.iter().all(|done| done.right)
    }
}

/// The memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryReport {
    /// Its size.
    pub size_bytes: u64,
    /// The reason for that size, if none was asked for.
    pub size_reason: Option<String>,
    /// The kind of its pages: `4k`, `thp`, `hugetlb-2m`, `hugetlb-1g`, `memfd`.
    pub backing: &'static str,
    /// The reason for that kind, if none was asked for.
    pub backing_reason: Option<String>,
    /// Bytes in huge pages.
    pub huge_bytes: u64,
    /// Bytes by memory node.
    pub nodes: Vec<NodeShare>,
    /// Physical runs; `None` where the kernel finds them.
    pub runs: Option<u64>,
    /// The source of physical addresses: `pagemap`, `file-offset` and `synthetic`, which are not real, or `kernel`.
    pub addresses: &'static str,
    /// The same as a sentence.
    pub addresses_reason: String,
    /// The way of pinning: `io_uring`, `mlock`, `kernel`.
    pub pin: String,
    /// The reason if that is not io_uring.
    pub pin_reason: Option<String>,
    /// The kernel's counter that is charged.
    pub counter: &'static str,
    /// Bytes that were charged.
    pub charged_bytes: u64,
    /// Steps in which they were charged.
    pub charge_steps: u64,
    /// The limit; `None` without one.
    pub limit_bytes: Option<u64>,
    /// The kernel's counters while it was mapped.
    pub mapped: Counted,
}

/// Bytes on a memory node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeShare {
    /// The node; `None` where the kernel does not say.
    pub node: Option<u32>,
    /// The bytes.
    pub bytes: u64,
}

/// Bytes of memory by node.
pub(super) fn nodes(mapping: &Mapping) -> Result<Vec<NodeShare>, PlacementError> {
    let shares = mapping.nodes()?.into_iter();
    Ok(shares
        .map(|(node, bytes)| NodeShare { node, bytes })
        .collect())
}

/// Counters of the kernel for this process, as `/proc/self/status` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counted {
    /// Locked memory, `VmLck`.
    pub locked_bytes: u64,
    /// Pinned memory, `VmPin`.
    pub pinned_bytes: u64,
}

impl Counted {
    /// Counts of now, above `before`.
    pub(super) fn since(before: Self) -> Result<Self, LimitsError> {
        let now = |counter| Ok::<_, LimitsError>(Limits::in_use(counter)?.known);
        Ok(Self {
            locked_bytes: now(Counter::MmLockedVm)?.saturating_sub(before.locked_bytes),
            pinned_bytes: now(Counter::PinnedVm)?.saturating_sub(before.pinned_bytes),
        })
    }
}

/// Page tables of our own.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TablesReport {
    /// The format: `vtd-ss`, `x86-64`, `amdv1`.
    pub format: &'static str,
    /// Levels.
    pub levels: u8,
    /// Leaves by size, of the first table.
    pub leaves: Vec<SizeClass>,
    /// Pages of all tables.
    pub table_pages: u64,
    /// Their bytes by memory node.
    pub nodes: Vec<NodeShare>,
}

/// Which devices share a page table, and where it lies.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PlacementReport {
    /// `shared`, `per-node`, `near:1`.
    pub policy: String,
    /// The page tables.
    pub domains: Vec<DomainReport>,
    /// Table memory that is not on the node that was wanted: a sentence for each node.
    pub misplaced: Vec<String>,
}

/// A page table, and the devices that share it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DomainReport {
    /// The node of its devices; `None` where that is not known.
    pub node: Option<u32>,
    /// The number of devices.
    pub devices: u64,
    /// Bytes of its tables; `None` for the kernel's.
    pub table_bytes: Option<u64>,
    /// Bytes that are charged for it alone; `None` where all share a charge.
    pub charged_bytes: Option<u64>,
    /// Where its tables lie, asked page by page; `None` for the kernel's.
    pub nodes: Option<Vec<NodeShare>>,
}

/// An interface of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KernelReport {
    /// The devices.
    pub devices: Vec<DeviceUsed>,
    /// Both ends of a mapping are multiples of this.
    pub granule_bytes: u64,
    /// Sizes of pages; `None` where it does not tell.
    pub page_sizes_bytes: Option<Vec<u64>>,
    /// Device addresses that can be mapped.
    pub windows: Vec<WindowReport>,
    /// Names of the [capabilities](ioas::Capabilities) that it lacks.
    pub lacks: Vec<&'static str>,
    /// Mappings that the memory took.
    pub mappings: u64,
    /// The most that there can be; `None` without a limit.
    pub most_mappings: Option<u64>,
}

/// A device of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceUsed {
    /// Its address.
    pub address: String,
    /// Vendor and device.
    pub id: String,
    /// Its group.
    pub group: Option<u32>,
    /// The unit that translates for it.
    pub unit: Option<String>,
    /// Its memory node.
    pub node: Option<u32>,
}

/// A stretch of device addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WindowReport {
    /// The first address.
    #[serde(with = "hex")]
    pub first: u64,
    /// The last one.
    #[serde(with = "hex")]
    pub last: u64,
}

/// All accesses of the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DmaReport {
    /// The number of devices.
    pub devices: u32,
    /// Bytes that they read and compared.
    pub read_bytes: u64,
    /// Bytes that they wrote.
    pub written_bytes: u64,
    /// Bytes that were not what they had to be.
    pub wrong_bytes: u64,
    /// Faults where nothing was mapped, which had to be.
    pub faults_expected: u64,
    /// Faults where memory was mapped.
    pub faults_unexpected: u64,
    /// Accesses that got through where nothing was mapped.
    pub reached_in_holes: u64,
}

impl DmaReport {
    /// Nothing was wrong so far.
    pub const fn is_right(&self) -> bool {
        self.wrong_bytes == 0 && self.faults_unexpected == 0 && self.reached_in_holes == 0
    }
}

/// A map measured several times, in two ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Compared {
    /// Rounds.
    pub rounds: u64,
    /// A call for each run, nanoseconds.
    pub by_runs_ns: Spread,
    /// A call for each page, nanoseconds.
    pub by_page_ns: Spread,
    /// The second divided by the first, in each round.
    pub ratio: Spread,
}

/// A median, and the middle half of the samples around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The median; of an even number the middle between the two in the middle.
    pub median: f64,
    /// The lower quartile.
    pub lower: f64,
    /// The upper quartile.
    pub upper: f64,
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
pub struct TimesReport {
    /// The kind of its pages.
    pub backing: &'static str,
    /// Its size.
    pub size_bytes: u64,
    /// Pinning it; 0 where the kernel pins as it maps.
    pub pin_ns: u64,
    /// Finding runs and filling tables; of a kernel the whole call.
    pub map_ns: u64,
    /// Unmapping, flushing and unpinning.
    pub unmap_ns: u64,
    /// The reason if it could not be had.
    pub refused: Option<String>,
}

/// Counters that are to be zero at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Bytes in the ledger.
    pub charged_bytes: u64,
    /// Bytes of the memory that are held.
    pub held_bytes: u64,
    /// Pages of tables.
    pub table_pages: u64,
    /// Mappings of the kernel.
    pub mappings: u64,
    /// The kernel's counters.
    pub kernel: Counted,
}
