//! Dirty state: what hardware sets at the worst moment is not lost, and nothing is stored for
//! nothing.
//!
//! The cells of these tables let others look, and "hardware" write, just before each store.

use std::sync::atomic::Ordering;

use crate::watched::{TABLE, Watched, hardware, memory, stores, watched};
use iopt::format::{AmdV1, RiscV, VtdSs};
use iopt::{
    DirtyError, Format, Gather, HeapTables, NoRuns, Pending, Prot, SharedTable, Table,
    TableOps as _, TableUnmapError, WithDirty,
};
use runs::{Iova, PageSizes, Run, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const PA: u64 = 9 << 30;

fn pending(words: &mut [u64], span: Span<Iova>) -> Pending<&mut [u64]> {
    Pending::new(words, span, PAGE).unwrap()
}

fn shown(pending: &mut Pending<&mut [u64]>) -> Vec<Span<Iova>> {
    let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
    let runs = shown.runs().collect();
    shown.acknowledge();
    runs
}

/// Groups, single pages, and a large leaf, with a hole before it.
fn fill<F: Format, M: iopt::TableMemory>(table: &mut Table<F, M>) -> Span<Iova> {
    table.map(0, &[Span::new(PA, 40 * PAGE)], Prot::RW).unwrap();
    table.map(M2, &[Span::new(PA + M2, M2)], Prot::RW).unwrap();
    Span::new(0, 2 * M2)
}

fn unmapped_at_the_worst_moment<F: Format>(format: F) {
    for whole in [false, true] {
        let memory = memory();
        let mut table = Table::new(format, &memory).unwrap();
        fill(&mut table);
        table.track_dirty(true).unwrap();
        // The whole of a table, which is unlinked, or its entries one by one.
        let range = Span::new(0, if whole { M2 } else { 40 * PAGE });
        let mut runs = Vec::new();
        let mut gather = Gather::new();
        watched(hardware::<F>, || {
            table
                .unmap_mapped(
                    range,
                    &mut gather,
                    &mut WithDirty(|run, dirty| runs.push((run, dirty))),
                )
                .unwrap()
        });
        assert_eq!(
            runs,
            [(Run::new(0, Span::new(PA, 40 * PAGE)), true)],
            "{}",
            F::ID
        );
        let _ = gather.never_walked();
    }
}

#[test]
fn what_hardware_sets_just_before_an_unmap_takes_a_leaf_is_in_its_report() {
    each_format!(unmapped_at_the_worst_moment());
}

fn runs_end_where_dirty_state_changes<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let small = PageSizes::from_bits(1 << 12);
    let mut table = Table::with_page_sizes(format, &memory, small).unwrap();
    table.map(0, &[Span::new(PA, 8 * PAGE)], Prot::RW).unwrap();
    table.track_dirty(true).unwrap();
    table.set_dirty(Span::new(2 * PAGE, 3 * PAGE)).unwrap();
    let mut runs = Vec::new();
    let mut gather = Gather::new();
    let mut sink = WithDirty(|run, dirty| runs.push((run, dirty)));
    let range = Span::new(0, 8 * PAGE);
    table.unmap(range, &mut gather, &mut sink).unwrap();
    let expected = [(0, 2, false), (2, 3, true), (5, 3, false)].map(|(at, n, dirty)| {
        (
            Run::new(at * PAGE, Span::new(PA + at * PAGE, n * PAGE)),
            dirty,
        )
    });
    assert_eq!(runs, expected, "{}", F::ID);
    assert_eq!(gather.invalidation().ranges(), [range]);
    let _ = gather.never_walked();
}

#[test]
fn an_unmap_reports_which_runs_are_dirty() {
    each_format!(runs_end_where_dirty_state_changes());
}

#[test]
fn an_unmap_that_would_lose_dirty_state_is_refused() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    let range = fill(&mut table);
    let mut gather = Gather::new();
    table.track_dirty(true).unwrap();
    let wanted = Err(TableUnmapError::DirtyWanted);
    assert_eq!(
        table.unmap_mapped(range, &mut gather, &mut NoRuns),
        Err(TableUnmapError::DirtyWanted)
    );
    assert_eq!(table.unmap(range, &mut gather, &mut |_: Run| {}), wanted);
    let narrow = table.unmap_pages(0, PAGE, 1, &mut gather);
    assert_eq!((narrow.bytes, narrow.result), (0, wanted));
    let shared: SharedTable<_, _> = SharedTable::new(table);
    assert!(shared.enter().tracks_dirty());
    assert_eq!(
        shared.enter().unmap(range, &mut gather, &mut NoRuns),
        wanted
    );
    assert!(gather.is_empty());
    shared.track_dirty(false).unwrap();
    let bytes = shared
        .enter()
        .unmap_mapped(range, &mut gather, &mut NoRuns)
        .unwrap();
    assert_eq!(bytes, 40 * PAGE + M2);
    assert!(!shared.into_inner().tracks_dirty());
    let _ = gather.never_walked();
}

