//! Failures that other implementations of I/O page tables have had, each by its name.

use iopt::format::{AmdV1, ArmStage1, K4Lpa2, K16Lpa2, K64Lpa, VtdSs, X86_64};
use iopt::{
    Format, Gather, HeapArena, HeapTables, Interruption, Prot, Table, TableMapError, TableMemory,
    TableOps as _, TableUnmapError, WideCell,
};
use runs::{Pa, Run, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

/// Runs a check over every format.
macro_rules! each_format {
    ($check:ident) => {
        $check(VtdSs::new(4).unwrap());
        $check(X86_64::new(4).unwrap());
        $check(AmdV1::new(4).unwrap());
    };
}

fn table<F: Format>(format: F, memory: &HeapTables) -> Table<F, &HeapTables> {
    Table::new(format, memory).unwrap()
}

fn memory() -> HeapTables {
    HeapTables::with_tables(64).unwrap()
}

#[test]
fn unmapping_4k_inside_a_huge_page_does_not_follow_its_data_as_if_it_were_a_table() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        for size in [M2, G1] {
            table
                .map(4 * G1, &[Span::new(8 * G1, size)], Prot::RW)
                .unwrap();
            let page = Span::new(4 * G1 + 5 * PAGE, PAGE);
            let mut gather = Gather::new();
            let refused = table
                .unmap(page, &mut gather, &mut iopt::NoRuns)
                .unwrap_err();
            let leaf = Run::new(4 * G1, Span::new(8 * G1, size));
            assert_eq!(refused, TableUnmapError::InsideLeaf { range: page, leaf });
            assert!(gather.is_empty());
            assert_eq!(table.translate(page.start), Some(8 * G1 + 5 * PAGE));
            table
                .unmap(Span::new(4 * G1, size), &mut gather, &mut iopt::NoRuns)
                .unwrap();
            table.reclaim(gather.never_walked());
        }
    }
    each_format!(check);
}

#[test]
fn a_mapping_of_physical_address_0_is_a_mapping() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        for (iova, len) in [(0, PAGE), (M2, M2), (G1, G1)] {
            table.map(iova, &[Span::new(0, len)], Prot::RW).unwrap();
            assert_eq!(table.translate(iova), Some(0));
            assert_eq!(table.translate(iova + len - 1), Some(len - 1));
            let again = table.map(iova, &[Span::new(0, len)], Prot::RW);
            assert!(matches!(again, Err(TableMapError::Overlap { .. })));
        }
        let mut gather = Gather::new();
        let mut runs = Vec::new();
        for (iova, len) in [(0, PAGE), (M2, M2), (G1, G1)] {
            let range = Span::new(iova, len);
            table
                .unmap(range, &mut gather, &mut |run| runs.push(run))
                .unwrap();
        }
        assert_eq!(
            runs,
            [
                Run::new(0, Span::new(0, PAGE)),
                Run::new(M2, Span::new(0, M2)),
                Run::new(G1, Span::new(0, G1))
            ]
        );
        table.reclaim(gather.never_walked());
    }
    each_format!(check);
}

#[test]
fn a_table_at_address_0_is_a_table() {
    fn check<F: Format>(format: F) {
        // The arena's window begins at 0, and so does its first table, the root.
        let memory = HeapTables::with_tables_at(64, 0).unwrap();
        let other = memory.reserve(1).unwrap();
        memory.give_back(other);
        let mut table = table(format, &memory);
        table.map(0, &[Span::new(G1, PAGE)], Prot::RW).unwrap();
        assert_eq!(table.translate(0), Some(G1));
        assert_eq!(table.root().address, 0);
        let mut gather = Gather::new();
        table
            .unmap(Span::new(0, PAGE), &mut gather, &mut iopt::NoRuns)
            .unwrap();
        table.reclaim(gather.never_walked());
        assert_eq!(memory.in_use(), 1);
    }
    each_format!(check);
}

