//! Permissions change in place: all or nothing, and nothing that hardware sets is lost.

use std::sync::atomic::Ordering;

use crate::watched::{Memory, TABLE, hardware, memory, stores, watched};
use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs};
use iopt::{
    Arena, Format, Gather, HeapTables, Pending, Prot, ProtectError, RangeError, SharedTable, Table,
    TableOps as _,
};
use runs::{Iova, PageSizes, Run, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const PA: u64 = 9 << 30;

/// Pages and groups in two tables, and a large leaf behind them.
fn fill<F: Format, M: iopt::TableMemory>(table: &mut Table<F, M>, prot: Prot) -> Span<Iova> {
    let start = M2 - 40 * PAGE;
    let runs = [Span::new(PA + start, 40 * PAGE + M2)];
    table.map(start, &runs, prot).unwrap();
    Span::new(start, 40 * PAGE + M2)
}

fn words(memory: &Arena<Memory>) -> Vec<u64> {
    let cells = memory.storage().cells.iter();
    cells.map(|cell| cell.0.load(Ordering::Relaxed)).collect()
}

fn as_if_mapped_so<F: Format>(format: F) {
    for (before, after) in [(Prot::RW, Prot::READ), (Prot::READ, Prot::RW)] {
        let (changed, fresh) = (memory(), memory());
        let mut table = Table::new(format, &changed).unwrap();
        let range = fill(&mut table, before);
        let leaves = table.leaves(range).count() as u64;
        let mut gather = Gather::new();
        table.protect(range, after, &mut gather).unwrap();
        assert_eq!(gather.invalidation().ranges(), [range]);
        assert_eq!(gather.invalidation().leaf_levels(), 3);
        assert!(!gather.invalidation().tables_unlinked());
        fill(&mut Table::new(format, &fresh).unwrap(), after);
        assert!(words(&changed) == words(&fresh), "{}", F::ID);
        assert_eq!(table.leaves(range).count() as u64, leaves);

        // Once more: every entry says it already.
        let mut gather = Gather::new();
        let ((), stored) = stores(|| table.protect(range, after, &mut gather).unwrap());
        assert_eq!(stored, []);
        assert!(gather.is_empty());
    }
}

#[test]
fn what_is_protected_is_as_if_it_had_been_mapped_so() {
    each_format!(as_if_mapped_so());
    as_if_mapped_so(RiscV::new(3).unwrap());
    as_if_mapped_so(ArmStage1::<K4>::new(39, 48).unwrap());
}

fn accessed_stays<F: Format>(format: F) {
    for (before, after) in [(Prot::RW, Prot::READ), (Prot::READ, Prot::RW)] {
        let (changed, fresh) = (memory(), memory());
        let mut table = Table::new(format, &changed).unwrap();
        let range = fill(&mut table, before);
        // A unit has read every third leaf, and written to none.
        let mut noted = 0;
        let leaf = |word: u64| word != 0 && word & TABLE == 0;
        for cell in changed.storage().cells.iter().step_by(3) {
            let word = cell.0.load(Ordering::Relaxed);
            if leaf(word) && word & F::ACCESSED != F::ACCESSED {
                cell.0.store(word | F::ACCESSED, Ordering::Relaxed);
                noted += 1;
            }
        }
        assert!(noted > 10, "{}: {noted}", F::ID);
        let read = words(&changed);
        let mut gather = Gather::new();
        table.protect(range, after, &mut gather).unwrap();
        let _ = gather.never_walked();
        fill(&mut Table::new(format, &fresh).unwrap(), after);
        for ((now, read), fresh) in words(&changed).into_iter().zip(read).zip(words(&fresh)) {
            let accessed = if leaf(read) { read & F::ACCESSED } else { 0 };
            assert_eq!(now, fresh | accessed, "{}: {read:#x}", F::ID);
        }
    }
}

#[test]
fn what_was_read_stays_accessed_when_its_permissions_change() {
    // Leaves of the others are accessed from the start.
    accessed_stays(VtdSs::new(4).unwrap());
    accessed_stays(AmdV1::new(4).unwrap());
    accessed_stays(RiscV::new(4).unwrap().with_hardware_updates(true));
}

fn dirty_stays<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let range = fill(&mut table, Prot::RW);
    table.track_dirty(true).unwrap();
    table.set_dirty(Span::new(M2 - 5 * PAGE, PAGE)).unwrap();
    table.set_dirty(Span::new(M2, PAGE)).unwrap();
    let group = table.leaf_at(M2 - 5 * PAGE).unwrap().run.input();
    let mut gather = Gather::new();
    for prot in [Prot::READ, Prot::RW, Prot::READ] {
        table.protect(range, prot, &mut gather).unwrap();
        assert!(table.leaves(range).all(|leaf| leaf.prot == prot));
        let mut dirty = Vec::new();
        table.peek_dirty(range, |run| dirty.push(run)).unwrap();
        let bytes: u64 = dirty.iter().map(|run| run.len).sum();
        assert_eq!(bytes, group.len + M2, "{} {prot}", F::ID);
    }
    // Also from what cannot be written any more it is harvested.
    let mut pending = Pending::new([0; 16], range, PAGE).unwrap();
    assert_eq!(table.harvest(range, &mut pending), Ok(group.len + M2));
    assert_eq!(table.harvest(range, &mut pending), Ok(0));
    let _ = gather.never_walked();
}

