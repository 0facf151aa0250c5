//! Domains come and go with devices: sharing, the mappings of a new one, the remains of the last.
//!
//! Units differ in format, page sizes and snoop control, refuse, reserve addresses and go deaf. Devices
//! look by DMA; every word of the memory is its own physical address.

use crate::common::machines::*;
use crate::common::*;
use ioas::{AttachError, Ledger, MapError, Memory, Unmapped};
use iommu::{DomainId, FormatSupport};
use iopt::{FormatId, Interruption, Prot, TableMemory};
use runs::{Iova, PageSizes, Span};

#[test]
fn units_that_are_alike_share_a_domain_and_others_get_their_own() {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let mut machines: Vec<Machine> = [
        can(FormatId::VtdSs, ALL, true),
        can(FormatId::VtdSs, ALL, true),
        // Other page sizes, no snoop control, another format, both.
        can(FormatId::VtdSs, SMALL, true),
        can(FormatId::VtdSs, ALL, false),
        can(FormatId::AmdV1, ALL, true),
        can(FormatId::AmdV1, ALL, false),
        // Again the first kind, and one that could do more.
        can(FormatId::VtdSs, ALL, true),
        can(FormatId::VtdSs, ALL | 1 << 39, true).with_format(FormatSupport {
            format: FormatId::AmdV1,
            levels: 1 << 3,
            page_sizes: PageSizes::from_bits(SMALL),
        }),
    ]
    .into_iter()
    .zip(0..)
    .map(|(can, n)| Machine::new(&tables, n, can))
    .collect();
    for machine in &mut machines {
        machine.attach(&mut bench.space).unwrap();
    }
    let domains: Vec<u32> = machines.iter().map(|machine| machine.domain().0).collect();
    assert_eq!(domains, [1, 1, 2, 3, 4, 5, 1, 1]);
    assert_eq!(bench.space.places().len(), 5);
    // Pinned and charged once for all five.
    let held = (bench.object.memory.pinned(), bench.ledger.in_use());
    assert_eq!(held, (Bench::HELD, Bench::HELD));
    assert_eq!(bench.sizes(DomainId(1)), [PAGE, 2 * MIB, GIB]);
    assert_eq!(bench.sizes(DomainId(2)), [PAGE, 2 * MIB]);
    bench.space.tables(|id, table| {
        let coherent = matches!(id, DomainId(1 | 2 | 4));
        assert!(
            leaves_of(table)
                .iter()
                .all(|leaf| leaf.prot.contains(Prot::COHERENT) == coherent),
            "domain {id}"
        );
    });
    machines.iter_mut().for_each(|machine| sees(machine, true));

    // Later maps and unmaps reach all of them.
    bench.map(AT + 4 * GIB, Span::new(0, PAGE)).unwrap();
    for machine in &mut machines {
        assert_eq!(machine.read(AT + 4 * GIB), Some(FRAME));
    }
    bench.space.unmap(Span::new(AT + 4 * GIB, PAGE)).unwrap();
    for machine in &mut machines {
        assert_eq!(machine.read(AT + 4 * GIB), None);
    }
    bench.end();
}

#[test]
fn a_unit_with_larger_pages_joins_a_domain_with_smaller_ones() {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let mut small = Machine::new(&tables, 0, can(FormatId::VtdSs, SMALL, true));
    let mut large = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, true));
    small.attach(&mut bench.space).unwrap();
    large.attach(&mut bench.space).unwrap();
    assert_eq!((small.domain(), large.domain()), (DomainId(1), DomainId(1)));
    for machine in [&mut small, &mut large] {
        sees(machine, true);
    }
    bench.end();
}

#[test]
fn a_domain_that_refuses_is_left_as_it_was_and_the_next_one_is_tried() {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let large = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    let small = Machine::new(&tables, 1, can(FormatId::VtdSs, SMALL, true));
    large.attach(&mut bench.space).unwrap();
    small.attach(&mut bench.space).unwrap();
    let before = bench.state();

    // Both suit it; all that is tried refuses, the new one too.
    let mut third = Machine::new(&tables, 2, can(FormatId::VtdSs, ALL, true));
    third.unit.attaches.set(0..3);
    let refused = third.attach(&mut bench.space);
    assert!(matches!(refused, Err(AttachError::Unit(_))), "{refused:?}");
    assert_eq!(third.unit.attaches.calls(), 3);
    assert_eq!(bench.state(), before);
    sees(&mut third, false);

    for (refusals, domain) in [(1, 2), (2, 3), (0, 1)] {
        third.unit.attaches.set(0..refusals);
        third.attach(&mut bench.space).unwrap();
        assert_eq!(third.domain(), DomainId(domain));
        sees(&mut third, true);
        bench.space.detach(third.device).unwrap();
        assert_eq!(bench.state(), before);
    }

    // A device that is in one of them already stays there.
    third.attach(&mut bench.space).unwrap();
    let there = bench.state();
    let again = third.attach(&mut bench.space);
    assert!(
        matches!(
            again,
            Err(AttachError::Unit(iommu::UnitAttachError::AlreadyAttached { domain, .. }))
                if domain == DomainId(1)
        ),
        "{again:?}"
    );
    assert_eq!(bench.state(), there);
    bench.end();
}

