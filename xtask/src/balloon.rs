//! The balloon: `conformance/balloon` boots a stock Linux guest with its own driver against our device.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::{cargo::Repository, host::Need, parts::Outcome, programs::Programs};

/// The options of `cargo xtask balloon`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Time an inflate of our device and of one that gives back page by page, instead of checks.
    #[arg(long)]
    bench: bool,
    /// MiB of the guests of the bench.
    #[arg(long, value_name = "MIB", requires = "bench")]
    guest: Option<u32>,
    /// MiB of the balloons of the bench.
    #[arg(long, value_name = "MIB", requires = "bench")]
    balloon: Option<u32>,
    /// Rounds of the bench.
    #[arg(long, value_name = "COUNT", requires = "bench")]
    rounds: Option<u32>,
}

/// A kernel that is a program, and what runs in it.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("busybox-static"),
    Need::Package("user-mode-linux"),
];

/// The part `balloon` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let reason = "User-Mode Linux runs on x86-64 Linux";
        return Ok(Outcome::NotRun(reason.into()));
    }
    let status = run(&Options::default(), repository)?;
    ensure!(
        status.success(),
        "checks failed on a stock guest's balloon: {status}"
    );
    Ok(Outcome::Passed)
}

/// The command.
pub(crate) fn command(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    Ok(run(options, repository)?.success())
}

fn run(options: &Options, repository: &Repository) -> anyhow::Result<ExitStatus> {
    let programs = match options.bench {
        true => Programs::optimized(repository, &["dmaspace-cli", "dmaspace-balloon-rig"])?,
        false => Programs::build(repository)?,
    };
    let mut command = programs.command("dmaspace-balloon-rig", repository);
    command.arg("--dmaspace").arg(programs.path("dmaspace"));
    if let Some(only) = &options.only {
        command.arg("--only").arg(only);
    }
    if options.bench {
        command.arg("--bench");
    }
    for (option, value) in [
        ("--guest", options.guest),
        ("--balloon", options.balloon),
        ("--rounds", options.rounds),
    ] {
        if let Some(value) = value {
            command.arg(option).arg(value.to_string());
        }
    }
    command.status().context("the rig cannot be started")
}
