//! The document: figures as tables, aims met and missed, conditions, plots, how to repeat.
//!
//! Everything in it comes from [`Results`], from the rows and from the reasons; nothing is written by
//! hand. Figures are medians; the first table also has the spread of samples where it is large.

mod groups;
mod series;
mod summary;

use std::fmt::Write as _;

use crate::peers::field::{CONTESTS, Who};
use crate::peers::results::{Entry, Measured, Results};
use crate::peers::rows::{Aim, ROWS, Row};

/// What stands where Linux's figures would.
const NOT_MEASURED: &str = "not measured";
/// What misses an aim by less is near it.
const LENIENT: f64 = 1.5;
/// A spread of samples that is shown.
const SPREAD: f64 = 0.025;

/// Path and content of every file, below the directory of documents.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let mut files = vec![("performance.md".to_owned(), document(results))];
    for (name, plot) in series::plots(results) {
        if let Some(svg) = plot.svg() {
            files.push((format!("performance/{name}.svg"), svg));
        }
    }
    files
}

/// The document.
pub fn document(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, results);
    text
}

fn write(text: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(
        text,
        "# Performance\n\n\
         *Written by `cargo xtask bench-tables`; do not edit.*\n\n\
         Times of `dmaspace-iopt`'s page tables beside the machine's limit (a loop that stores the same \
         entries), Linux's code and foreign crates, measured in one run. Figures are medians of {} samples, taken \
         in turns. Compare ratios: absolute figures differ from machine to machine.\n",
        results.rounds
    )?;
    summary::write(text, results)?;
    series::write(text, results)?;
    groups::write(text, &results.groups)?;
    conditions(text)?;
    origin(text, results)
}

fn conditions(text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "## Conditions\n\n\
         A batch is timed, and its time divided by its operations: 64 single pages, every second one; 8 ranges of \
         up to 512 pages, each in the lower half of a table of its own; one larger range. Undoing is not timed, and a \
         sample that does not count precedes each. Table memory is recycled and its pages are dirty; zeroing them, where \
         needed, is timed. Our unmaps make a gather, have it flushed by a unit that does nothing, return runs, and \
         give tables back. 4K and 2M stand for each format's own sizes.\n\n\
         | name | conditions |\n|---|---|"
    )?;
    for row in ROWS {
        writeln!(
            text,
            "| `{}` | {}{}{} |",
            row.id,
            row.conditions,
            if row.remark.is_empty() { "" } else { ". " },
            row.remark
        )?;
    }
    writeln!(text)
}

fn origin(text: &mut String, results: &Results) -> std::fmt::Result {
    let origin = &results.origin;
    writeln!(
        text,
        "## Machine, and how to repeat\n\n\
         | | |\n|---|---|\n\
         | processor | {}, {} processors |\n\
         | load before (1, 5, 15 minutes) | {} |\n\
         | commit | `{}` |\n\
         | compiler | {} |\n\
         | Linux's code, 7.2, compiled by | {} |\n\
         | date, UTC | {} |\n\n\
         ```\n\
         cargo xtask bench-tables                       # everything; rewrites this document\n\
         cargo xtask bench-tables --only map-256/x86-64 # some rows, printed only\n\
         ```",
        origin.processor,
        origin.processors,
        origin.load,
        origin.commit,
        origin.rustc,
        origin.linux.as_deref().unwrap_or(NOT_MEASURED),
        origin.date
    )
}

/// How a figure stands to its aim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// At it or better.
    Met,
    /// Within what every format is allowed.
    Near,
    /// Neither.
    Missed,
}

impl Standing {
    /// Of a figure to an aim.
    pub(crate) fn of(figure: f64, aim: f64) -> Self {
        match figure / aim {
            ratio if ratio <= 1.0 => Self::Met,
            ratio if ratio <= LENIENT => Self::Near,
            _ => Self::Missed,
        }
    }
}

/// A row as it was measured in one format.
#[derive(Clone, Copy)]
pub(crate) struct Shown<'a> {
    row: &'static Row,
    measured: &'a Measured,
    results: &'a Results,
}

impl<'a> Shown<'a> {
    /// `None` when it was not measured there.
    fn find(results: &'a Results, row: &'static Row, format: &str) -> Option<Self> {
        let here = |measured: &&Measured| measured.row == row.id && measured.format == format;
        let measured = results.rows.iter().find(here)?;
        Some(Self {
            row,
            measured,
            results,
        })
    }

    /// The fastest of those who are this to us.
    fn best(&self, who: Who) -> Option<&'a Entry> {
        fastest(
            self.measured
                .entries
                .iter()
                .filter(move |entry| entry.who == who),
        )
    }

    /// The median of the fastest, nanoseconds.
    fn time(&self, who: Who) -> Option<f64> {
        self.best(who).map(|entry| entry.figure.median)
    }

    /// What is aimed at for one of our forms, nanoseconds.
    fn aim(&self, who: Who) -> Option<f64> {
        match self.row.aim(who) {
            Aim::Limit(factor) => Some(self.time(Who::Limit)? * factor),
            Aim::Linux(factor) => Some(self.time(Who::Linux)? * factor),
            Aim::ByHand(factor) => {
                // The walk by hand is there for the reference; other formats are held against it.
                let by_hand = |id: &str| Self::find(self.results, self.row, id)?.time(Who::ByHand);
                let reference = CONTESTS.iter().find(|c| c.reference)?;
                let walk = by_hand(&self.measured.format).or_else(|| by_hand(reference.id))?;
                Some(walk * factor)
            }
        }
    }

    /// A time in the row's unit.
    fn show(&self, time: Option<f64>) -> String {
        time.map_or_else(|| "–".to_owned(), |time| figure(time / self.row.unit))
    }

    /// A figure in the row's unit; beside it half of the middle half of its samples, where that is large.
    fn spread(&self, entry: Option<&Entry>) -> String {
        let Some(Entry { figure: found, .. }) = entry else {
            return "–".to_owned();
        };
        let half = (found.upper - found.lower) / 2.0 / found.median;
        let time = self.show(Some(found.median));
        match half {
            half if half < SPREAD => time,
            half => format!("{time} ± {:.0} %", 100.0 * half),
        }
    }

    /// The title with its unit.
    fn title(&self) -> String {
        let unit = if self.row.unit > 1.0 { "µs" } else { "ns" };
        format!("{}, {unit}", self.row.title)
    }
}

/// The fastest of all.
fn fastest<'a>(entries: impl Iterator<Item = &'a Entry>) -> Option<&'a Entry> {
    entries.min_by(|a, b| a.figure.median.total_cmp(&b.figure.median))
}

/// A number with as many digits as mean something.
fn figure(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// A ratio; a dash where one of the two is missing.
fn ratio(of: Option<f64>, to: Option<f64>) -> String {
    match (of, to) {
        (Some(of), Some(to)) if to > 0.0 => format!("{}×", figure(of / to)),
        _ => "–".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
