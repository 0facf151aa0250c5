//! A running process as a device would see its memory: how it is backed, what mapping it would cost,
//! and which change would help most.
//!
//! Everything is read from `/proc`; the process is not stopped, and what is said of different parts was
//! so at different times. What takes privilege that is not there is left out and [said](Missing). What
//! is not there costs nothing to look at, so that sparse address spaces stay quick.
//!
//! Devices would use the process's own addresses, and get what it may write: that is what a virtual
//! machine's monitor maps of its guest's memory, at other addresses but with the same leaves as long as
//! those are congruent.
//!
//! Source: Linux `Documentation/filesystems/proc.rst`, `Documentation/admin-guide/mm/pagemap.rst`.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod advice;
mod calibrate;
mod command;
mod cost;
mod folios;
mod machine;
mod process;
#[cfg(test)]
mod tests;
mod text;

use std::{fmt, io};

use hostmem::ProcessPages;
use iopt::FormatId;
use iopt::format::{ArmConfig, ArmGranule};
use runs::{Run, SizeHistogram, Span, Va};
use serde::Serialize;
use thiserror::Error;

use crate::map::{SizeClass, Stretch};
use cost::Counter;

pub use advice::Advice;
pub(crate) use command::{InspectArgs, run};
pub use cost::FormatCost;
#[cfg(test)]
pub use cost::LeafCount;
pub use machine::{Ats, MachineReport};
#[cfg(test)]
pub use machine::{GroupDevice, GroupReport, MachineFinding, UnitReport};
pub use process::{Area, AreaKind, Limit, areas, node_bytes};

/// Why a process cannot be looked at.
#[derive(Debug, Error)]
pub enum InspectError {
    /// There is none.
    #[error("there is no process {pid}")]
    Gone {
        /// Its number.
        pid: u32,
    },
    /// It is another user's, or protected.
    #[error(
        "process {pid} may not be looked at: it is another user's, or protected; that takes \
         CAP_SYS_PTRACE (root)"
    )]
    Denied {
        /// Its number.
        pid: u32,
    },
    /// It has no address space.
    #[error("process {pid} ({name}) has no memory of its own: it is {what}")]
    NoMemory {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
        /// What it is.
        what: MemoryLess,
    },
    /// Something else.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
}

/// A process without an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLess {
    /// It has ended, and its parent has not asked for its status yet.
    Zombie,
    /// It runs in the kernel only.
    KernelThread,
}

impl fmt::Display for MemoryLess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zombie => "a zombie, which has ended and waits for its parent",
            Self::KernelThread => "a thread of the kernel",
        })
    }
}

/// What is not known, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// What is not known.
    pub what: &'static str,
    /// Why, and what it takes.
    pub why: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProcessReport {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// It ended while it was looked at: what is said is a part.
    pub ended: bool,
    /// What is not known.
    pub missing: Vec<Missing>,
    /// Bytes of its address space.
    pub virtual_bytes: u64,
    /// Bytes of it that devices could be given: what it may write, and what is memory.
    pub mappable_bytes: u64,
    /// Bytes of that which are there: the rest would be brought in by pinning it.
    pub present_bytes: u64,
    /// Bytes that are locked (`VmLck`).
    pub locked_bytes: u64,
    /// Bytes that are pinned for the long term (`VmPin`).
    pub pinned_bytes: u64,
    /// Its limit on locked memory.
    pub limit: Limit,
    /// Bytes present by kind of area.
    pub kinds: Vec<KindReport>,
    /// Bytes present by the size of the folios (pages that the kernel keeps as one).
    pub folios: Vec<FolioReport>,
    /// Bytes present by what maps them: the size of an entry in the process's own tables.
    pub entries: Vec<FolioReport>,
    /// Bytes present by node; `None` is unknown.
    pub nodes: Vec<(Option<u32>, u64)>,
    /// The runs; `None` without frame numbers.
    pub runs: Option<RunsReport>,
    /// What mapping what is present would cost, by format; empty without frame numbers.
    pub costs: Vec<FormatCost>,
    /// How long pinning it would take here; `None` where that could not be tried.
    pub pin_ns: Option<u64>,
    /// Changes that would help, the best first.
    pub advice: Vec<Advice>,
    /// The areas with most that is present, largest first.
    pub areas: Vec<AreaReport>,
    /// What is present, by address and by the size of the entries that map it; the first of many.
    pub layout: Vec<Stretch>,
}

/// What there is of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KindReport {
    /// The kind.
    pub kind: AreaKind,
    /// Bytes present.
    pub bytes: u64,
}

/// Pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FolioReport {
    /// Bytes of one.
    pub page_bytes: u64,
    /// Bytes present in such.
    pub bytes: u64,
}

/// The runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunsReport {
    /// How many.
    pub count: u64,
    /// The largest, bytes.
    pub largest_bytes: u64,
    /// By size.
    pub classes: Vec<SizeClass>,
}

/// One area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AreaReport {
    /// What `/proc/PID/smaps` says.
    #[serde(flatten)]
    pub area: Area,
    /// Bytes that the page map shows.
    pub present_bytes: u64,
    /// Bytes that are mapped by huge entries.
    pub huge_bytes: u64,
    /// Runs in it; `None` without frame numbers.
    pub runs: Option<u64>,
}

/// Stretches that are listed.
const MOST_STRETCHES: usize = 1 << 16;
/// Areas that are listed.
const MOST_AREAS: usize = 24;

/// The formats whose cost is computed, and their levels.
fn formats() -> Vec<(FormatId, u8)> {
    let arm = ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 48,
        upper: false,
    };
    vec![
        (FormatId::VtdSs, 4),
        (FormatId::AmdV1, 4),
        (FormatId::X86_64, 4),
        (FormatId::ArmStage1(arm), 4),
        (FormatId::RiscV, 4),
    ]
}

/// Looks at the process `pid`. With `calibrate` it tries for a moment how fast this machine maps and
/// pins, to predict times.
///
/// # Errors
///
/// When there is no such process, it is not ours to look at, or it has no memory of its own.
pub fn inspect(pid: u32, calibrate: bool) -> Result<ProcessReport, InspectError> {
    let mut report = ProcessReport {
        pid,
        ..ProcessReport::default()
    };
    let all = process::read(&mut report)?;
    let mut areas: Vec<AreaReport> = Vec::new();
    let mut walk = Walk::new();
    match ProcessPages::open(pid) {
        Ok(pages) => {
            for area in all.iter().filter(|area| area.mappable) {
                let (found, error) = walk.area(&pages, area);
                areas.push(found);
                if let Err(error) = error {
                    report.missing.push(Missing {
                        what: "pages",
                        why: format!(
                            "the page map cannot be scanned, which takes Linux 6.7: {error}"
                        ),
                    });
                    break;
                }
            }
        }
        Err(error) => report.missing.push(Missing {
            what: "pages",
            why: format!("the page map cannot be opened, which takes CAP_SYS_PTRACE: {error}"),
        }),
    }
    report.virtual_bytes = all.iter().map(|area| area.bytes).sum();
    report.mappable_bytes = areas.iter().map(|area| area.area.bytes).sum();
    report.present_bytes = areas.iter().map(|area| area.present_bytes).sum();
    walk.finish(&mut report, calibrate);
    for area in &areas {
        match report
            .kinds
            .iter_mut()
            .find(|kind| kind.kind == area.area.kind)
        {
            Some(kind) => kind.bytes += area.present_bytes,
            None => report.kinds.push(KindReport {
                kind: area.area.kind,
                bytes: area.present_bytes,
            }),
        }
    }
    report
        .kinds
        .sort_by_key(|kind| std::cmp::Reverse(kind.bytes));
    process::nodes(&mut report, &all);
    report.advice = advice::advice(&report, &areas, &walk);
    areas.sort_by_key(|area| std::cmp::Reverse(area.present_bytes));
    areas.truncate(MOST_AREAS);
    report.areas = areas;
    report.ended = !process::alive(pid);
    Ok(report)
}

/// What is counted while the pages go by.
struct Walk {
    counters: Vec<Counter>,
    /// The same memory, if it were in pages of 2 MiB, and of 1 GiB.
    ideal: [Counter; 2],
    entries: Vec<FolioReport>,
    folios: folios::Folios,
    histogram: SizeHistogram,
    runs: u64,
    largest: u64,
    hidden: bool,
    last: Option<Run>,
    extent: Option<Span<Va>>,
    layout: Vec<Stretch>,
    /// Pages to pin, small and huge.
    pages: (u64, u64),
}

impl Walk {
    fn new() -> Self {
        let counter = |(format, levels)| Counter::new(format, levels, u64::MAX);
        let ideal = |most| Counter::new(FormatId::VtdSs, 4, most).unwrap_or_default();
        Self {
            counters: formats().into_iter().filter_map(counter).collect(),
            ideal: [ideal(2 << 20), ideal(1 << 30)],
            entries: Vec::new(),
            folios: folios::Folios::open(),
            histogram: SizeHistogram::new(),
            runs: 0,
            largest: 0,
            hidden: false,
            last: None,
            extent: None,
            layout: Vec::new(),
            pages: (0, 0),
        }
    }

