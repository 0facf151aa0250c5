//! The rows: which operations are measured, and what is aimed at.
//!
//! Rows are said for 4 KiB pages and 512 entries a table. Other formats do as many entries in their
//! own sizes, as far as that is possible. An aim is a ratio to what others take in the same run and format.

use std::fmt;

use Aim::{Crate, Limit, Linux};
use Leaf::{Block, Small};
use Op::*;

use crate::peers::field::Who;
use crate::peers::work::{Beside, Work};

/// The sizes of a format that stand for 4 KiB and for 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// The smallest page, bytes.
    pub small: u64,
    /// The block of the next level, bytes; some formats have none.
    pub block: Option<u64>,
    /// Blocks for which the address space has room, if not for `BLOCKS`.
    pub room: u64,
}

/// Entries of 8 GiB in blocks of 2 MiB.
const BLOCKS: u64 = 4096;
/// Entries of 1 GiB in pages of 4 KiB.
const PAGES: u64 = 1 << 18;

/// The aim: at most so many times as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// As the limit: the loop of relaxed stores.
    Limit(f64),
    /// As Linux's code by its fastest compiler.
    Linux(f64),
    /// As the fastest foreign crate in the reference format.
    Crate(f64),
}

impl Aim {
    /// How many times as long.
    pub const fn factor(self) -> f64 {
        match self {
            Limit(factor) | Linux(factor) | Crate(factor) => factor,
        }
    }

    /// As what.
    pub const fn to_what(self) -> &'static str {
        match self {
            Limit(_) => "limit",
            Linux(_) => "Linux",
            Crate(_) => "crate",
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}× {}", self.factor(), self.to_what())
    }
}

/// The leaves of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaf {
    Small,
    Block,
}

/// The operation of a row, and how many leaves it handles.
#[derive(Clone, Copy, Debug)]
enum Op {
    Map(Leaf, u64),
    Unmap(Leaf, u64),
    MapKept(Leaf, u64),
    UnmapKept(Leaf, u64),
    MapSeveral,
    UnmapSeveral,
    MapNew(Leaf, u64),
    UnmapAll(Leaf, u64),
    Discard(Leaf, u64),
    Cycle(Leaf, u64),
    MapChosen,
    UnmapChosen,
    Translate,
    Harvest { dirty: bool },
    UnmapDirty(u64),
    Split,
    Merge,
}

/// How one row is made.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name, in filters and files.
    pub id: &'static str,
    /// For people; with 4K and 2M standing for the format's own sizes.
    pub title: &'static str,
    /// Nanoseconds of the unit in which it is shown: 1 or 1,000.
    pub unit: f64,
    /// The aims, exclusive and shared.
    pub aims: [Aim; 2],
    op: Op,
}

impl Row {
    /// The work of this row with the sizes of a format; `None` where that has no such sizes.
    pub fn work(&self, pages: &Pages) -> Option<Work> {
        let page = |leaf| match leaf {
            Small => Some(pages.small),
            Block => pages.block,
        };
        let room = |leaf, count: u64| match leaf {
            Small => count,
            Block => count.min(pages.room),
        };
        let (beside, runs) = match self.op {
            MapKept(..) | UnmapKept(..) => (Beside::Kept, true),
            _ => (Beside::Page, true),
        };
        Some(match self.op {
            Map(leaf, count) | MapKept(leaf, count) => Work::Map {
                page: page(leaf)?,
                count,
                beside,
            },
            Unmap(leaf, count) | UnmapKept(leaf, count) => Work::Unmap {
                page: page(leaf)?,
                count,
                beside,
                runs,
            },
            MapSeveral => Work::MapSeveral { page: pages.small },
            UnmapSeveral => Work::UnmapSeveral { page: pages.small },
            MapNew(leaf, count) => Work::MapAllocated {
                page: page(leaf)?,
                count: room(leaf, count),
            },
            UnmapAll(leaf, count) | Discard(leaf, count) => Work::UnmapAllocated {
                page: page(leaf)?,
                count: room(leaf, count),
                runs: !matches!(self.op, Discard(..)),
            },
            Cycle(leaf, count) => Work::Cycle {
                page: page(leaf)?,
                count,
            },
            MapChosen => Work::MapChosen,
            UnmapChosen => Work::UnmapChosen,
            Translate => Work::Translate { page: pages.small },
            Harvest { dirty } => Work::Harvest {
                page: pages.small,
                dirty,
            },
            UnmapDirty(count) => Work::UnmapDirty {
                page: pages.small,
                count,
            },
            Split => Work::Split { page: pages.block? },
            Merge => Work::Merge { page: pages.block? },
        })
    }

