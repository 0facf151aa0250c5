//! Addresses that are chosen: never 0, where it is allowed, and so that large leaves stay possible.

use std::sync::Arc;

use crate::common::*;
use ioas::{
    DomainIds, HandedArea, HandedDomain, Handover, Ioas, Ledger, MapError, Memory, Synthetic,
    TableBuilder, TakenDomain,
};
use iommu::Unit;
use iopt::{FormatId, HeapTables, Prot};
use proptest::prelude::*;
use runs::{Iova, Offset, Span};

struct Bench {
    tables: Arc<HeapTables>,
    space: Space,
    memory: Arc<Memory>,
}

impl Bench {
    /// 4 GiB of memory in one run.
    fn new(format: FormatId, levels: u8) -> Self {
        let tables = Arc::new(HeapTables::with_tables(128).unwrap());
        Self {
            space: space(format, levels, &tables),
            memory: unlimited(Arc::new(Synthetic::new([Span::new(64 * GIB, 4 * GIB)]))),
            tables,
        }
    }

    fn choose(&mut self, part: Span<Offset>) -> Result<u64, MapError> {
        let (memory, prot) = (&self.memory, Prot::RW);
        self.space.map_anywhere(memory, part, prot)
    }

    fn largest(&self, iova: u64, len: u64) -> u64 {
        let mut largest = 0;
        let each = |leaf: iopt::Leaf| largest = largest.max(leaf.run.len);
        let range = Span::new(iova, len);
        self.space
            .with_table(|table| table.for_each_leaf(range, each));
        largest
    }
}

#[test]
fn the_first_page_is_never_chosen_and_addresses_do_not_overlap() {
    for (format, levels) in FORMATS {
        let mut bench = Bench::new(format, levels);
        let mut taken: Vec<Span<Iova>> = Vec::new();
        for n in 0..200 {
            let part = Span::new(n * PAGE, (n % 7 + 1) * PAGE);
            let range = Span::new(bench.choose(part).unwrap(), part.len);
            assert!(range.start >= PAGE);
            assert!(taken.iter().all(|other| !other.overlaps(&range)));
            taken.push(range);
        }
        // A freed address is chosen again.
        let first = taken[0];
        bench.space.unmap(first).unwrap();
        assert_eq!(bench.choose(Span::new(0, PAGE)).unwrap(), first.start);
        bench.space.close().unwrap();
        assert_eq!(bench.tables.in_use(), 0);
    }
}

#[test]
fn large_leaves_stay_possible_whatever_the_offset() {
    for (format, levels) in [FORMATS[0], FORMATS[1]] {
        let mut bench = Bench::new(format, levels);
        bench.choose(Span::new(0, PAGE)).unwrap();
        for (part, largest) in [
            (Span::new(0, GIB), GIB),
            (Span::new(0, 2 * MIB), 2 * MIB),
            // Begins inside of a page of that size.
            (Span::new(5 * PAGE, 2 * GIB), GIB),
            (Span::new(GIB - 3 * PAGE, GIB + 6 * PAGE), GIB),
            (Span::new(3 * MIB, 4 * MIB), 2 * MIB),
            (Span::new(7 * PAGE, 5 * MIB), 2 * MIB),
            (Span::new(2 * MIB - PAGE, 2 * MIB), PAGE),
        ] {
            let iova = bench.choose(part).unwrap();
            assert_eq!(
                bench.largest(iova, part.len),
                largest,
                "{part} at {iova:#x}"
            );
            // In the middle of the page, the same as in the memory.
            let page = 1 << part.len.ilog2().min(30);
            assert_eq!(iova % page, part.start % page);
        }
    }
}