#[test]
fn a_format_without_dirty_state_says_so_by_name() {
    let memory = HeapTables::with_tables(64).unwrap();
    // This one sets D from the beginning: what it says means nothing.
    let format = RiscV::new(3).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let range = fill(&mut table);
    let none = DirtyError::NotKept {
        format: format.id(),
    };
    let mut words = [0; 16];
    let mut pending = pending(&mut words, range);
    assert_eq!(table.track_dirty(true), Err(none));
    assert_eq!(table.harvest(range, &mut pending), Err(none));
    assert_eq!(table.peek_dirty(range, |_| {}), Err(none));
    assert_eq!(table.set_dirty(range), Err(none));
    let mut gather = Gather::new();
    let sink = &mut WithDirty(|_, _| {});
    assert_eq!(
        table.unmap(range, &mut gather, sink),
        Err(TableUnmapError::DirtyNotKept {
            format: format.id()
        })
    );
    let shared: SharedTable<_, _> = SharedTable::new(table);
    assert_eq!(shared.track_dirty(true), Err(none));
    assert_eq!(shared.enter().harvest(range, &mut pending), Err(none));
}

#[test]
fn a_harvest_is_refused_for_what_is_wrong_with_it() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    let all = fill(&mut table);
    table.set_dirty(all).unwrap();
    let mut words = [0; 16];
    let mut pending = pending(&mut words, all);
    assert_eq!(
        table.harvest(all, &mut pending),
        Err(DirtyError::NotTracked)
    );
    table.track_dirty(true).unwrap();
    let range = Span::new(M2, 2 * M2);
    let outside = DirtyError::OutsidePending {
        range,
        pending: all,
    };
    assert_eq!(table.harvest(range, &mut pending), Err(outside));
    for range in [Span::new(0, M2 + PAGE), Span::new(2 * M2 - PAGE, PAGE)] {
        let leaf = Run::new(M2, Span::new(PA + M2, M2));
        let inside = DirtyError::InsideLeaf { range, leaf };
        assert_eq!(table.harvest(range, &mut pending), Err(inside));
    }
    let odd = table.harvest(Span::new(1, PAGE), &mut pending);
    assert!(matches!(odd, Err(DirtyError::Range(_))));
    // Nothing was cleaned.
    assert_eq!(shown(&mut pending), []);
    assert_eq!(table.harvest(all, &mut pending), Ok(40 * PAGE + M2));
}

fn harvested_twice<F: Format>(format: F) {
    let memory = memory();
    let mut table = Table::new(format, &memory).unwrap();
    let all = fill(&mut table);
    table.track_dirty(true).unwrap();
    let mut words = [0; 16];
    let mut pending = pending(&mut words, all);

    let (bytes, stored) = stores(|| table.harvest(all, &mut pending).unwrap());
    assert_eq!((bytes, stored), (0, vec![]), "{}: clean", F::ID);
    assert_eq!(shown(&mut pending), []);

    // One page is written to: its leaf is dirty, which may be a group.
    let leaf = table.leaf_at(5 * PAGE).unwrap().run.input();
    assert_eq!(table.set_dirty(Span::new(5 * PAGE, PAGE)), Ok(PAGE));
    table.set_dirty(Span::new(M2 + PAGE, PAGE)).unwrap();
    let mut peeked = Vec::new();
    let (bytes, stored) = stores(|| table.peek_dirty(all, |run| peeked.push(run)).unwrap());
    assert_eq!((bytes, stored), (leaf.len + M2, vec![]));
    assert_eq!(peeked, [leaf, Span::new(M2, M2)]);

    let (bytes, stored) = stores(|| table.harvest(all, &mut pending).unwrap());
    assert_eq!(bytes, leaf.len + M2);
    // The two entries that hardware has marked, and no other of the group.
    assert_eq!(stored.len(), 2, "{}", F::ID);
    assert!(stored.iter().all(|word| F::is_dirty(*word)));
    assert_eq!(pending.invalidation().ranges(), [leaf, Span::new(M2, M2)]);
    assert_eq!(pending.invalidation().leaf_levels(), 3);
    assert!(!pending.invalidation().tables_unlinked());
    assert_eq!(shown(&mut pending), [leaf, Span::new(M2, M2)]);

    let (bytes, stored) = stores(|| table.harvest(all, &mut pending).unwrap());
    assert_eq!((bytes, stored), (0, vec![]));
    assert_eq!(shown(&mut pending), []);
}

#[test]
fn a_harvest_stores_to_dirty_entries_only_and_sees_a_group_by_any_of_them() {
    each_format!(harvested_twice());
}

