//! A refusal by one container or by the kernel is undone in all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{ALL, Bench, group, node};
use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{
    AttachError, Capability, Endpoint, Ioas, Ledger, Memory, Placement, Profile, UnmapError,
};
use iopt::{Interruption, Prot};
use runs::Span;

/// One step of the life of an address space; each may be refused by the kernel, and then may be tried
/// again.
type StepOf = fn(&mut Bench, &[Arc<Device>; 3], &Arc<Memory>) -> bool;

const LIFE: &[StepOf] = &[
    |bench, [a, ..], _| {
        bench
            .space
            .attach(Endpoint::from(a.clone()).near(node(0)))
            .is_ok()
    },
    |bench, [_, b, _], _| {
        bench
            .space
            .attach(Endpoint::from(b.clone()).near(node(1)))
            .is_ok()
    },
    |bench, _, memory| {
        bench
            .map(2 * GIB, memory, Span::new(4 * MIB, 3 * MIB))
            .is_ok()
    },
    |bench, [.., c], _| {
        bench
            .space
            .attach(Endpoint::from(c.clone()).near(node(2)))
            .is_ok()
    },
    |bench, _, _| {
        let part = Span::new(2 * GIB + MIB / 2, MIB);
        let done = bench.space.unmap_cutting(part, Interruption::Allowed);
        done.is_ok()
    },
    |bench, _, _| {
        let mut done = true;
        let part = [Span::new(GIB + MIB, MIB)];
        let mut refused = |_, _| done = false;
        bench
            .space
            .release(&part, Interruption::Allowed, &mut refused);
        done
    },
    |bench, _, _| {
        let mut done = true;
        let part = [Span::new(GIB, 2 * MIB)];
        let mut refused = |_, _| done = false;
        bench
            .space
            .restore(&part, Interruption::Allowed, &mut refused);
        done
    },
    |bench, _, _| {
        let part = Span::new(GIB + MIB, MIB);
        bench.space.take_out(part, Interruption::Allowed).is_ok()
    },
    |bench, _, _| {
        let part = Span::new(GIB + MIB, MIB);
        bench.space.put_back(part, Interruption::Allowed).is_ok()
    },
    |bench, _, _| bench.space.unmap(Span::new(2 * GIB, GIB)).is_ok(),
    |bench, [_, b, _], _| bench.space.detach(b).is_ok(),
    |bench, _, _| bench.space.unmap_all().is_ok(),
];

#[test]
fn each_step_that_fails_once_is_undone_in_all_containers() {
    let groups = || [group(), group(), group()];
    let begun = || {
        let bench = Bench::new(Some(MIB), 64 * GIB);
        let memory = bench.memory(GIB);
        (bench, groups(), memory)
    };
    let mut failed = 0;
    for nth in 0.. {
        let (mut bench, groups, memory) = begun();
        bench.map(GIB, &memory, ALL).unwrap();
        bench.world.lock().unwrap().fail = [nth].into();
        for (place, step) in LIFE.iter().enumerate() {
            let nodes = bench.nodes();
            if !step(&mut bench, &groups, &memory) {
                failed += 1;
                assert_eq!(bench.nodes(), nodes, "call {nth}, step {place}");
                bench.check();
                assert!(
                    step(&mut bench, &groups, &memory),
                    "call {nth}, step {place}"
                );
            }
            bench.check();
        }
        bench.space.close().unwrap();
        assert_eq!(bench.ledger.in_use(), 0, "call {nth}");
        if !bench.world.lock().unwrap().fail.is_empty() {
            break;
        }
    }
    assert!(failed > 30, "{failed} steps failed");
}

#[test]
fn a_range_that_one_container_cannot_cut_stays_in_all() {
    // Areas that go on in each other are one piece in a container that came later.
    let (mut bench, _) = Bench::with(&[0], GIB);
    let memory = bench.memory(GIB);
    for n in 0..2 {
        bench
            .map(GIB + n * MIB, &memory, Span::new(n * MIB, MIB))
            .unwrap();
    }
    bench
        .space
        .attach(Endpoint::from(group()).near(node(1)))
        .unwrap();
    let calls = bench.world.lock().unwrap().asked;
    let refused = bench.space.unmap(Span::new(GIB, MIB));
    let Err(UnmapError::CutsMapping { mapping, cause }) = refused else {
        panic!("the second has one piece: {refused:?}");
    };
    assert_eq!(
        (mapping, cause.what),
        (Span::new(GIB, ALL.len), Capability::UnmapPart)
    );
    assert_eq!(
        bench.world.lock().unwrap().asked,
        calls,
        "the first was changed"
    );
    bench.check();
    let half = Span::new(GIB, MIB);
    bench
        .space
        .unmap_cutting(half, Interruption::Allowed)
        .unwrap();
    bench.check();
}

#[test]
fn a_container_that_cannot_be_opened_leaves_the_others() {
    let (mut bench, _) = Bench::with(&[0], GIB);
    let memory = bench.memory(GIB);
    bench.map(GIB, &memory, ALL).unwrap();
    bench.full.store(true, Ordering::Relaxed);
    let refused = bench.space.attach(Endpoint::from(group()).near(node(1)));
    assert!(
        matches!(refused, Err(AttachError::Kernel(_))),
        "{refused:?}"
    );
    bench
        .space
        .attach(Endpoint::from(group()).near(node(0)))
        .unwrap();
    assert_eq!(bench.nodes(), [(Some(0), 2)]);
    bench.check();
}

#[test]
fn a_container_that_keeps_its_mappings_is_used_again() {
    // One of type 1 loses them with its last group; one that iommufd plays does not.
    let world = World::new(Profile::Iommufd);
    let open = {
        let world = Arc::clone(&world);
        move || Ok(PlainIommufd::new(&world, &Arc::default()))
    };
    let space = Ioas::options().over_mappers(open).unwrap();
    space.set_placement(Placement::PerNode).unwrap();
    let ledger = Ledger::new("mm->locked_vm", Some(GIB), 0);
    let (address, file) = (Some(1 << 40), None);
    let object = Arc::new(Fake {
        len: GIB,
        address,
        file,
    });
    let memory = Memory::new(object, &ledger);
    let first = group();
    space
        .attach(Endpoint::from(first.clone()).near(node(0)))
        .unwrap();
    space.map(GIB, &memory, ALL, Prot::RW).unwrap();
    world.lock().unwrap().fail = [0].into();
    space.detach(&first).unwrap();
    let left = |space: &Ioas| {
        let all = space.places().into_iter();
        all.map(|place| (place.node, place.mappings))
            .collect::<Vec<_>>()
    };
    assert_eq!(left(&space), [(None, 1)], "what is mapped is not forgotten");
    assert_eq!(ledger.in_use(), ALL.len);
    space.unmap_all().unwrap();
    space.map(2 * GIB, &memory, ALL, Prot::RW).unwrap();
    space.attach(Endpoint::from(group()).near(node(1))).unwrap();
    assert_eq!(left(&space), [(node(1), 1)]);
    assert_eq!(ledger.in_use(), ALL.len);
    let inside = world.lock().unwrap();
    assert_eq!(inside.spaces.len(), 1);
    let found = [GIB, 2 * GIB].map(|iova| inside.translate(0, iova));
    assert_eq!(found, [None, Some(1 << 40)]);
}