#[test]
fn what_was_written_stays_dirty_when_it_becomes_read_only() {
    each_format!(dirty_stays());
}

fn at_the_worst_moment<F: Format>(format: F) {
    let memory = memory();
    let mut table = Table::new(format, &memory).unwrap();
    let range = fill(&mut table, Prot::RW);
    let mut gather = Gather::new();
    watched(hardware::<F>, || {
        table.protect(range, Prot::READ, &mut gather).unwrap();
    });
    assert!(table.leaves(range).all(|leaf| leaf.prot == Prot::READ));
    let mut dirty = Vec::new();
    table.peek_dirty(range, |run| dirty.push(run)).unwrap();
    assert_eq!(dirty, [range], "{}", F::ID);
    let _ = gather.never_walked();
}

#[test]
fn what_hardware_sets_just_before_an_entry_is_replaced_is_carried_over() {
    each_format!(at_the_worst_moment());
}

/// All that is refused, in either form, and that nothing was stored then.
#[test]
fn a_request_is_refused_whole_for_what_is_wrong_with_it() {
    let memory = memory();
    let format = AmdV1::new(4).unwrap();
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21);
    let mut table = Table::with_page_sizes(format, &memory, sizes).unwrap();
    let all = fill(&mut table, Prot::RW);
    let before = words(&memory);
    let large = Run::new(M2, Span::new(PA + M2, M2));
    let cut = |range| ProtectError::InsideLeaf { range, leaf: large };
    let hole = |range, at| ProtectError::Hole { range, at };
    let wider = Span::new(all.start - PAGE, 2 * PAGE);
    let longer = Span::new(all.start, all.len + PAGE);
    let (front, back) = (
        Span::new(all.start, all.len - PAGE),
        Span::new(M2 + PAGE, M2 - PAGE),
    );
    let odd = RangeError::Misaligned {
        value: 1,
        granule: PAGE,
    };
    let expected = [
        (wider, Prot::READ, hole(wider, wider.start)),
        (longer, Prot::READ, hole(longer, 2 * M2)),
        (front, Prot::READ, cut(front)),
        (back, Prot::READ, cut(back)),
        (Span::new(1, PAGE), Prot::READ, ProtectError::Range(odd)),
        (
            all,
            Prot::READ | Prot::EXECUTE,
            ProtectError::Prot {
                prot: Prot::READ | Prot::EXECUTE,
                format: format.id(),
            },
        ),
        (
            Span::new(M2, M2),
            Prot::READ | Prot::COHERENT,
            ProtectError::Attributes {
                wanted: Prot::READ | Prot::COHERENT,
                leaf: large,
                found: Prot::RW,
            },
        ),
    ];
    let mut gather = Gather::new();
    let (_, stored) = stores(|| {
        for (range, prot, cause) in expected {
            assert_eq!(table.protect(range, prot, &mut gather), Err(cause));
        }
    });
    assert_eq!(stored, []);
    let shared: SharedTable<_, _> = SharedTable::new(table);
    for (range, prot, cause) in expected {
        assert_eq!(shared.enter().protect(range, prot, &mut gather), Err(cause));
    }
    assert!(words(&memory) == before);
    assert!(gather.is_empty());
    // Every claim was given back: this would wait for ever.
    shared
        .enter()
        .protect(all, Prot::READ, &mut gather)
        .unwrap();
    assert_eq!(shared.enter().leaf_at(M2).unwrap().prot, Prot::READ);
    shared.enter().protect(all, Prot::RW, &mut gather).unwrap();
    assert!(words(&memory) == before);
    let _ = gather.never_walked();
}

#[test]
fn only_what_changes_is_flushed() {
    let memory = HeapTables::with_tables(64).unwrap();
    let sizes = PageSizes::from_bits(1 << 12);
    let format = VtdSs::new(4).unwrap();
    let mut table = Table::with_page_sizes(format, &memory, sizes).unwrap();
    table.map(0, &[Span::new(PA, 16 * PAGE)], Prot::RW).unwrap();
    let mut gather = Gather::new();
    let part = Span::new(4 * PAGE, 2 * PAGE);
    table.protect(part, Prot::READ, &mut gather).unwrap();
    assert_eq!(gather.invalidation().ranges(), [part]);
    let mut gather = Gather::new();
    let all = Span::new(0, 16 * PAGE);
    table.protect(all, Prot::READ, &mut gather).unwrap();
    let expected = [Span::new(0, 4 * PAGE), Span::new(6 * PAGE, 10 * PAGE)];
    assert_eq!(gather.invalidation().ranges(), expected);
    assert_eq!(gather.invalidation().leaf_levels(), 1);
}
