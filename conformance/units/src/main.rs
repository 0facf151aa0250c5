//! The checks as a program: `cargo xtask units`.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use units::{Qemu, Rig, checks::CHECKS};

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
    let all = CHECKS
        .iter()
        .flat_map(|check| check.units.iter().map(move |unit| (*unit, check)));
    let (mut passed, mut failed, mut left_out, mut copies) = (0, 0, 0, 0);
    let begun = Instant::now();
    for (unit, check) in all {
        let name = format!("{}: {}", unit.name(), check.name);
        if !name.contains(&options.only) {
            continue;
        }
        if !qemu.offers(unit) {
            println!("  not run {name}: this QEMU has no such unit");
            left_out += 1;
            continue;
        }
        let start = Instant::now();
        let done = Rig::start(&qemu, unit).and_then(|rig| {
            (check.run)(&rig)?;
            Ok(rig.copies())
        });
        let took = start.elapsed().as_secs_f64();
        match done {
            Ok(count) => {
                println!("  ok      {name} ({count} copies, {took:.2} s)");
                passed += 1;
                copies += count;
            }
            Err(error) => {
                println!("  FAILED  {name}: {error:#}");
                failed += 1;
            }
        }
    }
    let took = begun.elapsed().as_secs_f64();
    println!(
        "{passed} ok, {failed} failed, {left_out} not run, {copies} copies by DMA, {took:.1} s"
    );
    anyhow::ensure!(
        passed + failed + left_out > 0,
        "no check has `{}` in its name",
        options.only
    );
    Ok(failed == 0)
}
