//! A top that grows while the table is in use.

use std::sync::atomic::AtomicU64;

use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::reclaim::Slots;
use iopt::walk::{Access, Walker};
use iopt::{
    BuildError, Flushed, Format, Gather, HeapTables, Prot, RangeError, Root, SharedTable, Table,
    TableMapError, TableMemory, TableOps as _,
};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const SMALL: PageSizes = PageSizes::from_bits(PAGE);

fn memory() -> HeapTables {
    HeapTables::with_tables(64).unwrap()
}

fn amdv1(levels: u8, memory: &HeapTables) -> Table<AmdV1, &HeapTables> {
    Table::new(AmdV1::new(levels).unwrap(), memory).unwrap()
}

/// Flushes, and returns the new root that the unit receives.
fn flush(gather: &mut Gather) -> (Option<Root>, Flushed) {
    let mut told = None;
    let flushed = gather
        .flush_with(|what| {
            told = what.new_root();
            Ok::<_, ()>(())
        })
        .unwrap();
    (told, flushed)
}

fn walk(memory: &HeapTables, root: Root, iova: u64) -> Option<u64> {
    let found = Walker::new(root).walk(memory, iova, Access::Read, &mut ());
    found.ok().map(|found| found.pa)
}

/// Bytes that a table with so many levels translates, less one.
fn last(levels: u8) -> u64 {
    match 12 + 9 * u32::from(levels) {
        bits @ ..64 => (1 << bits) - 1,
        _ => u64::MAX,
    }
}

#[test]
fn the_top_grows_level_by_level() {
    let memory = memory();
    let mut table = Table::with_page_sizes(AmdV1::new(1).unwrap(), &memory, SMALL).unwrap();
    let mut mapped = Vec::new();
    let mut roots = Vec::new();
    for levels in 1..=6u8 {
        let mut gather = Gather::new();
        let root = table.grow(levels, &mut gather).unwrap();
        assert_eq!((root, root.levels), (table.root(), levels));
        assert_eq!(table.format(), AmdV1::new(levels).unwrap());
        roots.push((root, mapped.len()));
        // Earlier mappings are there in the new root, and in every root that a unit may have
        // been left with.
        for (old, known) in &roots {
            for &(iova, pa) in &mapped[..*known] {
                assert_eq!(walk(&memory, *old, iova), Some(pa), "{old:?} {iova:#x}");
            }
        }
        for &(iova, pa) in &mapped {
            assert_eq!(table.translate(iova), Some(pa));
        }
        let (told, flushed) = flush(&mut gather);
        assert_eq!(told, (levels > 1).then_some(root));
        table.reclaim(flushed);

        // The ends of what the new level adds can be mapped, and nothing above.
        let first = if levels == 1 { 0 } else { last(levels - 1) + 1 };
        for iova in [first, last(levels) & !(PAGE - 1)] {
            let pa = (0x1_0000 + mapped.len() as u64) * PAGE;
            table.map(iova, &[Span::new(pa, PAGE)], Prot::RW).unwrap();
            mapped.push((iova, pa));
        }
        if let Some(above) = last(levels).checked_add(1) {
            let refused = table.map(above, &[Span::new(0, PAGE)], Prot::RW);
            assert!(matches!(
                refused,
                Err(TableMapError::Range(RangeError::OutsideAperture { aperture, .. }))
                    if aperture == AmdV1::new(levels).unwrap().aperture()
            ));
            assert_eq!(table.translate(above), None);
            assert_eq!(walk(&memory, root, above), None);
        }
        assert_eq!(table.tables(), memory.in_use());
    }
    // The old roots still lead to what was mapped when they were left.
    for (old, known) in &roots {
        for &(iova, pa) in &mapped[..*known] {
            assert_eq!(walk(&memory, *old, iova), Some(pa));
        }
    }
    let whole = table.format().aperture().spans();
    let found: Vec<_> = whole.flat_map(|span| table.leaves(span)).collect();
    let found: Vec<_> = found.iter().map(|l| (l.run.iova, l.run.pa)).collect();
    assert_eq!(found, mapped);
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    assert_eq!(memory.in_use(), 0);
}

#[test]
fn several_levels_are_added_at_once() {
    for (from, to) in [(1, 6), (2, 5), (3, 4), (1, 3)] {
        let memory = memory();
        let mut table = amdv1(from, &memory);
        table
            .map(PAGE, &[Span::new(7 * PAGE, PAGE)], Prot::RW)
            .unwrap();
        let (old, before) = (table.root(), table.tables());
        let mut gather = Gather::new();
        let root = table.grow(to, &mut gather).unwrap();
        assert_eq!(table.tables(), before + u64::from(to - from));
        assert_eq!(table.tables(), memory.in_use());
        for root in [old, root] {
            assert_eq!(walk(&memory, root, PAGE), Some(7 * PAGE));
            assert_eq!(walk(&memory, root, 0), None);
        }
        let (told, flushed) = flush(&mut gather);
        assert_eq!(told, Some(root));
        table.reclaim(flushed);
        let mut gather = Gather::new();
        let page = Span::new(PAGE, PAGE);
        table.unmap(page, &mut gather, &mut iopt::NoRuns).unwrap();
        // The old root, now empty, went as any table does.
        assert_eq!(gather.invalidation().new_root(), None);
        table.reclaim(flush(&mut gather).1);
        assert_eq!((table.tables(), memory.in_use()), (1, 1));
    }
}

