//! Tables that move from node to node while devices run, and what becomes of a move that fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::common::nodes::*;
use crate::common::*;
use ioas::{HarvestError, MoveError, Placement, Tracking, TrackingError, UnmapError};
use iommu::DomainId;
use iopt::{Pending, Prot};
use runs::Span;

/// Tables go from node to node under two devices that never stop reading; no read fails.
#[test]
fn tables_move_while_devices_read_through_them() {
    let mut bench = Bench::new(3, Placement::Shared);
    bench.map(AT, Span::new(0, GIB));
    bench.map(AT + GIB, Span::new(GIB, 4 * MIB));
    let machines = [bench.machine(0, node(0)), bench.machine(1, node(1))];
    for machine in &machines {
        bench.attach(machine);
    }
    let domain = bench.domain_of(&machines[0]).domain().unwrap();
    let stop = AtomicBool::new(false);
    let done = [AtomicU64::new(0), AtomicU64::new(0)];
    thread::scope(|scope| {
        for (machine, done) in machines.iter().zip(&done) {
            let stop = &stop;
            scope.spawn(move || {
                let mut at = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    at = at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(8);
                    let offset = at % (GIB / 8) * 8;
                    assert_eq!(machine.read(AT + offset), Some(FRAME + offset));
                    let offset = offset % (4 * MIB);
                    let expected = 3 * FRAME + MIB + offset;
                    assert_eq!(machine.read(AT + GIB + offset), Some(expected));
                    done.fetch_add(2, Ordering::Relaxed);
                }
            });
        }
        for round in 0..60 {
            let to = node((round + 1) % 3);
            bench.space.move_tables(domain, to).unwrap();
            let used = bench.nodes.in_use();
            for (n, tables) in used.iter().enumerate() {
                assert_eq!(*tables > 0, node(n as u32) == to, "{used:?}");
            }
            // Each device gets along between two moves.
            let before = done.each_ref().map(|done| done.load(Ordering::Relaxed));
            while done.iter().zip(before).any(|(done, before)| {
                done.load(Ordering::Relaxed) == before && !stop.load(Ordering::Relaxed)
            }) {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    // Pins have not changed.
    assert_eq!(bench.ledger.in_use(), GIB + 4 * MIB);
    bench.end();
}

#[test]
fn what_devices_wrote_before_a_move_is_harvested_after_it() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 4 * MIB));
    let machine = bench.machine(0, node(0));
    bench.attach(&machine);
    let tracking = Tracking {
        leaf: Some(PAGE),
        ..Tracking::default()
    };
    bench.space.track_dirty(tracking).unwrap();
    assert!(machine.write(AT + 3 * PAGE) && machine.write(AT + 4 * PAGE));
    assert!(machine.write(AT + 700 * PAGE));
    let domain = bench.domain_of(&machine).domain().unwrap();
    bench.space.move_tables(domain, node(1)).unwrap();
    assert_eq!(bench.space.leaf_at(AT).unwrap().run.len, PAGE);
    assert!(machine.write(AT + 9 * PAGE));
    // In two halves: what lies outside the first is not lost.
    let mut found = Vec::new();
    for half in [
        Span::new(AT + 4 * PAGE, 4 * MIB - 4 * PAGE),
        Span::new(AT, 4 * PAGE),
    ] {
        let mut pending = Pending::new(vec![0u64; 32], half, PAGE).unwrap();
        bench.space.harvest(&mut pending).unwrap();
        let shown = bench.space.show(&mut pending).unwrap();
        found.extend(shown.runs());
        shown.acknowledge();
    }
    let page = |n: u64| Span::new(AT + n * PAGE, PAGE);
    assert_eq!(found, [page(4), page(9), page(700), page(3)]);
    bench.space.untrack_dirty();
    bench.end();
}

#[test]
fn a_unit_that_is_not_notified_of_the_new_root_keeps_both_tables_true() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, GIB));
    bench.map(AT + GIB, Span::new(GIB, 4 * MIB));
    let machines = [bench.machine(0, node(0)), bench.machine(1, node(0))];
    for machine in &machines {
        bench.attach(machine);
    }
    let domain = bench.domain_of(&machines[0]).domain().unwrap();
    // The first unit takes the new root, the second does not answer: twice, as the unmap below flushes.
    machines[1].unit.invalidates.set(0..2);
    let refused = bench.space.move_tables(domain, node(1)).unwrap_err();
    assert!(matches!(refused, MoveError::Flush(_)), "{refused}");
    for machine in &machines {
        assert_eq!(machine.read(AT + PAGE), Some(FRAME + PAGE));
    }
    let used = bench.nodes.in_use();
    assert!(used.iter().all(|tables| *tables > 0), "{used:?}");
    // What is unmapped is taken out of both, and stays pinned until all have forgotten it.
    bench
        .space
        .unmap(Span::new(AT + GIB, 4 * MIB), &mut ())
        .unwrap_err();
    assert_eq!(bench.ledger.in_use(), GIB + 4 * MIB);
    assert_eq!(machines[0].read(AT + GIB), None, "its unit has answered");
    // A flush that succeeds ends the move.
    bench.space.flush().unwrap();
    assert_eq!(bench.ledger.in_use(), GIB);
    assert_eq!(bench.nodes.in_use()[0], 0);
    for machine in &machines {
        assert_eq!(machine.read(AT + GIB), None);
        assert_eq!(machine.read(AT + PAGE), Some(FRAME + PAGE));
    }
    bench.end();
}