#[test]
fn an_unmap_of_nothing_is_no_success() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        let mut gather = Gather::new();
        let range = Span::new(G1, 3 * PAGE);
        let refused = table
            .unmap(range, &mut gather, &mut iopt::NoRuns)
            .unwrap_err();
        assert_eq!(refused, TableUnmapError::Hole { range, at: G1 });
        // And where holes are welcome, the number of bytes tells.
        assert_eq!(
            table.unmap_mapped(range, &mut gather, &mut iopt::NoRuns),
            Ok(0)
        );
        assert!(gather.is_empty(), "there is nothing to flush");
    }
    each_format!(check);
}

#[test]
fn a_map_that_fails_at_its_end_leaves_nothing_of_its_beginning() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        let last = 4 * G1 + 2 * M2 + 7 * PAGE;
        table.map(last, &[Span::new(G1, PAGE)], Prot::RW).unwrap();
        let tables = (table.tables(), memory.in_use());
        let runs = [
            Span::new(8 * G1, M2 + 3 * PAGE),
            Span::new(16 * G1, M2 + 5 * PAGE),
        ];
        let refused = table.map(4 * G1, &runs, Prot::RW).unwrap_err();
        assert_eq!(
            refused,
            TableMapError::Overlap {
                wanted: Span::new(4 * G1, 2 * M2 + 8 * PAGE),
                found: Run::new(last, Span::new(G1, PAGE))
            }
        );
        assert_eq!(table.leaves(Span::new(0, 64 * G1)).count(), 1);
        assert_eq!((table.tables(), memory.in_use()), tables);
    }
    each_format!(check);
}

#[test]
fn a_group_of_entries_is_never_unmapped_in_part() {
    let memory = memory();
    let mut table = table(AmdV1::new(4).unwrap(), &memory);
    table
        .map(0x10_0000, &[Span::new(0x40_0000, 0x1_0000)], Prot::RW)
        .unwrap();
    let leaf = Run::new(0x10_0000, Span::new(0x40_0000, 0x1_0000));
    assert_eq!(table.leaf_at(0x10_5000).unwrap().run, leaf);
    let mut gather = Gather::new();
    for part in [
        Span::new(0x10_0000, PAGE),
        Span::new(0x10_f000, PAGE),
        Span::new(0x10_4000, 0x8000),
    ] {
        let refused = table
            .unmap_mapped(part, &mut gather, &mut iopt::NoRuns)
            .unwrap_err();
        assert_eq!(refused, TableUnmapError::InsideLeaf { range: part, leaf });
    }
    // A map over part of it is refused as well.
    let over = table
        .map(0x10_4000, &[Span::new(0, PAGE)], Prot::RW)
        .unwrap_err();
    assert_eq!(
        over,
        TableMapError::Overlap {
            wanted: Span::new(0x10_4000, PAGE),
            found: leaf
        }
    );
    table
        .unmap(leaf.input(), &mut gather, &mut iopt::NoRuns)
        .unwrap();
    table.reclaim(gather.never_walked());
}

#[test]
fn a_flush_names_the_levels_of_the_leaves_that_were_there_before() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        table
            .map(4 * G1, &[Span::new(8 * G1, M2 + 2 * PAGE)], Prot::RW)
            .unwrap();
        let mut gather = Gather::new();
        let range = Span::new(4 * G1, M2 + 2 * PAGE);
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        // Small leaves take the place of the large one before the flush.
        table
            .map(4 * G1, &[Span::new(16 * G1 + PAGE, PAGE)], Prot::RW)
            .unwrap();
        assert_eq!(gather.invalidation().leaf_levels(), 0b11);
        assert_eq!(gather.invalidation().ranges(), [range]);
        assert!(gather.invalidation().tables_unlinked());
        table.reclaim(gather.never_walked());
    }
    each_format!(check);
}

