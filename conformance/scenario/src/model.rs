//! The shadow model: what every page of device addresses is to lead to, and what follows from it.

use std::ops::Range;

use crate::scene::Expect;

/// A page in an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// The page of memory, counted through all memories.
    pub(crate) memory: u32,
    pub(crate) write: bool,
    pub(crate) out: bool,
    pub(crate) released: bool,
}

impl Page {
    /// Devices reach it.
    pub(crate) const fn is_there(&self) -> bool {
        !self.out && !self.released
    }

    fn expect(self) -> Expect {
        let Self { memory, write, .. } = self;
        match self.is_there() {
            true => Expect::Mapped {
                page: memory,
                write,
            },
            false => Expect::Hole,
        }
    }
}

/// All pages of device addresses, and which devices are attached.
pub(crate) struct Model {
    pub(crate) pages: Vec<Option<Page>>,
    pub(crate) attached: Vec<bool>,
    /// Pages of all memories.
    memory: usize,
}

impl Model {
    pub(crate) fn new(pages: usize, memory: usize, devices: usize) -> Self {
        Self {
            pages: vec![None; pages],
            attached: vec![false; devices],
            memory,
        }
    }

    /// What devices may expect at `page`.
    pub(crate) fn expect(&self, page: usize) -> Expect {
        self.pages[page].map_or(Expect::Hole, Page::expect)
    }

    pub(crate) fn is_free(&self, range: Range<usize>) -> bool {
        self.pages[range].iter().all(Option::is_none)
    }

    /// Changes those pages of `range` that are in an area.
    pub(crate) fn change(&mut self, range: Range<usize>, change: impl Fn(&mut Page)) {
        self.pages[range].iter_mut().flatten().for_each(change);
    }

    /// The pages that lead to one of `memory`.
    pub(crate) fn over(&self, memory: &[Range<usize>]) -> Vec<usize> {
        let hit = |page: &Option<Page>| {
            page.is_some_and(|page| {
                memory
                    .iter()
                    .any(|run| run.contains(&(page.memory as usize)))
            })
        };
        (0..self.pages.len())
            .filter(|n| hit(&self.pages[*n]))
            .collect()
    }

    /// True while pages are pinned: some device is attached.
    pub(crate) fn is_live(&self) -> bool {
        self.attached.contains(&true)
    }

    /// By page of memory: whether it is pinned, and whether it is charged, at least and at most.
    ///
    /// What is released keeps its charge for its return. What is taken out besides keeps it or not: that
    /// depends on which came first, and nobody is promised it.
    pub(crate) fn held(&self) -> [Vec<bool>; 3] {
        let mut held = [(); 3].map(|()| vec![false; self.memory]);
        if self.is_live() {
            for page in self.pages.iter().flatten() {
                let here = [page.is_there(), !page.out, !page.out || page.released];
                for (held, here) in held.iter_mut().zip(here) {
                    held[page.memory as usize] |= here;
                }
            }
        }
        held
    }
}
