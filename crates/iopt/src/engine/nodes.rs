//! Where tables lie.

use super::Table;
use crate::format::Format;
use crate::memory::TableMemory;

/// How many nodes are distinguished.
const NODES: usize = 64;

/// How many tables lie on which memory node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    counts: [u64; NODES],
    /// On nodes with higher numbers.
    others: u64,
    unknown: u64,
}

impl Nodes {
    /// Tables on `node`. Nodes from 64 on are not told apart: this is 0 for them.
    pub fn on(&self, node: u32) -> u64 {
        self.counts.get(node as usize).copied().unwrap_or(0)
    }

    /// Tables on nodes from 64 on.
    pub const fn on_others(&self) -> u64 {
        self.others
    }

    /// Tables of which the memory does not know where they are.
    pub const fn unknown(&self) -> u64 {
        self.unknown
    }

    /// The nodes with tables, and how many.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let all = self.counts.iter().enumerate();
        all.filter(|(_, count)| **count > 0)
            .map(|(node, count)| (node as u32, *count))
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// On which memory nodes the tables lie, the root counting as one; see [`TableMemory::node`].
    /// Visits every table.
    pub fn nodes(&self) -> Nodes {
        let mut nodes = Nodes {
            counts: [0; NODES],
            others: 0,
            unknown: 0,
        };
        self.for_each_table(&mut |table, _| {
            let count = match self.memory.node(table) {
                None => &mut nodes.unknown,
                Some(node) => match nodes.counts.get_mut(node as usize) {
                    Some(count) => count,
                    None => &mut nodes.others,
                },
            };
            *count += 1;
        });
        nodes
    }
}
