//! Results of a run, as JSON: everything that the document is made of.

use std::fs;
use std::process::Command;

use serde::Serialize;

use crate::peers::field::Who;
use crate::peers::stats::Figure;

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Results {
    /// Where and when.
    pub origin: Origin,
    /// Rounds in which all subjects take turns.
    pub rounds: u32,
    /// Rows, format by format.
    pub rows: Vec<Measured>,
    /// Time by size: bytes, nanoseconds of the whole operation.
    pub sizes: Vec<Curve>,
    /// Rate by number of threads: operations a second of all together.
    pub threads: Vec<Curve>,
    /// The same unmap in formats with and without groups.
    pub groups: Groups,
}

/// The same unmap in several formats, all of them taking turns: machines have fast and slow hours,
/// which the ratio of rows that are measured one after the other does not survive.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Groups {
    /// The commit that was measured.
    pub commit: String,
    /// Rows by format; the first has no groups.
    pub rows: Vec<Measured>,
}

/// Where and when a run was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The processor's name.
    pub processor: String,
    /// Processors that the program could use.
    pub processors: usize,
    /// The system's load before the run.
    pub load: String,
    /// The commit, with a `+` where files were changed.
    pub commit: String,
    /// The compiler.
    pub rustc: String,
    /// The compilers of Linux's code; `None` where that was not measured.
    pub linux: Option<String>,
    /// Day and hour, UTC.
    pub date: String,
}

/// One row in one format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The row.
    pub row: String,
    /// The format.
    pub format: String,
    /// The work, as the program names it.
    pub work: String,
    /// All who do it; nanoseconds.
    pub entries: Vec<Entry>,
}

/// A subject's figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Role of the subject.
    pub who: Who,
    /// Its name.
    pub name: String,
    /// Nanoseconds of one operation.
    pub figure: Figure,
}

/// A line of a plot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// The operation, or where threads work.
    pub operation: String,
    /// The format.
    pub format: String,
    /// Role of the subject.
    pub who: Who,
    /// The subject's name.
    pub name: String,
    /// The points, from left to right.
    pub points: Vec<Point>,
}

/// A point of a line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Value of the parameter that is varied.
    pub x: f64,
    /// The measured figure.
    pub figure: Figure,
}

impl Results {
    /// Nothing measured yet, here and now; `linux` names the compilers of Linux's code.
    pub fn here(rounds: u32, linux: Option<String>) -> Self {
        Self {
            origin: Origin {
                linux,
                ..Origin::here()
            },
            rounds,
            rows: Vec::new(),
            sizes: Vec::new(),
            threads: Vec::new(),
            groups: Groups::default(),
        }
    }
}

impl Origin {
    /// Here and now, without Linux. Values that cannot be found out are reported as unknown.
    pub fn here() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load: Vec<&str> = load.split_whitespace().take(3).collect();
        // The document and its plots are what a run makes: they are not a change to what is measured.
        let changed = [
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":!docs",
        ];
        let changed = said("git", &changed).is_none_or(|files| !files.is_empty());
        let commit = said("git", &["rev-parse", "--short=12", "HEAD"]);
        let commit = commit.unwrap_or_else(unknown) + if changed { "+" } else { "" };
        Self {
            processor: model.map_or_else(unknown, |model| {
                model.trim_start_matches([' ', '\t', ':']).to_owned()
            }),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            load: load.join(" "),
            commit,
            rustc: said("rustc", &["--version"]).unwrap_or_else(unknown),
            linux: None,
            date: said("date", &["-u", "+%Y-%m-%d %H:%M"]).unwrap_or_else(unknown),
        }
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// Output of a program, without the line's end; `None` where it fails.
pub(crate) fn said(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Bytes of memory that can still be had, as the kernel says; 0 where it does not.
pub fn available_memory() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
