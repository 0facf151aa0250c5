//! The checks of the balloon's driver as a program: `cargo xtask test --only balloon-qemu`.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use units::{Board, balloon::CHECKS};

/// Checks the balloon's driver on QEMU's device.
#[derive(Parser)]
struct Options {
    /// QEMU's program for x86-64.
    #[arg(long, value_name = "PROGRAM", default_value = Board::Q35.program())]
    qemu: String,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let begun = Instant::now();
    let (mut passed, mut failed) = (0, 0);
    let checks = CHECKS
        .iter()
        .filter(|check| check.name.contains(&options.only));
    for check in checks {
        let start = Instant::now();
        let result = (check.run)(&options.qemu);
        let took = start.elapsed().as_secs_f64();
        match result {
            Ok(found) => {
                println!("  ok      {}: {found}, {took:.2} s", check.name);
                passed += 1;
            }
            Err(error) => {
                println!("  FAILED  {}: {error:#}, {took:.2} s", check.name);
                failed += 1;
            }
        }
    }
    let took = begun.elapsed().as_secs_f64();
    println!("{passed} ok, {failed} failed, {took:.1} s");
    if passed > 0 && failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
