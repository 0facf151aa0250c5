//! `cargo xtask limits`: the largest that is promised, tried, with what it takes.
//!
//! Everything but times and the size of this process is checked; times are printed, and not judged.
//!
//! `cargo xtask limits --rounds 50`, on two otherwise idle processors (8.5 s):
//!
//! - addresses: mapped to the last byte, refused behind it, with 5 levels of VT-d second stage (57 bits), x86-64 and RISC-V
//!   (top of both halves), RISC-V second stage (59 bits), 6 levels of AMD v1 (64 bits)
//! - 256 devices: each translates what is mapped, faults beside it, and is detached while the next still translates
//! - 64 threads on one shared table, in shared leaf tables and in one contended range: nothing lost
//! - 1,000,000 areas in any order: 299 bytes an area without tables; map 2.31 µs, two lookups 0.43 µs, unmap 2.11 µs
//! - 1 TiB in leaves of 4 KiB: 525,315 table pages as computed (2052 MiB); map 2.31 s, 8.6 ns a leaf; unmap 0.01 s
//! - 256, 64, 16 GiB: 131,330, 32,834, 8,210 table pages as computed; map 0.54, 0.13, 0.03 s, each 8.0 ns a leaf

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
    println!("| limit | result |\n|---|---|");
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
