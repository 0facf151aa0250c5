//! The units: `conformance/units` has devices do DMA through QEMU's emulated IOMMUs, without a guest.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::{cargo::Repository, host::Need, parts::Outcome, programs::Programs};

/// The options of `cargo xtask units`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// QEMU's program for x86-64, if it is not the one of that name.
    #[arg(long, value_name = "PROGRAM")]
    qemu: Option<String>,
    /// The one for Arm.
    #[arg(long, value_name = "PROGRAM")]
    qemu_arm: Option<String>,
    /// The one for RISC-V.
    #[arg(long, value_name = "PROGRAM")]
    qemu_riscv: Option<String>,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Makes the checks with random choices this often, each time with others.
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u64>,
    /// Writes docs/conformance.md.
    #[arg(long, conflicts_with_all = ["only", "rounds"])]
    document: bool,
}

/// What was checked, for people.
const DOCUMENT: &str = "docs/conformance.md";

/// The emulators.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("qemu-system-arm"),
    Need::Package("qemu-system-riscv"),
    Need::Package("qemu-system-x86"),
];

/// The emulator with a balloon.
pub(crate) const BALLOON_NEEDS: &[Need] = &[Need::Package("qemu-system-x86")];

/// The part `units` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let status = run(&Options::default(), &["--compare", DOCUMENT], repository)?;
    ensure!(
        status.success(),
        "checks failed on emulated units: {status}"
    );
    Ok(Outcome::Passed)
}

/// The part `balloon-qemu` of the test command: the balloon's driver on QEMU's device.
pub(crate) fn balloon_part(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = Programs::build(repository)?.command("balloon", repository);
    let status = command.status().context("the checks cannot be started")?;
    ensure!(
        status.success(),
        "checks failed on QEMU's balloon: {status}"
    );
    Ok(Outcome::Passed)
}

/// Many rounds, for `cargo xtask conformance --full`.
pub(crate) fn sweep(repository: &Repository) -> anyhow::Result<bool> {
    let options = Options {
        rounds: Some(8),
        ..Options::default()
    };
    command(&options, repository)
}

/// The command.
pub(crate) fn command(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let document: &[&str] = match options.document {
        true => &["--document", DOCUMENT],
        false => &[],
    };
    Ok(run(options, document, repository)?.success())
}

fn run(options: &Options, more: &[&str], repository: &Repository) -> anyhow::Result<ExitStatus> {
    let mut command = Programs::build(repository)?.command("dmaspace-units", repository);
    for (option, value) in [
        ("--qemu", &options.qemu),
        ("--qemu-arm", &options.qemu_arm),
        ("--qemu-riscv", &options.qemu_riscv),
        ("--only", &options.only),
    ] {
        if let Some(value) = value {
            command.arg(option).arg(value);
        }
    }
    if let Some(rounds) = options.rounds {
        command.arg("--rounds").arg(rounds.to_string());
    }
    command.args(more);
    command.status().context("the checks cannot be started")
}
