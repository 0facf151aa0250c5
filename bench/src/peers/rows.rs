//! The rows: which operations are measured, under which conditions, and what is aimed at.
//!
//! Rows are said for 4 KiB pages and 512 entries a table. Other formats do as many entries in their
//! own sizes, as far as that is possible. An aim is a ratio to what others take in the same run and format.

use std::fmt;

use Aim::{ByHand, Limit, Linux};

use crate::peers::field::Who;
use crate::peers::work::{Beside, Work};

const NOTHING: Beside = Beside::Nothing;

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

/// What is aimed at: to take at most so many times as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// As the limit: the loop of relaxed stores.
    Limit(f64),
    /// As Linux's code by its fastest compiler.
    Linux(f64),
    /// As the loop written by hand.
    ByHand(f64),
}

impl Aim {
    /// How many times as long.
    pub const fn factor(self) -> f64 {
        match self {
            Limit(factor) | Linux(factor) | ByHand(factor) => factor,
        }
    }

    /// As what.
    pub const fn to_what(self) -> &'static str {
        match self {
            Limit(_) => "limit",
            Linux(_) => "Linux",
            ByHand(_) => "by hand",
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}× {}", self.factor(), self.to_what())
    }
}

/// How one row is made.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name, in filters, files and the table of reasons.
    pub id: &'static str,
    /// For people; with 4K and 2M standing for the format's own sizes.
    pub title: &'static str,
    /// Nanoseconds of the unit in which it is shown: 1 or 1,000.
    pub unit: f64,
    /// What is aimed at, exclusive and shared.
    pub aims: [Aim; 2],
    /// Tables, gather, runs.
    pub conditions: &'static str,
    /// What has to be said of the aim or of rivals.
    pub remark: &'static str,
    /// The work with the sizes of a format.
    work: fn(&Pages) -> Option<Work>,
}

impl Row {
    /// The work of this row with the sizes of a format; `None` where that has no such sizes.
    pub fn work(&self, pages: &Pages) -> Option<Work> {
        (self.work)(pages)
    }

    /// What is aimed at for one of our forms.
    pub fn aim(&self, who: Who) -> Aim {
        let [exclusive, shared] = self.aims;
        if who == Who::Shared {
            shared
        } else {
            exclusive
        }
    }

    /// The sizes of leaves are these, and not of the format's choice.
    pub fn has_sizes(&self, pages: &Pages) -> bool {
        let work = self.work(pages);
        !matches!(work, Some(Work::MapChosen | Work::UnmapChosen))
    }
}

const WARM: &str = "tables warm and empty";
const WARM_UNMAP: &str = "tables warm, nothing beside";
const HALF: &str = "tables warm, their other half mapped";
const NEW: &str = "tables from recycled pages";
const GIVEN: &str = "tables given back";

const fn map(page: u64, count: u64, beside: Beside) -> Option<Work> {
    Some(Work::Map {
        page,
        count,
        beside,
    })
}

const fn unmap(page: u64, count: u64, beside: Beside) -> Option<Work> {
    Some(Work::Unmap {
        page,
        count,
        beside,
        runs: true,
    })
}

const fn row(
    id: &'static str,
    title: &'static str,
    unit: f64,
    aims: [Aim; 2],
    conditions: &'static str,
    work: fn(&Pages) -> Option<Work>,
) -> Row {
    Row {
        id,
        title,
        unit,
        aims,
        conditions,
        remark: "",
        work,
    }
}

impl Row {
    const fn with_remark(self, remark: &'static str) -> Self {
        Self { remark, ..self }
    }
}

