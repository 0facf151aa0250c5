//! Linux's own tables at their work: `generic_pt` and `io-pgtable`, compiled on this machine and
//! timed in a process of their own (the crate `conformance` says how).
//!
//! Meaning of its rows:
//!
//! - Only functions that an IOMMU driver calls are timed of Linux's code; there is no lock, no flush
//!   of a unit, and no barrier that waits for stores.
//! - `unmap` returns no runs, so its figure is the same whether runs are wanted or not. Where Arm's
//!   code drops a subtree unseen, it is shown only where they are not, and in the cycle, which has no
//!   such row.
//! - `io-pgtable` notes each page that is to be flushed, one by one, unless everything is to be
//!   flushed later anyway ([`Gathering::Queued`]): what Linux's drivers do for strict and for lazy
//!   domains. The queued subject unmaps, and does nothing that would be the same in both.
//! - Several pages in one go are not offered: it has nothing that would be done once for all.
//! - Dirty bits go into a plain bitmap with a bit a page. Unmapping with dirty bits, splitting and
//!   merging are not offered.
//! - Tables of 32 bits do their work at 1 GiB instead of [`IOVA`](crate::peers::work::IOVA), and at
//!   physical addresses from 2 GiB on.
//! - Table memory is of small pages, as ours is, unless huge ones are asked for.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use conformance::{
    build::{self, Purpose, TIMED_COMPILERS},
    server::{LinuxFormat, Server, option},
    source,
    timing::{self, Kind, TimedTable},
};

use crate::peers::results::said;
use crate::peers::work::{Beside, Subject, Work};

/// How unmapping notes what is to be flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gathering {
    /// Leaf by leaf, or range by range, as the format's code does.
    Strict,
    /// Tables only: all translations are flushed later.
    Queued,
}

/// Linux's programs, one of each compiler that the machine has.
#[derive(Clone, Debug)]
pub struct Programs(Vec<(&'static str, PathBuf)>);

impl Programs {
    /// Builds them in `directory`; Linux's source is fetched where it is not there.
    pub fn build(directory: &Path) -> anyhow::Result<Self> {
        let compilers: Vec<_> = TIMED_COMPILERS
            .into_iter()
            .filter(|compiler| build::has(compiler))
            .collect();
        ensure!(
            !compilers.is_empty(),
            "no compiler of C: one of {}",
            TIMED_COMPILERS.join(", ")
        );
        let source = source::fetch(directory).context("Linux's source cannot be had")?;
        let programs = compilers.into_iter().map(|compiler| {
            let program = build::build(&source, directory, compiler, Purpose::Time)?;
            Ok((compiler, program))
        });
        Ok(Self(programs.collect::<anyhow::Result<_>>()?))
    }

    /// The compilers.
    pub fn compilers(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(compiler, _)| *compiler)
    }

    /// The compilers with their versions, for people.
    pub fn made_by(&self) -> String {
        let version = |compiler: &'static str| {
            let said = said(compiler, &["--version"]);
            let first = said.as_deref().and_then(|text| text.lines().next());
            let version = first.unwrap_or("of unknown version");
            format!("{compiler}: {version}")
        };
        let all: Vec<String> = self.compilers().map(version).collect();
        all.join("; ")
    }

    /// A subject of each compiler for the table of this name (see [`timing::tables`]).
    pub fn subjects(
        &self,
        table: &str,
        gathering: Gathering,
        huge_pages: bool,
    ) -> anyhow::Result<Vec<Linux>> {
        let tables = timing::tables()?;
        let table = tables.iter().find(|known| known.name == table);
        let table = table.context("Linux has no table of this name")?;
        let programs = self.0.iter();
        programs
            .map(|(compiler, program)| {
                Linux::start(program, compiler, table, gathering, huge_pages)
            })
            .collect()
    }
}

