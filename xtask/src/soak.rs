//! The soak and the limits: `conformance/soak`, for long. Its tests do both for seconds.

use anyhow::Context as _;
use clap::Args;

use crate::cargo::Repository;

/// What is handed on to the program.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Options of the program; `--help` names them.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTION"
    )]
    options: Vec<String>,
}

/// Runs the program of this name; true when it found nothing wrong.
pub(crate) fn run(
    program: &str,
    options: &Options,
    repository: &Repository,
) -> anyhow::Result<bool> {
    let mut command = repository.cargo(&["run", "--release", "--quiet"]);
    command.args(["--package", "dmaspace-soak", "--bin", program, "--"]);
    let status = command.args(&options.options).status();
    Ok(status.context("cargo cannot be started")?.success())
}
