//! The smallest table there can be, and memory for it whose cells are the checker's.

use std::sync::Arc;

use iopt::format::Entry;
use iopt::{Aperture, Cell, Chain, Format, FormatId, Meta, NoTables, Prot, Reserve, TableMemory};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use runs::PageSizes;

use super::threads::access;

/// The device may write.
pub(crate) const WRITABLE: u64 = 1 << 4;
/// Bits that hardware sets.
pub(crate) const ACCESSED: u64 = 1 << 2;
pub(crate) const DIRTY: u64 = 1 << 3;

/// Two entries a table, three levels: eight pages of 4 KiB, with leaves of one, two and four. One
/// with `GROWS` has two levels at first, or three.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tiny<const GROWS: bool = false> {
    pub(crate) levels: u8,
}

pub(crate) const TINY: Tiny = Tiny { levels: 3 };

impl<const GROWS: bool> Format for Tiny<GROWS> {
    const ID: FormatId = FormatId::VtdSs;
    const ENTRY_BYTES: usize = 8;
    const TABLE_BYTES: u64 = 16;
    const GRANULE_LOG2: u32 = 12;
    const MIN_LEVELS: u8 = if GROWS { 2 } else { 3 };
    const MAX_LEVELS: u8 = 3;
    const OUTPUT_BITS: u32 = 40;
    const HARDWARE_BITS: u64 = ACCESSED | DIRTY;
    const ACCESSED: u64 = ACCESSED;
    const GROWS: bool = GROWS;

    fn grown_to(self, levels: u8) -> Option<Self> {
        (2..=3).contains(&levels).then_some(Self { levels })
    }
    fn levels(&self) -> u8 {
        self.levels
    }
    fn aperture(&self) -> Aperture {
        Aperture::zeros(12 + u32::from(self.levels))
    }
    fn shift(level: usize) -> u32 {
        12 + level as u32
    }
    fn entries(&self, _level: usize) -> usize {
        2
    }
    fn leaf_sizes(level: usize) -> PageSizes {
        PageSizes::from_log2(Self::shift(level))
    }
    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        let writable = prot.contains(Prot::WRITE);
        Some(1 | if writable { WRITABLE } else { 0 })
    }
    fn prot(&self, _level: usize, word: u64) -> Prot {
        let writable = word & WRITABLE != 0;
        if writable { Prot::RW } else { Prot::READ }
    }
    fn keeps_dirty(&self) -> bool {
        true
    }
    fn is_dirty(word: u64) -> bool {
        word & DIRTY != 0
    }
    fn cleaned(word: u64) -> u64 {
        word & !DIRTY
    }
    fn dirtied(word: u64) -> u64 {
        word | DIRTY
    }
    fn leaf(_level: usize, pa: u64, _log2: u32, bits: u64) -> u64 {
        pa | bits
    }
    fn stride(log2: u32) -> u64 {
        1 << log2
    }
    fn table(&self, _level: usize, table: u64) -> u64 {
        table | 2
    }
    fn is_empty(word: u64) -> bool {
        word == 0
    }
    fn decode(level: usize, word: u64) -> Entry {
        match word & 3 {
            0 => Entry::Empty,
            1 => Entry::Leaf {
                pa: word & !0xfff,
                log2: Self::shift(level),
            },
            _ => Entry::Table(word & !0xf),
        }
    }
}

#[derive(Default)]
pub(crate) struct LoomCell(AtomicU64);

impl Cell for LoomCell {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        access();
        self.0.load(Ordering::Relaxed)
    }
    fn get_acquire(&self) -> u64 {
        access();
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, word: u64) {
        access();
        self.0.store(word, Ordering::Relaxed);
    }
    fn set_release(&self, word: u64) {
        access();
        self.0.store(word, Ordering::Release);
    }
    fn exchange(&self, word: u64) -> u64 {
        access();
        self.0.swap(word, Ordering::AcqRel)
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        access();
        self.0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// A few tables: their cells, their metas, and a list of those that are free.
pub(crate) struct Tables {
    cells: Vec<[LoomCell; 2]>,
    metas: Vec<Meta<LoomCell, LoomCell>>,
    free: Mutex<Chain>,
    /// Garbage in every table that was used before: what a reader that comes too late would meet.
    garbage: bool,
}

impl Tables {
    pub(crate) fn new(count: u64, garbage: bool) -> Arc<Self> {
        let tables = Self {
            cells: (0..count).map(|_| Default::default()).collect(),
            metas: (0..count).map(|_| Meta::default()).collect(),
            free: Mutex::new(Chain::empty()),
            garbage,
        };
        let mut free = Chain::empty();
        (0..count).rev().for_each(|n| free.push(&tables, n * 16));
        *tables.free.lock().unwrap() = free;
        Arc::new(tables)
    }

    pub(crate) fn free(&self) -> u64 {
        self.free.lock().unwrap().len()
    }
}

impl TableMemory for Tables {
    type Cell = LoomCell;
    type Link = LoomCell;
    type Count = LoomCell;
    const TABLE_BYTES: u64 = 16;

    fn entries(&self, table: u64, count: usize) -> &[LoomCell] {
        &self.cells[table as usize / 16][..count]
    }
    fn meta(&self, table: u64) -> &Meta<LoomCell, LoomCell> {
        &self.metas[table as usize / 16]
    }
    fn last_address(&self) -> u64 {
        self.cells.len() as u64 * 16 - 1
    }
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        let mut free = self.free.lock().unwrap();
        if free.len() < count {
            return Err(NoTables {
                needed: count * 16,
                available: free.len() * 16,
            });
        }
        let mut taken = Chain::empty();
        for _ in 0..count {
            let table = free.pop(self).unwrap();
            taken.push(self, table);
        }
        Ok(Reserve::new(taken))
    }
    fn allocate(&self, _bytes: usize) -> Result<u64, NoTables> {
        Ok(self.free.lock().unwrap().pop(self).unwrap())
    }
    fn give_back(&self, mut reserve: Reserve) {
        while let Some((table, _)) = reserve.take(self) {
            self.free.lock().unwrap().push(self, table);
        }
    }
    fn reclaim(&self, mut chain: Chain) {
        let mut free = self.free.lock().unwrap();
        while let Some(table) = chain.pop(self) {
            if self.garbage {
                // A leaf that was never mapped.
                self.entries(table, 2)
                    .iter()
                    .for_each(|cell| cell.set(0xbad_0001));
            }
            free.push(self, table);
        }
    }
    fn wait(&self, _round: u32) {
        thread::yield_now();
    }
    // The same in every run of a model.
    fn place(&self) -> usize {
        0
    }
}
