//! `cargo xtask limits`: the largest that is promised, tried, with what it takes.
//!
//! Everything but times and the size of this process is checked; times are printed, and not judged.

mod leaves;
mod many;
mod top;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;

/// The largest that is promised, tried.
#[derive(Parser)]
struct Options {
    /// Areas of one address space.
    #[arg(long, default_value_t = 1_000_000)]
    areas: u64,
    /// The most GiB that are mapped in leaves of 4 KiB.
    #[arg(long, default_value_t = 1024)]
    gib: u64,
    /// Rounds of each of 64 threads.
    #[arg(long, default_value_t = 2000)]
    rounds: u64,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("limits: {cause:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    println!("| limit | what was found |\n|---|---|");
    let row = |name: &str, found: anyhow::Result<String>| {
        let found = found.with_context(|| format!("limit: {name}"))?;
        println!("| {name} | {found} |");
        anyhow::Ok(())
    };
    row("57 bits and more", top::addresses())?;
    row("256 devices", many::devices(256))?;
    row("64 threads", many::threads(64, options.rounds))?;
    row("areas", many::areas(options.areas))?;
    let mut gib = options.gib;
    for _ in 0..4 {
        row(&format!("{gib} GiB in 4 KiB leaves"), leaves::mapped(gib))?;
        gib /= 4;
        if gib == 0 {
            break;
        }
    }
    Ok(())
}

/// Anonymous memory of this process in bytes.
fn anonymous() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: u64 = number.context("no RssAnon")?.trim().parse()?;
    Ok(kib << 10)
}

/// A library's error, which may have been boxed.
fn any(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> anyhow::Error {
    anyhow::Error::from_boxed(cause.into())
}
