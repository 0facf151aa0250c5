//! Arenas that move while tables are in them. That the pointers stay valid is Miri's to say (`cargo xtask miri`).

use std::sync::Arc;

use iopt::format::VtdSs;
use iopt::{
    AnyTable, Arena, ArenaError, AtomicMeta, Gather, HeapTables, NoRuns, Prot, Storage, Table,
    TableOps as _,
};
use runs::Span;

use crate::watched::{Memory, Watched};

const PAGES: Span<runs::Pa> = Span::new(0x7000, 0x3000);

/// Memory that the table owns by value moves with it, and back out of it.
#[test]
fn a_table_that_moves_finds_its_tables() {
    let table = Table::new(VtdSs::new(3).unwrap(), HeapTables::with_tables(16).unwrap());
    let mut table = Box::new(table.unwrap());
    table.map(0x1000, &[PAGES], Prot::RW).unwrap();
    let mut table = *table;
    assert_eq!(table.translate(0x1234), Some(0x7234));
    let mut gather = Gather::new();
    table
        .unmap(Span::new(0x2000, 0x1000), &mut gather, &mut NoRuns)
        .unwrap();
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    let table = AnyTable::from(table);
    assert_eq!(table.translate(0x3000), Some(0x9000));
    assert_eq!(table.translate(0x2000), None);
    table.map(0x2000, &[PAGES], Prot::RW).unwrap_err();
    let again = Span::new(0x8000, 0x1000);
    table.map(0x2000, &[again], Prot::RW).unwrap();
    let any = Box::new(table);
    assert!(any.is_one_run(Span::new(0x1000, 0x3000)));
}

/// Storage of one's own, which owns its memory by boxes as well.
#[test]
fn a_storage_is_dropped_once_with_its_arena() {
    struct Owned(Memory, #[allow(dead_code, reason = "held")] Arc<()>);

    // SAFETY: that of the memory inside.
    #[allow(unsafe_code)]
    unsafe impl Storage for Owned {
        type Cell = Watched;

        fn cells(&self) -> &[Watched] {
            self.0.cells()
        }
        fn metas(&self) -> &[AtomicMeta] {
            self.0.metas()
        }
    }

    let held = Arc::new(());
    let owned = || Owned(Memory::new(), Arc::clone(&held));
    let refused = <Arena<_>>::new(owned(), 4096);
    assert!(matches!(refused, Err(ArenaError::Base { .. })));
    assert_eq!(Arc::strong_count(&held), 1);
    let arena = Box::new(<Arena<_>>::new(owned(), 1 << 46).unwrap());
    let table = Table::new(VtdSs::new(3).unwrap(), Arc::new(arena.on_node(None)));
    let mut table = table.unwrap();
    table.map(0, &[PAGES], Prot::RW).unwrap();
    assert_eq!(table.translate(0x2fff), Some(0x9fff));
    assert_eq!(Arc::strong_count(&held), 2);
    drop(table);
    assert_eq!(Arc::strong_count(&held), 1);
}
