//! How long the kernel needs to map a virtual machine's memory for a device, and which change helps most.
//!
//! A machine that runs is read from `/proc`: how its memory is backed, what of it is present, which runs and
//! folios it has. The process is not stopped, so two parts may be of two moments. Holes cost nothing. For any
//! other process, all memory that it may write is reported. Figures that need a missing privilege are left out
//! and [named](Missing).
//!
//! Source: Linux `Documentation/filesystems/proc.rst`, `Documentation/admin-guide/mm/pagemap.rst`.

#![allow(
    unreachable_pub,
    reason = "`pub` is for other commands, tests and fuzz targets; the crate shows none of it"
)]

mod advice;
mod calibrate;
mod command;
mod conditions;
mod cost;
mod estimate;
mod folios;
mod guest;
pub(crate) mod needs;
mod process;
mod start;
mod text;

use std::path::Path;
use std::{fmt, io};

use hostmem::ProcessPages;
use iopt::FormatId;
use iopt::format::{ArmConfig, ArmGranule};
use runs::{Run, SizeHistogram, Span};
use serde::Serialize;
use thiserror::Error;

use crate::size::{SizeClass, classes};
use calibrate::Speeds;
use conditions::Conditions;
use cost::Counter;

pub use advice::Advice;
pub(crate) use command::{InspectArgs, run};
pub use cost::FormatCost;
pub use estimate::Estimate;
#[cfg(test)]
pub use guest::GivenDevice;
pub(crate) use guest::{BusPlace, begins, libvirt_rough, logged, memory_arguments, qemu_rough};
pub use guest::{
    DeviceDriver, Guest, Host, Interface, Monitor, Ram, Remapped, libvirt, of_areas, qemu_line,
};
pub use needs::{LockCounter, NeedsReport};
pub(crate) use process::MOST_TEXT;
pub use process::{Area, AreaKind, Limit, areas, node_bytes};
pub use start::StartReport;

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
        "process {pid} may not be inspected: it is another user's, or protected; this requires \
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
        /// Kind of process.
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

/// A missing figure, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// The figure.
    pub what: &'static str,
    /// Why, and what it takes.
    pub why: String,
}

/// Report about a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProcessReport {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// It ended while it was looked at: what is said is a part.
    pub ended: bool,
    /// Figures that are not known.
    pub missing: Vec<Missing>,
    /// Bytes of its address space.
    pub virtual_bytes: u64,
    /// The virtual machine that it runs.
    pub guest: Option<Guest>,
    /// Bytes of it that devices could be given: a virtual machine's memory, or all writable memory. The
    /// following fields are about these.
    pub mappable_bytes: u64,
    /// Bytes of that which are there: the rest would be brought in by pinning it.
    pub present_bytes: u64,
    /// Bytes beside a virtual machine's memory that may be written and are memory: heaps, stacks, firmware,
    /// video memory.
    pub rest_bytes: u64,
    /// Bytes of that which are there.
    pub rest_present_bytes: u64,
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
    /// Leaves and tables of this library for what is present, by format; empty without frame numbers.
    pub costs: Vec<FormatCost>,
    /// Needs of a device: of one that it has, or of one that is plugged in by type 1.
    pub needs: NeedsReport,
    /// How long the kernel needs to fault memory in, pin it and map it.
    pub start: Option<StartReport>,
    /// Changes that would help, the best first.
    pub advice: Vec<Advice>,
    /// The areas with most that is present, largest first.
    pub areas: Vec<AreaReport>,
}

/// Report about a virtual machine that does not run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ConfigurationReport {
    /// The machine.
    pub guest: Guest,
    /// Needs of its start.
    pub needs: NeedsReport,
    /// How long the kernel needs to fault memory in, pin it and map it.
    pub start: StartReport,
    /// Changes that would help, the best first.
    pub advice: Vec<Advice>,
}

/// Memory of one kind.
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
    /// Classes by size.
    pub classes: Vec<SizeClass>,
}

/// One area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AreaReport {
    /// The area, from `/proc/PID/smaps`.
    #[serde(flatten)]
    pub area: Area,
    /// Bytes that the page map shows.
    pub present_bytes: u64,
    /// Bytes that are mapped by huge entries.
    pub huge_bytes: u64,
    /// Runs in it; `None` without frame numbers.
    pub runs: Option<u64>,
}

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

