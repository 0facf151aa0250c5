//! A root for each node: a batch of runs is mapped in all tables or in none, and no table is stored to
//! before every node has the table pages for it.
//!
//! All words of all nodes' table memory are looked at, before a batch and when it is refused: what is
//! stored and taken back would be seen too.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::nodes::*;
use crate::common::*;
use ioas::{MapError, Memory, Observer, Placement, Step, Synthetic};
use iopt::{FormatId, HeapTables, Prot, Reserve, TableMemory};
use runs::Span;

/// Tables of a node.
const ROOM: u64 = 64;

/// The words of a node's table memory, and how much of it is in use or reserved.
fn words(tables: &HeapTables) -> (Vec<u64>, u64) {
    let all = (0..tables.size()).step_by(8);
    let words = all.map(|offset| tables.read(tables.base() + offset).unwrap());
    (words.collect(), tables.in_use())
}

/// Sees each batch of a map from outside.
struct Batches<'a> {
    nodes: &'a Nodes,
    machines: &'a [Machine],
    at: u64,
    before: Vec<(Vec<u64>, u64)>,
    /// Bytes that all tables have.
    mapped: u64,
    filled: usize,
    refused: usize,
}

impl<'a> Batches<'a> {
    fn new(nodes: &'a Nodes, machines: &'a [Machine], at: u64) -> Self {
        Self {
            nodes,
            machines,
            at,
            before: Vec::new(),
            mapped: 0,
            filled: 0,
            refused: 0,
        }
    }

    fn words(&self) -> Vec<(Vec<u64>, u64)> {
        self.nodes
            .0
            .iter()
            .map(|(tables, _)| words(tables))
            .collect()
    }
}

impl Observer for Batches<'_> {
    fn begin(&mut self, step: Step) {
        if step == Step::FillTables {
            self.before = self.words();
        }
    }

    fn end(&mut self, step: Step, bytes: u64) {
        if step != Step::FillTables {
            return;
        }
        let after = self.words();
        if bytes == 0 {
            self.refused += 1;
            // Not `assert_eq`, whose output would be unreadable.
            assert!(after == self.before, "a refused batch has changed a table");
            return;
        }
        self.filled += 1;
        self.mapped += bytes;
        for (now, before) in after.iter().zip(&self.before) {
            assert!(now.0 != before.0, "a table was left out");
        }
        let sees = |iova: u64| -> BTreeSet<Option<u64>> {
            self.machines
                .iter()
                .map(|machine| machine.read(iova))
                .collect()
        };
        let last = sees(self.at + self.mapped - 8);
        assert!(last.len() == 1 && !last.contains(&None), "{last:?}");
        assert_eq!(sees(self.at + self.mapped), BTreeSet::from([None]));
    }
}

/// Roots on three nodes in two formats; that of the device of no node lies with node 0's. Something is
/// mapped already.
fn bench() -> (Bench, Vec<Machine>) {
    let mut bench = Bench::new(3, Placement::PerNode);
    bench.map(AT, Span::new(0, GIB));
    let homes = [node(0), node(1), node(2), None];
    let formats = [
        FormatId::VtdSs,
        FormatId::AmdV1,
        FormatId::VtdSs,
        FormatId::VtdSs,
    ];
    let machines: Vec<_> = (0..)
        .zip(homes.into_iter().zip(formats))
        .map(|(n, (home, format))| bench.machine_of(n, home, format))
        .collect();
    for machine in &machines {
        bench.attach(machine);
    }
    assert_eq!(bench.places().len(), 4);
    (bench, machines)
}

/// Takes all tables of a node but so many.
fn starve(nodes: &Nodes, victim: usize, left: u64) -> Option<Reserve> {
    let tables = &nodes.0[victim].0;
    let free = ROOM - tables.in_use();
    free.checked_sub(left)
        .map(|count| tables.reserve(count).unwrap())
}

#[test]
fn a_map_that_one_node_has_no_tables_for_stores_nothing_in_any() {
    let (bench, machines) = bench();
    let nodes = bench.nodes.clone();
    // At no multiple of 2 MiB, and in two runs.
    let (at, part) = (AT + 5 * GIB + PAGE, Span::new(GIB - MIB, 4 * MIB));
    let told = |machines: &[Machine]| -> u64 {
        machines
            .iter()
            .map(|machine| machine.unit.invalidates.calls())
            .sum()
    };
    let (used, held, flushes) = (nodes.in_use(), bench.ledger.in_use(), told(&machines));
    for victim in 0..3 {
        let mut refused = 0;
        for left in 0.. {
            let others = starve(&nodes, victim, left).unwrap();
            let mut batches = Batches::new(&nodes, &machines, at);
            let memory = &bench.memory;
            let mapped = bench
                .space
                .observed(&mut batches)
                .map(at, memory, part, Prot::RW);
            let seen = (batches.filled, batches.refused);
            nodes.0[victim].0.give_back(others);
            if mapped.is_ok() {
                assert_eq!(seen, (1, 0));
                break;
            }
            refused += 1;
            assert_eq!(seen, (0, 1));
            assert!(matches!(mapped, Err(MapError::Table(_))), "{mapped:?}");
            assert_eq!(
                (nodes.in_use(), bench.ledger.in_use()),
                (used.clone(), held)
            );
            // Nothing was there that a unit would have to forget.
            assert_eq!(told(&machines), flushes);
        }
        // Three tables for pages and one above, twice on node 0.
        assert_eq!(refused, if victim == 0 { 8 } else { 4 });
        bench.space.unmap(Span::new(at, part.len)).unwrap();
        for machine in &machines {
            machine.unit.invalidates.set([]);
        }
        assert_eq!(nodes.in_use(), used);
    }
    bench.end();
}

