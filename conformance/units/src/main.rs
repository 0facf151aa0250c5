//! The checks as a program: `cargo xtask units`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
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
    /// Directory of the rigs, into which QEMU is fetched.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/conformance")]
    work: PathBuf,
    /// The command line `dmaspace`.
    #[arg(long, value_name = "PROGRAM", default_value = "target/debug/dmaspace")]
    dmaspace: PathBuf,
    /// QEMU's processors as walkers, in place of its units.
    #[arg(long, conflicts_with_all = ["document", "compare"])]
    processors: bool,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// Makes the checks with random choices this often, each time with others.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    rounds: u64,
    /// Writes the results to this file.
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Fails unless this file has the results, where it is of the same versions of QEMU.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
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
}

/// True when all is well.
fn run(options: &Options) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let fetch = |board| anyhow::Ok((board, Qemu::fetch(board, &options.work)?));
    let boards: BTreeMap<_, _> = Board::ALL
        .into_iter()
        .map(fetch)
        .collect::<Result<_, _>>()?;
    for qemu in boards.values() {
        println!("{}", qemu.version());
    }
    let (passed, failed, asked, same);
    if options.processors {
        let counts = cpu::run(|board| &boards[&board], options.rounds, &options.only);
        (passed, failed, same) = (counts.passed, counts.failed, true);
        asked = format!("{} questions", counts.questions);
    } else {
        let Total { report, failed: no } = units(options, &boards);
        (passed, failed) = (report.done.len() as u64, no);
        let copies: u64 = report.done.iter().map(|done| done.copies).sum();
        asked = format!("{copies} copies by DMA");
        let document = report.document();
        if let Some(file) = options.document.as_ref().filter(|_| failed == 0) {
            fs::write(file, &document).with_context(|| file.display().to_string())?;
        }
        same = match &options.compare {
            Some(file) => compare(file, &report, &document)?,
            None => true,
        };
    }
    let took = begun.elapsed().as_secs_f64();
    println!("{passed} ok, {failed} failed, {asked}, {took:.1} s");
    anyhow::ensure!(
        passed + failed > 0,
        "no check has `{}` in its name",
        options.only
    );
    Ok(failed == 0 && same)
}

/// All checks of units.
fn units(options: &Options, boards: &BTreeMap<Board, Qemu>) -> Total {
    let mut total = Total::default();
    for (board, qemu) in boards {
        total
            .report
            .programs
            .push((*board, qemu.version().to_owned()));
    }
    let tables: Vec<_> = Unit::ALL
        .into_iter()
        .flat_map(|unit| unit.kinds().iter().map(move |kind| (unit, *kind)))
        .collect();
    // Side by side: an emulator and who drives it wait for each other in turns.
    let of_one = |(unit, kind): &(Unit, _)| {
        Total::with_tables(options, &boards[&unit.board()], *unit, *kind)
    };
    let totals: Vec<_> = tables.par_iter().map(of_one).collect();
    for of_tables in totals {
        total.report.done.extend(of_tables.report.done);
        total.failed += of_tables.failed;
    }
    total
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
    println!("  FAILED  {} differs from the results", file.display());
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
            let rounds = if check.random { options.rounds } else { 1 };
            for round in 0..rounds {
                match one(options, qemu, (unit, kind), check, round) {
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

fn one(
    options: &Options,
    qemu: &Qemu,
    (unit, kind): (Unit, Kind),
    check: &Check,
    round: u64,
) -> anyhow::Result<Done> {
    let rig = Rig::start(qemu, unit, kind, check.place, round, &options.dmaspace)?;
    (check.run)(&rig)?;
    Ok(Done {
        unit,
        kind,
        check: check.name,
        copies: rig.copies(),
        leaves: rig.leaves(),
        costs: rig.costs(),
        life: rig.life(),
    })
}
