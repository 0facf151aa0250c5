//! Maps in several tables at once: planned in all of them before one is filled.
//! (Random sequences in every format: see `model/suite/planned.rs`.)

use std::sync::Arc;

use iopt::observe::Counted;
use iopt::{
    AnyPlanned, AnyTable, Chain, FormatId, HeapTables, NoTables, Prot, TableMapError, TableMemory,
};
use runs::{Pa, PageSizes, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
/// At no multiple of 2 MiB, over the border of two tables of each level but the highest.
const AT: u64 = (1 << 39) - 3 * PAGE;
const RUNS: [Span<Pa>; 3] = [
    Span::new(1 << 32, 2 * PAGE),
    Span::new(1 << 33, M2),
    Span::new((1 << 34) + PAGE, 5 * PAGE),
];
/// Both sides of the border have three tables of their own; the right one another for what is left
/// behind 2 MiB.
const TABLES: u64 = 7;

type Memory = Arc<Counted<HeapTables>>;

fn table(format: FormatId, memory: &Memory) -> AnyTable {
    AnyTable::new(format, 4, PageSizes::from_bits(u64::MAX), memory.clone()).unwrap()
}

#[test]
fn no_table_is_stored_to_before_all_have_planned() {
    let formats = [FormatId::VtdSs, FormatId::AmdV1, FormatId::X86_64];
    // For the last table so many are left: too few each time but the last.
    for left in 0..=TABLES {
        let memories =
            formats.map(|_| Arc::new(Counted::new(HeapTables::with_tables(64).unwrap())));
        let mut tables: Vec<_> = formats
            .iter()
            .zip(&memories)
            .map(|(format, memory)| table(*format, memory))
            .collect();
        let last = memories.last().unwrap();
        let others = last.reserve(64 - last.inner().in_use() - left).unwrap();
        for memory in &memories {
            memory.take();
        }
        let stored = |memory: &Memory| memory.take().entry_stores;
        let planned: Result<Vec<_>, _> = tables
            .iter_mut()
            .map(|table| table.plan_map(AT, &RUNS, Prot::RW, None))
            .collect();
        assert!(memories.iter().all(|memory| stored(memory) == 0));
        let refused = planned
            .and_then(|all| all.into_iter().try_for_each(AnyPlanned::fill))
            .err();
        if left == TABLES {
            assert_eq!(refused, None);
            assert!(memories.iter().all(|memory| stored(memory) > 0));
            for table in &tables {
                assert_eq!(table.translate(AT), Some(1 << 32));
                assert_eq!(table.translate(AT + 3 * PAGE), Some((1 << 33) + PAGE));
                assert_eq!(table.tables(), 1 + TABLES);
            }
        } else {
            let (needed, available) = (TABLES * PAGE, left * PAGE);
            let expected = TableMapError::NoTables(NoTables { needed, available });
            assert_eq!(refused, Some(expected));
            for (memory, table) in memories.iter().zip(&tables).take(2) {
                assert_eq!((memory.inner().in_use(), table.tables()), (1, 1));
                assert_eq!(table.translate(AT), None);
            }
        }
        last.give_back(others);
    }
}

#[test]
fn spare_tables_come_first_and_go_back_when_the_memory_has_too_few_more() {
    let memory = Arc::new(Counted::new(HeapTables::with_tables(64).unwrap()));
    let table = table(FormatId::VtdSs, &memory);
    let mut spare = Chain::empty();
    let mut five = memory.reserve(5).unwrap();
    while let Some((page, _)) = five.take(&memory) {
        spare.push(&memory, page);
    }
    let others = memory.reserve(64 - memory.inner().in_use() - 1).unwrap();
    let refused = table.plan_map(AT, &RUNS, Prot::RW, Some(&mut spare));
    assert!(
        matches!(refused, Err(TableMapError::NoTables(_))),
        "{refused:?}"
    );
    drop(refused);
    assert_eq!((spare.len(), memory.inner().in_use()), (5, 63));
    memory.give_back(others);
    let others = memory.reserve(64 - memory.inner().in_use() - 2).unwrap();
    // Tables of a plan are not available to others.
    let planned = table
        .plan_map(AT, &RUNS, Prot::RW, Some(&mut spare))
        .unwrap();
    assert_eq!(memory.inner().in_use(), 64);
    drop(planned);
    assert_eq!((spare.len(), memory.inner().in_use()), (5, 62));
    let planned = table
        .plan_map(AT, &RUNS, Prot::RW, Some(&mut spare))
        .unwrap();
    planned.fill().unwrap();
    assert_eq!((spare.len(), memory.inner().in_use()), (0, 64));
    assert_eq!(table.translate(AT + 2 * PAGE), Some(1 << 33));
    memory.give_back(others);
}
