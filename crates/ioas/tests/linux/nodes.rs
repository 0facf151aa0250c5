//! Table memory by node: where it was asked for, where it is, and domains that use it.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use hostmem::{Backing, FrameSource, KernelNodes, Mapping, NodePolicy, Pinner};
use ioas::{
    DomainIds, HostMemory, Ioas, Ledger, Memory, NodeTables, Placement, Synthetic, TableBuilder,
};
use iommu::{DeviceId, NodeId, RunMap, SoftwareConfig, SoftwareUnit, Unit};
use iopt::{FormatId, Prot, TableMemory};
use runs::{Span, Va};

use crate::AT;

const PAGE: u64 = 4096;
const BASE: u64 = 1 << 46;
const BYTES: u64 = 64 * PAGE;
/// Error of mbind(2) for a node that is not there.
const EINVAL: i32 = 22;

/// Nodes with recorded wishes: pages come from the preferred node while it has some, and from node 0 then.
#[derive(Clone, Default)]
struct Notified(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    memory: Vec<u32>,
    /// Pages that a node has left; without a word as many as are wanted.
    left: Vec<(u32, u64)>,
    /// Error number of the answer to a wish.
    refuses: Option<i32>,
    /// Error number of the answer to the question where pages are.
    silent: Option<i32>,
    wishes: Vec<(Span<Va>, u32)>,
    /// Pages that were there before the wish.
    early: u64,
    asked: BTreeSet<u64>,
}

impl Notified {
    fn nodes(memory: impl IntoIterator<Item = u32>) -> Self {
        let told = Self::default();
        told.0.lock().unwrap().memory = memory.into_iter().collect();
        told
    }

    fn with(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.0.lock().unwrap());
        self
    }
}

impl NodePolicy for Notified {
    fn memory_nodes(&self) -> Vec<u32> {
        self.0.lock().unwrap().memory.clone()
    }

    fn prefer(&self, address: u64, len: u64, node: u32) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if let Some(errno) = state.refuses {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let pages: Vec<u64> = (address..address + len).step_by(PAGE as usize).collect();
        let mut nodes = vec![-1; pages.len()];
        // Really: the kernel says a negative number where no page is.
        match KernelNodes.nodes_of(&pages, &mut nodes) {
            Ok(()) => state.early += nodes.iter().filter(|node| **node >= 0).count() as u64,
            Err(error) => eprintln!("not run: {error}"),
        }
        state.wishes.push((Span::new(address, len), node));
        Ok(())
    }

    fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if let Some(errno) = state.silent {
            return Err(io::Error::from_raw_os_error(errno));
        }
        for (address, told) in addresses.iter().zip(nodes) {
            state.asked.insert(*address);
            let wish = state
                .wishes
                .iter()
                .find(|(span, _)| span.contains(*address));
            *told = wish.map_or(0, |(span, node)| {
                let nth = (address - span.start) / PAGE;
                let left = state.left.iter().find(|(of, _)| of == node);
                let fits = left.is_none_or(|(_, pages)| nth < *pages);
                if fits { *node as i32 } else { 0 }
            });
        }
        Ok(())
    }
}

fn node(n: u32) -> Option<NodeId> {
    Some(NodeId(n))
}

#[test]
fn each_node_has_an_arena_that_is_bound_before_it_is_touched_and_looked_at_page_by_page() {
    let told = Notified::nodes([0, 1, 3]);
    let tables = NodeTables::with_nodes(BYTES - 1, BASE, told.clone());
    let arenas: Vec<_> = [3, 0, 1].map(|n| tables.memory(node(n)).unwrap()).into();
    let state = told.0.lock().unwrap();
    for ((arena, (span, wish)), n) in arenas.iter().zip(&state.wishes).zip([3, 0, 1]) {
        let mapping = arena.storage().mapping();
        assert_eq!((*span, *wish), (Span::new(mapping.address(), BYTES), n));
        let page = |nth: u64| mapping.address() + nth * PAGE;
        assert!((0..64).all(|nth| state.asked.contains(&page(nth))), "{n}");
        assert_eq!(arena.base(), BASE + (u64::from(n) + 1) * BYTES);
        // Tables of a domain know their node.
        assert_eq!(arena.node(arena.base()), Some(n));
    }
    assert_eq!(state.early, 0);
    drop(state);
    assert_eq!(tables.misplaced(), []);
    let here = |n: u32| (node(n), vec![(Some(n), BYTES)]);
    assert_eq!(tables.nodes(), [here(0), here(1), here(3)]);
    // One arena for each, for good.
    assert!(Arc::ptr_eq(&arenas[0], &tables.memory(node(3)).unwrap()));
    let anywhere = tables.memory(None).unwrap();
    assert_eq!((anywhere.base(), anywhere.node(BASE)), (BASE, None));
    assert_eq!(told.0.lock().unwrap().wishes.len(), 3);
}

