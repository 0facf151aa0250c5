//! Linux's tables at work, timed in their own process.
//!
//! The head of `linux-pt/timing.c` says what an operation is, where it lies, how many make a batch and
//! what surrounds them. Each request makes the table anew, does one batch that is not counted and in
//! which every address is looked at, and then so many that are.
//!
//! Linux's code is timed as far as an IOMMU driver calls it: no page-size search of the core, no
//! locks, no flush of a unit, no barrier that waits for stores. Table memory is recycled, dirty, and
//! zeroed when it is taken, within the time.

use anyhow::{bail, ensure};

use crate::server::{LinuxConfig, Server, option};

mod tables;

pub use tables::{TimedTable, check, tables};

/// Kinds of work; the numbers are those of `linux-pt/timing.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Kind {
    /// Map into tables that are there.
    Map,
    /// Unmap, in pages of the size that was mapped. `generic_pt` gives back tables that the call
    /// covers whole; the others keep theirs.
    Unmap,
    /// Map into a new table: all of its tables but the upper ones are allocated.
    MapAllocated,
    /// Unmap in the largest sizes that the range allows, as Linux's core does: where they are those
    /// of tables, `io-pgtable-arm` drops what lies below.
    UnmapAllocated,
    /// Map, and unmap so, one after the other.
    Cycle,
    /// Map 1 MiB, aligned on both sides, in sizes of Linux's choice.
    MapChosen,
    /// Unmap it.
    UnmapChosen,
    /// Translate random addresses in 1 GiB.
    Translate,
    /// Read and clear the dirty bits of 1 GiB into a bitmap with a bit a page.
    Harvest,
}

/// One kind of work, with what it needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// The kind.
    pub kind: Kind,
    /// Bytes of a page; nothing to the chosen kinds but a power of two.
    pub page: u64,
    /// Pages of one operation, where the kind leaves them open.
    pub count: u64,
    /// The other half of the tables is mapped; for single pages, those between. Not with
    /// [`Kind::MapAllocated`].
    pub half: bool,
    /// Unmap with a gather that notes no leaf, since everything will be flushed later.
    pub queued: bool,
    /// All pages are dirty, of which [`Kind::Harvest`] takes note.
    pub dirty: bool,
}

impl Work {
    /// `count` pages of `page` bytes, and no more to say.
    pub const fn new(kind: Kind, page: u64, count: u64) -> Self {
        Self {
            kind,
            page,
            count,
            half: false,
            queued: false,
            dirty: false,
        }
    }
}

/// Flags of the request, as in `linux-pt/timing.h`.
mod flag {
    pub(super) const HALF: u64 = 1 << 0;
    pub(super) const QUEUED: u64 = 1 << 1;
    pub(super) const DIRTY: u64 = 1 << 2;
    pub(super) const KEEP: u64 = 1 << 3;
}

/// Where table memory begins: no data lies there.
const BASE: u64 = 1 << 31;
/// The same for tables of 32 bits.
const NARROW_BASE: u64 = 1 << 28;

impl Server {
    /// Makes a table to be timed; the sizes of its pages.
    pub fn create_timed(&mut self, config: &LinuxConfig) -> anyhow::Result<u64> {
        let narrow = config.output_bits <= 32;
        let base = if narrow { NARROW_BASE } else { BASE };
        let mut config = *config;
        config.options |= option::RECYCLED;
        self.create(&config, base)
    }

    /// Times the work, in so many batches: the nanoseconds of one operation of each. `None` where
    /// Linux does not offer it. The table is one of [`Server::create_timed`].
    pub fn time(&mut self, work: &Work, batches: u64) -> anyhow::Result<Option<Vec<f64>>> {
        self.time_with(work, batches, 0)
    }

    /// The same; what the last batch mapped stays until the next request.
    fn time_and_keep(&mut self, work: &Work) -> anyhow::Result<Option<Vec<f64>>> {
        self.time_with(work, 1, flag::KEEP)
    }

    fn time_with(
        &mut self,
        work: &Work,
        batches: u64,
        more: u64,
    ) -> anyhow::Result<Option<Vec<f64>>> {
        let mut flags = more;
        for (set, flag) in [
            (work.half, flag::HALF),
            (work.queued, flag::QUEUED),
            (work.dirty, flag::DIRTY),
        ] {
            if set {
                flags |= flag;
            }
        }
        let arguments = [work.kind as u64, work.page, work.count, flags, batches];
        let answer = self.ask(6, &arguments)?;
        ensure!(
            answer.complaints == 0,
            "Linux complained {} times: {work:?}",
            answer.complaints
        );
        // The errnos are explained in linux-pt/timing.h.
        match answer.result {
            0 => {}
            95 => return Ok(None),
            14 => bail!("Linux did not unmap all: {work:?}"),
            16 => bail!("table memory grew while the clock ran: {work:?}"),
            84 => bail!("Linux's mapping differs from the request: {work:?}"),
            errno => bail!("Linux refuses (errno {errno}): {work:?}"),
        }
        let samples = answer.words.iter().map(|sample| *sample as f64 / 1000.0);
        Ok(Some(samples.collect()))
    }
}
