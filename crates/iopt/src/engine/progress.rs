//! Operations that do a part of what they are asked for, and say how far they came.

use runs::{Iova, Joiner, Pa, Span};

use super::Table;
use super::claim::Claim;
use super::removed::Removed;
use super::resize::up_to;
use super::sink::{NoRuns, RunSink, Wants};
use crate::error::{PageSizeError, RangeError, TableMapError, TableUnmapError};
use crate::format::Format;
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// How far an operation came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it may have done less than it was asked for"]
pub struct Progress<E> {
    /// Bytes that are done, from the beginning of the range on; they stay done when there is an error.
    pub bytes: u64,
    /// The reason why it ended before the end of the range, but for its bound.
    pub result: Result<(), E>,
}

impl<E> Progress<E> {
    pub(super) const fn stopped(bytes: u64, cause: E) -> Self {
        let result = Err(cause);
        Self { bytes, result }
    }
}

/// As much as a caller has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Bytes at most, but for the first leaf.
    pub bytes: u64,
    /// Runs at most, but for the first leaf: stretches of leaves that are contiguous in both address spaces.
    pub runs: u64,
}

impl Bound {
    /// All that there is.
    pub const NONE: Self = Self {
        bytes: u64::MAX,
        runs: u64::MAX,
    };
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// See [`TableOps::map_pages`](super::TableOps::map_pages).
    pub(super) fn map_some(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        let size = page.len;
        for address in [iova, page.start] {
            if let Err(cause) = self.check_pages(address, size) {
                return Progress::stopped(0, cause.into());
            }
        }
        let wanted: Span<Pa> = Span::new(page.start, size.saturating_mul(count));
        let map = |bytes: u64| {
            let run = [Span::new(wanted.start, bytes)];
            self.map_any(iova, &run, prot, up_to(self.sizes, size), None)
        };
        let (bytes, result) = match map(wanted.len) {
            Ok(()) => (wanted.len, Ok(())),
            Err(TableMapError::Overlap { wanted, found }) => {
                // In front of the page in the way all is free.
                let before = found.iova.saturating_sub(iova) & !(size - 1);
                let cause = TableMapError::Overlap { wanted, found };
                match before {
                    0 => (0, Err(cause)),
                    _ => match map(before) {
                        Ok(()) => (before, Err(cause)),
                        Err(other) => (0, Err(other)),
                    },
                }
            }
            Err(cause) => (0, Err(cause)),
        };
        Progress { bytes, result }
    }

    /// Refuses a `size` that no leaf has, and an `address` that is no multiple of it.
    pub(super) fn check_pages(&self, address: u64, size: u64) -> Result<(), Pages> {
        let offered = self.page_sizes();
        if !offered.contains(size) {
            return Err(Pages::Size(PageSizeError { size, offered }));
        }
        if address & (size - 1) != 0 {
            let (value, granule) = (address, size);
            return Err(Pages::Range(RangeError::Misaligned { value, granule }));
        }
        Ok(())
    }

    /// See [`TableOps::unmap_some`](super::TableOps::unmap_some). With a size it ends in front of leaves of other sizes.
    pub(super) fn unmap_some_of<S: RunSink>(
        &self,
        range: Span<Iova>,
        size: Option<u64>,
        bound: Bound,
        gather: &mut Gather,
        sink: &mut S,
        claim: Claim,
    ) -> Progress<TableUnmapError> {
        let checked = self.check_sink(sink).and_then(|()| {
            let at = self.check_range(range)?;
            self.intact()?;
            Ok(at)
        });
        let at = match checked {
            Ok(at) => at,
            Err(cause) => return Progress::stopped(0, cause),
        };
        let from = self.lowest::<false>(at, range.len);
        let (bytes, result) = self.removable(from, range, size, bound);
        let emptied = self.intact().map_err(TableUnmapError::from);
        let emptied = emptied.and_then(|()| match (bytes, sink.wants()) {
            (0, _) => Ok(0),
            (_, Wants::DirtyRuns) => {
                let removed = Removed::new(self.aperture(), true, gather, sink);
                self.empty(from, (at, bytes), removed, claim)
            }
            // Leaves that were just read are cheaper to read again than to return while they are emptied, and the code
            // that empties is that of all other unmaps.
            (_, wants) => {
                if wants == Wants::Runs {
                    self.report_runs(from, Span::new(range.start, bytes), sink);
                }
                let mut nothing = NoRuns;
                let removed = Removed::new(self.aperture(), true, gather, &mut nothing);
                self.empty(from, (at, bytes), removed, claim)
            }
        });
        match emptied {
            Ok(_) => Progress { bytes, result },
            Err(cause) => Progress::stopped(0, cause),
        }
    }

