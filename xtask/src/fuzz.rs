//! The fuzz targets, each for a bounded time: `cargo xtask fuzz`.
//!
//! The body of a target stands in its crate, in `tests/fuzz_bodies`; ordinary tests replay the corpus
//! through it. Here it meets new bytes. They are kept below the target directory, so that a run
//! goes on where the last one ended and leaves the committed corpus as it is.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::cargo::{self, Repository};

/// The directory of the targets' crate below the root.
pub(crate) const CRATE: &str = "fuzz";

/// The options of `cargo xtask fuzz`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Seconds for each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Only these targets; all when none is named.
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
}

/// Runs the targets one after the other; true when none has crashed.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    ensure!(
        cargo::has_subcommand("fuzz"),
        "cargo-fuzz is missing: `cargo install cargo-fuzz` (it also needs a C++ compiler)"
    );
    let directory = repository.root.join(CRATE);
    let kept = repository.metadata.target_directory.join("fuzz-corpus");
    // The sanitizers need a nightly compiler; the code under test has no `unsafe` to watch but the
    // arena's.
    let build = ["fuzz", "build", "--sanitizer", "none"];
    if options.targets.is_empty() {
        // In one go; one that is named is built when it is run.
        cargo::run(repository.cargo(&build).current_dir(&directory))?;
    }
    let chosen = match options.targets.as_slice() {
        [] => targets(&directory)?,
        named => named.to_vec(),
    };
    let mut lines = Vec::new();
    let mut well = true;
    for target in &chosen {
        let grown = kept.join(target);
        fs::create_dir_all(&grown).with_context(|| format!("{grown} cannot be made"))?;
        let committed = format!("corpus/{target}");
        let time = format!("-max_total_time={}", options.seconds);
        // New inputs go to the first directory; the second is read only.
        let args = [
            "fuzz",
            "run",
            "--sanitizer",
            "none",
            target,
            grown.as_str(),
            &committed,
            "--",
            &time,
            "-print_final_stats=1",
        ];
        let began = Instant::now();
        let ended = cargo::run(repository.cargo(&args).current_dir(&directory));
        let took = Duration::from_secs(began.elapsed().as_secs());
        well &= ended.is_ok();
        lines.push(match ended {
            Ok(()) => format!("ok      {target} ({took:?})"),
            Err(error) => format!("FAILED  {target} ({took:?}): {error:#}"),
        });
    }
    println!("\n{}", lines.join("\n"));
    if !well {
        println!("crashing inputs lie in {CRATE}/artifacts; a fix brings it into {CRATE}/corpus");
    }
    Ok(well)
}

/// The names of all targets, sorted.
fn targets(directory: &Path) -> anyhow::Result<Vec<String>> {
    let sources = directory.join("fuzz_targets");
    let mut names = Vec::new();
    for file in fs::read_dir(&sources).with_context(|| format!("no {}", sources.display()))? {
        if let Some(name) = file?
            .file_name()
            .to_str()
            .and_then(|name| name.strip_suffix(".rs"))
        {
            names.push(name.to_owned());
        }
    }
    ensure!(
        !names.is_empty(),
        "there are no targets in {}",
        sources.display()
    );
    names.sort();
    Ok(names)
}
