//! Bringing in the pages of a mapping.
//!
//! `MADV_POPULATE_WRITE` makes the pages as a write to each of them would, without changing a
//! byte, and reports what would have been a signal as an error. Kernels before 5.14 do not know
//! it: there each page is written with the value that it holds, and huge pages of a pool, whose
//! shortage would be a signal, are first allocated through their file.
//!
//! Many threads, and many mappings at once: [`crate::population`].
//!
//! Source: madvise(2), fallocate(2).

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use runs::{Bytes, Offset, Span};
use thiserror::Error;

use crate::machine::{HugeSize, Machine, Pool};
use crate::mapping::Mapping;
use crate::population::Population;
use crate::sys::{self, Advice};

/// Failure to bring in all pages. Those of the mapping before the offset are there; dropping it frees them.
///
/// `mapping` is its position in the [`Population`], 0 where there is one only.
#[derive(Debug, Error)]
pub enum PopulateError {
    /// The caller wanted to stop.
    #[error("interrupted after {}", Bytes(*done))]
    Interrupted {
        /// Bytes that were brought in.
        done: u64,
    },
    /// The machine, or this process' share of it, has no more memory.
    #[error("no memory for offset {offset:#x} of mapping {mapping}; {} are available", Bytes(*available))]
    NoMemory {
        /// The mapping.
        mapping: usize,
        /// Offset in the mapping from which on pages are missing, to within 64 MiB.
        offset: u64,
        /// `MemAvailable`, bytes.
        available: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The pool of huge pages cannot give what was reserved, for instance because of a limit of
    /// the control group or of the node.
    #[error(
        "no huge page of {size} for offset {offset:#x} of mapping {mapping}; {free} are free in the pool"
    )]
    HugePages {
        /// The mapping.
        mapping: usize,
        /// Their size.
        size: HugeSize,
        /// Offset in the mapping from which on pages are missing, to within a chunk.
        offset: u64,
        /// Free pages in the pool.
        free: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A run that goes beyond the memory, or is no multiple of 4 KiB.
    #[error("{run} is not made of whole pages of the memory")]
    BadRun {
        /// The run.
        run: Span<Offset>,
    },
    /// The kernel refuses for another reason.
    #[error("cannot bring in the pages of mapping {mapping} from offset {offset:#x} on")]
    Refused {
        /// The mapping.
        mapping: usize,
        /// Offset in the mapping, to within a chunk.
        offset: u64,
        /// Cause.
        source: io::Error,
    },
}

impl PopulateError {
    /// Position in the [`Population`] of the mapping whose pages cannot be brought in, if it is one.
    pub const fn mapping(&self) -> Option<usize> {
        match self {
            Self::NoMemory { mapping, .. }
            | Self::HugePages { mapping, .. }
            | Self::Refused { mapping, .. } => Some(*mapping),
            Self::Interrupted { .. } | Self::BadRun { .. } => None,
        }
    }
}

impl Mapping {
    /// Brings in all pages: a [`Population`] of this mapping alone. After each 64 MiB (or each page, when
    /// that is larger) `progress` receives, in this thread, how many bytes are done, and may stop the work.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, or when `progress` breaks.
    pub fn populate(
        &self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        Population::new([self]).run(progress)
    }

    /// Brings in the pages of `runs`, offsets, in this thread: those that were
    /// [discarded](crate::Discard), for instance.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, and [`PopulateError::BadRun`]. The pages of the runs before
    /// are there then.
    pub fn populate_runs(&self, runs: &[Span<Offset>]) -> Result<(), PopulateError> {
        for &run in runs {
            let pages = self.pages_of(run).ok_or(PopulateError::BadRun { run })?;
            self.bring_in(pages)
                .map_err(|source| self.populate_error(0, pages.start, source))?;
        }
        Ok(())
    }

    /// Brings in the pages of `part`, whole pages.
    pub(crate) fn bring_in(&self, part: Span<Offset>) -> io::Result<()> {
        loop {
            match self.region().advise(part, Advice::PopulateWrite) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Not known.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    return self.touch(part);
                }
                result => return result,
            }
        }
    }

    /// Writes to each page of `part` what it holds.
    pub(crate) fn touch(&self, part: Span<Offset>) -> io::Result<()> {
        if let (Some(_), Some(file)) = (self.backing().huge_size(), self.fd()) {
            let in_file = Span::new(self.file_offset() + part.start, part.len);
            sys::allocate(file.as_fd(), in_file)?;
        }
        let page = self.backing().page() as usize / 8;
        let (first, end) = (part.start / 8, (part.start + part.len) / 8);
        let cells = self.cells().get(first as usize..end as usize);
        for cell in cells.unwrap_or_default().iter().step_by(page) {
            // A compare-and-swap writes; adding 0 may be compiled to a load. A failure means
            // that another thread has just written.
            let value = cell.load(Ordering::Relaxed);
            let _ = cell.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The error of bringing in the page at `offset` of this mapping, the one at `mapping` in a population.
    pub(crate) fn populate_error(
        &self,
        mapping: usize,
        offset: u64,
        source: io::Error,
    ) -> PopulateError {
        match (self.backing().huge_size(), source.raw_os_error()) {
            (Some(size), Some(libc::ENOMEM | libc::EFAULT | libc::ENOSPC)) => {
                PopulateError::HugePages {
                    mapping,
                    size,
                    offset,
                    free: Pool::read(size).map_or(0, |pool| pool.free),
                    source,
                }
            }
            (_, Some(libc::ENOMEM)) => PopulateError::NoMemory {
                mapping,
                offset,
                available: Machine::probe().map_or(0, |machine| machine.available),
                source,
            },
            _ => PopulateError::Refused {
                mapping,
                offset,
                source,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;

    #[test]
    fn touching_brings_in_every_page_and_keeps_the_bytes() {
        let mapping = Mapping::new(Backing::Anon4K, 64 * 4096, None).unwrap();
        mapping.cells()[512].store(7, Ordering::Relaxed);
        mapping.touch(Span::new(0, 32 * 4096)).unwrap();
        let folios = match mapping.folios() {
            Ok(folios) => folios,
            Err(error) => return eprintln!("not run: {error}"),
        };
        assert_eq!((folios.small, folios.absent), (32 * 4096, 32 * 4096));
        assert_eq!(mapping.cells()[512].load(Ordering::Relaxed), 7);
    }
}