/// Every entry of the group in turn, also the last, at the end of the table, and with the range just
/// around it.
fn any_entry<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let base = M2 - 16 * PAGE;
    table
        .map(base, &[Span::new(PA + base, 16 * PAGE)], Prot::RW)
        .unwrap();
    table.track_dirty(true).unwrap();
    let range = Span::new(base, 16 * PAGE);
    let mut words = [0; 1];
    let mut pending = pending(&mut words, range);
    for page in 0..16 {
        let at = base + page * PAGE;
        let leaf = table.leaf_at(at).unwrap().run.input();
        table.set_dirty(Span::new(at, PAGE)).unwrap();
        assert_eq!(table.harvest(range, &mut pending), Ok(leaf.len));
        assert_eq!(shown(&mut pending), [leaf], "{} page {page}", F::ID);
    }
}

#[test]
fn every_entry_of_a_group_makes_it_dirty() {
    each_format!(any_entry());
}

/// An entry of one group and one of the next.
fn beside<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let runs = [
        Span::new(PA, 16 * PAGE),
        Span::new(PA + (1 << 30), 16 * PAGE),
    ];
    table.map(0, &runs, Prot::RW).unwrap();
    table.track_dirty(true).unwrap();
    let range = Span::new(0, 32 * PAGE);
    let mut words = [0; 1];
    let mut pending = pending(&mut words, range);
    for (first, second) in [(15, 16), (3, 17), (0, 31)] {
        let leaves = [first, second].map(|page| {
            table.set_dirty(Span::new(page * PAGE, PAGE)).unwrap();
            table.leaf_at(page * PAGE).unwrap().run.len
        });
        let bytes = table.harvest(range, &mut pending);
        assert_eq!(bytes, Ok(leaves[0] + leaves[1]), "{}", F::ID);
        let bytes: u64 = shown(&mut pending).iter().map(|run| run.len).sum();
        assert_eq!(bytes, leaves[0] + leaves[1]);
    }
}

#[test]
fn a_harvest_of_one_group_leaves_the_next_for_its_own_turn() {
    each_format!(beside());
}

/// An entry that is dirty but not accessed: hardware may set the accessed bit meanwhile.
fn accessed_survives<F: Format>(format: F) {
    let memory = memory();
    let small = PageSizes::from_bits(1 << 12);
    let mut table = Table::with_page_sizes(format, &memory, small).unwrap();
    table.map(0, &[Span::new(PA, PAGE)], Prot::RW).unwrap();
    table.track_dirty(true).unwrap();
    let find = || {
        let cells = &memory.storage().cells;
        let is_leaf = |cell: &&Watched| {
            let word = cell.0.load(Ordering::Relaxed);
            !F::is_empty(word) && word & TABLE == 0
        };
        &cells.iter().find(is_leaf).unwrap().0
    };
    let word = find().load(Ordering::Relaxed);
    find().store(F::dirtied(word) & !F::ACCESSED, Ordering::Relaxed);
    let mut words = [0; 1];
    let mut pending = pending(&mut words, Span::new(0, PAGE));
    watched(hardware::<F>, || {
        table.harvest(Span::new(0, PAGE), &mut pending).unwrap()
    });
    let now = find().load(Ordering::Relaxed);
    assert_eq!(
        now & F::ACCESSED,
        F::ACCESSED,
        "{}: accessed was lost",
        F::ID
    );
    assert!(!F::is_dirty(now));
}

#[test]
fn an_accessed_bit_that_hardware_sets_during_a_harvest_is_kept() {
    each_format!(accessed_survives());
}

#[test]
fn what_is_put_back_is_shown_again_with_what_came_since() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(AmdV1::new(4).unwrap(), &memory).unwrap();
    let all = fill(&mut table);
    table.track_dirty(true).unwrap();
    let mut words = [0; 16];
    let mut pending = pending(&mut words, all);
    table.set_dirty(Span::new(33 * PAGE, PAGE)).unwrap();
    table.harvest(all, &mut pending).unwrap();
    // The first flush fails: nothing is shown.
    assert!(pending.flush_with(|_| Err("time-out")).is_err());
    pending.flush_with(|_| Ok::<_, ()>(())).unwrap().put_back();
    table.set_dirty(Span::new(M2, PAGE)).unwrap();
    table.harvest(all, &mut pending).unwrap();
    let expected = [Span::new(32 * PAGE, 8 * PAGE), Span::new(M2, M2)];
    assert_eq!(shown(&mut pending), expected);
    assert_eq!(shown(&mut pending), []);
}

#[test]
fn pages_that_cannot_be_written_are_never_marked() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    table
        .map(0, &[Span::new(PA, 2 * PAGE)], Prot::READ)
        .unwrap();
    table
        .map(2 * PAGE, &[Span::new(PA, PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(table.set_dirty(Span::new(0, 16 * PAGE)), Ok(PAGE));
    let mut dirty = Vec::new();
    table
        .peek_dirty(Span::new(0, 16 * PAGE), |run| dirty.push(run))
        .unwrap();
    assert_eq!(dirty, [Span::new(2 * PAGE, PAGE)]);
}
