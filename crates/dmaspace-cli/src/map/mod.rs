//! `dmaspace map`: real memory, mapped for devices, checked, and given back.
//!
//! Three back ends map it: tables of ours, which the software unit walks for devices that are
//! threads; and two interfaces of the kernel, VFIO's type 1 and iommufd, which map it for a device
//! of the machine. The steps are the same for all of them. A device of the machine is given DMA to
//! do where its registers are known here; otherwise memory is only mapped for it and unmapped.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod args;
pub(crate) mod clock;
mod command;
mod compared;
mod dma;
pub(crate) mod edu;
mod job;
pub(crate) mod kernel;
pub(crate) mod memory;
mod progress;
mod report;
pub(crate) mod sampled;
#[cfg(test)]
mod samples;
mod software;
mod svg;
mod target;
#[cfg(test)]
mod tests;
mod text;
mod verdict;

use std::ops::ControlFlow;

use dmaspace::devices::{DevicesError, NotReady};
use hostmem::{Backing, KeptPoolError};
use ioas::Placement;
use iopt::FormatId;

pub(crate) use args::{BackendName, MapArgs};
pub(crate) use command::run;
pub use report::{
    BackendReport, ChargeReport, Compared, DeviceUsed, DmaReport, MapReport, MemoryReport,
    NodeShare, PlacementReport, RunsReport, SizeClass, Spread, Stretch, TablesReport, UnitReport,
};
#[cfg(test)]
pub use report::{
    DomainReport, Lack, MappingsReport, PinsReport, SampleReport, Times, WindowReport,
};
pub(crate) use software::table_bytes;

/// What to map, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapJob {
    /// Bytes of memory; `None` for 256 MiB, or what the limit on locked memory leaves.
    pub size: Option<u64>,
    /// What the memory consists of; `None` for the largest pages that the machine gives as it
    /// stands. Huge pages that are asked for by name are added to the machine's pool where they
    /// are missing, and taken out again at the end.
    pub backing: Option<Backing>,
    /// Who maps it, and for which devices.
    pub backend: MapBackend,
    /// Which devices share a page table, and where it lies; with `None`, which is [`Placement::Shared`],
    /// nothing is said of that. Devices of the software unit are at the nodes that have memory, in turn.
    pub placement: Option<Placement>,
}

/// Who maps the memory, and for which devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapBackend {
    /// Tables of ours, and devices of the software unit.
    Software(Software),
    /// A container of VFIO's type 1, and the groups of devices; under [`Placement::PerNode`] a container
    /// for those of each memory node, each of which pins the memory and has it charged.
    Vfio {
        /// The devices' addresses: `0000:00:05.0`.
        devices: Vec<String>,
    },
    /// An address space of iommufd, and devices by their own nodes.
    Iommufd {
        /// The devices' addresses.
        devices: Vec<String>,
    },
}

impl MapBackend {
    /// `software`, `vfio`, `iommufd`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Software(_) => "software",
            Self::Vfio { .. } => "vfio",
            Self::Iommufd { .. } => "iommufd",
        }
    }
}

/// What can be chosen of tables of ours, and of the software unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Software {
    /// The largest leaf in bytes; `None` for the format's own.
    pub max_leaf: Option<u64>,
    /// The format of the tables.
    pub format: FormatId,
    /// How many devices do DMA.
    pub devices: u32,
}

impl Default for Software {
    /// Two devices, and leaves of all sizes in VT-d's second stage.
    fn default() -> Self {
        Self {
            max_leaf: None,
            format: FormatId::VtdSs,
            devices: 2,
        }
    }
}

/// The steps of the job, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bringing the memory in.
    Populate,
    /// Pinning it.
    Pin,
    /// Finding the physical runs.
    FindRuns,
    /// Filling the page tables, by runs and, to compare, page by page.
    Map,
    /// Attaching the devices.
    Attach,
    /// Writing and checking the patterns.
    DmaCheck,
    /// Emptying the tables.
    Unmap,
    /// Unpinning.
    Unpin,
}

/// Who watches the job: a progress bar, or a signal handler that wants it to stop.
pub trait Watch {
    /// Called again and again, from the job's own thread: `done` of `total` bytes of `stage`.
    /// [`ControlFlow::Break`] stops the job, which gives everything back.
    fn progress(&mut self, stage: Stage, done: u64, total: u64) -> ControlFlow<()>;
}

/// Watches nothing and never stops.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

