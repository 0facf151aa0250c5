//! The top grows.

use super::*;

/// A table of two levels, which can become three.
fn growing(memory: &Arc<Tables>) -> Arc<Shared<true>> {
    let format = Tiny::<true> { levels: 2 };
    let table = Table::new(format, Arc::clone(memory)).unwrap();
    Arc::new(SharedTable::with_reclaim(table, Slots::default()))
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

#[test]
fn a_reader_meets_no_old_root_that_is_used_for_something_else() {
    model(|| {
        let memory = Tables::new(3, true);
        let table = growing(&memory);
        let other = Arc::clone(&table);
        // The old root is empty: it is not linked, and is a table of the page at the end.
        let reader = thread::spawn(move || assert_eq!(other.enter().translate(PAGE), None));
        grow(&table);
        while let Err(error) = map(&table, 4, 1) {
            assert!(matches!(error, TableMapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        finish(table, &memory, [0, 0, 0, 0, 1, 0, 0, 0], 3);
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
            assert_eq!(other.enter().translate(0), Some(16 * PAGE));
            let above = other.enter().translate(5 * PAGE);
            assert!(above.is_none() || above == Some(21 * PAGE), "{above:x?}");
        });
        grow(&table);
        map(&table, 5, 1).unwrap();
        reader.join().unwrap();
        finish(table, &memory, [1, 0, 0, 0, 0, 1, 0, 0], 6);
    });
}
