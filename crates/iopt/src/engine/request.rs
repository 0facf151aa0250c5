//! A request to map, and how far it has come.

use core::slice;

use runs::{Pa, PageSizes, Run, Span};

use super::Table;
use crate::error::{RangeError, TableMapError};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// Where a pass over the request stands: the stripped address, and the run that lies there.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    /// The sizes that leaves may have.
    sizes: PageSizes,
    pub(super) at: u64,
    pub(super) todo: u64,
    pub(super) pa: u64,
    left: u64,
    rest: slice::Iter<'a, Span<Pa>>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(request: &Request<'a>) -> Self {
        let mut cursor = Self {
            sizes: request.sizes,
            at: request.at,
            todo: request.len,
            pa: 0,
            left: 0,
            rest: request.runs.iter(),
        };
        cursor.next_run();
        cursor
    }

    #[inline]
    fn next_run(&mut self) {
        if let Some(run) = self.rest.next() {
            (self.pa, self.left) = (run.start, run.len);
        }
    }

    /// How many runs from here on, at most `most`, are one leaf of 2^`log2` bytes each, of which the
    /// first is known to be: where memory is in pieces, that is all of them.
    #[inline(always)]
    fn single_leaves(&self, log2: u32, most: u64) -> u64 {
        let bytes = 1 << log2;
        if self.left != bytes {
            return 0;
        }
        let single = |run: &&Span<Pa>| run.len == bytes && run.start & (bytes - 1) == 0;
        let most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
        1 + self.rest.clone().take(most - 1).take_while(single).count() as u64
    }

    /// Where the first of these `count` runs begins, and the others.
    #[inline(always)]
    pub(super) fn starts(&self, count: u64) -> (u64, &'a [Span<Pa>]) {
        let others = self.rest.as_slice().get(..count as usize - 1);
        (self.pa, others.unwrap_or_default())
    }

    /// Goes on behind these `count` runs.
    #[inline(always)]
    pub(super) fn pass_single_leaves(&mut self, log2: u32, count: u64) {
        let others = count as usize - 1;
        self.rest = self
            .rest
            .as_slice()
            .get(others..)
            .unwrap_or_default()
            .iter();
        self.at = self.at.wrapping_add(count << log2);
        self.todo -= count << log2;
        self.left = 0;
        self.next_run();
    }

    /// Goes on, also over the end of a run.
    pub(super) fn skip(&mut self, bytes: u64) {
        let mut rest = bytes.min(self.todo);
        while rest > 0 && self.left > 0 {
            let here = rest.min(self.left);
            self.advance(here);
            rest -= here;
        }
    }

    /// Ends `bytes` from here.
    pub(super) fn end_after(&mut self, bytes: u64) {
        self.todo = self.todo.min(bytes);
    }

    #[inline(always)]
    pub(super) fn advance(&mut self, bytes: u64) {
        self.at = self.at.wrapping_add(bytes);
        self.todo -= bytes;
        self.pa = self.pa.wrapping_add(bytes);
        self.left -= bytes;
        if self.left == 0 {
            self.next_run();
        }
    }
}

/// Attributes of leaves, beside their address and size.
pub(crate) trait Attributes: Copy {
    /// The bits, if the format can express it.
    fn bits<F: Format>(self, format: &F) -> Option<u64>;

    /// For the error, if not.
    fn prot(self) -> Prot;
}

impl Attributes for Prot {
    #[inline(always)]
    fn bits<F: Format>(self, format: &F) -> Option<u64> {
        format.leaf_bits(self)
    }

    fn prot(self) -> Prot {
        self
    }
}

/// The bits themselves.
#[derive(Clone, Copy)]
pub(super) struct LeafBits(pub(super) u64);

impl Attributes for LeafBits {
    #[inline(always)]
    fn bits<F: Format>(self, _format: &F) -> Option<u64> {
        Some(self.0)
    }

    fn prot(self) -> Prot {
        Prot::empty()
    }
}

