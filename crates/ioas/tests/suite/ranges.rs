//! Areas that a range names: borders, cuts, several areas at once, the top of the address space.

use std::sync::Arc;

use crate::common::*;
use ioas::{CloseError, Ledger, MapError, Memory, Synthetic, UnmapError, Unmapped};
use iopt::{Cell, FormatId, HeapTables, Prot, RangeError, TableMemory};
use runs::{Iova, Offset, Span};

fn pages(n: u64) -> Span<Offset> {
    Span::new(0, n * PAGE)
}

struct Bench {
    tables: Arc<HeapTables>,
    space: Space,
    ledger: Arc<Ledger>,
    memory: Arc<Synthetic>,
    whole: Arc<Memory>,
}

impl Bench {
    fn new(format: FormatId, levels: u8) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let space = space(format, levels, &tables);
        let memory = Arc::new(Synthetic::new([Span::new(0x4000_0000, 4 * MIB)]));
        let ledger = Ledger::unlimited();
        Self {
            tables,
            space,
            whole: Memory::new(memory.clone(), &ledger),
            ledger,
            memory,
        }
    }

    fn map(&mut self, iova: u64, part: Span<Offset>) -> Result<(), MapError> {
        self.space.map(iova, &self.whole, part, Prot::RW)
    }

    fn state(&self) -> State {
        State::of(&self.space, &self.ledger, &self.tables, &[&self.memory])
    }

    fn areas(&self) -> Vec<Span<Iova>> {
        self.space
            .areas()
            .into_iter()
            .map(|area| area.range())
            .collect()
    }
}

#[test]
fn areas_lie_up_to_the_last_byte_of_the_address_space() {
    // Aperture: both halves of 48 bits, sign-extended; all 64 bits.
    for (format, levels) in [(FormatId::X86_64, 4), (FormatId::AmdV1, 6)] {
        let mut bench = Bench::new(format, levels);
        let top = u64::MAX - 4 * PAGE + 1;
        bench.map(0, pages(2)).unwrap();
        bench.map(top, pages(4)).unwrap();
        assert_eq!(
            bench.areas(),
            [Span::new(0, 2 * PAGE), Span::new(top, 4 * PAGE)]
        );
        for (iova, start) in [
            (0, Some(0)),
            (2 * PAGE - 1, Some(0)),
            (2 * PAGE, None),
            (top - 1, None),
            (top, Some(top)),
            (u64::MAX, Some(top)),
        ] {
            let found = bench.space.area_at(iova).map(|area| area.range().start);
            assert_eq!(found, start, "{iova:#x}");
        }
        let leaf = bench.space.leaf_at(u64::MAX).unwrap();
        assert_eq!(leaf.run.output().last(), 0x4000_0000 + 4 * PAGE - 1);

        // Taken, and beyond the end.
        assert!(matches!(
            bench.map(u64::MAX - PAGE + 1, pages(1)),
            Err(MapError::Overlap { area, .. }) if area.start == top
        ));
        assert!(matches!(
            bench.map(top, pages(5)),
            Err(MapError::Range(RangeError::OutsideAperture {
                len: None,
                ..
            }))
        ));
        assert!(matches!(
            bench.space.unmap(Span::new(top, 4 * PAGE + 1)),
            Err(UnmapError::BeyondEnd { start }) if start == top
        ));
        assert!(matches!(
            bench.space.unmap(Span::new(PAGE, u64::MAX - PAGE)),
            Err(UnmapError::CutsArea { area, .. }) if area.start == 0
        ));
        assert_eq!(bench.areas().len(), 2);

        // Everything, over a range that no span can hold.
        let unmapped = bench.space.unmap_all().unwrap();
        assert_eq!((unmapped.areas, unmapped.bytes), (2, 6 * PAGE));
        let tables = bench.space.with_table(|table| table.tables()).unwrap();
        assert_eq!((bench.tables.in_use(), tables), (1, 1));

        // All but the first page, in one range.
        bench.map(PAGE, pages(1)).unwrap();
        bench.map(top, pages(4)).unwrap();
        let unmapped = bench.space.unmap(Span::new(PAGE, 0u64.wrapping_sub(PAGE)));
        assert_eq!(unmapped.unwrap().areas, 2);
        assert_eq!(bench.memory.pinned(), 0);
        bench.space.close().unwrap();
        assert_eq!(bench.tables.in_use(), 0);
    }
}

#[test]
fn unmap_takes_whole_areas_only_and_as_many_as_are_named() {
    for (format, levels) in FORMATS {
        let mut bench = Bench::new(format, levels);
        let at = |page: u64| GIB + page * PAGE;
        // [0, 4) [4, 6) hole [8, 9) … [600, 1112): in another table, half of it in one leaf table.
        for (start, len) in [(0, 4), (4, 2), (8, 1), (600, 512)] {
            bench.map(at(start), pages(len)).unwrap();
        }
        let all = bench.areas();
        for (range, cut) in [
            (Span::new(at(1), PAGE), at(0)),
            (Span::new(at(0), 3 * PAGE), at(0)),
            (Span::new(at(3), 8 * PAGE), at(0)),
            (Span::new(at(0), 5 * PAGE), at(4)),
            (Span::new(at(5), 1), at(4)),
            (Span::new(at(0), 601 * PAGE), at(600)),
            (Span::new(at(0), 1112 * PAGE - 1), at(600)),
        ] {
            let refused = bench.space.unmap(range);
            let Err(UnmapError::CutsArea { area, .. }) = refused else {
                panic!("{range}: {refused:?}");
            };
            assert_eq!(area.start, cut, "{range}");
            assert_eq!(bench.areas(), all);
        }
        for nothing in [
            Span::new(at(6), 2 * PAGE),
            Span::new(at(9), 0),
            Span::new(0, at(0)),
        ] {
            let unmapped = bench.space.unmap(nothing).unwrap();
            assert_eq!(unmapped, Unmapped::default(), "{nothing}");
        }
        let unmapped = bench.space.unmap(Span::new(at(4), 5 * PAGE)).unwrap();
        // The areas that stay hold these pages too.
        assert_eq!(
            (unmapped.areas, unmapped.bytes, unmapped.unpinned),
            (2, 3 * PAGE, 0)
        );
        assert_eq!(bench.areas(), [all[0], all[3]]);
        // Not aligned, but covering.
        let unmapped = bench.space.unmap(Span::new(5, at(2000))).unwrap();
        assert_eq!(
            (unmapped.areas, unmapped.bytes, unmapped.unpinned),
            (2, 516 * PAGE, 512 * PAGE)
        );
        assert_eq!(bench.memory.pinned(), 0);
        assert_eq!(bench.tables.in_use(), 1);
    }
}

