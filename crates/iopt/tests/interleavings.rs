//! Interleavings of two threads in the shared form, on the real engine over a tiny format.
//!
//! The checker (`loom`) runs each model once for every order in which the threads' accesses to
//! memory can take effect, reorderings of weakly ordered processors among them, as far as they need
//! no more than three preemptions. The cells of tables and of `Meta` are its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[path = "interleavings/dirty.rs"]
mod dirty;

use iopt::format::Entry;
use iopt::{
    Aperture, Cell, Chain, Format, FormatId, Gather, Interruption, Invalidation, MapError, Meta,
    NoTables, Prot, Reserve, SharedTable, Table, TableMemory, UnmapError,
};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use runs::{PageSizes, Run, Span};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// The device may write.
const WRITABLE: u64 = 1 << 4;
/// What hardware sets.
const ACCESSED: u64 = 1 << 2;
const DIRTY: u64 = 1 << 3;

/// Two entries a table, three levels: eight pages of 4 KiB, with leaves of one, two and four. One
/// with `GROWS` has two levels at first, or three.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tiny<const GROWS: bool = false> {
    levels: u8,
}

const TINY: Tiny = Tiny { levels: 3 };

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
struct LoomCell(AtomicU64);

impl Cell for LoomCell {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn get_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
    }
    fn set_release(&self, word: u64) {
        self.0.store(word, Ordering::Release);
    }
    fn exchange(&self, word: u64) -> u64 {
        self.0.swap(word, Ordering::AcqRel)
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// A few tables: their cells, their metas, and a list of those that are free.
struct Tables {
    cells: Vec<[LoomCell; 2]>,
    metas: Vec<Meta<LoomCell, LoomCell>>,
    free: Mutex<Chain>,
    /// Garbage in every table that was used before: what a reader that comes too late would meet.
    garbage: bool,
}

impl Tables {
    fn new(count: u64, garbage: bool) -> Arc<Self> {
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

    fn free(&self) -> u64 {
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
        while let Some((table, _)) = self.take(&mut reserve) {
            self.free.lock().unwrap().push(self, table);
        }
    }
    fn reclaim(&self, mut chain: Chain) {
        let mut free = self.free.lock().unwrap();
        while let Some(table) = chain.pop(self) {
            if self.garbage {
                // A leaf that nobody has mapped.
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

type Shared<const GROWS: bool = false> = SharedTable<Tiny<GROWS>, Arc<Tables>, 2>;

fn shared(memory: &Arc<Tables>) -> Arc<Shared> {
    Arc::new(SharedTable::new(
        Table::new(TINY, Arc::clone(memory)).unwrap(),
    ))
}

/// Of two levels, which can become three.
fn growing(memory: &Arc<Tables>) -> Arc<Shared<true>> {
    let format = Tiny::<true> { levels: 2 };
    Arc::new(SharedTable::new(
        Table::new(format, Arc::clone(memory)).unwrap(),
    ))
}

/// The gather of a growth always has the unit told of the new root.
fn grow(table: &Shared<true>) {
    let mut gather = Gather::new();
    let root = table.grow(3, &mut gather).unwrap();
    let flushed = gather.flush_with(|what| {
        assert!(what.new_root().is_none_or(|new| new == root));
        Ok::<_, ()>(())
    });
    table.reclaim(flushed.unwrap());
}

fn map<const GROWS: bool>(table: &Shared<GROWS>, page: u64, pages: u64) -> Result<(), MapError> {
    table.map(
        page * PAGE,
        &[Span::new((16 + page) * PAGE, pages * PAGE)],
        Prot::RW,
    )
}

fn unmap<const GROWS: bool>(table: &Shared<GROWS>, page: u64, pages: u64) -> u64 {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let bytes = table
        .unmap_mapped(range, &mut gather, &mut iopt::Discard)
        .unwrap();
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    bytes
}

fn split(table: &Shared, page: u64, pages: u64) {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let flush = |_: &Invalidation| Ok::<_, ()>(());
    table
        .split(range, PAGE, Interruption::Refused, &mut gather, flush)
        .unwrap();
}

fn merge(table: &Shared, page: u64, pages: u64) {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let flush = |_: &Invalidation| Ok::<_, ()>(());
    table
        .merge(range, Interruption::Refused, &mut gather, flush)
        .unwrap();
}

/// Unmaps a page, unless it lies in a larger leaf.
fn unmap_page(table: &Shared, page: u64) -> bool {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, PAGE);
    let result = table.unmap(range, &mut gather, &mut iopt::Discard);
    assert!(matches!(
        result,
        Ok(()) | Err(UnmapError::InsideLeaf { .. })
    ));
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    result.is_ok()
}

/// What is mapped, page by page; every page is mapped to its own frame or not at all.
fn pages<const GROWS: bool>(table: &Shared<GROWS>) -> Vec<bool> {
    (0..8)
        .map(|page| match table.translate(page * PAGE) {
            None => false,
            Some(pa) => {
                assert_eq!(pa, (16 + page) * PAGE);
                true
            }
        })
        .collect()
}

/// The table holds `expected`, its tables are as many as it needs, and all others are free.
fn finish<const GROWS: bool>(
    table: Arc<Shared<GROWS>>,
    memory: &Arc<Tables>,
    expected: [u8; 8],
    total: u64,
) {
    assert_eq!(pages(&table), expected.map(|page| page == 1));
    assert!(table.poll());
    let mut table = Arc::into_inner(table).unwrap().into_inner();
    assert_eq!(memory.free() + table.tables(), total);
    // The counts of live entries are right: leaf by leaf, every table but the root goes.
    while let Some(leaf) = table.leaves(Span::new(0, 8 * PAGE)).next() {
        let mut gather = Gather::new();
        let range = leaf.run.input();
        table.unmap(range, &mut gather, &mut iopt::Discard).unwrap();
        table.reclaim(gather.never_walked());
    }
    assert_eq!((table.tables(), memory.free()), (1, total - 1));
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 100_000;
    builder.check(f);
}

#[test]
fn two_maps_into_a_table_that_is_not_there_yet() {
    model(|| {
        let memory = Tables::new(6, false);
        let table = shared(&memory);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || map(&other, 0, 1).unwrap());
        map(&table, 1, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [1, 1, 0, 0, 0, 0, 0, 0], 6);
    });
}

#[test]
fn of_two_maps_that_overlap_one_wins_whole() {
    model(|| {
        let memory = Tables::new(8, false);
        let table = shared(&memory);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || map(&other, 1, 2).is_ok());
        let mine = map(&table, 2, 3).is_ok();
        let theirs = thread.join().unwrap();
        assert!(mine != theirs);
        let expected = if mine {
            [0, 0, 1, 1, 1, 0, 0, 0]
        } else {
            [0, 1, 1, 0, 0, 0, 0, 0]
        };
        finish(table, &memory, expected, 8);
    });
}

#[test]
fn the_last_entry_goes_while_its_neighbour_comes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || assert_eq!(unmap(&other, 0, 1), PAGE));
        map(&table, 1, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [0, 1, 0, 0, 0, 0, 0, 0], 6);
    });
}

