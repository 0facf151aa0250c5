//! What a life has shown, with stable names and units: `_bytes`, `_ns`, or a count.

use std::time::Instant;

use serde::Serialize;

use crate::json::hex;
use crate::map::clock::{in_nanoseconds, nanoseconds};
use crate::map::{DeviceUsed, NodeShare};
use scenario::Counted;

pub use scenario::{
    Counts as DmaCounts, Done as StepReport, Refused, Root as RootReport, Step as LifeStep,
};

/// The whole report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LifeReport {
    /// The memory of the virtual machine, a part on each node.
    pub memory: LifeMemory,
    /// Who mapped it: `software` (own tables, and devices of the software unit), `vfio`, `iommufd`.
    pub backend: String,
    /// The machine's devices that did DMA; none with `software`.
    pub devices: Vec<DeviceUsed>,
    /// The page tables: one on each node, of different formats. None where the kernel has its own.
    pub roots: Vec<RootReport>,
    /// Bytes of the largest leaf over the memory, which the hole was cut into; 0 where the kernel does not
    /// tell.
    pub largest_leaf_bytes: u64,
    /// What happened, in order.
    pub steps: Vec<StepReport>,
    /// What the devices did, from the first step to the last.
    pub dma: DmaCounts,
    /// Where the time went.
    pub times: LifeTimes,
    /// What is left at the end, of everything that was counted.
    pub left: Left,
    /// The address space after each step; nothing where the kernel does not tell.
    pub moments: Vec<Moment>,
}

impl LifeReport {
    /// True when every check held and nothing is left.
    pub fn is_right(&self) -> bool {
        self.steps.iter().all(|step| step.right) && self.dma.is_right() && self.left.is_nothing()
    }
}

/// The memory of the virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LifeMemory {
    /// Its size.
    pub size_bytes: u64,
    /// Why it is of this size, when nobody asked for one.
    pub size_reason: Option<String>,
    /// What it consists of: `memfd`, `hugetlb-2m`, `hugetlb-1g`.
    pub backing: String,
    /// Where the physical addresses come from: `pagemap` (real), `file-offset`.
    pub addresses: String,
    /// The first device address, which is the guest's address too.
    #[serde(with = "hex")]
    pub iova: u64,
    /// Its parts.
    pub parts: Vec<PartReport>,
    /// True when the machine has one memory node only: the second is planned, and its memory and tables
    /// lie on the first.
    pub second_node_planned: bool,
    /// How it was pinned: `io_uring`, `mlock`, `the kernel`.
    pub pin: String,
    /// The kernel's counter that it was charged to.
    pub counter: String,
}

/// The memory of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PartReport {
    /// The node that it is for.
    pub node: u32,
    /// Its size.
    pub size_bytes: u64,
    /// Where it lies.
    pub nodes: Vec<NodeShare>,
}

/// Where the time of a life went; all parts together are the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LifeTimes {
    /// From the first step until everything was given back.
    pub wall_ns: u64,
    /// What the steps took, together.
    pub steps_ns: u64,
    /// Waiting until devices have seen what a step changed.
    pub waited_ns: u64,
    /// Noting the address space after each step, for the picture.
    pub drawn_ns: u64,
    /// Giving back memory, tables and huge pages, after the last step.
    pub freed_ns: u64,
    /// The rest: checks, and setting balloon and devices up.
    pub rest_ns: u64,
}

impl LifeTimes {
    /// With what `steps` took, and the rest of what has passed since `begun`.
    pub(super) fn closed(mut self, begun: Instant, steps: &[StepReport]) -> Self {
        self.wall_ns = nanoseconds(begun);
        self.steps_ns = steps.iter().map(|step| in_nanoseconds(step.took)).sum();
        let known = self.steps_ns + self.waited_ns + self.drawn_ns + self.freed_ns;
        self.rest_ns = self.wall_ns.saturating_sub(known);
        self
    }
}

/// What is left at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Bytes that the first owner's ledger still charges.
    pub ledger_bytes: u64,
    /// What the kernel still counts for the first owner, beyond what it did at the beginning.
    pub kernel: Counted,
    /// Bytes that the second owner's ledger still charges.
    pub successor_ledger_bytes: u64,
    /// What the kernel still counts for the second owner.
    pub successor_kernel: Counted,
    /// Table pages that are in use.
    pub table_pages: u64,
    /// Areas that are mapped.
    pub areas: u64,
    /// Huge pages that are missing in the machine's pool, of those that were free at the beginning.
    pub huge_pages: u64,
}

impl Left {
    /// True when nothing is.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// The address space at one time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moment {
    /// The step that was done.
    pub after: LifeStep,
    /// Each root's addresses, in order.
    pub roots: Vec<Vec<Band>>,
}

/// Addresses in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Band {
    /// The first.
    #[serde(with = "hex")]
    pub iova: u64,
    /// How many bytes.
    pub len_bytes: u64,
    /// What they are.
    #[serde(flatten)]
    pub state: BandState,
}

/// What addresses are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum BandState {
    /// Nothing is mapped.
    Absent,
    /// Mapped, by leaves of which most are of this size.
    Mapped {
        /// Their size.
        leaf_bytes: u64,
    },
    /// Mapped, and written to by devices since tracking began.
    Dirty,
    /// A hole is in it.
    Hole,
    /// In the balloon.
    Balloon,
}
