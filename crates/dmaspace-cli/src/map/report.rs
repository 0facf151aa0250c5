//! What one run of the main job found, with stable names and units: `_bytes`, `_ns`, or a count.

use std::path::PathBuf;

use serde::Serialize;

use crate::json::hex;

pub use scenario::{Counted, NodeShare};

/// The whole report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MapReport {
    /// Who mapped it, and what that can do.
    pub backend: BackendReport,
    /// The memory that was mapped.
    pub memory: MemoryReport,
    /// What pinning it was charged to.
    pub charge: ChargeReport,
    /// The page tables over it; `None` when they are the kernel's, which tells nothing of them.
    pub tables: Option<TablesReport>,
    /// Which devices share a page table, and where it lies; `None` when nobody asked.
    pub placement: Option<PlacementReport>,
    /// How long each step took.
    pub times: Times,
    /// The map measured again, by runs and page by page; `None` with the kernel's tables.
    pub compared: Option<Compared>,
    /// What the devices found.
    pub dma: DmaReport,
    /// The address space, in order: neighbouring leaves of one size are one stretch. `None` with
    /// the kernel's tables.
    pub layout: Option<Vec<Stretch>>,
}

/// Who mapped the memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BackendReport {
    /// `software`, `vfio`, `iommufd`.
    pub name: String,
    /// The device that it was mapped for, of a kernel's back end.
    pub device: Option<DeviceUsed>,
    /// Further devices that it was mapped for.
    pub further_devices: Vec<DeviceUsed>,
    /// What it cannot do that another one can.
    pub lacks: Vec<Lack>,
    /// What both ends of a mapping are multiples of.
    pub granule_bytes: u64,
    /// The sizes of pages that its tables have; `None` when it does not tell.
    pub page_sizes_bytes: Option<Vec<u64>>,
    /// The device addresses that can be mapped, in order; stretches of more than 2^63 bytes come in
    /// two.
    pub windows: Vec<WindowReport>,
    /// The kernel's mappings, of a kernel's back end.
    pub mappings: Option<MappingsReport>,
}

/// A device of the machine, in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceUsed {
    /// Domain, bus, device and function: `0000:00:05.0`.
    pub address: String,
    /// Vendor and device, four hexadecimal digits each: `1b36:0010`.
    pub id: String,
    /// Its group.
    pub group: Option<u32>,
    /// Its own node, if it was used by that: `/dev/vfio/devices/vfio0`.
    pub cdev: Option<PathBuf>,
    /// The IOMMU unit that translates for it: `dmar0`.
    pub unit: Option<String>,
    /// Its memory node, when the firmware tells.
    pub node: Option<u32>,
}

/// Something that a back end cannot do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lack {
    /// Its name, that of a field of [`ioas::Capabilities`].
    pub name: String,
    /// What that is, to follow "cannot".
    pub cannot: String,
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

/// Mappings of the kernel, each of which it unmaps only as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MappingsReport {
    /// How many the memory took.
    pub made: u64,
    /// How many more there could have been beside them; `None` without a limit.
    pub available: Option<u64>,
    /// How many were left when the memory was unmapped.
    pub left: u64,
}

/// The memory that was mapped.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryReport {
    /// Its size.
    pub size_bytes: u64,
    /// Why it is of this size, when nobody asked for one.
    pub size_reason: Option<String>,
    /// What it consists of: `4k`, `thp`, `hugetlb-2m`, `hugetlb-1g`, `memfd`.
    pub backing: String,
    /// Why that was taken, when nobody asked for one.
    pub backing_reason: Option<String>,
    /// Huge pages that were added to the machine's pool, and given back at the end.
    pub pool_pages_added: u64,
    /// How much of it lies in huge pages.
    pub huge_bytes: u64,
    /// The nodes that it sits on.
    pub nodes: Vec<NodeShare>,
    /// The physical runs of which it consists; `None` when the kernel has found them for itself.
    #[serde(flatten)]
    pub found: Option<RunsReport>,
}

/// The physical runs of memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunsReport {
    /// Of how many physical runs it consists.
    pub runs: u64,
    /// The runs by size: classes of powers of two.
    pub run_sizes: Vec<SizeClass>,
    /// Where the physical addresses come from: `pagemap` (real), `file-offset`, `synthetic`.
    pub addresses: String,
    /// The same as a sentence.
    pub addresses_reason: String,
    /// Entries of the kernel's page map that were read to find the runs.
    pub looks: u64,
}

/// Runs or leaves of one size class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SizeClass {
    /// The smallest length of the class; the class ends below twice as much.
    pub from_bytes: u64,
    /// How many there are.
    pub count: u64,
    /// Their bytes together.
    pub bytes: u64,
}

/// What pinning was charged to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChargeReport {
    /// Bytes that the ledger charged: whole huge pages, as the kernel charges them.
    pub charged_bytes: u64,
    /// The limit; `None` when no limit applies.
    pub limit_bytes: Option<u64>,
    /// The kernel's counter: `user->locked_vm`, `mm->locked_vm`, `mm->pinned_vm`.
    pub counter: String,
    /// Steps in which the ledger charged it.
    pub steps: u64,
    /// Steps that charging page by page would have taken.
    pub page_steps: u64,
    /// What the kernel counted before it was mapped.
    pub before: Counted,
    /// What the kernel counted while it was mapped.
    pub mapped: Counted,
    /// What the kernel counted when it was unmapped.
    pub after: Counted,
    /// How it was pinned; `None` when the kernel has pinned it for itself.
    #[serde(flatten)]
    pub pins: Option<PinsReport>,
}

