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
mod libvirt;
mod manuals;
mod nostd;
mod origins;
mod parts;
mod properties;
mod runner;
mod shots;
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
    /// Runs the suites again and again, each time with other random inputs.
    Properties(properties::Options),
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
    /// Writes the man pages and shell completions of the command line below target/manuals.
    Manuals,
    /// Takes screenshots of the reports that a browser shows, for docs/shots; needs Chromium.
    Shots(shots::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
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
        Command::Manuals => manuals(),
        Command::Shots(options) => shots(&options),
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

/// True when all is well.
fn run(command: Command) -> anyhow::Result<bool> {
    let repository = &cargo::Repository::find().context("cannot read the workspace")?;
    match command {
        Command::Test(options) => {
            runner::run(&options, parts::PARTS, repository, &mut host::Debian)
        }
        Command::Properties(options) => properties::run(&options, repository),
        Command::Conformance(options) => conformance::command(&options, repository),
        Command::GuestKernel => guests::kernel_command(repository),
        Command::Guests(options) => guests::command(&options, repository),
        Command::Units(options) => units::command(&options, repository),
        Command::Balloon(options) => balloon::command(&options, repository),
        Command::Fuzz(options) => fuzz::run(&options, repository),
        Command::BenchTables(options) => bench_tables::run(&options, repository),
        Command::Manuals => manuals::run(repository),
    }
fn fuzz(options: &fuzz::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    fuzz::run(options, &repository)
}

fn bench_tables(options: &bench_tables::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    bench_tables::run(options, &repository)
}

fn manuals() -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    manuals::run(&repository)
}

fn shots(options: &shots::Options) -> anyhow::Result<bool> {
    let repository = cargo::Repository::find().context("cannot read the workspace")?;
    shots::run(options, &repository)
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