#[test]
fn what_is_not_well_formed_is_refused_before_anything_is_touched() {
    let mut bench = Bench::new(FormatId::VtdSs, 4);
    bench.map(8 * PAGE, pages(4)).unwrap();
    let before = bench.state();
    let steps = bench.ledger.steps();
    type Is = fn(&MapError) -> bool;
    let cases: [(u64, Span<Offset>, Is); 9] = [
        (0, Span::new(0, 0), |e| {
            matches!(e, MapError::Range(RangeError::Empty))
        }),
        (0, Span::new(0, 4 * MIB + PAGE), |e| {
            matches!(e, MapError::Part { .. })
        }),
        (0, Span::new(PAGE, u64::MAX - 4095), |e| {
            matches!(e, MapError::Part { .. })
        }),
        (0, Span::new(0, 100), |e| matches!(e, MapError::Part { .. })),
        (0, Span::new(8, PAGE), |e| {
            matches!(e, MapError::Part { .. })
        }),
        (8, pages(1), |e| {
            matches!(e, MapError::Range(RangeError::Misaligned { value: 8, .. }))
        }),
        (1 << 48, pages(1), |e| {
            matches!(e, MapError::Range(RangeError::OutsideAperture { .. }))
        }),
        // Reaches into the area from below; begins inside of it.
        (7 * PAGE, pages(2), |e| {
            matches!(e, MapError::Overlap { .. })
        }),
        (11 * PAGE, pages(2), |e| {
            matches!(e, MapError::Overlap { .. })
        }),
    ];
    for (iova, part, is) in cases {
        let refused = bench.map(iova, part).unwrap_err();
        assert!(is(&refused), "{iova:#x} {part}: {refused:?}");
    }
    assert_eq!(bench.state(), before);
    assert_eq!(bench.ledger.steps(), steps);
    // On both sides of it there is room.
    bench.map(6 * PAGE, pages(2)).unwrap();
    bench.map(12 * PAGE, pages(1)).unwrap();
    let area = bench.space.area_at(12 * PAGE).unwrap();
    assert_eq!(
        (area.part(), area.prot(), area.is_out()),
        (pages(1), Prot::RW, false)
    );
}

#[test]
fn an_unmap_over_both_halves_is_all_or_nothing_even_with_a_damaged_table() {
    let mut bench = Bench::new(FormatId::X86_64, 4);
    let high = 0u64.wrapping_sub(GIB);
    bench.map(PAGE, pages(3)).unwrap();
    bench.map(high, pages(3)).unwrap();
    // Damage: a 2 MiB leaf where the table of the high area was linked.
    fn damaged(bench: &Bench) -> &impl Cell {
        let index = |shift: u32| (0u64.wrapping_sub(GIB) >> shift & 511) as usize;
        let mut address = bench
            .space
            .with_table(|table| table.root().address)
            .unwrap();
        for shift in [39, 30] {
            let entry = &bench.tables.entries(address, 512)[index(shift)];
            address = entry.get() & 0x000f_ffff_ffff_f000;
        }
        &bench.tables.entries(address, 512)[index(21)]
    }
    let linked = damaged(&bench).get();
    damaged(&bench).set(0x4000_0000 | 1 << 7 | 7);

    let low = leaves(&bench.space);
    assert_eq!(low.len(), 3);
    let refused = bench
        .space
        .observed(&mut Watch::default())
        .unmap_all()
        .unwrap_err();
    assert!(matches!(
        refused,
        UnmapError::Table(iopt::TableUnmapError::InsideLeaf { .. })
    ));
    assert_eq!(leaves(&bench.space), low);
    assert_eq!(bench.areas().len(), 2);
    assert_eq!(bench.memory.pinned(), 3 * PAGE, "once for both");

    damaged(&bench).set(linked);
    assert_eq!(bench.space.unmap_all().unwrap().areas, 2);
    assert_eq!((bench.memory.pinned(), bench.tables.in_use()), (0, 1));

    // A damaged table is not followed to give it back; the memory is back, for no device is attached.
    bench.map(PAGE, pages(3)).unwrap();
    bench.map(high, pages(3)).unwrap();
    let tables = bench.tables.in_use();
    assert_eq!(tables, 7);
    damaged(&bench).set(0x4000_0000 | 1 << 7 | 7);
    let failed = bench.space.close().unwrap_err();
    assert!(matches!(failed, CloseError::Unmap(UnmapError::Table(_))));
    assert_eq!((bench.memory.pinned(), bench.tables.in_use()), (0, tables));
}
