//! Walks that are measured on nodes that are made up: memory and processors are this machine's, only
//! what it says of nodes is not. Times are as they are; nothing is asked of them.

use std::io;
use std::sync::{Arc, Mutex};

use crate::numa::Measurement;
use crate::numa::measure::{Eviction, MeasureError, MeasureReport, Spread};
use dmaspace::devices::Places;
use dmaspace::topology::{Node, Topology};
use hostmem::{KernelNodes, NodePolicy};

/// Memory is where it was wished for, but for a node that has none to give.
#[derive(Clone, Debug)]
struct Wishes {
    with_memory: Vec<u32>,
    full: Option<u32>,
    placed: Arc<Mutex<Vec<(u64, u64, u32)>>>,
}

impl NodePolicy for Wishes {
    fn memory_nodes(&self) -> Vec<u32> {
        self.with_memory.clone()
    }

    fn prefer(&self, address: u64, len: u64, node: u32) -> io::Result<()> {
        let node = if self.full == Some(node) { 0 } else { node };
        self.placed.lock().unwrap().push((address, len, node));
        Ok(())
    }

    fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> io::Result<()> {
        let placed = self.placed.lock().unwrap();
        for (address, node) in addresses.iter().zip(nodes) {
            // The last wish counts: memory of before may be gone.
            let mut wishes = placed.iter().rev();
            let wish = wishes.find(|(start, len, _)| (*start..start + len).contains(address));
            *node = wish.map_or(0, |(.., node)| *node as i32);
        }
        Ok(())
    }
}

/// So many nodes, each with memory and all the processors of this one.
fn made_up(count: u32) -> Measurement<Wishes> {
    let nodes = (0..count).map(|id| Node {
        id,
        memory_bytes: 1 << 30,
        cpus: 1,
        cpu_list: String::new(),
        distances: (0..count)
            .map(|to| if to == id { 10 } else { 20 + to })
            .collect(),
    });
    let cpus = KernelNodes.processors(0);
    assert!(!cpus.is_empty());
    Measurement {
        topology: Topology::new(nodes.collect(), vec![], vec![]).unwrap(),
        processors: (0..count).map(|id| (id, cpus.clone())).collect(),
        policy: Wishes {
            with_memory: (0..count).collect(),
            full: None,
            placed: Arc::default(),
        },
        eviction: Eviction::of_this_machine(),
    }
}

fn pairs(report: &MeasureReport) -> Vec<(u32, u32, u32)> {
    let rows = report.walks.iter();
    rows.map(|row| (row.cpu_node, row.table_node, row.distance))
        .collect()
}

#[test]
fn tables_of_both_nodes_are_walked_from_both() {
    let report = made_up(2).run(&[]).unwrap();
    assert_eq!(report.not_run, None);
    assert_eq!(
        pairs(&report),
        [(0, 0, 10), (0, 1, 21), (1, 0, 20), (1, 1, 10)]
    );
    for row in &report.walks {
        let samples = match report.eviction {
            Eviction::Lines => 32 * 16,
            Eviction::Buffer { .. } => 16,
        };
        assert_eq!((row.samples, row.walks), (samples, 32));
        // Four levels, and none of them skipped.
        assert!((row.reads_per_walk - 4.0).abs() < f64::EPSILON, "{row:?}");
        for spread in [row.memory, row.caches] {
            assert!(spread.low_ns > 0.0, "{row:?}");
            assert!(spread.low_ns <= spread.median_ns && spread.median_ns <= spread.high_ns);
        }
        assert!((row.read_ns() * 4.0 - row.memory.median_ns).abs() < 1e-6);
    }
    for node in &report.nodes {
        assert_eq!(
            (node.table_bytes, &node.no_walks, &node.no_tables),
            (8 << 20, &None, &None)
        );
        assert!(node.huge_bytes.is_none_or(|huge| huge <= 8 << 20));
    }
}

#[test]
fn nodes_without_processors_memory_or_room_are_named() {
    let mut machine = made_up(4);
    machine.processors[1].1.clear();
    machine.policy.with_memory = vec![0, 1, 3];
    machine.policy.full = Some(3);
    let report = machine.run(&[]).unwrap();
    let expected = [0, 2, 3].map(|from| [0, 1].map(|to| (from, to)));
    let found: Vec<_> = pairs(&report)
        .iter()
        .map(|(from, to, _)| (*from, *to))
        .collect();
    assert_eq!(found, expected.concat());
    let why = |node: usize| {
        let node = &report.nodes[node];
        let text = |why: &Option<String>| why.clone().unwrap_or_default();
        [text(&node.no_walks), text(&node.no_tables)]
    };
    assert_eq!(why(0), ["", ""]);
    assert_eq!(why(1), ["this process may run on none of its 1", ""]);
    assert_eq!(why(2), ["", "it has no memory"]);
    assert_eq!(
        why(3),
        ["", "tables for node 3 are not all there: 8 MiB on node 0"]
    );
}

#[test]
fn a_node_without_processors_is_not_one_with_forbidden_ones() {
    let mut machine = made_up(2);
    machine.processors[1].1.clear();
    let nodes = machine.topology.nodes().iter().cloned();
    let without = nodes.map(|node| Node {
        cpus: u32::from(node.id == 0),
        ..node
    });
    machine.topology = Topology::new(without.collect(), vec![], vec![]).unwrap();
    let report = machine.run(&[]).unwrap();
    let why = report.nodes[1].no_walks.as_deref();
    assert_eq!(why, Some("it has no processors"));
}

#[test]
fn caches_can_be_emptied_by_reading_other_memory() {
    let mut machine = made_up(2);
    machine.eviction = Eviction::Buffer { bytes: 1 << 20 };
    let report = machine.run(&[]).unwrap();
    assert_eq!(report.walks.len(), 4);
    assert!(report.walks.iter().all(|row| row.samples == 16));
}

#[test]
fn one_node_is_nothing_to_compare() {
    let report = made_up(1).run(&["no such device".into()]).unwrap();
    assert_eq!(report.not_run.as_deref(), Some("one node"));
    assert!(report.walks.is_empty() && report.dma.is_empty());
}

#[test]
fn this_machine_is_measured_where_it_has_two_nodes() {
    let machine = Measurement::of_this_machine(&Places::default()).unwrap();
    let report = machine.run(&[]).unwrap();
    if report.nodes.len() == 1 {
        assert_eq!(report.not_run.as_deref(), Some("one node"));
    } else {
        let from = report.nodes.iter().filter(|node| node.no_walks.is_none());
        let of = report.nodes.iter().filter(|node| node.no_tables.is_none());
        assert_eq!(report.walks.len(), from.count() * of.count());
    }
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let error = made_up(2).run(&["0000:ff:1f.7".into()]).unwrap_err();
    assert!(error.is_input(), "{error}");
    assert!(error.to_string().contains("0000:ff:1f.7"), "{error}");
}

#[test]
fn processors_that_are_not_there_are_named() {
    let mut machine = made_up(2);
    machine.processors[1].1 = vec![8191];
    let error = machine.run(&[]).unwrap_err();
    assert!(
        matches!(&error, MeasureError::Thread { node: 1, processors, .. } if *processors == [8191]),
        "{error}"
    );
}

#[test]
fn a_spread_is_the_middle_and_two_deciles() {
    let spread = Spread::of((0..=100).rev().map(f64::from).collect());
    assert_eq!(
        (spread.low_ns, spread.median_ns, spread.high_ns),
        (10.0, 50.0, 90.0)
    );
    assert_eq!(Spread::of(vec![7.0]).high_ns, 7.0);
    assert_eq!(Spread::of(vec![]), Spread::default());
}
