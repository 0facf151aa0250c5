//! Count of the memory that discarding really freed.
//!
//! The resident size of the process is no measure: it falls by every discarded page, also by those of a
//! huge page that stays whole in the machine. What is counted depends on what backs the memory, before
//! and after ([`FreedBy`]); changes of the same counter by others in between are included.
//!
//! Private pages are looked at in the page table, a window of 1 GiB at a time: scanned, discarded,
//! scanned again, with a count for each block of 2 MiB, so the room is fixed. A transparent huge page
//! becomes free when all of it is discarded. While it is mapped as one, the table shows it, and a part of
//! it counts as nothing. Pages that are mapped one by one may be small, or the rest of a huge page of which
//! other parts were discarded before; the table does not tell which. They count when nothing of
//! their block is left, and are *unsure* until then. So [`Freed::bytes`] is never more than what was
//! freed, and exact where nothing is unsure.
//!
//! Sources: Linux `Documentation/admin-guide/mm/pagemap.rst`, `transhuge.rst` ("splits on demand").

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use runs::{Offset, Span, Va};
use thiserror::Error;

use super::backed::Store;
use super::{Discard, DiscardRefusal, Discarded};
use crate::backing::Backing;
use crate::machine::{HugeSize, Pool};
use crate::sys::{self, PAGE_IS_HUGE, PAGE_IS_PFNZERO, PageRegion};

const PAGE: u64 = 4096;
/// A transparent huge page.
const BLOCK: u64 = 2 << 20;
const WINDOW: u64 = 1 << 30;
/// Regions, and entries of the page map, asked for at once.
const BATCH: usize = 512;
/// Bits of an entry of the page map.
const PRESENT: u64 = 1 << 63;
const EXCLUSIVE: u64 = 1 << 56;

/// Freed bytes, and the counter that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes of which it is certain.
    pub bytes: u64,
    /// Bytes that were freed if they were small pages, and not if they are parts of transparent huge
    /// pages of which others are still in use.
    pub unsure: u64,
    /// Counter that was read.
    pub by: FreedBy,
}

/// A counter that tells what is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreedBy {
    /// The blocks of the memory file (`st_blocks`).
    FileBlocks,
    /// The free huge pages of the pool, which is the machine's.
    FreeHugePages,
    /// The pages that are there in this process' page table.
    PresentPages,
}

impl fmt::Display for FreedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FileBlocks => "blocks of the file",
            Self::FreeHugePages => "free huge pages of the pool",
            Self::PresentPages => "present pages",
        })
    }
}

/// Failure to count freed memory.
#[derive(Debug, Error)]
#[error("cannot count the {by}")]
pub struct CountError {
    /// Counter that could not be read.
    pub by: FreedBy,
    /// Cause.
    pub source: io::Error,
}

/// Discards `runs`, which are checked, and counts.
pub(super) fn counted(
    discard: &Discard,
    runs: &[Span<Offset>],
    kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
) -> (Discarded, Result<Freed, CountError>) {
    let by = match discard.backed.store {
        Store::File => FreedBy::FileBlocks,
        Store::Private if discard.page() > PAGE => FreedBy::FreeHugePages,
        Store::Private | Store::Shared => FreedBy::PresentPages,
    };
    if by == FreedBy::PresentPages {
        return Windows::count(discard, runs, kept);
    }
    let read = || match by {
        FreedBy::FileBlocks => file_bytes(discard),
        // Inverted, so that the value falls as pages are freed.
        _ => pool_bytes_free(discard.page()).map(|free| u64::MAX - free),
    };
    let before = read();
    let done = discard.discard_checked(runs.iter().copied(), kept);
    let freed = before.and_then(|before| {
        let bytes = before.saturating_sub(read()?);
        let unsure = 0;
        Ok(Freed { bytes, unsure, by })
    });
    (done, freed.map_err(|source| CountError { by, source }))
}

fn file_bytes(discard: &Discard) -> io::Result<u64> {
    let (file, _) = discard.memory.file().ok_or(io::ErrorKind::NotFound)?;
    Ok(file.metadata()?.blocks() * 512)
}

