//! The system calls that discard, behind a seam on which tests put failures and short returns.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use runs::{Offset, Span};

use crate::sys::Region;

/// Way to have the kernel drop pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Private memory: `MADV_DONTNEED`.
    Private,
    /// Memory that is shared but has no file of ours: `MADV_REMOVE`.
    Shared,
}

/// System calls that discard. Parts are offsets in the region, or in the file, and multiples of 4 KiB.
pub(crate) trait Calls: Send + Sync {
    /// Drops the pages of `part`.
    fn drop_pages(&self, region: &Region, part: Span<Offset>, way: Way) -> io::Result<()>;

    /// Drops the pages of private memory in all `parts`, at most 1024; returns how many bytes were
    /// done, in order, when it was not all.
    fn drop_batch(&self, region: &Region, parts: &[Span<Offset>]) -> io::Result<u64>;

    /// Returns true if [`drop_batch`](Self::drop_batch) is available.
    fn has_batch(&self) -> bool;

    /// Frees the pages of a part of the file, which stays as long as it is.
    fn punch(&self, file: BorrowedFd<'_>, part: Span<Offset>) -> io::Result<()>;
}

/// The kernel that is there.
#[derive(Debug)]
pub(crate) struct Kernel;

impl Calls for Kernel {
    fn drop_pages(&self, region: &Region, part: Span<Offset>, way: Way) -> io::Result<()> {
        let part = region.iovec(part)?;
        let advice = match way {
            Way::Private => libc::MADV_DONTNEED,
            Way::Shared => libc::MADV_REMOVE,
        };
        // SAFETY: the part belongs to the region and stays mapped. Its bytes become zeros as if
        // they were written, which may happen at any time to what is reached through atomic
        // cells and raw pointers only.
        check(unsafe { libc::madvise(part.iov_base, part.iov_len, advice) }.into()).map(drop)
    }

    fn drop_batch(&self, region: &Region, parts: &[Span<Offset>]) -> io::Result<u64> {
        let Some(process) = this_process() else {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        };
        let vectors: io::Result<Vec<_>> = parts.iter().map(|part| region.iovec(*part)).collect();
        advise_process(process, &vectors?)
    }

    fn has_batch(&self) -> bool {
        this_process().is_some()
    }

    fn punch(&self, file: BorrowedFd<'_>, part: Span<Offset>) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (start, len) = (part.start as libc::off_t, part.len as libc::off_t);
        // SAFETY: works on the file alone. Where it is mapped its bytes become zeros as if they
        // were written.
        check(unsafe { libc::fallocate(file.as_raw_fd(), mode, start, len) }.into()).map(drop)
    }
}

fn check(result: libc::c_long) -> io::Result<u64> {
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// `process_madvise(MADV_DONTNEED)` on this process: bytes that were done. The vectors are parts of
/// regions.
///
/// Source: process_madvise(2).
fn advise_process(process: BorrowedFd<'_>, vectors: &[libc::iovec]) -> io::Result<u64> {
    let advice = libc::c_long::from(libc::MADV_DONTNEED);
    // SAFETY: each vector is a part of a region of this process, as for `madvise` above, and the
    // kernel reads as many as there are. In a child, to which the descriptor names its parent, the
    // kernel refuses: pages of another process must not be dropped.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            vectors.as_ptr(),
            vectors.len(),
            advice,
            0,
        )
    })
}

/// A descriptor of this process through which it may drop its own pages in batches; looked for
/// once, by dropping a page.
fn this_process() -> Option<BorrowedFd<'static>> {
    static FOUND: OnceLock<Option<File>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let process = open_process().ok()?;
        let region = Region::anonymous(2 * 4096, 4096).ok()?;
        let cells = region.cells();
        let pages = [Span::new(0, 4096), Span::new(4096, 4096)];
        for cell in cells.iter().step_by(512) {
            cell.store(1, Ordering::Relaxed);
        }
        let vectors = [region.iovec(pages[0]).ok()?, region.iovec(pages[1]).ok()?];
        let done = advise_process(process.as_fd(), &vectors).ok()?;
        let dropped = cells.iter().all(|cell| cell.load(Ordering::Relaxed) == 0);
        (done == 2 * 4096 && dropped).then_some(process)
    });
    found.as_ref().map(File::as_fd)
}

/// Source: pidfd_open(2).
fn open_process() -> io::Result<File> {
    // SAFETY: the call takes two numbers and returns a new descriptor or -1; it is closed on exec.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    // SAFETY: just opened, with no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
}
