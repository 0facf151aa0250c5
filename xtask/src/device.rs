//! Devices in processes of their own: `conformance/vfio-user` boots Linux with them.

use std::process::{Command, ExitStatus};

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository,
    host::Need,
    linux,
    parts::Outcome,
    programs::{Passed, Programs},
};

/// Packages for the guests, and for making and checking a file system.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("debian-archive-keyring"),
    Need::Package("e2fsprogs"),
    Need::Package("gcc"),
    Need::Package("libc6-dev"),
];

/// The part `vfio-user` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    linux::with(linux::GUEST, repository, || {
        let status = run(&[], repository)?;
        ensure!(
            status.success(),
            "tests failed with devices in processes of their own: {status}"
        );
        Ok(Outcome::Passed)
    })
}

/// The command `cargo xtask vfio-user`.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    Ok(linux::build(linux::GUEST, repository)? && run(&passed.options(), repository)?.success())
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    let programs = Programs::build(repository)?;
    let mut command: Command = programs.command("vfio-user-rig", repository);
    let work = repository.metadata.target_directory.join("conformance");
    command.arg("--work").arg(work);
    command.arg("--init").arg(programs.path("vfio-user-init"));
    command
        .arg("--device")
        .arg(programs.path("vfio-user-device"));
    command.args(options);
    command.status().context("the rig cannot be started")
}
