//! Typical layouts of physical memory, one test each: what runs and leaves they become, in how many
//! steps, and what a limit in the middle leaves. (A run across the border of two batches: see
//! `batches.rs`.)

use std::sync::Arc;

use crate::common::*;
use ioas::{Ioas, Ledger, MapError, Memory, Step, Synthetic, WhenUnmapped};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{Pa, PageSizes, Span};

/// Leaves of a format with leaves of any power of two for these runs, mapped at 1 GiB.
fn sizes(spans: &[Span<Pa>]) -> Vec<u64> {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let space = space(FormatId::AmdV1, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new(spans.iter().copied())));
    let part = Span::new(0, memory.len());
    space.map(GIB, &memory, part, Prot::RW).unwrap();
    let leaves = leaves(&space);
    leaves.iter().map(|leaf| leaf.run.len).collect()
}

#[test]
fn two_adjacent_folios_are_one_run() {
    let folio = Span::new(0x4000_0000, 2 * MIB);
    let next = Span::new(0x4020_0000, 2 * MIB);
    assert_eq!(sizes(&[folio, next]), [4 * MIB]);
}

#[test]
fn halves_of_two_large_pages_that_are_not_adjacent_are_two_runs() {
    // The second half of one, the first of another; then the same with a neighbour.
    let half = Span::new(0x4010_0000, MIB);
    assert_eq!(sizes(&[half, Span::new(0x4040_0000, MIB)]), [MIB, MIB]);
    let next = Span::new(0x4020_0000, MIB);
    assert_eq!(
        sizes(&[half, next]),
        [MIB, MIB],
        "one run, but at no multiple of 2 MiB"
    );
}

#[test]
fn a_batch_is_charged_in_one_step_and_not_by_pages() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let space = space(FormatId::AmdV1, 4, &tables);
    let ledger = Ledger::new("locked", Some(64 * MIB), 0);
    let pages = (0..1024).map(|n| Span::new(0x4000_0000 + n * 2 * PAGE, PAGE));
    let memory = Memory::new(Arc::new(Synthetic::new(pages)), &ledger);
    let part = Span::new(0, memory.len());
    space.map(GIB, &memory, part, Prot::RW).unwrap();
    assert_eq!((ledger.in_use(), ledger.steps()), (4 * MIB, 1));
}

#[test]
fn large_pages_can_be_turned_off() {
    for (format, levels) in FORMATS {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let sizes = PageSizes::from_bits(u64::MAX).up_to(PAGE);
        let table = AnyTable::new(format, levels, sizes, tables).unwrap();
        let space = Ioas::over_table(DomainId(1), table);
        let run = [Span::new(0x4000_0000, 4 * MIB)];
        let memory = unlimited(Arc::new(Synthetic::new(run)));
        let part = Span::new(0, memory.len());
        space.map(GIB, &memory, part, Prot::RW).unwrap();
        let leaves = leaves(&space);
        assert_eq!(leaves.len(), 1024, "{format:?}");
        assert!(leaves.iter().all(|leaf| leaf.run.len == PAGE));
    }
}

#[test]
fn folios_of_64_kib_come_in_one_batch() {
    let folios = (0..4096u64).map(|n| Span::new(0x1_0000_0000 + n * 0x3_0000, 64 << 10));
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    let space = space(FormatId::AmdV1, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new(folios)));
    let part = Span::new(0, memory.len());
    let mut watch = Watch::default();
    space
        .observed(&mut watch)
        .map(GIB, &memory, part, Prot::RW)
        .unwrap();
    let of = |step| watch.steps.iter().filter(|(s, _)| *s == step).count();
    // The second look finds that there is no more.
    assert_eq!((of(Step::FindRuns), of(Step::FillTables)), (2, 1));
    let leaves = leaves(&space);
    assert_eq!(leaves.len(), 4096);
    assert!(leaves.iter().all(|leaf| leaf.run.len == 64 << 10));
}

