//! Results: rows of figures, and the lines that people read.

use std::fmt;

use serde::Serialize;

use super::figure::Figure;
use super::host::Host;
use super::origin::{self, Published};

/// Figures that are measured together: one origin's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Pinning, accounting and mapping real memory (origin 1).
    Pin,
    /// Mapping and unmapping by many threads, with invalidation (origin 2).
    Map,
    /// Inflating a balloon (origin 3).
    Balloon,
    /// The operations of page tables, by format (origin 4).
    Tables,
    /// Tables on memory nodes (origin 5).
    Numa,
}

impl Group {
    /// All of them, by origin.
    pub const ALL: [Self; 5] = [
        Self::Pin,
        Self::Map,
        Self::Balloon,
        Self::Tables,
        Self::Numa,
    ];

    /// The name, as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pin => "pin",
            Self::Map => "map",
            Self::Balloon => "balloon",
            Self::Tables => "tables",
            Self::Numa => "numa",
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Subject of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// Published by the origin, before its change.
    OriginBefore,
    /// Published by the origin, after its change.
    OriginAfter,
    /// Measured here: page by page.
    ByPage,
    /// Measured here: charged by page, mapped by run.
    ChargeByPage,
    /// Measured here: charged by folio, mapped by run.
    ByFolio,
    /// Measured here: loops that store as many entries and do nothing else.
    Stores,
    /// Measured here: this project, by runs.
    Dmaspace,
    /// Simulated: one table for all nodes.
    SharedSimulated,
    /// Simulated: a table on each node, as this project places them.
    PerNodeSimulated,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Unit {
    /// Nanoseconds for one operation.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// Microseconds for one operation.
    #[serde(rename = "us")]
    Microseconds,
    /// Milliseconds for the whole.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Gigabytes (10^9) a second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// How many, for the whole.
    #[serde(rename = "count")]
    Count,
}

impl Unit {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "µs",
            Self::Milliseconds => "ms",
            Self::GigabytesPerSecond => "GB/s",
            Self::Count => "count",
        }
    }

    /// How many times better `after` is than `before`.
    fn better(self, before: f64, after: f64) -> f64 {
        match self {
            Self::GigabytesPerSecond => after / before,
            _ => before / after,
        }
    }
}

/// Identity of a figure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Key {
    /// The group.
    pub group: Group,
    /// The operation.
    pub op: &'static str,
    /// The kind of memory, where there is any: `thp`.
    pub memory: &'static str,
    /// The format of tables or of messages.
    pub format: &'static str,
    /// The subject.
    pub subject: Subject,
    /// Threads at the same time.
    pub threads: u32,
    /// Bytes that one operation handles.
    pub size_bytes: u64,
    /// The unit.
    pub unit: Unit,
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The identity of the figure.
    #[serde(flatten)]
    pub key: Key,
    /// The figure.
    #[serde(flatten)]
    pub figure: Figure,
}

/// Results of one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupReport {
    /// The group.
    pub group: Group,
    /// How it was measured, and what has to be said of it.
    pub notes: Vec<String>,
    /// Measurements that were not run, and the reasons.
    pub not_run: Vec<NotRun>,
    /// The figures.
    pub rows: Vec<Row>,
}

/// Something that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotRun {
    /// The measurement.
    pub what: String,
    /// Why not.
    pub why: String,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// On what.
    pub machine: Host,
    /// Smaller sizes and fewer rounds.
    pub quick: bool,
    /// The groups, in the order in which they were asked for.
    pub groups: Vec<GroupReport>,
}

/// One line of an origin's table: what was published, and what was measured here beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line<'a> {
    /// Op, memory, format, threads, size and unit are those of the line.
    pub key: &'a Key,
    /// The origin's figures for it.
    pub origin: Option<(Option<f64>, Option<f64>)>,
    /// Page by page, or with one table for all nodes; of pins, charged by page and mapped by run.
    pub before: Option<&'a Figure>,
    /// For pins: charged by folio and mapped by run.
    pub by_folio: Option<&'a Figure>,
    /// For pins: charged and mapped by page.
    pub all_by_page: Option<&'a Figure>,
    /// The loop of stores.
    pub stores: Option<&'a Figure>,
    /// This project.
    pub after: Option<&'a Figure>,
}

