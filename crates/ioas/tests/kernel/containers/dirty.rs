//! Writes of devices of several containers.

use std::sync::Arc;

use super::{ALL, Bench, node};
use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{Endpoint, Tracking};
use iopt::{Interruption, Pending};
use runs::{Iova, Span};

#[test]
fn what_is_dirty_in_one_container_is_dirty_also_when_it_is_closed() {
    let (mut bench, groups) = Bench::with(&[0, 1], GIB);
    let memory = bench.memory(GIB);
    bench.map(GIB, &memory, ALL).unwrap();
    bench.space.track_dirty(Tracking::default()).unwrap();
    assert!(bench.space.capabilities().page_dirty);
    let spaces = bench.spaces();
    let write = |bench: &Bench, space: usize, page: u64| {
        let mut world = bench.world.lock().unwrap();
        world.spaces[space].dirty.insert(GIB + page * PAGE);
    };
    let harvest = |bench: &mut Bench| {
        let mut pending = Pending::new(vec![0; 8], Span::new(GIB, 2 * MIB), PAGE).unwrap();
        let found = bench.space.harvest(&mut pending).unwrap();
        let shown = bench.space.show(&mut pending).unwrap();
        let pages = shown
            .runs()
            .map(|run| ((run.start - GIB) / PAGE, run.len / PAGE));
        (pages.collect::<Vec<_>>(), found.blind)
    };
    write(&bench, spaces[0], 1);
    write(&bench, spaces[1], 2);
    write(&bench, spaces[1], 7);
    assert_eq!(harvest(&mut bench), (vec![(1, 2), (7, 1)], false));
    assert_eq!(harvest(&mut bench).0, []);
    // The second closes.
    write(&bench, spaces[0], 3);
    write(&bench, spaces[1], 5);
    write(&bench, spaces[1], 400);
    bench.space.detach(&groups[1]).unwrap();
    assert_eq!(bench.nodes().len(), 1);
    let mut pending = Pending::new(vec![0; 8], Span::new(GIB, 2 * MIB), PAGE).unwrap();
    let half = Span::new(GIB + MIB, MIB);
    bench
        .space
        .unmap_cutting(half, Interruption::Allowed)
        .unwrap();
    assert_eq!(
        harvest(&mut bench).0,
        [(3, 1), (5, 1)],
        "what is gone is gone"
    );
    // A new container is tracked from the beginning, and its writes are reported when they are unmapped.
    bench
        .space
        .attach(Endpoint::from(groups[1].clone()).near(node(1)))
        .unwrap();
    let spaces = bench.spaces();
    write(&bench, spaces[1], 9);
    let rest = Span::new(GIB, MIB);
    bench.space.unmap_noting(rest, &mut pending).unwrap();
    let shown = bench.space.show(&mut pending).unwrap();
    let found: Vec<Span<Iova>> = shown.runs().collect();
    assert_eq!(found, [Span::new(GIB + 9 * PAGE, PAGE)]);
    shown.acknowledge();
    // One group that cannot tell makes everything dirty.
    bench.map(GIB, &memory, Span::new(0, MIB)).unwrap();
    bench
        .space
        .attach(Endpoint::from(Arc::<Device>::default()).near(node(2)))
        .unwrap();
    assert_eq!(harvest(&mut bench), (vec![(0, 256)], true));
    bench.space.untrack_dirty();
}
