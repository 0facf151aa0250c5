//! Leaves are split and merged.

use iopt::{Interruption, Invalidation};

use super::*;

pub(super) fn split(table: &Shared, page: u64, pages: u64) {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let flush = |_: &Invalidation| Ok::<_, ()>(());
    table
        .enter()
        .split(range, PAGE, Interruption::Refused, &mut gather, flush)
        .unwrap();
}

fn merge(table: &Shared, page: u64, pages: u64) {
    let mut gather = Gather::new();
    let range = Span::new(page * PAGE, pages * PAGE);
    let flush = |_: &Invalidation| Ok::<_, ()>(());
    table
        .enter()
        .merge(range, Interruption::Refused, &mut gather, flush)
        .unwrap();
}

#[test]
fn a_leaf_is_split_while_its_neighbour_goes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 0, 4).unwrap();
        split(&table, 2, 1);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || split(&other, 0, 2));
        assert_eq!(unmap(&table, 2, 1), PAGE);
        thread.join().unwrap();
        finish(table, &memory, [1, 1, 0, 1, 0, 0, 0, 0], 6);
    });
}

#[test]
fn pages_become_one_leaf_while_a_neighbour_comes() {
    model(|| {
        let memory = Tables::new(6, true);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        map(&table, 1, 1).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || merge(&other, 0, 2));
        map(&table, 2, 1).unwrap();
        thread.join().unwrap();
        finish(table, &memory, [1, 1, 1, 0, 0, 0, 0, 0], 6);
    });
}

#[test]
fn a_reader_sees_no_hole_while_leaves_are_split_and_merged() {
    model(|| {
        // Too few tables for both states: that of the merge is used again at once.
        let memory = Tables::new(4, true);
        let table = shared(&memory);
        map(&table, 0, 2).unwrap();
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || {
            for page in [0, 1] {
                assert_eq!(
                    other.enter().translate(page * PAGE),
                    Some((16 + page) * PAGE)
                );
            }
        });
        split(&table, 0, 2);
        merge(&table, 0, 2);
        while let Err(error) = map(&table, 2, 1) {
            assert!(matches!(error, TableMapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        finish(table, &memory, [1, 1, 1, 0, 0, 0, 0, 0], 4);
    });
}