    /// The aim for one of our forms.
    pub fn aim(&self, who: Who) -> Aim {
        let [exclusive, shared] = self.aims;
        if who == Who::Shared {
            shared
        } else {
            exclusive
        }
    }

    /// The sizes of leaves are these, and not of the format's choice.
    pub const fn has_sizes(&self) -> bool {
        !matches!(self.op, MapChosen | UnmapChosen)
    }
}

const fn row(id: &'static str, title: &'static str, unit: f64, aims: [Aim; 2], op: Op) -> Row {
    Row {
        id,
        title,
        unit,
        aims,
        op,
    }
}

const NS: f64 = 1.0;
const US: f64 = 1e3;
const LOOP: [Aim; 2] = [Limit(1.0), Limit(1.0)];
const RUNS: [Aim; 2] = [Limit(1.25), Limit(1.5)];

/// All rows, in the order in which they are shown.
#[rustfmt::skip]
pub const ROWS: &[Row] = &[
    row("map-1", "map 1 × 4K", NS, [Linux(0.75), Linux(1.0)], Map(Small, 1)),
    row("unmap-1", "unmap 1 × 4K", NS, [Linux(0.75), Linux(1.0)], Unmap(Small, 1)),
    row("map-several", "map 1 × 4K, 64 in one go", NS, [Limit(3.0), Limit(5.0)], MapSeveral),
    row("unmap-several", "unmap 1 × 4K, 64 in one go", NS, [Limit(5.0), Limit(8.0)], UnmapSeveral),
    row("map-256", "map 256 × 4K", NS, RUNS, Map(Small, 256)),
    row("unmap-256", "unmap 256 × 4K", NS, RUNS, Unmap(Small, 256)),
    row("map-256-kept", "map 256 × 4K, empty tables kept", NS, RUNS, MapKept(Small, 256)),
    row("unmap-256-kept", "unmap 256 × 4K, empty tables kept", NS, RUNS, UnmapKept(Small, 256)),
    row("map-256-block", "map 256 × 2M", NS, RUNS, Map(Block, 256)),
    row("unmap-256-block", "unmap 256 × 2M", NS, [Limit(1.25), Linux(0.33)], Unmap(Block, 256)),
    row("map-many", "map 1 GiB in 4K", US, LOOP, MapNew(Small, PAGES)),
    row("unmap-many", "unmap 1 GiB in 4K", US, [Limit(1.25), Limit(1.25)], UnmapAll(Small, PAGES)),
    row("unmap-many-discard", "unmap 1 GiB in 4K, runs not wanted", US, [Linux(1.0), Linux(1.0)], Discard(Small, PAGES)),
    row("cycle", "map and unmap 1 GiB of 4K", US, LOOP, Cycle(Small, PAGES)),
    row("map-many-block", "map 8 GiB in 2M", US, LOOP, MapNew(Block, BLOCKS)),
    row("unmap-many-block", "unmap 8 GiB in 2M", US, [Limit(1.25), Linux(0.33)], UnmapAll(Block, BLOCKS)),
    row("map-chosen", "map 1 MiB, aligned, sizes chosen", NS, RUNS, MapChosen),
    row("unmap-chosen", "unmap 1 MiB, aligned, sizes chosen", NS, RUNS, UnmapChosen),
    row("translate", "translate, random in 1 GiB of 4K", NS, [Crate(1.05), Linux(1.1)], Translate),
    row("harvest-clean", "harvest 1 GiB of 4K, clean", US, [Limit(1.25), Limit(1.25)], Harvest { dirty: false }),
    row("harvest-dirty", "harvest 1 GiB of 4K, all dirty", US, [Limit(1.25), Limit(1.25)], Harvest { dirty: true }),
    row("unmap-dirty", "unmap 256 × 4K with dirty bits", NS, [Limit(3.0), Limit(3.0)], UnmapDirty(256)),
    row("split", "split 2M into 512 × 4K", NS, [Limit(1.5), Limit(1.5)], Split),
    row("merge", "merge 512 × 4K into 2M", NS, [Limit(1.5), Limit(1.5)], Merge),
];