#[test]
fn a_unit_for_which_nothing_can_be_built_is_named() {
    let mut bench = Bench::new();
    bench.areas();
    let before = bench.state();
    let tables = bench.tables.clone();
    let other = Machine::new(&tables, 0, can(FormatId::X86_64, ALL, true));
    let refused = other.attach(&mut bench.space).unwrap_err();
    let AttachError::Build(cause) = refused else {
        panic!("{refused}");
    };
    assert!(cause.to_string().contains("walks none of these formats"));
    assert_eq!(bench.state(), before);

    // All numbers in use.
    while bench.ids.take().is_some() {}
    let unit = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, true));
    let refused = unit.attach(&mut bench.space).unwrap_err();
    assert!(matches!(refused, AttachError::Build(_)), "{refused}");
    assert_eq!(bench.state(), before);

    // An address space with a table of the caller's builds none.
    let mut fixed = space(FormatId::VtdSs, 4, &tables);
    let refused = other.attach(&mut fixed).unwrap_err();
    assert!(matches!(
        refused,
        AttachError::Unit(iommu::UnitAttachError::Format { .. })
    ));
    fixed.close().unwrap();
}

/// Has `fail` make the n-th call of some kind fail, for each n until a device can be attached.
fn replay(mut bench: Bench, expected: u64, fail: impl Fn(&Bench, u64)) {
    let tables = bench.tables.clone();
    let mut machine = Machine::new(&tables, 9, can(FormatId::VtdSs, ALL, false));
    let before = bench.state();
    let mut n = 0;
    loop {
        fail(&bench, n);
        match machine.attach(&mut bench.space) {
            Ok(()) => break,
            Err(AttachError::Replay { area, .. }) => assert!(before.areas.contains(&area)),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(bench.state(), before, "after failure {n}");
        sees(&mut machine, false);
        n += 1;
    }
    assert!(n >= expected, "failed only {n} times");
    sees(&mut machine, true);
    bench.space.detach(machine.device).unwrap();
    assert_eq!(bench.state(), before);
    bench.end();
}

/// With areas, and another domain if wanted.
fn prepared(another: bool) -> Bench {
    let mut bench = Bench::new();
    bench.areas();
    if another {
        let tables = bench.tables.clone();
        let machine = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, true));
        machine.attach(&mut bench.space).unwrap();
    }
    bench
}

#[test]
fn a_replay_that_fails_leaves_nothing_whichever_pin_or_reader_fails() {
    // The first and the third area are pinned; the second is held already.
    replay(prepared(false), 2, |bench, n| bench.object.pins.set([n]));
    replay(prepared(false), 3, |bench, n| bench.object.readers.set([n]));
    replay(prepared(false), 6, |bench, n| bench.object.reads.set([n]));
    // With another domain everything is pinned already.
    replay(prepared(true), 0, |bench, _| bench.object.pins.set([0]));
    replay(prepared(true), 3, |bench, n| bench.object.readers.set([n]));
}

#[test]
fn a_replay_that_fails_leaves_nothing_whichever_table_is_missing() {
    for another in [false, true] {
        let mut bench = prepared(another);
        let before = bench.state();
        let tables = bench.tables.clone();
        let mut machine = Machine::new(&tables, 9, can(FormatId::VtdSs, ALL, false));
        let mut refused = 0;
        for left in 0.. {
            let reserve = tables.reserve(128 - tables.in_use() - left).unwrap();
            let result = machine.attach(&mut bench.space);
            tables.give_back(reserve);
            match result {
                Ok(()) => break,
                // The root, or another one.
                Err(AttachError::Build(_)) => assert_eq!(left, 0),
                Err(AttachError::Replay { cause, .. }) => {
                    assert!(matches!(
                        cause,
                        MapError::Table(iopt::TableMapError::NoTables(_))
                    ));
                }
                Err(other) => panic!("{other}"),
            }
            refused += 1;
            assert_eq!(bench.state(), before, "{left} tables left");
        }
        // The root, two tables above leaves of 1 GiB, one for 2 MiB and two for 4 KiB at least.
        assert!(refused >= 5, "{refused}");
        sees(&mut machine, true);
        bench.space.detach(machine.device).unwrap();
        assert_eq!(bench.state(), before);
        bench.end();
    }
}

