//! `dmaspace explain`: from what an engineer has at hand, logs, tables, listings and configurations of any machine,
//! to the cause and the setting that helps.
//!
//! [`input`] opens files, folders, archives and compressed texts; [`read`] turns lines and tables into [`facts`],
//! faults into [`folds`]; [`rules`] turn facts into [`finding`]s; [`text`] prints them. Rules see facts and never
//! text, so that a cause never depends on the spelling of a line.

mod facts;
mod finding;
mod folds;
mod input;
mod line;
mod read;
mod rules;
mod text;

use std::io::{self, IsTerminal as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::draw::sheet::Paint;
use crate::{exit, json, print, refuse};

use facts::Facts;
use finding::{Report, plain};
use input::{Input, Progress};

pub(crate) const ABOUT: &str = "Explains faults of IOMMUs and failed starts of virtual machines: reads kernel logs, lines of VFIO, QEMU, \
     libvirt and other monitors, /proc/iomem, /proc/cmdline, lspci, listings of groups, reserved regions and huge \
     pages, ACPI tables, dumps of I/O page tables, QEMU's command lines, libvirt's XML and memory layouts, in any \
     mixture, compressed, in folders and archives, from any machine. Reports each cause that the input shows, how \
     certain it is, its evidence, and the setting or command that helps.\n\n\
     Requires no privilege, and changes nothing. What is not recognized is named.\n\n\
     Exit status: 0, also when something was found; 2 when a file cannot be opened.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     sudo dmesg | dmaspace explain\n  \
     dmaspace explain dmesg.txt groups.txt lspci.txt\n  \
     dmaspace explain sosreport.tar.xz --json | jq '.findings[0]'\n  \
     dmaspace explain error.txt domain.xml";

/// How often progress is shown.
const PROGRESS: Duration = Duration::from_millis(200);

/// The options of `dmaspace explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Files, folders and archives; without any, or with -, standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Print the report as JSON
    ///
    /// Causes and names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.findings[].cause'
    #[arg(long)]
    json: bool,
}

/// `dmaspace explain`.
pub(crate) fn run(args: &ExplainArgs) -> u8 {
    match explain(args) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

fn explain(args: &ExplainArgs) -> anyhow::Result<()> {
    let bar = io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{spinner} {msg}: {bytes}, {bytes_per_sec}");
        let bar = ProgressBar::new_spinner();
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
    });
    let mut shown = Instant::now();
    let mut progress = |file: &str, bytes: u64| {
        if let Some(bar) = bar.as_ref().filter(|_| shown.elapsed() > PROGRESS) {
            shown = Instant::now();
            bar.set_message(file.to_owned());
            bar.set_position(bytes);
        }
    };
    let mut input = Input::new(&mut progress);
    if args.files.is_empty() {
        input.stream("standard input", io::stdin().lock());
    }
    for path in &args.files {
        if path.as_os_str() == "-" {
            input.stream("standard input", io::stdin().lock());
        } else {
            input.path(path)?;
        }
    }
    let report = report(input.facts, input.files);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    print(&if args.json {
        json(&report)?
    } else {
        text::report(&report, Paint::for_stdout())
    })
}

/// Explains any bytes as one file; for the fuzz target, which looks at what is printed.
pub fn explain_bytes(name: &str, bytes: &[u8]) -> (String, String) {
    let mut progress = |_: &str, _: u64| {};
    let report = of_bytes(name, bytes, &mut progress);
    let printed = text::report(&report, Paint::for_stdout());
    (printed, json(&report).unwrap_or_default())
}

fn of_bytes(name: &str, bytes: &[u8], progress: Progress<'_>) -> Report {
    let mut input = Input::new(progress);
    input.stream(name, bytes);
    report(input.facts, input.files)
}

/// Findings, and what was not understood.
fn report(facts: Facts, files: Vec<String>) -> Report {
    let findings = rules::findings(&facts);
    let mut report = Report {
        files,
        findings,
        notes: facts.notes.clone(),
        contents: facts
            .contents
            .iter()
            .map(|(file, kinds)| (*file, kinds.clone()))
            .collect(),
    };
    let mut notes = Vec::new();
    for (file, known, lines, evidence) in &facts.unread {
        let name = report.files.get(*file).map_or("?", String::as_str);
        let first = report.place(&evidence.place);
        notes.push(match known {
            true => format!(
                "{name}: {lines} not read, the first is {first}: {}",
                evidence.quote
            ),
            false => format!(
                "{name}: it is not recognized ({lines} not read): {}",
                evidence.quote
            ),
        });
    }
    for dump in &facts.dumps {
        notes.push(format!(
            "{}: the tables of {} have {} rows of leaves",
            report.place(&dump.heading.place),
            dump.device,
            dump.rows.len()
        ));
    }
    for (evidence, count) in facts.unknown.values() {
        let more = match count {
            1 => String::new(),
            count => format!(", and {} more of its kind", count - 1),
        };
        notes.push(format!(
            "{}: it looks like a fault and is not decoded{more}: {}",
            report.place(&evidence.place),
            evidence.quote
        ));
    }
    for one in &facts.lines {
        if let facts::Line::MapFailed { errno, .. } = one.fact
            && ![12, 22, 28].contains(&errno)
        {
            let place = report.place(&one.evidence.place);
            let why = match errno {
                // Linux drivers/iommu/iommufd/pages.c, pfn_reader_user_pin: pages of a device are not pinned.
                14 => {
                    "a map ended with EFAULT: memory of a device (a BAR), which iommufd maps by a dma-buf only \
                     (VFIO_DEVICE_FEATURE_DMA_BUF, IOMMU_IOAS_MAP_FILE), or memory that is not there"
                }
                17 => "a map ended with EEXIST: the range is mapped already",
                _ => "a map failed, and the error fits none of the causes",
            };
            notes.push(format!("{place}: {why} (error {errno})"));
        }
    }
    for (suppressed, evidence) in &facts.folds.orphans {
        notes.push(format!(
            "{}: {} messages of {} were suppressed, and no fault of this kind is in the file",
            report.place(&evidence.place),
            suppressed.callbacks,
            plain(&suppressed.function)
        ));
    }
    if facts.folds.beyond > 0 {
        notes.push(format!(
            "{} faults of further devices are not listed",
            facts.folds.beyond
        ));
    }
    for (kind, count) in &facts.dropped {
        notes.push(format!("{kind}: {count} more than are kept were left out"));
    }
    if facts.hidden_iomem {
        notes.push("/proc/iomem hides its addresses: read it as root".into());
    }
    report
        .notes
        .extend(notes.into_iter().map(|note| plain(&note)));
    report
}