#[test]
fn only_what_is_allowed_is_chosen_and_what_lies_outside_can_still_be_mapped() {
    let mut bench = Bench::new(FormatId::VtdSs, 4);
    let ranges = [
        Span::new(5 * GIB, 4 * PAGE),
        Span::new(0, 3 * PAGE),
        Span::new(7 * GIB, PAGE),
    ];
    bench.space.allow(&ranges).unwrap();
    let page = Span::new(0, PAGE);
    let mut chosen: Vec<u64> = (0..7).map(|_| bench.choose(page).unwrap()).collect();
    chosen.sort_unstable();
    let five = (0..4).map(|n| 5 * GIB + n * PAGE);
    let expected: Vec<u64> = [PAGE, 2 * PAGE]
        .into_iter()
        .chain(five)
        .chain([7 * GIB])
        .collect();
    assert_eq!(chosen, expected);
    let full = bench.choose(page).unwrap_err();
    assert!(matches!(full, MapError::NoRoom { len: PAGE }), "{full}");
    let memory = bench.memory.clone();
    bench.space.map(0, &memory, page, Prot::RW).unwrap();
    bench.space.map(9 * GIB, &memory, page, Prot::RW).unwrap();

    // A malformed list changes nothing.
    for bad in [
        vec![Span::new(GIB, 0)],
        vec![Span::new(u64::MAX - PAGE + 1, 2 * PAGE)],
        vec![Span::new(GIB, 2 * PAGE), Span::new(GIB + PAGE, PAGE)],
    ] {
        let refused = bench.space.allow(&bad);
        assert!(
            matches!(refused, Err(MapError::Allowed { .. })),
            "{refused:?}"
        );
        assert!(bench.choose(page).is_err());
    }
    bench.space.allow(&[]).unwrap();
    bench.choose(page).unwrap();
}

#[test]
fn no_room_is_said_with_the_length_and_leaves_nothing() {
    let mut bench = Bench::new(FormatId::VtdSs, 4);
    let fits = Span::new(0, 16 * PAGE);
    bench.space.allow(&[Span::new(GIB, 24 * PAGE)]).unwrap();
    for len in [32 * PAGE, 25 * PAGE, 4 * GIB] {
        let refused = bench.choose(Span::new(0, len)).unwrap_err();
        assert!(
            matches!(refused, MapError::NoRoom { len: l } if l == len),
            "{refused}"
        );
    }
    assert_eq!(bench.choose(fits).unwrap(), GIB);
    assert!(bench.choose(fits).is_err());
    assert_eq!(
        bench.choose(Span::new(0, 8 * PAGE)).unwrap(),
        GIB + 16 * PAGE
    );
    assert_eq!(bench.space.len(), 2);
    // Nothing, and what is no part.
    let refused = bench.choose(Span::new(0, 0)).unwrap_err();
    assert!(matches!(refused, MapError::Range(_)), "{refused}");
    bench.space.allow(&[]).unwrap();
    for ill in [Span::new(8, PAGE), Span::new(0, 5 * GIB), Span::new(0, 100)] {
        let refused = bench.choose(ill).unwrap_err();
        assert!(matches!(refused, MapError::Part { .. }), "{refused}");
    }
    let wraps = Span::new(u64::MAX - 5, 1 << 40);
    assert!(bench.choose(wraps).is_err());
    assert_eq!(bench.space.len(), 2);
}