/// One of Linux's tables, compiled by one compiler.
#[derive(Debug)]
pub struct Linux {
    name: String,
    server: Server,
    gathering: Gathering,
    /// A large unmap drops subtrees, and does not look at what was mapped in them.
    drops: bool,
}

impl Linux {
    /// Starts the program and makes the table, with its memory in huge pages if so wanted.
    pub fn start(
        program: &Path,
        compiler: &str,
        table: &TimedTable,
        gathering: Gathering,
        huge_pages: bool,
    ) -> anyhow::Result<Self> {
        let mut config = table.config;
        if huge_pages {
            config.options |= option::HUGE_MEMORY;
        }
        let mut server = Server::start(program)?;
        server.create_timed(&config)?;
        let lazy = match gathering {
            Gathering::Strict => "",
            Gathering::Queued => ", queued",
        };
        Ok(Self {
            name: format!("Linux 7.2 {}, {compiler}{lazy}", table.name),
            server,
            gathering,
            drops: matches!(
                config.format,
                LinuxFormat::ArmStage1 | LinuxFormat::ArmStage2 | LinuxFormat::ArmV7s
            ),
        })
    }

    /// The work in Linux's terms; `None` where it has none for it.
    fn work(&self, work: &Work) -> Option<timing::Work> {
        // The sizes that Linux chooses are not those that are said.
        let chosen = 1 << 12;
        let (kind, page, count) = match *work {
            Work::Map { page, count, .. } => (Kind::Map, page, count),
            Work::Unmap { page, count, .. } => (Kind::Unmap, page, count),
            Work::MapAllocated { page, count } => (Kind::MapAllocated, page, count),
            Work::UnmapAllocated { runs: true, .. } if self.drops => return None,
            Work::UnmapAllocated { page, count, .. } => (Kind::UnmapAllocated, page, count),
            Work::Cycle { page, count } => (Kind::Cycle, page, count),
            Work::MapChosen => (Kind::MapChosen, chosen, 1),
            Work::UnmapChosen => (Kind::UnmapChosen, chosen, 1),
            Work::Translate { page } => (Kind::Translate, page, 1),
            Work::Harvest { page, .. } => (Kind::Harvest, page, 1),
            Work::MapSeveral { .. }
            | Work::UnmapSeveral { .. }
            | Work::UnmapDirty { .. }
            | Work::Split { .. }
            | Work::Merge { .. } => return None,
        };
        let queued = self.gathering == Gathering::Queued;
        let unmaps = [
            Kind::Unmap,
            Kind::UnmapAllocated,
            Kind::Cycle,
            Kind::UnmapChosen,
        ];
        if queued && !unmaps.contains(&kind) {
            return None;
        }
        let half = match *work {
            Work::Map { beside, .. } | Work::Unmap { beside, .. } => beside == Beside::Half,
            Work::MapChosen | Work::UnmapChosen => true,
            _ => false,
        };
        Some(timing::Work {
            kind,
            page,
            count,
            half,
            queued,
            dirty: matches!(work, Work::Harvest { dirty: true, .. }),
        })
    }
}

/// How many batches make a sample: the pipe to the other process costs once, not each time.
const fn batches(work: &timing::Work) -> u64 {
    match work.kind {
        Kind::Harvest | Kind::Translate => 3,
        _ if work.count > 512 => 3,
        _ => 15,
    }
}

impl Subject for Linux {
    fn name(&self) -> String {
        self.name.clone()
    }

    /// The median of a few batches, after one that does not count.
    fn sample(&mut self, work: &Work) -> anyhow::Result<Option<f64>> {
        let Some(work) = self.work(work) else {
            return Ok(None);
        };
        let samples = self.server.time(&work, batches(&work))?;
        let Some(mut samples) = samples else {
            return Ok(None);
        };
        samples.sort_by(f64::total_cmp);
        let middle = samples.get(samples.len() / 2).copied();
        Ok(Some(middle.context("no batch was timed")?))
    }
}
