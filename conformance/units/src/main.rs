//! The checks as a program: `cargo xtask units`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Instant,
};

use anyhow::Context as _;
use clap::Parser;
use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};
use units::{
    Board, Kind, Qemu, Rig, Unit,
    checks::{CHECKS, Check},
    cpu,
    report::{Done, Report},
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
    /// Writes what was checked to this file.
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Fails unless this file says what was checked, where it is of the same versions of QEMU.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
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

/// Counts of some tables, or of all.
#[derive(Default)]
struct Total {
    report: Report,
    failed: u64,
    left_out: u64,
}

/// True when all is well.
fn run(options: &Options) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let mut total = Total::default();
    let mut tables = Vec::new();
    for board in Board::ALL {
        let units = Unit::ALL.into_iter().filter(|unit| unit.board() == board);
        let kinds = units.flat_map(|unit| unit.kinds().iter().map(move |kind| (unit, *kind)));
        let mut kinds = kinds.peekable();
        if kinds.peek().is_none() {
            continue;
        }
        let qemu = match Qemu::find(options.program(board), board) {
            Ok(qemu) => Arc::new(qemu),
            Err(error) => {
                println!("  NOT RUN {board:?}: {error:#}");
                total.left_out += 1;
                continue;
            }
        };
        println!("{board:?}: {}", qemu.version());
        let version = qemu.version().to_owned();
        total.report.programs.push((board, version));
        tables.extend(kinds.map(|(unit, kind)| (Arc::clone(&qemu), unit, kind)));
    }
    // Side by side: an emulator and who drives it wait for each other in turns.
    let of_one =
        |(qemu, unit, kind): &(Arc<Qemu>, _, _)| Total::with_tables(options, qemu, *unit, *kind);
    let totals: Vec<_> = tables.par_iter().map(of_one).collect();
    for of_tables in totals {
        total.report.done.extend(of_tables.report.done);
        total.failed += of_tables.failed;
        total.left_out += of_tables.left_out;
    }
    let Total {
        mut report,
        mut failed,
        mut left_out,
    } = total;
    let cpu = cpu::run(
        |board| options.program(board),
        options.rounds,
        &options.only,
    );
    failed += cpu.failed;
    left_out += cpu.left_out;
    report.processors = cpu.done;
    let copies: u64 = report.done.iter().map(|done| done.copies).sum();
    let questions: u64 = report.processors.iter().map(|(_, count)| count).sum();
    let passed = (report.done.len() + report.processors.len()) as u64;
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
    let document = report.document();
    if let Some(file) = options.document.as_ref().filter(|_| failed == 0) {
        fs::write(file, &document).with_context(|| file.display().to_string())?;
    }
    let same = match &options.compare {
        Some(file) => compare(file, &report, &document)?,
        None => true,
    };
    Ok(failed == 0 && same)
}

/// True when the file says what was checked, or is of other versions of QEMU.
fn compare(file: &Path, report: &Report, document: &str) -> anyhow::Result<bool> {
    let there = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let mut versions = report.programs.iter().map(|(_, version)| version);
    if !versions.all(|version| there.contains(version.as_str())) {
        println!("  {} is of other versions of QEMU", file.display());
        return Ok(true);
    }
    if there == document {
        return Ok(true);
    }
    let differs = there.lines().zip(document.lines()).find(|(a, b)| a != b);
    let (old, new) = differs.unwrap_or(("", ""));
    println!("  FAILED  {} does not say what was checked", file.display());
    println!("  it has  {old}\n  found   {new}");
    println!("  `cargo xtask units --document` writes it anew");
    Ok(false)
}

impl Total {
    /// All checks of one unit with one kind of tables; a line for what failed, and one for the others.
    fn with_tables(options: &Options, qemu: &Qemu, unit: Unit, kind: Kind) -> Self {
        let mut total = Self::default();
        let start = Instant::now();
        let (mut passed, mut copies) = (0, 0);
        for check in CHECKS.iter().filter(|check| (check.applies)(unit, kind)) {
            let name = format!("{}, {kind}: {}", unit.name(), check.name);
            if !name.contains(&options.only) {
                continue;
            }
            if !qemu.offers(unit) {
                println!("  NOT RUN {name}: this QEMU has no such unit");
                total.left_out += 1;
                continue;
            }
            let rounds = if check.random { options.rounds } else { 1 };
            for round in 0..rounds {
                match one(qemu, unit, kind, check, round) {
                    Ok(done) => {
                        passed += 1;
                        copies += done.copies;
                        total.report.done.push(done);
                    }
                    Err(error) => {
                        println!("  FAILED  {name} (round {round}): {error:#}");
                        total.failed += 1;
                    }
                }
            }
        }
        if passed > 0 {
            let took = start.elapsed().as_secs_f64();
            let unit = unit.name();
            println!("  ok      {unit}, {kind}: {passed} checks, {copies} copies, {took:.2} s");
        }
        total
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
