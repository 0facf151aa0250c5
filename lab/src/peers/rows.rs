//! The rows: which operations are measured, under which conditions, and what is aimed at.
//!
//! Aims are said for 4 KiB pages and 512 entries a table. Other formats do as many entries in their
//! own sizes; where that is not possible (their address space is too small, a block has other parts)
//! the aim is scaled by the number of entries.

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

/// What is aimed at, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// For the exclusive and for the shared form.
    Each(f64, f64),
    /// So many times the loop written by hand, in the same run, for both.
    ByHand(f64),
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
    /// What is aimed at for `entries` entries.
    pub aim: Aim,
    /// Entries for which the aim is said; 0 where it does not depend on them.
    pub entries: u64,
    /// Tables, gather, runs.
    pub conditions: &'static str,
    /// What has to be said of the aim or of rivals.
    pub remark: &'static str,
    /// The work with the sizes of a format, and how many entries it takes.
    work: fn(&Pages) -> Option<(Work, u64)>,
}

impl Row {
    /// The work of this row with the sizes of a format; `None` where that has no such sizes.
    pub fn work(&self, pages: &Pages) -> Option<Work> {
        (self.work)(pages).map(|(work, _)| work)
    }

    /// The sizes of leaves are these, and not of the format's choice.
    pub fn has_sizes(&self, pages: &Pages) -> bool {
        let work = self.work(pages);
        !matches!(work, Some(Work::MapChosen | Work::UnmapChosen))
    }

    /// By what the aim is scaled for these sizes.
    pub fn scale(&self, pages: &Pages) -> f64 {
        match (self.work)(pages) {
            Some((_, entries)) if self.entries > 0 => entries as f64 / self.entries as f64,
            _ => 1.0,
        }
    }
}

const WARM: &str = "tables warm and empty";
const WARM_UNMAP: &str = "tables warm, nothing beside; gather made and flushed; runs returned";
const HALF: &str = "tables warm, their other half mapped";
const HALF_UNMAP: &str =
    "tables warm, their other half mapped; gather made and flushed; runs returned";
const NEW: &str = "tables from recycled pages, zeroed where that is needed";
const GIVEN: &str = "tables given back; gather made and flushed; runs returned";

const fn map(page: u64, count: u64, beside: Beside) -> Option<(Work, u64)> {
    Some((
        Work::Map {
            page,
            count,
            beside,
        },
        count,
    ))
}

const fn unmap(page: u64, count: u64, beside: Beside) -> Option<(Work, u64)> {
    let runs = true;
    Some((
        Work::Unmap {
            page,
            count,
            beside,
            runs,
        },
        count,
    ))
}

const fn row(
    id: &'static str,
    title: &'static str,
    unit: f64,
    aim: Aim,
    conditions: &'static str,
    work: fn(&Pages) -> Option<(Work, u64)>,
) -> Row {
    let (entries, remark) = (0, "");
    Row {
        id,
        title,
        unit,
        aim,
        entries,
        conditions,
        remark,
        work,
    }
}