#[test]
fn a_node_that_cannot_have_its_tables_is_named_and_gets_others() {
    // 1 has no memory, 2 too little, 9 is none.
    let told = Notified::nodes([0, 2]).with(|state| state.left = vec![(2, 10)]);
    let tables = NodeTables::with_nodes(BYTES, BASE, told.clone());
    let anywhere = tables.memory(None).unwrap();
    for n in [1, 9, 1] {
        assert!(Arc::ptr_eq(&anywhere, &tables.memory(node(n)).unwrap()));
    }
    let short = tables.memory(node(2)).unwrap();
    assert_eq!(
        (short.base(), short.node(short.base())),
        (BASE + 3 * BYTES, None)
    );
    let said: Vec<_> = tables.misplaced().iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "tables for node 1 are not all on it: 256 KiB on node 0 (node 1 has no memory; nodes \
             that have: [0, 2])",
            "tables for node 9 are not all on it: 256 KiB on node 0 (the machine has no memory on a \
             node of this number)",
            "tables for node 2 are not all on it: 216 KiB on node 0, 40 KiB on node 2",
        ]
    );
    assert_eq!(
        tables.nodes(),
        [
            (None, vec![(Some(0), BYTES)]),
            (node(2), vec![(Some(0), 54 * PAGE), (Some(2), 10 * PAGE)])
        ]
    );
    // The system does not place anything, and says so.
    let told = Notified::nodes([0, 1]).with(|state| state.refuses = Some(EINVAL));
    let tables = NodeTables::with_nodes(BYTES, BASE, told);
    tables.memory(node(1)).unwrap();
    let misplaced = tables.misplaced();
    assert_eq!((misplaced.len(), misplaced[0].node), (1, NodeId(1)));
    let why = misplaced[0].refused.as_deref().unwrap();
    assert!(
        why.contains("does not place 256 KiB on node 1: Invalid"),
        "{why}"
    );
    // The system accepts the wish and does not report the node: then the pages are not claimed to be there. EPERM,
    // ENOSYS, EFAULT.
    for errno in [1, 38, 14] {
        let told = Notified::nodes([0, 1]).with(|state| state.silent = Some(errno));
        let tables = NodeTables::with_nodes(BYTES, BASE, told);
        let arena = tables.memory(node(1)).unwrap();
        assert_eq!(arena.node(arena.base()), None);
        assert_eq!(tables.misplaced()[0].found, [(None, BYTES)]);
    }
}

#[test]
fn this_machine_puts_tables_where_they_are_wanted_or_says_that_it_does_not() {
    let memory = KernelNodes.memory_nodes();
    let tables = NodeTables::new(4 << 20, BASE);
    for n in &memory {
        tables.memory(node(*n)).unwrap();
    }
    for (wanted, found) in tables.nodes() {
        let there = [(wanted.map(|node| node.0), 4 << 20)];
        let told = tables.misplaced();
        assert!(found == there || !told.is_empty(), "{found:?} {told:?}");
    }
    let none = memory.iter().max().map_or(1, |n| n + 1);
    tables.memory(node(none)).unwrap();
    let misplaced = tables.misplaced();
    assert!(
        misplaced
            .iter()
            .any(|m| m.node == NodeId(none) && m.refused.is_some())
    );
}

