//! The guests as a program: `cargo xtask guests` and `cargo xtask guest-dma`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
};

use anyhow::{Context as _, anyhow, ensure};
use clap::{Parser, Subcommand};
use conformance::{
    initramfs::Initramfs,
    kernel::{ARM, Arch, DMA, GUEST, Kernel, TRACED, Tables},
    newer_qemu::NewerQemu,
    patch::Patch,
};
use guest::{
    dma::{self, Measure},
    linux_tests,
    machines::{
        MACHINES, Machine, Unit,
        provoked::{PROVOKED, is_monitor},
    },
    qemu::{Boot, arch, directory},
};

/// Boots Linux under emulated IOMMUs and runs tests in it.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
    /// Where Linux's source, the kernel and what the guests say lie.
    #[arg(
        long,
        global = true,
        value_name = "DIRECTORY",
        default_value = "target/conformance"
    )]
    work: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Boots the machines.
    Run {
        /// The guest's first process.
        #[arg(long, value_name = "PROGRAM")]
        init: PathBuf,
        /// The command line `dmaspace`.
        #[arg(long, value_name = "PROGRAM")]
        dmaspace: PathBuf,
        /// A further program that is packed.
        #[arg(long, value_name = "PROGRAM")]
        example: Vec<PathBuf>,
        /// Only tests whose name contains this, or one of several that commas part, or all of the machine of this name.
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// The kernel: guest, hardened, arm, riscv.
        #[arg(long, value_name = "NAME", default_value = GUEST.name, value_parser = kernel)]
        kernel: Kernel,
        /// I/O page tables of the kernel.
        #[arg(long, value_enum, default_value_t)]
        tables: Tables,
        /// Lines of ours that go into it; may be given again.
        #[arg(long, value_enum)]
        patch: Vec<Patch>,
        /// Only the machines on which faults are provoked; the files of their cases go below this directory.
        #[arg(long, value_name = "DIRECTORY")]
        keep: Option<PathBuf>,
    },
    /// Measures Linux's DMA API beside `ioas::Dma`, in instructions.
    Dma {
        /// The guest's first process.
        #[arg(long, value_name = "PROGRAM")]
        init: PathBuf,
        /// Only behind this IOMMU: intel, amd; with --tables smmu1, smmu2 too.
        #[arg(long, value_name = "NAME")]
        unit: Option<String>,
        /// The processor, as QEMU calls it.
        #[arg(long, value_name = "MODEL", default_value = dma::PROCESSOR)]
        processor: String,
        /// The kernel's I/O page tables; of these only its DMA API is measured, unless there is a patch.
        #[arg(long, value_enum)]
        tables: Option<Tables>,
        /// Only VFIO's type 1 and iommufd, in a kernel into which this goes; may be given again.
        #[arg(long, value_enum)]
        patch: Vec<Patch>,
        /// Only which functions of the kernel VFIO's type 1 and iommufd call, and how often.
        #[arg(long, conflicts_with = "tables")]
        trace: bool,
    },
    /// Runs Linux's own tests of what maps, with its tables and with ours.
    LinuxTests {
        /// The kernel.
        #[arg(long, value_name = "NAME", value_parser = kernel)]
        kernel: Kernel,
        /// Only the parts whose names contain this, or one of several that commas part: kunit, selftests, drivers.
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// Suites of KUnit that this pattern names.
        #[arg(long, value_name = "GLOB", default_value = "*")]
        suites: String,
        /// Our tables may be others than the sources say.
        #[arg(long)]
        planted: bool,
        /// Lines of ours that go into both kernels; may be given again.
        #[arg(long, value_enum)]
        patch: Vec<Patch>,
    },
}

/// The kernel of this name.
fn kernel(name: &str) -> anyhow::Result<Kernel> {
    Kernel::find(name).with_context(|| format!("no kernel is called {name}"))
}

/// Exit status when there is no kernel.
const NOT_THERE: u8 = 3;