/// A request that is well formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'r> {
    pub(super) iova: u64,
    /// The address without the bits above the aperture.
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) runs: &'r [Span<Pa>],
    /// Permission and attribute bits of the leaves.
    pub(super) bits: u64,
    /// The sizes that they may have.
    pub(super) sizes: PageSizes,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Tells the memory of the runs that are about to be mapped.
    #[inline(always)]
    pub(super) fn announce(&self, request: &Request<'_>) {
        if !self.memory.watches_runs() {
            return;
        }
        let leaf = F::leaf(0, 0, F::shift(0), request.bits);
        let prot = self.format.prot(0, leaf);
        let mut iova = request.iova;
        for run in request.runs {
            self.memory.mapped(Run::new(iova, *run), prot);
            iova = iova.wrapping_add(run.len);
        }
    }

    /// Everything that can be known to be wrong before a table is looked at.
    #[inline(always)]
    pub(crate) fn check_map<'r>(
        &self,
        iova: u64,
        runs: &'r [Span<Pa>],
        attributes: impl Attributes,
    ) -> Result<Request<'r>, TableMapError> {
        let len = self.check_runs(runs)?;
        let at = self.check_range(Span::new(iova, len))?;
        match attributes.bits(&self.format) {
            Some(bits) => Ok(Request {
                iova,
                at,
                len,
                runs,
                bits,
                sizes: self.sizes,
            }),
            None => Err(TableMapError::Prot {
                prot: attributes.prot(),
                format: F::ID,
            }),
        }
    }

    /// The runs' bytes together, if each of them is well formed.
    fn check_runs(&self, runs: &[Span<Pa>]) -> Result<u64, TableMapError> {
        let granule = self.sizes.smallest();
        let mut len = 0u64;
        // All of them at once: which one is wrong is looked for only when one is.
        let (mut ends, mut lasts, mut wrong) = (0, 0, false);
        for run in runs {
            let last = run.start.wrapping_add(run.len.wrapping_sub(1));
            ends |= run.start | run.len;
            lasts |= last;
            // Empty, or beyond 2^64.
            wrong |= (run.len == 0) | (last < run.start);
            // More than 2^64 bytes fit no aperture: the sum saturates and is refused there.
            len = len.saturating_add(run.len);
        }
        let bits = self.format.output_bits();
        wrong |=
            ends & (granule - 1) != 0 || lasts.checked_shr(bits).is_some_and(|above| above != 0);
        if wrong {
            self.refuse_runs(runs)?;
        }
        Ok(len)
    }

    /// The error for the first run that is not well formed.
    #[cold]
    fn refuse_runs(&self, runs: &[Span<Pa>]) -> Result<(), TableMapError> {
        let granule = self.sizes.smallest();
        for run in runs {
            if run.len == 0 {
                return Err(RangeError::Empty.into());
            }
            if !run.is_aligned(granule) {
                let value = if run.start & (granule - 1) != 0 {
                    run.start
                } else {
                    run.len
                };
                return Err(RangeError::Misaligned { value, granule }.into());
            }
            let last = run.start.checked_add(run.len - 1);
            let bits = self.format.output_bits();
            if last.is_none_or(|last| last >> bits != 0) {
                return Err(TableMapError::OutputTooWide { output: *run, bits });
            }
        }
        Ok(())
    }

    /// The runs from here on that are one leaf each, at most `room` bytes of them, when there is more
    /// than one; `log2` and `count` are what [`leaves_here`](Self::leaves_here) said of the first.
    #[inline(always)]
    pub(super) fn single_leaves(
        &self,
        cursor: &Cursor<'_>,
        (log2, count): (u32, u64),
        room: u64,
    ) -> Option<u64> {
        if count > 1 {
            return None;
        }
        Some(cursor.single_leaves(log2, room >> log2)).filter(|runs| *runs > 1)
    }

    /// The largest leaves at `level` with which the request can go on here: their size as a
    /// power of two, and how many of them in a row within `room` bytes.
    #[inline(always)]
    pub(super) fn leaves_here(
        &self,
        level: usize,
        cursor: &Cursor<'_>,
        room: u64,
    ) -> Option<(u32, u64)> {
        let offered = F::leaf_sizes(level);
        let sizes = offered.and(cursor.sizes);
        let mut len = room.min(cursor.left);
        if F::LINEAR_LOG2 < 64 {
            // Entries go on by a constant step within such a block of physical memory only.
            let block = 1u64 << F::LINEAR_LOG2;
            len = len.min(block - (cursor.pa & (block - 1)));
        }
        if offered.bits().count_ones() <= 1 {
            // One size: no choice to make.
            let log2 = F::shift(level);
            let aligned = (cursor.at | cursor.pa) & ((1 << log2) - 1) == 0;
            return (!sizes.is_empty() && aligned && len >> log2 > 0)
                .then_some((log2, len >> log2));
        }
        let (size, count) = sizes.step(cursor.at, Span::new(cursor.pa, len))?;
        Some((size.trailing_zeros(), count))
    }
}
