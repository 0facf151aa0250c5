//! One of two domains fails, and both are as they were: while mapping, unmapping, detaching.

use crate::common::machines::*;
use crate::common::*;
use ioas::{AttachError, EndpointId, MapError, UnmapError};
use iopt::{Cell, FormatId, TableMemory};
use runs::{Offset, Span};

/// Two domains in one format, of which the second one answers otherwise about snoops.
fn two() -> (Bench, Machine, Machine) {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let one = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    let other = Machine::with(&tables, 1, can(FormatId::VtdSs, ALL, false), |unit| {
        unit.caches_not_present = true;
    });
    one.attach(&mut bench.space).unwrap();
    other.attach(&mut bench.space).unwrap();
    assert_eq!(bench.space.places().len(), 2);
    (bench, one, other)
}

const NEW: u64 = AT + 5 * GIB;
/// At no multiple of 2 MiB; of its first pages others hold some too.
const NEW_PART: Span<Offset> = Span::new(GIB + 4 * MIB + PAGE, 4 * MIB);
const NEW_FRAME: u64 = 3 * FRAME + 4 * MIB + PAGE;
const NEW_HELD: u64 = 3 * MIB + PAGE;

#[test]
fn a_map_that_fails_in_one_of_two_domains_leaves_both_as_they_were() {
    let (mut bench, mut one, mut other) = two();
    let tables = bench.tables.clone();
    let before = bench.state();
    let check = |bench: &Bench, one: &mut Machine, other: &mut Machine| {
        assert_eq!(bench.state(), before);
        for machine in [one, other] {
            assert_eq!(machine.read(NEW), None);
            assert_eq!(machine.read(NEW + MIB), None);
            sees(machine, true);
        }
    };
    // Each table in turn: those of the first domain, then those of the second.
    let mut refused = 0;
    for left in 0.. {
        let reserve = tables.reserve(128 - tables.in_use() - left).unwrap();
        let result = bench.map(NEW, NEW_PART);
        tables.give_back(reserve);
        if result.is_ok() {
            break;
        }
        refused += 1;
        check(&bench, &mut one, &mut other);
    }
    assert!(refused >= 4, "{refused}");
    bench.space.unmap(Span::new(NEW, NEW_PART.len)).unwrap();
    check(&bench, &mut one, &mut other);

    // The unit that remembers holes does not take notice, in the second domain only.
    other.unit.invalidates.set([0]);
    let refused = bench.map(NEW, NEW_PART);
    assert!(matches!(refused, Err(MapError::Flush(_))), "{refused:?}");
    check(&bench, &mut one, &mut other);
    // It is deaf to the undoing, too: the memory is out of reach, but it waits.
    other.unit.invalidates.set([0, 1]);
    bench.map(NEW, NEW_PART).unwrap_err();
    let after = bench.state();
    assert_eq!(after.retired, 1);
    assert_eq!(
        (&after.areas, &after.leaves),
        (&before.areas, &before.leaves)
    );
    assert_eq!(after.pinned, before.pinned + NEW_HELD);
    assert_eq!(bench.space.flush().unwrap(), NEW_HELD);
    check(&bench, &mut one, &mut other);

    other.unit.invalidates.set(None);
    bench.map(NEW, NEW_PART).unwrap();
    for machine in [&mut one, &mut other] {
        assert_eq!(machine.read(NEW), Some(NEW_FRAME));
    }
    bench.end();
}

#[test]
fn an_unmap_that_one_of_two_units_does_not_hear_keeps_the_memory_for_both() {
    let (mut bench, mut one, mut other) = two();
    bench.map(NEW, NEW_PART).unwrap();
    let mapped = bench.state();
    for first in [true, false] {
        for machine in [&mut one, &mut other] {
            assert_eq!(machine.read(NEW), Some(NEW_FRAME));
        }
        let deaf = if first { &one.unit } else { &other.unit };
        deaf.invalidates.set([0]);
        let failed = bench.space.unmap(Span::new(NEW, NEW_PART.len));
        assert!(matches!(failed, Err(UnmapError::Flush(_))), "{failed:?}");
        let after = bench.state();
        assert_eq!((after.retired, after.areas.len()), (1, 3));
        assert_eq!((after.pinned, after.in_use), (mapped.pinned, mapped.in_use));
        deaf.invalidates.set(None);
        // The one that hears has forgotten it, whichever comes first.
        let hears = if first { &mut other } else { &mut one };
        assert_eq!(hears.read(NEW), None);
        bench.map(NEW, NEW_PART).unwrap();
        assert_eq!(bench.state(), mapped);
    }
    bench.end();
}

