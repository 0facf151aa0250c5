//! The steps of a life, and what comes of each, with stable names and units: `_bytes`, `_ns`, or a count.

use std::fmt;
use std::time::Duration;

use hostmem::Mapping;
use ioas::Unsupported;
use runs::{Iova, Span};
use serde::{Serialize, Serializer};

/// The steps of a life, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Memory on two nodes is there.
    #[default]
    Memory,
    /// It is pinned, and charged by runs.
    Pin,
    /// A root for each node, in two formats, filled in one pass.
    Roots,
    /// Devices do DMA, and do not stop any more.
    Dma,
    /// A hole of 4 KiB is cut into the largest leaf.
    Hole,
    /// It is closed again, and the leaf is whole.
    Close,
    /// Dirty tracking on: leaves are split.
    Track,
    /// What devices have written to is harvested.
    Harvest,
    /// Dirty tracking off: leaves are merged back.
    Merge,
    /// The balloon takes 7 of 8 parts.
    Inflate,
    /// It gives them back.
    Deflate,
    /// The address space goes to another process.
    HandOver,
    /// That process cuts a hole and closes it.
    Successor,
    /// Everything is given back.
    TearDown,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 14] = [
        Self::Memory,
        Self::Pin,
        Self::Roots,
        Self::Dma,
        Self::Hole,
        Self::Close,
        Self::Track,
        Self::Harvest,
        Self::Merge,
        Self::Inflate,
        Self::Deflate,
        Self::HandOver,
        Self::Successor,
        Self::TearDown,
    ];

    /// A word or two for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pin => "pin, charge",
            Self::Roots => "two roots",
            Self::Dma => "DMA begins",
            Self::Hole => "cut a hole",
            Self::Close => "close it",
            Self::Track => "track, split",
            Self::Harvest => "harvest",
            Self::Merge => "merge",
            Self::Inflate => "balloon in",
            Self::Deflate => "balloon out",
            Self::HandOver => "hand over",
            Self::Successor => "successor",
            Self::TearDown => "tear down",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a back end was asked for, and refused by name. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The [`Capability`](ioas::Capability) that it lacks, by name; `None` where it is none of these.
    pub capability: Option<String>,
    /// The error, as it says it itself.
    pub error: String,
}

impl From<Unsupported> for Refused {
    fn from(cause: Unsupported) -> Self {
        Self {
            capability: Some(cause.what.name().into()),
            error: cause.to_string(),
        }
    }
}

/// What happened in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Done {
    /// Which it is.
    pub step: Step,
    /// What it took, without the check after it.
    #[serde(rename = "took_ns", serialize_with = "nanoseconds")]
    pub took: Duration,
    /// Runs that it moved, of which kind the check says.
    pub runs: u64,
    /// Bytes that it moved.
    pub bytes: u64,
    /// Table pages of all roots when it was done.
    pub tables: u64,
    /// Flushes of all units.
    pub flushes: u64,
    /// What was looked at, and found.
    pub checked: String,
    /// The same in at most 18 characters, for a table of 80 columns.
    #[serde(skip)]
    pub found: String,
    /// What the back end was asked for in this step, and cannot do.
    pub refused: Option<Refused>,
    /// Whether that is as it had to be.
    pub right: bool,
}

/// A count for people: `104,219`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn nanoseconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Memory on one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeShare {
    /// The node; `None` when the kernel does not say.
    pub node: Option<u32>,
    /// The bytes on it.
    pub bytes: u64,
}

/// On which nodes memory is.
///
/// # Errors
///
/// When it cannot be looked at.
pub fn nodes(mapping: &Mapping) -> Result<Vec<NodeShare>, hostmem::PlacementError> {
    let share = |(node, bytes)| NodeShare { node, bytes };
    Ok(mapping.nodes()?.into_iter().map(share).collect())
}

/// A page table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Root {
    /// The node that it is for.
    pub node: u32,
    /// Where the table memory lies.
    pub nodes: Vec<NodeShare>,
    /// The format: `vtd-ss`, `x86-64`, `amdv1`.
    pub format: String,
    /// The device that translates through it.
    pub device: String,
}

/// What is known of addresses besides the tables, for a picture.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    /// Pages that are taken out.
    pub holes: Vec<Span<Iova>>,
    /// What is in the balloon.
    pub balloon: Vec<Span<Iova>>,
    /// What devices have written to.
    pub dirty: Vec<Span<Iova>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_grouped_by_thousands() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (1_048_576, "1,048,576"),
        ] {
            assert_eq!(count(number), text);
        }
    }
}
