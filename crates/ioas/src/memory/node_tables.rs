//! Table memory of the host by memory node: what [`TableBuilder::on_nodes`](crate::TableBuilder::on_nodes) asks.
//!
//! Each node that tables are wanted on gets an arena of its own, when the first of its domains comes:
//!
//! 1. The memory is mapped, and the system told to take its pages from the node. No page is there yet;
//!    one that is would stay where it is.
//! 2. All of it is brought in.
//! 3. The system is asked page by page where it has put it, since it takes the node as a wish and
//!    places pages elsewhere without an error.
//!
//! A node without memory has the arena that lies anywhere, and a node with too little of it an arena
//! that lies in part elsewhere: units read such tables as well, only more slowly. So that is no error,
//! but [`NodeTables::misplaced`] has it.

use core::fmt;
use std::boxed::Box;
use std::string::ToString;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::vec::Vec;

use hostmem::{KernelNodes, NodePolicy};
use iommu::NodeId;
use iopt::walk::{BadAddress, WalkMemory};
use runs::Bytes;

use crate::memory::host::{HostTables, MappedStorage, arena_bytes};
use crate::memory::object::Cause;

/// Table memory on each node of the machine: arenas of one size, which are made when they are asked
/// for and stay until this is dropped. Units that walk tables of several nodes walk them here.
pub struct NodeTables {
    bytes: u64,
    base: u64,
    policy: Box<dyn NodePolicy + Send + Sync>,
    /// The first lies anywhere, the others on the nodes 0, 1, …, as far as these have memory.
    arenas: Box<[OnceLock<Arc<HostTables>>]>,
    /// Locked while an arena is made.
    misplaced: Mutex<Vec<Misplaced>>,
}

/// Memory on a node, in bytes; `None`: on one of which the kernel does not tell.
pub type NodeBytes = (Option<u32>, u64);

/// Table memory that is not on the node that it was wanted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misplaced {
    /// The node.
    pub node: NodeId,
    /// Nodes of the memory.
    pub found: Vec<NodeBytes>,
    /// Refusal to place any of it on the node. Without one the system took the wish, and had
    /// too little memory there or does not tell where it is.
    pub refused: Option<Box<str>>,
}

