//! Lazy flushing: several unmaps in one gather, and a unit that goes on with what it has cached until it is
//! told to forget it.

use iopt::{Cell as _, TableMemory as _, TableOps as _};
use loom::sync::Mutex;

use super::*;

/// The table of the lowest level in which page 0 is, as a unit keeps it after a walk.
fn cached(memory: &Tables, table: &Shared) -> u64 {
    let below = |table: u64| memory.entries(table, 2)[0].get_acquire() & !0xf;
    below(below(table.enter().root().address))
}

/// Owns the half in which the page lies.
fn unmap_lazily(table: &Shared, page: u64, gather: &mut Gather) {
    let range = Span::new(page * PAGE, PAGE);
    table
        .owning(Span::new(page / 4 * 4 * PAGE, 4 * PAGE))
        .unmap_mapped(range, gather, &mut iopt::NoRuns)
        .unwrap();
}

/// The unit's result for page 0 in the table that it has cached: its frame, or nothing, but never what
/// the table is used for afterwards.
fn access(memory: &Tables, cache: &Mutex<Option<u64>>) {
    // A flush waits for accesses under way.
    let cache = cache.lock().unwrap();
    if let Some(leaf) = *cache {
        let word = memory.entries(leaf, 2)[0].get();
        assert!(word == 0 || word & !0xfff == 16 * PAGE, "{word:#x}");
    }
}

#[test]
fn a_unit_meets_no_table_of_another_owner_before_a_lazy_flush() {
    model(|| {
        // Room for pages 0 and 7 and no more: what comes then needs the tables of page 0.
        let memory = Tables::new(5, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        map(&table, 7, 1).unwrap();
        let cache = Arc::new(Mutex::new(Some(cached(&memory, &table))));
        let (unit, its_memory) = (Arc::clone(&cache), Arc::clone(&memory));
        let unit = thread::spawn(move || {
            access(&its_memory, &unit);
            access(&its_memory, &unit);
        });
        let mut gather = Gather::new();
        unmap_lazily(&table, 0, &mut gather);
        // The second unmap of the batch; nothing was flushed yet, so nothing is free.
        unmap_lazily(&table, 7, &mut gather);
        assert!(map(&table, 3, 1).is_err() && memory.free() == 0);
        let flushed = gather.flush_with(|what| {
            assert!(what.tables_unlinked());
            *cache.lock().unwrap() = None;
            Ok::<_, ()>(())
        });
        table.reclaim(flushed.unwrap());
        map(&table, 3, 1).unwrap();
        unit.join().unwrap();
        finish(table, &memory, [0, 0, 0, 1, 0, 0, 0, 0], 5);
    });
}

#[test]
fn a_lazy_flush_that_fails_keeps_its_tables_while_others_map() {
    model(|| {
        let memory = Tables::new(5, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        let leaf = cached(&memory, &table);
        let other = Arc::clone(&table);
        let mapper = thread::spawn(move || map(&other, 7, 1).unwrap());
        let mut gather = Gather::new();
        unmap_lazily(&table, 0, &mut gather);
        assert!(gather.flush_with(|_| Err(())).is_err());
        // It was not told: what it has cached is as it was left.
        assert_eq!(memory.entries(leaf, 2)[0].get(), 0);
        mapper.join().unwrap();
        assert_eq!(memory.entries(leaf, 2)[0].get(), 0);
        table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
        finish(table, &memory, [0, 0, 0, 0, 0, 0, 0, 1], 5);
    });
}
