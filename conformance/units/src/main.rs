//! The checks as a program: `cargo xtask units`.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use units::{
    Board, Kind, Qemu, Rig, Unit,
    checks::{CHECKS, Check},
    cpu,
    report::Done,
};

/// Checks tables and drivers on QEMU's emulated IOMMUs.
#[derive(Parser)]
struct Options {
    /// QEMU's program for x86-64.
    #[arg(long, value_name = "PROGRAM", default_value = Board::Q35.program())]
    qemu: String,
    /// QEMU's program for Arm.
    #[arg(long, value_name = "PROGRAM", default_value = Board::ArmVirt.program())]
    qemu_arm: String,
    /// QEMU's program for RISC-V.
    #[arg(long, value_name = "PROGRAM", default_value = Board::RiscvVirt.program())]
    qemu_riscv: String,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// Makes the checks with random choices this often, each time with others.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    rounds: u64,
}

impl Options {
    const fn program(&self, board: Board) -> &String {
        match board {
            Board::Q35 => &self.qemu,
            Board::ArmVirt => &self.qemu_arm,
            Board::RiscvVirt => &self.qemu_riscv,
        }
    }
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

/// Counts of all.
#[derive(Default)]
struct Total {
    done: Vec<Done>,
    failed: u64,
    left_out: u64,
}

/// True when all is well.
fn run(options: &Options) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let mut total = Total::default();
    for board in Board::ALL {
        let units = Unit::ALL.into_iter().filter(|unit| unit.board() == board);
        if units.clone().next().is_none() {
            continue;
        }
        let qemu = match Qemu::find(options.program(board), board) {
            Ok(qemu) => qemu,
            Err(error) => {
                println!("  NOT RUN {board:?}: {error:#}");
                total.left_out += 1;
                continue;
            }
        };
        println!("{board:?}: {}", qemu.version());
        for unit in units {
            for kind in unit.kinds() {
                total.with_tables(options, &qemu, unit, *kind);
            }
        }
    }
    let Total {
        done,
        mut failed,
        mut left_out,
    } = total;
    let copies: u64 = done.iter().map(|done| done.copies).sum();
    let cpu = cpu::run(
        |board| options.program(board),
        options.rounds,
        &options.only,
    );
    failed += cpu.failed;
    left_out += cpu.left_out;
    let questions: u64 = cpu.done.iter().map(|(_, questions)| questions).sum();
    let passed = (done.len() + cpu.done.len()) as u64;
    let took = begun.elapsed().as_secs_f64();
    println!(
        "{passed} ok, {failed} failed, {left_out} not run, {copies} copies by DMA, \
         {questions} questions, {took:.1} s"
    );
    anyhow::ensure!(
        passed + failed + left_out > 0,
        "no check has `{}` in its name",
        options.only
    );
    Ok(failed == 0)
}

impl Total {
    /// All checks of one unit with one kind of tables; a line for what failed, and one for the others.
    fn with_tables(&mut self, options: &Options, qemu: &Qemu, unit: Unit, kind: Kind) {
        let start = Instant::now();
        let (mut passed, mut copies) = (0, 0);
        for check in CHECKS.iter().filter(|check| (check.applies)(unit, kind)) {
            let name = format!("{}, {kind}: {}", unit.name(), check.name);
            if !name.contains(&options.only) {
                continue;
            }
            if !qemu.offers(unit) {
                println!("  NOT RUN {name}: this QEMU has no such unit");
                self.left_out += 1;
                continue;
            }
            for round in 0..options.rounds {
                match one(qemu, unit, kind, check, round) {
                    Ok(done) => {
                        passed += 1;
                        copies += done.copies;
                        self.done.push(done);
                    }
                    Err(error) => {
                        println!("  FAILED  {name} (round {round}): {error:#}");
                        self.failed += 1;
                    }
                }
            }
        }
        if passed > 0 {
            let took = start.elapsed().as_secs_f64();
            let unit = unit.name();
            println!("  ok      {unit}, {kind}: {passed} checks, {copies} copies, {took:.2} s");
        }
    }
}

fn one(qemu: &Qemu, unit: Unit, kind: Kind, check: &Check, round: u64) -> anyhow::Result<Done> {
    let rig = Rig::start(qemu, unit, kind, check.place, round)?;
    (check.run)(&rig)?;
    Ok(Done {
        unit,
        kind,
        check: check.name,
        copies: rig.copies(),
        leaves: rig.leaves(),
        costs: rig.costs(),
    })
}
