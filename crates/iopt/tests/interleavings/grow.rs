//! The top grows.

use super::*;

/// Of two levels, which can become three.
fn growing(memory: &Arc<Tables>) -> Arc<Shared<true>> {
    let format = Tiny::<true> { levels: 2 };
    Arc::new(SharedTable::new(
        Table::new(format, Arc::clone(memory)).unwrap(),
    ))
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
fn the_top_grows_while_a_page_is_mapped_below_the_old_root() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        let other = Arc::clone(&table);
        // The old root is empty when the growth begins, or not: then it stays.
        let thread = thread::spawn(move || grow(&other));
        map(&table, 1, 1).unwrap();
        assert_eq!(table.translate(PAGE), Some(17 * PAGE));
        thread.join().unwrap();
        map(&table, 4, 4).unwrap();
        finish(table, &memory, [0, 1, 0, 0, 1, 1, 1, 1], 6);
    });
}

#[test]
fn the_top_grows_while_the_old_root_loses_its_last_page() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 2, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || grow(&other));
        assert_eq!(unmap(&table, 2, 1), PAGE);
        thread.join().unwrap();
        finish(table, &memory, [0; 8], 6);
    });
}

#[test]
fn the_top_grows_while_all_of_the_old_root_is_unmapped() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 0, 4).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || grow(&other));
        assert_eq!(unmap(&table, 0, 4), 4 * PAGE);
        thread.join().unwrap();
        finish(table, &memory, [0; 8], 6);
    });
}

#[test]
fn two_threads_grow_the_top_once() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = growing(&memory);
        map(&table, 3, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            grow(&other);
            map(&other, 4, 1).unwrap();
        });
        grow(&table);
        map(&table, 7, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [0, 0, 0, 1, 1, 0, 0, 1], 6);
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
            assert_eq!(other.translate(0), Some(16 * PAGE));
            let above = other.translate(5 * PAGE);
            assert!(above.is_none() || above == Some(21 * PAGE), "{above:x?}");
        });
        grow(&table);
        map(&table, 5, 1).unwrap();
        reader.join().unwrap();
        finish(table, &memory, [1, 0, 0, 0, 0, 1, 0, 0], 6);
    });
}
