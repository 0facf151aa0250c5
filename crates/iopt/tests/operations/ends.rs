//! Ranges that end where addresses do: at 2^64, at the end of an aperture, and beyond.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use iopt::format::{
    AmdV1, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart2, K4, K16Lpa2, K64Lpa, RiscV, RiscVG, VtdSs,
    X86_64,
};
use iopt::{
    AnyTable, Gather, HeapArena, HeapTables, Interruption, NoRuns, Pending, Prot, SharedTable,
    Table, TableOps as _, WideCell,
};
use proptest::prelude::*;
use runs::{Iova, Pa, Span};

fn flush(table: &AnyTable, mut gather: Gather) {
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
}

/// Six levels of AMD translate all of 2^64 bytes, which no number of bytes says.
#[test]
fn the_whole_of_64_bits_is_mapped_and_dirty() {
    const LEAF: u64 = 1 << 51;
    const HALVES: [Span<Iova>; 2] = [Span::new(0, 1 << 63), Span::new(1 << 63, 1 << 63)];
    let all_but_a_page = Span::new(0, 0u64.wrapping_sub(4096));
    let memory = Arc::new(HeapTables::with_tables(256).unwrap());
    let table = Table::new(AmdV1::new(6).unwrap(), Arc::clone(&memory)).unwrap();
    let table = SharedTable::<_, _>::new(table);
    let runs = vec![Span::new(0, LEAF); 1 << 12];
    for half in HALVES {
        table.enter().map(half.start, &runs, Prot::RW).unwrap();
    }
    assert_eq!(table.enter().translate(u64::MAX), Some(LEAF - 1));
    assert_eq!(table.enter().leaf_at(u64::MAX).unwrap().run.len, LEAF);
    table.track_dirty(true).unwrap();
    // The last leaf counts whole.
    assert_eq!(table.enter().set_dirty(all_but_a_page), Ok(u64::MAX));
    let mut told = Vec::new();
    let peeked = table
        .enter()
        .peek_dirty(all_but_a_page, |run| told.push(run));
    assert_eq!((peeked, told.len()), (Ok(u64::MAX), 2));
    assert_eq!(told.last().map(Span::last), Some(u64::MAX));
    for half in HALVES {
        let mut pending = Pending::new([0; 1], half, LEAF << 10).unwrap();
        assert_eq!(table.enter().harvest(half, &mut pending), Ok(half.len));
        let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
        assert_eq!(shown.runs().collect::<Vec<_>>(), [half]);
        shown.acknowledge();
    }
    assert_eq!(table.enter().peek_dirty(HALVES[1], |_| {}), Ok(0));
    table.enter().set_dirty(all_but_a_page).unwrap();
    let mut inside = table.enter();
    assert_eq!(inside.take_dirty(all_but_a_page, |_| {}), Ok(u64::MAX));
    assert!(inside.may_have_empty_tables(all_but_a_page));
    drop(inside);
    table.track_dirty(false).unwrap();
    let mut gather = Gather::new();
    let mut pages = table
        .enter()
        .unmap_pages(0u64.wrapping_sub(LEAF), LEAF, 1, &mut gather);
    assert_eq!((pages.bytes, pages.result), (LEAF, Ok(())));
    pages = table.enter().unmap_pages(0, LEAF, 64, &mut gather);
    assert_eq!((pages.bytes, pages.result), (64 * LEAF, Ok(())));
    for half in HALVES {
        let bytes = table.enter().unmap_mapped(half, &mut gather, &mut NoRuns);
        let before = if half.start == 0 { 64 } else { 1 };
        assert_eq!(bytes, Ok(half.len - before * LEAF));
    }
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
    table.poll();
    assert_eq!((table.into_inner().tables(), memory.in_use()), (1, 1));
}

type Tables<const LOG2: u32> = HeapArena<WideCell, LOG2>;

/// A table of each format, as wide as the format goes.
fn table(nth: usize) -> AnyTable {
    macro_rules! one_of {
        ($($format:expr, $memory:ty;)*) => {{
            let formats: &[fn() -> AnyTable] = &[$(|| {
                let memory = <$memory>::with_tables_at(64, 1 << 30).unwrap();
                AnyTable::from(Table::new($format.unwrap(), Arc::new(memory)).unwrap())
            }),*];
            formats[nth % formats.len()]()
        }};
    }
    one_of! {
        AmdV1::new(6), Tables<12>;
        X86_64::new(5), Tables<12>;
        VtdSs::new(5), Tables<12>;
        RiscV::new(5), Tables<12>;
        RiscVG::new(5), Tables<12>;
        ArmStage1::<K4>::new(48, 48), Tables<12>;
        ArmStage1::<K4>::new(48, 48).map(ArmStage1::upper), Tables<12>;
        ArmStage1::<K16Lpa2>::new(52, 52).map(ArmStage1::upper), Tables<14>;
        ArmStage1::<K64Lpa>::new(52, 52).map(ArmStage1::upper), Tables<16>;
        ArmStage2::<K4>::new(48, 48), Tables<12>;
        Ok::<ArmV7s, ()>(ArmV7s::new()), HeapArena<AtomicU32, 10>;
        Dart1::new(2, 38), Tables<14>;
        Dart2::new(3, 42), Tables<14>;
    }
}

/// An address near an end of something: of all addresses, of the table's, of a power of two.
fn address(table: &AnyTable, (kind, log2, offset): (u8, u32, i64)) -> u64 {
    let spans: Vec<_> = table.aperture().spans().collect();
    let (first, last) = (spans[0], spans[spans.len() - 1]);
    let end = match kind {
        0 => 0,
        1 => first.start,
        2 => first.last().wrapping_add(1),
        3 => last.start,
        4 => last.last().wrapping_add(1),
        5 => first.start.wrapping_add(1 << log2),
        _ => (last.last().wrapping_add(1)).wrapping_sub(1 << log2),
    };
    end.wrapping_add_signed(offset * table.page_sizes().smallest() as i64)
}

