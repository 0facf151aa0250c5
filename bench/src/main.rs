//! `bench`: the figures of the origins, and page tables beside the machine's limit, Linux's code and foreign crates.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Parser, ValueEnum};
use dmaspace_bench::layers::{self, Subject};
use dmaspace_bench::origins::{self, Group, GroupReport, Host, Settings, text};
use dmaspace_bench::peers::linux::Programs;
use dmaspace_bench::peers::report;
use dmaspace_bench::peers::results::Results;
use dmaspace_bench::peers::run::Plan;
use serde::Serialize;

/// Figures of dmaspace beside others, in one run and in turns.
#[derive(Parser)]
#[command(name = "bench")]
enum Command {
    /// Repeats the measurements of five public Linux patch series.
    ///
    /// Each row has the published figures, the old way measured here and dmaspace measured here. The published figures
    /// are from other machines: compare ratios. Huge pages are those that are free in their pools.
    Origins(OriginsArgs),
    /// Measures I/O page tables beside the machine's limit, Linux's code and foreign crates.
    Tables(TablesArgs),
    /// Counts the instructions of a map and an unmap, by the table alone and through an address space and a driver.
    ///
    /// Takes valgrind. Memory is given by its physical runs, so nothing is pinned, and registers answer at once.
    Layers(LayersArgs),
}

#[derive(Args)]
struct OriginsArgs {
    /// The origin's table
    #[arg(value_name = "WHAT")]
    what: What,
    /// Take about a minute for all instead of ten, with less memory and fewer rounds
    #[arg(long)]
    quick: bool,
    /// Map this much memory in `pin`, in bytes or with K, M, G [default: 8G, with --quick 1G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Write the figures, one row for each
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The groups by name.
#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Origin 1: pin, charge and map real memory
    Pin,
    /// Origin 2: map and unmap by several threads, with invalidation
    Map,
    /// Origin 3: inflate a balloon, stage by stage
    Balloon,
    /// Origin 4: the operations of page tables, in every format
    Tables,
    /// Origin 5: a table on each memory node, simulated
    Numa,
    /// All of them
    All,
}

#[derive(Args)]
struct TablesArgs {
    /// Few rounds: to see that it works
    #[arg(long)]
    quick: bool,
    /// Rounds in which all subjects of a row take turns; 30, or 7 when quick
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Only rows with this in their name `ROW/FORMAT`; the series are called `sizes`, `threads`
    /// `groups`
    #[arg(long, value_name = "ROW/FORMAT")]
    only: Vec<String>,
    /// File of the measurements to write
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave Linux's code out
    #[arg(long)]
    without_linux: bool,
    /// Directory of Linux's source and of programs built of it
    #[arg(long, value_name = "DIRECTORY", default_value = "target/conformance")]
    work: PathBuf,
    /// Write the document `performance.md` and its plots below this directory
    #[arg(long, value_name = "DIRECTORY")]
    docs: Option<PathBuf>,
}

#[derive(Args)]
struct LayersArgs {
    /// Do the operations of this subject, for callgrind
    #[arg(long, hide = true, value_name = "SUBJECT")]
    case: Option<Subject>,
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Origins(args) => of_origins(&args),
        Command::Tables(args) => of_tables(&args),
        Command::Layers(LayersArgs { case: Some(case) }) => layers::run_case(case),
        Command::Layers(LayersArgs { case: None }) => {
            print!("{}", layers::document(&layers::measure()?));
            Ok(())
        }
    }
}

/// Whole pages.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text.split_at(digits.len()).1 {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        unit => return Err(format!("no unit `{unit}`; K, M, G")),
    };
    let number: u64 = digits.parse().map_err(|error| format!("{error}"))?;
    let bytes = number.checked_mul(1 << shift).ok_or("too large")?;
    match bytes {
        0 => Err("no memory".into()),
        bytes if bytes % 4096 != 0 => Err("no whole pages of 4 KiB".into()),
        bytes => Ok(bytes),
    }
}

/// The file of `bench origins --json`.
#[derive(Serialize)]
struct Report<'a> {
    commit: &'static str,
    machine: &'a Host,
    quick: bool,
    groups: &'a [GroupReport],
}

fn of_origins(args: &OriginsArgs) -> anyhow::Result<()> {
    let mut settings = match args.quick {
        true => Settings::quick(),
        false => Settings::full(),
    };
    settings.memory_bytes = args.memory.unwrap_or(settings.memory_bytes);
    let groups = match args.what {
        What::Pin => vec![Group::Pin],
        What::Map => vec![Group::Map],
        What::Balloon => vec![Group::Balloon],
        What::Tables => vec![Group::Tables],
        What::Numa => vec![Group::Numa],
        What::All => Group::ALL.into(),
    };
    let machine = Host::read().context("the machine cannot be read")?;
    print!("{}", text::machine(&machine));
    if args.quick {
        println!("quick: smaller sizes and fewer rounds, figures are rough");
    }
    let mut reports = Vec::new();
    for group in groups {
        let report = origins::run(group, settings)?;
        print!("\n{}", text::group(&report));
        reports.push(report);
    }
    if let Some(file) = &args.json {
        let report = Report {
            commit: option_env!("DMASPACE_COMMIT").unwrap_or("unknown"),
            machine: &machine,
            quick: args.quick,
            groups: &reports,
        };
        let text = serde_json::to_string_pretty(&report)? + "\n";
        fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    Ok(())
}

fn of_tables(args: &TablesArgs) -> anyhow::Result<()> {
    let linux = (!args.without_linux).then(|| linux(&args.work));
    let plan = Plan {
        rounds: args.rounds.unwrap_or(if args.quick { 7 } else { 30 }),
        only: args.only.clone(),
        linux: linux.flatten(),
    };
    let results = plan.run()?;
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&results)? + "\n";
        fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    match &args.docs {
        Some(directory) => write(&results, directory),
        None if args.json.is_none() => {
            println!("{}", report::document(&results));
            Ok(())
        }
        None => Ok(()),
    }
}

/// Linux's programs. Where they cannot be had, that is said so that it is not missed, and the others are measured all
/// the same.
fn linux(work: &std::path::Path) -> Option<Programs> {
    Programs::build(work)
        .inspect_err(|error| {
            let line = "*".repeat(72);
            eprintln!("{line}\nLINUX IS NOT MEASURED: {error:#}\n{line}");
        })
        .ok()
}

fn write(results: &Results, directory: &std::path::Path) -> anyhow::Result<()> {
    for (path, text) in report::files(results) {
        let file = directory.join(path);
        let parent = file.parent().context("a file without a directory")?;
        fs::create_dir_all(parent)
            .with_context(|| format!("{} cannot be made", parent.display()))?;
        fs::write(&file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    Ok(())
}
