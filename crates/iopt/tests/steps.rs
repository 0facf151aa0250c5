//! Every single store of an operation, looked at from outside.
//!
//! The cells of these tables stop the operation after each store. At each stop a walker that shares
//! nothing with the engine reads the tables as a unit would, and finds for every page of the range
//! its old or its new translation, and for every other page the old one. So there is no moment in
//! which a device sees a table that is not complete, a leaf that was not asked for, or a hole beside
//! the range.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::walk::{Access, BadAddress, WalkMemory, Walker};
use iopt::{Arena, AtomicMeta, Cell, Format, Gather, Prot, Storage, Table, TableMemory};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;

type Stop = Box<dyn FnMut()>;

thread_local! {
    /// Called after each store.
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
}

/// A cell that stops after each store.
#[derive(Default)]
#[repr(transparent)]
struct Stepped(AtomicU64);

impl Stepped {
    fn stored(&self) {
        // Taken out meanwhile, so that what the stop does itself is not stopped at.
        if let Some(mut stop) = STOP.with(|slot| slot.borrow_mut().take()) {
            stop();
            STOP.with(|slot| *slot.borrow_mut() = Some(stop));
        }
    }
}

impl Cell for Stepped {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn get_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
        self.stored();
    }
    fn set_release(&self, word: u64) {
        self.0.store(word, Ordering::Release);
        self.stored();
    }
    fn exchange(&self, word: u64) -> u64 {
        let old = self.0.swap(word, Ordering::AcqRel);
        self.stored();
        old
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        let result = self
            .0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        self.stored();
        result.map(|_| ())
    }
}

struct Memory {
    cells: Box<[Stepped]>,
    metas: Box<[AtomicMeta]>,
}

// SAFETY: boxed slices stay where they are, and nobody else can reach them.
unsafe impl Storage for Memory {
    type Cell = Stepped;

    fn cells(&self) -> &[Stepped] {
        &self.cells
    }
    fn metas(&self) -> &[AtomicMeta] {
        &self.metas
    }
}

struct Tables(Arena<Memory>);

impl Tables {
    fn new(tables: usize) -> &'static Self {
        let memory = Memory {
            cells: (0..tables * 512).map(|_| Stepped::default()).collect(),
            metas: (0..tables).map(|_| AtomicMeta::default()).collect(),
        };
        // Leaked, so that the stop can look into it.
        Box::leak(Box::new(Self(Arena::new(memory, 1 << 46).unwrap())))
    }
}

impl WalkMemory for Tables {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.0.read(address).ok_or(BadAddress { address })
    }
}

/// What a unit sees at `iova`.
fn seen(tables: &Tables, root: iopt::Root, iova: u64) -> Option<u64> {
    Walker::new(root)
        .walk(tables, iova, Access::Read, &mut ())
        .ok()
        .map(|found| found.pa)
}

struct World<F: Format> {
    tables: &'static Tables,
    table: Table<F, &'static Arena<Memory>>,
    /// Pages that are looked at: all that operations may touch, and some beside them.
    pages: Vec<u64>,
    stops: u64,
}

impl<F: Format> World<F> {
    fn new(format: F, sizes: PageSizes, pages: impl Iterator<Item = u64>) -> Self {
        let tables = Tables::new(256);
        let table = Table::with_page_sizes(format, &tables.0, sizes).unwrap();
        Self {
            tables,
            table,
            pages: pages.collect(),
            stops: 0,
        }
    }

