//! What one run of the main job found, with stable names and units: `_bytes`, `_ns`, or a count.

use serde::Serialize;

/// The whole report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MapReport {
    /// The memory that was mapped.
    pub memory: MemoryReport,
    /// What pinning it was charged to.
    pub charge: ChargeReport,
    /// The page tables over it.
    pub tables: TablesReport,
    /// How long each step took.
    pub times: Times,
    /// What the devices found.
    pub dma: DmaReport,
    /// The address space, in order: neighbouring leaves of one size are one stretch.
    pub layout: Vec<Stretch>,
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
    /// Of how many physical runs it consists.
    pub runs: u64,
    /// The runs by size: classes of powers of two.
    pub run_sizes: Vec<SizeClass>,
    /// The nodes that it sits on.
    pub nodes: Vec<NodeShare>,
    /// Where the physical addresses come from: `pagemap` (real), `file-offset`, `synthetic`.
    pub addresses: String,
    /// The same as a sentence.
    pub addresses_reason: String,
    /// Entries of the kernel's page map that were read to find the runs.
    pub looks: u64,
}

/// Runs or leaves of one size class.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SizeClass {
    /// The smallest length of the class; the class ends below twice as much.
    pub from_bytes: u64,
    /// How many there are.
    pub count: u64,
    /// Their bytes together.
    pub bytes: u64,
}

/// Memory on one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeShare {
    /// The node; `None` when the kernel does not say.
    pub node: Option<u32>,
    /// The bytes on it.
    pub bytes: u64,
}

/// What pinning was charged to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChargeReport {
    /// How it was pinned: `io_uring`, `mlock`.
    pub pin: String,
    /// Why not by io_uring, if so.
    pub pin_reason: Option<String>,
    /// Bytes that were charged: whole huge pages, as the kernel charges them.
    pub charged_bytes: u64,
    /// The limit; `None` when no limit applies.
    pub limit_bytes: Option<u64>,
    /// The kernel's counter: `user->locked_vm`, `mm->locked_vm`, `mm->pinned_vm`.
    pub counter: String,
    /// Steps in which the ledger charged it.
    pub steps: u64,
    /// Steps that charging page by page would have taken.
    pub page_steps: u64,
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
    /// Table pages, the root among them.
    pub table_pages: u64,
    /// Their bytes.
    pub table_bytes: u64,
    /// The nodes on which the table memory lies.
    pub nodes: Vec<NodeShare>,
}

/// How long each step took, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Bringing the memory in.
    pub populate_ns: u64,
    /// Pinning it.
    pub pin_ns: u64,
    /// Finding the physical runs.
    pub find_runs_ns: u64,
    /// Filling the page tables by runs.
    pub map_ns: u64,
    /// The same tables filled page by page, measured beside.
    pub map_by_page_ns: u64,
    /// Attaching the devices.
    pub attach_ns: u64,
    /// Writing and checking the patterns by processor and devices.
    pub dma_check_ns: u64,
    /// Emptying the tables and flushing the unit.
    pub unmap_ns: u64,
    /// Unpinning.
    pub unpin_ns: u64,
}

/// What the devices found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DmaReport {
    /// Devices that took part.
    pub devices: u32,
    /// Bytes that devices read and checked.
    pub read_bytes: u64,
    /// Bytes that devices wrote and the processor checked.
    pub written_bytes: u64,
    /// Bytes that were not what they had to be.
    pub wrong_bytes: u64,
    /// Accesses inside the mapped range that faulted.
    pub faults: u64,
    /// Accesses just outside the mapped range that faulted, as they must.
    pub neighbour_faults: u64,
    /// Accesses just outside the mapped range.
    pub neighbour_accesses: u64,
    /// Translations that the unit's cache answered.
    pub iotlb_hits: u64,
    /// Translations that needed a walk.
    pub iotlb_misses: u64,
    /// Table entries that the walks read.
    pub table_reads: u64,
}

impl DmaReport {
    /// Table entries read per walk; `None` when there was none.
    pub fn reads_per_miss(&self) -> Option<f64> {
        (self.iotlb_misses > 0).then(|| self.table_reads as f64 / self.iotlb_misses as f64)
    }
}

/// A stretch of the address space with leaves of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stretch {
    /// First device address.
    pub iova: u64,
    /// Length.
    pub len_bytes: u64,
    /// Size of its leaves.
    pub leaf_bytes: u64,
}
