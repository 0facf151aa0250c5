//! Stream tables and tables of context descriptors: entries of 64 bytes by number, in one level or two.
//!
//! IHI 0070, sections 3.3.1 "Stream table lookup", 3.3.2 "StreamIDs to Context Descriptors", 5.1 "L1STD" and
//! 5.3 "L1CD". A table of the second level is a page of 64 entries (STRTAB_BASE_CFG.SPLIT = 6,
//! STE.S1Fmt = 0b01); a descriptor of the first level is its address, and bits that make it valid. Such a page
//! is zero, which is 64 invalid entries, before the store that links it, and stays until all of the table
//! goes. The unit may remember that it was not there, so what comes into it is invalidated with the tables that lead
//! there.

use iopt::{Cell, NoTables, TABLE_BYTES, TableMemory};
use runs::{Pa, Span};

use super::entry::{Entry, LOG2};
use crate::error::NoPlace;

/// Entries of a page, as a power of two.
pub(super) const SPLIT: u32 = TABLE_BYTES.ilog2() - LOG2;

/// Where a page is, in a descriptor of the first level.
const PAGE: u64 = ((1 << 52) - 1) & !(TABLE_BYTES - 1);

/// A table of 2^`bits` entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entries {
    pub(super) base: u64,
    pub(super) bits: u32,
    /// Bits beside the address that make a descriptor of the first level valid; `None` where there is one level.
    pub(super) link: Option<u64>,
}

impl Entries {
    /// A table that is there already.
    pub(super) const fn at(base: u64, bits: u32, link: Option<u64>) -> Self {
        let link = if bits > SPLIT { link } else { None };
        Self { base, bits, link }
    }

    /// A table of empty entries.
    pub(super) fn new<M: TableMemory>(
        memory: &M,
        bits: u32,
        link: Option<u64>,
    ) -> Result<Self, NoTables> {
        let table = Self::at(0, bits, link);
        let bytes = table.bytes();
        let base = memory.allocate(bytes as usize)?;
        memory.written(memory.entries(base, bytes as usize / 8));
        Ok(Self { base, ..table })
    }

    /// Bytes of the first level, or of the only one.
    const fn bytes(&self) -> u64 {
        let bytes = match self.link {
            Some(_) => 8 << (self.bits - SPLIT),
            None => 1 << (self.bits + LOG2),
        };
        if bytes < TABLE_BYTES {
            TABLE_BYTES
        } else {
            bytes
        }
    }

    /// The descriptor of a page.
    fn descriptor<'m, M: TableMemory>(&self, memory: &'m M, page: u64) -> Option<&'m M::Cell> {
        memory.entries(self.base + page * 8, 1).first()
    }

    /// A page of entries.
    fn page<M: TableMemory>(&self, memory: &M, page: u64) -> Option<u64> {
        if self.link.is_none() {
            return Some(self.base + page * TABLE_BYTES);
        }
        let word = self.descriptor(memory, page)?.get();
        (word != 0).then_some(word & PAGE)
    }

    fn entry<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        page: u64,
        index: u32,
    ) -> Option<Entry<'m, M>> {
        let place = u64::from(index) % (1 << SPLIT);
        Entry::at(memory, page + (place << LOG2))
    }

    /// An entry, if there is memory for it already. The index is within the table.
    pub(super) fn find<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        index: u32,
    ) -> Option<Entry<'m, M>> {
        let page = self.page(memory, u64::from(index >> SPLIT))?;
        self.entry(memory, page, index)
    }

    /// An entry, with a new page where that is missing. The index is within the table.
    pub(super) fn make<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        index: u32,
    ) -> Result<Entry<'m, M>, NoPlace> {
        let number = u64::from(index >> SPLIT);
        let page = match self.page(memory, number) {
            Some(page) => page,
            None => {
                let cell = self.descriptor(memory, number);
                let cell = cell.ok_or(NoPlace::Cells(self.base))?;
                let page = memory.allocate(TABLE_BYTES as usize)?;
                memory.written(memory.entries(page, TABLE_BYTES as usize / 8));
                cell.set_release(page & PAGE | self.link.unwrap_or(0));
                memory.written(core::slice::from_ref(cell));
                page
            }
        };
        let entry = self.entry(memory, page, index);
        entry.ok_or(NoPlace::Cells(page))
    }

    /// All entries for which there is memory.
    pub(super) fn all<'m, M: TableMemory>(
        self,
        memory: &'m M,
    ) -> impl Iterator<Item = (u32, Entry<'m, M>)> {
        let pages = 1u64 << self.bits.saturating_sub(SPLIT);
        let entries = 1u32 << self.bits.min(SPLIT);
        (0..pages)
            .filter_map(move |number| Some((number, self.page(memory, number)?)))
            .flat_map(move |(number, page)| {
                (0..entries).filter_map(move |n| {
                    let entry = self.entry(memory, page, n)?;
                    Some(((number << SPLIT) as u32 + n, entry))
                })
            })
    }

    /// Hands all memory of the table to `each`.
    pub(super) fn spans<M: TableMemory>(&self, memory: &M, each: &mut impl FnMut(Span<Pa>)) {
        if self.link.is_some() {
            for page in (0..1 << (self.bits - SPLIT)).filter_map(|n| self.page(memory, n)) {
                each(Span::new(page, TABLE_BYTES));
            }
        }
        each(Span::new(self.base, self.bytes()));
    }
}
