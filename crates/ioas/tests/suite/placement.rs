//! Placement of tables: policies on machines of several nodes.

use std::sync::Arc;

use crate::common::machines::{ALL, can};
use crate::common::nodes::*;
use crate::common::*;
use ioas::{Endpoint, Placement};
use iommu::{DeviceId, NodeId, SoftwareConfig, SoftwareUnit};
use iopt::FormatId;
use runs::Span;

#[test]
fn the_policy_is_a_value() {
    let bench = Bench::new(1, Placement::default());
    assert_eq!(bench.space.placement(), Placement::Shared);
    let (zero, one) = (node(0), node(1));
    for (placement, joins, tables) in [
        (Placement::Shared, true, zero),
        (Placement::PerNode, false, zero),
        (Placement::Near(NodeId(1)), true, one),
    ] {
        assert_eq!(placement.joins(zero, one), joins, "{placement:?}");
        assert!(placement.joins(zero, zero) && placement.joins(None, None));
        assert_eq!(placement.joins(zero, None), joins, "{placement:?}");
        assert_eq!(placement.tables(zero), tables, "{placement:?}");
    }
    assert_eq!(Placement::Shared.tables(None), None);
    bench.end();
}

#[test]
fn shared_builds_one_root() {
    for nodes in [1, 2, 4, 8] {
        let mut bench = Bench::new(nodes, Placement::Shared);
        bench.map(AT, Span::new(0, GIB));
        // The last node's comes first.
        let machines: Vec<_> = (0..nodes)
            .map(|n| bench.machine(n as u8, node(nodes - 1 - n)))
            .collect();
        for machine in &machines {
            bench.attach(machine);
        }
        let last = Some(nodes - 1);
        assert_eq!(bench.places(), [(last, last, nodes as usize)]);
        let used: Vec<_> = bench.nodes.in_use();
        assert!(used[..used.len() - 1].iter().all(|tables| *tables == 0));
        bench.nodes.reads();
        for machine in &machines {
            assert_eq!(machine.read(AT + PAGE), Some(FRAME + PAGE));
        }
        // The reason for placement: all but one read tables of another node.
        let reads = bench.nodes.reads();
        assert!(reads[..reads.len() - 1].iter().all(|reads| *reads == 0));
        bench.end();
    }
}

#[test]
fn every_node_has_its_root() {
    for nodes in [1, 2, 4, 8] {
        let mut bench = Bench::new(nodes, Placement::PerNode);
        bench.map(AT, Span::new(0, GIB));
        let machines: Vec<_> = (0..2 * nodes)
            .map(|n| bench.machine(n as u8, node(n % nodes)))
            .collect();
        for machine in &machines {
            bench.attach(machine);
        }
        bench.map(AT + GIB, Span::new(GIB, 2 * MIB));
        let expected: Vec<_> = (0..nodes).map(|n| (Some(n), Some(n), 2)).collect();
        assert_eq!(bench.places(), expected);
        // Memory is pinned and charged once.
        assert_eq!(bench.ledger.in_use(), GIB + 2 * MIB);
        for (n, machine) in (0..).zip(&machines) {
            bench.nodes.reads();
            assert_eq!(machine.read(AT + PAGE), Some(FRAME + PAGE));
            assert_eq!(machine.read(AT + GIB), Some(3 * FRAME + MIB));
            // Nothing is read from another node.
            let reads = bench.nodes.reads();
            let from: Vec<_> = (0..nodes).filter(|n| reads[*n as usize] > 0).collect();
            assert_eq!(from, [n % nodes]);
        }
        // It is gone from all when unmap returns.
        bench.space.unmap(Span::new(AT + GIB, 2 * MIB)).unwrap();
        assert!(
            machines
                .iter()
                .all(|machine| machine.read(AT + GIB).is_none())
        );
        assert_eq!(bench.ledger.in_use(), GIB);
        bench.end();
    }
}

#[test]
fn near_puts_all_tables_on_one_node() {
    let mut bench = Bench::new(3, Placement::Near(NodeId(2)));
    bench.map(AT, Span::new(0, 2 * MIB));
    for (n, at) in [(0, node(0)), (1, node(1)), (2, None)] {
        let machine = bench.machine(n, at);
        bench.attach(&machine);
    }
    assert_eq!(bench.places(), [(Some(0), Some(2), 3)]);
    let used = bench.nodes.in_use();
    assert!(used[2] > 0 && used[..2] == [0, 0], "{used:?}");
    bench.end();
}

