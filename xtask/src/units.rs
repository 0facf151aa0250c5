//! The units: `conformance/units` has devices do DMA through QEMU's emulated IOMMUs, without a guest.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use crate::{cargo::Repository, host::Need, programs::Passed, programs::Programs};

/// Document of the checks: `--document` writes it, the part compares.
const DOCUMENT: &str = "docs/conformance.md";

/// Keys of the packages of QEMU.
pub(crate) const NEEDS: &[Need] = &[Need::Package("debian-archive-keyring")];

/// Runs all checks, once.
pub(crate) fn check(repository: &Repository) -> anyhow::Result<()> {
    let status = run(&["--compare", DOCUMENT], repository)?;
    ensure!(
        status.success(),
        "checks failed on emulated units: {status}"
    );
    Ok(())
}

/// Many rounds, with QEMU's processors, for `cargo xtask conformance --full`.
pub(crate) fn sweep(repository: &Repository) -> anyhow::Result<bool> {
    let units = run(&["--rounds", "8"], repository)?.success();
    Ok(run(&["--processors", "--rounds", "8"], repository)?.success() && units)
}

/// The command.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let mut options = passed.options();
    if let Some(at) = options.iter().position(|option| *option == "--document") {
        let part = |option: &&str| option.starts_with("--only") || option.starts_with("--rounds");
        ensure!(
            !options.iter().any(part),
            "--document is of all checks, once"
        );
        options.insert(at + 1, DOCUMENT);
    }
    Ok(run(&options, repository)?.success())
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    let programs = Programs::build(repository)?;
    let mut command = programs.command("dmaspace-units", repository);
    command.arg("--dmaspace").arg(programs.path("dmaspace"));
    let work = repository.metadata.target_directory.join("conformance");
    let status = command.arg("--work").arg(work).args(options).status();
    status.context("the checks cannot be started")
}