fn pool_bytes_free(page: u64) -> io::Result<u64> {
    let size = Backing::of_pool(page).and_then(Backing::huge_size);
    let pool = size.and_then(Pool::read).ok_or(io::ErrorKind::NotFound)?;
    Ok(pool.free * size.map_or(0, HugeSize::bytes))
}

/// Reads which pages are there.
pub(super) struct Scan {
    pagemap: File,
    regions: Vec<PageRegion>,
    /// The kernel knows `PAGEMAP_SCAN`.
    pub(super) by_regions: bool,
}

impl Scan {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            pagemap: File::open("/proc/self/pagemap")?,
            regions: vec![PageRegion::default(); BATCH],
            by_regions: true,
        })
    }

    /// Tells the stretches of `range`, addresses, that have pages of their own, and whether they are in
    /// huge ones; ascending.
    pub(super) fn present(
        &mut self,
        range: Span<Va>,
        told: &mut dyn FnMut(Span<Va>, bool),
    ) -> io::Result<()> {
        let (mut at, end) = (range.start, range.start + range.len);
        while at < end && self.by_regions {
            let scanned =
                sys::scan_pages(&self.pagemap, at, end, PAGE_IS_PFNZERO, &mut self.regions);
            let (filled, walked_to) = match scanned {
                Ok(scanned) => scanned,
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                    self.by_regions = false;
                    break;
                }
                Err(error) => return Err(error),
            };
            for region in &self.regions[..filled] {
                let span = Span::new(region.start, region.end.saturating_sub(region.start));
                told(span, region.categories & PAGE_IS_HUGE != 0);
            }
            if walked_to <= at {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at = walked_to;
        }
        self.entries(Span::new(at, end.saturating_sub(at)), told)
    }

    /// The same page by page. Pages that others have too, the page of zeros among them, are left out.
    fn entries(&mut self, range: Span<Va>, told: &mut dyn FnMut(Span<Va>, bool)) -> io::Result<()> {
        let mut entries = [0; BATCH * 8];
        let mut at = range.start;
        while at < range.start + range.len {
            let count = ((range.start + range.len - at) / PAGE).min(BATCH as u64);
            let entries = &mut entries[..count as usize * 8];
            self.pagemap.read_exact_at(entries, at / PAGE * 8)?;
            for (page, entry) in (0..).zip(entries.chunks_exact(8)) {
                let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                let own = PRESENT | EXCLUSIVE;
                if entry & own == own {
                    told(Span::new(at + page * PAGE, PAGE), false);
                }
            }
            at += count * PAGE;
        }
        Ok(())
    }
}

/// Bytes of a block of 2 MiB.
#[derive(Clone, Copy, Default)]
struct BlockBytes {
    /// Bytes of the runs in a page that is mapped as a huge one.
    huge: u64,
    /// Bytes of the runs in other pages.
    small: u64,
    /// Bytes of the block in any page.
    all: u64,
}

/// Counts a window at a time.
pub(super) struct Windows<'a> {
    discard: &'a Discard,
    scan: Scan,
    before: Vec<BlockBytes>,
    after: Vec<BlockBytes>,
    freed: Freed,
}

impl<'a> Windows<'a> {
    pub(super) fn new(discard: &'a Discard, scan: Scan) -> Self {
        let blocks = vec![BlockBytes::default(); (WINDOW / BLOCK) as usize];
        let freed = Freed {
            bytes: 0,
            unsure: 0,
            by: FreedBy::PresentPages,
        };
        Self {
            discard,
            scan,
            before: blocks.clone(),
            after: blocks,
            freed,
        }
    }

