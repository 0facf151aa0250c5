//! Raising a pool of hugetlb pages for a while.
//!
//! [`RaisedPool`] adds what is missing and takes away just as many pages when it is dropped. The
//! pool belongs to the whole machine: reading the number and writing the new one happen under the
//! file's lock, so that processes that use this crate do not overwrite each other's, and what is
//! taken away is a difference, so that guards may overlap. A process that is killed
//! leaves the pool raised.
//!
//! Source: Linux `Documentation/admin-guide/mm/hugetlbpage.rst`.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::machine::{HugeSize, Machine, Pool};
use crate::procfs::{self, ProcfsError};
use crate::sys;
use runs::Bytes;

/// A pool that has been raised; put back when dropped.
#[derive(Debug)]
#[must_use = "the pool is put back as soon as this is dropped"]
pub struct RaisedPool {
    size: HugeSize,
    added: u64,
}

/// Failure to raise a pool or to put it back. Nothing has changed then.
#[derive(Debug, Error)]
pub enum PoolError {
    /// The machine has no pages of this size.
    #[error("this machine has no huge pages of {size}")]
    NoSuchSize {
        /// The size that was asked for.
        size: HugeSize,
    },
    /// More than can be had now. The kernel would take everything that it can find before it gave
    /// up, so it is not even asked.
    #[error("{} are missing in huge pages of {size}, {} are available", Bytes(*missing), Bytes(*available))]
    MoreThanAvailable {
        /// The size of a page.
        size: HugeSize,
        /// Bytes that the pool lacks.
        missing: u64,
        /// `MemAvailable`, bytes.
        available: u64,
    },
    /// The pool cannot be written, mostly for lack of root's rights.
    #[error("cannot change the number of huge pages of {size} from {from} to {to} in {path}")]
    Write {
        /// The size.
        size: HugeSize,
        /// Pages in the pool before.
        from: u64,
        /// Pages that were asked for.
        to: u64,
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The kernel did not find enough contiguous memory.
    #[error("asked for {asked} more huge pages of {size} and got {got}; the pool is put back")]
    Short {
        /// The size.
        size: HugeSize,
        /// Pages that were missing.
        asked: u64,
        /// Pages that the kernel would have added.
        got: u64,
    },
    /// The pool's numbers cannot be read.
    #[error(transparent)]
    Probe(#[from] ProcfsError),
}

impl RaisedPool {
    /// Makes sure that `bytes` of free pages of `size` are in the pool, and adds those that are
    /// missing. Adds nothing when there are enough.
    ///
    /// # Errors
    ///
    /// When the pool does not exist, cannot be written, or the kernel has not enough contiguous
    /// memory; the pool is then as it was.
    pub fn raise(size: HugeSize, bytes: u64) -> Result<Self, PoolError> {
        let needed = bytes.div_ceil(size.bytes());
        let file = PoolFile::lock(size)?;
        let pool = Pool::read(size).ok_or(PoolError::NoSuchSize { size })?;
        let asked = needed.saturating_sub(pool.unreserved());
        if asked == 0 {
            return Ok(Self { size, added: 0 });
        }
        let available = Machine::probe()?.available;
        let missing = asked.saturating_mul(size.bytes());
        if missing > available {
            return Err(PoolError::MoreThanAvailable {
                size,
                missing,
                available,
            });
        }
        file.write(pool.total, pool.total.saturating_add(asked))?;
        // Exactly what was added is taken back, whatever goes wrong from here on.
        let got = match file.total() {
            Ok(now) => now.saturating_sub(pool.total),
            Err(error) => {
                file.write(pool.total, pool.total)?;
                return Err(error);
            }
        };
        if got < asked {
            file.write(pool.total + got, pool.total)?;
            return Err(PoolError::Short { size, asked, got });
        }
        Ok(Self { size, added: got })
    }

    /// Pages that were added.
    pub const fn added(&self) -> u64 {
        self.added
    }

    /// Takes away the pages that were added. Pages still in use leave the pool when they are
    /// freed.
    ///
    /// # Errors
    ///
    /// When the pool cannot be read or written.
    pub fn restore(mut self) -> Result<(), PoolError> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<(), PoolError> {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return Ok(());
        }
        let file = PoolFile::lock(self.size)?;
        let now = file.total()?;
        file.write(now, now.saturating_sub(added))
    }
}

impl Drop for RaisedPool {
    fn drop(&mut self) {
        if let Err(error) = self.put_back() {
            tracing::error!(%error, size = %self.size, "a pool of huge pages stays raised");
        }
    }
}

/// `nr_hugepages` of a pool, locked against others that use this crate.
struct PoolFile {
    size: HugeSize,
    path: PathBuf,
    _locked: File,
}

impl PoolFile {
    fn lock(size: HugeSize) -> Result<Self, PoolError> {
        let path = size.directory().join("nr_hugepages");
        if !path.exists() {
            return Err(PoolError::NoSuchSize { size });
        }
        let file = File::open(&path).and_then(|file| {
            sys::lock_file(&file)?;
            Ok(file)
        });
        match file {
            Ok(locked) => Ok(Self {
                size,
                path,
                _locked: locked,
            }),
            Err(source) => Err(ProcfsError::Read { path, source }.into()),
        }
    }

    fn total(&self) -> Result<u64, PoolError> {
        Ok(procfs::read_number(&self.path)?)
    }

    fn write(&self, from: u64, to: u64) -> Result<(), PoolError> {
        std::fs::write(&self.path, to.to_string()).map_err(|source| PoolError::Write {
            size: self.size,
            from,
            to,
            path: self.path.clone(),
            source,
        })
    }
}