#[cfg(test)]
impl Watch for Unwatched {
    fn progress(&mut self, _stage: Stage, _done: u64, _total: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Why the job was not done. Everything was given back, except where a message says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// What was asked for makes no sense, or is more than there is.
    #[error("{0}")]
    Input(String),
    /// The watcher wanted to stop.
    #[error("interrupted; nothing is left pinned")]
    Interrupted,
    /// The memory cannot be had.
    #[error("cannot get the memory")]
    Mapping(#[source] hostmem::MappingError),
    /// The memory cannot be brought in.
    #[error("cannot bring the memory in")]
    Populate(#[source] hostmem::PopulateError),
    /// Huge pages cannot be added to the machine's pool, or taken out again.
    #[error("the pool of huge pages, which only root changes")]
    Pool(#[source] KeptPoolError),
    /// The process that keeps the pool has ended.
    #[error(transparent)]
    Keeper(KeptPoolError),
    /// The machine does not say what it has.
    #[error("cannot learn what the machine has")]
    Probe(#[from] hostmem::ProbeError),
    /// The limits on locked memory are not known.
    #[error("cannot learn the limits on locked memory")]
    Limits(#[from] hostmem::LimitsError),
    /// Memory cannot be pinned at all.
    #[error("cannot pin memory")]
    Pinner(#[from] hostmem::PinnerError),
    /// The kernel does not tell where memory lies.
    #[error("cannot learn where the memory lies")]
    Look(#[from] hostmem::PlacementError),
    /// There is no memory for the tables.
    #[error("cannot get memory for the page tables")]
    TableMemory(#[source] ioas::Cause),
    /// The memory for the tables is not usable.
    #[error("cannot use the memory for the page tables")]
    Arena(#[from] iopt::ArenaError),
    /// The table cannot be built.
    #[error("cannot build a page table")]
    Table(#[from] iopt::BuildError),
    /// The memory cannot be mapped.
    #[error("cannot map the memory")]
    Map(#[source] ioas::MapError),
    /// The memory cannot be mapped again, to compare.
    #[error("cannot map the memory a second time, to compare")]
    MapAgain(#[from] iopt::TableMapError),
    /// What was mapped to compare cannot be unmapped.
    #[error("cannot unmap what was mapped a second time")]
    UnmapAgain(#[from] iopt::TableUnmapError),
    /// The physical runs of pinned memory cannot be read.
    #[error("cannot find the physical runs of pinned memory")]
    Runs(#[source] ioas::Cause),
    /// A device of the software unit cannot be attached.
    #[error("cannot attach a device")]
    Attach(#[source] ioas::AttachError),
    /// The machine's devices cannot be listed.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The device cannot be used, or not yet.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// The device, or what belongs to it, cannot be opened.
    #[error("cannot open {address}")]
    Open {
        /// Its address.
        address: String,
        /// Why.
        source: ioas::KernelError,
    },
    /// The kernel does not attach the device.
    #[error("cannot attach {address}{hint}")]
    Enter {
        /// Its address.
        address: String,
        /// What may be behind it; empty when that is not known.
        hint: &'static str,
        /// Why.
        source: ioas::AttachError,
    },
    /// The back end cannot place tables so.
    #[error("{0}")]
    Placement(#[from] ioas::Unsupported),
    /// Tables were wanted on a node that the machine does not have, or that has no memory.
    #[error("the machine has no memory on node {node}; nodes that have: {}", listed(.nodes))]
    NoNode {
        /// The node.
        node: u32,
        /// Those with memory.
        nodes: Vec<u32>,
    },
    /// The device's registers cannot be used.
    #[error("cannot use the registers of the device")]
    Registers(#[from] ioas::KernelError),
    /// The device is not what its identity says.
    #[error("the device calls itself {found:#x}, which is no edu")]
    NoEdu {
        /// What it says.
        found: u32,
    },
    /// A copy by the device has no end.
    #[error("the device has not done a copy of {bytes} bytes at {iova:#x} in {seconds} s")]
    Stuck {
        /// The device address.
        iova: u64,
        /// How long the copy is.
        bytes: u64,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The memory cannot be unmapped.
    #[error("cannot unmap the memory")]
    Unmap(#[from] ioas::UnmapError),
    /// The address space does not come to an end.
    #[error("cannot close the address space")]
    Close(#[from] ioas::CloseError),
    /// What was mapped is not there any more.
    #[error("nothing is mapped at {iova:#x} although it was just mapped")]
    Lost {
        /// The device address.
        iova: u64,
    },
    /// Tables were not given back.
    #[error("{tables} table pages were not given back")]
    TablesLeft {
        /// How many.
        tables: u64,
    },
}

fn listed(nodes: &[u32]) -> String {
    let nodes: Vec<_> = nodes.iter().map(u32::to_string).collect();
    nodes.join(", ")
}

impl From<hostmem::PopulateError> for JobError {
    fn from(cause: hostmem::PopulateError) -> Self {
        match cause {
            hostmem::PopulateError::Interrupted { .. } => Self::Interrupted,
            cause => Self::Populate(cause),
        }
    }
}

impl From<KeptPoolError> for JobError {
    fn from(cause: KeptPoolError) -> Self {
        match cause {
            KeptPoolError::Interrupted => Self::Interrupted,
            cause @ (KeptPoolError::KeeperEnded { .. } | KeptPoolError::StaysRaised { .. }) => {
                Self::Keeper(cause)
            }
            cause => Self::Pool(cause),
        }
    }
}

impl From<ioas::MapError> for JobError {
    fn from(cause: ioas::MapError) -> Self {
        match cause {
            ioas::MapError::Interrupted => Self::Interrupted,
            cause => Self::Map(cause),
        }
    }
}

impl JobError {
    /// True when the request is at fault and not this program: another size, backing, limit or
    /// device could succeed on the same machine.
    pub const fn is_input(&self) -> bool {
        matches!(
            self,
            Self::Input(_)
                | Self::Mapping(_)
                | Self::Populate(_)
                | Self::Pool(_)
                | Self::NotReady(_)
                | Self::Open { .. }
                | Self::Enter { .. }
                | Self::Placement(_)
                | Self::NoNode { .. }
                | Self::Map(
                    ioas::MapError::OverLimit(_)
                        | ioas::MapError::Pin(_)
                        | ioas::MapError::NoRoom { .. }
                )
        )
    }
}

impl MapJob {
    /// Does the job: takes memory, pins and charges it, maps it, has devices read and write all of
    /// it, checks every byte, and gives everything back, also after an error.
    pub fn run(&self, watch: &mut dyn Watch) -> Result<MapReport, JobError> {
        job::run(self, watch)
    }
}