#[test]
fn a_limit_that_areas_together_exceed_is_seen_by_the_first_device() {
    let mut bench = Bench::new();
    let ledger = Ledger::new("a counter", Some(GIB + MIB), 0);
    let memory = Memory::new(bench.object.clone(), &ledger);
    for (iova, part) in [
        (AT, Span::new(0, GIB)),
        (AT + GIB, Span::new(MIB, MIB)),
        (AT + 2 * GIB, Span::new(GIB, 2 * MIB)),
    ] {
        bench.space.map(iova, &memory, part, Prot::RW).unwrap();
    }
    let before = bench.state();
    let tables = bench.tables.clone();
    let machine = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    let refused = machine.attach(&mut bench.space).unwrap_err();
    let AttachError::Replay { area, cause } = refused else {
        panic!("{refused}");
    };
    assert_eq!(area.start, AT + 2 * GIB);
    assert!(matches!(cause, MapError::OverLimit(limit) if limit.needed == 2 * MIB));
    assert_eq!((bench.state(), ledger.in_use()), (before, 0));
    bench.space.unmap(area).unwrap();
    machine.attach(&mut bench.space).unwrap();
    assert_eq!(ledger.in_use(), GIB);
    bench.end();
}

#[test]
fn a_device_that_is_plugged_again_finds_its_mappings() {
    let mut bench = Bench::new();
    bench.areas();
    let noted = bench.state();
    assert_eq!((noted.pinned, noted.in_use, noted.tables), (0, 0, 0));
    assert_eq!((noted.areas.len(), noted.held.iter().sum()), (3, 0));
    let tables = bench.tables.clone();
    let mut machine = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    let mut other = Machine::new(&tables, 1, can(FormatId::AmdV1, ALL, true));
    for round in 0..3 {
        machine.attach(&mut bench.space).unwrap();
        assert!(machine.domain() <= DomainId(2), "numbers come back");
        sees(&mut machine, true);
        other.attach(&mut bench.space).unwrap();
        // One goes: the other one keeps everything.
        let first = if round == 1 { &mut other } else { &mut machine };
        bench.space.detach(first.device).unwrap();
        sees(first, false);
        let still = (bench.object.memory.pinned(), bench.ledger.in_use());
        assert_eq!(still, (Bench::HELD, Bench::HELD));
        let last = if round == 1 { &mut machine } else { &mut other };
        sees(last, true);
        bench.space.detach(last.device).unwrap();
        sees(last, false);
        assert_eq!(bench.state(), noted);
    }
    bench.end();
}

#[test]
fn what_changes_while_no_device_is_there_is_what_the_next_one_finds() {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let mut machine = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    machine.attach(&mut bench.space).unwrap();
    bench.space.detach(machine.device).unwrap();
    let gone = bench.space.unmap(Span::new(AT + 2 * GIB, 5 * PAGE));
    let expected = Unmapped {
        areas: 1,
        bytes: 5 * PAGE,
        unpinned: 0,
    };
    assert_eq!(gone.unwrap(), expected);
    let hole = Span::new(AT + MIB, PAGE);
    bench
        .space
        .unmap_cutting(hole, Interruption::Refused)
        .unwrap();
    let out = Span::new(AT + 3 * GIB, MIB);
    bench.space.take_out(out, Interruption::Refused).unwrap();
    bench
        .map(AT + 2 * GIB, Span::new(2 * GIB - PAGE, PAGE))
        .unwrap();
    assert_eq!(bench.object.memory.pinned(), 0);
    // Over what is there and what is not a page.
    assert!(matches!(
        bench.map(AT + 2 * GIB, Span::new(0, PAGE)),
        Err(MapError::Overlap { .. })
    ));

    machine.attach(&mut bench.space).unwrap();
    for (iova, pa) in [
        (AT + MIB - 8, Some(FRAME + MIB - 8)),
        (hole.start, None),
        (hole.start + PAGE, Some(FRAME + MIB + PAGE)),
        (AT + 2 * GIB, Some(3 * FRAME + GIB - PAGE)),
        (AT + 2 * GIB + PAGE, None),
        (AT + 3 * GIB, None),
        (AT + 3 * GIB + MIB, Some(3 * FRAME + MIB)),
    ] {
        assert_eq!(machine.read(iova), pa, "{iova:#x}");
    }
    // Parts that were taken out are not pinned for a device either.
    let held = GIB - PAGE + 4 * MIB + PAGE;
    assert_eq!(bench.object.memory.pinned(), held);
    bench.space.put_back(out, Interruption::Refused).unwrap();
    assert_eq!(machine.read(AT + 3 * GIB), Some(2 * FRAME));
    assert_eq!(bench.object.memory.pinned(), held + MIB);
    bench.end();
}