    /// Does `operation`, which makes of every page of `range` what `new` says.
    fn step(
        &mut self,
        range: Span,
        new: impl Fn(u64) -> Option<u64> + 'static,
        operation: impl FnOnce(&mut Table<F, &'static Arena<Memory>>),
    ) {
        let (tables, root) = (self.tables, self.table.root());
        let expected: Vec<_> = self
            .pages
            .iter()
            .map(|&iova| {
                let old = seen(tables, root, iova);
                (
                    iova,
                    old,
                    if range.contains(iova) { new(iova) } else { old },
                )
            })
            .collect();
        let after = expected.clone();
        let stops = std::rc::Rc::new(std::cell::Cell::new(0));
        let counter = std::rc::Rc::clone(&stops);
        let stop = move || {
            counter.set(counter.get() + 1);
            for &(iova, old, new) in &expected {
                let now = seen(tables, root, iova);
                assert!(
                    now == old || now == new,
                    "{iova:#x}: {now:x?}, not {old:x?} or {new:x?}"
                );
            }
        };
        STOP.with(|slot| *slot.borrow_mut() = Some(Box::new(stop)));
        operation(&mut self.table);
        STOP.with(|slot| *slot.borrow_mut() = None);
        for (iova, _, new) in after {
            assert_eq!(seen(tables, root, iova), new, "{iova:#x} afterwards");
        }
        self.stops += stops.get();
    }

    fn map(&mut self, iova: u64, runs: Vec<Span>) {
        let len = runs.iter().map(|run| run.len).sum();
        let of = runs.clone();
        let new = move |at: u64| {
            let mut offset = at - iova;
            for run in &of {
                if offset < run.len {
                    return Some(run.start + offset);
                }
                offset -= run.len;
            }
            None
        };
        self.step(Span::new(iova, len), new, |table| {
            table.map(iova, &runs, Prot::RW).unwrap()
        });
    }

    fn unmap(&mut self, range: Span) {
        self.step(
            range,
            |_| None,
            |table| {
                let mut gather = Gather::new();
                table
                    .unmap_mapped(range, &mut gather, &mut iopt::Discard)
                    .unwrap();
                // Reused at once, with all that is left in them, by what is mapped next.
                table.reclaim(gather.never_walked());
            },
        );
    }
}

fn every_store<F: Format>(format: F) {
    const M2: u64 = 2 << 20;
    const G1: u64 = 1 << 30;
    // Around a boundary of tables of two levels; every page of what is mapped below, one in
    // sixteen of the larger stretches, and pages beside.
    let base = G1 - 2 * M2;
    let near = (0..96).map(move |n| G1 - 48 * PAGE + n * PAGE);
    let wide = (0..4 * 512 / 16).map(move |n| base + n * 16 * PAGE);
    let far = [
        0,
        PAGE,
        base - PAGE,
        G1 + 2 * M2,
        5 * G1,
        6 * G1 - PAGE,
        7 * G1,
    ];
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let mut world = World::new(format, sizes, near.chain(wide).chain(far));

    // New tables on both sides of the boundary, then more pages in them.
    world.map(
        G1 - 20 * PAGE,
        vec![Span::new(9 * G1, 30 * PAGE), Span::new(7 * G1, 10 * PAGE)],
    );
    world.map(G1 + 20 * PAGE, vec![Span::new(11 * G1 + PAGE, 8 * PAGE)]);
    world.map(G1 - 40 * PAGE, vec![Span::new(12 * G1, 16 * PAGE)]);
    // Parts of tables go, and a whole table, and their memory comes back for others.
    world.unmap(Span::new(G1 - 30 * PAGE, 20 * PAGE));
    world.unmap(Span::new(G1, 28 * PAGE));
    world.map(G1, vec![Span::new(13 * G1 + 5 * PAGE, 3 * PAGE)]);
    world.unmap(Span::new(base, 2 * M2));
    // Large leaves with small ones at their ends.
    world.map(
        base - 3 * PAGE,
        vec![Span::new(20 * G1 - 3 * PAGE, M2 + 9 * PAGE)],
    );
    world.map(5 * G1, vec![Span::new(32 * G1, G1)]);
    world.unmap(Span::new(base - 3 * PAGE, M2 + 9 * PAGE));
    world.unmap(Span::new(5 * G1, G1));
    world.unmap(Span::new(G1, M2));
    assert_eq!(world.table.tables(), 1);
    assert!(
        world.stops > 150,
        "only {} stores were looked at",
        world.stops
    );
}

#[test]
fn vtd_ss_shows_the_old_or_the_new_translation_after_every_store() {
    every_store(VtdSs::new(4).unwrap());
}

#[test]
fn x86_64_shows_the_old_or_the_new_translation_after_every_store() {
    every_store(X86_64::new(4).unwrap());
}

#[test]
fn amdv1_shows_the_old_or_the_new_translation_after_every_store() {
    every_store(AmdV1::new(4).unwrap());
}

/// A group of equal entries is right in every entry that is written, and missing in the others.
#[test]
fn amdv1_shows_the_old_or_the_new_translation_after_every_store_of_a_group() {
    const G1: u64 = 1 << 30;
    let pages = (0..600).map(|n| G1 - 256 * PAGE + n * PAGE);
    let all = PageSizes::from_bits(u64::MAX);
    let mut world = World::new(AmdV1::new(4).unwrap(), all, pages);
    let range = Span::new(G1 - 96 * PAGE, 352 * PAGE);
    world.map(range.start, vec![Span::new(9 * G1 - 96 * PAGE, 352 * PAGE)]);
    assert!(world.table.leaves(range).count() < 8);
    world.map(
        G1 + 256 * PAGE,
        vec![Span::new(3 * G1 + 7 * PAGE, 11 * PAGE)],
    );
    world.unmap(range);
    assert!(
        world.stops > 700,
        "only {} stores were looked at",
        world.stops
    );
}

#[test]
fn the_walker_sees_a_table_as_soon_as_it_is_linked() {
    // What this suite relies on: nothing of a table counts before it is linked, and then all does.
    let tables = Tables::new(16);
    let table = Table::new(VtdSs::new(4).unwrap(), &tables.0).unwrap();
    let below = tables.0.allocate(4096).unwrap();
    let cells = tables.0.entries(table.root().address, 512);
    let leaf = 0x1000 | 3 | 1 << 7;
    tables.0.entries(below, 512)[0].set(leaf);
    assert_eq!(seen(tables, table.root(), 0), None);
    cells[0].set(below | 3);
    assert!(
        seen(tables, table.root(), 0).is_none(),
        "a large leaf at an address that is not its"
    );
    tables.0.entries(below, 512)[0].set(0x4000_0000 | 3 | 1 << 7);
    assert_eq!(seen(tables, table.root(), 0), Some(0x4000_0000));
}
