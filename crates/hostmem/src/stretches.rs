//! Stretches of a mapping in huge pages, in small ones, or not there.
//!
//! The ioctl `PAGEMAP_SCAN` says it for whole stretches at once, a thousandth of the work of
//! looking at each page, and without any privilege. It gives no frame numbers.
//! [`Stretches`] walks a part of a mapping with it, in batches of fixed size.

use std::fs::File;
use std::io;

use runs::{Offset, Span};

use crate::mapping::Mapping;
use crate::sys::{self, PAGE_IS_HUGE, PageRegion};

/// Regions asked for at once: 12 KiB.
const BATCH: usize = 512;

/// Kind of the pages of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    Absent,
    /// One entry of the lowest level each: 4 KiB pages, and also a transparent huge page that is
    /// mapped page by page.
    Small,
    /// An entry of a higher level each.
    Huge,
}

/// A stretch: offsets in the mapping, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) span: Span<Offset>,
    pub(crate) pages: Pages,
}

/// Walks a part of a mapping in order; the stretches follow each other without a gap.
pub(crate) struct Stretches {
    base: u64,
    at: u64,
    end: u64,
    regions: Box<[PageRegion]>,
    next: usize,
    filled: usize,
    /// The offset up to which the regions of this batch speak.
    known_to: u64,
}

impl Stretches {
    pub(crate) fn new(mapping: &Mapping, part: Span<Offset>) -> Self {
        Self::of(mapping.address(), part)
    }

    /// The part of what begins at the address `base`, of whichever process the page map is.
    pub(crate) fn of(base: u64, part: Span<Offset>) -> Self {
        Self {
            base,
            at: part.start,
            end: part.start + part.len,
            regions: vec![PageRegion::default(); BATCH].into(),
            next: 0,
            filled: 0,
            known_to: part.start,
        }
    }

    /// The next stretch; `None` at the end of the part.
    pub(crate) fn next(&mut self, pagemap: &File) -> io::Result<Option<Stretch>> {
        if self.at >= self.end {
            return Ok(None);
        }
        if self.next == self.filled && self.at >= self.known_to {
            let (start, end) = (self.base + self.at, self.base + self.end);
            let (filled, walked_to) = sys::scan_pages(pagemap, start, end, 0, &mut self.regions)?;
            self.next = 0;
            self.filled = filled;
            self.known_to = walked_to.clamp(start, end) - self.base;
            if filled == 0 && self.known_to <= self.at {
                self.known_to = self.end;
            }
        }
        let (until, pages) = match self.regions.get(self.next..self.filled) {
            Some([region, ..]) if region.start <= self.base + self.at => {
                self.next += 1;
                let huge = region.categories & PAGE_IS_HUGE != 0;
                let pages = if huge { Pages::Huge } else { Pages::Small };
                // A region that ends before this offset says nothing, but must not hold us up.
                ((region.end - self.base).max(self.at + 4096), pages)
            }
            Some([region, ..]) => (region.start - self.base, Pages::Absent),
            _ => (self.known_to.max(self.at + 4096), Pages::Absent),
        };
        let until = until.min(self.end);
        let span = Span::new(self.at, until - self.at);
        self.at = until;
        Ok(Some(Stretch { span, pages }))
    }
}
