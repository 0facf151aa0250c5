//! The compare test: `conformance/` fetches Linux's source, builds its table code, and compares
//! the bytes of its tables with ours.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository,
    host::Need,
    parts::Outcome,
    programs::{Passed, Programs},
    units,
};

/// A C compiler, and what fetches, checks and unpacks the source.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("gcc"),
    Need::Package("libc6-dev"),
    Need::Package("debian-archive-keyring"),
    Need::Package("xz-utils"),
];

/// The test of the bench that has Linux do work.
const PEER: &str = "linux_does_the_work_that_it_offers";

/// The program's exit status when Linux's source cannot be had.
pub(crate) const NO_SOURCE: i32 = 3;

/// Why a part is not run then.
pub(crate) const SOURCE_MISSING: &str =
    "Linux's source cannot be had from the Debian mirror; see above";

/// The part `compare` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    // As the other rigs are built: that takes longer to run, and less in all.
    let status = run(&Programs::build(repository)?, &[], repository)?;
    if status.code() == Some(NO_SOURCE) {
        return Ok(Outcome::NotRun(SOURCE_MISSING.into()));
    }
    ensure!(
        status.success(),
        "our tables are not those of Linux: {status}"
    );
    // The source is there now.
    let mut command = repository.cargo(&["test", "--quiet", "--workspace", "--all-features"]);
    command.args(["--test", "linux", "--", "--ignored", PEER]);
    let output = command.output().context("cargo cannot be started")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && said.contains("1 passed"),
        "Linux does not do the work that peers ask of it: {}\n{said}",
        output.status
    );
    Ok(Outcome::Passed)
}

/// The command. `--full` adds the emulated units, with other random choices in each of 8 rounds.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let options = passed.options();
    // With optimization, since every word of every table is looked at after each operation.
    let programs = Programs::optimized(&["-pdmaspace-conformance"], &[], repository)?;
    let compared = run(&programs, &options, repository)?.success();
    // A part of the tables is for the compare test alone.
    let part = options.iter().any(|option| option.starts_with("--only"));
    let swept = part || !options.contains(&"--full") || units::sweep(repository)?;
    Ok(compared && swept)
}

fn run(
    programs: &Programs,
    options: &[&str],
    repository: &Repository,
) -> anyhow::Result<ExitStatus> {
    let mut command = programs.command("dmaspace-conformance", repository);
    command
        .arg("--work")
        .arg(repository.metadata.target_directory.join("conformance"))
        .args(options);
    command.status().context("the rig cannot be started")
}
