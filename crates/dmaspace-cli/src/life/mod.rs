//! One life of a virtual machine's memory: everything that this project does, once through, while devices
//! do DMA all the time.
//!
//! Memory on two nodes is pinned and charged by runs, and mapped by a root for each node, of two different
//! formats. Devices, which are threads, read, check and write every page and do not stop any more. A hole of
//! 4 KiB is cut into the largest leaf and closed again; leaves are split for dirty tracking, harvested and
//! merged back; a balloon takes 7 of 8 parts and gives them back; the address space goes to a second process,
//! which cuts a hole of its own, and ends it. At the end every counter is at zero.
//!
//! The steps, the model and the checks are those of the crate `scenario`; here are the job and its report. A machine of one node has the second one
//! planned: its memory and tables lie on the first, and the report says so.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod command;
mod job;
mod kernel;
mod memory;
mod moment;
mod report;
#[cfg(test)]
mod samples;
mod svg;
#[cfg(test)]
mod tests;
mod text;

use std::ffi::OsString;
use std::ops::ControlFlow;

use hostmem::Backing;
use iopt::FormatId;

use crate::map::JobError;

pub(crate) use command::{ABOUT, EXAMPLES, LifeArgs, SUCCESSOR, run, succeed_here};
pub use report::{Band, BandState, LifeReport, LifeStep, LifeTimes, Moment, Refused, StepReport};
#[cfg(test)]
pub use report::{LifeMemory, PartReport, RootReport};
pub use scenario::{SuccessorError, succeed};

/// Who maps the memory, and for which devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LifeBackend {
    /// Tables of ours, and two devices of the software unit.
    Software,
    /// A container of VFIO's type 1. Frames, formats and leaves are the kernel's: what the job says of them
    /// has no meaning then. What the interface cannot do is tried, and its refusal is in the report
    /// ([`StepReport::refused`]).
    Vfio {
        /// The addresses of devices of the machine which are known to do DMA here: QEMU's `edu`.
        devices: Vec<String>,
    },
    /// An address space of iommufd, likewise. What it maps for a process that may lock memory without limit
    /// it counts as pinned by that process for good, so that such a process does not hand it over.
    Iommufd {
        /// The devices' addresses.
        devices: Vec<String>,
    },
}

/// What to show, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifeJob {
    /// Bytes of memory, in 16 equal parts of whole pages; `None` for 256 MiB, or what the limit on locked
    /// memory leaves for two owners.
    pub size: Option<u64>,
    /// What the memory consists of, a memory file of some kind; `None` for the largest pages that the
    /// machine gives as it stands. Huge pages that are asked for by name are added to the machine's pool
    /// where they are missing, and taken out again at the end.
    pub backing: Option<Backing>,
    /// Whether offsets in the memory files stand in for page frames also where frames are known. Each file
    /// is one run then, so that leaves are as large as its size allows.
    pub stand_in: bool,
    /// The formats of the two roots, which the software unit can walk.
    pub formats: [FormatId; 2],
    /// Who maps the memory, and for which devices.
    pub backend: LifeBackend,
    /// The program that takes over, and its arguments: it calls [`succeed`] with its standard input and
    /// output.
    pub successor: Vec<OsString>,
}

impl LifeJob {
    /// With VT-d's second stage on one node and AMD's format on the other, as much memory as by default, and
    /// `successor` as the program that takes over.
    pub const fn new(successor: Vec<OsString>) -> Self {
        Self {
            size: None,
            backing: None,
            stand_in: false,
            formats: [FormatId::VtdSs, FormatId::AmdV1],
            backend: LifeBackend::Software,
            successor,
        }
    }

    /// Does all of it. `watch` is told which step is under way, again and again; [`ControlFlow::Break`] stops
    /// the job.
    ///
    /// # Errors
    ///
    /// See [`LifeError`]. Everything is given back then: devices have stopped, nothing is mapped, pinned or
    /// charged, and the second process has ended.
    pub fn run(
        &self,
        watch: &mut dyn FnMut(LifeStep) -> ControlFlow<()>,
    ) -> Result<LifeReport, LifeError> {
        job::run(self, watch)
    }
}

/// Why a life did not come to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LifeError {
    /// What was asked for makes no sense, or is more than there is.
    #[error("{0}")]
    Input(String),
    /// The watcher wanted to stop.
    #[error("interrupted at `{0}`; nothing is left pinned")]
    Interrupted(LifeStep),
    /// Memory, its pins, tables or units cannot be had.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A step cannot be done.
    #[error(transparent)]
    Scenario(scenario::Error),
}

impl From<scenario::Error> for LifeError {
    fn from(error: scenario::Error) -> Self {
        match error {
            scenario::Error::Interrupted(step) => Self::Interrupted(step),
            scenario::Error::Map(cause) => Self::Job(cause.into()),
            scenario::Error::Attach(cause) => Self::Job(JobError::Attach(cause)),
            error => Self::Scenario(error),
        }
    }
}

impl LifeError {
    /// True when the request is at fault and not this program: see [`JobError::is_input`].
    pub const fn is_input(&self) -> bool {
        match self {
            Self::Input(_) => true,
            Self::Job(error) => error.is_input(),
            _ => false,
        }
    }
}
