//! The soak and the limits: `conformance/soak`, for long. Its tests do both for seconds.

use anyhow::Context as _;

use crate::{cargo::Repository, programs::Passed};

/// Runs the program of this name; true when it found nothing wrong.
pub(crate) fn run(program: &str, passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let mut command = repository.cargo(&["run", "--release", "--quiet"]);
    command.args(["--package", "dmaspace-soak", "--bin", program, "--"]);
    let status = command.args(passed.options()).status();
    Ok(status.context("cargo cannot be started")?.success())
}