    fn count(
        discard: &Discard,
        runs: &[Span<Offset>],
        kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> (Discarded, Result<Freed, CountError>) {
        let by = FreedBy::PresentPages;
        let (done, freed) = match Scan::open() {
            Ok(scan) => Windows::new(discard, scan).run(runs, kept),
            Err(error) => {
                let done = discard.discard_checked(runs.iter().copied(), kept);
                (done, Err(error))
            }
        };
        (done, freed.map_err(|source| CountError { by, source }))
    }

    /// Discards and counts `runs`. When counting fails, the rest is discarded all the same.
    pub(super) fn run(
        mut self,
        mut runs: &[Span<Offset>],
        kept: &mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> (Discarded, io::Result<Freed>) {
        let base = self.discard.address();
        let mut done = Discarded::default();
        let mut failed = None;
        // Offset up to which all is done.
        let mut at = 0;
        while let Some(first) = runs.first() {
            let start = (base + first.start.max(at)) & !(WINDOW - 1);
            let end = start + WINDOW - base;
            let count = runs.partition_point(|run| run.start < end);
            let window = Span::new(at, end - at);
            let here = runs[..count].iter();
            let here = here.filter_map(move |run| run.intersection(&window));
            let before = failed
                .is_none()
                .then(|| self.look(start, here.clone(), false));
            done += self.discard.discard_checked(here.clone(), kept);
            let after = before.map(|before| before.and_then(|()| self.look(start, here, true)));
            match after {
                Some(Ok(())) => self.add(),
                Some(Err(error)) => failed = Some(error),
                None => {}
            }
            // The last may go on in the next window.
            let whole = runs[..count]
                .last()
                .is_none_or(|run| run.start + run.len <= end);
            runs = &runs[if whole { count } else { count - 1 }..];
            at = end;
        }
        let freed = failed.map_or(Ok(self.freed), Err);
        (done, freed)
    }

    /// Looks at all blocks of the window at `start` in which there are runs.
    fn look(
        &mut self,
        start: u64,
        runs: impl Iterator<Item = Span<Offset>> + Clone,
        after: bool,
    ) -> io::Result<()> {
        let held = if after {
            &mut self.after
        } else {
            &mut self.before
        };
        held.fill(BlockBytes::default());
        let page = self.discard.page();
        let base = self.discard.address();
        // Only whole pages of the runs, by address.
        let pages = runs.map(|run| super::cut(Span::new(base + run.start, run.len), page).1);
        let mut pages = pages.filter(|run| !run.is_empty());
        // Blocks that are neighbours are read together.
        let mut blocks = pages.clone().map(|run| {
            let start = run.start & !(BLOCK - 1);
            Span::inclusive(start, run.last() | (BLOCK - 1)).unwrap_or_default()
        });
        let mut next = blocks.next();
        let mut run = pages.next();
        while let Some(mut range) = next {
            next = blocks.next();
            while let Some(follows) = next.filter(|next| next.start <= range.start + range.len) {
                range.len = follows.start + follows.len - range.start;
                next = blocks.next();
            }
            self.scan.present(range, &mut |there, huge| {
                let mut at = there.start;
                while at <= there.last() {
                    let number = (at - start) / BLOCK;
                    let until = (start + (number + 1) * BLOCK).min(there.start + there.len);
                    if let Some(held) = held.get_mut(number as usize) {
                        held.all += until - at;
                        let here = Span::new(at, until - at);
                        let common = in_runs(here, &mut run, &mut pages);
                        *(if huge {
                            &mut held.huge
                        } else {
                            &mut held.small
                        }) += common;
                    }
                    at = until;
                }
            })?;
        }
        Ok(())
    }

    /// Adds what the window has freed.
    fn add(&mut self) {
        for (before, after) in self.before.iter().zip(&self.after) {
            let left = after.huge + after.small;
            if self.discard.backed.block.is_none() {
                self.freed.bytes += (before.huge + before.small).saturating_sub(left);
                continue;
            }
            if before.huge == BLOCK {
                self.freed.bytes += BLOCK.saturating_sub(left);
            } else if before.huge == 0 {
                let gone = before.small.saturating_sub(left);
                if after.all == 0 {
                    self.freed.bytes += gone;
                } else {
                    self.freed.unsure += gone;
                }
            }
        }
    }
}

/// Bytes of `there` in the runs, of which `run` is the first that does not end before.
fn in_runs(
    there: Span<Va>,
    run: &mut Option<Span<Va>>,
    runs: &mut impl Iterator<Item = Span<Va>>,
) -> u64 {
    let mut common = 0;
    while let Some(here) = *run {
        common += here.intersection(&there).map_or(0, |both| both.len);
        if here.last() > there.last() {
            break;
        }
        *run = runs.next();
    }
    common
}