#[test]
fn every_table_below_a_large_range_is_given_back() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = table(format, &memory);
        // Sixteen tables of 4K leaves side by side, then one run of large leaves over all of them.
        for n in 0..16 {
            table
                .map(n * M2, &[Span::new(G1 + n * M2 + PAGE, M2)], Prot::RW)
                .unwrap();
        }
        assert!(memory.in_use() >= 18);
        let mut gather = Gather::new();
        table
            .unmap(Span::new(0, 16 * M2), &mut gather, &mut iopt::NoRuns)
            .unwrap();
        assert!(gather.tables() >= 16);
        // Units that cache tables receive each: all that lay below, at every level, is flushed.
        let flush = gather.invalidation();
        assert!(flush.tables_unlinked());
        assert_eq!(flush.ranges(), [Span::new(0, 16 * M2)]);
        assert_eq!(flush.leaf_levels(), 0b1);
        // While the unit may still walk the old tables, new ones take other memory.
        let before = memory.in_use();
        table
            .map(0, &[Span::new(4 * G1, 16 * M2)], Prot::RW)
            .unwrap();
        assert!(memory.in_use() >= before);
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        table.reclaim(flushed);
        assert_eq!(memory.in_use(), table.tables());
        assert_eq!(table.tables(), 3);
    }
    each_format!(check);
}

#[test]
fn a_root_that_changes_is_never_without_its_flush() {
    let memory = memory();
    let mut table = table(AmdV1::new(1).unwrap(), &memory);
    let page = Span::new(0, PAGE);
    table.map(0, &[page.cast()], Prot::RW).unwrap();
    let mut growth = Gather::new();
    let root = table.grow(2, &mut growth).unwrap();
    // The gather of the growth is put aside. Whichever gather comes first to the unit with a table
    // that it may walk names the new root all the same.
    let mut other = Gather::new();
    table.unmap(page, &mut other, &mut iopt::NoRuns).unwrap();
    assert_eq!(other.tables(), 1, "the old root is unlinked");
    assert_eq!(other.invalidation().new_root(), Some(root));
    // A flush that fails leaves it so.
    assert!(other.flush_with(|_| Err(())).is_err());
    assert_eq!(other.invalidation().new_root(), Some(root));
    let mut told = None;
    let flushed = other.flush_with(|what| {
        told = what.new_root();
        Ok::<_, ()>(())
    });
    assert_eq!(told, Some(root));
    table.reclaim(flushed.unwrap());
    // The unit knows: from now on nothing says it again, but for the growth's own gather.
    table.map(0, &[page.cast()], Prot::RW).unwrap();
    let mut later = Gather::new();
    table.unmap(page, &mut later, &mut iopt::NoRuns).unwrap();
    assert_eq!(later.tables(), 1);
    assert_eq!(later.invalidation().new_root(), None);
    assert!(!growth.is_empty());
    assert_eq!(growth.invalidation().new_root(), Some(root));
    table.reclaim(later.never_walked());
    table.reclaim(growth.never_walked());
    // It grows again: there is another root to be told of.
    let mut growth = Gather::new();
    let root = table.grow(6, &mut growth).unwrap();
    assert_eq!(growth.invalidation().new_root(), Some(root));
    table.reclaim(growth.never_walked());
    assert_eq!(memory.in_use(), 1);
}

fn merged_far_behind_the_start<F: Format>(format: F) {
    let memory = memory();
    let mut table = table(format, &memory);
    // Where a leaf has replaced a table is noted in 32 bits, which begin again every 2^53 bytes.
    let (far, pa) = (1u64 << 53, 0x8_0000_0000);
    for (iova, pa, len) in [
        (far - 2 * PAGE, 0x7_0000_3000, PAGE),
        (far, pa, M2 - PAGE),
        (far + M2 - PAGE, pa + M2 - PAGE, PAGE),
    ] {
        table.map(iova, &[Span::new(pa, len)], Prot::RW).unwrap();
    }
    let tables = table.tables();
    let range = Span::new(far - 2 * PAGE, 2 * PAGE + M2);
    let (mut gather, refused) = (Gather::new(), Interruption::Refused);
    let flush = |_: &_| Ok::<_, ()>(());
    table.merge(range, refused, &mut gather, flush).unwrap();
    assert_eq!(
        table.leaf_at(far).unwrap().run,
        Run::new(far, Span::new(pa, M2))
    );
    assert_eq!((table.tables(), memory.in_use()), (tables - 1, tables - 1));
}

