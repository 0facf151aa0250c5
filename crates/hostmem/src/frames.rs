//! The runs of pinned memory.
//!
//! [`Frames`] reads the physical runs of a part of a [`Pin`](crate::Pin), in the order of the
//! offsets, in batches that the caller chooses and with fixed memory of its own: 44 KiB, and 32 KiB
//! for each of at most three threads that help where there is much to read.
//! A run ends only where the memory is not contiguous: neighbouring folios are joined, also over
//! the end of a batch. [Pieces](Frames::next_pieces) are not joined yet: pages, or stretches known to be
//! contiguous.
//!
//! A huge page takes one look-up. Where the backing does not say which pages are huge,
//! `PAGEMAP_SCAN` does; one 8-byte entry of `/proc/self/pagemap` then gives the frame of the whole
//! page. Entries of 4 KiB pages are read 4096 at a time.
//!
//! Source: Linux `Documentation/admin-guide/mm/pagemap.rst`.

use std::io;

use runs::{Joiner, Offset, Pa, Span};
use thiserror::Error;

use crate::backing::Backing;
use crate::mapping::Mapping;
use crate::nodes::{PlacementError, open_pagemap};
use crate::pagemap_reader::PagemapReader;
use crate::procfs;
use crate::source::{ENTRY_FRAME, ENTRY_PRESENT, FrameSource, Shuffle};
use crate::stretches::{Pages, Stretches};

const PAGE: u64 = 4096;

/// Reads the runs of pinned memory; made by [`Pin::runs`](crate::Pin::runs), which it borrows, so
/// that nothing can be unpinned while it reads.
pub struct Frames<'a> {
    mapping: &'a Mapping,
    /// Offset of the next byte that no piece has covered.
    at: u64,
    end: u64,
    from: Reader,
    joiner: Joiner<Span<Pa>>,
    entries_read: u64,
}

/// Failure to read a run.
#[derive(Debug, Error)]
pub enum FramesError {
    /// The part is not pinned, or not all of it.
    #[error("offset {offset:#x} is not pinned")]
    NotPinned {
        /// The first offset in the mapping that is not.
        offset: u64,
    },
    /// The page is gone although it is pinned.
    #[error("the page at offset {offset:#x} is not there although it is pinned")]
    NotPresent {
        /// Its offset in the mapping.
        offset: u64,
    },
    /// The kernel hides the frame number.
    #[error("the frame of the page at offset {offset:#x} is hidden: that needs CAP_SYS_ADMIN")]
    Hidden {
        /// Its offset in the mapping.
        offset: u64,
    },
    /// [`FrameSource::FileOffset`] for memory without a file.
    #[error("{backing} memory has no file whose offsets could stand for frames")]
    NoFile {
        /// Backing of the memory.
        backing: Backing,
    },
    /// All windows for stand-in addresses are taken.
    #[error("no window of {len:#x} bytes is left for stand-in addresses")]
    NoWindow {
        /// The mapping's length, bytes.
        len: u64,
    },
    /// `/proc/self/pagemap` cannot be opened.
    #[error(transparent)]
    Pagemap(#[from] PlacementError),
    /// `/proc/self/pagemap` cannot be read.
    #[error("cannot read the frames of {pages} pages from offset {offset:#x} on")]
    Read {
        /// Offset in the mapping.
        offset: u64,
        /// Number of requested entries.
        pages: u64,
        /// Cause.
        source: io::Error,
    },
}

enum Reader {
    Pagemap(Box<Pagemap>),
    FileOffset {
        base: u64,
    },
    Synthetic {
        base: u64,
        block: u64,
        shuffle: Shuffle,
    },
}

struct Pagemap {
    reader: PagemapReader,
    /// Tells which stretches are huge; `None` where all pages are of one known size.
    stretches: Option<Stretches>,
    /// Size of the pages of the stretch that the reader is in, and its end.
    page: u64,
    stretch_end: u64,
}

impl<'a> Frames<'a> {
    /// The caller guarantees that `part` is pinned for as long as `'a`.
    pub(crate) fn new(
        mapping: &'a Mapping,
        part: Span<Offset>,
        source: FrameSource,
    ) -> Result<Self, FramesError> {
        let window = || {
            let len = mapping.len();
            mapping.window().ok_or(FramesError::NoWindow { len })
        };
        let backing = mapping.backing();
        let from = match source {
            FrameSource::Pagemap => Reader::Pagemap(Box::new(Pagemap::new(mapping, part)?)),
            FrameSource::FileOffset if mapping.fd().is_none() => {
                return Err(FramesError::NoFile { backing });
            }
            FrameSource::FileOffset => Reader::FileOffset { base: window()? },
            FrameSource::Synthetic { seed } => {
                let block = backing.largest_page();
                Reader::Synthetic {
                    base: window()?,
                    block,
                    shuffle: Shuffle::new(mapping.len().div_ceil(block), seed),
                }
            }
        };
        Ok(Self {
            mapping,
            at: part.start,
            end: part.start + part.len,
            from,
            joiner: Joiner::new(),
            entries_read: 0,
        })
    }

