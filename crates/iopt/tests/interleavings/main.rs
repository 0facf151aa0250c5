//! Interleavings of two threads in the shared form, on the real engine over a tiny format.
//!
//! The checker (`loom`) runs each model once for every order in which the threads' accesses to
//! memory can take effect, reorderings of weakly ordered processors among them, as far as they need
//! no more than three preemptions. The cells of tables and of `Meta` are its own.
//!
//! | what | models |
//! |---|---|
//! | publish | `two_maps_into_a_table_that_is_not_there_yet`, `of_two_maps_that_overlap_one_wins_whole`, module `grow` |
//! | empty | `the_last_entry_goes_while_its_neighbour_comes`, `two_unmaps_empty_one_table`, `what_is_mapped_behind_the_back_of_an_unmap_is_left_alone` |
//! | free | `a_subtree_goes_while_a_page_is_mapped_in_it`, module `resize` |
//! | reader against free | `a_reader_never_meets_a_table_that_is_used_for_something_else` |
//! | lazy flush | module `lazy` |
//! | replay | module `replay`; address spaces themselves have one owner (`&mut`), so that only units and other domains meet it |
//! | hardware that writes | module `dirty` |

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
mod tiny;

use std::sync::Arc;

use iopt::{Gather, MapError, Prot, SharedTable, Table};
use loom::thread;
use runs::Span;

use tiny::{TINY, Tables, Tiny};

const PAGE: u64 = 4096;

type Shared<const GROWS: bool = false> = SharedTable<Tiny<GROWS>, Arc<Tables>, 2>;

fn shared(memory: &Arc<Tables>) -> Arc<Shared> {
    Arc::new(SharedTable::new(
        Table::new(TINY, Arc::clone(memory)).unwrap(),
    ))
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
