//! Operations that do a part: counts of equal pages, and unmaps within a bound.

use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs, X86_64};
use iopt::{
    Bound, Format, Gather, HeapTables, Prot, RangeError, SharedTable, Table, TableMapError,
    TableMemory, TableOps, TableUnmapError,
};
use runs::{Iova, PageSizes, Run, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

macro_rules! each_format {
    ($check:ident) => {
        $check(VtdSs::new(4).unwrap());
        $check(X86_64::new(4).unwrap());
        $check(AmdV1::new(4).unwrap());
        $check(RiscV::new(4).unwrap());
        $check(ArmStage1::<K4>::new(48, 48).unwrap());
    };
}

fn memory() -> HeapTables {
    HeapTables::with_tables_at(64, 1 << 40).unwrap()
}

/// Every word of the arena: tables are handed out in order, so equal work leaves equal bytes.
fn bytes(memory: &HeapTables) -> Vec<u64> {
    let words = memory.in_use() * 512;
    (0..words)
        .map(|n| memory.read(memory.base() + n * 8).unwrap())
        .collect()
}

#[test]
fn a_loop_of_calls_for_some_pages_and_one_for_all_leave_the_same_bytes() {
    fn check<F: Format>(format: F) {
        for (size, pages, iova, most) in [
            (PAGE, 1300, G1 - 700 * PAGE, 300),
            (PAGE, 1300, G1 - 700 * PAGE, 1),
            (M2, 700, 3 * G1 - 200 * M2, 300),
        ] {
            let pa = 32 * G1 + (iova & (G1 - 1));
            let (narrow_memory, wide_memory) = (memory(), memory());
            let mut narrow = Table::new(format, &narrow_memory).unwrap();
            let mut wide =
                Table::with_page_sizes(format, &wide_memory, PageSizes::from_bits(size)).unwrap();
            wide.map(iova, &[Span::new(pa, pages * size)], Prot::RW)
                .unwrap();
            let mut done = 0;
            while done < pages {
                let at = done * size;
                let progress = narrow.map_pages(
                    iova + at,
                    Span::new(pa + at, size),
                    (pages - done).min(most),
                    Prot::RW,
                );
                progress.result.unwrap();
                assert!(progress.bytes > 0);
                done += progress.bytes / size;
            }
            assert!(bytes(&narrow_memory) == bytes(&wide_memory));

            let (mut gather, mut other) = (Gather::new(), Gather::new());
            wide.unmap(Span::new(iova, pages * size), &mut other, &mut iopt::NoRuns)
                .unwrap();
            let mut done = 0;
            while done < pages {
                let at = iova + done * size;
                let progress = narrow.unmap_pages(at, size, (pages - done).min(most), &mut gather);
                progress.result.unwrap();
                done += progress.bytes / size;
            }
            assert_eq!((narrow.tables(), wide.tables()), (1, 1));
            assert_eq!(gather.tables(), other.tables());
            narrow.reclaim(gather.never_walked());
            wide.reclaim(other.never_walked());
        }
    }
    each_format!(check);
}

#[test]
fn how_far_a_call_came_is_said_beside_an_error_too() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = Table::new(format, &memory).unwrap();
        table
            .map(G1 + 5 * PAGE, &[Span::new(7 * G1 + PAGE, PAGE)], Prot::RW)
            .unwrap();
        let progress = table.map_pages(G1, Span::new(8 * G1, PAGE), 20, Prot::RW);
        assert_eq!(progress.bytes, 5 * PAGE);
        let found = Run::new(G1 + 5 * PAGE, Span::new(7 * G1 + PAGE, PAGE));
        assert!(
            matches!(progress.result, Err(TableMapError::Overlap { found: f, .. }) if f == found)
        );
        assert_eq!(table.translate(G1 + 4 * PAGE), Some(8 * G1 + 4 * PAGE));
        assert_eq!(table.translate(G1 + 6 * PAGE), None);

        let mut gather = Gather::new();
        let progress = table.unmap_pages(G1, PAGE, 20, &mut gather);
        assert_eq!(progress.bytes, 6 * PAGE);
        let at = G1 + 6 * PAGE;
        assert!(matches!(progress.result, Err(TableUnmapError::Hole { at: a, .. }) if a == at));
        table.reclaim(gather.never_walked());
        assert_eq!(table.tables(), 1);
    }
    each_format!(check);
}

