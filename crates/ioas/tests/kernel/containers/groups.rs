//! Sharing of containers by groups, their opening and closing, and the ranges that all of them can map.

use std::sync::Arc;

use super::{ALL, Bench, group, node};
use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{AttachError, Capability, DetachError, Endpoint, Errno, MapError, Placement};
use iommu::NodeId;
use iopt::Interruption;
use runs::Span;

#[test]
fn a_container_for_each_node_opens_with_its_first_group_and_closes_with_the_last() {
    let (mut bench, groups) = Bench::with(&[0, 1, 0], GIB);
    let [a, b, c] = &groups[..] else {
        panic!("three groups");
    };
    assert_eq!(bench.space.placement(), Placement::PerNode);
    assert_eq!(bench.nodes(), [(Some(0), 2), (Some(1), 1)]);
    let memory = bench.memory(GIB);
    bench.map(GIB, &memory, ALL).unwrap();
    bench.check();
    assert_eq!(bench.ledger.in_use(), 2 * ALL.len);
    // A group of unknown node: a node of its own, with the existing mappings.
    let nowhere = group();
    bench
        .space
        .attach(Endpoint::from(nowhere.clone()).near(None))
        .unwrap();
    assert_eq!(bench.nodes(), [(Some(0), 2), (Some(1), 1), (None, 1)]);
    assert_eq!(bench.ledger.in_use(), 3 * ALL.len);
    bench.check();
    let twice = bench.space.attach(Endpoint::from(a.clone()).near(node(1)));
    assert!(
        matches!(twice, Err(AttachError::AlreadyAttached)),
        "{twice:?}"
    );
    // The remaining group of a node keeps its container.
    bench.space.detach(a).unwrap();
    assert_eq!(bench.nodes()[0], (Some(0), 1));
    bench.check();
    bench.space.detach(c).unwrap();
    assert_eq!(bench.nodes(), [(Some(1), 1), (None, 1)]);
    bench.check();
    assert_eq!(bench.space.detach(c), Err(DetachError::Unknown));
    bench.space.detach(&nowhere).unwrap();
    bench.space.detach(b).unwrap();
    assert_eq!((bench.nodes(), bench.ledger.in_use()), (vec![], 0));
    bench.check();
    // Areas have stayed.
    bench
        .space
        .attach(Endpoint::from(a.clone()).near(node(1)))
        .unwrap();
    assert_eq!(bench.nodes(), [(Some(1), 1)]);
    bench.check();
    bench.space.close().unwrap();
    assert_eq!(bench.ledger.in_use(), 0);
    let world = bench.world.lock().unwrap();
    assert!(
        world
            .spaces
            .iter()
            .all(|space| space.closed && space.mappings.is_empty())
    );
}

#[test]
fn a_group_whose_device_is_open_stays_where_it_is() {
    let bench = Bench::new(None, GIB);
    let open = Arc::new(Device {
        open: true,
        ..Device::default()
    });
    bench
        .space
        .attach(Endpoint::from(open.clone()).near(node(0)))
        .unwrap();
    bench
        .space
        .attach(Endpoint::from(group()).near(node(1)))
        .unwrap();
    let refused = bench.space.detach(&open);
    assert!(
        matches!(
            refused,
            Err(DetachError::Kernel {
                errno: Errno::EBUSY,
                ..
            })
        ),
        "{refused:?}"
    );
    assert_eq!(bench.nodes(), [(Some(0), 1), (Some(1), 1)]);
    bench.check();
}

#[test]
fn shared_is_one_container_and_near_is_refused_by_name() {
    let mut bench = Bench::new(None, GIB);
    let near = bench.space.set_placement(Placement::Near(NodeId(1)));
    assert_eq!(near.unwrap_err().what, Capability::TablePlacement);
    bench.space.set_placement(Placement::Shared).unwrap();
    for number in [0, 1, 2] {
        bench
            .space
            .attach(Endpoint::from(group()).near(node(number)))
            .unwrap();
    }
    assert_eq!(bench.nodes(), [(Some(0), 3)]);
    let memory = bench.memory(GIB);
    bench.map(GIB, &memory, ALL).unwrap();
    assert_eq!(bench.ledger.in_use(), ALL.len);
    bench.check();
    // Attached groups stay; new ones have a container of their own.
    bench.space.set_placement(Placement::PerNode).unwrap();
    bench
        .space
        .attach(Endpoint::from(group()).near(node(1)))
        .unwrap();
    assert_eq!(bench.nodes(), [(Some(0), 3), (Some(1), 1)]);
    bench.check();
    let lacks: Vec<_> = bench.space.capabilities().missing().collect();
    assert!(
        lacks.contains(&Capability::NodeTables),
        "it charges for each"
    );
}