/// How memory was pinned.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PinsReport {
    /// By what: `io_uring`, `mlock`.
    pub pin: String,
    /// Why not by io_uring, if so.
    pub pin_reason: Option<String>,
    /// System calls that pinned.
    pub pin_calls: u64,
    /// Buffers that were registered with io_uring.
    pub pin_buffers: u64,
}

/// The page tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TablesReport {
    /// The format: `vtd-ss`, `x86-64`, `amdv1`.
    pub format: String,
    /// Levels of the tables.
    pub levels: u8,
    /// Leaves by size.
    pub leaves: Vec<SizeClass>,
    /// Table pages of all domains, the roots among them.
    pub table_pages: u64,
    /// Their bytes.
    pub table_bytes: u64,
    /// The nodes on which the table memory lies.
    pub nodes: Vec<NodeShare>,
}

/// Which devices share a page table, and where it lies. What that costs is in the tables' bytes, in the
/// time of the map, and in the charge, which is for all domains together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PlacementReport {
    /// `shared`, `per-node`, `near:1`.
    pub policy: String,
    /// The page tables, each with the devices that share it.
    pub domains: Vec<DomainReport>,
    /// Table memory that is not on the node that it was wanted on: a sentence for each node.
    pub misplaced: Vec<String>,
}

/// A page table, and the devices that share it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DomainReport {
    /// The node of its devices; `None` when it is not known.
    pub node: Option<u32>,
    /// How many devices there are.
    pub devices: u64,
    /// Bytes of its table pages; `None` when they are the kernel's.
    pub table_bytes: Option<u64>,
    /// Bytes of memory that are charged for this one alone; `None` when all of them share a charge.
    pub charged_bytes: Option<u64>,
    /// The nodes on which its table memory lies, asked page by page; `None` when it is the kernel's.
    pub nodes: Option<Vec<NodeShare>>,
}

/// How long each step took, in nanoseconds; `None` for what was not done, or not by itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Bringing the memory in.
    pub populate_ns: u64,
    /// Pinning it.
    pub pin_ns: Option<u64>,
    /// Finding the physical runs.
    pub find_runs_ns: Option<u64>,
    /// Filling the page tables by runs; of a kernel, which does that in one call, pinning too.
    pub map_ns: u64,
    /// Attaching the devices.
    pub attach_ns: u64,
    /// Writing and checking the patterns by processor and devices.
    pub dma_check_ns: Option<u64>,
    /// Emptying the tables and flushing the unit; of a kernel, unpinning too.
    pub unmap_ns: u64,
    /// Unpinning.
    pub unpin_ns: Option<u64>,
}

/// The same runs mapped in two ways, in tables beside those of the job: in turns, several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Compared {
    /// How often each way was measured.
    pub rounds: u64,
    /// A call for each run, nanoseconds.
    pub by_runs_ns: Spread,
    /// A call for each page of 4 KiB, nanoseconds.
    pub by_page_ns: Spread,
    /// How many times as long page by page takes, in each round.
    pub ratio: Spread,
}

/// A median, and between which values the middle half of the samples is: one that another program took the
/// processor from moves neither.
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
    /// Of samples in any order; zeros of none.
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

/// What the devices found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DmaReport {
    /// Devices that took part.
    pub devices: u32,
    /// Why nothing was checked, if so.
    pub not_checked: Option<String>,
    /// How a device of the machine has checked, which looks at samples.
    pub sample: Option<SampleReport>,
    /// Bytes that devices read and checked.
    pub read_bytes: u64,
    /// Bytes that devices wrote and the processor checked.
    pub written_bytes: u64,
    /// Bytes that were not what they had to be.
    pub wrong_bytes: u64,
    /// Accesses just outside the mapped range.
    pub neighbour_accesses: u64,
    /// Those of them that got through; none may.
    pub neighbour_reached: u64,
    /// What the software unit has counted.
    #[serde(flatten)]
    pub unit: Option<UnitReport>,
}

/// A check by copies that a device of the machine makes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SampleReport {
    /// What copies: `edu`.
    pub engine: String,
    /// Copies inside of the range, each of which reads one place and writes another.
    pub copies: u64,
    /// Bytes of the memory that the processor compared afterwards, copied or not.
    pub compared_bytes: u64,
}

/// What the software unit has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnitReport {
    /// Accesses inside the mapped range that faulted.
    pub faults: u64,
    /// Accesses just outside the mapped range that faulted, as they must.
    pub neighbour_faults: u64,
    /// Translations that the unit's cache answered.
    pub iotlb_hits: u64,
    /// Translations that needed a walk.
    pub iotlb_misses: u64,
    /// Table entries that the walks read.
    pub table_reads: u64,
}

impl UnitReport {
    /// Table entries read per walk; `None` when there was none.
    pub fn reads_per_miss(&self) -> Option<f64> {
        (self.iotlb_misses > 0).then(|| self.table_reads as f64 / self.iotlb_misses as f64)
    }
}

/// A stretch of the address space with leaves of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stretch {
    /// First device address.
    #[serde(with = "hex")]
    pub iova: u64,
    /// Length.
    pub len_bytes: u64,
    /// Size of its leaves.
    pub leaf_bytes: u64,
}
