//! The figures of the five origins on this machine: what they published, the page-by-page way measured
//! here, and this project measured here, in one run and in turns.
//!
//! [`run`] measures a group, which is an origin's table. In each round of a group every figure is taken once,
//! page by page and by runs one after the other, so that whatever else the machine does meets both;
//! figures are medians over the rounds with the lowest and the highest, and the first round does not
//! count. There are rounds until the group's share of the time is over, so the time left is known.
//!
//! Published figures are from other machines ([`origin`]): the ratio of the two columns that
//! were measured here is what can be compared with the ratio of the published ones.

mod balloon;
mod figure;
mod host;
mod map;
mod numa;
pub mod origin;
mod pin;
mod real;
mod report;
mod rounds;
mod tables;
pub mod text;

use std::time::Duration;

pub use figure::Figure;
pub use host::Host;
pub use report::{BenchReport, Group, GroupReport, Key, Line, NotRun, Row, Subject, Unit};

use rounds::Rounds;

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time of a group. The fewest rounds may take longer.
    pub budget: Duration,
    /// The fewest rounds; the first one does not count where there are more.
    pub least_rounds: u32,
    /// The most rounds.
    pub most_rounds: u32,
    /// Bytes of real memory of `pin`, if that much is there.
    pub memory_bytes: u64,
    /// Bytes of the memory out of which `balloon` is inflated.
    pub balloon_bytes: u64,
    /// Calls, or entries, of about that many pages are timed in one bracket of `map`.
    pub batch: u64,
    /// These are not the whole sizes.
    pub quick: bool,
}

impl Settings {
    /// 8 GiB and ten minutes for all groups.
    pub const fn full() -> Self {
        Self {
            budget: Duration::from_secs(100),
            least_rounds: 3,
            most_rounds: 60,
            memory_bytes: 8 << 30,
            balloon_bytes: 8 << 30,
            batch: 4096,
            quick: false,
        }
    }

    /// 1 GiB, 256 MiB for the balloon, and one minute for all groups.
    pub const fn quick() -> Self {
        Self {
            budget: Duration::from_secs(11),
            least_rounds: 3,
            most_rounds: 20,
            memory_bytes: 1 << 30,
            balloon_bytes: 256 << 20,
            quick: true,
            ..Self::full()
        }
    }

    /// One round of the smallest sizes: for tests, its figures say nothing.
    #[doc(hidden)]
    pub const fn smallest() -> Self {
        Self {
            budget: Duration::ZERO,
            least_rounds: 1,
            most_rounds: 1,
            memory_bytes: 16 << 20,
            balloon_bytes: 16 << 20,
            batch: 16,
            quick: true,
        }
    }
}

/// Why there are no figures.
///
/// Work that a machine cannot do or has no memory for is no error, but stands in [`GroupReport::not_run`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The machine does not say what it has.
    #[error("cannot read the machine's memory and pools")]
    Probe(#[from] hostmem::ProcfsError),
    /// There is no memory for tables.
    #[error("cannot use the memory for page tables of {format}")]
    Arena {
        /// The format.
        format: &'static str,
        /// Why.
        source: iopt::ArenaError,
    },
    /// A table cannot be built.
    #[error("cannot build a page table of {format}")]
    Build {
        /// The format.
        format: &'static str,
        /// Why.
        source: iopt::BuildError,
    },
    /// A unit of ours refuses the table.
    #[error("cannot attach a device to a page table of {format}")]
    Attach {
        /// The format.
        format: &'static str,
        /// Why.
        source: Box<ioas::AttachError>,
    },
    /// An operation was refused that must be done: its time would mean nothing.
    #[error("{group}: {op} of {format} was refused, or did something else")]
    Refused {
        /// The group.
        group: Group,
        /// The operation.
        op: &'static str,
        /// The format.
        format: &'static str,
    },
    /// A thread of the group cannot be had.
    #[error("{group} requires more threads than possible")]
    NoThread {
        /// The group.
        group: Group,
        /// Why.
        source: std::io::Error,
    },
    /// A thread of the group has ended before its time.
    #[error("a thread of {group} has ended before its time")]
    Thread {
        /// The group.
        group: Group,
    },
    /// The simulation came to no end.
    #[error("cannot simulate memory nodes")]
    Study(#[from] crate::study::StudyError),
}

/// Measures a group.
///
/// # Errors
///
/// When an operation fails that must not.
pub fn run(group: Group, settings: Settings) -> Result<GroupReport, BenchError> {
    let mut report = GroupReport::new(group);
    let published = origin::published(group);
    let rows = published.iter().flat_map(origin::Published::rows);
    report.rows.extend(rows);
    let mut rounds = Rounds::new(settings);
    match group {
        Group::Pin => pin::run(&mut rounds, &mut report)?,
        Group::Map => map::run(&mut rounds, &mut report)?,
        Group::Balloon => balloon::run(&mut rounds, &mut report)?,
        Group::Tables => tables::run(&mut rounds, &mut report)?,
        Group::Numa => numa::run(&mut rounds, &mut report)?,
    }
    rounds.finish(&mut report);
    Ok(report)
}
