//! Directories: trees that lead from the id of a device, or of a process, to its context.
//!
//! RISC-V IOMMU specification, sections "Device-Directory-Table (DDT)" and "Process-Directory-Table (PDT)".
//! Both are the same tree of pages: the last page of a path holds contexts of some words, the others 512
//! entries with V in bit 0 and the number of the next page in bits 53:10.
//!
//! A new page is complete in memory before the store that links it. The unit caches no entry without V, so
//! it needs no invalidation. Pages stay until the whole tree is given back.

use core::iter;

use iopt::{Cell, NoTables, TABLE_BYTES, TableMemory};

use super::capabilities::{DDTP_PPN, page_number};
use crate::error::NoPlace;

/// Words of a page.
const WORDS: usize = TABLE_BYTES as usize / 8;
/// V.
const VALID: u64 = 1;

/// A tree of contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Directory {
    /// The first page.
    pub(super) root: u64,
    /// How many pages a path has, 1 to 3.
    pub(super) levels: u32,
    /// Bits of an id that choose the context in the last page: its words are 512 through 2^this.
    pub(super) leaf_bits: u32,
}

impl Directory {
    /// A tree of one page.
    pub(super) fn new<M: TableMemory>(
        memory: &M,
        levels: u32,
        leaf_bits: u32,
    ) -> Result<Self, NoTables> {
        Ok(Self {
            root: page(memory)?,
            levels,
            leaf_bits,
        })
    }

    /// How far an id is shifted to the right at a level; level 0 has the contexts.
    const fn shift(&self, level: u32) -> u32 {
        match level {
            0 => 0,
            above => self.leaf_bits + 9 * (above - 1),
        }
    }

    const fn index(&self, id: u32, level: u32) -> usize {
        let bits = if level == 0 { self.leaf_bits } else { 9 };
        (id >> self.shift(level)) as usize & ((1 << bits) - 1)
    }

    /// The page with the context of `id`, or the level at which the path ends.
    fn walk<M: TableMemory>(&self, memory: &M, id: u32) -> Result<u64, u32> {
        let mut at = self.root;
        for level in (1..self.levels).rev() {
            at = follow(memory, at, self.index(id, level)).ok_or(level)?;
        }
        Ok(at)
    }

    fn context<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        page: u64,
        id: u32,
    ) -> Option<&'m [M::Cell]> {
        let words = WORDS >> self.leaf_bits;
        let first = self.index(id, 0) * words;
        cells(memory, page).get(first..first + words)
    }

    /// The words of a context, if there is a page for it.
    pub(super) fn find<'m, M: TableMemory>(&self, memory: &'m M, id: u32) -> Option<&'m [M::Cell]> {
        let page = self.walk(memory, id).ok()?;
        self.context(memory, page, id)
    }

    /// The words of a context, with new pages where they are missing. After an error those that were
    /// linked stay, for the next time.
    pub(super) fn make<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        id: u32,
    ) -> Result<&'m [M::Cell], NoPlace> {
        let mut at = self.root;
        for level in (1..self.levels).rev() {
            let index = self.index(id, level);
            at = match follow(memory, at, index) {
                Some(next) => next,
                None => {
                    let cell = cells(memory, at).get(index).ok_or(NoPlace::Cells(at))?;
                    let next = page(memory)?;
                    cell.set_release(page_number(next) | VALID);
                    memory.written(core::slice::from_ref(cell));
                    next
                }
            };
        }
        self.context(memory, at, id).ok_or(NoPlace::Cells(at))
    }

    /// The contexts for which there are pages, from the id `first` to `last`.
    pub(super) fn contexts<'m, M: TableMemory>(
        self,
        memory: &'m M,
        first: u32,
        last: u32,
    ) -> impl Iterator<Item = (u32, &'m [M::Cell])> + Clone + 'm {
        let mut next = first;
        iter::from_fn(move || {
            while next <= last {
                let id = next;
                match self.walk(memory, id) {
                    Ok(page) => {
                        next += 1;
                        return Some((id, self.context(memory, page, id)?));
                    }
                    Err(level) => next = ((id >> self.shift(level)) + 1) << self.shift(level),
                }
            }
            None
        })
    }

    /// The page at which a path through the first entries has `levels` pages left.
    pub(super) fn below<M: TableMemory>(&self, memory: &M, levels: u32) -> Option<u64> {
        (levels..self.levels).try_fold(self.root, |at, _| follow(memory, at, 0))
    }

    /// Hands all pages to `each`, those below before those above, which may be gone when it returns.
    pub(super) fn for_each_page<M: TableMemory>(&self, memory: &M, each: &mut impl FnMut(u64)) {
        below(memory, self.root, self.levels, each);
    }
}

/// The page to which an entry leads.
fn follow<M: TableMemory>(memory: &M, page: u64, index: usize) -> Option<u64> {
    let word = cells(memory, page).get(index)?.get();
    (word & VALID != 0).then_some((word & DDTP_PPN) << 2)
}

/// A page of zeros, in memory too.
fn page<M: TableMemory>(memory: &M) -> Result<u64, NoTables> {
    let page = memory.allocate(TABLE_BYTES as usize)?;
    memory.written(cells(memory, page));
    Ok(page)
}

fn cells<M: TableMemory>(memory: &M, page: u64) -> &[M::Cell] {
    memory.entries(page, WORDS)
}

/// A page, and what hangs below it.
fn below<M: TableMemory>(memory: &M, page: u64, levels: u32, each: &mut impl FnMut(u64)) {
    if levels > 1 {
        for index in 0..WORDS {
            if let Some(next) = follow(memory, page, index) {
                below(memory, next, levels - 1, each);
            }
        }
    }
    each(page);
}
