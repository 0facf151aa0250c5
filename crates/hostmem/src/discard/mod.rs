//! Giving memory back to the machine: see [`Discard`].
//!
//! A discarded page reads as zeros, and the next access brings in a new one. Which call frees it
//! depends on what backs the memory, and is chosen in one place:
//!
//! | memory | call | less than a page of it |
//! |---|---|---|
//! | private, 4 KiB pages | `process_madvise(DONTNEED)` on this process for many short runs, `madvise` for few and for long ones | – |
//! | private, transparent huge pages | the same | discarded, but freed only with the rest of its huge page |
//! | private, huge pages of a pool | the same | left as it was |
//! | shared without a file of ours | `madvise(REMOVE)` | – |
//! | a memory file, also of huge pages, or `guest_memfd` | `fallocate(PUNCH_HOLE)` | left as it was |
//! | a memory file that a user-fault handler watches | `madvise(REMOVE)` | left as it was |
//!
//! # Protocol
//!
//! The caller ensures that the bytes are not needed, and above all that **no device does**: a pinned
//! page is discarded without an error, the process gets a new one at the next access, and the device
//! goes on with the old. So devices release it first, then memory is discarded, and memory is pinned again
//! before the device may use it.
//!
//! Runs are offsets in the mapping. They are looked at before the first of them is touched; touching
//! runs are joined, so that halves of a huge page become a whole one. What cannot be freed is reported with
//! its reason ([`DiscardRefusal`]), and the other runs are discarded all the same. Whatever the system calls do
//! (short returns, interruptions, errors in the middle), each run is either discarded as a whole or reported.
//!
//! Sources: madvise(2), process_madvise(2), fallocate(2); Linux
//! `Documentation/admin-guide/mm/transhuge.rst` and `hugetlbpage.rst`.

mod backed;
mod batch;
mod count;
#[allow(unsafe_code)]
mod kernel;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::AddAssign;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use runs::{Offset, Span, Va, merge_sorted};
use thiserror::Error;

use crate::backing::Backing;
use crate::mapping::Mapping;
use crate::procfs::ProcfsError;
use crate::sys;
use backed::{Backed, Store};
use batch::Batch;
pub use count::{CountError, Freed, FreedBy};
use kernel::{Calls, Kernel, Way};

/// Discards parts of one [`Mapping`], ours or [foreign](Mapping::foreign).
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::Ordering;
/// use hostmem::{Backing, Discard, Mapping};
/// use runs::Span;
///
/// let memory = Arc::new(Mapping::new(Backing::Anon4K, 1 << 20, None)?);
/// memory.cells()[0].store(7, Ordering::Relaxed);
/// let discard = Discard::new(memory.clone())?;
/// let runs = [Span::new(0, 8 << 10), Span::new(64 << 10, 4 << 10)];
/// let done = discard.discard(&runs, &mut |part, why| println!("{part} is kept: {why}"))?;
/// assert_eq!((done.bytes, done.kept), (12 << 10, 0));
/// assert_eq!(memory.cells()[0].load(Ordering::Relaxed), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Discard {
    memory: Memory,
    backed: Backed,
    /// User-fault handlers are notified of discards of a file, too.
    notifies: bool,
    calls: Box<dyn Calls>,
    /// Runs of private memory may have one call together.
    batches: AtomicBool,
}

/// Memory that is discarded.
#[derive(Debug)]
enum Memory {
    Mapped(Arc<Mapping>),
    /// A part of a file, in no mapping that is known here.
    File {
        file: File,
        part: Span<Offset>,
    },
}

impl Memory {
    fn len(&self) -> u64 {
        match self {
            Self::Mapped(mapping) => mapping.len(),
            Self::File { part, .. } => part.len,
        }
    }

    /// The file, and the offset in it at which the memory begins.
    fn file(&self) -> Option<(&File, u64)> {
        match self {
            Self::Mapped(mapping) => Some((mapping.file()?, mapping.file_offset())),
            Self::File { file, part } => Some((file, part.start)),
        }
    }
}

/// Result for the runs. All are bytes but the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discarded {
    /// They read as zeros now. What is free of them [`Discard::discard_counted`] says.
    pub bytes: u64,
    /// They were reported as [`DiscardRefusal`].
    pub kept: u64,
    /// Parts of blocks of 2 MiB, of memory that may be in transparent huge pages: if they were, their pages become free with the rest of the block only.
    pub in_parts: u64,
    /// System calls.
    pub calls: u64,
}

impl AddAssign for Discarded {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.kept += other.kept;
        self.in_parts += other.in_parts;
        self.calls += other.calls;
    }
}

/// Refusal to discard a part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiscardRefusal {
    /// It is less than a page of what backs the memory; it stays as it was.
    PartOfPage {
        /// Bytes of a page.
        page: u64,
    },
    /// The kernel refuses, `EINVAL` for instance where memory is locked. Pages of the run that are not
    /// may be discarded.
    Refused {
        /// The refused call.
        call: Call,
        /// The error number.
        errno: i32,
    },
}

/// A system call that discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `madvise`.
    Madvise,
    /// `fallocate`.
    Fallocate,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Madvise => "madvise",
            Self::Fallocate => "fallocate",
        })
    }
}

