//! A shadow model of an address space, page by page, and the generator of random operations on one.
//!
//! The soak holds the software unit to it, `cargo xtask units` the drivers of QEMU's units. A rig makes an operation
//! of the [`Generator`], calls the address space, and applies the [`Change`] to its [`Shadow`]. From the shadow
//! follow what devices may find, what is pinned and what is charged.
//!
//! Memory is counted in pages through all memories of a rig: a page of device addresses leads to one of them.

mod generator;

use std::ops::{Index, IndexMut, Range};

pub use generator::{Generator, Layout, Map, Operation};
use iopt::Prot;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// A page in an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The page of memory.
    pub memory: u32,
    /// Devices may write to it.
    pub write: bool,
    /// It is taken out.
    pub out: bool,
    /// It is released.
    pub released: bool,
}

impl Page {
    /// Devices reach it.
    pub const fn is_there(&self) -> bool {
        !self.out && !self.released
    }

    /// Rights of devices.
    pub const fn prot(&self) -> Prot {
        match self.write {
            true => Prot::RW,
            false => Prot::READ,
        }
    }
}

/// Effect of an operation on the pages of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The page `first` of device addresses, and those behind it, lead to `memory` and those behind it.
    Map {
        /// The first page of device addresses.
        first: usize,
        /// Its page of memory.
        memory: usize,
        /// Devices may write.
        write: bool,
    },
    /// Areas end.
    Unmap,
    /// Areas are taken out.
    TakeOut,
    /// Areas are put back.
    PutBack,
    /// Areas are released.
    Release,
    /// Areas are restored.
    Restore,
}

impl Change {
    /// Changes what is at the page `number`. False when an area was in the way of a map, which must have been
    /// refused.
    #[must_use]
    pub const fn apply(self, number: usize, there: &mut Option<Page>) -> bool {
        let free = there.is_none();
        match (self, there) {
            (
                Self::Map {
                    first,
                    memory,
                    write,
                },
                there,
            ) => {
                *there = Some(Page {
                    memory: (memory + (number - first)) as u32,
                    write,
                    out: false,
                    released: false,
                });
                return free;
            }
            (Self::Unmap, there) => *there = None,
            (_, None) => {}
            (Self::TakeOut, Some(page)) => page.out = true,
            (Self::PutBack, Some(page)) => page.out = false,
            (Self::Release, Some(page)) => page.released = true,
            (Self::Restore, Some(page)) => page.released = false,
        }
        true
    }
}

/// All pages of device addresses, by number.
#[derive(Clone, Debug)]
pub struct Shadow {
    pages: Vec<Option<Page>>,
    /// Pages of all memories.
    memory: usize,
}

impl Index<usize> for Shadow {
    type Output = Option<Page>;

    fn index(&self, page: usize) -> &Option<Page> {
        &self.pages[page]
    }
}

impl IndexMut<usize> for Shadow {
    fn index_mut(&mut self, page: usize) -> &mut Option<Page> {
        &mut self.pages[page]
    }
}

impl Shadow {
    /// Without areas.
    pub fn new(pages: usize, memory: usize) -> Self {
        Self {
            pages: vec![None; pages],
            memory,
        }
    }

    /// How many pages there are.
    pub const fn len(&self) -> usize {
        self.pages.len()
    }

    /// True when there are none.
    pub const fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// All pages in order.
    pub fn iter(&self) -> impl Iterator<Item = &Option<Page>> {
        self.pages.iter()
    }

    /// Nothing is in the way of a map.
    pub fn is_free(&self, pages: Range<usize>) -> bool {
        self.pages[pages].iter().all(Option::is_none)
    }

    /// The page leads to one of `memory`.
    pub fn leads_to(&self, page: usize, memory: &[Range<usize>]) -> bool {
        self.pages[page].is_some_and(|page| {
            let mut runs = memory.iter();
            runs.any(|run| run.contains(&(page.memory as usize)))
        })
    }

    /// Three bits for each page of memory: it is pinned, it is charged at least, and at most. None is set unless
    /// devices are attached (`live`).
    ///
    /// A released page keeps its charge for its return. One that is taken out besides keeps it or not, by which came
    /// first: that is promised to no caller.
    pub fn held(&self, live: bool) -> [Vec<bool>; 3] {
        let mut held = [(); 3].map(|()| vec![false; self.memory]);
        if live {
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
