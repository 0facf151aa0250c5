//! Needs of a start before it starts: pages of pools, locked memory, mappings and addresses, beside what the host has.
//!
//! [`need`] computes them from a [`Guest`]; [`host`] reads the host; [`compare`] names what is short, of whom, by how much
//! and how it is raised. `explain` compares facts of files by the same rules.

mod compare;
mod host;
mod need;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Serialize;

use crate::pool;

use super::ProcessReport;
use super::advice::Advice;
use super::guest::{Guest, Interface, Ram};

pub(crate) use compare::{
    LARGE_BAR, bars, layout, locked, mappings, page_by_page, pools as short_pools, raise,
};
pub(crate) use host::{Available, CountedPool, LockLimit, LockOwner, counted_pools};
pub use need::{GuestRange, LockCounter, Pieces};
pub(crate) use need::{LockNeed, pools as pool_needs};

/// Needs, what is there, and what is short.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NeedsReport {
    /// Pages of pools; none of a machine that runs, which has its own.
    pub pools: Vec<PoolReport>,
    /// Locked memory; `None` where no device is given.
    pub locked: Option<LockReport>,
    /// Mappings of a container; `None` with iommufd, which has no limit.
    pub mappings: Option<MappingsReport>,
    /// Guest addresses of RAM; empty where the machine's layout is not known.
    pub ram: Vec<GuestRange>,
    /// Ranges that the groups of the given devices keep from being mapped; 0 is unknown, as each group has one.
    pub reserved_ranges: usize,
    /// The last address that the units of the given devices translate; `None` is unknown.
    #[serde(serialize_with = "address")]
    pub last_address: Option<u64>,
    /// Large BARs of the given devices.
    pub bars: Vec<BarReport>,
    /// Findings: needs that are short.
    pub findings: Vec<NeedFinding>,
}

/// Pages of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolReport {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Nodes that they must be from; empty where any will do.
    pub nodes: Vec<u32>,
    /// Pages that are needed.
    pub needed_pages: u64,
    /// Free pages there, without those that are promised; `None` is unknown.
    pub free_pages: Option<u64>,
    /// Pages by which the pool may grow when they are asked for (`nr_overcommit_hugepages`).
    pub growth_pages: u64,
    /// Pages that are missing there, or for all that is from this pool together.
    pub missing_pages: u64,
}

/// Locked memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LockReport {
    /// The counter of the kernel.
    pub counter: LockCounter,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// Address spaces that count it.
    pub address_spaces: u64,
    /// Memory that the monitor locks by itself, which counts besides.
    pub mlocked_bytes: u64,
    /// All of these together.
    pub needed_bytes: u64,
    /// It is counted at the start, and not as the guest shares pages or a mediated device pins them.
    pub at_start: bool,
    /// The owner of the limit; `None` where no limit is known.
    pub limit_of: Option<&'static str>,
    /// The limit; `None` where there is none, or it is not known.
    pub limit_bytes: Option<u64>,
}

/// Mappings of a container of type 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MappingsReport {
    /// For RAM, at the start.
    pub ram: u64,
    /// Memory that is mapped in pieces.
    pub pieces: Vec<Pieces>,
    /// As many as there can be.
    pub limit: u64,
}

/// A large BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BarReport {
    /// The device.
    pub device: String,
    /// Its bytes.
    pub bytes: u64,
}

/// Something that is short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NeedFinding {
    /// The cause, by its name in `docs/explain.md`.
    pub cause: &'static str,
    /// It depends on more than is known.
    #[serde(rename = "certainty", serialize_with = "certainty")]
    pub likely: bool,
    /// In a few words.
    pub title: String,
    /// One or two sentences.
    pub text: String,
    /// The devices that it concerns.
    pub devices: Vec<String>,
    /// Ranges of addresses, first and last one.
    #[serde(serialize_with = "addresses")]
    pub addresses: Vec<(u64, u64)>,
    /// Remedies.
    #[serde(serialize_with = "remedies")]
    pub advice: Vec<Remedy>,
    /// Document and section, or file and function, that the rule is from.
    pub source: &'static str,
    /// The number of the reserved range that it is about.
    #[serde(skip)]
    pub reserved: Option<usize>,
}

/// Something that helps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// A pool gets so many pages more.
    Raise {
        /// Its file.
        file: String,
        /// Pages.
        pages: u64,
    },
    /// A setting, a command or a sentence.
    Line(String),
}

impl Remedy {
    pub(crate) fn line(text: impl Into<String>) -> Self {
        Self::Line(text.into())
    }

    /// Lines to be copied.
    fn lines(&self) -> Vec<String> {
        match self {
            Self::Raise { file, pages } => pool::raise(file, *pages).into(),
            Self::Line(line) => vec![line.clone()],
        }
    }

