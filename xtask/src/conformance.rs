//! The compare test: `conformance/` fetches Linux's source, builds its table code, and compares
//! the bytes of its tables with ours.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::{cargo::Repository, host::Need, parts::Outcome, units};

/// The options of `cargo xtask conformance`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Longer, from a seed of the day, and with every compiler that is there; then the emulated units,
    /// with other random choices in each of 8 rounds.
    #[arg(long)]
    full: bool,
    /// The first seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Only tables whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// A C compiler, and what fetches, checks and unpacks the source.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("gcc"),
    Need::Package("libc6-dev"),
    Need::Package("debian-archive-keyring"),
    Need::Package("xz-utils"),
];

/// The program's exit status when Linux's source cannot be had.
const NO_SOURCE: i32 = 3;

/// The part `compare` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let status = run(&Options::default(), repository)?;
    if status.code() == Some(NO_SOURCE) {
        let reason = "Linux's source cannot be had from the Debian mirror; see above";
        return Ok(Outcome::NotRun(reason.into()));
    }
    ensure!(
        status.success(),
        "our tables are not those of Linux: {status}"
    );
    // The source is there now.
    let mut command = repository.cargo(&["test", "--quiet", "--package", "dmaspace-lab"]);
    command.args(["--features", "peers", "--test", "linux", "--", "--ignored"]);
    let status = command.status().context("cargo cannot be started")?;
    ensure!(
        status.success(),
        "Linux does not do the work that peers ask of it: {status}"
    );
    Ok(Outcome::Passed)
}

/// The command.
pub(crate) fn command(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let compared = run(options, repository)?.success();
    // A part of the tables is for the compare test alone.
    let swept = !options.full || options.only.is_some() || units::sweep(repository)?;
    Ok(compared && swept)
}

fn run(options: &Options, repository: &Repository) -> anyhow::Result<ExitStatus> {
    // With optimization, since every word of every table is looked at after each operation.
    let mut command = repository.cargo(&["run", "--release", "--package", "dmaspace-conformance"]);
    command
        .args(["--quiet", "--", "--work"])
        .arg(repository.metadata.target_directory.join("conformance"));
    if options.full {
        command.arg("--full");
    }
    if let Some(seed) = options.seed {
        command.arg("--seed").arg(seed.to_string());
    }
    if let Some(only) = &options.only {
        command.arg("--only").arg(only);
    }
    command.status().context("cargo cannot be started")
}
