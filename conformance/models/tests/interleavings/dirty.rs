//! Dirty bits that the unit sets at any moment are found.

use iopt::format::Entry;
use iopt::{
    Cell, Format, Gather, Interruption, Invalidation, Pending, TableMemory, TableUnmapError,
    WithDirty,
};
use runs::{Iova, Run};

use super::resize::split;
use super::tiny::{ACCESSED, DIRTY, WRITABLE};
use super::*;

/// Where the entry of `page` is, which is mapped by a leaf at level 0: its table, and its index.
fn place(memory: &Tables, table: &Shared, page: u64) -> (u64, usize) {
    let mut address = table.enter().root().address;
    for level in [2, 1] {
        let word = memory.entries(address, 2)[(page >> level) as usize & 1].get();
        let Entry::Table(below) = <Tiny>::decode(level, word) else {
            panic!("no table for page {page}");
        };
        address = below;
    }
    (address, page as usize & 1)
}

/// The unit writes to the page of an entry that it has found: true, or it faults. It holds no guard
/// and does not mind whether the table is still linked, as units do that have cached the way to it.
fn write(memory: &Tables, (table, index): (u64, usize)) -> bool {
    let cell = &memory.entries(table, 2)[index];
    let mut word = cell.get_acquire();
    while !<Tiny>::is_empty(word) && word & WRITABLE != 0 {
        let marked = <Tiny>::dirtied(word) | <Tiny>::ACCESSED;
        if marked == word {
            return true;
        }
        match cell.set_if(word, marked) {
            Ok(()) => return true,
            Err(now) => word = now,
        }
    }
    false
}

fn range(page: u64, pages: u64) -> Span<Iova> {
    Span::new(page * PAGE, pages * PAGE)
}

/// Dirty memory in the first `pages`.
fn harvest(table: &Shared, pages: u64) -> Vec<Span<Iova>> {
    let all = range(0, pages);
    let mut pending = Pending::new([0; 1], all, PAGE).unwrap();
    table.enter().harvest(all, &mut pending).unwrap();
    let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
    shown.runs().collect()
}

/// Unmaps and says what was removed, and whether it was dirty.
fn take(table: &Shared, pages: Span<Iova>) -> Vec<(Run, bool)> {
    let mut runs = Vec::new();
    let mut gather = Gather::new();
    let mut sink = WithDirty(|run, dirty| runs.push((run, dirty)));
    table
        .enter()
        .unmap_mapped(pages, &mut gather, &mut sink)
        .unwrap();
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    runs
}

/// The unit against an unmap, or a harvest and then an unmap, beginning with an entry that has these
/// bits, while a neighbour comes.
fn nothing_is_lost(bits: u64, harvests: bool) {
    model(move || {
        let memory = Tables::new(4, false);
        let table = shared(&memory);
        table.track_dirty(true).unwrap();
        map(&table, 0, 1).unwrap();
        let entry = place(&memory, &table, 0);
        let cell = &memory.entries(entry.0, 2)[entry.1];
        cell.set(cell.get() | bits);

        let (units, maps) = (Arc::clone(&memory), Arc::clone(&table));
        let unit = thread::spawn(move || write(&units, entry));
        let neighbour = thread::spawn(move || map(&maps, 1, 1).unwrap());
        let mut found = harvests && harvest(&table, 1) == [range(0, 1)];
        let runs = take(&table, range(0, 1));
        let written = unit.join().unwrap() || bits & <Tiny>::dirtied(0) != 0;
        neighbour.join().unwrap();
        assert_eq!(runs.len(), 1);
        found |= runs[0].1;
        assert_eq!(found, written);
        assert_eq!(
            table.enter().translate(0),
            None,
            "a leaf that was unmapped is back"
        );
        assert_eq!(table.enter().translate(PAGE), Some(17 * PAGE));
        table.track_dirty(false).unwrap();
        finish(table, &memory, [0, 1, 0, 0, 0, 0, 0, 0], 4);
    });
}

#[test]
fn an_unmap_loses_nothing_that_the_unit_sets() {
    nothing_is_lost(0, false);
    nothing_is_lost(DIRTY, false);
    nothing_is_lost(DIRTY | ACCESSED, false);
}

#[test]
fn a_harvest_loses_nothing_that_the_unit_sets() {
    nothing_is_lost(0, true);
    nothing_is_lost(DIRTY, true);
    nothing_is_lost(DIRTY | ACCESSED, true);
}

