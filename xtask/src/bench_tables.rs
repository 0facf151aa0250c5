//! The figures of the I/O page tables: `lab/src/peers` measures them beside the machine's limit, Linux's
//! code and foreign crates, and writes `docs/performance.md` with its plots.
//!
//! Not a part of the test command: it takes long, and wants a machine that does nothing else.

use anyhow::Context as _;
use clap::Args;

use crate::cargo::{self, Repository};

/// The options of `cargo xtask bench-tables`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Few rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Rounds in which all subjects of a row take turns.
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u32>,
    /// Only rows with this in their name `ROW/FORMAT`: they are shown, and the document stays.
    #[arg(long, value_name = "ROW/FORMAT")]
    only: Vec<String>,
    /// Leave Linux's code out.
    #[arg(long)]
    without_linux: bool,
    /// Measure nothing: make the document anew from what the last run found.
    #[arg(long, conflicts_with_all = ["quick", "rounds", "only", "without_linux"])]
    document: bool,
}

/// What a run found, below the directory of documents.
const FOUND: &str = "performance/results.json";

/// Runs the program, built with optimization.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let bin = [
        "run",
        // Everybody as one program: calls into foreign crates are inlined as our own are.
        "--profile",
        "measure",
        "--package",
        "dmaspace-lab",
        "--features",
        "peers",
        "--bin",
        "bench-tables",
        "--",
    ];
    let mut command = repository.cargo(&bin);
    let docs = repository.root.join("docs");
    let found = docs.join(FOUND);
    if options.document {
        command.arg("--from").arg(&found);
    }
    let target = &repository.metadata.target_directory;
    command.arg("--work").arg(target.join("conformance"));
    if options.without_linux {
        command.arg("--without-linux");
    }
    if options.quick {
        command.arg("--quick");
    }
    if let Some(rounds) = options.rounds {
        command.arg("--rounds").arg(rounds.to_string());
    }
    for only in &options.only {
        command.arg("--only").arg(only);
    }
    if options.only.is_empty() {
        let directory = found.parent().context("a file without a directory")?;
        std::fs::create_dir_all(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        command.arg("--docs").arg(&docs);
        if !options.document {
            command.arg("--json").arg(&found);
        }
    }
    cargo::run(&mut command)?;
    Ok(true)
}
