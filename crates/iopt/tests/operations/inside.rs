//! Several operations inside a shared table, and when its tables come back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use iopt::format::{AmdV1, VtdSs};
use iopt::reclaim::{Reclaim, Slots};
use iopt::{
    Gather, HeapTables, Prot, SharedTable, Table, TableMapError, TableOps as _, TableUnmapError,
    WithDirty,
};
use runs::{Iova, Run, Span};

const PAGE: u64 = 4096;
const IOVA: u64 = 5 << 30;
const PA: u64 = 9 << 30;
/// All that there is, for an operation that owns it.
const ALL: Span<Iova> = Span::new(0, 1 << 48);

type Shared<'a> = SharedTable<VtdSs, &'a HeapTables>;

fn shared(memory: &HeapTables) -> Shared<'_> {
    SharedTable::new(Table::new(VtdSs::new(4).unwrap(), memory).unwrap())
}

fn page(nth: u64) -> Span<Iova> {
    Span::new(IOVA + nth * PAGE, PAGE)
}

fn flush<R: Reclaim>(gather: &mut Gather, table: &SharedTable<VtdSs, &HeapTables, R>) {
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
}

#[test]
fn what_is_done_inside_is_what_single_operations_do() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = shared(&memory);
    let mut gather = Gather::new();
    {
        let mut inside = table.owning(ALL);
        for nth in 0..700 {
            let pa = PA + 2 * nth * PAGE;
            inside
                .map(page(nth).start, &[Span::new(pa, PAGE)], Prot::RW)
                .unwrap();
        }
        let again = inside.map(page(3).start, &[Span::new(PA, PAGE)], Prot::RW);
        assert!(
            matches!(again, Err(TableMapError::Overlap { .. })),
            "{again:?}"
        );
        assert_eq!(
            inside.translate(page(9).start + 5),
            Some(PA + 18 * PAGE + 5)
        );
        assert_eq!(
            inside.leaf_at(page(699).start).unwrap().run.pa,
            PA + 1398 * PAGE
        );

        let mut runs = Vec::new();
        inside
            .unmap(page(3), &mut gather, &mut |run: Run| runs.push(run))
            .unwrap();
        assert_eq!(
            runs,
            [Run::new(page(3).start, Span::new(PA + 6 * PAGE, PAGE))]
        );
        let hole = inside.unmap(page(3), &mut gather, &mut |_: Run| ());
        assert!(
            matches!(hole, Err(TableUnmapError::Hole { .. })),
            "{hole:?}"
        );
        let all = Span::new(IOVA, 700 * PAGE);
        let bytes = inside.unmap_mapped(all, &mut gather, &mut |_: Run| ());
        assert_eq!(bytes.unwrap(), 699 * PAGE);
    }
    flush(&mut gather, &table);
    assert_eq!(memory.in_use(), 1);
}

#[test]
fn tables_wait_for_readers_inside_and_for_no_other() {
    let memory = HeapTables::with_tables(64).unwrap();
    // Guards of slots are independent: guards of other tests' threads do not count here.
    let table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    let table = SharedTable::with_reclaim(table, <Slots>::default());
    let map = || {
        table
            .enter()
            .map(IOVA, &[Span::new(PA, PAGE)], Prot::RW)
            .unwrap();
    };
    let unmap = || {
        let mut gather = Gather::new();
        let mut owner = table.owning(ALL);
        owner.unmap(page(0), &mut gather, &mut |_: Run| ()).unwrap();
        drop(owner);
        flush(&mut gather, &table);
    };
    map();
    let with = memory.in_use();
    unmap();
    assert_eq!(
        memory.in_use(),
        1,
        "nobody is inside: they come back at once"
    );

    map();
    let inside = table.enter();
    unmap();
    assert_eq!(memory.in_use(), with, "they may still be read");
    assert!(!table.poll());
    drop(inside);
    assert!(table.poll());
    assert_eq!(memory.in_use(), 1);

    // Readers that come later do not hold them up.
    map();
    let earlier = table.enter();
    unmap();
    let later = table.enter();
    drop(earlier);
    assert!(table.poll());
    assert_eq!(memory.in_use(), 1);
    drop(later);
}

#[test]
fn switching_dirty_tracking_on_waits_for_whoever_is_inside() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = shared(&memory);
    table
        .enter()
        .map(IOVA, &[Span::new(PA, 8 * PAGE)], Prot::RW)
        .unwrap();
    let (entered, left) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut inside = table.enter();
            entered.store(true, Ordering::Release);
            // Long enough for the other thread to be waiting; right whether it is or not.
            thread::yield_now();
            let mut gather = Gather::new();
            let _ = inside.unmap(page(0), &mut gather, &mut |_: Run| ());
            left.store(true, Ordering::Release);
            drop(inside);
            flush(&mut gather, &table);
        });
        while !entered.load(Ordering::Acquire) {
            thread::yield_now();
        }
        table.track_dirty(true).unwrap();
        assert!(left.load(Ordering::Acquire), "it was still inside");
    });
    let mut inside = table.enter();
    let mut gather = Gather::new();
    let plain = inside.unmap(page(1), &mut gather, &mut |_: Run| ());
    assert_eq!(plain, Err(TableUnmapError::DirtyWanted));
    let mut told = Vec::new();
    let mut sink = WithDirty(|run: Run, dirty: bool| told.push((run.iova, dirty)));
    inside.unmap(page(1), &mut gather, &mut sink).unwrap();
    assert_eq!(told, [(page(1).start, false)]);
    drop(inside);
    flush(&mut gather, &table);
}

/// The path of a single page ends where the last one of a table goes: the table must not stay.
#[test]
fn the_last_single_page_takes_its_tables_along() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(AmdV1::new(4).unwrap(), &memory).unwrap();
    let mut gather = Gather::new();
    for nth in [0, 1, 511, 512] {
        table
            .map(page(nth).start, &[Span::new(PA, PAGE)], Prot::RW)
            .unwrap();
    }
    for nth in [512, 0, 511, 1] {
        let before = table.tables();
        table
            .unmap(page(nth), &mut gather, &mut |_: Run| ())
            .unwrap();
        let gone = before - table.tables();
        assert_eq!(
            gone,
            [(512, 1), (1, 3)]
                .into_iter()
                .find(|(n, _)| *n == nth)
                .map_or(0, |(_, gone)| gone)
        );
    }
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    assert_eq!((table.tables(), memory.in_use()), (1, 1));
}

/// Neither of two operations owns the table that they empty together, so it stays; a large leaf in its place is mapped in it.
#[test]
fn a_large_leaf_goes_into_a_table_that_others_have_emptied_in_parts() {
    const M2: u64 = 2 << 20;
    let memory = HeapTables::with_tables(64).unwrap();
    let table = shared(&memory);
    let (run, mut gather) = ([Span::new(PA, M2 / 2)], Gather::new());
    for half in [IOVA, IOVA + M2 / 2] {
        table.enter().map(half, &run, Prot::RW).unwrap();
    }
    for half in [IOVA, IOVA + M2 / 2] {
        let range = Span::new(half, M2 / 2);
        let mut inside = table.enter();
        inside.unmap(range, &mut gather, &mut |_: Run| ()).unwrap();
    }
    assert_eq!(table.enter().tables(), 4);
    let run = [Span::new(PA, M2)];
    table.enter().map(IOVA, &run, Prot::RW).unwrap();
    assert_eq!(table.enter().leaf_at(IOVA).unwrap().run.len, PAGE);
    flush(&mut gather, &table);
}