impl Line<'_> {
    /// How many times better this project is than by folio where that was measured, and than page by page
    /// elsewhere, by the medians.
    pub fn ratio(&self) -> Option<f64> {
        let (before, after) = (self.by_folio.or(self.before)?.median, self.after?.median);
        let ratio = self.key.unit.better(before, after);
        ratio.is_finite().then_some(ratio)
    }
}

impl GroupReport {
    /// A group of which nothing is known yet.
    pub(super) const fn new(group: Group) -> Self {
        Self {
            group,
            notes: Vec::new(),
            not_run: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// The lines, one for each combination that was measured, in order.
    pub fn lines(&self) -> Vec<Line<'_>> {
        let published = origin::published(self.group);
        let mut lines: Vec<Line<'_>> = Vec::new();
        for row in &self.rows {
            let key = &row.key;
            let is_origin = matches!(key.subject, Subject::OriginBefore | Subject::OriginAfter);
            // The page-by-page way of others has no format of its own: it stands beside each.
            if is_origin || key.subject == Subject::ByPage && key.format.is_empty() {
                continue;
            }
            if !lines.iter().any(|line| line.key.is_beside(key)) {
                lines.push(self.line(key, &published));
            }
        }
        lines
    }

    fn line<'a>(&'a self, key: &'a Key, published: &[Published]) -> Line<'a> {
        let find = |subjects: &[Subject]| {
            let beside = |row: &&Row| subjects.contains(&row.key.subject) && row.key.is_beside(key);
            self.rows.iter().find(beside).map(|row| &row.figure)
        };
        let without_format = || {
            let row = self.rows.iter().find(|row| {
                let other = &row.key;
                let same = (other.op, other.memory, other.threads, other.size_bytes);
                other.subject == Subject::ByPage
                    && other.format.is_empty()
                    && same == (key.op, key.memory, key.threads, key.size_bytes)
            });
            row.map(|row| &row.figure)
        };
        let origin = published.iter().find(|published| published.is_of(key));
        let by_page = find(&[Subject::ByPage]);
        let (before, all_by_page) = match self.group {
            Group::Pin => (find(&[Subject::ChargeByPage]), by_page),
            _ => (
                by_page
                    .or_else(|| find(&[Subject::SharedSimulated]))
                    .or_else(without_format),
                None,
            ),
        };
        Line {
            key,
            origin: origin.map(|published| (published.before, published.after)),
            before,
            by_folio: find(&[Subject::ByFolio]),
            all_by_page,
            stores: find(&[Subject::Stores]),
            after: find(&[Subject::Dmaspace, Subject::PerNodeSimulated]),
        }
    }
}

impl Key {
    /// The same but for who did it.
    fn is_beside(&self, other: &Self) -> bool {
        let of = |key: &Self| (key.op, key.memory, key.format, key.threads, key.size_bytes);
        of(self) == of(other)
    }
}

impl Published {
    fn is_of(&self, key: &Key) -> bool {
        let either = |ours: &str, theirs: &str| ours.is_empty() || ours == theirs;
        self.op == key.op
            && key.memory != origin::SCATTERED
            && either(self.memory, key.memory)
            && either(self.format, key.format)
            && self.threads == key.threads
            && (self.size_bytes == 0 || self.size_bytes == key.size_bytes)
    }

    /// As rows.
    pub(super) fn rows(&self) -> impl Iterator<Item = Row> + use<> {
        let of = |subject| Key {
            group: self.group,
            op: self.op,
            memory: self.memory,
            format: self.format,
            subject,
            threads: self.threads,
            size_bytes: self.size_bytes,
            unit: self.unit,
        };
        let before = self.before.map(|value| (of(Subject::OriginBefore), value));
        let after = self.after.map(|value| (of(Subject::OriginAfter), value));
        before.into_iter().chain(after).map(|(key, value)| Row {
            key,
            figure: Figure::published(value),
        })
    }
}
