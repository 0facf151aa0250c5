//! How often the engine goes down the tables, counted.

use iopt::format::{ArmStage1, K4, VtdSs};
use iopt::observe::{Counted, TableCounters};
use iopt::{Gather, HeapTables, Prot, Table, TableOps as _};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

fn memory() -> Counted<HeapTables> {
    Counted::new(HeapTables::with_tables(64).unwrap())
}

fn descents(memory: &Counted<HeapTables>) -> u64 {
    memory.take().descents
}

/// The worked example of the series that brought calls for counts of pages: 4 MiB as two pages of
/// 2 MiB at 0. It took four calls and two walks to unmap them page by page.
#[test]
fn four_mebibytes_at_0_are_one_call_and_one_descent_where_they_were_two_of_each() {
    let memory = memory();
    let format = ArmStage1::<K4>::new(48, 48).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let mut gather = Gather::new();

    // As it was: a call for each page, and a walk in each call.
    for page in 0..2 {
        table
            .map_pages(page * M2, Span::new(8 * G1 + page * M2, M2), 1, Prot::RW)
            .result
            .unwrap();
    }
    memory.take();
    for page in 0..2 {
        let unmapped = table.unmap_pages(page * M2, M2, 1, &mut gather);
        assert_eq!(unmapped.bytes, M2);
    }
    assert_eq!(descents(&memory), 2);
    table.reclaim(std::mem::take(&mut gather).never_walked());

    // The narrow call: once down for both.
    assert_eq!(
        table.map_pages(0, Span::new(8 * G1, M2), 2, Prot::RW).bytes,
        2 * M2
    );
    memory.take();
    assert_eq!(table.unmap_pages(0, M2, 2, &mut gather).bytes, 2 * M2);
    let unmapped = memory.take();
    assert_eq!(unmapped.descents, 1);
    // Root, two levels above the leaves' table that have one entry each, and that table.
    assert_eq!(gather.tables(), 2);
    table.reclaim(std::mem::take(&mut gather).never_walked());

    // The wide call says the same in other words.
    table
        .map(0, &[Span::new(8 * G1, 2 * M2)], Prot::RW)
        .unwrap();
    memory.take();
    table
        .unmap(Span::new(0, 2 * M2), &mut gather, &mut iopt::NoRuns)
        .unwrap();
    let wide = memory.take();
    assert_eq!(wide.descents, 1);
    assert_eq!(wide.entry_stores, unmapped.entry_stores);
    assert_eq!(gather.invalidation().ranges(), [Span::new(0, 2 * M2)]);
    table.reclaim(gather.never_walked());
    assert_eq!(memory.inner().in_use(), 1);
}

#[test]
fn descents_do_not_depend_on_how_many_pages_there_are() {
    let memory = memory();
    let small = PageSizes::from_bits(PAGE);
    let mut table = Table::with_page_sizes(VtdSs::new(4).unwrap(), &memory, small).unwrap();
    for pages in [2, 512, 513, 5000] {
        let range = Span::new(G1 - 200 * PAGE, pages * PAGE);
        memory.take();
        table
            .map(range.start, &[Span::new(8 * G1, range.len)], Prot::RW)
            .unwrap();
        // Once to look, once to store.
        assert_eq!(descents(&memory), 2, "{pages}");
        let mut gather = Gather::new();
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        assert_eq!(descents(&memory), 1, "{pages}");
        table.reclaim(gather.never_walked());
    }
    // A single page whose tables are there: once to look and store.
    table
        .map(PAGE, &[Span::new(8 * G1, PAGE)], Prot::RW)
        .unwrap();
    memory.take();
    table.map(0, &[Span::new(9 * G1, PAGE)], Prot::RW).unwrap();
    assert_eq!(
        memory.take(),
        TableCounters {
            descents: 1,
            table_reads: 4,
            entry_stores: 1
        }
    );
    assert_eq!(table.translate(5), Some(9 * G1 + 5));
    assert_eq!(memory.take().table_reads, 4);
    // So are pages of one table.
    let (few, mut gather) = (Span::new(2 * PAGE, 100 * PAGE), Gather::new());
    table
        .map(few.start, &[Span::new(10 * G1, few.len)], Prot::RW)
        .unwrap();
    let stores = |entry_stores| TableCounters {
        descents: 1,
        table_reads: 4,
        entry_stores,
    };
    assert_eq!(memory.take(), stores(100));
    table.unmap(few, &mut gather, &mut iopt::NoRuns).unwrap();
    assert_eq!(memory.take(), stores(100));
    let _ = gather.never_walked();
}

#[test]
fn every_entry_that_is_stored_counts_once() {
    let memory = memory();
    let small = PageSizes::from_bits(PAGE);
    let mut table = Table::with_page_sizes(VtdSs::new(4).unwrap(), &memory, small).unwrap();
    assert_eq!(memory.take().entry_stores, 512, "the root");
    // Three new tables, and the entry that leads to the highest.
    table.map(0, &[Span::new(8 * G1, PAGE)], Prot::RW).unwrap();
    assert_eq!(memory.take().entry_stores, 3 * 512 + 1);
    // 511 entries in the table that is there, one new table behind it, and its link.
    table
        .map(PAGE, &[Span::new(8 * G1, 520 * PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(memory.take().entry_stores, 511 + 512 + 1);
    let mut gather = Gather::new();
    let range = Span::new(3 * PAGE, 4 * PAGE);
    table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
    assert_eq!(memory.take().entry_stores, 4);
    // The holes do not count, nor the table that goes as a whole, but the entry that led to it.
    let range = Span::new(2 * PAGE, 1022 * PAGE);
    table
        .unmap_mapped(range, &mut gather, &mut iopt::NoRuns)
        .unwrap();
    assert_eq!(memory.take().entry_stores, 506 + 1);
    table.reclaim(gather.never_walked());
}
