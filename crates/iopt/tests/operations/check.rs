//! The check: what the record finds, and that it finds nothing where all is well.

use std::cell::RefCell;
use std::sync::Mutex;
use std::thread;

use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs, X86_64};
use iopt::observe::{Checked, Counted, Domain, HeapRecord, Violation};
use iopt::{
    Cell, Format, Gather, HeapTables, NoRuns, Prot, SharedTable, Table, TableMemory, TableOps as _,
};
use proptest::prelude::*;
use runs::{Iova, Run, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

const GUEST_A: Domain = Domain { id: 1, owner: 1 };
const GUEST_A_ON_NODE_1: Domain = Domain { id: 2, owner: 1 };
const GUEST_B: Domain = Domain { id: 3, owner: 2 };

type Record = RefCell<HeapRecord>;

fn tables<'l>(
    memory: &'l HeapTables,
    record: &'l Record,
    domain: Domain,
) -> Table<VtdSs, Checked<&'l HeapTables, &'l Record>> {
    let memory = Checked::new(memory, record, domain);
    Table::new(VtdSs::new(4).unwrap(), memory).unwrap()
}

fn unmap<F: Format, M: TableMemory>(table: &mut Table<F, M>, span: Span<Iova>) {
    let mut gather = Gather::new();
    table.unmap_mapped(span, &mut gather, &mut NoRuns).unwrap();
    table.reclaim(gather.never_walked());
}

#[test]
fn a_page_mapped_writable_twice_is_caught() {
    let memory = HeapTables::with_tables(64).unwrap();
    let record = Record::default();
    let mut a = tables(&memory, &record, GUEST_A);
    let mut other = tables(&memory, &record, GUEST_A_ON_NODE_1);
    let mut b = tables(&memory, &record, GUEST_B);

    // A large leaf, and the same memory in another root of the same guest: as it should be.
    a.map(G1, &[Span::new(8 * G1, M2)], Prot::RW).unwrap();
    other.map(G1, &[Span::new(8 * G1, M2)], Prot::RW).unwrap();
    // Another guest reads it: no harm either.
    b.map(0, &[Span::new(8 * G1, 4 * PAGE)], Prot::READ)
        .unwrap();
    assert!(record.borrow().violations().is_empty());

    // Another guest writes three pages in the middle of it.
    b.map(M2, &[Span::new(8 * G1 + 7 * PAGE, 3 * PAGE)], Prot::RW)
        .unwrap();
    let memory_shared = Span::new(8 * G1 + 7 * PAGE, 3 * PAGE);
    assert_eq!(
        record.borrow_mut().take_violations().first(),
        [Violation::SharedWritable {
            memory: memory_shared,
            before: GUEST_A,
            now: GUEST_B
        }]
    );
    // As long as one root of the first guest has it, it is caught again.
    unmap(&mut b, Span::new(M2, 3 * PAGE));
    unmap(&mut a, Span::new(G1, M2));
    b.map(M2, &[Span::new(8 * G1 + 9 * PAGE, PAGE)], Prot::RW)
        .unwrap();
    let found = record.borrow_mut().take_violations();
    assert_eq!(found.count(), 1);
    assert_eq!(
        found.first()[0].to_string(),
        "0x200009000+0x1000 is writable for domain 3 of owner 2, and was for domain 2 of owner 1 before"
    );
    // And when it has let go of it, not any more.
    unmap(&mut b, Span::new(M2, PAGE));
    unmap(&mut other, Span::new(G1, M2));
    b.map(M2, &[Span::new(8 * G1, M2)], Prot::RW).unwrap();
    assert!(record.borrow().violations().is_empty());
    assert_eq!(record.borrow().mapped_bytes(GUEST_B), M2 + 4 * PAGE);
}

#[test]
fn a_lost_reference_is_caught() {
    let memory = HeapTables::with_tables(64).unwrap();
    let record = Record::default();
    let mut table = tables(&memory, &record, GUEST_A);
    table
        .map(0, &[Span::new(8 * G1, 8 * PAGE)], Prot::RW)
        .unwrap();
    table.verify(&record, GUEST_A);
    assert!(record.borrow().violations().is_empty());

    // An entry is stored past the engine, where nothing was, ...
    let lowest = (1..=3)
        .map(|n| memory.base() + n * PAGE)
        .find(|table| Cell::get(&memory.entries(*table, 512)[7]) == (8 * G1 + 7 * PAGE) | 3);
    let cells = memory.entries(lowest.unwrap(), 512);
    cells[20].set((9 * G1) | 3);
    table.verify(&record, GUEST_A);
    let run = Run::new(20 * PAGE, Span::new(9 * G1, PAGE));
    let domain = GUEST_A;
    assert_eq!(
        record.borrow_mut().take_violations().first(),
        [Violation::LeafWithoutEntry { run, domain }]
    );
    // ... and unmapped again by the engine, though it is not recorded.
    unmap(&mut table, Span::new(20 * PAGE, PAGE));
    assert_eq!(
        record.borrow_mut().take_violations().first(),
        [Violation::NotMapped { run, domain }]
    );

    // One is emptied, so that its page would stay pinned for ever.
    cells[3].set(0);
    table.verify(&record, GUEST_A);
    let run = Run::new(3 * PAGE, Span::new(8 * G1 + 3 * PAGE, PAGE));
    assert_eq!(
        record.borrow_mut().take_violations().first(),
        [Violation::EntryWithoutLeaf { run, domain }]
    );
    // One leads elsewhere, and one can be written to that could only be read.
    cells[3].set((8 * G1 + 3 * PAGE) | 3);
    cells[5].set((9 * G1) | 3);
    cells[6].set((8 * G1 + 6 * PAGE) | 1);
    table.verify(&record, GUEST_A);
    let found = record.borrow_mut().take_violations();
    let leaf = |iova, pa| Violation::LeafWithoutEntry {
        run: Run::new(iova, Span::new(pa, PAGE)),
        domain,
    };
    let entry = |iova, pa| Violation::EntryWithoutLeaf {
        run: Run::new(iova, Span::new(pa, PAGE)),
        domain,
    };
    assert_eq!(
        found.first(),
        [
            leaf(5 * PAGE, 9 * G1),
            entry(5 * PAGE, 8 * G1 + 5 * PAGE),
            leaf(6 * PAGE, 8 * G1 + 6 * PAGE),
            entry(6 * PAGE, 8 * G1 + 6 * PAGE),
        ]
    );
}