impl fmt::Display for DiscardRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PartOfPage { page } => {
                write!(f, "less than a page of {}", runs::Bytes(*page))
            }
            Self::Refused { call, errno } => {
                write!(f, "{call}: {}", io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

/// Failure to discard anything.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiscardError {
    /// A run that is empty or goes beyond the memory.
    #[error("run {index}, {run}, does not lie in the {} of memory", runs::Bytes(*len))]
    Outside {
        /// Its place among the runs.
        index: usize,
        /// The run.
        run: Span<Offset>,
        /// Bytes of the memory.
        len: u64,
    },
    /// A run that does not begin behind the one before it.
    #[error("run {index}, {run}, begins before the end of the run before it")]
    Descends {
        /// Its place among the runs.
        index: usize,
        /// The run.
        run: Span<Offset>,
    },
    /// Private memory over a file: discarded pages come back with the bytes of the file.
    #[error("the memory at {address:#x} is a private copy of {path}: discarded pages come back")]
    PrivateCopy {
        /// The address.
        address: u64,
        /// The file.
        path: String,
    },
    /// Foreign memory of several kinds.
    #[error("from {address:#x} on the memory is of another kind than before it")]
    Mixed {
        /// Start of the other kind.
        address: u64,
    },
    /// Foreign memory that the kernel does not know as such, or not in whole pages.
    #[error("the process has {covered} bytes of the memory {memory} mapped, or not in whole pages")]
    NotMapped {
        /// Addresses of the memory.
        memory: Span<Va>,
        /// Bytes that are mapped.
        covered: u64,
    },
    /// The memory does not begin with a page of its file.
    #[error("offset {offset:#x} in the file is no multiple of its pages of {}", runs::Bytes(*page))]
    FileOffset {
        /// Offset of the memory's first byte.
        offset: u64,
        /// Bytes of a page.
        page: u64,
    },
    /// The backing of the memory cannot be read.
    #[error(transparent)]
    Probe(#[from] ProcfsError),
}

impl Discard {
    /// Discards parts of `mapping`. What backs it is looked up here, once: of memory that other code
    /// has mapped without a file in `/proc/self/smaps`.
    ///
    /// # Errors
    ///
    /// When discarding would not free such memory, or not give zeros, see [`DiscardError`].
    pub fn new(mapping: Arc<Mapping>) -> Result<Self, DiscardError> {
        Self::with_calls(mapping, Box::new(Kernel))
    }

    fn with_calls(mapping: Arc<Mapping>, calls: Box<dyn Calls>) -> Result<Self, DiscardError> {
        let backed = Backed::of(&mapping)?;
        Self::of(Memory::Mapped(mapping), backed, calls)
    }

    fn of(memory: Memory, backed: Backed, calls: Box<dyn Calls>) -> Result<Self, DiscardError> {
        let (offset, page) = (memory.file().map_or(0, |(_, offset)| offset), backed.page);
        if offset % page != 0 {
            return Err(DiscardError::FileOffset { offset, page });
        }
        let batches = backed.store == Store::Private && calls.has_batch();
        Ok(Self {
            memory,
            backed,
            notifies: false,
            calls,
            batches: batches.into(),
        })
    }

    /// Discards parts of a file that need not be mapped, like KVM's `guest_memfd`, by `fallocate`. `part` is the memory,
    /// offset and length in the file. What others have copied from it privately stays.
    ///
    /// # Errors
    ///
    /// [`DiscardError::FileOffset`]; [`DiscardError::Outside`] for a part that no file has; [`DiscardError::Probe`] when
    /// the size of its pages cannot be learned.
    pub fn of_file(file: OwnedFd, part: Span<Offset>) -> Result<Self, DiscardError> {
        const MOST: u64 = i64::MAX as u64;
        if !Span::new(0, MOST).covers(&part) {
            let (index, run, len) = (0, part, MOST);
            return Err(DiscardError::Outside { index, run, len });
        }
        let page = sys::huge_page(file.as_fd()).map_err(|source| {
            let path = "the file system of a file".into();
            DiscardError::Probe(ProcfsError::Read { path, source })
        })?;
        let backed = Backed {
            store: Store::File,
            page: page.unwrap_or(Backing::Anon4K.page()),
            block: None,
        };
        let file = File::from(file);
        Self::of(Memory::File { file, part }, backed, Box::new(Kernel))
    }

    /// Notifies user-fault handlers (`UFFD_EVENT_REMOVE` of userfaultfd(2)) of what is discarded of a memory file, too:
    /// by `madvise`, since the kernel sends no event for `fallocate`. Of memory without a file they are notified in any
    /// case. Without the event a handler brings back what was discarded.
    ///
    /// A discard returns when the handler has read the event, so it is to read in another thread than the one that
    /// discards. Only handlers of this process' mapping are notified, and locked memory is refused ([`DiscardRefusal`]). Nothing changes for
    /// [a file](Self::of_file).
    #[must_use]
    pub fn notifying(mut self) -> Self {
        self.notifies = self.mapping().is_some();
        self
    }

    /// The memory, if it is mapped.
    pub const fn mapping(&self) -> Option<&Arc<Mapping>> {
        match &self.memory {
            Memory::Mapped(mapping) => Some(mapping),
            Memory::File { .. } => None,
        }
    }

    /// Address of the mapping.
    fn address(&self) -> u64 {
        self.mapping().map_or(0, |mapping| mapping.address())
    }

    /// Bytes of a page of what backs the memory: only whole ones are freed.
    pub const fn page(&self) -> u64 {
        self.backed.page
    }

    /// Returns true if many runs have one call together.
    pub fn batches(&self) -> bool {
        self.batches.load(Ordering::Relaxed)
    }

    fn stop_batches(&self) {
        self.batches.store(false, Ordering::Relaxed);
    }

    /// Discards `runs`: offsets, ascending. What is kept goes to `kept`, in no particular order.
    ///
    /// # Errors
    ///
    /// [`DiscardError::Outside`] and [`DiscardError::Descends`]; nothing is touched then.
    pub fn discard(
        &self,
        runs: &[Span<Offset>],
        kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> Result<Discarded, DiscardError> {
        let runs = self.checked(runs)?;
        Ok(self.discard_checked(runs.iter().copied(), kept))
    }

    /// As [`discard`](Self::discard), and counts what is free of it then, at the cost of two looks at a
    /// counter, or two scans of the page table for private memory. When that cannot be counted, memory is
    /// discarded all the same.
    ///
    /// ```
    /// # use std::ops::ControlFlow;
    /// # use std::sync::Arc;
    /// # use hostmem::{Backing, Discard, Mapping};
    /// # use runs::Span;
    /// let memory = Arc::new(Mapping::new(Backing::Memfd, 1 << 20, None)?);
    /// memory.populate(&mut |_| ControlFlow::Continue(()))?;
    /// let discard = Discard::new(memory)?;
    /// let (_, freed) = discard.discard_counted(&[Span::new(0, 64 << 10)], &mut |_, _| ())?;
    /// assert_eq!(freed?.bytes, 64 << 10);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`discard`](Self::discard).
    pub fn discard_counted(
        &self,
        runs: &[Span<Offset>],
        kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> Result<(Discarded, Result<Freed, CountError>), DiscardError> {
        let runs = self.checked(runs)?;
        Ok(count::counted(self, &runs, kept))
    }

    /// The runs, joined if any of them touch. Mostly they come joined, as out of a balloon, and are taken as they are.
    fn checked<'r>(
        &self,
        runs: &'r [Span<Offset>],
    ) -> Result<Cow<'r, [Span<Offset>]>, DiscardError> {
        let len = self.memory.len();
        let whole = Span::new(0, len);
        let (mut end, mut touching) = (0, false);
        for (index, &run) in runs.iter().enumerate() {
            if !whole.covers(&run) {
                return Err(DiscardError::Outside { index, run, len });
            }
            if run.start < end {
                return Err(DiscardError::Descends { index, run });
            }
            touching |= index > 0 && run.start == end;
            end = run.start + run.len;
        }
        if !touching {
            return Ok(runs.into());
        }
        let mut joined = runs.to_vec();
        let count = merge_sorted(&mut joined);
        joined.truncate(count);
        Ok(joined.into())
    }

    /// Discards these runs, which ascend and touch nowhere.
    fn discard_checked(
        &self,
        runs: impl Iterator<Item = Span<Offset>>,
        kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> Discarded {
        let mut batch = Batch::new(self, kept);
        for run in runs {
            self.take(run, &mut batch);
        }
        batch.flush();
        batch.done
    }

    /// Discards the whole pages of `run`.
    fn take(&self, run: Span<Offset>, batch: &mut Batch<'_>) {
        let (head, pages, tail) = cut(run, self.page());
        batch.keep_part(head);
        batch.keep_part(tail);
        if pages.is_empty() {
            return;
        }
        if let Some(block) = self.backed.block {
            let addresses = Span::<Va>::new(self.address() + pages.start, pages.len);
            batch.done.in_parts += pages.len - cut(addresses, block).1.len;
        }
        match self.backed.store {
            Store::Private => batch.push(pages),
            Store::Shared => _ = batch.alone(pages, Way::Shared),
            Store::File if self.notifies => _ = batch.alone(pages, Way::Shared),
            Store::File => batch.punch(pages),
        }
    }
}

impl fmt::Debug for Discard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discard")
            .field("memory", &self.memory)
            .field("backed", &self.backed)
            .field("batches", &self.batches())
            .finish_non_exhaustive()
    }
}

/// A run as what lies before its first whole page, its whole pages, and what is behind them. Without
/// a whole page all of it is before.
const fn cut<A>(run: Span<A>, page: u64) -> (Span<A>, Span<A>, Span<A>) {
    let end = run.start + run.len;
    let (first, last) = (run.start.next_multiple_of(page), end / page * page);
    if first >= last {
        return (run, Span::new(end, 0), Span::new(end, 0));
    }
    (
        Span::new(run.start, first - run.start),
        Span::new(first, last - first),
        Span::new(last, end - last),
    )
}
