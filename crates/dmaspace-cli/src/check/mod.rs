//! `dmaspace check`: everything that the library does with memory for devices, once, with every byte compared.
//!
//! ```text
//! memory ─ attach ─ pin ─ find runs ─ map ─ DMA ─ hole ─ close hole ─ track ─ harvest ─ merge ─ release ─ restore ─ unmap ─ close
//!                                           └──────────── devices read, compare and write all the time ────────────┘
//! ```
//!
//! A back end is a list of steps, and each step is a line of the table ([`Done`](report::Done)): bytes, time, checks.
//! Over tables of our own, devices are threads at ports of the software unit ([`software`], [`devices`]). Over an
//! interface of the kernel the devices are the machine's and do no DMA ([`kernel`]); operations that the interface lacks
//! are tried, and the refusal is reported. A step that fails ends the check, and everything is given back.

mod args;
mod command;
mod devices;
mod error;
mod job;
mod kernel;
mod memory;
mod report;
mod report_file;
mod software;
#[cfg(test)]
mod tests;
mod text;
mod times;

use clap::ValueEnum;
use hostmem::{Backing, Machine};
use ioas::Placement;
use iopt::FormatId;

pub(crate) use args::{ABOUT, CheckArgs, EXAMPLES};
pub(crate) use command::run;
use error::{Because, CheckError};
use job::{Job, PROBE, Watch};
use report::{CheckReport, Step};

/// Bytes of an access, and of the smallest page.
const PAGE: u64 = 4096;

/// The memory, and what maps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct CheckJob {
    /// Bytes of memory; `None` for 256 MiB, or what the limits leave.
    size: Option<u64>,
    /// The kind of its pages; `None` for the largest that are there.
    backing: Option<Backing>,
    /// The implementation that maps it.
    backend: Backend,
    /// Addresses of the devices for which a kernel maps it.
    devices: Vec<String>,
    /// Tables of our own, and the software unit.
    software: Software,
    /// Which devices share a page table, and where it lies; `None` is [`Placement::Shared`], about which nothing is
    /// reported.
    placement: Option<Placement>,
    /// Times of memory of other sizes and backings are measured as well.
    times: bool,
}

impl CheckJob {
    /// Does all steps.
    ///
    /// # Errors
    ///
    /// See [`CheckError`]. Everything was given back.
    fn run(&self, watch: &mut Watch<'_>) -> Result<CheckReport, CheckError> {
        if let Some(Placement::Near(node)) = self.placement {
            let nodes = Machine::probe().failed(PROBE)?.nodes;
            if !nodes.contains(&node.0) {
                let nodes: Vec<_> = nodes.iter().map(u32::to_string).collect();
                return Err(CheckError::Input(format!(
                    "the machine has no memory on node {}; nodes that have: {}",
                    node.0,
                    nodes.join(", ")
                )));
            }
        }
        let mut job = Job::new(self, watch)?;
        match self.backend {
            Backend::Software => software::check(&mut job, self.software),
            Backend::Vfio | Backend::Iommufd => kernel::check(&mut job),
        }?;
        Ok(job.report)
    }
}

/// Implementations that map the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// Tables of our own, and a software IOMMU whose devices are threads
    #[default]
    Software,
    /// A container of VFIO's type 1, and a device of the machine with its group
    Vfio,
    /// An address space of iommufd, and a device of the machine by its own node
    Iommufd,
}

impl Backend {
    /// As the command line spells it.
    const fn name(self) -> &'static str {
        match self {
            Self::Software => "software",
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
        }
    }
}

/// Tables of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Software {
    /// The largest leaf in bytes; `None` for that of the format.
    max_leaf: Option<u64>,
    format: FormatId,
    devices: u32,
}

impl Default for Software {
    fn default() -> Self {
        Self {
            max_leaf: None,
            format: FormatId::VtdSs,
            devices: 2,
        }
    }
}