#[test]
fn the_node_is_derived_in_one_place() {
    // A attaches, B attaches, A leaves: the node is B's then, though the table is where it was.
    let mut bench = Bench::new(2, Placement::Shared);
    bench.map(AT, Span::new(0, 2 * MIB));
    let (a, b) = (bench.machine(0, node(0)), bench.machine(1, node(1)));
    bench.attach(&a);
    assert_eq!(bench.places(), [(Some(0), Some(0), 1)]);
    bench.attach(&b);
    assert_eq!(bench.places(), [(Some(0), Some(0), 2)]);
    bench.space.detach(a.device).unwrap();
    assert_eq!(bench.places(), [(Some(1), Some(0), 1)]);
    assert_eq!(b.read(AT), Some(FRAME));
    bench.end();
}

#[test]
fn the_first_unit_sets_the_node_and_the_last_takes_it_along() {
    let mut bench = Bench::new(2, Placement::PerNode);
    bench.map(AT, Span::new(0, 2 * MIB));
    let (a, b) = (bench.machine(0, node(1)), bench.machine(1, node(1)));
    bench.attach(&a);
    bench.attach(&b);
    assert_eq!(bench.places(), [(Some(1), Some(1), 2)]);
    bench.space.detach(a.device).unwrap();
    assert_eq!(bench.places(), [(Some(1), Some(1), 1)]);
    bench.space.detach(b.device).unwrap();
    assert_eq!(bench.places(), []);
    assert_eq!(bench.nodes.in_use(), [0, 0]);
    // Another one begins anew.
    let c = bench.machine(2, node(0));
    bench.attach(&c);
    assert_eq!(bench.places(), [(Some(0), Some(0), 1)]);
    bench.end();
}

#[test]
fn domains_match_on_the_node() {
    let mut bench = Bench::new(2, Placement::PerNode);
    let formats = [FormatId::VtdSs, FormatId::AmdV1];
    let mut n = 0;
    for at in [node(0), node(1), None, node(1), None] {
        for format in formats {
            let machine = bench.machine_of(n, at, format);
            bench.attach(&machine);
            n += 1;
        }
    }
    // A node's devices share a table if their units can; those of no node do among themselves.
    let expected = [
        (Some(0), Some(0), 1),
        (Some(0), Some(0), 1),
        (Some(1), Some(1), 2),
        (Some(1), Some(1), 2),
        (None, None, 2),
        (None, None, 2),
    ];
    assert_eq!(bench.places(), expected);
    bench.end();
}

#[test]
fn a_device_without_a_node_counts_where_its_unit_is_and_else_where_it_is() {
    let bench = Bench::new(3, Placement::PerNode);
    let units = [None, node(1), None];
    let near = [node(2), node(2), None];
    for (n, (unit, near)) in (0..).zip(units.into_iter().zip(near)) {
        let machine = bench.machine(n, unit);
        bench
            .space
            .attach(Endpoint::from((machine.unit, machine.device)).near(near))
            .unwrap();
    }
    let expected = [
        (Some(2), Some(2), 1),
        (Some(1), Some(1), 1),
        (None, None, 1),
    ];
    assert_eq!(bench.places(), expected);
    bench.end();
}

#[test]
fn a_unit_that_serves_two_nodes_has_a_root_for_each() {
    // Units that do not know a node, with devices at two: the devices' nodes count.
    let mut bench = Bench::new(2, Placement::PerNode);
    bench.map(AT, Span::new(0, 2 * MIB));
    let software = SoftwareUnit::with_config(
        bench.nodes.clone(),
        Echo,
        SoftwareConfig {
            capabilities: can(FormatId::VtdSs, ALL, true),
            ..SoftwareConfig::default()
        },
    );
    let devices = [DeviceId::pci(1, 0, 0), DeviceId::pci(2, 0, 0)];
    let mut ports = devices.map(|device| software.port(device));
    let unit = Arc::new(software);
    for (n, device) in (0..).zip(devices) {
        bench
            .space
            .attach(Endpoint::from((unit.clone(), device)).near(node(n)))
            .unwrap();
    }
    assert_eq!(
        bench.places(),
        [(Some(0), Some(0), 1), (Some(1), Some(1), 1)]
    );
    for (n, port) in ports.iter_mut().enumerate() {
        bench.nodes.reads();
        port.read(AT, &mut [0]).unwrap();
        assert_eq!(bench.nodes.reads()[1 - n], 0);
    }
    bench.end();
}

#[test]
fn a_node_without_memory_borrows_tables_and_still_has_a_root() {
    let mut bench = Bench::with(2, &[1], Placement::PerNode);
    bench.map(AT, Span::new(0, 2 * MIB));
    let machines = [bench.machine(0, node(0)), bench.machine(1, node(1))];
    for machine in &machines {
        bench.attach(machine);
        assert_eq!(machine.read(AT), Some(FRAME));
    }
    // The source of memory answers for where it is: these are the requested nodes.
    assert_eq!(
        bench.places(),
        [(Some(0), Some(0), 1), (Some(1), Some(1), 1)]
    );
    assert_eq!(bench.nodes.in_use()[1], 0);
    bench.end();
}

