//! The work that every subject does, and the seam to those who do it.
//!
//! # Where and how often
//!
//! A sample is the time of a *batch* of equal operations, divided by their number. Work around
//! them (undoing them, for the next batch) is not timed.
//!
//! | operation | batch | where |
//! |---|---|---|
//! | one page | 64 | every second page from [`IOVA`] on |
//! | up to 512 pages | 8 | the lower half of every table of that level, from [`IOVA`] on |
//! | more | 1 | from [`IOVA`] on |
//!
//! Physical addresses begin at [`PA`] in every operation. Warm tables exist before the batch: those
//! of level 0 (or 1, for pages of 2 MiB) too. Tables that are allocated come from recycled pages of
//! prefaulted memory, which are dirty; zeroing them is part of the operation, and so is giving them
//! back. Leaves can be read and written.

/// Where the work begins; below it lie the pages that keep upper tables alive.
pub const IOVA: u64 = 8 << 30;
/// The physical address of what is mapped.
pub const PA: u64 = 16 << 30;

/// Contents of the tables before a batch of [`Work::Map`] with warm tables, beside the pages that it maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Beside {
    /// A page of another's, without which a table would be given back when it is empty.
    Page,
    /// Nothing: the table is kept when it is empty, by those who can.
    Kept,
    /// The other half of the table is mapped.
    Half,
}

/// One kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Map `count` pages of `page` bytes each into tables that are there.
    Map {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
        /// Other contents of their table.
        beside: Beside,
    },
    /// Unmap them again, to a flush that does nothing; the tables stay.
    Unmap {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
        /// Other contents of their table.
        beside: Beside,
        /// The physical runs are wanted.
        runs: bool,
    },
    /// Map single pages in one go, a whole batch of them, each by itself: they lie apart.
    /// Implementations that keep others out of a table, or let them in, do so once for all.
    MapSeveral {
        /// Bytes.
        page: u64,
    },
    /// Unmap them so, runs wanted; flushed and given back once for all.
    UnmapSeveral {
        /// Bytes.
        page: u64,
    },
    /// Map `count` pages of `page` bytes; all tables but the upper ones are allocated.
    MapAllocated {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
    },
    /// Unmap them again; the tables are given back after a flush that does nothing.
    UnmapAllocated {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
        /// The physical runs are wanted.
        runs: bool,
    },
    /// One after the other, runs wanted: the steady state of recycled tables.
    Cycle {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
    },
    /// Map 1 MiB, aligned to it on both sides, in the sizes that the format chooses; in warm tables,
    /// half of which is mapped.
    MapChosen,
    /// Unmap it, runs wanted.
    UnmapChosen,
    /// Translate addresses at random in 1 GiB of pages of this size, each by itself.
    Translate {
        /// Bytes.
        page: u64,
    },
    /// Read and clear the dirty bits of 1 GiB of pages of this size.
    Harvest {
        /// Bytes.
        page: u64,
        /// All pages are dirty, or none is.
        dirty: bool,
    },
    /// Unmap `count` pages and learn which runs are dirty; every page is.
    UnmapDirty {
        /// Bytes.
        page: u64,
        /// Pages.
        count: u64,
    },
    /// Split a leaf of `page` bytes into those of the level below.
    Split {
        /// Bytes.
        page: u64,
    },
    /// Merge the leaves of the level below into one of `page` bytes.
    Merge {
        /// Bytes.
        page: u64,
    },
}

/// A subject that does work: a table, a loop.
pub trait Subject {
    /// The name, for people.
    fn name(&self) -> String;

    /// Does a batch, or several, and returns the nanoseconds of one operation; `None` where this
    /// subject does not offer it. Each call leaves things as they were, so that it can be called
    /// again, in turns with others.
    fn sample(&mut self, work: &Work) -> anyhow::Result<Option<f64>>;
}
