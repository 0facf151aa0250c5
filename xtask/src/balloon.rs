//! The balloon: `conformance/balloon` boots a stock Linux guest with its own driver against our device.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use crate::{cargo::Repository, host::Need, parts::Outcome, programs::Passed, programs::Programs};

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
    let status = run(&[], repository)?;
    ensure!(
        status.success(),
        "checks failed on a stock guest's balloon: {status}"
    );
    Ok(Outcome::Passed)
}

/// The command.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    Ok(run(&passed.options(), repository)?.success())
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    // What is measured is built as users build it.
    let programs = match options.contains(&"--bench") {
        true => Programs::optimized(repository, &["dmaspace-cli", "dmaspace-balloon-rig"])?,
        false => Programs::build(repository)?,
    };
    let mut command = programs.command("dmaspace-balloon-rig", repository);
    command.arg("--dmaspace").arg(programs.path("dmaspace"));
    let status = command.args(options).status();
    status.context("the rig cannot be started")
}