#[test]
fn taking_a_table_down_is_noted() {
    let memory = HeapTables::with_tables(64).unwrap();
    let record = Record::default();
    let mut table = tables(&memory, &record, GUEST_A);
    table
        .map(0, &[Span::new(G1, G1 + 5 * PAGE)], Prot::RW)
        .unwrap();
    let (gather, _) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    assert_eq!(record.borrow().mapped_bytes(GUEST_A), 0);
    assert!(record.borrow().violations().is_empty());
}

/// Random maps and unmaps: what the record has is always what the tables have.
fn the_record_follows<F: Format>(format: F, steps: &[(bool, u64, u64, u64)]) {
    let memory = HeapTables::with_tables(256).unwrap();
    let record = Record::default();
    let checked = Checked::new(Counted::new(&memory), &record, GUEST_A);
    let mut table = Table::new(format, checked).unwrap();
    for &(map, page, pages, pa) in steps {
        let iova = G1 - 1000 * PAGE + page * PAGE;
        if map {
            let runs = [
                Span::new(8 * G1 + (iova & (G1 - 1)), pages * PAGE),
                Span::new(4 * G1 + pa * PAGE, pages * PAGE),
            ];
            let _ = table.map(iova, &runs, Prot::RW);
        } else {
            let mut gather = Gather::new();
            let range = Span::new(iova, pages * PAGE);
            let _ = table.unmap_mapped(range, &mut gather, &mut NoRuns);
            table.reclaim(gather.never_walked());
        }
        table.verify(&record, GUEST_A);
        assert_eq!(record.borrow().violations().first(), []);
    }
    let runs = table.runs(Span::new(0, 2 * G1));
    let mapped: u64 = runs.map(|run| run.len).sum();
    assert_eq!(record.borrow().mapped_bytes(GUEST_A), mapped);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_record_follows_the_tables(
        steps in prop::collection::vec((any::<bool>(), 0u64..2000, 1u64..700, 0u64..64), 1..40)
    ) {
        the_record_follows(VtdSs::new(4).unwrap(), &steps);
        the_record_follows(X86_64::new(4).unwrap(), &steps);
        the_record_follows(AmdV1::new(4).unwrap(), &steps);
        the_record_follows(RiscV::new(4).unwrap(), &steps);
        the_record_follows(ArmStage1::<K4>::new(48, 48).unwrap(), &steps);
    }
}

#[test]
fn threads_that_reuse_each_other_s_addresses_leave_nothing_in_the_books() {
    let memory = HeapTables::with_tables(256).unwrap();
    let record = Mutex::new(HeapRecord::new());
    let checked = Checked::new(&memory, &record, GUEST_A);
    let table = Table::new(VtdSs::new(4).unwrap(), checked).unwrap();
    let table: SharedTable<_, _> = SharedTable::new(table);
    // The pages that operations have for themselves.
    let taken = Mutex::new(0u64);
    let with = |first: u64, pages: u64, operation: &dyn Fn()| {
        let bits = ((1 << pages) - 1) << first;
        {
            let mut taken = taken.lock().unwrap();
            if *taken & bits != 0 {
                return;
            }
            *taken |= bits;
        }
        operation();
        *taken.lock().unwrap() &= !bits;
    };
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let (table, with) = (&table, &with);
            scope.spawn(move || {
                for round in 0..2000u64 {
                    let first = (round * 7 + thread) % 24;
                    let run = [Span::new(8 * G1 + round % 16 * PAGE, 3 * PAGE)];
                    with(first, 3, &|| {
                        let _ = table.enter().map(first * PAGE, &run, Prot::RW);
                    });
                    let first = (round * 5 + thread) % 24;
                    with(first, 4, &|| {
                        let mut gather = Gather::new();
                        let range = Span::new(first * PAGE, 4 * PAGE);
                        let _ = table.enter().unmap_mapped(range, &mut gather, &mut NoRuns);
                        table.reclaim(gather.never_walked());
                    });
                }
            });
        }
    });
    let table = table.into_inner();
    table.verify(&record, GUEST_A);
    assert_eq!(record.lock().unwrap().violations().first(), []);
}
