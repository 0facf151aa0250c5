//! The compare test as a program: `cargo xtask conformance`; and `time`, which times Linux's code.

mod time;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, atomic::AtomicUsize, atomic::Ordering},
    thread,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use conformance::{
    build::{self, Purpose},
    differences::Seen,
    drive::{Amount, Outcome},
    inputs,
    kernel::{Arch, Kernel},
    newer_qemu::NewerQemu,
    oldest_rustc,
    server::Server,
    setup::{self, Setup},
    source, timing,
};

/// Compares the bytes of our I/O page tables with those of Linux.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    /// Directory of Linux's source and of programs built of it.
    #[arg(
        long,
        global = true,
        value_name = "DIRECTORY",
        default_value = "target/conformance"
    )]
    work: PathBuf,
    /// Longer, from a seed of the day, and with every compiler that is there.
    #[arg(long)]
    full: bool,
    /// The first seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Only tables whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    Time(time::Options),
    /// Builds a kernel, unless it is there, a module for it if it has any, and the kernel with other tables if it has an
    /// IOMMU.
    Linux(Linux),
    /// Records files that something is to be built of.
    Inputs {
        /// The record.
        #[arg(long, value_name = "FILE")]
        record: PathBuf,
        /// Files, and directories with all of theirs, below the repository.
        paths: Vec<PathBuf>,
    },
    /// Fetches QEMU 11 for all machines: programs with QEMU's names in `newer-qemu/bin` of the directory of `--work`.
    Qemu,
    /// Fetches the oldest Rust compiler that is supported: the program `rustc` in the directory of `--work`.
    Rustc,
}

#[derive(Args)]
struct Linux {
    /// The kernel, by its name.
    #[arg(long, value_name = "NAME")]
    kernel: String,
    /// The module's directory.
    #[arg(long, value_name = "DIRECTORY", requires = "module_object")]
    module: Option<PathBuf>,
    /// An object that belongs to it, for which it needs no source.
    #[arg(long, value_name = "FILE")]
    module_object: Option<PathBuf>,
    /// The record of what it is built of.
    #[arg(long, value_name = "FILE", requires = "module")]
    module_inputs: Option<PathBuf>,
    /// The tables' directory.
    #[arg(long, value_name = "DIRECTORY")]
    tables: PathBuf,
    /// An object that belongs to them.
    #[arg(long, value_name = "FILE")]
    tables_object: PathBuf,
    /// The record of what they are built of; without one the kernel is run by nothing that asks for it.
    #[arg(long, value_name = "FILE")]
    tables_inputs: Option<PathBuf>,
}

/// Exit status when Linux's source cannot be had.
const NO_SOURCE: u8 = 3;

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(Command::Qemu) = options.command {
        let mut arches = [Arch::X86, Arch::Arm, Arch::RiscV].into_iter();
        let fetch = |arch| NewerQemu::fetch(arch, &options.work).map(drop);
        return exit(arches.try_for_each(fetch));
    }
    if let Some(Command::Rustc) = options.command {
        return exit(oldest_rustc::fetch(&options.work).map(drop));
    }
    if let Some(Command::Inputs { record, paths }) = &options.command {
        let made = inputs::record(&inputs::root(), paths);
        return exit(made.and_then(|made| Ok(fs::write(record, made)?)));
    }
    let source = match source::fetch(&options.work) {
        Ok(source) => source,
        Err(error) => {
            eprintln!("Linux's source cannot be had: {error:#}");
            return ExitCode::from(NO_SOURCE);
        }
    };
    exit(match &options.command {
        Some(Command::Time(wanted)) => time::time(wanted, &source, &options.work),
        Some(Command::Linux(wanted)) => linux(wanted, &options.work),
        Some(Command::Qemu | Command::Rustc | Command::Inputs { .. }) | None => {
            compare(&options, &source)
        }
    })
}

fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn linux(wanted: &Linux, work: &Path) -> anyhow::Result<()> {
    let name = &wanted.kernel;
    let kernel = Kernel::find(name).with_context(|| format!("no kernel is called {name}"))?;
    if kernel.kept(work).is_none() {
        let start = Instant::now();
        let built = kernel.build(&source::package(work)?, work)?;
        let took = start.elapsed().as_secs();
        println!("{} built in {took} s", built.display());
    }
    let record = |file: &Option<PathBuf>| file.as_ref().map(fs::read_to_string).transpose();
    if let Some((module, object)) = wanted.module.as_ref().zip(wanted.module_object.as_ref())
        && kernel.has_modules()
    {
        let inputs = record(&wanted.module_inputs)?;
        kernel.build_module(module, object, inputs.as_deref(), work)?;
        println!("modules in {}", kernel.modules(work).display());
    }
    if kernel.arch.has_tables() {
        let inputs = record(&wanted.tables_inputs)?;
        let (tables, object) = (&wanted.tables, &wanted.tables_object);
        let linked = kernel.link_tables(tables, object, inputs.as_deref(), work)?;
        println!("{} with our tables", linked.display());
    }
    Ok(())
}