#[test]
fn a_map_that_ends_in_a_later_batch_has_stored_as_much_in_all_and_takes_it_back() {
    let (bench, machines) = bench();
    let nodes = bench.nodes.clone();
    // No leaf of 2 MiB fits, and every second run needs another table.
    let runs = (0..24).map(|n| Span::new(16 * GIB + n * 4 * MIB + PAGE, MIB));
    let mut object = Frail::new(Synthetic::new(runs));
    object.batches = vec![3, 1, 2];
    let part = Span::new(0, 24 * MIB);
    let memory = Memory::new(Arc::new(object), &bench.ledger);
    let at = AT + 5 * GIB;
    let (used, held) = (nodes.in_use(), bench.ledger.in_use());
    for victim in [2, 1] {
        let mut ends = BTreeSet::new();
        for left in 0.. {
            let others = starve(&nodes, victim, left).unwrap();
            let mut batches = Batches::new(&nodes, &machines, at);
            let mapped = bench
                .space
                .observed(&mut batches)
                .map(at, &memory, part, Prot::RW);
            let (filled, refused) = (batches.filled, batches.refused);
            nodes.0[victim].0.give_back(others);
            if mapped.is_ok() {
                assert_eq!((batches.mapped, refused), (part.len, 0));
                break;
            }
            assert_eq!(refused, 1);
            ends.insert(filled);
            for iova in (0..part.len).step_by(PAGE as usize) {
                assert!(
                    machines
                        .iter()
                        .all(|machine| machine.read(at + iova).is_none())
                );
            }
            assert_eq!(
                (nodes.in_use(), bench.ledger.in_use()),
                (used.clone(), held)
            );
        }
        assert!(ends.contains(&0) && ends.len() > 5, "{ends:?}");
        bench.space.unmap(Span::new(at, part.len)).unwrap();
    }
    bench.end();
}

#[test]
fn a_root_that_comes_later_and_has_no_tables_stores_nothing_in_the_first() {
    let mut bench = Bench::new(2, Placement::PerNode);
    bench.map(AT, Span::new(0, GIB));
    bench.map(AT + GIB, Span::new(GIB, 4 * MIB));
    let nodes = bench.nodes.clone();
    let (first, later) = (bench.machine(0, node(0)), bench.machine(1, node(1)));
    bench.attach(&first);
    // A unit may note in an entry that it was used.
    let seen = [AT, AT + GIB].map(|iova| first.read(iova));
    let (before, held) = (words(&nodes.0[0].0), bench.ledger.in_use());
    let mut refused = 0;
    for left in 0.. {
        let others = starve(&nodes, 1, left).unwrap();
        let attached = bench.space.attach((later.unit.clone(), later.device));
        nodes.0[1].0.give_back(others);
        assert!(words(&nodes.0[0].0) == before);
        assert_eq!(bench.ledger.in_use(), held);
        if attached.is_ok() {
            break;
        }
        refused += 1;
        assert_eq!(bench.places(), [(Some(0), Some(0), 1)]);
        assert_eq!((later.read(AT), nodes.in_use()[1]), (None, 0));
        assert_eq!(first.read(AT), Some(FRAME));
    }
    // The root, two below it, and three for pages and what is above them.
    assert!(refused >= 4, "{refused}");
    assert_eq!([AT, AT + GIB].map(|iova| later.read(iova)), seen);
    bench.end();
}

#[test]
fn what_was_released_comes_back_in_every_root_when_no_node_has_a_table_left() {
    let (mut bench, machines) = bench();
    let nodes = bench.nodes.clone();
    // Tables of its own on two levels, which go when it is released.
    let (at, part) = (AT + 600 * GIB, Span::new(GIB, 8 * MIB));
    bench.map(at, part);
    let range = Span::new(at, part.len);
    let never = iopt::Interruption::Refused;
    let kept = &mut |range, cause| panic!("{range}: {cause}");
    assert_eq!(bench.space.release(&[range], never, kept), part.len);
    assert!(machines.iter().all(|machine| machine.read(at).is_none()));
    let others = [0, 1, 2].map(|victim| starve(&nodes, victim, 0).unwrap());
    let failed = &mut |range, cause| panic!("{range}: {cause}");
    bench.space.restore(&[range], never, failed);
    for machine in &machines {
        assert_eq!(machine.read(at + 2 * MIB), Some(3 * FRAME + 3 * MIB));
    }
    for ((tables, _), others) in nodes.0.iter().zip(others) {
        tables.give_back(others);
    }
    bench.end();
}
