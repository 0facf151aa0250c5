//! Accessed bits when leaves change their size: an access to a leaf is one to each of its parts, and one to
//! a part is one to the whole.

use iopt::format::{AmdV1, Entry, RiscV, VtdSs, X86_64};
use iopt::{
    Cell, Format, Gather, HeapTables, Interruption, Prot, Table, TableMemory, TableOps as _,
};
use runs::Span;

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;

/// Calls `each` with the entry of every leaf.
fn leaves<F: Format>(
    table: &Table<F, &HeapTables>,
    mut each: impl FnMut(&<HeapTables as TableMemory>::Cell),
) {
    let format = table.format();
    table.for_each_table(&mut |address, level| {
        let level = usize::from(level);
        for cell in table.memory().entries(address, format.entries(level)) {
            if let Entry::Leaf { .. } = F::decode(level, cell.get()) {
                each(cell);
            }
        }
    });
}

fn accessed<F: Format>(table: &Table<F, &HeapTables>) -> (u64, u64) {
    let (mut accessed, mut all) = (0, 0);
    leaves(table, |cell| {
        accessed += u64::from(cell.get() & F::ACCESSED != 0);
        all += 1;
    });
    (accessed, all)
}

fn check<F: Format>(format: F) {
    let memory = HeapTables::with_tables(16).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let range = Span::new(M2, M2);
    table.map(M2, &[Span::new(1 << 30, M2)], Prot::RW).unwrap();
    assert_eq!(accessed(&table), (0, 1), "{}", F::ID);
    let allowed = Interruption::Allowed;
    let mut gather = Gather::new();
    for read in [0, 1, 200, 512] {
        table
            .split(range, PAGE, allowed, &mut gather, |_| Ok::<_, ()>(()))
            .unwrap();
        let mut nth = 0;
        leaves(&table, |cell| {
            let bit = if nth < read { F::ACCESSED } else { 0 };
            cell.set(cell.get() & !F::ACCESSED | bit);
            nth += 1;
        });
        assert_eq!(accessed(&table), (read, 512));
        table
            .merge(range, allowed, &mut gather, |_| Ok::<_, ()>(()))
            .unwrap();
        assert_eq!(
            accessed(&table),
            (u64::from(read > 0), 1),
            "{}: {read}",
            F::ID
        );
    }
    table
        .split(range, PAGE, allowed, &mut gather, |_| Ok::<_, ()>(()))
        .unwrap();
    assert_eq!(accessed(&table), (512, 512), "{}", F::ID);
}

#[test]
fn an_access_to_a_leaf_or_to_one_of_its_parts_is_kept_when_it_is_split_or_merged() {
    check(VtdSs::new(4).unwrap());
    check(X86_64::new(4).unwrap());
    check(AmdV1::new(4).unwrap());
    check(RiscV::new(4).unwrap().with_hardware_updates(true));
}
