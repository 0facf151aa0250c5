//! The project's own commands: `cargo xtask help`.
//!
//! One file per part of the test command, one line per part in [`parts::PARTS`]; each further
//! command is a variant of [`Command`] and a file of its own.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

mod balloon;
mod bench;
mod cargo;
mod conformance;
mod dependencies;
mod device;
mod examples;
mod fuzz;
mod guests;
mod host;
mod libvirt;
mod linux;
mod miri;
mod nostd;
mod oldest;
mod parts;
mod programs;
mod properties;
mod runner;
mod sanitize;
mod soak;
mod suites;
mod units;

use programs::Passed;

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
    #[command(disable_help_flag = true)]
    Conformance(Passed),
    /// Boots Linux under emulated IOMMUs in QEMU and runs tests in it.
    #[command(disable_help_flag = true)]
    Guests(Passed),
    /// Measures mapping and unmapping beside Linux's DMA API in a guest, in instructions.
    #[command(disable_help_flag = true)]
    GuestDma(Passed),
    /// Boots Linux in QEMU with a disk and a DMA engine that are processes of their own.
    #[command(disable_help_flag = true)]
    VfioUser(Passed),
    /// Has devices do DMA through QEMU's emulated IOMMUs, without a guest.
    #[command(disable_help_flag = true)]
    Units(Passed),
    /// Builds a kernel, unless it is there, and the modules of `linux/` for it.
    Linux(linux::Options),
    /// Boots a Linux guest with its own balloon driver, and with ours, against our device.
    #[command(disable_help_flag = true)]
    Balloon(Passed),
    /// Runs the fuzz targets, each for some seconds; needs cargo-fuzz.
    Fuzz(fuzz::Options),
    /// Runs the suites of the crates with `unsafe` under a sanitizer of rustc.
    Sanitize(sanitize::Options),
    /// Runs small suites of the crates with `unsafe` at the bottom in Miri, twice: with Stacked Borrows and with Tree
    /// Borrows. Needs a nightly toolchain with Miri.
    Miri(miri::Options),
    /// Measures the figures of the origins, or page tables beside the machine's limit, Linux's code and foreign
    /// crates (`bench --help`).
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Checks users' builds with the oldest supported compiler, which is fetched from Debian.
    Oldest,
    /// Runs random operations of an address space beside a model, for long (`soak --help`).
    #[command(disable_help_flag = true)]
    Soak(Passed),
    /// Tries the largest promised sizes, and prints their cost.
    #[command(disable_help_flag = true)]
    Limits(Passed),
}

impl Command {
    /// The part of the test command that needs what this one needs.
    const fn part(&self) -> Option<&'static str> {
        Some(match self {
            Self::Conformance(_) => "compare",
            Self::Guests(_) => "guests",
            Self::Units(_) => "units",
            Self::VfioUser(_) => "vfio-user",
            Self::Balloon(_) | Self::GuestDma(_) | Self::Linux(_) => "linux",
            _ => return None,
        })
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
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
    let part = command.part();
    if let Some(lacking) =
        part.and_then(|name| runner::lacking(name, parts::PARTS, &mut host::Debian))
    {
        eprintln!("{lacking}");
    }
    match command {
        Command::Test(options) => {
            runner::run(&options, parts::PARTS, repository, &mut host::Debian)
        }
        Command::Properties(options) => properties::run(&options, repository),
        Command::Conformance(passed) => conformance::command(&passed, repository),
        Command::Guests(passed) => guests::command(&passed, repository),
        Command::VfioUser(passed) => device::command(&passed, repository),
        Command::GuestDma(passed) => guests::dma_command(&passed, repository),
        Command::Units(passed) => units::command(&passed, repository),
        Command::Linux(options) => linux::command(&options, repository),
        Command::Balloon(passed) => balloon::command(&passed, repository),
        Command::Fuzz(options) => fuzz::run(&options, repository),
        Command::Sanitize(options) => sanitize::run(&options, repository),
        Command::Miri(options) => miri::run(&options, repository),
        Command::Bench(passed) => bench::run(&passed, repository),
        Command::Oldest => oldest::run(repository),
        Command::Soak(passed) => soak::run("soak", &passed, repository),
        Command::Limits(passed) => soak::run("limits", &passed, repository),
    }
}