#[test]
fn windows_and_entries_are_those_that_all_containers_have() {
    let (mut bench, _) = Bench::with(&[0], GIB);
    let memory = bench.memory(GIB);
    bench.map(1 << 40, &memory, Span::new(0, MIB)).unwrap();
    let narrow = Arc::new(Device {
        ranges: vec![0x10_0000..=(1 << 39) - 1],
        granule: 0x1_0000,
        ..Device::default()
    });
    let refused = bench
        .space
        .attach(Endpoint::from(narrow.clone()).near(node(1)));
    let Err(AttachError::Reserved { area, .. }) = refused else {
        panic!("an area lies where the second cannot translate: {refused:?}");
    };
    assert_eq!(area, Span::new(1 << 40, MIB));
    bench.check();
    bench.space.unmap_all().unwrap();
    bench
        .space
        .attach(Endpoint::from(narrow).near(node(1)))
        .unwrap();
    assert_eq!(
        bench.space.windows(),
        [
            Span::new(0x10_0000, 0xfee0_0000 - 0x10_0000),
            Span::new(0xfef0_0000, (1 << 39) - 0xfef0_0000)
        ]
    );
    let refused = bench.map(1 << 40, &memory, Span::new(0, MIB));
    assert!(
        matches!(refused, Err(MapError::Reserved { .. })),
        "{refused:?}"
    );
    let refused = bench.map(GIB, &memory, Span::new(0, PAGE));
    assert!(matches!(refused, Err(MapError::Part { .. })), "{refused:?}");
    // The second has fewer entries left, and merging must be allowed.
    bench.world.lock().unwrap().entries = 2;
    bench.space.refresh().unwrap();
    assert_eq!(bench.space.capabilities().most_mappings, Some(2));
    for n in 0..2 {
        bench
            .map(GIB + n * MIB, &memory, Span::new(n * MIB, MIB))
            .unwrap();
    }
    let third = Span::new(2 * MIB, MIB);
    let refused = bench.map(GIB + 2 * MIB, &memory, third);
    assert!(
        matches!(refused, Err(MapError::TooMany { wanted: 3, most: 2 })),
        "{refused:?}"
    );
    bench.space.set_merging(Interruption::Allowed);
    bench.map(GIB + 2 * MIB, &memory, third).unwrap();
    bench.check();
}

#[test]
fn ranges_that_are_allowed_hold_for_containers_to_come() {
    let (bench, _) = Bench::with(&[0], GIB);
    bench.space.allow(&[Span::new(1 << 40, GIB)]).unwrap();
    let narrow = Arc::new(Device {
        ranges: vec![0..=(1 << 39) - 1],
        ..Device::default()
    });
    let refused = bench.space.attach(Endpoint::from(narrow).near(node(1)));
    assert!(
        matches!(refused, Err(AttachError::Conflict(_))),
        "{refused:?}"
    );
    bench
        .space
        .attach(Endpoint::from(group()).near(node(1)))
        .unwrap();
    bench.check();
    let refused = bench.space.allow(&[Span::new(1 << 50, GIB)]);
    assert!(
        matches!(refused, Err(MapError::Allowed { .. })),
        "{refused:?}"
    );
    let world = bench.world.lock().unwrap();
    let allowed = |n: &usize| world.spaces[*n].allowed == [Span::new(1 << 40, GIB)];
    assert!(bench.spaces().iter().all(allowed));
}

#[test]
fn ranges_that_one_container_refuses_are_allowed_in_none() {
    let (bench, _) = Bench::with(&[0], GIB);
    let narrow = Arc::new(Device {
        ranges: vec![0..=(1 << 39) - 1],
        ..Device::default()
    });
    bench
        .space
        .attach(Endpoint::from(narrow).near(node(1)))
        .unwrap();
    let before = Span::new(1 << 30, GIB);
    bench.space.allow(&[before]).unwrap();
    // The first takes it, the second does not.
    let refused = bench.space.allow(&[Span::new(1 << 40, GIB)]);
    assert!(
        matches!(refused, Err(MapError::Allowed { .. })),
        "{refused:?}"
    );
    let world = bench.world.lock().unwrap();
    for n in bench.spaces() {
        assert_eq!(world.spaces[n].allowed, [before], "container {n}");
    }
}