#[test]
fn devices_of_each_node_read_through_tables_that_lie_there() {
    let told = Notified::nodes([0, 1]);
    let tables = Arc::new(NodeTables::with_nodes(BYTES, BASE, told));
    let memories = tables.clone();
    let builder = TableBuilder::on_nodes(
        move |node| memories.memory(node),
        DomainIds::new(8),
        [FormatId::VtdSs],
    );
    let space: Ioas = Ioas::over_tables(builder);
    space.set_placement(Placement::PerNode).unwrap();
    let ledger = Ledger::new("a counter", None, 0);
    let frames = Span::new(1 << 32, 1 << 20);
    let memory = Memory::new(Arc::new(Synthetic::new([frames])), &ledger);
    let whole = Span::new(0, frames.len);
    space.map(AT, &memory, whole, Prot::RW).unwrap();

    // The device of node 5 has tables from anywhere, and a root of its own all the same.
    let mut ports = Vec::new();
    for (n, at) in [0, 1, 5, 1].into_iter().enumerate() {
        let words: Vec<_> = (0..frames.len / 8)
            .map(std::sync::atomic::AtomicU64::new)
            .collect();
        let data = RunMap::new([(frames.start, words)]).unwrap();
        let config = SoftwareConfig {
            node: node(at),
            ..SoftwareConfig::default()
        };
        let unit = SoftwareUnit::with_config(tables.clone(), data, config);
        let device = DeviceId::pci(1, n as u8, 0);
        ports.push(unit.port(device));
        space
            .attach((Arc::new(unit) as Arc<dyn Unit>, device))
            .unwrap();
    }
    assert_eq!(ledger.in_use(), frames.len, "pinned and charged once");
    let places: Vec<_> = space.places().iter().map(|place| place.tables).collect();
    assert_eq!(places, [node(0), node(1), node(5)]);
    // Each table page is in the arena of its node.
    let arenas = [node(0), node(1), None].map(|node| tables.memory(node).unwrap());
    let mut nth = arenas.iter();
    space.tables(|_, table| {
        let arena = nth.next().unwrap();
        assert!(arena.contains(table.root().address));
        assert_eq!(arena.in_use(), table.tables());
    });
    for port in &mut ports {
        let port: &mut iommu::Port<Arc<NodeTables>, _> = port;
        let mut word = [0];
        port.read(AT + 80 * PAGE, &mut word).unwrap();
        assert_eq!(word[0], 80 * PAGE / 8);
    }
    assert_eq!(
        tables
            .misplaced()
            .iter()
            .map(|m| m.node)
            .collect::<Vec<_>>(),
        [NodeId(5)]
    );
    space.close().unwrap();
    assert_eq!((tables.in_use(), ledger.in_use()), (0, 0));
}

/// A guest with memory on two nodes: each part comes from the node that the guest's map names, and is
/// pinned once for the devices of both.
#[test]
fn guest_memory_is_populated_on_the_node_that_its_map_names() {
    const LEN: u64 = 16 * PAGE;
    let told = Notified::nodes([0, 1]);
    let tables = Arc::new(NodeTables::with_nodes(BYTES, BASE, told.clone()));
    let memories = tables.clone();
    let builder = TableBuilder::on_nodes(
        move |node| memories.memory(node),
        DomainIds::new(8),
        [FormatId::VtdSs],
    );
    let space: Ioas = Ioas::over_tables(builder);
    space.set_placement(Placement::PerNode).unwrap();
    let ledger = Ledger::new("a counter", None, 0);
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    let mut parts = Vec::new();
    for (guest, at) in [(0, 1), (LEN, 0)] {
        let mapping = Mapping::with_nodes(Backing::Anon4K, LEN, Some(at), &told).unwrap();
        mapping
            .populate(&mut |_| ControlFlow::Continue(()))
            .unwrap();
        // Wished for before a page was there, and asked page by page where it came to lie.
        let found = mapping.nodes_by(&told).unwrap();
        assert_eq!(found, [(Some(at), LEN)]);
        parts.push((guest, Arc::new(mapping)));
    }
    assert_eq!(told.0.lock().unwrap().early, 0);
    for (guest, mapping) in &parts {
        let frames = FrameSource::Synthetic { seed: 8 };
        let object = HostMemory::with_pinner(mapping.clone(), pinner.clone(), frames);
        let memory = Memory::new(Arc::new(object), &ledger);
        let whole = Span::new(0, LEN);
        space.map(AT + guest, &memory, whole, Prot::RW).unwrap();
    }
    for n in 0..2 {
        let none = RunMap::<Vec<std::sync::atomic::AtomicU64>>::new([]).unwrap();
        let config = SoftwareConfig {
            node: node(n),
            ..SoftwareConfig::default()
        };
        let unit = SoftwareUnit::with_config(tables.clone(), none, config);
        let device = DeviceId::pci(1, n as u8, 0);
        space.attach((Arc::new(unit), device)).unwrap();
    }
    assert_eq!((space.places().len(), ledger.in_use()), (2, 2 * LEN));
    // Pinning has moved nothing.
    for ((_, mapping), at) in parts.iter().zip([1, 0]) {
        assert_eq!(mapping.nodes_by(&told).unwrap(), [(Some(at), LEN)]);
    }
    space.close().unwrap();
    assert_eq!((tables.in_use(), ledger.in_use()), (0, 0));
}