    /// The same in one sentence.
    pub(crate) fn sentence(&self) -> String {
        match self {
            Self::Raise { file, pages } => format!("Raise {file} by {pages}."),
            Self::Line(line) => line.clone(),
        }
    }
}

impl NeedsReport {
    /// Compares the needs of a guest that does not run with this machine; `root` is `/`.
    pub(super) fn of(guest: &Guest, root: &Path) -> Self {
        Self::with(guest, &Available::read(root, guest, None))
    }

    /// The same of a process: its pages are its own already, and any device is given by type 1 where none is.
    pub(super) fn of_process(process: &ProcessReport, root: &Path) -> Self {
        let mut guest = process.guest.clone().unwrap_or_else(|| Guest {
            memory: vec![Ram {
                bytes: process.present_bytes,
                ..Ram::default()
            }],
            ..Guest::default()
        });
        guest.interface = guest.interface.or(Some(Interface::Type1));
        let available = Available::read(root, &guest, Some(process.pid));
        let mut report = Self::with(&guest, &available);
        report.pools.clear();
        let pages = |finding: &NeedFinding| finding.cause.starts_with("pages.");
        report.findings.retain(|finding| !pages(finding));
        report.findings.extend(compare::spread(&process.nodes));
        report
    }

    fn with(guest: &Guest, available: &Available) -> Self {
        let needs = pool_needs(guest);
        let mut findings = short_pools(&needs, available);
        findings.extend(compare::cgroups(guest, available));
        let lock = LockNeed::of(guest);
        findings.extend(lock.and_then(|need| locked(&need, guest, available)));
        findings.extend(mappings(guest, available));
        findings.extend(layout(guest, available));
        findings.extend(bars(guest, available));
        let of_size = |page: u64| {
            let needs = needs.iter().filter(move |need| need.page_bytes == page);
            needs.fold(0u64, |sum, need| sum.saturating_add(need.pages))
        };
        let pool = |need: &need::PoolNeed| {
            let page = need.page_bytes;
            let growth = available.growth(page);
            let missing = |pages: u64, free: Option<u64>| {
                free.map_or(0, |free| pages.saturating_sub(free.saturating_add(growth)))
            };
            let free = available.free(page, &need.nodes);
            PoolReport {
                free_pages: free,
                growth_pages: growth,
                missing_pages: missing(need.pages, free)
                    .max(missing(of_size(page), available.free(page, &[]))),
                page_bytes: page,
                needed_pages: need.pages,
                nodes: need.nodes.clone(),
            }
        };
        let limit = available.lock.as_ref();
        let lock = lock.map(|need| LockReport {
            counter: need.counter,
            memory_bytes: need.memory_bytes,
            address_spaces: need.times,
            mlocked_bytes: need.mlocked_bytes,
            needed_bytes: need.counted_bytes(),
            at_start: need.at_start,
            limit_of: limit.map(|limit| limit.of.name()),
            limit_bytes: limit.and_then(|limit| limit.in_force(&need)),
        });
        let type1 = guest.interface == Some(Interface::Type1);
        Self {
            pools: needs.iter().map(pool).collect(),
            locked: lock,
            mappings: type1.then(|| MappingsReport {
                ram: need::mappings(guest),
                pieces: need::pieces(guest),
                limit: available.mapping_limit(),
            }),
            ram: available.ranges(guest),
            reserved_ranges: available.reserved.len(),
            last_address: available.last,
            bars: compare::large(available)
                .map(|(device, bytes)| BarReport {
                    device: device.clone(),
                    bytes: *bytes,
                })
                .collect(),
            findings,
        }
    }

    /// The findings as advice of a report.
    pub(super) fn advice(&self) -> Vec<Advice> {
        let advice = self.findings.iter().map(|finding| Advice {
            finding: finding.title.clone(),
            setting: finding.advice.iter().flat_map(Remedy::lines).collect(),
            assumes: Vec::new(),
            reboot: false,
            estimate: None,
            saved_ns: None,
            pages: None,
        });
        advice.collect()
    }
}

fn certainty<S: serde::Serializer>(likely: &bool, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(if *likely { "likely" } else { "certain" })
}

fn address<S: serde::Serializer>(address: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    match address {
        Some(address) => to.serialize_str(&format!("{address:#x}")),
        None => to.serialize_none(),
    }
}

fn addresses<S: serde::Serializer>(ranges: &[(u64, u64)], to: S) -> Result<S::Ok, S::Error> {
    let hex = |(first, last): &(u64, u64)| [format!("{first:#x}"), format!("{last:#x}")];
    to.collect_seq(ranges.iter().map(hex))
}

fn remedies<S: serde::Serializer>(remedies: &[Remedy], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(remedies.iter().flat_map(Remedy::lines))
}
