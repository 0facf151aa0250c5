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

use hostmem::Backing;
use ioas::Placement;
use iopt::FormatId;

pub(crate) use args::{ABOUT, CheckArgs, EXAMPLES};
pub(crate) use command::run;
use error::{Because, CheckError};
use report::Step;

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
    /// Which devices share a page table, and where it lies; `None` is [`Placement::Shared`], about which nothing is
    /// reported.
    placement: Option<Placement>,
    /// Times of memory of other sizes and backings are measured as well.
    times: bool,
}

/// Implementations that map the memory, with their devices.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Backend {
    /// Tables of our own, for devices of the software unit.
    Software(Software),
    /// A container of VFIO's type 1, or with [`Placement::PerNode`] one for each node, for devices at these addresses.
    Vfio(Vec<String>),
    /// An address space of iommufd, for devices at these addresses.
    Iommufd(Vec<String>),
}

impl Default for Backend {
    fn default() -> Self {
        Self::Software(Software::default())
    }
}

impl Backend {
    /// As the command line spells it.
    const fn name(&self) -> &'static str {
        match self {
            Self::Software(_) => "software",
            Self::Vfio(_) => "vfio",
            Self::Iommufd(_) => "iommufd",
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
