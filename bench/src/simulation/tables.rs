//! Real tables for the simulation, and their reads watched.

use std::cell::RefCell;
use std::sync::Arc;

use iopt::walk::{BadAddress, WalkMemory, Walker};
use iopt::{AnyTable, FormatId, HeapTables, Prot, TABLE_BYTES};
use runs::{Iova, PageSizes, Span};

/// A domain: tables that the engine has filled, on one memory node.
#[derive(Debug)]
pub struct Domain {
    memory: Arc<HeapTables>,
    table: AnyTable,
    walker: Walker,
    node: Option<u32>,
}

/// Why there are no such tables.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// There is no memory for them.
    #[error("cannot get memory for the page tables")]
    Memory(#[from] iopt::ArenaError),
    /// There are none of this format with such leaves.
    #[error("cannot build a page table")]
    Build(#[from] iopt::BuildError),
    /// The range cannot be mapped.
    #[error("cannot map the memory")]
    Map(#[from] iopt::TableMapError),
}

impl Domain {
    /// Tables of 4 levels that map `range` one to one, in leaves of up to `max_leaf` bytes, lying on
    /// `node`.
    ///
    /// # Errors
    ///
    /// When there is no memory for them, or they cannot be built.
    pub fn map(
        format: FormatId,
        range: Span<Iova>,
        max_leaf: u64,
        node: Option<u32>,
    ) -> Result<Self, DomainError> {
        let sizes = PageSizes::from_bits(u64::MAX).up_to(max_leaf);
        // As many as leaves of 4 KiB take, but not more than there is a use for: what the leaves that
        // are allowed take, with a table for what is over at each end on each level.
        let leaf_tables = if max_leaf < 2 << 20 {
            range.len.div_ceil(2 << 20)
        } else {
            0
        };
        let upper = range.len.div_ceil(1 << 30) + 16;
        let memory = Arc::new(HeapTables::with_tables(leaf_tables + upper)?.on_node(node));
        let table = AnyTable::new(format, 4, sizes, Arc::clone(&memory))?;
        // One to one.
        table.map(range.start, &[range.cast()], Prot::RW)?;
        Ok(Self {
            walker: Walker::new(table.root()),
            memory,
            table,
            node,
        })
    }

    /// The node on which its tables lie.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Bytes of its tables.
    pub fn table_bytes(&self) -> u64 {
        self.table.tables() * TABLE_BYTES
    }

    pub(super) fn walker(&self) -> &Walker {
        &self.walker
    }

    /// Its memory, which notes for each read the node that it goes to.
    pub(super) fn watched(&self) -> Watched<'_> {
        Watched {
            domain: self,
            nodes: RefCell::new(Vec::new()),
        }
    }
}

/// Table memory whose reads are noted: this is where the walker meets the simulation.
pub(super) struct Watched<'a> {
    domain: &'a Domain,
    nodes: RefCell<Vec<Option<u32>>>,
}

impl Watched<'_> {
    /// The nodes of all reads, in order.
    pub(super) fn into_nodes(self) -> Vec<Option<u32>> {
        self.nodes.into_inner()
    }
}

impl WalkMemory for Watched<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        use iopt::TableMemory;
        // The memory is asked where the table lies, which is what it tells everybody.
        let node = self.domain.memory.node(address & !(TABLE_BYTES - 1));
        self.nodes.borrow_mut().push(node);
        self.domain.memory.read_u64(address)
    }
}