#[test]
fn a_harvest_finds_what_was_written_through_a_table_that_a_unit_has_not_left() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 4 * MIB));
    let machine = bench.machine(0, node(0));
    bench.attach(&machine);
    bench.space.track_dirty(Tracking::default()).unwrap();
    let domain = bench.domain_of(&machine).domain().unwrap();
    machine.unit.invalidates.set(0..2);
    let refused = bench.space.move_tables(domain, node(1)).unwrap_err();
    assert!(matches!(refused, MoveError::Flush(_)), "{refused}");
    assert!(machine.write(AT + 3 * PAGE));
    let mut pending = Pending::new([0u64; 1], Span::new(AT, 4 * MIB), 2 * MIB).unwrap();
    let refused = bench.space.harvest(&mut pending).unwrap_err();
    assert!(matches!(refused, HarvestError::Flush(_)), "{refused}");
    // Now the unit answers, and that ends the move.
    bench.space.harvest(&mut pending).unwrap();
    let shown = bench.space.show(&mut pending).unwrap();
    assert_eq!(shown.runs().collect::<Vec<_>>(), [Span::new(AT, 2 * MIB)]);
    shown.acknowledge();
    assert_eq!(bench.nodes.in_use()[0], 0);
    bench.space.untrack_dirty();
    bench.end();
}

#[test]
fn a_table_that_a_unit_has_not_left_is_tracked_as_long_as_the_new_one() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 4 * MIB));
    bench.map(AT + GIB, Span::new(4 * MIB, 4 * MIB));
    let machine = bench.machine(0, node(0));
    bench.attach(&machine);
    bench.space.track_dirty(Tracking::default()).unwrap();
    let domain = bench.domain_of(&machine).domain().unwrap();
    machine.unit.invalidates.set(0..64);
    bench.space.move_tables(domain, node(1)).unwrap_err();
    bench.space.untrack_dirty();
    assert!(bench.nodes.in_use()[0] > 0, "the unit still walks it");
    // Nothing of what is unmapped is to be noted any more.
    let unmapped = bench.space.unmap(Span::new(AT, 4 * MIB), &mut ());
    assert!(
        matches!(unmapped, Err(UnmapError::Flush(_))),
        "{unmapped:?}"
    );
    // Tracking does not begin before the unit has left it.
    let refused = bench.space.track_dirty(Tracking::default());
    assert!(
        matches!(refused, Err(TrackingError::Clear(HarvestError::Flush(_)))),
        "{refused:?}"
    );
    let unmapped = bench.space.unmap(Span::new(AT + GIB, 4 * MIB), &mut ());
    assert!(
        matches!(unmapped, Err(UnmapError::Flush(_))),
        "{unmapped:?}"
    );
    machine.unit.invalidates.set([]);
    bench.space.flush().unwrap();
    assert_eq!((bench.nodes.in_use()[0], bench.ledger.in_use()), (0, 0));
    bench.end();
}

#[test]
fn a_map_waits_for_the_flush_that_ends_a_move() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 4 * MIB));
    let machine = bench.machine(0, node(0));
    bench.attach(&machine);
    let domain = bench.domain_of(&machine).domain().unwrap();
    machine.unit.invalidates.set([0]);
    let refused = bench.space.move_tables(domain, node(1)).unwrap_err();
    assert!(matches!(refused, MoveError::Flush(_)), "{refused}");
    // While a flush has the unit take the new root, another thread maps.
    let (pass, stopped) = stop();
    *machine.unit.at_invalidate.lock().unwrap() = Some(Arc::new(move || {
        pass();
    }));
    thread::scope(|scope| {
        let (bench, machine) = (&bench, &machine);
        scope.spawn(|| bench.space.flush().unwrap());
        stopped.wait();
        beside(scope, || {
            let part = Span::new(4 * MIB, 4 * MIB);
            let at = AT + 4 * MIB;
            let mapped = bench.space.map(at, &bench.memory, part, Prot::RW, &mut ());
            mapped.unwrap();
            assert_eq!(machine.read(at), Some(FRAME + 4 * MIB));
        });
        stopped.go();
    });
    *machine.unit.at_invalidate.lock().unwrap() = None;
    assert_eq!(bench.nodes.in_use()[0], 0);
    bench.end();
}

#[test]
fn a_move_that_cannot_be_made_changes_nothing() {
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 2 * MIB));
    let machine = bench.machine(0, node(0));
    bench.attach(&machine);
    let (places, used) = (bench.places(), bench.nodes.in_use());
    let domain = bench.domain_of(&machine).domain().unwrap();
    let refused = bench.space.move_tables(domain, node(9)).unwrap_err();
    assert!(matches!(refused, MoveError::Build(_)), "{refused}");
    let other = DomainId(77);
    let refused = bench.space.move_tables(other, node(1)).unwrap_err();
    assert!(matches!(refused, MoveError::NoDomain { domain } if domain == other));
    // Node 1 has room for a root and no more.
    let (tables, _) = &bench.nodes.0[1];
    let all = iopt::TableMemory::reserve(&**tables, 62).unwrap();
    let refused = bench.space.move_tables(domain, node(1)).unwrap_err();
    assert!(
        matches!(refused, MoveError::Build(_) | MoveError::Copy(_)),
        "{refused}"
    );
    iopt::TableMemory::give_back(&**tables, all);
    assert_eq!((bench.places(), bench.nodes.in_use()), (places, used));
    assert_eq!(machine.read(AT), Some(FRAME));
    bench.end();
}