/// All rows, in the order in which they are shown.
pub const ROWS: &[Row] = &[
    row(
        "map-1",
        "map 1 × 4K",
        1.0,
        [Linux(0.75), Linux(1.0)],
        "tables warm and empty; the shared form enters and leaves for each page",
        |p| map(p.small, 1, NOTHING),
    ),
    row(
        "unmap-1",
        "unmap 1 × 4K",
        1.0,
        [Linux(0.75), Linux(1.0)],
        "tables warm, nothing beside; a gather for each page",
        |p| unmap(p.small, 1, NOTHING),
    )
    .with_remark("Crates keep no count of live entries and return no runs"),
    row(
        "map-several",
        "map 1 × 4K, 64 in one go",
        1.0,
        [Limit(3.0), Limit(5.0)],
        "as `map-1`, but the shared form enters once for all 64",
        |p| Some(Work::MapSeveral { page: p.small }),
    ),
    row(
        "unmap-several",
        "unmap 1 × 4K, 64 in one go",
        1.0,
        [Limit(5.0), Limit(8.0)],
        "as `unmap-1`, but the shared form enters once, and one gather is flushed, for all 64",
        |p| Some(Work::UnmapSeveral { page: p.small }),
    ),
    row(
        "map-256",
        "map 256 × 4K",
        1.0,
        [Limit(1.25), Limit(1.5)],
        WARM,
        |p| map(p.small, 256, NOTHING),
    ),
    row(
        "map-256-half",
        "map 256 × 4K, half-full table",
        1.0,
        [Limit(1.25), Limit(1.5)],
        HALF,
        |p| map(p.small, 256, Beside::Half),
    ),
    row(
        "unmap-256",
        "unmap 256 × 4K",
        1.0,
        [Limit(1.25), Limit(1.5)],
        WARM_UNMAP,
        |p| unmap(p.small, 256, NOTHING),
    ),
    row(
        "unmap-256-half",
        "unmap 256 × 4K, half-full table",
        1.0,
        [Limit(1.25), Limit(1.5)],
        HALF,
        |p| unmap(p.small, 256, Beside::Half),
    ),
    row(
        "map-256-block",
        "map 256 × 2M",
        1.0,
        [Limit(1.25), Limit(1.5)],
        WARM,
        |p| map(p.block?, 256, NOTHING),
    ),
    row(
        "unmap-256-block",
        "unmap 256 × 2M",
        1.0,
        [Limit(1.25), Linux(0.33)],
        WARM_UNMAP,
        |p| unmap(p.block?, 256, NOTHING),
    ),
    row(
        "map-many",
        "map 1 GiB in 4K",
        1e3,
        [Limit(1.0), Limit(1.0)],
        NEW,
        |p| {
            Some(Work::MapAllocated {
                page: p.small,
                count: PAGES,
            })
        },
    ),
    row(
        "unmap-many",
        "unmap 1 GiB in 4K",
        1e3,
        [Limit(1.25), Limit(1.25)],
        GIVEN,
        |p| {
            Some(Work::UnmapAllocated {
                page: p.small,
                count: PAGES,
                runs: true,
            })
        },
    )
    .with_remark("Linux returns no runs; its Arm code drops the subtree unread"),
    row(
        "unmap-many-discard",
        "unmap 1 GiB in 4K, runs not wanted",
        1e3,
        [Linux(1.0), Linux(1.0)],
        "tables given back; no runs returned",
        |p| {
            Some(Work::UnmapAllocated {
                page: p.small,
                count: PAGES,
                runs: false,
            })
        },
    )
    .with_remark("Linux's Arm code and a crate drop the subtree without a list of what to flush"),
    row(
        "cycle",
        "cycle: map and unmap 1 GiB of 4K",
        1e3,
        [Limit(1.0), Limit(1.0)],
        "steady state of recycled tables",
        |p| {
            Some(Work::Cycle {
                page: p.small,
                count: PAGES,
            })
        },
    ),
    row(
        "map-many-block",
        "map 8 GiB in 2M",
        1e3,
        [Limit(1.0), Limit(1.0)],
        NEW,
        |p| {
            Some(Work::MapAllocated {
                page: p.block?,
                count: p.room.min(BLOCKS),
            })
        },
    ),
    row(
        "unmap-many-block",
        "unmap 8 GiB in 2M",
        1e3,
        [Limit(1.25), Linux(0.33)],
        GIVEN,
        |p| {
            let count = p.room.min(BLOCKS);
            Some(Work::UnmapAllocated {
                page: p.block?,
                count,
                runs: true,
            })
        },
    ),
    row(
        "map-chosen",
        "map 1 MiB, aligned, sizes chosen",
        1.0,
        [Limit(1.25), Limit(1.5)],
        HALF,
        |_| Some(Work::MapChosen),
    ),
    row(
        "unmap-chosen",
        "unmap 1 MiB, aligned, sizes chosen",
        1.0,
        [Limit(1.25), Limit(1.5)],
        HALF,
        |_| Some(Work::UnmapChosen),
    ),
    row(
        "translate",
        "translate, random in 1 GiB of 4K",
        1.0,
        [ByHand(1.05), Linux(1.1)],
        "4,096 addresses, one call each",
        |p| Some(Work::Translate { page: p.small }),
    ),
    row(
        "harvest-clean",
        "harvest 1 GiB of 4K, clean",
        1e3,
        [Limit(1.25), Limit(1.25)],
        "tracking on; flushed, shown and acknowledged",
        |p| {
            Some(Work::Harvest {
                page: p.small,
                dirty: false,
            })
        },
    ),
    row(
        "harvest-dirty",
        "harvest 1 GiB of 4K, all dirty",
        1e3,
        [Limit(1.25), Limit(1.25)],
        "tracking on; flushed, shown and acknowledged",
        |p| {
            Some(Work::Harvest {
                page: p.small,
                dirty: true,
            })
        },
    ),
    row(
        "unmap-dirty",
        "unmap 256 × 4K with dirty bits",
        1.0,
        [Limit(3.0), Limit(3.0)],
        "tracking on, all dirty; tables warm; dirty runs returned",
        |p| {
            Some(Work::UnmapDirty {
                page: p.small,
                count: 256,
            })
        },
    ),
    row(
        "split",
        "split 2M into 512 × 4K",
        1.0,
        [Limit(1.5), Limit(1.5)],
        "table from a recycled page; flushed as the format requires",
        |p| Some(Work::Split { page: p.block? }),
    ),
    row(
        "merge",
        "merge 512 × 4K into 2M",
        1.0,
        [Limit(1.5), Limit(1.5)],
        "table given back; flushed as the format requires",
        |p| Some(Work::Merge { page: p.block? }),
    ),
];

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_are_different() {
        let mut ids: Vec<_> = ROWS.iter().map(|row| row.id).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|two| two[0] != two[1]));
    }
}