#[test]
fn an_area_that_the_first_device_cannot_translate_refuses_it() {
    let mut bench = Bench::new();
    let tables = bench.tables.clone();
    let machine = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    for iova in [1 << 48, (1 << 48) - PAGE, 0x800] {
        bench.map(iova, Span::new(0, 2 * PAGE)).unwrap();
        let before = bench.state();
        let refused = machine.attach(&mut bench.space).unwrap_err();
        assert!(
            matches!(refused, AttachError::Replay { area, .. } if area.start == iova),
            "{refused}"
        );
        assert_eq!(bench.state(), before);
        bench.space.unmap_all().unwrap();
    }
    machine.attach(&mut bench.space).unwrap();
    assert!(matches!(
        bench.map(1 << 48, Span::new(0, PAGE)),
        Err(MapError::Range(_))
    ));
    bench.end();
}

const MSI: Span<Iova> = Span::new(0xfee0_0000, 0x10_0000);

#[test]
fn nothing_is_mapped_where_a_device_cannot_translate() {
    let mut bench = Bench::new();
    let tables = bench.tables.clone();
    let x86 = |n| {
        Machine::with(&tables, n, can(FormatId::VtdSs, ALL, true), |unit| {
            // Units may name nothing at all, too.
            unit.reserved = vec![MSI, Span::new(0x8000, 0), Span::new(1 << 20, 0)];
        })
    };
    let (one, mut two) = (x86(0), x86(1));
    let half = 1 << 63;
    let everything = [Span::new(0, half), Span::new(half, half)];
    assert_eq!(bench.space.windows(), everything);

    // Over an area: the device does not come in.
    for at in [MSI.start - PAGE, MSI.start, MSI.last() + 1 - PAGE] {
        bench.map(at, Span::new(0, 2 * PAGE)).unwrap();
        let before = bench.state();
        let refused = one.attach(&mut bench.space).unwrap_err();
        assert!(
            matches!(refused, AttachError::Reserved { area, reserved }
                if area.start == at && reserved == MSI),
            "{refused}"
        );
        assert_eq!(bench.state(), before);
        assert_eq!(bench.space.windows(), everything);
        bench.space.unmap_all().unwrap();
    }

    // On both sides of it, and over what is empty.
    for at in [MSI.start - 2 * PAGE, MSI.last() + 1, 0x7000, 1 << 20] {
        bench.map(at, Span::new(0, 2 * PAGE)).unwrap();
    }
    one.attach(&mut bench.space).unwrap();
    two.attach(&mut bench.space).unwrap();
    let behind = MSI.last() + 1;
    let windows = [
        Span::new(0, MSI.start),
        Span::new(behind, (1 << 48) - behind),
    ];
    assert_eq!(bench.space.windows(), windows);
    let before = bench.state();
    for (at, len) in [
        (MSI.start, PAGE),
        (MSI.last() + 1 - PAGE, PAGE),
        (MSI.start + MIB / 2, PAGE),
        (0xfe00_0000, 32 * MIB),
    ] {
        let refused = bench.map(at, Span::new(0, len));
        let Err(MapError::Reserved { wanted, reserved }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!((wanted, reserved), (Span::new(at, len), MSI));
        assert_eq!(bench.state(), before);
    }
    assert_eq!(two.read(MSI.last() + 1), Some(FRAME));

    // For as long as one of them is there.
    bench.space.detach(one.device).unwrap();
    assert_eq!(bench.space.windows(), windows);
    bench.space.detach(two.device).unwrap();
    assert_eq!(bench.space.windows(), everything);
    bench.map(MSI.start, Span::new(0, PAGE)).unwrap();
    bench.end();
}
