//! The checks as a program: `cargo xtask units`.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use units::{Qemu, checks::CHECKS};

/// Checks tables and drivers on QEMU's emulated IOMMUs.
#[derive(Parser)]
struct Options {
    /// QEMU's program for x86-64.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: String,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True when all is well.
fn run(options: &Options) -> anyhow::Result<bool> {
    let qemu = Qemu::find(&options.qemu)?;
    println!("{}", qemu.version());
    let chosen = CHECKS
        .iter()
        .filter(|check| check.name.contains(&options.only));
    let (mut passed, mut failed, mut copies) = (0, 0, 0);
    let begun = Instant::now();
    for check in chosen {
        let start = Instant::now();
        let done = (check.run)(&qemu);
        let took = start.elapsed().as_secs_f64();
        match done {
            Ok(count) => {
                println!("  ok     {} ({count} copies, {took:.2} s)", check.name);
                passed += 1;
                copies += count;
            }
            Err(error) => {
                println!("  FAILED {}: {error:#}", check.name);
                failed += 1;
            }
        }
    }
    let took = begun.elapsed().as_secs_f64();
    println!("{passed} ok, {failed} failed, {copies} copies by DMA, {took:.1} s");
    anyhow::ensure!(
        passed + failed > 0,
        "no check has `{}` in its name",
        options.only
    );
    Ok(failed == 0)
}