/// Looks at the process `pid`. Times are predicted with `calibrate` only.
///
/// # Errors
///
/// When there is no such process, it is not ours to look at, or it has no memory of its own.
pub fn inspect(pid: u32, calibrate: bool) -> Result<ProcessReport, InspectError> {
    let host = Host::read();
    let mut report = ProcessReport {
        pid,
        ..ProcessReport::default()
    };
    let mut all = process::read(&mut report)?;
    report.guest = guest::of_process(pid, &mut all, host.default_pool);
    let all_of_it = report.guest.is_none();
    let given = |area: &Area| area.mappable && (all_of_it || area.guest_ram);
    let mut areas: Vec<AreaReport> = Vec::new();
    let mut walk = Walk::new();
    match ProcessPages::open(pid) {
        Ok(pages) => {
            for area in all.iter().filter(|area| area.mappable) {
                let error = match given(area) {
                    true => {
                        let (found, error) = walk.area(&pages, area);
                        areas.push(found);
                        error
                    }
                    false => {
                        report.rest_bytes += area.bytes;
                        let span = Span::new(area.address, area.bytes);
                        let rest = &mut report.rest_present_bytes;
                        pages.for_each(span, area.page_bytes.max(2 << 20), |run| *rest += run.len)
                    }
                };
                if let Err(error) = error {
                    report.missing.push(Missing {
                        what: "pages",
                        why: format!(
                            "the page map cannot be scanned, which needs Linux 6.7: {error}"
                        ),
                    });
                    break;
                }
            }
        }
        Err(error) => report.missing.push(Missing {
            what: "pages",
            why: format!("the page map cannot be opened, which needs CAP_SYS_PTRACE: {error}"),
        }),
    }
    report.virtual_bytes = all.iter().map(|area| area.bytes).sum();
    report.mappable_bytes = areas.iter().map(|area| area.area.bytes).sum();
    report.present_bytes = areas.iter().map(|area| area.present_bytes).sum();
    walk.finish(&mut report);
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
    all.retain(given);
    process::nodes(&mut report, &all);
    predict(&mut report, &areas, &host, calibrate);
    report.needs = NeedsReport::of_process(&report, Path::new("/"));
    report.advice.splice(0..0, report.needs.advice());
    areas.sort_by_key(|area| std::cmp::Reverse(area.present_bytes));
    areas.truncate(MOST_AREAS);
    report.areas = areas;
    report.ended = !process::alive(pid);
    Ok(report)
}

/// Predicts for a machine that does not run.
pub fn configured(mut guest: Guest, host: &Host, calibrate: bool) -> ConfigurationReport {
    host.look_at_files(&mut guest);
    let speeds = calibrate.then(Speeds::try_here).flatten();
    let (mut start, changes) = StartReport::of(&guest, host, None, speeds.as_ref());
    start.under(Conditions::read(&guest, host, 1.0));
    let needs = NeedsReport::of(&guest, Path::new("/"));
    let mut advice = needs.advice();
    advice.extend(changes);
    ConfigurationReport {
        guest,
        needs,
        start,
        advice,
    }
}

/// Predicts for the virtual machine's memory; for that of another process as far as it is present.
fn predict(report: &mut ProcessReport, areas: &[AreaReport], host: &Host, calibrate: bool) {
    let missing = report.mappable_bytes.saturating_sub(report.present_bytes);
    let (guest, missing) = match &report.guest {
        Some(guest) => (
            guest.clone(),
            missing as f64 / report.mappable_bytes.max(1) as f64,
        ),
        None => (process_as_guest(areas), 0.0),
    };
    let runs = report.runs.as_ref().map_or(0, |runs| runs.count);
    let guest = Guest { runs, ..guest };
    let speeds = calibrate.then(Speeds::try_here).flatten();
    let (mut start, advice) = StartReport::of(&guest, host, Some(missing), speeds.as_ref());
    start.under(Conditions::read(&guest, host, missing));
    (report.start, report.advice) = (Some(start), advice);
}

/// Memory of a process that is present, in pages of its size.
fn process_as_guest(areas: &[AreaReport]) -> Guest {
    let parts = areas.iter().flat_map(|found| {
        let area = &found.area;
        let part = |bytes, huge| Ram {
            bytes,
            pool_bytes: (area.page_bytes > 4096).then_some(area.page_bytes),
            shared: area.shared,
            asks_for_huge: Some(huge),
            ..Ram::default()
        };
        [
            part(found.huge_bytes, true),
            part(found.present_bytes - found.huge_bytes, false),
        ]
    });
    Guest {
        memory: parts.filter(|part| part.bytes > 0).collect(),
        ..Guest::default()
    }
}

impl ProcessReport {
    /// Bytes that VFIO charges: all memory of a virtual machine; of another process what is present.
    fn charged_bytes(&self) -> u64 {
        match self.guest {
            Some(_) => self.mappable_bytes,
            None => self.present_bytes,
        }
    }
}

/// Counts of a pass over the pages.
struct Walk {
    counters: Vec<Counter>,
    entries: Vec<FolioReport>,
    folios: folios::Folios,
    histogram: SizeHistogram,
    runs: u64,
    largest: u64,
    hidden: bool,
    last: Option<Run>,
}

impl Walk {
    fn new() -> Self {
        let counter = |(format, levels)| Counter::new(format, levels);
        Self {
            counters: formats().into_iter().filter_map(counter).collect(),
            entries: Vec::new(),
            folios: folios::Folios::open(),
            histogram: SizeHistogram::new(),
            runs: 0,
            largest: 0,
            hidden: false,
            last: None,
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
            }
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

    fn finish(&mut self, report: &mut ProcessReport) {
        let last = self.last.take();
        self.count(last);
        report.entries = std::mem::take(&mut self.entries);
        if self.hidden {
            report.missing.push(Missing {
                what: "runs, leaves, folios",
                why: "the kernel shows frame numbers to CAP_SYS_ADMIN only (root)".into(),
            });
        } else if report.present_bytes > 0 {
            report.runs = Some(RunsReport {
                count: self.runs,
                largest_bytes: self.largest,
                classes: classes(&self.histogram),
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