#[test]
fn a_table_that_a_merge_replaces_far_behind_its_start_is_given_back() {
    merged_far_behind_the_start(AmdV1::new(6).unwrap());
    merged_far_behind_the_start(VtdSs::new(5).unwrap());
    merged_far_behind_the_start(X86_64::new(5).unwrap());
}

#[test]
fn runs_of_one_leaf_each_lead_each_to_its_own_memory_or_none_is_mapped() {
    fn check<F: Format>(format: F) {
        let memory = HeapTables::with_tables(512).unwrap();
        let mut table = table(format, &memory);
        // Pages, groups of AMD's, and large leaves: more of them than a table has entries, from the
        // middle of a table on; a run of several leaves and one of a smaller size in between.
        for size in [PAGE, 16 * PAGE, M2] {
            let (iova, pa) = (64 * G1 + 300 * size, 128 * G1);
            let mut runs: Vec<Span<Pa>> = (0..900)
                .map(|n| Span::new(pa + 3 * n * size, size))
                .collect();
            runs[400].len = 2 * size;
            if size == M2 {
                runs[500] = Span::new(pa - M2 + PAGE, M2);
            }
            let len = runs.iter().map(|run| run.len).sum::<u64>();
            let ends = |table: &Table<F, &HeapTables>| {
                let mut at = iova;
                for run in &runs {
                    for offset in [0, run.len - 1] {
                        assert_eq!(table.translate(at + offset), Some(run.start + offset));
                    }
                    at += run.len;
                }
            };
            table.map(iova, &runs, Prot::RW).unwrap();
            ends(&table);
            let mut gather = Gather::new();
            let range = Span::new(iova, len);
            table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
            table.reclaim(gather.never_walked());
            let in_use = memory.in_use();
            // The same with another leaf in the way, far behind the first.
            let there = Run::new(iova + 777 * size, Span::new(0x5000 * size, size));
            let other = [Span::new(there.pa, size)];
            table.map(there.iova, &other, Prot::READ).unwrap();
            let before = memory.in_use();
            let refused = table.map(iova, &runs, Prot::RW).unwrap_err();
            let TableMapError::Overlap { wanted, found } = refused else {
                panic!("{refused}");
            };
            // Its first leaf.
            assert_eq!(
                (wanted, found.iova, found.pa),
                (range, there.iova, there.pa)
            );
            assert_eq!(memory.in_use(), before);
            assert_eq!(table.translate(iova), None);
            let mut gather = Gather::new();
            table
                .unmap(there.input(), &mut gather, &mut iopt::NoRuns)
                .unwrap();
            table.reclaim(gather.never_walked());
            assert_eq!(memory.in_use(), in_use);
        }
    }
    each_format!(check);
}