#[test]
fn pages_of_another_size_are_left_alone() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = Table::new(format, &memory).unwrap();
        table
            .map_pages(G1, Span::new(8 * G1, M2), 1, Prot::RW)
            .result
            .unwrap();
        table
            .map_pages(G1 + M2, Span::new(9 * G1, PAGE), 1, Prot::RW)
            .result
            .unwrap();
        let mut gather = Gather::new();
        let leaf = Run::new(G1, Span::new(8 * G1, M2));
        assert_eq!(
            table.unmap_pages(G1, PAGE, 1, &mut gather).result,
            Err(TableUnmapError::OtherSize { size: PAGE, leaf })
        );
        let progress = table.unmap_pages(G1, M2, 2, &mut gather);
        assert_eq!(progress.bytes, M2);
        let leaf = Run::new(G1 + M2, Span::new(9 * G1, PAGE));
        assert_eq!(
            progress.result,
            Err(TableUnmapError::OtherSize { size: M2, leaf })
        );
        table.reclaim(gather.never_walked());
    }
    each_format!(check);
}

#[test]
fn what_is_not_well_formed_is_refused() {
    let memory = memory();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    let mut gather = Gather::new();
    let refused = table
        .map_pages(0, Span::new(0, 8192), 1, Prot::RW)
        .result
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no leaves of 0x2000 bytes; there are 4K|2M|1G"
    );
    let refused = table
        .map_pages(PAGE, Span::new(0, M2), 1, Prot::RW)
        .result
        .unwrap_err();
    let misaligned = RangeError::Misaligned {
        value: PAGE,
        granule: M2,
    };
    assert_eq!(refused, TableMapError::Range(misaligned));
    let refused = table
        .map_pages(M2, Span::new(PAGE, M2), 1, Prot::RW)
        .result
        .unwrap_err();
    assert_eq!(refused, TableMapError::Range(misaligned));
    assert_eq!(
        table.unmap_pages(0, PAGE, 0, &mut gather).result,
        Err(TableUnmapError::Range(RangeError::Empty))
    );
    assert!(
        table
            .map_pages(1 << 48, Span::new(0, PAGE), 1, Prot::RW)
            .result
            .is_err()
    );
    assert!(
        table
            .unmap_pages(!0xfff, PAGE, 1, &mut gather)
            .result
            .is_err()
    );
    assert!(gather.is_empty());
}

/// The worked example of the series that brought these calls: 4 MiB as two pages of 2 MiB at 0. It counts 4
/// indirect calls to unmap them, two layers with one each; there is one layer here.
#[test]
fn four_mebibytes_at_0_are_unmapped_by_one_call() {
    let memory = memory();
    let mut table = Table::new(ArmStage1::<K4>::new(48, 48).unwrap(), &memory).unwrap();
    let mut gather = Gather::new();
    let progress = table.map_pages(0, Span::new(8 * G1, M2), 2, Prot::RW);
    assert_eq!(progress.bytes, 2 * M2);
    assert_eq!(table.leaves(Span::new(0, G1)).count(), 2);
    assert_eq!(table.unmap_pages(0, M2, 2, &mut gather).bytes, 2 * M2);
    assert_eq!(gather.invalidation().ranges(), [Span::new(0, 2 * M2)]);
    table.reclaim(gather.never_walked());
    assert_eq!(memory.in_use(), 1);
    let _ = memory.reserve(1).map(|reserve| memory.give_back(reserve));
}