/// Lines that are shown of what a guest and its QEMU said, when it failed.
const TAIL: usize = 40;

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options.command {
        Command::Run {
            init,
            dmaspace,
            example,
            only,
            kernel,
            tables,
            patch,
            keep,
        } => {
            let programs = Programs {
                init,
                dmaspace,
                examples: example,
            };
            let built = (*kernel, *tables, &**patch);
            let chosen = (only.as_deref(), keep.as_deref());
            run(&options.work, &programs, chosen, built)
        }
        Command::Dma {
            init,
            unit,
            processor,
            tables,
            patch,
            trace,
        } => measure(
            &options.work,
            init,
            unit.as_deref(),
            processor,
            (*tables, patch, *trace),
        ),
        Command::LinuxTests {
            kernel,
            only,
            suites,
            planted,
            patch,
        } => {
            let chosen = (only.as_deref(), suites.as_str());
            let built = (*kernel, &**patch, *planted);
            linux_tests::run(built, &options.work, chosen).map(|()| Done::All)
        }
    };
    match done {
        Ok(Done::All) => ExitCode::SUCCESS,
        Ok(Done::NotThere(reason)) => {
            eprintln!("{reason}");
            ExitCode::from(NOT_THERE)
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Outcome of a run.
enum Done {
    All,
    /// Nothing, since something is not there.
    NotThere(String),
}

/// Programs to pack.
struct Programs<'a> {
    init: &'a Path,
    dmaspace: &'a Path,
    examples: &'a [PathBuf],
}

fn run(
    work: &Path,
    programs: &Programs<'_>,
    (only, keep): (Option<&str>, Option<&Path>),
    (kernel, tables, patches): (Kernel, Tables, &[Patch]),
) -> anyhow::Result<Done> {
    if kernel.kept(work).is_none() {
        return Ok(Done::NotThere(kernel.missing()));
    }
    let image = kernel.linked(tables, patches, work)?;
    let all = match keep {
        None => MACHINES,
        Some(_) => PROVOKED,
    };
    let chosen: Vec<&Machine> = all
        .iter()
        .filter(|machine| arch(machine.unit).0 == kernel.arch)
        .filter(|machine| machine.tests(only).next().is_some())
        .collect();
    ensure!(
        !chosen.is_empty(),
        "no test has `{}` in its name",
        only.unwrap_or_default()
    );
    let directory = directory(work);
    fs::create_dir_all(&directory)?;
    let initramfs = directory.join("initramfs");
    let mut archive = Initramfs::new()?;
    archive.with_libraries("init", programs.init)?;
    archive.with_libraries("bin/dmaspace", programs.dmaspace)?;
    // For the machine that starts the next one.
    archive.program("bin/kernel", &fs::read(&image)?)?;
    // Kernels of other processors have none.
    let balloon = kernel.modules(work).join("virtio_balloon.ko");
    if balloon.exists() {
        archive.program("bin/virtio_balloon.ko", &fs::read(balloon)?)?;
    }
    for example in programs.examples {
        let name = example.file_name().unwrap_or_default().to_string_lossy();
        archive.with_libraries(&format!("bin/{name}"), example)?;
    }
    fs::write(&initramfs, archive.finish()?)?;
    let qemu = NewerQemu::fetch(kernel.arch, work)?;
    let mut monitor = Initramfs::default();
    if chosen.iter().any(|machine| is_monitor(machine.name)) {
        qemu.pack(&mut monitor)?;
    }
    let monitor = monitor.finish()?;
    let boot = Boot {
        dmaspace: programs.dmaspace,
        qemu: &qemu,
        kernel: &image,
        tables,
        patches,
        initramfs: &initramfs,
        monitor: &monitor,
        directory: &directory,
        only,
    };
    // Side by side, since most of the time is spent in waiting for devices.
    let runs = thread::scope(|scope| {
        let boot = &boot;
        let run = |machine| scope.spawn(move || boot.run(machine));
        let running: Vec<_> = chosen.iter().map(|machine| run(*machine)).collect();
        running
            .into_iter()
            .map(|run| run.join())
            .collect::<Vec<_>>()
    });
    let mut failed = Vec::new();
    for (machine, run) in chosen.into_iter().zip(runs) {
        let results = match run.unwrap_or_else(|_| Err(anyhow!("panicked"))) {
            Ok(results) => results,
            Err(error) => {
                show(&[], &boot.logs(machine));
                failed.push(format!("{}: {error:#}", machine.name));
                continue;
            }
        };
        let passed = results.passed();
        if let Some(directory) = keep {
            results.keep(&directory.join(machine.name))?;
        }
        let faults = results.faults();
        println!("{}: {passed} ok, {} wrong", machine.name, faults.len());
        if !faults.is_empty() {
            show(&faults, &boot.logs(machine));
            failed.push(format!("{}: {}", machine.name, faults.join("; ")));
        }
    }
    // Once more at the very end, which is what is kept of long output.
    ensure!(
        failed.is_empty(),
        "machines with tests that failed: {}\n{}",
        failed.len(),
        failed.join("\n")
    );
    Ok(Done::All)
}

fn measure(
    work: &Path,
    init: &Path,
    unit: Option<&str>,
    processor: &str,
    (tables, patches, trace): (Option<Tables>, &[Patch], bool),
) -> anyhow::Result<Done> {
    let wanted = |(name, _): &(&str, Unit)| unit.is_none_or(|unit| unit == *name);
    let units: Vec<_> = Unit::MEASURED.into_iter().filter(wanted).collect();
    // Unless one is named, those of x86-64.
    let kernel = match *units {
        [(_, unit)] if arch(unit).0 == Arch::Arm => ARM,
        _ if trace => TRACED,
        _ => DMA,
    };
    let units: Vec<_> = units
        .into_iter()
        .filter(|(_, unit)| arch(*unit).0 == kernel.arch)
        .collect();
    ensure!(!units.is_empty(), "no IOMMU has this name");
    ensure!(
        kernel.arch == Arch::X86 || tables.is_some(),
        "only Linux's DMA API is measured on {}",
        kernel.name
    );
    if kernel.kept(work).is_none() {
        return Ok(Done::NotThere(kernel.missing()));
    }
    let qemu = NewerQemu::fetch(kernel.arch, work)?;
    let kernel = kernel.linked(tables.unwrap_or_default(), patches, work)?;
    let directory = directory(work);
    fs::create_dir_all(&directory)?;
    let initramfs = directory.join("dma.initramfs");
    let mut archive = Initramfs::new()?;
    archive.with_libraries("init", init)?;
    fs::write(&initramfs, archive.finish()?)?;
    let measure = Measure {
        qemu: &qemu,
        kernel: &kernel,
        tables,
        patched: !patches.is_empty(),
        trace,
        initramfs: &initramfs,
        directory: &directory,
        processor,
    };
    // Side by side: no time passes in a guest but by its own instructions.
    let tables = thread::scope(|scope| {
        let run = |(name, unit)| scope.spawn(move || measure.run(name, unit));
        let running: Vec<_> = units.iter().copied().map(run).collect();
        let ends = running.into_iter().map(|run| run.join());
        ends.collect::<Vec<_>>()
    });
    for ((name, _), table) in units.into_iter().zip(tables) {
        let table = table.map_err(|_| anyhow!("{name}: panicked"))?;
        println!("\n{}", table.with_context(|| name.to_owned())?);
    }
    Ok(Done::All)
}

/// Prints the faults of a machine, and the end of its output.
fn show(faults: &[String], logs: &[PathBuf]) {
    for log in logs {
        let said = fs::read(log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().collect();
        println!("  the end of {}:", log.display());
        for line in &lines[lines.len().saturating_sub(TAIL)..] {
            println!("  | {line}");
        }
    }
    for fault in faults {
        println!("  FAILED {fault}");
    }
}