#[test]
fn a_hole_in_a_row_of_leaves_of_any_level_is_found_wherever_it_is() {
    fn check<F: Format>(format: F) {
        let memory = HeapTables::with_tables(64).unwrap();
        let mut table = table(format, &memory);
        // Over the border of a table, from the middle of one; one run, single leaves, and both in turn.
        const LEAVES: u64 = 700;
        for size in [PAGE, M2] {
            for stride in [|n| n, |n| 2 * n, |n: u64| n + n / 40] {
                let (iova, pa) = (64 * G1 + 300 * size, 256 * G1 + 300 * size);
                let whole = Span::new(iova, LEAVES * size);
                for hole in [0, 1, 2, 39, 40, 41, 211, 212, 213, LEAVES - 2, LEAVES - 1] {
                    for n in (0..LEAVES).filter(|n| *n != hole) {
                        let leaf = Span::new(pa + stride(n) * size, size);
                        table.map(iova + n * size, &[leaf], Prot::RW).unwrap();
                    }
                    let (mut gather, at) = (Gather::new(), iova + hole * size);
                    let refused = table.unmap(whole, &mut gather, &mut iopt::NoRuns);
                    assert_eq!(refused, Err(TableUnmapError::Hole { range: whole, at }));
                    assert!(gather.is_empty());
                    let left = table.unmap_mapped(whole, &mut gather, &mut iopt::NoRuns);
                    assert_eq!(left, Ok((LEAVES - 1) * size), "{size:#x}, hole {hole}");
                    table.reclaim(gather.never_walked());
                }
            }
        }
    }
    each_format!(check);
}

/// Leaves of one run are found together: neither the last of them nor the one behind is left out.
#[test]
fn each_leaf_of_a_row_counts_and_is_split() {
    let memory = HeapTables::with_tables(16).unwrap();
    let mut table = table(VtdSs::new(4).unwrap(), &memory);
    let sizes = |table: &Table<_, _>| -> Vec<(u64, u64)> {
        let sizes = table.leaf_sizes();
        sizes
            .iter()
            .map(|(size, class)| (size, class.count))
            .collect()
    };
    // Three leaves in a row, one elsewhere, and one behind a hole.
    let runs = [Span::new(16 * M2, 3 * M2), Span::new(64 * M2, M2)];
    table.map(M2, &runs, Prot::RW).unwrap();
    table.map(6 * M2, &runs[1..], Prot::RW).unwrap();
    assert_eq!(sizes(&table), [(M2, 5)]);

    let (range, refused) = (Span::new(M2, 6 * M2), Interruption::Refused);
    let mut gather = Gather::new();
    let flush = |_: &iopt::Invalidation| Ok::<_, ()>(());
    let split = table.split(range, PAGE, refused, &mut gather, flush);
    assert_eq!(split, Ok(()));
    assert_eq!(sizes(&table), [(PAGE, 5 * 512)]);
    assert_eq!(table.merge(range, refused, &mut gather, flush), Ok(()));
    assert_eq!(sizes(&table), [(M2, 5)]);
    assert_eq!(table.tables(), 3);
}

/// Where entries hold the uppermost bits of an address elsewhere, those of a row do not go on by a constant step.
#[test]
fn a_few_pages_whose_memory_goes_on_behind_the_moved_bits_lead_there() {
    fn check<F: Format, const TABLE_LOG2: u32>(format: F, moved: u32) {
        let page = 1u64 << TABLE_LOG2;
        let memory = HeapArena::<WideCell, TABLE_LOG2>::with_tables(8).unwrap();
        let mut table = Table::new(format, &memory).unwrap();
        // Their table is there.
        table.map(0, &[Span::new(page, page)], Prot::RW).unwrap();
        let run = Span::new((1 << moved) - 2 * page, 4 * page);
        table.map(4 * page, &[run], Prot::RW).unwrap();
        for nth in 0..4 {
            let found = table.translate((4 + nth) * page);
            assert_eq!(found, Some(run.start + nth * page), "{nth}");
        }
        let (mut gather, range) = (Gather::new(), Span::new(4 * page, run.len));
        let mut runs: Vec<Run> = Vec::new();
        table
            .unmap(range, &mut gather, &mut |run| runs.push(run))
            .unwrap();
        assert_eq!(runs, [Run::new(range.start, run)]);
        table.reclaim(gather.never_walked());
    }
    check::<_, 16>(ArmStage1::<K64Lpa>::new(52, 52).unwrap(), 48);
    check::<_, 12>(ArmStage1::<K4Lpa2>::new(52, 52).unwrap(), 50);
    check::<_, 14>(ArmStage1::<K16Lpa2>::new(50, 52).unwrap(), 50);
}
