//! Memory files of others that may become shorter while they are mapped.
//!
//! Any process that has a file may truncate it, and the next access to a lost page ends this process
//! (`SIGBUS`). Only a seal (`F_SEAL_SHRINK`) prevents that. A process that maps memory which another program
//! shares, and must survive that program, handles the signal
//! ([`ShrinkWatch::install`]) and watches what it maps ([`ShrinkWatch::new`]).
//!
//! A file may also lack a page that it never had: in a file system that is full, or a pool of huge pages that is
//! empty. That is the same signal, and only the file's length distinguishes it.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use thiserror::Error;

use crate::bus_error::{self, Claim};
use crate::mapping::Mapping;
use crate::sys;

/// A mapping that may lose its memory, watched until this is dropped.
#[derive(Debug)]
pub struct ShrinkWatch {
    // Dropped before the mapping is.
    claim: Claim,
    mapping: Arc<Mapping>,
}

/// Memory that has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// From this offset in the mapping on, bytes. What lies behind is zeros, and not shared.
    pub offset: u64,
    /// The file ends before the mapping does; otherwise there was no room for a page of it.
    pub shrunk: bool,
}

/// Failure to watch a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WatchError {
    /// Too many are.
    #[error("{most} mappings that may become shorter are watched already")]
    TooMany {
        /// So many can be at a time.
        most: usize,
    },
}

impl ShrinkWatch {
    /// Has this process take `SIGBUS`, from now on and for good: a library must not do that by itself. Further
    /// calls do nothing. What is not about a mapping that is watched goes to the handler that was there
    /// before, or has the default action, which ends the process.
    ///
    /// A handler that is installed later must do the same, or nothing is watched any more.
    ///
    /// # Errors
    ///
    /// The kernel's; it has none for a program that may take signals.
    pub fn install() -> io::Result<()> {
        bus_error::install()
    }

    /// Watches `mapping`. An access to memory of it that its file no longer has finds zeros, from that page
    /// on to the end of the mapping, and [`lost`](Self::lost) says so. What devices have pinned stays theirs.
    ///
    /// `None` if there is nothing to watch: the memory is no file of others, the file is of pages of 4 KiB and sealed against
    /// becoming shorter, or [`install`](Self::install) was not called.
    ///
    /// # Errors
    ///
    /// [`WatchError`].
    #[allow(unsafe_code)]
    pub fn new(mapping: Arc<Mapping>) -> Result<Option<Self>, WatchError> {
        let Some(file) = mapping.file() else {
            return Ok(None);
        };
        // A file that knows no seals is not sealed.
        // Huge pages may run out, with any seals.
        let small = mapping.backing().huge_size().is_none();
        let keeps = small && sys::cannot_shrink(file.as_fd()).unwrap_or(false);
        if keeps || !bus_error::is_installed() {
            return Ok(None);
        }
        let start = mapping.address() as usize;
        let (end, page) = (
            start + mapping.len() as usize,
            mapping.backing().page() as usize,
        );
        // SAFETY: the mapping stays for as long as this holds it, begins and ends with a page, and its bytes change
        // at any time: they are accessed as atomic cells or through raw pointers only.
        let claim = unsafe { bus_error::claim(start, end, page) };
        let most = bus_error::MOST;
        let claim = claim.ok_or(WatchError::TooMany { most })?;
        Ok(Some(Self { claim, mapping }))
    }

    /// The mapping.
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Page that an access has found missing, if any has.
    pub fn lost(&self) -> Option<Lost> {
        let offset = self.claim.lost()?;
        let end = self.mapping.file_offset() + self.mapping.len();
        let file = self.mapping.file().and_then(|file| file.metadata().ok());
        let shrunk = file.is_some_and(|file| file.len() < end);
        Some(Lost { offset, shrunk })
    }
}
