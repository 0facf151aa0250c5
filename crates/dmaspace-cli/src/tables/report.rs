//! Results of a survey, with stable names and units: `_bytes`, or a count.

use serde::Serialize;

use super::picture::Stretch;
use super::tree::TreeLine;
use crate::json::hex;

/// Contents of the tables below a root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// The root.
    pub root: RootReport,
    /// The levels, from the root's down.
    pub levels: Vec<LevelReport>,
    /// Leaves by size, smallest first.
    pub leaves: Vec<LeafReport>,
    /// Bytes that leaves map.
    pub mapped_bytes: u64,
    /// How many runs they join to.
    pub run_count: u64,
    /// The runs, by address; as many as the limit allows.
    pub runs: Vec<RunReport>,
    /// The leaves by address: neighbours of one size are one stretch; as many as the limit on runs.
    pub layout: Vec<Stretch>,
    /// The tables as a tree, what repeats in one line; as many as the limit allows.
    pub tree: Vec<TreeLine>,
    /// Table memory that does nothing.
    pub waste: Waste,
    /// How many findings there are.
    pub finding_count: u64,
    /// The findings, as many as the limit allows.
    pub findings: Vec<Finding>,
    /// False when the limit on tables ended it: all counts are then of what was read.
    pub complete: bool,
}

/// Where tables begin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RootReport {
    /// The format's name.
    pub format: String,
    /// The root's address.
    #[serde(with = "hex")]
    pub address: u64,
    /// Levels.
    pub levels: u8,
    /// Bits of an input address.
    pub input_bits: u32,
    /// The same in words, with what is above them.
    pub aperture: String,
}

/// The tables of one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LevelReport {
    /// The level; 0 is that of the smallest page.
    pub level: u8,
    /// How many tables.
    pub tables: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their entries that are present.
    pub present: u64,
    /// Present entries that are leaves, or parts of one.
    pub leaf_entries: u64,
    /// All their entries.
    pub entries: u64,
}

/// The leaves of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeafReport {
    /// Bytes of a leaf.
    pub page_bytes: u64,
    /// How many.
    pub count: u64,
    /// Bytes that they map.
    pub bytes: u64,
}

/// A stretch that is contiguous in both address spaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunReport {
    /// The first input address.
    #[serde(with = "hex")]
    pub iova: u64,
    /// The physical address.
    #[serde(with = "hex")]
    pub pa: u64,
    /// Bytes.
    pub bytes: u64,
    /// Permissions of devices: `rw-`.
    pub prot: String,
    /// The smallest and the largest leaf, bytes.
    pub pages_bytes: (u64, u64),
}

/// Table memory that does nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waste {
    /// Tables below the root without an entry that is present.
    pub empty_tables: u64,
    /// Their bytes.
    pub empty_bytes: u64,
    /// Tables whose leaves could be one larger leaf: alike, contiguous and aligned.
    pub mergeable_tables: u64,
    /// Their bytes.
    pub mergeable_bytes: u64,
    /// Tables of the image to which nothing leads; `None` for a dump, in which that is not known.
    pub unlinked_tables: Option<u64>,
    /// Bytes of all tables that are reached.
    pub all_bytes: u64,
}

/// Something that should not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Kind of the finding.
    pub kind: FindingKind,
    /// The first input address that it concerns.
    #[serde(with = "hex")]
    pub iova: u64,
    /// The table in which it is.
    #[serde(with = "hex")]
    pub table: u64,
    /// Its level.
    pub level: u8,
    /// The place in it.
    pub index: u32,
    /// The entry.
    #[serde(with = "hex")]
    pub word: u64,
    /// In words.
    pub text: String,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// A device faults, or reaches what it should not, or tables are damaged.
    Wrong,
    /// It works, but need not be so.
    Note,
}

/// Kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FindingKind {
    /// The entry is present, and every access through it faults.
    Faults,
    /// Another entry leads to the same table.
    Shared,
    /// A leaf of several entries, not all of which say so.
    Group,
    /// A leaf that can neither be read nor written.
    NoAccess,
    /// A table without an entry that is present.
    Empty,
    /// A table of the image to which nothing leads.
    Unlinked,
}
