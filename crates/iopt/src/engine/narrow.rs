//! The narrow calls that drivers want: a count of equal pages, as many as one table holds.
//!
//! A call handles *at most* the given count of pages of one size, may stop at the end of a table,
//! and always says how far it came, also beside an error. Calling again from there until the count
//! is reached leaves the same bytes as one wide call. Back ends that can only do one page at a time
//! implement two functions and get the others, so that callers can use the wider ones at once and
//! back ends be ported one by one.

use runs::{Pa, Span};

use super::access::{Access, Disjoint, Exclusive};
use super::removal_check::Pages;
use super::resize::up_to;
use super::{SharedTable, Table};
use crate::error::{PageSizeError, RangeError, TableMapError, TableUnmapError};
use crate::format::Format;
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;
use crate::reclaim::Reclaim;

/// How far a narrow call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a narrow call may do less than it was asked for"]
pub struct Progress<E> {
    /// Pages that are done; they stay done when there is an error.
    pub pages: u64,
    /// What stopped it, unless it was the count or the end of a table.
    pub result: Result<(), E>,
}

impl<E> Progress<E> {
    const fn done(pages: u64) -> Self {
        Self {
            pages,
            result: Ok(()),
        }
    }

    const fn stopped(pages: u64, cause: E) -> Self {
        Self {
            pages,
            result: Err(cause),
        }
    }
}

/// Maps and unmaps counts of equal pages. Sizes, addresses and lengths are bytes.
///
/// Where an empty table was [kept](Table::keep_empty_tables), or another thread has just emptied one,
/// pages are mapped in it by smaller leaves.
pub trait MapPages {
    /// Maps one page.
    fn map_page(&mut self, iova: u64, page: Span<Pa>, prot: Prot) -> Result<(), TableMapError>;

    /// Unmaps one page of `size` bytes.
    fn unmap_page(
        &mut self,
        iova: u64,
        size: u64,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError>;

    /// Maps at most `count` pages, contiguous on both sides: this one and those that follow it.
    fn map_pages(
        &mut self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        for done in 0..count {
            let offset = done.wrapping_mul(page.len);
            let next = Span::new(page.start.wrapping_add(offset), page.len);
            if let Err(cause) = self.map_page(iova.wrapping_add(offset), next, prot) {
                return Progress::stopped(done, cause);
            }
        }
        Progress::done(count)
    }

    /// Unmaps at most `count` pages of `size` bytes each.
    fn unmap_pages(
        &mut self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        for page in 0..count {
            let iova = iova.wrapping_add(page.wrapping_mul(size));
            if let Err(cause) = self.unmap_page(iova, size, gather) {
                return Progress::stopped(page, cause);
            }
        }
        Progress::done(count)
    }
}

impl<F: Format, M: TableMemory> MapPages for Table<F, M> {
    fn map_page(&mut self, iova: u64, page: Span<Pa>, prot: Prot) -> Result<(), TableMapError> {
        self.map_pages(iova, page, 1, prot).result
    }

    fn unmap_page(
        &mut self,
        iova: u64,
        size: u64,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        self.unmap_pages(iova, size, 1, gather).result
    }

    fn map_pages(
        &mut self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        self.map_pages_as(iova, page, count, prot, Exclusive)
    }

