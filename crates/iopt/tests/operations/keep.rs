//! Tables that stay when they are empty.

use iopt::format::{AmdV1, ArmStage2, K4, RiscV, VtdSs, X86_64};
use iopt::{Format, Gather, HeapTables, NoRuns, Prot, SharedTable, Table, TableOps as _};
use runs::Span;

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;

/// Four tables full of pages that cannot be one leaf, since their memory is not aligned alike.
fn full<F: Format>(format: F, memory: &HeapTables) -> Table<F, &HeapTables> {
    let mut table = Table::new(format, memory).unwrap();
    table.keep_empty_tables(true);
    let pages = [Span::new((1 << 30) + PAGE, 4 * M2)];
    table.map(4 * M2, &pages, Prot::RW).unwrap();
    // A neighbour, so that the tables above are not empty.
    table.map(0, &[Span::new(PAGE, PAGE)], Prot::RW).unwrap();
    table
}

fn unmap<F: Format>(table: &mut Table<F, &HeapTables>) {
    let mut gather = Gather::new();
    table
        .unmap(Span::new(4 * M2, 4 * M2), &mut gather, &mut NoRuns)
        .unwrap();
    // No table goes, and no cache of upper levels needs to.
    assert_eq!(gather.tables(), 0);
    assert!(!gather.invalidation().tables_unlinked());
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
}

fn kept_and_replaced<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = full(format, &memory);
    let tables = table.tables();
    let may_be_empty = |table: &Table<F, _>, leaves| {
        let range = Span::new(4 * M2, leaves * M2);
        table.unguarded().may_have_empty_tables(range)
    };
    unmap(&mut table);
    assert!([1, 2, 4].map(|leaves| may_be_empty(&table, leaves)) == [true; 3]);
    assert_eq!((table.tables(), memory.in_use()), (tables, tables));
    assert_eq!(table.translate(4 * M2), None);

    // The next map finds its tables there, with leaves that they can hold.
    let aligned = [Span::new(1 << 30, 4 * M2)];
    table.map(4 * M2, &aligned, Prot::RW).unwrap();
    assert_eq!(table.tables(), tables);
    assert!(
        table
            .leaves(Span::new(4 * M2, 4 * M2))
            .all(|leaf| leaf.run.len < M2)
    );
    assert_eq!(table.translate(5 * M2 + 17), Some((1 << 30) + M2 + 17));
    unmap(&mut table);

    // Large leaves replace all of them, and every one is given back.
    let mut gather = Gather::new();
    table
        .map_anew(4 * M2, &aligned, Prot::RW, &mut gather)
        .unwrap();
    assert_eq!(gather.tables(), 4);
    assert!(gather.invalidation().tables_unlinked());
    assert!(
        table
            .leaves(Span::new(4 * M2, 4 * M2))
            .all(|leaf| leaf.run.len >= M2)
    );
    assert_eq!(table.translate(5 * M2 + 17), Some((1 << 30) + M2 + 17));
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    assert_eq!((table.tables(), memory.in_use()), (tables - 4, tables - 4));
    assert!([1, 2].map(|leaves| may_be_empty(&table, leaves)) == [false; 2]);
    unmap(&mut table);
    assert!([1, 2].map(|leaves| may_be_empty(&table, leaves)) == [false; 2]);

    let mut gather = Gather::new();
    let all = Span::new(0, 1 << 38);
    table
        .unmap(Span::new(0, PAGE), &mut gather, &mut NoRuns)
        .unwrap();
    table.give_back_empty_tables(all, &mut gather).unwrap();
    assert_eq!(table.tables(), 1);
    assert!(!may_be_empty(&table, 4));
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    assert_eq!(memory.in_use(), 1);
}

#[test]
fn large_leaves_replace_kept_tables_and_none_is_lost() {
    kept_and_replaced(AmdV1::new(4).unwrap());
    kept_and_replaced(X86_64::new(4).unwrap());
    kept_and_replaced(VtdSs::new(4).unwrap());
    kept_and_replaced(RiscV::new(3).unwrap());
    kept_and_replaced(ArmStage2::<K4>::new(39, 48).unwrap());
}

#[test]
fn tables_that_were_kept_are_mapped_into_also_when_no_more_are_kept() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = full(VtdSs::new(4).unwrap(), &memory);
    unmap(&mut table);
    table.keep_empty_tables(false);
    let aligned = [Span::new(1 << 30, 4 * M2)];
    table.map(4 * M2, &aligned, Prot::RW).unwrap();
    assert_eq!(table.translate(5 * M2 + 17), Some((1 << 30) + M2 + 17));
}

#[test]
fn a_refused_map_anew_has_given_back_no_table_that_holds_something() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = full(VtdSs::new(4).unwrap(), &memory);
    let mut gather = Gather::new();
    let one = Span::new(4 * M2, PAGE);
    table.unmap(one, &mut gather, &mut NoRuns).unwrap();
    let aligned = [Span::new(1 << 30, 4 * M2)];
    let refused = table.map_anew(4 * M2, &aligned, Prot::RW, &mut gather);
    assert!(refused.is_err());
    assert_eq!(gather.tables(), 0);
    assert_eq!(table.translate(4 * M2 + PAGE), Some((1 << 30) + 2 * PAGE));
    table.reclaim(gather.never_walked());
}

#[test]
fn shared_tables_are_kept_and_replaced_too() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = full(VtdSs::new(4).unwrap(), &memory);
    let tables = table.tables();
    let table = SharedTable::<_, _>::new(table);
    let range = Span::new(4 * M2, 4 * M2);
    let mut gather = Gather::new();
    table
        .enter()
        .unmap(range, &mut gather, &mut NoRuns)
        .unwrap();
    assert_eq!(gather.tables(), 0);
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    assert_eq!(memory.in_use(), tables);
    let mut gather = Gather::new();
    let aligned = [Span::new(1 << 30, 4 * M2)];
    table
        .enter()
        .map_anew(4 * M2, &aligned, Prot::RW, &mut gather)
        .unwrap();
    assert_eq!(gather.tables(), 4);
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    assert_eq!(table.enter().leaf_at(5 * M2).unwrap().run.len, M2);
    assert_eq!(table.into_inner().tables(), tables - 4);
}