    fn area(&mut self, pages: &ProcessPages, area: &Area) -> (AreaReport, io::Result<()>) {
        let mut found = AreaReport {
            area: area.clone(),
            present_bytes: 0,
            huge_bytes: 0,
            runs: Some(0),
        };
        let huge = area.page_bytes.max(2 << 20);
        let range = Span::new(area.address, area.bytes);
        let scanned = pages.for_each(range, huge, |run| {
            found.present_bytes += run.len;
            let page = if run.huge { huge } else { 4096 };
            add(&mut self.entries, page, run.len);
            if run.huge {
                found.huge_bytes += run.len;
                self.pages.1 += run.len.div_ceil(huge);
            } else {
                self.pages.0 += run.len / 4096;
            }
            self.extend(Span::new(run.address, run.len));
            self.lay(Span::new(run.address, run.len), page);
            match run.run() {
                None => (self.hidden, found.runs) = (true, None),
                Some(next) => {
                    let hugetlb = (area.page_bytes > 4096).then_some(area.page_bytes);
                    self.folios.add(next.pa, next.len, hugetlb, run.huge);
                    let begins = u64::from(self.join(next));
                    found.runs = found.runs.map(|runs| runs + begins);
                }
            }
        });
        (found, scanned)
    }

    /// Stretches of the address space that are there, whatever is behind them.
    fn extend(&mut self, next: Span<Va>) {
        match &mut self.extent {
            Some(extent) if extent.start + extent.len == next.start => extent.len += next.len,
            extent => {
                if let Some(done) = extent.replace(next) {
                    self.ideal.iter_mut().for_each(|counter| {
                        counter.add(Run::new(done.start, done.start, done.len))
                    });
                }
            }
        }
    }

    fn lay(&mut self, next: Span<Va>, leaf_bytes: u64) {
        let room = self.layout.len() < MOST_STRETCHES;
        match self.layout.last_mut() {
            Some(last)
                if last.leaf_bytes == leaf_bytes && last.iova + last.len_bytes == next.start =>
            {
                last.len_bytes += next.len;
            }
            _ if room => self.layout.push(Stretch {
                iova: next.start,
                len_bytes: next.len,
                leaf_bytes,
            }),
            _ => {}
        }
    }

    /// True when `next` begins a run.
    fn join(&mut self, next: Run) -> bool {
        match &mut self.last {
            Some(last) if last.iova + last.len == next.iova && last.pa + last.len == next.pa => {
                last.len += next.len;
                false
            }
            last => {
                let done = last.replace(next);
                self.count(done);
                true
            }
        }
    }

    fn count(&mut self, run: Option<Run>) {
        let Some(run) = run else { return };
        self.runs += 1;
        self.largest = self.largest.max(run.len);
        self.histogram.add(run.len, 1);
        self.counters
            .iter_mut()
            .for_each(|counter| counter.add(run));
    }

    fn finish(&mut self, report: &mut ProcessReport, calibrate: bool) {
        let (last, extent) = (self.last.take(), self.extent.take());
        self.count(last);
        if let Some(done) = extent {
            self.ideal
                .iter_mut()
                .for_each(|counter| counter.add(Run::new(done.start, done.start, done.len)));
        }
        report.entries = std::mem::take(&mut self.entries);
        report.layout = std::mem::take(&mut self.layout);
        if self.hidden {
            report.missing.push(Missing {
                what: "runs, leaves, folios",
                why: "the kernel shows frame numbers to CAP_SYS_ADMIN only (root)".into(),
            });
        } else if report.present_bytes > 0 {
            report.runs = Some(RunsReport {
                count: self.runs,
                largest_bytes: self.largest,
                classes: self
                    .histogram
                    .iter()
                    .map(|(from_bytes, class)| SizeClass {
                        from_bytes,
                        count: class.count,
                        bytes: class.bytes,
                    })
                    .collect(),
            });
            report.costs = self
                .counters
                .iter()
                .map(|counter| counter.cost(self.runs))
                .collect();
            match self.folios.take() {
                Ok(folios) => report.folios = folios,
                Err(missing) => report.missing.push(missing),
            }
        }
        if calibrate {
            calibrate::predict(report, self.pages);
        }
    }
}

/// Adds bytes to the class of a size.
fn add(classes: &mut Vec<FolioReport>, page_bytes: u64, bytes: u64) {
    let at = classes.partition_point(|class| class.page_bytes < page_bytes);
    match classes.get_mut(at) {
        Some(class) if class.page_bytes == page_bytes => class.bytes += bytes,
        _ => classes.insert(at, FolioReport { page_bytes, bytes }),
    }
}