#[test]
fn narrow_calls_on_a_shared_table_do_the_same() {
    fn check<F: Format>(format: F) {
        let (narrow_memory, wide_memory) = (memory(), memory());
        let shared = SharedTable::<_, _>::new(Table::new(format, &narrow_memory).unwrap());
        let mut narrow = shared.enter();
        let mut wide =
            Table::with_page_sizes(format, &wide_memory, PageSizes::from_bits(PAGE)).unwrap();
        let (iova, pa, pages) = (G1 - 700 * PAGE, 32 * G1, 1300);
        wide.map(iova, &[Span::new(pa, pages * PAGE)], Prot::RW)
            .unwrap();
        let mut done = 0;
        while done < pages {
            let at = done * PAGE;
            let progress = narrow.map_pages(
                iova + at,
                Span::new(pa + at, PAGE),
                (pages - done).min(300),
                Prot::RW,
            );
            progress.result.unwrap();
            assert!(progress.bytes > 0);
            done += progress.bytes / PAGE;
        }
        assert!(bytes(&narrow_memory) == bytes(&wide_memory));

        // A page in the way, a hole, and a leaf of another size end a call where they are.
        let mut gather = Gather::new();
        narrow
            .unmap_pages(iova + 5 * PAGE, PAGE, 1, &mut gather)
            .result
            .unwrap();
        let progress = narrow.unmap_pages(iova, PAGE, 9, &mut gather);
        assert_eq!(progress.bytes, 5 * PAGE);
        assert!(
            matches!(progress.result, Err(TableUnmapError::Hole { at, .. }) if at == iova + 5 * PAGE)
        );
        let progress = narrow.map_pages(iova, Span::new(pa, PAGE), 9, Prot::RW);
        assert_eq!(progress.bytes, 6 * PAGE);
        assert!(matches!(
            progress.result,
            Err(TableMapError::Overlap { .. })
        ));
        narrow
            .map_pages(8 * G1, Span::new(64 * G1, M2), 1, Prot::RW)
            .result
            .unwrap();
        let progress = narrow.unmap_pages(8 * G1, PAGE, 3, &mut gather);
        assert_eq!(progress.bytes, 0);
        assert!(matches!(
            progress.result,
            Err(TableUnmapError::OtherSize { .. })
        ));
        shared.reclaim(gather.never_walked());
    }
    each_format!(check);
}

#[test]
fn a_large_page_goes_into_a_kept_table_as_small_ones() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = Table::new(format, &memory).unwrap();
        table.keep_empty_tables(true);
        let mut gather = Gather::new();
        table
            .map_pages(4 * M2, Span::new(PAGE, PAGE), 1, Prot::RW)
            .result
            .unwrap();
        table
            .unmap_pages(4 * M2, PAGE, 1, &mut gather)
            .result
            .unwrap();
        table
            .map_pages(4 * M2, Span::new(32 * G1, M2), 1, Prot::RW)
            .result
            .unwrap();
        assert_eq!(table.translate(5 * M2 - 1), Some(32 * G1 + M2 - 1));
        assert!(table.leaf_at(4 * M2).unwrap().run.len < M2);
        table.reclaim(gather.never_walked());
    }
    each_format!(check);
}

/// Runs of any sizes and some holes behind one another, from `iova` on; the addresses end with a run.
fn random_runs(rng: &mut fastrand::Rng, iova: u64) -> Vec<Run> {
    let mut at = iova;
    let mut pa = 40 * G1;
    let mut runs = Vec::new();
    for _ in 0..rng.usize(1..12) {
        let unit = if rng.bool() { PAGE } else { M2 };
        at = at.next_multiple_of(unit);
        pa = pa.next_multiple_of(unit);
        let len = unit * rng.u64(1..if unit == PAGE { 700 } else { 6 });
        runs.push(Run::new(at, Span::new(pa, len)));
        at += len + if rng.u8(..4) == 0 { PAGE } else { 0 };
        pa += len + if rng.bool() { M2 } else { 0 };
    }
    runs
}

/// Empties `range` by operations of `ops` within random bounds, and compares with what is mapped: runs in order, no more
/// of them than the bound says, whole leaves, and an end at each hole.
fn empty_in_steps<T: TableOps>(
    ops: &mut T,
    read: impl Fn(&T, Span<Iova>) -> Vec<Run>,
    range: Span<Iova>,
    rng: &mut fastrand::Rng,
) {
    let mut rest = range;
    while !rest.is_empty() {
        let there = read(ops, rest);
        let bound = Bound {
            runs: rng.u64(..4),
            bytes: if rng.bool() {
                u64::MAX
            } else {
                rng.u64(..3 * M2)
            },
        };
        let mut gather = Gather::new();
        let mut removed = Vec::new();
        let progress = ops.unmap_some(rest, bound, &mut gather, &mut |run| removed.push(run));
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        ops.reclaim(flushed);
        let bytes: u64 = removed.iter().map(|run| run.len).sum();
        assert_eq!(bytes, progress.bytes, "{removed:?}");
        assert!(
            removed.len() as u64 <= bound.runs.max(1),
            "{bound:?}: {removed:?}"
        );
        // In order and from the beginning on.
        let mut at = rest.start;
        for run in &removed {
            let whole = there.iter().find(|there| there.input().contains(run.iova));
            let whole = whole.unwrap_or_else(|| panic!("{run:?} was not mapped"));
            assert_eq!((run.iova, run.pa - whole.pa), (at, run.iova - whole.iova));
            at += run.len;
        }
        let first = there.first().map_or(rest.last() + 1, |run| run.iova);
        match progress.result {
            Ok(()) => assert!(progress.bytes > 0),
            Err(TableUnmapError::Hole { at: hole, .. }) => {
                assert_eq!(hole, at);
                let behind = read(ops, Span::new(at, (rest.last() + 1) - at));
                assert!(behind.first().is_none_or(|run| run.iova > at), "{behind:?}");
            }
            Err(other) => panic!("{other}"),
        }
        assert!(first == rest.start || progress.bytes == 0);
        rest = Span::new(at, (rest.last() + 1) - at);
        if let Err(TableUnmapError::Hole { .. }) = progress.result {
            // Goes on behind the hole.
            let next = there.iter().map(|run| run.iova).find(|next| *next > at);
            let next = next.unwrap_or(rest.last() + 1);
            rest = Span::new(next, (rest.last() + 1) - next);
        }
    }
    assert!(read(ops, range).is_empty());
}