impl fmt::Display for Misplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tables for node {} are not all on it:", self.node)?;
        for (place, (node, bytes)) in self.found.iter().enumerate() {
            let comma = if place == 0 { "" } else { "," };
            match node {
                Some(node) => write!(f, "{comma} {} on node {node}", Bytes(*bytes))?,
                None => write!(f, "{comma} {} on an unknown node", Bytes(*bytes))?,
            }
        }
        match &self.refused {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for NodeTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeTables")
            .field("bytes", &self.bytes)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl NodeTables {
    /// Arenas of at least `bytes` bytes each, on this machine. Their addresses for units begin at
    /// `base`, a multiple of the size: first that of the arena that lies anywhere, then those of the
    /// nodes by number.
    pub fn new(bytes: u64, base: u64) -> Self {
        Self::with_nodes(bytes, base, KernelNodes)
    }

    /// As [`new`](Self::new), over another [`NodePolicy`].
    pub fn with_nodes(
        bytes: u64,
        base: u64,
        policy: impl NodePolicy + Send + Sync + 'static,
    ) -> Self {
        let highest = policy.memory_nodes().into_iter().max();
        let arenas = highest.map_or(1, |node| node as usize + 2);
        Self {
            bytes: arena_bytes(bytes),
            base,
            policy: Box::new(policy),
            arenas: (0..arenas).map(|_| OnceLock::new()).collect(),
            misplaced: Mutex::default(),
        }
    }

    /// The arena on `node`, or the one that lies anywhere for `None` and for a node that has no memory.
    ///
    /// # Errors
    ///
    /// When there is no memory at all, or no addresses are left for units.
    pub fn memory(&self, node: Option<NodeId>) -> Result<Arc<HostTables>, Cause> {
        let mut misplaced = self
            .misplaced
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(wanted) = node else {
            return self.anywhere();
        };
        let Some((place, slot)) = self.slot(wanted) else {
            let elsewhere = self.anywhere()?;
            let why = "the machine has no memory on a node of this number";
            self.note(&mut misplaced, wanted, &elsewhere, Some(why.into()));
            return Ok(elsewhere);
        };
        if let Some(arena) = slot.get() {
            return Ok(Arc::clone(arena));
        }
        let mapped = MappedStorage::mapped(self.bytes, Some(wanted.0), &*self.policy);
        let (arena, refused) = match mapped {
            Ok(mapping) => {
                let storage = MappedStorage::brought_in(mapping)?;
                let found = self.found(&storage);
                let there = found == [(Some(wanted.0), self.bytes)];
                let arena = HostTables::new(storage, self.base_of(place)?)?;
                // A node on which it is not is not reported.
                (Arc::new(arena.on_node(there.then_some(wanted.0))), None)
            }
            Err(
                cause @ (hostmem::MappingError::NoSuchNode { .. }
                | hostmem::MappingError::Node { .. }),
            ) => (self.anywhere()?, Some(refusal(&cause))),
            Err(cause) => return Err(cause.into()),
        };
        self.note(&mut misplaced, wanted, &arena, refused);
        Ok(Arc::clone(slot.get_or_init(|| arena)))
    }

    /// Table memory that is not where it was wanted, by node. Each node once, as it was found when its
    /// arena was made.
    pub fn misplaced(&self) -> Vec<Misplaced> {
        let misplaced = self
            .misplaced
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        misplaced.clone()
    }

    /// Nodes of the table memory now, asked page by page: the node that it was made for,
    /// `None` for anywhere, and bytes by node. Arenas that were never asked for are left out.
    pub fn nodes(&self) -> Vec<(Option<NodeId>, Vec<NodeBytes>)> {
        let node = |place: usize| place.checked_sub(1).map(|node| NodeId(node as u32));
        self.own_arenas()
            .map(|(place, arena)| (node(place), self.found(arena.storage())))
            .collect()
    }

    /// Tables of all nodes that are handed out or reserved.
    pub fn in_use(&self) -> u64 {
        self.own_arenas().map(|(_, arena)| arena.in_use()).sum()
    }

    /// The arenas with their places, each once: a place that borrows another's has none of its own.
    fn own_arenas(&self) -> impl Iterator<Item = (usize, &Arc<HostTables>)> {
        let arenas = self.arenas.iter().enumerate();
        let arenas = arenas.filter_map(|(place, slot)| Some((place, slot.get()?)));
        arenas.filter(|(place, arena)| self.base_of(*place).is_ok_and(|base| base == arena.base()))
    }

    fn slot(&self, node: NodeId) -> Option<(usize, &OnceLock<Arc<HostTables>>)> {
        let place = (node.0 as usize).checked_add(1)?;
        Some((place, self.arenas.get(place)?))
    }

    /// The arena that lies anywhere. Called with the lock held.
    fn anywhere(&self) -> Result<Arc<HostTables>, Cause> {
        let slot = &self.arenas[0];
        if let Some(arena) = slot.get() {
            return Ok(Arc::clone(arena));
        }
        let mapping = MappedStorage::mapped(self.bytes, None, &*self.policy)?;
        let arena = HostTables::new(MappedStorage::brought_in(mapping)?, self.base_of(0)?)?;
        Ok(Arc::clone(slot.get_or_init(|| Arc::new(arena))))
    }

    fn base_of(&self, place: usize) -> Result<u64, Cause> {
        let base = (place as u64).checked_mul(self.bytes);
        let base = base.and_then(|offset| self.base.checked_add(offset));
        base.ok_or_else(|| "no addresses are left for tables".into())
    }

    /// Nodes of the memory; all of it unknown when the kernel does not answer.
    fn found(&self, storage: &MappedStorage) -> Vec<NodeBytes> {
        let mapping = storage.mapping();
        let found = mapping.nodes_by(&*self.policy);
        found.unwrap_or_else(|_| Vec::from([(None, mapping.len())]))
    }

    /// Notes what is not on `node`, once.
    fn note(
        &self,
        misplaced: &mut Vec<Misplaced>,
        node: NodeId,
        arena: &HostTables,
        refused: Option<Box<str>>,
    ) {
        if misplaced.iter().any(|known| known.node == node) {
            return;
        }
        let found = self.found(arena.storage());
        if found.iter().any(|(at, _)| *at != Some(node.0)) {
            misplaced.push(Misplaced {
                node,
                found,
                refused,
            });
        }
    }

    fn at(&self, address: u64) -> Result<&Arc<HostTables>, BadAddress> {
        let place = address.wrapping_sub(self.base) / self.bytes;
        let slot = self.arenas.get(place as usize);
        slot.and_then(OnceLock::get).ok_or(BadAddress { address })
    }
}

/// Error text of the system, with its source.
fn refusal(cause: &hostmem::MappingError) -> Box<str> {
    match core::error::Error::source(cause) {
        Some(source) => std::format!("{cause}: {source}").into(),
        None => cause.to_string().into(),
    }
}

impl WalkMemory for NodeTables {
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