#[test]
fn an_unmap_that_one_of_two_tables_refuses_changes_neither() {
    let (bench, mut one, mut other) = two();
    // Above both levels of tables: a table for the pages of 2 MiB is linked at AT + 3 GiB.
    let damaged = {
        let mut roots = Vec::new();
        bench.space.tables(|_, table| roots.push(table.root()));
        let mut address = roots[1].address;
        let index = |shift: u32| ((AT + 2 * GIB) >> shift & 511) as usize;
        for shift in [39, 30] {
            let entry = &bench.tables.entries(address, 512)[index(shift)];
            address = entry.get() & 0x000f_ffff_ffff_f000;
        }
        (address, index(21))
    };
    let entry = |bench: &Bench| bench.tables.entries(damaged.0, 512)[damaged.1].get();
    let linked = entry(&bench);
    // A leaf of 2 MiB instead.
    bench.tables.entries(damaged.0, 512)[damaged.1].set(0x4000_0000 | 1 << 7 | 3);
    let before = bench.state();
    let range = Span::new(AT + 2 * GIB, 5 * PAGE);
    let refused = bench.space.unmap(range);
    assert!(matches!(refused, Err(UnmapError::Table(_))), "{refused:?}");
    assert_eq!(bench.state(), before);
    sees(&mut one, true);
    bench.tables.entries(damaged.0, 512)[damaged.1].set(linked);
    sees(&mut other, true);
    assert_eq!(bench.space.unmap_all().unwrap().unpinned, Bench::HELD);
    bench.end();
}

#[test]
fn a_device_that_its_unit_does_not_let_go_keeps_domain_and_memory() {
    let (bench, mut one, mut other) = two();
    let before = bench.state();
    for machine in [&mut one, &mut other] {
        machine.unit.detaches.set([0]);
        let stays = bench.space.detach(machine.device);
        assert!(stays.is_err());
        assert_eq!(bench.state(), before);
        sees(machine, true);
    }
    assert!(bench.space.detach(dev(7)).is_err());
    bench.end();
}

/// An attach to which the unit does not come to the end is taken back; where that does not end either, the unit counts
/// the device as attached, and so does the address space, which keeps the domain's number and table for it.
#[test]
fn a_device_whose_attach_does_not_end_is_gone_or_attached_until_it_is_detached() {
    let mut bench = Bench::new();
    bench.areas();
    let tables = bench.tables.clone();
    let mut one = Machine::new(&tables, 0, can(FormatId::VtdSs, ALL, true));
    let mut two = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, true));
    // A domain of its own, then one that is there.
    for machine in [&mut one, &mut two] {
        let before = bench.state();
        let id = EndpointId::Device(machine.device);
        machine.unit.endless.set([0]);
        let failed = machine.attach(&mut bench.space);
        assert!(matches!(failed, Err(AttachError::Unit(_))), "{failed:?}");
        assert!(!bench.space.endpoints().contains(&id));
        assert_eq!(bench.state(), before);

        machine.unit.endless.set([0]);
        machine.unit.detaches.set([0]);
        let failed = machine.attach(&mut bench.space);
        assert!(matches!(failed, Err(AttachError::Unit(_))), "{failed:?}");
        assert!(bench.space.endpoints().contains(&id));
        bench.space.detach(machine.device).unwrap();
        assert_eq!(bench.state(), before);
        machine.attach(&mut bench.space).unwrap();
        sees(machine, true);
    }
    bench.end();
}