#[test]
fn a_node_that_has_no_tables_at_all_is_refused_and_others_go_on() {
    let mut bench = Bench::new(1, Placement::PerNode);
    bench.map(AT, Span::new(0, 2 * MIB));
    let (a, b) = (bench.machine(0, node(0)), bench.machine(1, node(7)));
    bench.attach(&a);
    let refused = bench.space.attach((b.unit.clone(), b.device)).unwrap_err();
    assert!(matches!(refused, ioas::AttachError::Build(_)), "{refused}");
    assert_eq!(bench.places(), [(Some(0), Some(0), 1)]);
    assert_eq!(a.read(AT), Some(FRAME));
    assert_eq!(b.read(AT), None);
    bench.end();
}

#[test]
fn a_attaches_b_attaches_a_leaves_under_every_policy() {
    for nodes in [1, 2, 4, 8] {
        let last = nodes - 1;
        let homes = [node(0), node(last), None];
        for placement in [
            Placement::Shared,
            Placement::PerNode,
            Placement::Near(NodeId(last)),
        ] {
            for (first, second) in homes.iter().flat_map(|a| homes.map(|b| (*a, b))) {
                let number = |node: Option<NodeId>| node.map(|node| node.0);
                let tables = |home| match placement {
                    Placement::Near(node) => Some(node.0),
                    _ => number(home),
                };
                let mut bench = Bench::new(nodes, placement);
                bench.map(AT, Span::new(0, 2 * MIB));
                let (a, b) = (bench.machine(0, first), bench.machine(1, second));
                bench.attach(&a);
                let alone = (number(first), tables(first), 1);
                assert_eq!(bench.places(), [alone]);
                bench.attach(&b);
                let own = placement == Placement::PerNode && first != second;
                let lie = if own { tables(second) } else { tables(first) };
                let left = (number(second), lie, 1);
                match own {
                    true => assert_eq!(bench.places(), [alone, left]),
                    // A device of no node says nothing of its domain's.
                    false => {
                        let known = number(first.or(second));
                        assert_eq!(bench.places(), [(known, tables(first), 2)]);
                    }
                }
                assert_eq!((a.read(AT), b.read(AT)), (Some(FRAME), Some(FRAME)));
                bench.space.detach(a.device).unwrap();
                assert_eq!(bench.places(), [left], "{placement} {first:?} {second:?}");
                assert_eq!((a.read(AT), b.read(AT)), (None, Some(FRAME)));
                // The last one frees it.
                bench.space.detach(b.device).unwrap();
                assert_eq!(bench.places(), []);
                assert!(bench.nodes.in_use().iter().all(|tables| *tables == 0));
                bench.end();
            }
        }
    }
}

#[test]
fn near_puts_all_tables_on_any_of_up_to_eight_nodes() {
    for nodes in [1, 2, 4, 8] {
        for near in 0..nodes {
            let mut bench = Bench::new(nodes, Placement::Near(NodeId(near)));
            bench.map(AT, Span::new(0, GIB));
            for n in 0..nodes {
                let machine = bench.machine(n as u8, node(n));
                bench.attach(&machine);
                assert_eq!(machine.read(AT), Some(FRAME));
            }
            assert_eq!(bench.places(), [(Some(0), Some(near), nodes as usize)]);
            let used = bench.nodes.in_use();
            let with: Vec<_> = (0..nodes).filter(|n| used[*n as usize] > 0).collect();
            assert_eq!(with, [near]);
            bench.end();
        }
    }
}

#[test]
fn a_node_without_memory_has_borrowed_tables_under_every_policy() {
    // Every second node has processors and devices only.
    for placement in [
        Placement::Shared,
        Placement::PerNode,
        Placement::Near(NodeId(3)),
    ] {
        let mut bench = Bench::with(8, &[1, 3, 5, 7], placement);
        bench.map(AT, Span::new(0, 2 * MIB));
        for n in [3, 1, 5, 2] {
            let machine = bench.machine(n, node(n.into()));
            bench.attach(&machine);
            assert_eq!(machine.read(AT), Some(FRAME));
        }
        let expected = match placement {
            Placement::PerNode => [3, 1, 5, 2].map(|n| (Some(n), Some(n), 1)).to_vec(),
            _ => vec![(Some(3), Some(3), 4)],
        };
        assert_eq!(bench.places(), expected);
        let used = bench.nodes.in_use();
        assert!([1, 3, 5, 7].iter().all(|n| used[*n] == 0), "{used:?}");
        // The memory is pinned and charged once, with tables from any node.
        assert_eq!(bench.ledger.in_use(), 2 * MIB);
        bench.end();
    }
}
