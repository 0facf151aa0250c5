//! The tables as a tree, what repeats in one line.
//!
//! Neighbouring entries whose leaves are one run are one line. Neighbouring tables that hold nothing
//! but one run each, which continue each other, are one line too, with the run below.

use std::fmt::Display;

use iopt::Prot;
use iopt::walk::Visited;
use runs::Run;
use serde::Serialize;

use crate::json::hex;

/// A line of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum TreeLine {
    /// Entries that lead to tables.
    Tables {
        /// How far it is indented; 0 in the root.
        depth: usize,
        /// The first entry's place in its table.
        index: u32,
        /// How many tables; more than one where each holds a part of the run below and nothing else.
        count: u64,
        /// The first input address.
        #[serde(with = "hex")]
        iova: u64,
        /// Input addresses that they translate, bytes.
        bytes: u64,
        /// The first table's address.
        #[serde(with = "hex")]
        address: u64,
        /// Their level.
        level: u8,
    },
    /// Leaves that are one run.
    Leaves {
        /// How far it is indented.
        depth: usize,
        /// The first entry's place in its table.
        index: u32,
        /// How many entries.
        count: u64,
        /// The first input address.
        #[serde(with = "hex")]
        iova: u64,
        /// The physical address.
        #[serde(with = "hex")]
        pa: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of a leaf.
        page_bytes: u64,
        /// Permissions of devices.
        prot: String,
    },
    /// An entry that is not followed.
    Fault {
        /// How far it is indented.
        depth: usize,
        /// Its place in its table.
        index: u32,
        /// The first input address.
        #[serde(with = "hex")]
        iova: u64,
        /// The entry.
        #[serde(with = "hex")]
        word: u64,
        /// Why.
        text: String,
    },
}

/// The lines so far.
pub(super) struct Tree {
    lines: Vec<TreeLine>,
    most: usize,
    prot: Prot,
}

impl Tree {
    pub(super) const fn new(most: usize) -> Self {
        Self {
            lines: Vec::new(),
            most,
            prot: Prot::empty(),
        }
    }

    pub(super) fn into_lines(mut self) -> Vec<TreeLine> {
        self.lines.truncate(self.most);
        self.lines
    }

    /// Returns true if there is room for a line. Lines beyond the most are dropped; a few are let in, since the last
    /// ones may still join.
    fn has_room(&self) -> bool {
        self.lines.len() < self.most.saturating_add(64)
    }

    fn push(&mut self, line: TreeLine) {
        if self.has_room() {
            self.lines.push(line);
        }
    }

    pub(super) fn table(&mut self, depth: usize, entry: &Visited, address: u64, level: u8) {
        self.push(TreeLine::Tables {
            depth: depth - 1,
            index: entry.index,
            count: 1,
            iova: entry.iova,
            bytes: 1u64.checked_shl(entry.log2).unwrap_or(u64::MAX),
            address,
            level,
        });
    }

    pub(super) fn fault(&mut self, depth: usize, entry: &Visited, text: &dyn Display) {
        if self.has_room() {
            self.lines.push(TreeLine::Fault {
                depth: depth - 1,
                index: entry.index,
                iova: entry.iova,
                word: entry.word,
                text: text.to_string(),
            });
        }
    }

    pub(super) fn leaf(&mut self, at: usize, entry: &Visited, part: Run, page: u64) {
        match self.lines.last_mut() {
            Some(TreeLine::Leaves {
                depth,
                index,
                count,
                iova,
                pa,
                bytes,
                page_bytes,
                ..
            }) if *depth == at - 1
                && u64::from(*index) + *count == u64::from(entry.index)
                && *page_bytes == page
                && self.prot == entry.prot
                && iova.checked_add(*bytes) == Some(part.iova)
                && pa.checked_add(*bytes) == Some(part.pa) =>
            {
                *count += 1;
                *bytes += part.len;
                return;
            }
            _ => {}
        }
        self.prot = entry.prot;
        self.push(TreeLine::Leaves {
            depth: at - 1,
            index: entry.index,
            count: 1,
            iova: part.iova,
            pa: part.pa,
            bytes: part.len,
            page_bytes: page,
            prot: entry.prot.to_string(),
        });
    }

    /// The table whose lines are at this depth is over: joined to the one before, if both hold nothing
    /// but a part of one run.
    pub(super) fn close(&mut self, below: usize) {
        let [
            ..,
            TreeLine::Tables {
                depth: first_depth,
                index: first_index,
                count: tables,
                iova: first_iova,
                bytes: first_bytes,
                level: first_level,
                ..
            },
            TreeLine::Leaves {
                depth: run_depth,
                count: entries,
                iova: run_iova,
                pa: run_pa,
                bytes: run_bytes,
                page_bytes: run_page,
                prot: run_prot,
                ..
            },
            TreeLine::Tables {
                depth,
                index,
                count: 1,
                iova,
                bytes,
                level,
                ..
            },
            TreeLine::Leaves {
                depth: leaf_depth,
                count,
                iova: leaf_iova,
                pa,
                bytes: leaf_bytes,
                page_bytes,
                prot,
                ..
            },
        ] = self.lines.as_mut_slice()
        else {
            return;
        };
        let alike = *leaf_depth + 1 == below
            && *first_depth == *depth
            && *run_depth == *depth + 1
            && *leaf_depth == *run_depth
            && *first_level == *level
            && u64::from(*first_index) + *tables == u64::from(*index)
            && first_iova.checked_add(*first_bytes) == Some(*iova)
            && *run_page == *page_bytes
            && run_prot == prot
            && run_iova.checked_add(*run_bytes) == Some(*leaf_iova)
            && run_pa.checked_add(*run_bytes) == Some(*pa);
        if alike {
            *tables += 1;
            *first_bytes = first_bytes.saturating_add(*bytes);
            *entries += *count;
            *run_bytes += *leaf_bytes;
            self.lines.truncate(self.lines.len() - 2);
        }
    }
}
