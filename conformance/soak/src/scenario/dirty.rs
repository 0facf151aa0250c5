//! Writes of devices, compared with what a harvest finds.
//!
//! A write that was over when a harvest began is found by it, or was found by the one before; and what a
//! harvest finds was written to since the one before began. Pages at which an operation was at work in between
//! are left out.

use std::ops::Range;

/// Where operations were at work, by page.
#[derive(Debug)]
pub(crate) struct Touched {
    /// Since the last harvest began, or longer.
    since: Vec<u64>,
    /// And are now.
    now: Vec<u64>,
    /// Leaves may be larger than a page: more is found than was written to.
    pub(crate) blurred: bool,
    /// Operations under way that make them so.
    pub(crate) blurring: u32,
}

impl Touched {
    pub(crate) fn new(pages: usize) -> Self {
        let none = || vec![0; pages.div_ceil(64)];
        Self {
            since: none(),
            now: none(),
            blurred: false,
            blurring: 0,
        }
    }

    pub(crate) fn begin(&mut self, page: usize) {
        self.now[page / 64] |= 1 << (page % 64);
        self.since[page / 64] |= 1 << (page % 64);
    }

    pub(crate) fn end(&mut self, page: usize, last: bool) {
        self.now[page / 64] &= !(u64::from(last) << (page % 64));
    }

    /// A harvest of `words` begins: what was touched until now, while that which is under way counts for the next one,
    /// too.
    pub(crate) fn take(&mut self, words: Range<usize>) -> Vec<u64> {
        let taken = self.since[words.clone()].to_vec();
        self.since[words.clone()].copy_from_slice(&self.now[words]);
        taken
    }

    /// Adds what was touched since then.
    pub(crate) fn look(&self, words: Range<usize>, to: &mut [u64]) {
        add(&mut to[words.clone()], &self.since[words]);
    }
}

/// Adds the bits of `more`.
pub(crate) fn add(to: &mut [u64], more: &[u64]) {
    to.iter_mut().zip(more).for_each(|(to, more)| *to |= more);
}

/// Findings of harvests: one is under way at a time.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// It is tracked.
    pub(crate) on: bool,
    /// Faults before tracking began.
    pub(crate) fired: u64,
    found: Vec<u64>,
    perhaps: Vec<u64>,
}

/// Pages of a harvest, by words of 64 pages.
pub(crate) struct Period {
    /// Written to since the last harvest, for sure and at most.
    pub(crate) sure: Vec<u64>,
    pub(crate) perhaps: Vec<u64>,
    pub(crate) touched: Vec<u64>,
    pub(crate) found: Vec<u64>,
}

impl Period {
    pub(crate) fn new(words: usize) -> Self {
        let none = || vec![0; words];
        Self {
            sure: none(),
            perhaps: none(),
            touched: none(),
            found: none(),
        }
    }
}

impl Dirty {
    /// Tracking of so many pages has begun.
    pub(crate) fn begin(&mut self, pages: usize, fired: u64) {
        let words = pages.div_ceil(64);
        *self = Self {
            on: true,
            fired,
            found: vec![0; words],
            // Writes on the way here may or may not be found.
            perhaps: vec![u64::MAX; words],
        };
    }

    /// Pages of `words` that were missed, and those that are too many.
    pub(crate) fn judge(&mut self, words: Range<usize>, period: &Period) -> (u32, u32) {
        let (mut missed, mut more) = (0, 0);
        for n in words {
            let (found, touched) = (period.found[n], period.touched[n]);
            missed += (period.sure[n] & !(found | self.found[n] | touched)).count_ones();
            let may = period.perhaps[n] | self.perhaps[n] | touched;
            more += (found & !may).count_ones();
            (self.found[n], self.perhaps[n]) = (found, period.perhaps[n]);
        }
        (missed, more)
    }
}