    /// Fills `out` with the next runs (physical address and length in bytes) and returns how
    /// many; 0 at the end, and only there unless `out` is empty.
    ///
    /// # Errors
    ///
    /// When a frame cannot be learnt. What was read in this call is lost then.
    pub fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, FramesError> {
        let mut filled = 0;
        while filled < out.len() {
            let (run, ended) = match self.next_piece()? {
                Some(piece) => (self.joiner.push(piece), false),
                None => (self.joiner.finish(), true),
            };
            if let (Some(run), Some(slot)) = (run, out.get_mut(filled)) {
                *slot = run;
                filled += 1;
            }
            if ended {
                break;
            }
        }
        Ok(filled)
    }

    /// As [`next_batch`](Self::next_batch), but neighbours are not joined: for callers who join the runs of
    /// several pins anyway. A reader is asked in one of the two ways from its beginning to its end.
    ///
    /// # Errors
    ///
    /// As [`next_batch`](Self::next_batch).
    pub fn next_pieces(&mut self, out: &mut [Span<Pa>]) -> Result<usize, FramesError> {
        let mut filled = 0;
        for slot in out {
            let Some(piece) = self.next_piece()? else {
                break;
            };
            *slot = piece;
            filled += 1;
        }
        Ok(filled)
    }

    /// Entries of `/proc/self/pagemap` read so far.
    pub const fn entries_read(&self) -> u64 {
        self.entries_read
    }

    /// The next piece that is contiguous for sure.
    #[inline]
    fn next_piece(&mut self) -> Result<Option<Span<Pa>>, FramesError> {
        if self.at >= self.end {
            return Ok(None);
        }
        let left = self.end - self.at;
        let piece = match &mut self.from {
            Reader::Pagemap(pagemap) => {
                pagemap.piece(self.mapping, self.at, self.end, &mut self.entries_read)?
            }
            Reader::FileOffset { base } => Span::new(*base + self.at, left),
            Reader::Synthetic {
                base,
                block,
                shuffle,
            } => {
                let inside = self.at % *block;
                let place = shuffle.place(self.at / *block);
                Span::new(*base + place * *block + inside, left.min(*block - inside))
            }
        };
        self.at += piece.len;
        Ok(Some(piece))
    }
}

impl std::fmt::Debug for Frames<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frames")
            .field("at", &self.at)
            .field("end", &self.end)
            .field("entries_read", &self.entries_read)
            .finish_non_exhaustive()
    }
}

impl Pagemap {
    fn new(mapping: &Mapping, part: Span<Offset>) -> Result<Self, FramesError> {
        // Pages of a pool are all of one size, and memory that refused huge pages has none:
        // nothing to ask the kernel there.
        let mixed = match mapping.backing() {
            Backing::Thp => true,
            Backing::Memfd => shared_memory_may_be_huge(),
            Backing::Anon4K | Backing::Hugetlb2M | Backing::Hugetlb1G => false,
        };
        Ok(Self {
            reader: PagemapReader::new(open_pagemap()?),
            stretches: mixed.then(|| Stretches::new(mapping, part)),
            page: mapping.backing().page(),
            stretch_end: if mixed {
                part.start
            } else {
                part.start + part.len
            },
        })
    }

    #[inline]
    fn piece(
        &mut self,
        mapping: &Mapping,
        at: u64,
        end: u64,
        entries_read: &mut u64,
    ) -> Result<Span<Pa>, FramesError> {
        if at >= self.stretch_end {
            self.enter_stretch(at, end)?;
        }
        let address = mapping.address() + at;
        let rest = Span::new(address, self.stretch_end - at);
        let read = self.reader.next(rest, self.page);
        let entry = read.map_err(|(pages, source)| FramesError::Read {
            offset: at,
            pages,
            source,
        })?;
        *entries_read += 1;
        // The rest of this page, also when the part begins or ends inside of it.
        let len = (self.page - address % self.page).min(rest.len);
        let frame = entry & ENTRY_FRAME;
        if entry & ENTRY_PRESENT == 0 {
            return Err(FramesError::NotPresent { offset: at });
        }
        if frame == 0 {
            return Err(FramesError::Hidden { offset: at });
        }
        Ok(Span::new(frame * PAGE, len))
    }

    fn enter_stretch(&mut self, at: u64, end: u64) -> Result<(), FramesError> {
        let stretch = match &mut self.stretches {
            Some(stretches) => stretches.next(self.reader.file()),
            None => Ok(None),
        };
        (self.page, self.stretch_end) = match stretch {
            Ok(Some(stretch)) => {
                let stretch_end = stretch.span.start + stretch.span.len;
                match stretch.pages {
                    Pages::Huge => (2 << 20, stretch_end),
                    Pages::Small => (PAGE, stretch_end),
                    Pages::Absent => return Err(FramesError::NotPresent { offset: at }),
                }
            }
            // A kernel before 6.7 does not tell: each page is looked at.
            Ok(None) | Err(_) => (PAGE, end),
        };
        Ok(())
    }
}

/// Returns true if memory files may get huge pages without asking. A wrong answer costs entries_read, nothing
/// else. Source: Linux `Documentation/admin-guide/mm/transhuge.rst`, "shmem_enabled".
fn shared_memory_may_be_huge() -> bool {
    procfs::read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").is_ok_and(|text| {
        !["[never]", "[deny]", "[advise]"]
            .iter()
            .any(|off| text.contains(off))
    })
}