#[test]
fn an_old_root_without_a_mapping_is_not_in_the_way_of_a_large_leaf() {
    let memory = memory();
    let mut table = amdv1(1, &memory);
    let mut gather = Gather::new();
    let old = table.root();
    table.grow(3, &mut gather).unwrap();
    assert_eq!(table.tables(), 1);
    // It waits for the flush, since the unit may walk it until then.
    assert_eq!((gather.tables(), memory.in_use()), (1, 2));
    assert_eq!(walk(&memory, old, 0), None);
    let (told, flushed) = flush(&mut gather);
    assert_eq!(told, Some(table.root()));
    table.reclaim(flushed);
    assert_eq!(memory.in_use(), 1);
    table.map(0, &[Span::new(M2, M2)], Prot::RW).unwrap();
    assert_eq!(table.leaf_at(5).unwrap().run.len, M2);
}

#[test]
fn larger_leaves_come_with_the_levels_that_hold_them() {
    let memory = memory();
    let mut table = amdv1(1, &memory);
    assert_eq!(table.page_sizes(), PageSizes::from_log2_range(12, 20));
    table.grow(3, &mut Gather::new()).unwrap();
    assert_eq!(table.page_sizes(), PageSizes::from_log2_range(12, 38));
    let g1 = [Span::new(1 << 30, 1 << 30)];
    table.map(1 << 30, &g1, Prot::RW).unwrap();
    assert_eq!(table.leaf_at(1 << 30).unwrap().run.len, 1 << 30);
    // And those that were never wanted do not come.
    let wanted = PageSizes::from_bits(PAGE | 1 << 30);
    let mut table = Table::with_page_sizes(AmdV1::new(1).unwrap(), &memory, wanted).unwrap();
    assert_eq!(table.page_sizes(), SMALL);
    table.grow(4, &mut Gather::new()).unwrap();
    assert_eq!(table.page_sizes(), wanted);
}

#[test]
fn a_growth_that_is_refused_changes_nothing() {
    let memory = HeapTables::with_tables(16).unwrap();
    let mut table = amdv1(2, &memory);
    table.map(0, &[Span::new(0, PAGE)], Prot::RW).unwrap();
    let root = table.root();
    let mut gather = Gather::new();
    let refused = table.grow(7, &mut gather).unwrap_err();
    let format = iopt::FormatId::AmdV1;
    assert_eq!(refused, BuildError::Levels { format, levels: 7 });
    let rest = memory.reserve(14 - 3).unwrap();
    let refused = table.grow(6, &mut gather).unwrap_err();
    assert!(matches!(refused, BuildError::NoTables(none) if none.needed == 4 * PAGE));
    assert!(gather.is_empty());
    assert_eq!((table.root(), table.tables()), (root, 2));
    assert_eq!(table.translate(0), Some(0));
    // Fewer levels, or as many, are there already.
    assert_eq!(table.grow(1, &mut gather), Ok(root));
    assert_eq!(table.grow(2, &mut gather), Ok(root));
    assert!(gather.is_empty());
    memory.give_back(rest);
    assert!(table.grow(6, &mut gather).is_ok());
    assert_eq!(table.tables(), memory.in_use());

    fn fixed<F: Format>(format: F) {
        let memory = HeapTables::with_tables(16).unwrap();
        let mut table = Table::new(format, &memory).unwrap();
        let (root, mut gather) = (table.root(), Gather::new());
        let refused = table.grow(5, &mut gather).unwrap_err();
        let format = F::ID;
        assert_eq!(refused, BuildError::Levels { format, levels: 5 });
        assert_eq!(table.grow(4, &mut gather), Ok(root));
        assert!(gather.is_empty());
    }
    fixed(VtdSs::new(4).unwrap());
    fixed(X86_64::new(4).unwrap());
}

#[test]
fn a_shared_table_grows_and_is_the_larger_one_afterwards() {
    let memory = memory();
    let slots = Slots::<AtomicU64, 2>::default();
    let table = SharedTable::with_reclaim(amdv1(1, &memory), slots);
    table
        .enter()
        .map(0, &[Span::new(9 * PAGE, PAGE)], Prot::RW)
        .unwrap();
    let mut gather = Gather::new();
    let root = table.grow(4, &mut gather).unwrap();
    assert_eq!(table.enter().root(), root);
    // Another call before the flush: a caller that relies on the growth has to flush, too.
    let mut second = Gather::new();
    assert_eq!(table.grow(3, &mut second), Ok(root));
    assert_eq!(flush(&mut second).0, Some(root));
    let (told, flushed) = flush(&mut gather);
    assert_eq!(told, Some(root));
    table.reclaim(flushed);
    assert_eq!(table.grow(3, &mut second), Ok(root));
    assert!(second.is_empty());
    let far = last(4) & !(PAGE - 1);
    table
        .enter()
        .map(far, &[Span::new(PAGE, PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(table.enter().translate(0), Some(9 * PAGE));
    let table = table.into_inner();
    assert_eq!(table.format(), AmdV1::new(4).unwrap());
    assert_eq!(table.translate(far), Some(PAGE));
    assert_eq!(table.tables(), memory.in_use());
}
