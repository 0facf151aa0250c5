//! The shadow model: what every page of device addresses is to lead to, and what follows from it.
//!
//! An operation begins and ends at the pages that it may change. What it does to a page at which it was alone, the
//! model predicts. Where several operations were at work at once, their order is the address space's affair: when the
//! last of them has ended, the model takes over what the areas say, and devices, tables, pins and charges are held to
//! that.

use std::ops::Range;

use shadow::{Page, Shadow};

use super::dirty::Touched;
use super::scene::Expect;

/// Expectation of devices at a page.
pub(crate) fn expect(page: Option<Page>) -> Expect {
    match page.filter(Page::is_there) {
        Some(Page { memory, write, .. }) => Expect::Mapped {
            page: memory,
            write,
        },
        None => Expect::Hole,
    }
}

/// The operations at a page of device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// How many are under way.
    pub(crate) now: u32,
    /// Several were, since none was.
    several: bool,
    /// How often one has begun or ended.
    times: u64,
    /// One has failed, or was one of several, and not everything was flushed then: devices may find anything until it
    /// is.
    pub(crate) unflushed: bool,
}

/// All pages of device addresses, and which devices are attached.
pub(crate) struct Model {
    pub(crate) pages: Shadow,
    pub(crate) work: Vec<Work>,
    /// Pages that were unmapped, or are otherwise unflushed.
    pub(crate) stale: Vec<usize>,
    pub(crate) touched: Touched,
    pub(crate) attached: Vec<bool>,
}

impl Model {
    pub(crate) fn new(pages: usize, memory: usize, devices: usize) -> Self {
        Self {
            pages: Shadow::new(pages, memory),
            work: vec![Work::default(); pages],
            stale: Vec::new(),
            touched: Touched::new(pages),
            attached: vec![false; devices],
        }
    }

    /// Expected state of `page`.
    pub(crate) fn expect(&self, page: usize) -> Expect {
        expect(self.pages[page])
    }

    pub(crate) fn is_free(&self, range: Range<usize>) -> bool {
        self.pages.is_free(range)
    }

    /// An operation begins at `page`.
    pub(crate) fn begin(&mut self, page: usize) {
        let work = &mut self.work[page];
        work.now += 1;
        work.several |= work.now > 1;
        work.times += 1;
        self.touched.begin(page);
    }

    /// An operation has ended at `page`: whether it was alone there, and whether none is left.
    pub(crate) fn end(&mut self, page: usize) -> (bool, bool) {
        let work = &mut self.work[page];
        work.now -= 1;
        work.times += 1;
        let (alone, last) = (!work.several, work.now == 0);
        work.several &= !last;
        self.touched.end(page, last);
        (alone, last)
    }

    /// How often an operation has begun or ended in `range`; nothing while one is under way.
    pub(crate) fn times(&self, range: Range<usize>) -> Option<u64> {
        let times = |work: &Work| (work.now == 0).then_some(work.times);
        self.work[range].iter().map(times).sum()
    }

    /// The pages that lead to one of `memory`, and those of which that is not known yet.
    pub(crate) fn over(&self, memory: &[Range<usize>]) -> Vec<usize> {
        (0..self.pages.len())
            .filter(|n| self.pages.leads_to(*n, memory) || self.work[*n].several)
            .collect()
    }

    /// True while pages are pinned: some device is attached.
    pub(crate) fn is_live(&self) -> bool {
        self.attached.contains(&true)
    }

    /// See [`Shadow::held`].
    pub(crate) fn held(&self) -> [Vec<bool>; 3] {
        self.pages.held(self.is_live())
    }
}