#[test]
fn a_bounded_unmap_goes_from_the_beginning_on_by_whole_leaves_and_says_how_far() {
    fn check<F: Format>(format: F) {
        let mut rng = fastrand::Rng::with_seed(42);
        for _ in 0..60 {
            let memory = memory();
            let mut table = Table::new(format, &memory).unwrap();
            let runs = random_runs(&mut rng, 3 * G1 - 5 * PAGE);
            let end = runs.last().unwrap().input().last() + 1;
            let range = Span::new(3 * G1 - 5 * PAGE, end - (3 * G1 - 5 * PAGE));
            let fill = |table: &mut Table<F, &HeapTables>| {
                for run in &runs {
                    table.map(run.iova, &[run.output()], Prot::RW).unwrap();
                }
            };
            fill(&mut table);
            empty_in_steps(
                &mut table,
                |table, range| table.runs(range).collect(),
                range,
                &mut rng,
            );
            assert_eq!(table.tables(), 1);
            fill(&mut table);
            let shared = SharedTable::<_, _>::new(table);
            let mut inside = shared.owning(Span::new(0, 1 << 47));
            empty_in_steps(
                &mut inside,
                |inside, range| inside.runs(range).collect(),
                range,
                &mut rng,
            );
            drop(inside);
            shared.poll();
            let mut table = shared.into_inner();
            assert_eq!((table.tables(), memory.in_use()), (1, 1));
            fill(&mut table);
            let mut inside = table.unguarded();
            empty_in_steps(
                &mut inside,
                |inside, range| inside.runs(range).collect(),
                range,
                &mut rng,
            );
        }
    }
    each_format!(check);
}

#[test]
fn a_bounded_unmap_takes_one_leaf_at_least_and_none_that_reaches_over_the_end() {
    let memory = memory();
    let mut table = Table::new(X86_64::new(4).unwrap(), &memory).unwrap();
    table
        .map(0, &[Span::new(8 * G1, 2 * M2)], Prot::RW)
        .unwrap();
    let mut gather = Gather::new();
    let nothing = Bound { bytes: 0, runs: 0 };
    let leaf = Run::new(0, Span::new(8 * G1, M2));
    let range = Span::new(0, M2 - PAGE);
    let over = table.unmap_some(range, Bound::NONE, &mut gather, &mut iopt::NoRuns);
    let inside = TableUnmapError::InsideLeaf { range, leaf };
    assert_eq!((over.bytes, over.result), (0, Err(inside)));
    let range = Span::new(PAGE, 2 * M2 - PAGE);
    let before = table.unmap_some(range, Bound::NONE, &mut gather, &mut iopt::NoRuns);
    let inside = TableUnmapError::InsideLeaf { range, leaf };
    assert_eq!((before.bytes, before.result), (0, Err(inside)));
    assert!(gather.is_empty());
    let both = Span::new(0, 2 * M2);
    let one = table.unmap_some(both, nothing, &mut gather, &mut iopt::NoRuns);
    assert_eq!((one.bytes, one.result), (M2, Ok(())));
    assert_eq!(table.translate(M2), Some(8 * G1 + M2));
    let range = Span::new(M2, M2 + PAGE);
    let hole = table.unmap_some(range, Bound::NONE, &mut gather, &mut iopt::NoRuns);
    let at = 2 * M2;
    assert_eq!(
        (hole.bytes, hole.result),
        (M2, Err(TableUnmapError::Hole { range, at }))
    );
    table.reclaim(gather.never_walked());
    assert_eq!(table.tables(), 1);
}
