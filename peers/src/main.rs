//! `bench-tables`: measures every row in every format, all subjects in one run, and writes what it
//! finds as JSON and as the document with its plots.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser;
use peers::report;
use peers::results::Results;
use peers::run::Plan;

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
    /// `threads` and `memory`.
    #[arg(long, value_name = "ROW/FORMAT")]
    only: Vec<String>,
    /// Write what was measured here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure nothing: read this instead.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "rounds", "only"])]
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
            Plan { rounds, only }.run()?
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