#[test]
fn two_unmaps_empty_one_table() {
    model(|| {
        let memory = Tables::new(4, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        map(&table, 1, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || assert_eq!(unmap(&other, 0, 1), PAGE));
        assert_eq!(unmap(&table, 1, 1), PAGE);
        thread.join().unwrap();
        finish(table, &memory, [0; 8], 4);
    });
}

#[test]
fn a_subtree_goes_while_a_page_is_mapped_in_it() {
    model(|| {
        let memory = Tables::new(8, true);
        let table = shared(&memory);
        map(&table, 1, 2).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || unmap(&other, 0, 4));
        map(&table, 3, 1).unwrap();
        let removed = thread.join().unwrap();
        // The new page was mapped before the unmap, or after it.
        let there = u8::from(removed == 2 * PAGE);
        assert!(removed == 2 * PAGE || removed == 3 * PAGE);
        finish(table, &memory, [0, 0, 0, there, 0, 0, 0, 0], 8);
    });
}

#[test]
fn a_reader_never_meets_a_table_that_is_used_for_something_else() {
    model(|| {
        let memory = Tables::new(3, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || {
            // Page 0 is mapped to its frame or not at all, whatever its old tables are used for.
            let found = other.translate(0);
            assert!(found.is_none() || found == Some(16 * PAGE), "{found:x?}");
        });
        assert_eq!(unmap(&table, 0, 1), PAGE);
        // Needs the two tables that were just unlinked: it may have to wait for the reader.
        while let Err(error) = map(&table, 7, 1) {
            assert!(matches!(error, MapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        finish(table, &memory, [0, 0, 0, 0, 0, 0, 0, 1], 3);
    });
}

#[test]
fn what_is_mapped_behind_the_back_of_an_unmap_is_left_alone() {
    model(|| {
        let memory = Tables::new(8, true);
        let table = shared(&memory);
        map(&table, 4, 1).unwrap();
        let other = Arc::clone(&table);
        // A table that is not there when the unmap looks, and soon holds a neighbour of its range.
        let thread = thread::spawn(move || {
            map(&other, 1, 1).unwrap();
            map(&other, 0, 1).unwrap();
        });
        let removed = unmap(&table, 1, 4);
        thread.join().unwrap();
        assert!(removed == PAGE || removed == 2 * PAGE);
        let there = u8::from(removed == PAGE);
        finish(table, &memory, [1, there, 0, 0, 0, 0, 0, 0], 8);
    });
}

#[test]
fn the_top_grows_while_a_page_is_mapped_below_the_old_root() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        let other = Arc::clone(&table);
        // The old root is empty when the growth begins, or not: then it stays.
        let thread = thread::spawn(move || grow(&other));
        map(&table, 1, 1).unwrap();
        assert_eq!(table.translate(PAGE), Some(17 * PAGE));
        thread.join().unwrap();
        map(&table, 4, 4).unwrap();
        finish(table, &memory, [0, 1, 0, 0, 1, 1, 1, 1], 6);
    });
}

