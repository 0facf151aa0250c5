//! The guests: `conformance/guest` boots a small Linux under emulated IOMMUs, and runs tests in it.

use std::{
    collections::VecDeque,
    io::{BufRead as _, BufReader},
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository,
    host::Need,
    linux,
    parts::Outcome,
    programs::{Passed, Programs, TARGET},
};

/// The package with the keys by which the emulator is fetched.
pub(crate) const NEEDS: &[Need] = &[Need::Package("debian-archive-keyring")];

/// Program that measures in a guest.
const DMA: &str = "guest-dma";

/// The examples that want devices: they run in the guests.
const EXAMPLES: [&str; 3] = ["nvme", "vfio_ioctls", "vmm"];

/// Target of programs that run on another processor than this machine's.
struct Foreign {
    kernel: &'static str,
    /// The IOMMUs behind which Linux's DMA API is measured there.
    units: &'static [&'static str],
    /// As Rust calls it.
    target: &'static str,
    /// Its linker.
    gcc: &'static str,
}

const FOREIGN: [Foreign; 2] = [
    Foreign {
        kernel: linux::ARM,
        units: &["smmu1", "smmu2"],
        target: "aarch64-unknown-linux-gnu",
        gcc: "aarch64-linux-gnu-gcc",
    },
    Foreign {
        kernel: linux::RISCV,
        units: &[],
        target: "riscv64gc-unknown-linux-gnu",
        gcc: "riscv64-linux-gnu-gcc",
    },
];

impl Foreign {
    /// Target that an option names, if one does.
    fn named(options: &[&str]) -> Option<&'static Self> {
        let names = |foreign: &&Self| {
            let mut options = options.iter();
            options.any(|option| *option == foreign.kernel || foreign.units.contains(option))
        };
        FOREIGN.iter().find(names)
    }
}

/// The programs that `wanted` chooses, as they are published: an emulated processor runs them. What they are linked to is on
/// this machine, or in them.
fn programs(
    wanted: &[&str],
    foreign: Option<&Foreign>,
    repository: &Repository,
) -> anyhow::Result<Programs> {
    let Some(Foreign { target, gcc, .. }) = foreign else {
        return Programs::optimized(wanted, &[], repository);
    };
    let flags = format!("-Clinker={gcc}\u{1f}-Ctarget-feature=+crt-static");
    let variables = [(TARGET, *target), ("CARGO_ENCODED_RUSTFLAGS", &flags)];
    Programs::optimized(wanted, &variables, repository)
}

/// The program's exit status when there is no kernel.
const NOT_THERE: i32 = 3;

/// The part `guests` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    if let Some(reason) = other_machine() {
        return Ok(reason);
    }
    let (status, error) = run(&[], repository)?;
    if status.code() == Some(NOT_THERE) {
        let reason = "there is no kernel for the guests: see the part linux";
        return Ok(Outcome::NotRun(reason.into()));
    }
    ensure!(
        status.success(),
        "tests failed in the guests: {status}{error}"
    );
    Ok(Outcome::Passed)
}

/// The command `cargo xtask guests`.
pub(crate) fn command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let (status, _) = run(&passed.options(), repository)?;
    Ok(status.success())
}

/// The command `cargo xtask guest-dma`. Not a part of the test command: it takes long, and a kernel of its own.
pub(crate) fn dma_command(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let foreign = Foreign::named(&passed.options());
    let kernel = match foreign {
        Some(foreign) => foreign.kernel,
        None if passed.options().contains(&"--trace") => linux::TRACED,
        None => linux::DMA,
    };
    if !linux::build(kernel, repository)? {
        return Ok(false);
    }
    let measures = ["-pdmaspace-guest", "--features=measure"];
    let measures = programs(&measures, foreign, repository)?;
    let mut command = host(&Programs::build(repository)?, repository);
    command.args(["dma", "--init"]);
    command.arg(measures.path(DMA));
    command.args(passed.options());
    let status = command.status().context("the rig cannot be started")?;
    Ok(status.success())
}