#[test]
fn when_tracking_is_on_no_unmap_goes_on_that_loses_dirty_state() {
    model(|| {
        let memory = Tables::new(4, false);
        let table = shared(&memory);
        map(&table, 0, 1).unwrap();
        let entry = place(&memory, &table, 0);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            let mut gather = Gather::new();
            let result = other
                .enter()
                .unmap_mapped(range(0, 1), &mut gather, &mut iopt::NoRuns);
            let _ = gather.never_walked();
            result
        });
        table.track_dirty(true).unwrap();
        let written = write(&memory, entry);
        match thread.join().unwrap() {
            Ok(PAGE) => assert!(!written, "removed unseen"),
            Err(TableUnmapError::DirtyWanted) => {
                assert!(written);
                assert_eq!(harvest(&table, 8), [range(0, 1)]);
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_protect_is_whole_while_its_neighbour_goes_and_the_unit_loses_nothing() {
    model(|| {
        let memory = Tables::new(8, false);
        let table = shared(&memory);
        // Leaves of one, two and one page, in three tables.
        map(&table, 1, 4).unwrap();
        map(&table, 0, 1).unwrap();
        let entry = place(&memory, &table, 4);
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || assert_eq!(unmap(&other, 0, 1), PAGE));
        let mut gather = Gather::new();
        table
            .enter()
            .protect(range(1, 4), Prot::READ, &mut gather)
            .unwrap();
        assert!(!write(&memory, entry));
        thread.join().unwrap();
        for page in 1..5 {
            assert_eq!(table.enter().leaf_at(page * PAGE).unwrap().prot, Prot::READ);
        }
        let _ = gather.never_walked();
        finish(table, &memory, [0, 1, 1, 1, 1, 0, 0, 0], 8);
    });
}

#[test]
fn what_the_unit_writes_while_a_page_becomes_read_only_is_harvested() {
    model(|| {
        let memory = Tables::new(4, false);
        let table = shared(&memory);
        table.track_dirty(true).unwrap();
        map(&table, 0, 1).unwrap();
        let entry = place(&memory, &table, 0);
        let units = Arc::clone(&memory);
        let unit = thread::spawn(move || write(&units, entry));
        let mut gather = Gather::new();
        table
            .enter()
            .protect(range(0, 1), Prot::READ, &mut gather)
            .unwrap();
        let early = harvest(&table, 8);
        let written = unit.join().unwrap();
        assert_eq!(early == [range(0, 1)], written);
        assert_eq!(harvest(&table, 8), []);
        let _ = gather.never_walked();
    });
}

#[test]
fn what_the_unit_writes_to_a_leaf_that_is_split_is_harvested_from_its_parts() {
    model(|| {
        let memory = Tables::new(4, true);
        let table = shared(&memory);
        table.track_dirty(true).unwrap();
        map(&table, 0, 2).unwrap();
        let root = table.enter().root().address;
        let Entry::Table(below) = <Tiny>::decode(2, memory.entries(root, 2)[0].get()) else {
            panic!("no table");
        };
        let units = Arc::clone(&memory);
        let unit = thread::spawn(move || {
            let cell = &units.entries(below, 2)[0];
            let word = cell.get_acquire();
            // If it is a table by now the unit walks on; that is not what this is about.
            matches!(<Tiny>::decode(1, word), Entry::Leaf { .. })
                && cell.set_if(word, <Tiny>::dirtied(word) | ACCESSED).is_ok()
        });
        split(&table, 0, 2);
        let written = unit.join().unwrap();
        let expected = if written { vec![range(0, 2)] } else { vec![] };
        assert_eq!(harvest(&table, 8), expected);
        table.track_dirty(false).unwrap();
        finish(table, &memory, [1, 1, 0, 0, 0, 0, 0, 0], 4);
    });
}

#[test]
fn what_the_unit_writes_to_pages_that_become_one_leaf_is_harvested_from_it() {
    model(|| {
        let memory = Tables::new(4, true);
        let table = shared(&memory);
        table.track_dirty(true).unwrap();
        map(&table, 0, 1).unwrap();
        map(&table, 1, 1).unwrap();
        let entry = place(&memory, &table, 0);
        let units = Arc::clone(&memory);
        let mut unit = Some(thread::spawn(move || write(&units, entry)));
        // The unit has the way to the lower table cached until it is flushed, and then answers.
        let mut written = false;
        let flush = |_: &Invalidation| {
            written = unit.take().unwrap().join().unwrap();
            Ok::<_, ()>(())
        };
        let mut gather = Gather::new();
        table
            .enter()
            .merge(range(0, 2), Interruption::Refused, &mut gather, flush)
            .unwrap();
        let expected = if written { vec![range(0, 2)] } else { vec![] };
        assert_eq!(harvest(&table, 8), expected);
        table.track_dirty(false).unwrap();
        finish(table, &memory, [1, 1, 0, 0, 0, 0, 0, 0], 4);
    });
}
