//! `bench-tables`: measures every row in every format, all subjects in one run, and writes what it
//! finds as JSON and as the document with its plots.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser;
use lab::peers::linux::Programs;
use lab::peers::report;
use lab::peers::results::Results;
use lab::peers::run::Plan;

/// Measures I/O page tables beside the machine's limit, Linux's code and foreign crates.
#[derive(Parser)]
#[command(name = "bench-tables")]
struct Options {
    /// Few rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Rounds in which all subjects of a row take turns; 30, or 7 when quick.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Only rows with this in their name `ROW/FORMAT`; the series are called `sizes`, `fragments`,
    /// `threads`, `groups` and `memory`.
    #[arg(long, value_name = "ROW/FORMAT")]
    only: Vec<String>,
    /// Write what was measured here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave Linux's code out.
    #[arg(long)]
    without_linux: bool,
    /// Where Linux's source and what is built of it lie.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/conformance")]
    work: PathBuf,
    /// Measure nothing: read this instead.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["quick", "rounds", "only", "without_linux"]
    )]
    from: Option<PathBuf>,
    /// Write the document `performance.md` and its plots below this directory.
    #[arg(long, value_name = "DIRECTORY")]
    docs: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let results = match &options.from {
        Some(file) => {
            let text = fs::read_to_string(file)
                .with_context(|| format!("{} cannot be read", file.display()))?;
            serde_json::from_str(&text)
                .with_context(|| format!("{} is not what this program writes", file.display()))?
        }
        None => {
            let rounds = options.rounds.unwrap_or(if options.quick { 7 } else { 30 });
            let only = options.only.clone();
            let linux = (!options.without_linux).then(|| linux(&options.work));
            let plan = Plan {
                rounds,
                only,
                linux: linux.flatten(),
            };
            plan.run()?
        }
    };
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&results)? + "\n";
        fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    match &options.docs {
        Some(directory) => write(&results, directory),
        None if options.json.is_none() => {
            println!("{}", report::document(&results));
            Ok(())
        }
        None => Ok(()),
    }
}

/// Linux's programs. Where they cannot be had, that is said so that nobody misses it, and the others
/// are measured all the same.
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