/// Patches that go together, with our tables.
const PATCHES: [&str; 6] = [
    "unmap-runs",
    "page-sizes",
    "table-image",
    "node-domains",
    "kexec",
    "kexec-dma",
];

/// In a kernel with our tables and these patches devices do DMA, and the kernel's count says whose tables these were; leaves
/// change their sizes meanwhile; the tables are read from debugfs, and go over to the next kernel; devices of two nodes have a
/// domain for each node.
pub(crate) fn with_ours(repository: &Repository) -> anyhow::Result<Outcome> {
    let only =
        "kernel_tables,kernel_images,takes_what_it_unmaps,page_sizes,has_devices_of_both_nodes";
    let mut options = vec!["--tables", "iopt", "--only", only];
    options.extend(PATCHES.iter().flat_map(|patch| ["--patch", patch]));
    let (status, error) = run(&options, repository)?;
    let with = options.join(" ");
    ensure!(
        status.success(),
        "tests failed with {with}: {status}{error}"
    );
    Ok(Outcome::Passed)
}

/// Linux's own tests in the kernel of this name, which may be patched or have planted faults.
pub(crate) fn linux_tests(
    kernel: &str,
    (only, patches): (Option<&str>, &[String]),
    planted: bool,
    repository: &Repository,
) -> anyhow::Result<bool> {
    let mut command = host(&Programs::build(repository)?, repository);
    command.args(["linux-tests", "--kernel", kernel]);
    command.args(only.iter().flat_map(|only| ["--only", only]));
    command.args(planted.then_some("--planted"));
    command.args(patches.iter().flat_map(|patch| ["--patch", patch]));
    let status = command.status().context("the rig cannot be started")?;
    Ok(status.success())
}

fn other_machine() -> Option<Outcome> {
    let right = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    let reason = "the guests are built on and for x86-64 Linux";
    (!right).then(|| Outcome::NotRun(reason.into()))
}

fn run(options: &[&str], repository: &Repository) -> anyhow::Result<(ExitStatus, String)> {
    let packages = ["guest", "cli", "examples"].map(|name| format!("-pdmaspace-{name}"));
    let examples = EXAMPLES.map(|name| format!("--example={name}"));
    let wanted = packages.iter().chain(&examples).map(String::as_str);
    let wanted: Vec<_> = wanted.collect();
    let foreign = Foreign::named(options);
    let programs = programs(&wanted, foreign, repository)?;
    let mut command = host(&Programs::build(repository)?, repository);
    command
        .args(["run", "--init"])
        .arg(programs.path("guest-init"))
        .arg("--dmaspace")
        .arg(programs.path("dmaspace"));
    for example in EXAMPLES {
        command
            .arg("--example")
            .arg(programs.path("examples").join(example));
    }
    command.args(options);
    told(&mut command)
}

/// Lines at the end of a rig's errors that the summary has, since long output is cut where CI keeps it.
const LAST: usize = 10;

/// Runs a rig to its end; its status, and the last of its errors.
fn told(command: &mut Command) -> anyhow::Result<(ExitStatus, String)> {
    let command = command.stderr(Stdio::piped());
    let mut child = command.spawn().context("the rig cannot be started")?;
    let mut last = VecDeque::new();
    for line in BufReader::new(child.stderr.take().context("no errors")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        eprintln!("{line}");
        last.push_back(format!("\n    {line}"));
        if last.len() > LAST {
            last.pop_front();
        }
    }
    Ok((child.wait()?, last.into_iter().collect()))
}

/// The program on this side of the emulator.
fn host(programs: &Programs, repository: &Repository) -> Command {
    let mut command = programs.command("guests", repository);
    let work = repository.metadata.target_directory.join("conformance");
    command.arg("--work").arg(work);
    command
}