#[test]
fn a_page_of_1_gib_is_one_step() {
    for (format, levels) in FORMATS {
        let tables = Arc::new(HeapTables::with_tables(8).unwrap());
        let ledger = Ledger::new("a counter", Some(GIB), 0);
        let space = space(format, levels, &tables);
        let object = Arc::new(Frail::new(Synthetic::new([Span::new(7 * GIB, GIB)])));
        let memory = Memory::new(object.clone(), &ledger);
        let part = Span::new(0, GIB);
        space.map(3 * GIB, &memory, part, Prot::RW).unwrap();
        let calls = (object.pins.calls(), object.readers.calls());
        assert_eq!((ledger.steps(), calls), (1, (1, 1)), "{format}");
        let leaves = leaves(&space);
        assert_eq!(leaves.len(), 1);
        assert_eq!((leaves[0].run.pa, leaves[0].run.len), (7 * GIB, GIB));
        assert_eq!(space.unmap(Span::new(3 * GIB, GIB)).unwrap().unpinned, GIB);
        assert_eq!((object.unpins.calls(), object.releases.calls()), (1, 0));
    }
}

#[test]
fn a_page_of_other_memory_in_between_makes_three_runs() {
    let low = Span::new(0x4000_0000, MIB);
    let other = Span::new(0x9_0000_0000, PAGE);
    let high = Span::new(0x4010_1000, MIB - PAGE);
    let tables = Arc::new(HeapTables::with_tables(8).unwrap());
    let space = space(FormatId::VtdSs, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new([low, other, high])));
    let part = Span::new(0, 2 * MIB);
    space.map(GIB, &memory, part, Prot::RW).unwrap();
    let range = Span::new(GIB, part.len);
    let pin = space.pin(range, Prot::READ, WhenUnmapped::Keeps).unwrap();
    assert_eq!(
        pin.holds()[0].with_runs(part, read_runs),
        [low, other, high]
    );
    for (offset, pa) in [
        (MIB - PAGE, 0x400f_f000),
        (MIB, other.start),
        (MIB + PAGE, high.start),
    ] {
        assert_eq!(space.translate(GIB + offset), Some(pa));
    }
    // Without it, it is one page of 2 MiB.
    assert_eq!(sizes(&[low, Span::new(0x4010_0000, PAGE), high]), [2 * MIB]);
}

#[test]
fn a_limit_in_the_middle_of_a_map_leaves_everything_as_it_was() {
    let tables = Arc::new(HeapTables::with_tables(16).unwrap());
    // Five stretches that are not held, between four that are.
    let ledger = Ledger::new("a counter", Some(4 * MIB + 4 * MIB), 0);
    let space = space(FormatId::VtdSs, 4, &tables);
    let object = Arc::new(Frail::new(Synthetic::new([Span::new(GIB, 9 * MIB)])));
    let memory = Memory::new(object.clone(), &ledger);
    for n in [1, 3, 5, 7] {
        let part = Span::new(n * MIB, MIB);
        space
            .map(GIB + part.start, &memory, part, Prot::RW)
            .unwrap();
    }
    let state = |space: &Space| State::of(space, &ledger, &tables, &[&object.memory]);
    let before = state(&space);
    let whole = Span::new(0, 9 * MIB);
    object.pins.set(None);
    let refused = space.map(8 * GIB, &memory, whole, Prot::RW);
    let Err(MapError::OverLimit(limit)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        (limit.needed, limit.limit, limit.in_use),
        (5 * MIB, 8 * MIB, 4 * MIB)
    );
    assert_eq!(object.pins.calls(), 0, "nothing was touched");
    assert_eq!(state(&space), before);

    // The kernel's own limit comes later: with each of the pins.
    let part = Span::new(0, 8 * MIB);
    for n in 0..4 {
        object.pins.set([n]);
        let refused = space.map(8 * GIB, &memory, part, Prot::RW);
        assert!(matches!(refused, Err(MapError::Pin(_))), "{refused:?}");
        assert_eq!(object.pins.calls(), n + 1);
        assert_eq!(state(&space), before);
    }
    space.map(8 * GIB, &memory, part, Prot::RW).unwrap();
    assert_eq!(
        (ledger.in_use(), object.memory.pinned()),
        (8 * MIB, 8 * MIB)
    );
    space.unmap_all().unwrap();
    assert_eq!((ledger.in_use(), object.memory.pinned()), (0, 0));
}