    fn unmap_pages(
        &mut self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        self.unmap_pages_as(iova, size, count, gather, Exclusive)
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> MapPages for &SharedTable<F, M, R> {
    fn map_page(&mut self, iova: u64, page: Span<Pa>, prot: Prot) -> Result<(), TableMapError> {
        self.map_pages(iova, page, 1, prot).result
    }

    fn unmap_page(
        &mut self,
        iova: u64,
        size: u64,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        self.unmap_pages(iova, size, 1, gather).result
    }

    fn map_pages(
        &mut self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        let _guard = self.guard();
        self.table()
            .map_pages_as(iova, page, count, prot, Disjoint::NOTHING)
    }

    fn unmap_pages(
        &mut self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        let _guard = self.guard();
        let table = self.table();
        // What lies beyond the aperture is refused before anything is unlinked.
        let range = Span::new(iova, size.saturating_mul(count));
        table.unmap_pages_as(iova, size, count, gather, table.owned(range, None))
    }
}

/// What is wrong with a narrow call before any table is looked at.
enum Narrow {
    PageSize(PageSizeError),
    Range(RangeError),
}

impl From<Narrow> for TableMapError {
    fn from(cause: Narrow) -> Self {
        match cause {
            Narrow::PageSize(cause) => Self::PageSize(cause),
            Narrow::Range(cause) => Self::Range(cause),
        }
    }
}

impl From<Narrow> for TableUnmapError {
    fn from(cause: Narrow) -> Self {
        match cause {
            Narrow::PageSize(cause) => Self::PageSize(cause),
            Narrow::Range(cause) => Self::Range(cause),
        }
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// One descent. A page in the way ends it there, with those before it mapped.
    fn map_pages_as<P: Access>(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
        access: P,
    ) -> Progress<TableMapError> {
        let size = page.len;
        let pages = match self.in_one_table(iova, page, count) {
            Ok(pages) => pages,
            Err(cause) => return Progress::stopped(0, cause.into()),
        };
        let run = [Span::new(page.start, pages * size)];
        let mapped = self.check_map(iova, &run, prot).and_then(|mut request| {
            request.sizes = up_to(self.sizes, size);
            self.map_checked(request, access)
        });
        match mapped {
            Ok(()) => Progress::done(pages),
            Err(TableMapError::Overlap { wanted, found }) => {
                // What is in front of the page in the way is free.
                let before = found.iova.saturating_sub(iova) / size;
                let cause = TableMapError::Overlap { wanted, found };
                if before == 0 {
                    return Progress::stopped(0, cause);
                }
                let progress = self.map_pages_as(iova, page, before, prot, access);
                Progress {
                    pages: progress.pages,
                    result: progress.result.and(Err(cause)),
                }
            }
            Err(cause) => Progress::stopped(0, cause),
        }
    }

    /// One descent. A hole or a leaf of another size ends it there, with those before it unmapped.
    pub(crate) fn unmap_pages_as<P: Access>(
        &self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
        access: P,
    ) -> Progress<TableUnmapError> {
        let wanted = match self.in_one_table(iova, Span::new(0, size), count) {
            Ok(pages) => pages,
            Err(cause) => return Progress::stopped(0, cause.into()),
        };
        let range = Span::new(iova, wanted * size);
        let mut pages = Pages {
            named: range,
            size,
            result: Ok(()),
        };
        let sink = &mut super::NoRuns;
        let removed = self
            .check_sink(sink)
            .and_then(|()| self.remove(range, &mut pages, gather, sink, access));
        match removed {
            Ok(bytes) => Progress {
                pages: bytes / size,
                result: pages.result,
            },
            Err(cause) => Progress::stopped(0, cause),
        }
    }

    /// How many of `count` pages lie in the table in which the first one lies.
    fn in_one_table(&self, iova: u64, page: Span<Pa>, count: u64) -> Result<u64, Narrow> {
        let size = page.len;
        let mut levels = 0..usize::from(self.begin().levels);
        let level = levels.find(|level| F::leaf_sizes(*level).contains(size));
        let (Some(level), true) = (level, self.sizes.contains(size)) else {
            let offered = self.page_sizes();
            return Err(Narrow::PageSize(PageSizeError { size, offered }));
        };
        if count == 0 {
            return Err(Narrow::Range(RangeError::Empty));
        }
        for value in [iova, page.start] {
            if value & (size - 1) != 0 {
                let granule = size;
                return Err(Narrow::Range(RangeError::Misaligned { value, granule }));
            }
        }
        let mask = self.span_mask(level);
        // `iova` is a multiple of `size`, so at least one page is left in the table.
        Ok(((!iova & mask) / size + 1).min(count))
    }
}