#[test]
fn the_top_grows_while_the_old_root_loses_its_last_page() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 2, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || grow(&other));
        assert_eq!(unmap(&table, 2, 1), PAGE);
        thread.join().unwrap();
        finish(table, &memory, [0; 8], 6);
    });
}

#[test]
fn the_top_grows_while_all_of_the_old_root_is_unmapped() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 0, 4).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || grow(&other));
        assert_eq!(unmap(&table, 0, 4), 4 * PAGE);
        thread.join().unwrap();
        finish(table, &memory, [0; 8], 6);
    });
}

#[test]
fn two_threads_grow_the_top_once() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 3, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            grow(&other);
            map(&other, 4, 1).unwrap();
        });
        grow(&table);
        map(&table, 7, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [0, 0, 0, 1, 1, 0, 0, 1], 6);
    });
}

#[test]
fn a_reader_finds_what_is_mapped_while_the_top_grows() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 0, 1).unwrap();
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || {
            assert_eq!(other.translate(0), Some(16 * PAGE));
            let above = other.translate(5 * PAGE);
            assert!(above.is_none() || above == Some(21 * PAGE), "{above:x?}");
        });
        grow(&table);
        map(&table, 5, 1).unwrap();
        reader.join().unwrap();
        finish(table, &memory, [1, 0, 0, 0, 0, 1, 0, 0], 6);
    });
}

#[test]
fn a_leaf_is_split_while_a_page_of_it_goes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 0, 2).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || split(&other, 0, 2));
        let gone = unmap_page(&table, 1);
        thread.join().unwrap();
        finish(table, &memory, [1, u8::from(!gone), 0, 0, 0, 0, 0, 0], 6);
    });
}

#[test]
fn pages_become_one_leaf_while_one_of_them_goes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        map(&table, 1, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || merge(&other, 0, 2));
        let gone = unmap_page(&table, 1);
        thread.join().unwrap();
        finish(table, &memory, [1, u8::from(!gone), 0, 0, 0, 0, 0, 0], 6);
    });
}

#[test]
fn a_reader_sees_no_hole_while_leaves_are_split_and_merged() {
    model(|| {
        // Too few tables for both states: that of the merge is used again at once.
        let memory = Tables::new(4, true);
        let table = shared(&memory);
        map(&table, 0, 2).unwrap();
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || {
            for page in [0, 1] {
                assert_eq!(other.translate(page * PAGE), Some((16 + page) * PAGE));
            }
        });
        split(&table, 0, 2);
        merge(&table, 0, 2);
        while let Err(error) = map(&table, 2, 1) {
            assert!(matches!(error, MapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        finish(table, &memory, [1, 1, 1, 0, 0, 0, 0, 0], 4);
    });
}
