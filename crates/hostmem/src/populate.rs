//! Bringing in the pages of a mapping.
//!
//! `MADV_POPULATE_WRITE` makes the pages as a write to each of them would, without changing a
//! byte, and reports what would have been a signal as an error. Kernels before 5.14 do not know
//! it: there each page is written with the value that it holds, and huge pages of a pool, whose
//! shortage would be a signal, are first allocated through their file.
//!
//! Source: madvise(2), fallocate(2).

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use runs::Span;
use thiserror::Error;

use crate::machine::{HugeSize, Machine, Pool};
use crate::mapping::Mapping;
use crate::sys::{self, Advice};
use runs::Bytes;

/// Bytes between two looks at whether to go on.
const CHUNK: u64 = 64 << 20;

/// Why not all pages are there. Those before the offset are; dropping the mapping frees them.
#[derive(Debug, Error)]
pub enum PopulateError {
    /// The caller wanted to stop.
    #[error("interrupted after {}", Bytes(*done))]
    Interrupted {
        /// Bytes whose pages are there.
        done: u64,
    },
    /// The machine, or this process' share of it, has no more memory.
    #[error("no memory for the page at offset {offset:#x}; {} are available", Bytes(*available))]
    NoMemory {
        /// Offset in the mapping from which on pages are missing, to within 64 MiB.
        offset: u64,
        /// `MemAvailable`, bytes.
        available: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The pool of huge pages cannot give what was reserved, for instance because of a limit of
    /// the control group or of the node.
    #[error("no huge page of {size} for offset {offset:#x}; {free} are free in the pool")]
    HugePages {
        /// Their size.
        size: HugeSize,
        /// Offset in the mapping from which on pages are missing, to within a chunk.
        offset: u64,
        /// Free pages in the pool.
        free: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refuses for another reason.
    #[error("cannot bring in the pages from offset {offset:#x} on")]
    Refused {
        /// Offset in the mapping, to within a chunk.
        offset: u64,
        /// Why.
        source: io::Error,
    },
}

impl Mapping {
    /// Brings in all pages. After each 64 MiB (or each page, when that is larger) `progress` is
    /// told how many bytes are done, and may stop the work.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, or when `progress` breaks.
    pub fn populate(
        &self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        let chunk = CHUNK.max(self.backing().page());
        let mut done = 0;
        let mut advice_known = true;
        while done < self.len() {
            let part = Span::new(done, chunk.min(self.len() - done));
            let result = if advice_known {
                self.region().advise(part, Advice::PopulateWrite)
            } else {
                self.touch(part)
            };
            match result {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if advice_known && error.raw_os_error() == Some(libc::EINVAL) => {
                    advice_known = false;
                    continue;
                }
                Err(source) => return Err(self.populate_error(done, source)),
            }
            done += part.len;
            if progress(done).is_break() && done < self.len() {
                return Err(PopulateError::Interrupted { done });
            }
        }
        Ok(())
    }

    /// Writes to each page of `part` what it holds.
    pub(crate) fn touch(&self, part: Span) -> io::Result<()> {
        if let (Some(_), Some(file)) = (self.backing().huge_size(), self.fd()) {
            sys::allocate(file.as_fd(), part)?;
        }
        let page = self.backing().page() as usize / 8;
        let (first, end) = (part.start / 8, (part.start + part.len) / 8);
        let cells = self.cells().get(first as usize..end as usize);
        for cell in cells.unwrap_or_default().iter().step_by(page) {
            // A compare-and-swap writes; adding 0 may be compiled to a load. A failure means
            // that somebody else has just written.
            let value = cell.load(Ordering::Relaxed);
            let _ = cell.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(())
    }

    fn populate_error(&self, offset: u64, source: io::Error) -> PopulateError {
        match (self.backing().huge_size(), source.raw_os_error()) {
            (Some(size), Some(libc::ENOMEM | libc::EFAULT | libc::ENOSPC)) => {
                PopulateError::HugePages {
                    size,
                    offset,
                    free: Pool::read(size).map_or(0, |pool| pool.free),
                    source,
                }
            }
            (_, Some(libc::ENOMEM)) => PopulateError::NoMemory {
                offset,
                available: Machine::probe().map_or(0, |machine| machine.available),
                source,
            },
            _ => PopulateError::Refused { offset, source },
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
