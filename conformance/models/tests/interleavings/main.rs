//! Interleavings of two threads in the shared form, on the real engine over a tiny format.
//!
//! The checker (`loom`) runs each model once for every order in which the threads' accesses to
//! memory can take effect, reorderings of weakly ordered processors among them, as far as they need
//! no more than three preemptions. The cells of tables and of `Meta` are its own.
//!
//! | what | models |
//! |---|---|
//! | links | `two_maps_into_a_table_that_is_not_there_yet`, `of_three_missing_tables_two_maps_share_two` |
//! | neighbours | `an_entry_goes_while_its_neighbour_comes`, `two_unmaps_of_neighbours_leave_their_table`, module `resize` |
//! | free | `a_subtree_goes_while_a_page_is_mapped_beside_it`, `an_owner_frees_what_it_emptied_while_a_neighbour_comes` |
//! | reader against free | `a_reader_never_meets_a_table_that_is_used_for_something_else`, module `grow`, by slots; by thread, with a barrier of one side and signals, module `threads` |
//! | lazy flush | module `lazy` |
//! | replay | module `replay` |
//! | hardware that writes | module `dirty` |
//!
//! Operations that run at once have ranges of their own, as the shared form asks for. Interrupts are the
//! subject of `steps`, which stops at every store.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod dirty;
mod grow;
mod lazy;
mod replay;
mod resize;
mod threads;
mod tiny;

use std::sync::Arc;

use iopt::reclaim::Slots;
use iopt::{Gather, Prot, SharedTable, Table, TableMapError, TableOps as _};
use loom::thread;
use runs::Span;

use tiny::{LoomCell, TINY, Tables, Tiny};

const PAGE: u64 = 4096;

type Shared<const GROWS: bool = false> = SharedTable<Tiny<GROWS>, Arc<Tables>, Slots<LoomCell, 2>>;

fn shared(memory: &Arc<Tables>) -> Arc<Shared> {
    let table = Table::new(TINY, Arc::clone(memory)).unwrap();
    Arc::new(SharedTable::with_reclaim(table, Slots::default()))
}

fn map<const GROWS: bool>(
    table: &Shared<GROWS>,
    page: u64,
    pages: u64,
) -> Result<(), TableMapError> {
    table.enter().map(
        page * PAGE,
        &[Span::new((16 + page) * PAGE, pages * PAGE)],
        Prot::RW,
    )
}

/// Owns the pages that it removes.
fn unmap<const GROWS: bool>(table: &Shared<GROWS>, page: u64, pages: u64) -> u64 {
    unmap_owning(table, page, pages, (page, pages))
}

/// Owns more.
fn unmap_owning<const GROWS: bool>(
    table: &Shared<GROWS>,
    page: u64,
    pages: u64,
    owned: (u64, u64),
) -> u64 {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let bytes = table
        .owning(Span::new(owned.0 * PAGE, owned.1 * PAGE))
        .unmap_mapped(range, &mut gather, &mut iopt::NoRuns)
        .unwrap();
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    bytes
}

/// State of each page: mapped to its own frame, or not at all.
fn pages<const GROWS: bool>(table: &Shared<GROWS>) -> Vec<bool> {
    (0..8)
        .map(|page| match table.enter().translate(page * PAGE) {
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
    let mut gather = Gather::new();
    let all = Span::new(0, (1 << (table.root().levels + 12)).min(8 * PAGE));
    table.give_back_empty_tables(all, &mut gather).unwrap();
    table.reclaim(gather.never_walked());
    // Leaf by leaf, every table but the root goes.
    while let Some(leaf) = table.leaves(Span::new(0, 8 * PAGE)).next() {
        let mut gather = Gather::new();
        let range = leaf.run.input();
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        table.reclaim(gather.never_walked());
    }
    assert_eq!((table.tables(), memory.free()), (1, total - 1));
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    model_of(3, f);
}

/// A model of so many preemptions at most.
fn model_of(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
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
fn of_three_missing_tables_two_maps_share_two() {
    model(|| {
        // Two of the upper level, which both need, and one of the lower for each.
        let memory = Tables::new(7, false);
        let table = shared(&memory);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || map(&other, 1, 1).unwrap());
        map(&table, 2, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [0, 1, 1, 0, 0, 0, 0, 0], 7);
    });
}

#[test]
fn an_entry_goes_while_its_neighbour_comes() {
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
fn two_unmaps_of_neighbours_leave_their_table() {
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
fn a_subtree_goes_while_a_page_is_mapped_beside_it() {
    model(|| {
        let memory = Tables::new(8, true);
        let table = shared(&memory);
        map(&table, 1, 2).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || assert_eq!(unmap(&other, 0, 4), 2 * PAGE));
        map(&table, 4, 1).unwrap();
        thread.join().unwrap();
        // Its tables are free at once, but for the neighbour's own.
        assert!(table.poll());
        assert_eq!(memory.free(), 8 - 3);
        finish(table, &memory, [0, 0, 0, 0, 1, 0, 0, 0], 8);
    });
}

#[test]
fn an_owner_frees_what_it_emptied_while_a_neighbour_comes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 1, 1).unwrap();
        let other = Arc::clone(&table);
        // Both pages of the lowest table are its own, and page 2 hangs from the same table above.
        let thread = thread::spawn(move || unmap_owning(&other, 1, 1, (0, 2)));
        map(&table, 2, 1).unwrap();
        assert_eq!(thread.join().unwrap(), PAGE);
        assert!(table.poll());
        assert_eq!(memory.free(), 6 - 3);
        finish(table, &memory, [0, 0, 1, 0, 0, 0, 0, 0], 6);
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
            let found = other.enter().translate(0);
            assert!(found.is_none() || found == Some(16 * PAGE), "{found:x?}");
        });
        assert_eq!(unmap_owning(&table, 0, 1, (0, 8)), PAGE);
        // Needs the two tables that were just unlinked: it may have to wait for the reader.
        while let Err(error) = map(&table, 7, 1) {
            assert!(matches!(error, TableMapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        finish(table, &memory, [0, 0, 0, 0, 0, 0, 0, 1], 3);
    });
}
