//! The narrow calls: counts of equal pages.

use std::collections::BTreeMap;

use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs, X86_64};
use iopt::{
    Format, Gather, HeapTables, MapPages, Prot, RangeError, SharedTable, Table, TableMapError,
    TableMemory, TableUnmapError,
};
use runs::{Pa, PageSizes, Run, Span};

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
fn a_loop_of_narrow_calls_and_one_wide_call_leave_the_same_bytes() {
    fn check<F: Format>(format: F) {
        for (size, pages, iova) in [(PAGE, 1300, G1 - 700 * PAGE), (M2, 700, 3 * G1 - 200 * M2)] {
            let pa = 32 * G1 + (iova & (G1 - 1));
            let (narrow_memory, wide_memory) = (memory(), memory());
            let mut narrow = Table::new(format, &narrow_memory).unwrap();
            let mut wide =
                Table::with_page_sizes(format, &wide_memory, PageSizes::from_bits(size)).unwrap();
            wide.map(iova, &[Span::new(pa, pages * size)], Prot::RW)
                .unwrap();
            let mut done = 0;
            let mut calls = 0;
            while done < pages {
                let at = done * size;
                let progress =
                    narrow.map_pages(iova + at, Span::new(pa + at, size), pages - done, Prot::RW);
                progress.result.unwrap();
                assert!(progress.pages > 0);
                done += progress.pages;
                calls += 1;
            }
            // As many calls as there are tables with leaves.
            assert_eq!(calls, if size == PAGE { 4 } else { 2 });
            assert!(bytes(&narrow_memory) == bytes(&wide_memory));

            let (mut gather, mut other) = (Gather::new(), Gather::new());
            wide.unmap(Span::new(iova, pages * size), &mut other, &mut iopt::NoRuns)
                .unwrap();
            let mut done = 0;
            while done < pages {
                let at = iova + done * size;
                let progress = narrow.unmap_pages(at, size, pages - done, &mut gather);
                progress.result.unwrap();
                done += progress.pages;
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
fn a_call_stops_at_the_end_of_a_table_and_says_so() {
    fn check<F: Format>(format: F) {
        let memory = memory();
        let mut table = Table::new(format, &memory).unwrap();
        let progress = table.map_pages(M2 - 3 * PAGE, Span::new(8 * G1, PAGE), 10, Prot::RW);
        assert_eq!((progress.pages, progress.result), (3, Ok(())));
        let mut gather = Gather::new();
        let progress = table.unmap_pages(M2 - 2 * PAGE, PAGE, 10, &mut gather);
        assert_eq!((progress.pages, progress.result), (2, Ok(())));
        table.reclaim(gather.never_walked());
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
        assert_eq!(progress.pages, 5);
        let found = Run::new(G1 + 5 * PAGE, Span::new(7 * G1 + PAGE, PAGE));
        assert!(
            matches!(progress.result, Err(TableMapError::Overlap { found: f, .. }) if f == found)
        );
        assert_eq!(table.translate(G1 + 4 * PAGE), Some(8 * G1 + 4 * PAGE));
        assert_eq!(table.translate(G1 + 6 * PAGE), None);

        let mut gather = Gather::new();
        let progress = table.unmap_pages(G1, PAGE, 20, &mut gather);
        assert_eq!(progress.pages, 6);
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
        table.map_page(G1, Span::new(8 * G1, M2), Prot::RW).unwrap();
        table
            .map_page(G1 + M2, Span::new(9 * G1, PAGE), Prot::RW)
            .unwrap();
        let mut gather = Gather::new();
        let leaf = Run::new(G1, Span::new(8 * G1, M2));
        assert_eq!(
            table.unmap_page(G1, PAGE, &mut gather),
            Err(TableUnmapError::OtherSize { size: PAGE, leaf })
        );
        let progress = table.unmap_pages(G1, M2, 2, &mut gather);
        assert_eq!(progress.pages, 1);
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
    let refused = table.map_page(0, Span::new(0, 8192), Prot::RW).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no leaves of 0x2000 bytes; there are 4K|2M|1G"
    );
    let refused = table
        .map_page(PAGE, Span::new(0, M2), Prot::RW)
        .unwrap_err();
    let misaligned = RangeError::Misaligned {
        value: PAGE,
        granule: M2,
    };
    assert_eq!(refused, TableMapError::Range(misaligned));
    let refused = table
        .map_page(M2, Span::new(PAGE, M2), Prot::RW)
        .unwrap_err();
    assert_eq!(refused, TableMapError::Range(misaligned));
    assert_eq!(
        table.unmap_pages(0, PAGE, 0, &mut gather).result,
        Err(TableUnmapError::Range(RangeError::Empty))
    );
    assert!(
        table
            .map_page(1 << 48, Span::new(0, PAGE), Prot::RW)
            .is_err()
    );
    assert!(table.unmap_page(!0xfff, PAGE, &mut gather).is_err());
    assert!(gather.is_empty());
}

/// A back end that can do one page at a time, and counts.
#[derive(Default)]
struct OnePage {
    pages: BTreeMap<u64, u64>,
    calls: u64,
}

impl MapPages for OnePage {
    fn map_page(&mut self, iova: u64, page: Span<Pa>, _prot: Prot) -> Result<(), TableMapError> {
        self.calls += 1;
        match self.pages.insert(iova, page.start) {
            None => Ok(()),
            Some(old) => {
                self.pages.insert(iova, old);
                let wanted = Span::new(iova, page.len);
                let found = Run::new(iova, Span::new(old, page.len));
                Err(TableMapError::Overlap { wanted, found })
            }
        }
    }

    fn unmap_page(
        &mut self,
        iova: u64,
        size: u64,
        _gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        self.calls += 1;
        let range = Span::new(iova, size);
        self.pages
            .remove(&iova)
            .map(|_| ())
            .ok_or(TableUnmapError::Hole { range, at: iova })
    }
}

#[test]
fn a_back_end_of_one_page_calls_gets_the_others() {
    let mut back_end = OnePage::default();
    let mut gather = Gather::new();
    back_end
        .map_page(4 * PAGE, Span::new(G1, PAGE), Prot::RW)
        .unwrap();
    let progress = back_end.map_pages(0, Span::new(8 * G1, PAGE), 10, Prot::RW);
    assert_eq!(progress.pages, 4);
    assert!(matches!(
        progress.result,
        Err(TableMapError::Overlap { .. })
    ));
    assert_eq!(back_end.pages[&(3 * PAGE)], 8 * G1 + 3 * PAGE);
    let progress = back_end.unmap_pages(0, PAGE, 10, &mut gather);
    assert_eq!(progress.pages, 5);
    assert!(back_end.pages.is_empty());
}

/// The worked example of the series that brought these calls: 4 MiB as two pages of 2 MiB at 0. It counts 4
/// indirect calls to unmap them, two layers with one each; there is one layer here.
#[test]
fn four_mebibytes_at_0_are_unmapped_by_one_call_where_they_were_two() {
    let mut before = OnePage::default();
    let mut gather = Gather::new();
    assert_eq!(
        before
            .map_pages(0, Span::new(8 * G1, M2), 2, Prot::RW)
            .pages,
        2
    );
    before.calls = 0;
    assert_eq!(before.unmap_pages(0, M2, 2, &mut gather).pages, 2);
    assert_eq!(before.calls, 2);

    let memory = memory();
    let mut table = Table::new(ArmStage1::<K4>::new(48, 48).unwrap(), &memory).unwrap();
    assert_eq!(
        table.map_pages(0, Span::new(8 * G1, M2), 2, Prot::RW).pages,
        2
    );
    assert_eq!(table.leaves(Span::new(0, G1)).count(), 2);
    assert_eq!(table.unmap_pages(0, M2, 2, &mut gather).pages, 2);
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
        let mut narrow = &shared;
        let mut wide =
            Table::with_page_sizes(format, &wide_memory, PageSizes::from_bits(PAGE)).unwrap();
        let (iova, pa, pages) = (G1 - 700 * PAGE, 32 * G1, 1300);
        wide.map(iova, &[Span::new(pa, pages * PAGE)], Prot::RW)
            .unwrap();
        let mut done = 0;
        while done < pages {
            let at = done * PAGE;
            let progress =
                narrow.map_pages(iova + at, Span::new(pa + at, PAGE), pages - done, Prot::RW);
            progress.result.unwrap();
            assert!(progress.pages > 0);
            done += progress.pages;
        }
        assert!(bytes(&narrow_memory) == bytes(&wide_memory));

        // A page in the way, a hole, and a leaf of another size end a call where they are.
        let mut gather = Gather::new();
        narrow
            .unmap_page(iova + 5 * PAGE, PAGE, &mut gather)
            .unwrap();
        let progress = narrow.unmap_pages(iova, PAGE, 9, &mut gather);
        assert_eq!(progress.pages, 5);
        assert!(
            matches!(progress.result, Err(TableUnmapError::Hole { at, .. }) if at == iova + 5 * PAGE)
        );
        let progress = narrow.map_pages(iova, Span::new(pa, PAGE), 9, Prot::RW);
        assert_eq!(progress.pages, 6);
        assert!(matches!(
            progress.result,
            Err(TableMapError::Overlap { .. })
        ));
        narrow
            .map_page(8 * G1, Span::new(64 * G1, M2), Prot::RW)
            .unwrap();
        let progress = narrow.unmap_pages(8 * G1, PAGE, 3, &mut gather);
        assert_eq!(progress.pages, 0);
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
            .map_page(4 * M2, Span::new(PAGE, PAGE), Prot::RW)
            .unwrap();
        table.unmap_page(4 * M2, PAGE, &mut gather).unwrap();
        table
            .map_page(4 * M2, Span::new(32 * G1, M2), Prot::RW)
            .unwrap();
        assert_eq!(table.translate(5 * M2 - 1), Some(32 * G1 + M2 - 1));
        assert!(table.leaf_at(4 * M2).unwrap().run.len < M2);
        table.reclaim(gather.never_walked());
    }
    each_format!(check);
}