    /// Reports the runs of `range`, which is mapped by whole leaves and goes through the table `from`.
    fn report_runs<S: RunSink>(&self, from: (u64, usize), range: Span<Iova>, sink: &mut S) {
        let mut joiner = Joiner::new();
        let mut left = range.len;
        for (_, mut run) in self.leaves_from(from, range).stretches() {
            run.len = run.len.min(left);
            left -= run.len;
            if let Some(run) = joiner.push(run) {
                sink.run(run);
            }
        }
        if let Some(run) = joiner.finish() {
            sink.run(run);
        }
    }

    /// The bytes from the beginning of `range`, which goes through the table `from`, on that are mapped without a hole, by whole leaves, within `bound`; and the
    /// reason why they are fewer than the bound and the range allow.
    fn removable(
        &self,
        from: (u64, usize),
        range: Span<Iova>,
        size: Option<u64>,
        bound: Bound,
    ) -> (u64, Result<(), TableUnmapError>) {
        let (mut done, mut runs, mut next) = (0u64, 0, None);
        for (leaf, run) in self.leaves_from(from, range).stretches() {
            let at = range.start.wrapping_add(done);
            if run.iova > at {
                return (done, Err(TableUnmapError::Hole { range, at }));
            }
            let leaf = leaf.run;
            if let Some(size) = size.filter(|size| *size != leaf.len) {
                return (done, Err(TableUnmapError::OtherSize { size, leaf }));
            }
            if run.iova < at {
                return (done, Err(TableUnmapError::InsideLeaf { range, leaf }));
            }
            if next != Some(run.pa) {
                if done > 0 && runs >= bound.runs {
                    return (done, Ok(()));
                }
                runs += 1;
            }
            next = Some(run.pa.wrapping_add(run.len));
            let room = bound
                .bytes
                .saturating_sub(done)
                .max(if done == 0 { leaf.len } else { 0 });
            let len = run.len.min(room).min(range.len - done) & !(leaf.len - 1);
            done += len;
            if len < run.len && done < range.len {
                // The bound ends it, or the next leaf of the stretch reaches over the end.
                if room < run.len {
                    return (done, Ok(()));
                }
                let iova = range.start.wrapping_add(done);
                let leaf = self.leaf_at(iova).map(|leaf| leaf.run).unwrap_or_default();
                return (done, Err(TableUnmapError::InsideLeaf { range, leaf }));
            }
        }
        if done < range.len {
            let at = range.start.wrapping_add(done);
            return (done, Err(TableUnmapError::Hole { range, at }));
        }
        (done, Ok(()))
    }
}

/// The error for pages of no size of the table, or at no multiple of their size.
pub(super) enum Pages {
    Size(PageSizeError),
    Range(RangeError),
}

macro_rules! from_pages {
    ($($error:ident),*) => {$(
        impl From<Pages> for $error {
            fn from(cause: Pages) -> Self {
                match cause {
                    Pages::Size(cause) => Self::PageSize(cause),
                    Pages::Range(cause) => Self::Range(cause),
                }
            }
        }
    )*};
}
from_pages!(TableMapError, TableUnmapError);
