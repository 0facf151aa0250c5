//! The balloon: `conformance/balloon` boots a Linux guest, with its own driver and with ours, on our device and on QEMU's.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository,
    linux::{self, GUEST, UML},
    parts::Outcome,
    programs::{Passed, Programs},
};

/// The part `balloon` of the test command: in QEMU.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    linux::with(GUEST, repository, || {
        let status = run(&["--kernel", GUEST], repository)?;
        ensure!(
            status.success(),
            "checks failed on a guest's balloon: {status}"
        );
        Ok(Outcome::Passed)
    })
}

/// The command.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let options = passed.options();
    let kernel = options.iter().position(|option| *option == "--kernel");
    let kernel = kernel.and_then(|at| options.get(at + 1)).unwrap_or(&UML);
    Ok(linux::build(kernel, repository)? && run(&options, repository)?.success())
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    // Measured programs are built as users build them.
    let programs = match options.contains(&"--bench") {
        true => Programs::optimized(
            &["-pdmaspace-cli", "-pdmaspace-balloon-rig"],
            &[],
            repository,
        )?,
        false => Programs::build(repository)?,
    };
    let mut command = programs.command("dmaspace-balloon-rig", repository);
    command.arg("--dmaspace").arg(programs.path("dmaspace"));
    let work = repository.metadata.target_directory.join("conformance");
    command.arg("--work").arg(work);
    let status = command.args(options).status();
    status.context("the rig cannot be started")
}
