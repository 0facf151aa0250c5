//! The balloon: `conformance/balloon` boots a Linux guest, with its own driver and with ours, against our device.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository, conformance::SOURCE_MISSING, linux, parts::Outcome, programs::Passed,
    programs::Programs,
};

/// The part `balloon` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let reason = "User-Mode Linux runs on x86-64 Linux";
        return Ok(Outcome::NotRun(reason.into()));
    }
    if !linux::build(repository)? {
        return Ok(Outcome::NotRun(SOURCE_MISSING.into()));
    }
    check(&[], repository)
}

/// Runs checks, with a kernel that is there.
pub(crate) fn check(options: &[&str], repository: &Repository) -> anyhow::Result<Outcome> {
    let status = run(options, repository)?;
    ensure!(
        status.success(),
        "checks failed on a guest's balloon: {status}"
    );
    Ok(Outcome::Passed)
}

/// The command.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    Ok(linux::build(repository)? && run(&passed.options(), repository)?.success())
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    // What is measured is built as users build it.
    let programs = match options.contains(&"--bench") {
        true => Programs::optimized(repository, &["dmaspace-cli", "dmaspace-balloon-rig"])?,
        false => Programs::build(repository)?,
    };
    let mut command = programs.command("dmaspace-balloon-rig", repository);
    command.arg("--dmaspace").arg(programs.path("dmaspace"));
    command.arg("--linux").arg(linux::kernel(repository));
    let status = command.args(options).status();
    status.context("the rig cannot be started")
}
