//! The figures of the I/O page tables: `lab/src/peers` measures them beside the machine's limit, Linux's
//! code and foreign crates, and writes `docs/performance.md` with its plots.
//!
//! Not a part of the test command: it takes long, and wants a machine that does nothing else.

use anyhow::Context as _;

use crate::{
    cargo::{self, Repository},
    programs::Passed,
};

/// What a run found, below the directory of documents.
const FOUND: &str = "performance/results.json";

/// Ours: measures nothing, and makes the document anew from what the last run found.
const DOCUMENT: &str = "--document";

/// Runs the program, built with optimization. With `--only` rows are shown, and the document stays.
pub(crate) fn run(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    // Everybody as one program: calls into foreign crates are inlined as our own are.
    let run = ["run", "--profile", "measure", "--package", "dmaspace-lab"];
    let mut command = repository.cargo(&run);
    command.args(["--features", "peers", "--bin", "bench-tables", "--"]);
    let target = &repository.metadata.target_directory;
    command.arg("--work").arg(target.join("conformance"));
    let options = passed.options();
    let docs = repository.root.join("docs");
    let found = docs.join(FOUND);
    if !options.iter().any(|option| option.starts_with("--only")) {
        let directory = found.parent().context("a file without a directory")?;
        std::fs::create_dir_all(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        let of_found = match options.contains(&DOCUMENT) {
            true => "--from",
            false => "--json",
        };
        command.arg("--docs").arg(&docs).arg(of_found).arg(&found);
    }
    command.args(options.iter().filter(|option| **option != DOCUMENT));
    cargo::run(&mut command)?;
    Ok(true)
}