/// A length from there on.
fn length(table: &AnyTable, start: u64, (kind, log2, pages): (u8, u32, u64)) -> u64 {
    let page = table.page_sizes().smallest();
    match kind {
        0 => pages * page,
        1 => 0u64.wrapping_sub(start),
        2 => u64::MAX,
        3 => !(page - 1),
        4 => (1 << 63) | pages,
        5 => (1u64 << log2).max(page),
        _ => (1u64 << log2).wrapping_add(pages * page),
    }
}

type Call = (u8, (u8, u32, i64), (u8, u32, u64), (u8, u32, i64));

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let address = || (0..7u8, 12..64u32, -3..4i64);
    let length = (0..7u8, 12..64u32, 0..5u64);
    prop::collection::vec((0..16u8, address(), length, address()), 1..16)
}

fn call(table: &AnyTable, (kind, at, len, other): Call) {
    let page = table.page_sizes().smallest();
    let iova = address(table, at);
    let len = length(table, iova, len);
    let range = Span::new(iova, len);
    let near = address(table, other);
    let owned = Span::new(near, len.rotate_left(7));
    let mut gather = Gather::new();
    let mut flushes = |_: &_| Ok::<_, ()>(());
    let size = table
        .page_sizes()
        .iter()
        .nth(usize::from(other.0) % 3)
        .unwrap_or(page);
    match kind {
        0..=3 => {
            // Long ranges lie alike on both sides, so that large leaves are possible.
            let alike = if len >> 26 == 0 {
                page - 1
            } else {
                (1 << 39) - 1
            };
            let pa = (near & !alike) | (iova & alike);
            let pa = if kind == 3 { pa } else { pa & ((1 << 40) - 1) };
            let runs: &[Span<Pa>] = &[Span::new(pa, len), Span::new(pa, page)];
            let _ = table.map(iova, &runs[..1 + usize::from(kind) % 2], Prot::RW);
        }
        4 => {
            let memory = Span::new(near & !(size - 1), size);
            let _ = table.map_pages(iova, memory, len, Prot::RW);
        }
        5 => {
            let owner = table.owning(owned);
            let _ = owner.unmap_pages(iova, size, len, &mut gather);
        }
        6 => {
            let owner = table.owning(owned);
            let _ = owner.unmap_mapped(range, &mut gather, &mut NoRuns);
        }
        7 => {
            let _ = table.alone().unmap(range, &mut gather, &mut NoRuns);
        }
        8 => {
            let _ = table.owning(range).clear(range, &mut gather);
        }
        9 => {
            let may = Interruption::Allowed;
            let sink = &mut NoRuns;
            let _ = table.unmap_cutting(range, may, &mut gather, sink, &mut flushes);
        }
        10 => {
            let _ = table.merge(range, Interruption::Allowed, &mut gather, flushes);
        }
        11 => {
            // Not into all too many.
            let Some(leaf) = table.leaf_at(iova) else {
                return;
            };
            let sizes = table.page_sizes();
            let smaller = sizes
                .iter()
                .filter(|size| *size < leaf.run.len && leaf.run.len >> 9 <= *size);
            let Some(size) = smaller.last() else { return };
            let _ = table.split(range, size, Interruption::Allowed, &mut gather, flushes);
        }
        12 => {
            let _ = table.protect(range, Prot::READ, &mut gather);
        }
        13 => {
            let _ = table.track_dirty(true);
            let mut bytes = 0u64;
            let _ = table.peek_dirty(range, |run| bytes = bytes.saturating_add(run.len));
            if let Ok(mut pending) = Pending::new([0u64; 8], owned, 1 << (other.1)) {
                let _ = table.harvest(range, &mut pending);
                let _ = table.harvest(owned, &mut pending);
                pending.mark(range);
                let mut shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
                assert!(shown.runs().all(|run| owned.covers(&run)));
                shown.acknowledge_part(range);
            }
            // Else nothing is unmapped any more without a place for what is dirty.
            let _ = table.track_dirty(false);
        }
        14 => {
            let _ = table.cut(iova, Interruption::Allowed, &mut gather, flushes);
        }
        _ => {
            let mut last = None;
            table.for_each_leaf(range, |leaf| {
                assert!(last.is_none_or(|last| last < leaf.run.iova), "{leaf:?}");
                last = Some(leaf.run.iova);
                let run = leaf.run;
                assert_eq!(
                    table.translate(run.input().last()),
                    Some(run.output().last())
                );
            });
            let _ = (
                table.is_one_run(range),
                table.leaf_at(iova),
                table.translate(near),
            );
        }
    }
    flush(table, gather);
}

proptest! {
    /// Each request there is done or refused, and nothing is lost.
    #[test]
    fn no_end_of_addresses_is_in_the_way(nth in 0..13usize, calls in calls()) {
        let table = table(nth);
        for asked in calls {
            call(&table, asked);
        }
        for span in table.aperture().spans() {
            let mut gather = Gather::new();
            let mut left = 0u64;
            table.for_each_leaf(span, |leaf| left += leaf.run.len);
            let bytes = table.alone().unmap_mapped(span, &mut gather, &mut NoRuns);
            prop_assert_eq!(bytes, Ok(left));
            flush(&table, gather);
        }
        prop_assert_eq!(table.tables(), 1);
    }
}