fn compare(options: &Options, source: &Path) -> anyhow::Result<()> {
    let today = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(1, |since| since.as_secs())
    };
    let amount = Amount {
        seed: options
            .seed
            .unwrap_or_else(|| if options.full { today() } else { 1 }),
        sequences: if options.full { 60 } else { 8 },
        operations: 120,
    };
    let setups: Vec<Setup> = setup::all()?
        .into_iter()
        .filter(|setup| {
            options
                .only
                .as_ref()
                .is_none_or(|name| setup.name.contains(name))
        })
        .collect();
    let compilers: Vec<_> = build::COMPILERS
        .into_iter()
        .enumerate()
        .filter(|(nth, name)| *nth == 0 || options.full && build::has(name))
        .map(|(_, name)| name)
        .collect();
    for compiler in compilers {
        let start = Instant::now();
        let program = build::build(source, &options.work, compiler, Purpose::Compare)?;
        println!(
            "{compiler}: built in {:.1} s; seeds {} to {}",
            start.elapsed().as_secs_f64(),
            amount.seed,
            amount.seed + amount.sequences - 1
        );
        let outcome = drive_all(&setups, &program, &amount)?;
        report(&outcome, setups.len(), start);
        let timed = build::build(source, &options.work, compiler, Purpose::Time)?;
        check_timing(&timed, options.only.as_deref())?;
        if options.only.is_none() {
            let missing = outcome.seen.missing();
            anyhow::ensure!(
                missing.is_empty(),
                "in the list of differences, and never seen: {}",
                missing.join("; ")
            );
        }
    }
    Ok(())
}

/// Linux's tables do what is timed, in the sizes that are asked for.
fn check_timing(program: &std::path::Path, only: Option<&str>) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut done = 0;
    for table in timing::tables()? {
        if only.is_none_or(|name| table.name.contains(name)) {
            done += timing::check(program, &table).with_context(|| table.name)?;
        }
    }
    println!(
        "timed: {done} kinds of work looked at; {:.1} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// All setups, side by side on the processors there are.
fn drive_all(
    setups: &[Setup],
    program: &std::path::Path,
    amount: &Amount,
) -> anyhow::Result<Outcome> {
    let next = AtomicUsize::new(0);
    let total = Mutex::new((Outcome::default(), Vec::new()));
    let work = || {
        while let Some(setup) = setups.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let result = Server::start(program)
                .and_then(|mut server| setup.drive(&mut server, amount))
                .with_context(|| setup.name.clone());
            let Ok(mut total) = total.lock() else {
                return;
            };
            match result {
                Ok(outcome) => {
                    println!(
                        "  {:<46} {:>6} taken {:>4} refused {:>8} leaves {:>7} tables {:>5.1} s",
                        setup.name,
                        outcome.taken,
                        outcome.refused,
                        outcome.counts.leaves,
                        outcome.counts.tables,
                        start.elapsed().as_secs_f64()
                    );
                    total.0.add(&outcome);
                }
                Err(error) => {
                    println!("  {:<46} FAILED", setup.name);
                    total.1.push(error);
                }
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    let (outcome, errors) = total.into_inner().unwrap_or_default();
    let count = errors.len();
    for error in &errors {
        eprintln!("\n{error:#}");
    }
    anyhow::ensure!(count == 0, "tables that differ from Linux's: {count}");
    Ok(outcome)
}

fn report(outcome: &Outcome, setups: usize, start: Instant) {
    let Seen(seen) = &outcome.seen;
    println!("intended differences, and how often they were seen:");
    for (name, count) in seen {
        println!("  {count:>9}  {name}");
    }
    println!(
        "{setups} tables: {} requests taken, {} refused, {} translations, {} comparisons of whole \
         trees with {} leaves and {} entries of tables; {:.1} s",
        outcome.taken,
        outcome.refused,
        outcome.translations,
        outcome.trees,
        outcome.counts.leaves,
        outcome.counts.tables,
        start.elapsed().as_secs_f64()
    );
}