impl Row {
    const fn with_entries(self, entries: u64) -> Self {
        Self { entries, ..self }
    }

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
        Aim::Each(6.0, 12.0),
        "tables warm and empty; each page by itself: the shared form goes inside for it and leaves",
        |p| map(p.small, 1, NOTHING),
    ),
    row(
        "unmap-1",
        "unmap 1 × 4K",
        1.0,
        Aim::Each(5.0, 12.0),
        "tables warm, nothing beside; each page by itself: a gather made and flushed, tables given \
         back; runs returned",
        |p| unmap(p.small, 1, NOTHING),
    )
    .with_remark("the crates keep no count of live entries and return no runs"),
    row(
        "map-several",
        "map 1 × 4K, 64 in one go",
        1.0,
        Aim::Each(6.0, 12.0),
        "tables warm and empty; time of a page; one call for each, the shared form goes inside once \
         for all 64",
        |p| Some((Work::MapSeveral { page: p.small }, 0)),
    )
    .with_remark("rivals have nothing that is done once for all: see the row of one page"),
    row(
        "unmap-several",
        "unmap 1 × 4K, 64 in one go",
        1.0,
        Aim::Each(5.0, 12.0),
        "tables warm, nothing beside; time of a page; one call for each, the shared form goes inside \
         once for all 64; one gather made, flushed and given back for all; runs returned",
        |p| Some((Work::UnmapSeveral { page: p.small }, 0)),
    )
    .with_remark("rivals have nothing that is done once for all: see the row of one page"),
    row(
        "map-256",
        "map 256 × 4K",
        1.0,
        Aim::Each(60.0, 100.0),
        WARM,
        |p| map(p.small, 256, NOTHING),
    ),
    row(
        "map-256-half",
        "map 256 × 4K, half-full table",
        1.0,
        Aim::Each(95.0, 100.0),
        HALF,
        |p| map(p.small, 256, Beside::Half),
    ),
    row(
        "unmap-256",
        "unmap 256 × 4K",
        1.0,
        Aim::Each(65.0, 95.0),
        WARM_UNMAP,
        |p| unmap(p.small, 256, NOTHING),
    ),
    row(
        "unmap-256-half",
        "unmap 256 × 4K, half-full table",
        1.0,
        Aim::Each(65.0, 95.0),
        HALF_UNMAP,
        |p| unmap(p.small, 256, Beside::Half),
    ),
    row(
        "map-256-block",
        "map 256 × 2M",
        1.0,
        Aim::Each(60.0, 100.0),
        WARM,
        |p| map(p.block?, 256, NOTHING),
    ),
    row(
        "unmap-256-block",
        "unmap 256 × 2M",
        1.0,
        Aim::Each(65.0, 95.0),
        WARM_UNMAP,
        |p| unmap(p.block?, 256, NOTHING),
    ),
    row(
        "map-many",
        "map 1 GiB in 4K",
        1e3,
        Aim::Each(45e3, 45e3),
        NEW,
        |p| {
            Some((
                Work::MapAllocated {
                    page: p.small,
                    count: PAGES,
                },
                PAGES,
            ))
        },
    ),
    row(
        "unmap-many",
        "unmap 1 GiB in 4K",
        1e3,
        Aim::Each(65e3, 65e3),
        GIVEN,
        |p| {
            Some((
                Work::UnmapAllocated {
                    page: p.small,
                    count: PAGES,
                    runs: true,
                },
                PAGES,
            ))
        },
    )
    .with_remark("Linux returns no runs; its Arm code drops the subtree unseen, as in the next row"),
    row(
        "unmap-many-discard",
        "unmap 1 GiB in 4K, runs not wanted",
        1e3,
        Aim::Each(2e3, 2e3),
        "tables given back; gather made and flushed; runs not wanted",
        |p| {
            Some((
                Work::UnmapAllocated {
                    page: p.small,
                    count: PAGES,
                    runs: false,
                },
                PAGES,
            ))
        },
    )
    .with_remark("rivals drop the subtree at 1.4 and 1.9 µs, without a list of what to flush"),
    row(
        "cycle",
        "cycle: map and unmap 1 GiB of 4K",
        1e3,
        Aim::Each(110e3, 110e3),
        "steady state of recycled tables; gather made and flushed; runs returned",
        |p| {
            Some((
                Work::Cycle {
                    page: p.small,
                    count: PAGES,
                },
                PAGES,
            ))
        },
    )
    .with_remark("Linux returns no runs; its Arm code drops the subtree unseen"),
    row(
        "map-many-block",
        "map 8 GiB in 2M",
        1e3,
        Aim::Each(1.3e3, 1.3e3),
        NEW,
        |p| {
            Some((
                Work::MapAllocated {
                    page: p.block?,
                    count: p.room.min(BLOCKS),
                },
                p.room.min(BLOCKS),
            ))
        },
    )
    .with_entries(BLOCKS),
    row(
        "unmap-many-block",
        "unmap 8 GiB in 2M",
        1e3,
        Aim::Each(1.3e3, 1.3e3),
        GIVEN,
        |p| {
            let count = p.room.min(BLOCKS);
            Some((
                Work::UnmapAllocated {
                    page: p.block?,
                    count,
                    runs: true,
                },
                count,
            ))
        },
    )
    .with_entries(BLOCKS),
    row(
        "map-chosen",
        "map 1 MiB, aligned, sizes chosen",
        1.0,
        Aim::Each(60.0, 60.0),
        HALF,
        |_| Some((Work::MapChosen, 0)),
    ),
    row(
        "unmap-chosen",
        "unmap 1 MiB, aligned, sizes chosen",
        1.0,
        Aim::Each(60.0, 60.0),
        HALF_UNMAP,
        |_| Some((Work::UnmapChosen, 0)),
    ),
    row(
        "translate",
        "translate, random in 1 GiB of 4K",
        1.0,
        Aim::ByHand(1.05),
        "4,096 addresses, each by itself",
        |p| Some((Work::Translate { page: p.small }, 0)),
    ),
    row(
        "harvest-clean",
        "harvest 1 GiB of 4K, clean",
        1e3,
        Aim::Each(40e3, 40e3),
        "tracking on; flushed, shown and acknowledged",
        |p| {
            Some((
                Work::Harvest {
                    page: p.small,
                    dirty: false,
                },
                (1 << 30) / p.small,
            ))
        },
    )
    .with_entries(PAGES),
    row(
        "harvest-dirty",
        "harvest 1 GiB of 4K, all dirty",
        1e3,
        Aim::Each(150e3, 150e3),
        "tracking on; flushed, shown and acknowledged",
        |p| {
            Some((
                Work::Harvest {
                    page: p.small,
                    dirty: true,
                },
                (1 << 30) / p.small,
            ))
        },
    )
    .with_entries(PAGES),
    row(
        "unmap-dirty",
        "unmap 256 × 4K with dirty bits",
        1.0,
        Aim::Each(600.0, 600.0),
        "tracking on, all dirty; tables warm; gather made and flushed; dirty runs returned",
        |p| {
            Some((
                Work::UnmapDirty {
                    page: p.small,
                    count: 256,
                },
                256,
            ))
        },
    ),
    row(
        "split",
        "split 2M into 512 × 4K",
        1.0,
        Aim::Each(150.0, 150.0),
        "table from a recycled page; flushed as often as the format asks for",
        |p| Some((Work::Split { page: p.block? }, p.block? / p.small)),
    )
    .with_entries(512),
    row(
        "merge",
        "merge 512 × 4K into 2M",
        1.0,
        Aim::Each(100.0, 100.0),
        "table given back; flushed as often as the format asks for",
        |p| Some((Work::Merge { page: p.block? }, p.block? / p.small)),
    )
    .with_entries(512),
];

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn aims_are_scaled_where_a_format_has_other_numbers_of_entries() {
        let find = |id| ROWS.iter().find(|row| row.id == id).unwrap();
        let armv7 = Pages {
            small: 4096,
            block: Some(1 << 20),
            room: 2048,
        };
        assert_eq!(find("map-many-block").scale(&armv7), 0.5);
        assert_eq!(find("split").scale(&armv7), 0.5);
        assert_eq!(find("map-256").scale(&armv7), 1.0);
        let large = Pages {
            small: 16 << 10,
            block: None,
            room: BLOCKS,
        };
        assert_eq!(find("harvest-clean").scale(&large), 0.25);
        assert_eq!(find("split").work(&large), None);
    }

    #[test]
    fn names_are_different() {
        let mut ids: Vec<_> = ROWS.iter().map(|row| row.id).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|two| two[0] != two[1]));
    }
}
