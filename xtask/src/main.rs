//! The project's own commands: `cargo xtask help`.
//!
//! One file per part of the test command, one line per part in [`parts::PARTS`]; each further
//! command is a variant of [`Command`] and a file of its own.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

mod balloon;
mod bench_tables;
mod cargo;
mod conformance;
mod examples;
mod fuzz;
mod graph;
mod guests;
mod host;
mod nostd;
mod origins;
mod parts;
mod runner;
mod units;

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs everything that must pass, with one summary line per part at the end.
    Test(runner::Options),
    /// Compares the bytes of our I/O page tables with those of Linux's code, built from its
    /// source.
    Conformance(conformance::Options),
    /// Builds the kernel of the guests, unless it is there.
    GuestKernel,
    /// Boots Linux under emulated IOMMUs in QEMU and runs tests in it.
    Guests(guests::Options),
    /// Has devices do DMA through QEMU's emulated IOMMUs, without a guest.
    Units(units::Options),
    /// Boots a stock Linux guest with its own balloon driver against our device.
    Balloon(balloon::Options),
    /// Runs the fuzz targets, each for some seconds; needs cargo-fuzz.
    Fuzz(fuzz::Options),
    /// Measures our I/O page tables beside the machine's limit, Linux's code and foreign crates, and
    /// makes docs/performance.md anew.
    BenchTables(bench_tables::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Test(options) => test(&options),
        Command::Conformance(options) => conformance(&options),
        Command::GuestKernel => guest_kernel(),
        Command::Guests(options) => guests(&options),
        Command::Units(options) => units(&options),
        Command::Balloon(options) => balloon(&options),
        Command::Fuzz(options) => fuzz(&options),
        Command::BenchTables(options) => bench_tables(&options),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn fuzz(options: &fuzz::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    fuzz::run(options, &repository)
}

fn bench_tables(options: &bench_tables::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    bench_tables::run(options, &repository)
}

fn test(options: &runner::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    runner::run(options, parts::PARTS, &repository, &mut host::Debian)
}

fn conformance(options: &conformance::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    conformance::command(options, &repository)
}

fn guest_kernel() -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    guests::kernel_command(&repository)
}

fn guests(options: &guests::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    guests::command(options, &repository)
}

fn units(options: &units::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    units::command(options, &repository)
}

fn balloon(options: &balloon::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    balloon::command(options, &repository)
}