#[test]
fn addresses_lie_in_what_devices_can_translate() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let memory = Memory::new(
        Arc::new(Synthetic::new([Span::new(64 * GIB, 4 * GIB)])),
        &Ledger::unlimited(),
    );
    let ids = DomainIds::new(16);
    let builder = TableBuilder::new(tables.clone(), ids, [FormatId::VtdSs]);
    let space: Space = Ioas::over_tables(builder);
    let reserved = Span::new(0, 4 * GIB);
    let mut unit = FrailUnit::new(crate::common::unit(&tables));
    unit.reserved = vec![reserved, Span::new(5 * GIB, GIB)];
    space.attach((Arc::new(unit), DEVICE)).unwrap();
    let big = Span::new(0, GIB);
    let chosen = [(); 3].map(|()| space.map_anywhere(&memory, big, Prot::RW).unwrap());
    assert_eq!(chosen, [4 * GIB, 6 * GIB, 7 * GIB]);
    space.allow(&[Span::new(3 * GIB, 3 * GIB)]).unwrap();
    let full = space.map_anywhere(&memory, big, Prot::RW);
    assert!(matches!(full, Err(MapError::NoRoom { .. })));
    space.close().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_chosen_is_free_allowed_and_aligned(
        allowed in prop::collection::vec((0u64..64, 1u64..24), 0..4),
        ops in prop::collection::vec((0u64..40, 1u64..20, any::<bool>()), 1..40),
    ) {
        let mut bench = Bench::new(FormatId::VtdSs, 4);
        // Disjoint: each in a stretch of 128 pages of its own.
        let ranges: Vec<Span<Iova>> = allowed
            .iter()
            .zip(0..)
            .map(|((first, len), n): (_, u64)| Span::new((n * 128 + first) * PAGE, len * PAGE))
            .collect();
        bench.space.allow(&ranges).unwrap();
        let mut taken: Vec<Span<Iova>> = Vec::new();
        for (first, len, back) in ops {
            if back && !taken.is_empty() {
                let range = taken.swap_remove(first as usize % taken.len());
                bench.space.unmap(range).unwrap();
                continue;
            }
            let part = Span::new(first * PAGE, len * PAGE);
            let align = 1 << part.len.ilog2();
            let free = |range: Span<Iova>| !taken.iter().any(|other| other.overlaps(&range));
            let fits = |range: Span<Iova>| {
                let inside = ranges.is_empty() || ranges.iter().any(|there| there.covers(&range));
                range.start >= PAGE && inside && free(range)
            };
            match bench.choose(part) {
                Ok(iova) => {
                    let range = Span::new(iova, part.len);
                    prop_assert!(fits(range), "{}", range);
                    prop_assert_eq!(iova % align, part.start % align);
                    taken.push(range);
                }
                Err(MapError::NoRoom { .. }) => {
                    // No place that is congruent has room, with the rest of its first page.
                    let lead = part.start % align;
                    let places = (0..1024 * PAGE).step_by(align as usize);
                    let whole = |start: u64| Span::new(start, lead + part.len);
                    prop_assert!(places.into_iter().all(|start| !fits(whole(start))));
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn what_the_devices_of_an_address_space_that_is_taken_over_reserve_is_left_out() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let (frame, part) = (Span::new(1 << 32, MIB), Span::new(0, MIB));
    let table = table(FormatId::VtdSs, 4, &tables);
    table.map(GIB, &[frame], Prot::RW).unwrap();
    let reserved = Span::new(3 * GIB, 2 * MIB);
    let mut unit = FrailUnit::new(unit(&tables));
    unit.reserved.push(reserved);
    let unit = Arc::new(unit);
    unit.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let area = HandedArea {
        range: Span::new(GIB, MIB),
        memory: 0,
        offset: 0,
        prot: Prot::RW,
        out: false,
        released: false,
        cut: [false; 2],
    };
    let domain = HandedDomain {
        id: DOMAIN,
        root: table.root(),
        page_sizes: table.page_sizes(),
        coherent: None,
        devices: vec![DEVICE],
    };
    let handover = Handover {
        domains: vec![domain],
        kept: true,
        areas: vec![area],
        ..Handover::default()
    };
    let memory = unlimited(Arc::new(Synthetic::new([frame])));
    let taken: Vec<TakenDomain> = vec![(table, vec![(unit, DEVICE)])];
    let memories = [memory.clone()];
    let space = Space::adopt(&handover, &memories, taken, None).unwrap();
    let refused = space.map(3 * GIB + MIB, &memory, part, Prot::RW);
    assert!(
        matches!(refused, Err(MapError::Reserved { reserved: found, .. }) if found == reserved),
        "{refused:?}"
    );
    let ends: Vec<u64> = space.windows().iter().map(|window| window.last()).collect();
    assert!(ends.contains(&(reserved.start - 1)), "{ends:x?}");
    space.detach(DEVICE).unwrap();
    space.map(3 * GIB + MIB, &memory, part, Prot::RW).unwrap();
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}
