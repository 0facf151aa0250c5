//! Replay: a domain that comes later has all areas mapped before its unit gets the root, while tables
//! of another domain come and go in the same memory.

use loom::sync::atomic::{AtomicU64, Ordering};

use iopt::{Cell as _, TableMemory as _};

use super::*;

/// No root.
const NONE: u64 = u64::MAX;

#[test]
fn a_unit_that_learns_the_root_finds_everything_that_was_replayed() {
    model(|| {
        let memory = Tables::new(4, true);
        let root = Arc::new(AtomicU64::new(NONE));
        let (told, its_memory) = (Arc::clone(&root), Arc::clone(&memory));
        let unit = thread::spawn(move || {
            let mut table = told.load(Ordering::Acquire);
            if table != NONE {
                for _ in 0..2 {
                    table = its_memory.entries(table, 2)[0].get_acquire() & !0xf;
                }
                for page in [0, 1] {
                    let word = its_memory.entries(table, 2)[page].get();
                    assert_eq!(word & !0xfff, (16 + page as u64) * PAGE);
                }
            }
        });
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        map(&table, 1, 1).unwrap();
        root.store(table.enter().root().address, Ordering::Release);
        unit.join().unwrap();
        finish(table, &memory, [1, 1, 0, 0, 0, 0, 0, 0], 4);
    });
}

#[test]
fn a_replay_takes_tables_that_another_domain_gives_back() {
    model(|| {
        // Three of the first domain, a root for the second: its other two come from the first.
        let memory = Tables::new(5, true);
        let first = shared(&memory);
        map(&first, 0, 1).unwrap();
        let second = shared(&memory);
        let old = Arc::clone(&first);
        let leaving = thread::spawn(move || assert_eq!(unmap_owning(&old, 0, 1, (0, 8)), PAGE));
        while let Err(error) = map(&second, 5, 1) {
            assert!(matches!(error, TableMapError::NoTables(_)));
            first.poll();
            thread::yield_now();
        }
        leaving.join().unwrap();
        assert!(first.poll());
        assert_eq!(pages(&second), [0, 0, 0, 0, 0, 1, 0, 0].map(|n| n == 1));
        assert_eq!(pages(&first), [false; 8]);
        let tables = Arc::into_inner(first).unwrap().into_inner().tables();
        let tables = tables + Arc::into_inner(second).unwrap().into_inner().tables();
        assert_eq!(memory.free() + tables, 5);
    });
}
