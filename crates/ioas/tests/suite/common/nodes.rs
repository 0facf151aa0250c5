//! A machine of several memory nodes, and an address space that places its tables on them.
//!
//! Each node has table memory of its own, with addresses of its own; a unit reads all of them and counts
//! what it read where. Every word of data is its own physical address.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ioas::{Cause, DomainIds, Ioas, Ledger, Memory, Place, Placement, Synthetic, TableBuilder};
use iommu::{DeviceId, NodeId, Port, SoftwareConfig, SoftwareUnit};
use iopt::walk::{BadAddress, WalkMemory};
use iopt::{FormatId, HeapTables, Prot};
use runs::{Offset, Span};

use super::machines::{ALL, can};
use super::{Echo, FrailUnit, GIB, MIB, Space};

pub(crate) const AT: u64 = 4 * GIB;
pub(crate) const FRAME: u64 = 8 * GIB;

/// Start of the addresses of a node's table memory.
const fn base(node: u32) -> u64 {
    (1 << 46) + ((node as u64) << 40)
}

/// Table memory by node.
#[derive(Clone)]
pub(crate) struct Nodes(pub(crate) Arc<[(Arc<HeapTables>, AtomicU64)]>);

impl Nodes {
    pub(crate) fn new(nodes: u32) -> Self {
        let tables = |node| Arc::new(HeapTables::with_tables_at(64, base(node)).unwrap());
        Self(
            (0..nodes)
                .map(|node| (tables(node), AtomicU64::new(0)))
                .collect(),
        )
    }

    pub(crate) fn at(&self, address: u64) -> Result<&Arc<HeapTables>, BadAddress> {
        let node = address.wrapping_sub(base(0)) >> 40;
        let (tables, reads) = self.0.get(node as usize).ok_or(BadAddress { address })?;
        reads.fetch_add(1, Ordering::Relaxed);
        Ok(tables)
    }

    pub(crate) fn in_use(&self) -> Vec<u64> {
        self.0.iter().map(|(tables, _)| tables.in_use()).collect()
    }

    /// Reads of each node since the last call.
    pub(crate) fn reads(&self) -> Vec<u64> {
        let counts = self.0.iter();
        counts
            .map(|(_, reads)| reads.swap(0, Ordering::Relaxed))
            .collect()
    }
}

impl WalkMemory for Nodes {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.at(address)?.read_u64(address)
    }

    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        self.at(address)?.compare_exchange_u64(address, old, new)
    }
}

/// A unit with one device.
pub(crate) struct Machine {
    pub(crate) unit: Arc<FrailUnit>,
    pub(crate) port: Mutex<Port<Nodes, Echo>>,
    pub(crate) device: DeviceId,
}

pub(crate) struct Bench {
    pub(crate) nodes: Nodes,
    pub(crate) ids: Arc<DomainIds>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) space: Space,
}

pub(crate) fn node(n: u32) -> Option<NodeId> {
    Some(NodeId(n))
}

impl Bench {
    /// So many nodes, of which those in `without` have no memory: their tables come from node 0.
    pub(crate) fn with(nodes: u32, without: &'static [u32], placement: Placement) -> Self {
        let nodes = Nodes::new(nodes);
        let memories = nodes.clone();
        let memory = move |node: Option<NodeId>| {
            let node = node.map_or(0, |node| node.0);
            let node = if without.contains(&node) { 0 } else { node };
            let tables = memories.0.get(node as usize);
            tables
                .map(|(tables, _)| tables.clone())
                .ok_or(Cause::from("no such node"))
        };
        let ids = DomainIds::new(4);
        let builder =
            TableBuilder::on_nodes(memory, ids.clone(), [FormatId::VtdSs, FormatId::AmdV1]);
        let space = Ioas::over_tables(builder);
        space.set_placement(placement).unwrap();
        let ledger = Ledger::new("a counter", Some(4 * GIB), 0);
        let runs = [Span::new(FRAME, GIB), Span::new(3 * FRAME + MIB, GIB - MIB)];
        let memory = Memory::new(Arc::new(Synthetic::new(runs)), &ledger);
        Self {
            nodes,
            ids,
            ledger,
            memory,
            space,
        }
    }

    pub(crate) fn new(nodes: u32, placement: Placement) -> Self {
        Self::with(nodes, &[], placement)
    }

    /// The `n`-th machine, whose unit is on `node`.
    pub(crate) fn machine(&self, n: u8, node: Option<NodeId>) -> Machine {
        self.machine_of(n, node, FormatId::VtdSs)
    }

    pub(crate) fn machine_of(&self, n: u8, node: Option<NodeId>, format: FormatId) -> Machine {
        let mut capabilities = can(format, ALL, true);
        capabilities.dirty_tracking = true;
        let config = SoftwareConfig {
            node,
            capabilities,
            ..SoftwareConfig::default()
        };
        let unit = SoftwareUnit::with_config(self.nodes.clone(), Echo, config);
        let device = DeviceId::pci(1, n, 0);
        Machine {
            port: Mutex::new(unit.port(device)),
            unit: Arc::new(FrailUnit::new(Arc::new(unit))),
            device,
        }
    }

    pub(crate) fn attach(&mut self, machine: &Machine) {
        self.space
            .attach((machine.unit.clone(), machine.device))
            .unwrap();
    }

    pub(crate) fn map(&mut self, iova: u64, part: Span<Offset>) {
        self.space.map(iova, &self.memory, part, Prot::RW).unwrap();
    }

    /// Node of the devices and of the tables of each domain, and how many devices.
    pub(crate) fn places(&self) -> Vec<(Option<u32>, Option<u32>, usize)> {
        let number = |node: Option<NodeId>| node.map(|node| node.0);
        let places = self.space.places().into_iter();
        places
            .map(|place| {
                (
                    number(place.node),
                    number(place.tables),
                    place.endpoints.len(),
                )
            })
            .collect()
    }

    pub(crate) fn domain_of(&self, machine: &Machine) -> Place {
        let mut places = self.space.places().into_iter();
        places
            .find(|place| place.endpoints.contains(&machine.device.into()))
            .unwrap()
    }

    pub(crate) fn end(self) {
        self.space.close().unwrap();
        assert!(self.nodes.in_use().iter().all(|tables| *tables == 0));
        assert_eq!(self.ledger.in_use(), 0);
        let numbers = std::iter::from_fn(|| self.ids.take()).count();
        assert_eq!(numbers, 15, "all are back");
    }
}

impl Machine {
    pub(crate) fn read(&self, iova: u64) -> Option<u64> {
        let mut word = [0];
        let mut port = self.port.lock().unwrap();
        port.read(iova, &mut word).ok().map(|()| word[0])
    }

    pub(crate) fn write(&self, iova: u64) -> bool {
        self.port.lock().unwrap().write(iova, &[0]).is_ok()
    }
}
