//! The guests as a program: `cargo xtask balloon`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use balloon_rig::bench::Bench;
use balloon_rig::checks::{self, Balloon, MIB};
use balloon_rig::daemon::Daemon;
use balloon_rig::guest::{Attached, Driver, Guest, Parts, until};
use balloon_rig::hostile;
use balloon_rig::page_by_page::PageByPage;
use balloon_rig::qemu::OfQemu;
use clap::Parser;
use conformance::kernel::{Arch, Kernel};
use hostmem::{HugeSize, RaisedPool};

/// Boots a Linux guest with its own balloon driver, and with ours, against balloons of ours.
#[derive(Parser)]
struct Options {
    /// The command line `dmaspace`.
    #[arg(long, value_name = "PROGRAM")]
    dmaspace: PathBuf,
    /// Where `cargo xtask linux` has left kernels and their modules.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/conformance")]
    work: PathBuf,
    /// The guests' kernel: um, um-debug, or guest for one in QEMU.
    #[arg(long, value_name = "NAME", default_value = "um")]
    kernel: String,
    /// More words for the guests' kernel, such as page_poison=1; may be repeated.
    #[arg(long, value_name = "WORD")]
    word: Vec<String>,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Time Linux's driver and ours, instead of checks. The guests' memory is a file in TMPDIR, which must be a tmpfs.
    #[arg(long)]
    bench: bool,
    /// MiB of the guests of the bench.
    #[arg(long, value_name = "MIB", default_value = "1536")]
    guest: u32,
    /// MiB of the balloons of the bench.
    #[arg(long, value_name = "MIB", default_value = "1024")]
    balloon: u32,
    /// Rounds of the bench.
    #[arg(long, value_name = "COUNT", default_value = "5")]
    rounds: usize,
    /// In the bench, every other page of the guests is in use.
    #[arg(long)]
    scattered: bool,
}

/// Guests of a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Any,
    Qemu,
    /// The device of the bench, and kernels that look for mistakes.
    Uml,
}

/// A check.
type Check = (&'static str, On, fn(&Parts, &Path) -> anyhow::Result<()>);

/// All of them. On User-Mode Linux they are a command only, for kernels that look for mistakes.
const CHECKS: &[Check] = &[
    ("page_by_page", On::Uml, page_by_page),
    (
        "one_driver_after_another",
        On::Any,
        one_driver_after_another,
    ),
    ("in_bulk", On::Any, in_bulk),
    ("free_pages_are_reported", On::Any, free_pages_are_reported),
    (
        "our_driver_leaves_nothing",
        On::Uml,
        our_driver_leaves_nothing,
    ),
    ("hostile_devices", On::Any, hostile_devices),
    ("pages_migrate", On::Qemu, pages_migrate),
    ("from_huge_pages", On::Qemu, from_huge_pages),
    ("on_qemus_device", On::Qemu, on_qemus_device),
];

/// MiB of the guests, which are slow in QEMU, and bytes in their balloons.
const GUEST: u32 = 192;
const BALLOON: u64 = 80 * MIB;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    let kernel = Kernel::find(&options.kernel)
        .with_context(|| format!("no kernel is called {}", options.kernel))?;
    let parts = Parts::find(kernel, &options.work, &options.word)?;
    if options.bench {
        let bench = Bench {
            guest: options.guest,
            balloon: options.balloon,
            rounds: options.rounds,
            scattered: options.scattered,
        };
        return bench.run(&parts, &options.dmaspace);
    }
    let wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only));
    let other = match kernel.arch {
        Arch::Um => On::Qemu,
        Arch::X86 | Arch::Arm | Arch::RiscV => On::Uml,
    };
    let chosen = CHECKS
        .iter()
        .filter(|(name, on, _)| wanted(name) && *on != other);
    let chosen: Vec<_> = chosen.collect();
    ensure!(!chosen.is_empty(), "no check has that in its name");
    let mut failed = 0;
    for (name, _, check) in chosen {
        let start = Instant::now();
        match check(&parts, &options.dmaspace) {
            Ok(()) => println!("ok {name}, {:.1} s", start.elapsed().as_secs_f64()),
            Err(error) => {
                failed += 1;
                println!("FAILED {name}: {error:#}");
            }
        }
    }
    ensure!(failed == 0, "checks that failed: {failed}");
    Ok(())
}

/// The device to compare with does what it is there for.
fn page_by_page(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    let (mut guest, mut balloon) = PageByPage::boot(parts, GUEST)?;
    checks::load(&mut guest, Driver::Stock)?;
    checks::prepare(&mut guest)?;
    checks::memory_comes_and_goes(&mut guest, &mut balloon, BALLOON)?;
    let (messages, pages) = balloon.counts();
    let wanted = BALLOON / MIB;
    ensure!(
        (messages, pages) == (2 * wanted, wanted << 8),
        "{messages} messages, and {pages} pages were given back"
    );
    Ok(())
}

/// Bits of the features that `dmaspace balloon` offers, but for reporting and messages in bulk: a report takes free
/// memory away for a while.
const OFFERED: [usize; 5] = [0, 1, 2, 3, 4];

/// Linux's driver, then ours by the standard's page numbers, on `dmaspace balloon`: a guest that connects after another
/// finds the target, and an empty balloon.
fn one_driver_after_another(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let daemon = &mut Daemon::start(program, &socket, &["--no-reporting"])?;
    let target = 32 * MIB;
    for driver in [Driver::Stock, Driver::Pages] {
        daemon.set_target(target)?;
        let guest = &mut Guest::boot(parts, GUEST, Attached::VhostUser(&socket), &[])?;
        checks::load(guest, driver)?;
        // Counted by the guest, since the device could still believe the one before.
        until("a balloon without a word", || {
            let pages = checks::count_of(guest, "balloon_inflate")?;
            Ok((4096 * pages >= target && daemon.actual()? == target).then_some(()))
        })?;
        daemon.reach(0)?;
        checks::prepare(guest)?;
        checks::features(guest, &OFFERED)?;
        goes_through_everything(guest, daemon, driver)?;
        let mut steps = Steps::default();
        checks::statistics(guest, daemon)?;
        checks::hinting(guest, daemon)?;
        steps.ended("statistics and hints");
        ends_well(guest, daemon)?;
    }
    let ended = daemon.interrupt()?;
    ensure!(ended.success() && !socket.exists(), "after SIGINT: {ended}");
    Ok(())
}

/// Messages in bulk, in QEMU from a guest that fills free pages.
fn in_bulk(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let daemon = &mut Daemon::start(program, &socket, &["--no-reporting"])?;
    let attached = Attached::VhostUser(&socket);
    // User-Mode Linux has it only where it looks for mistakes.
    let poison = parts.emulated().then_some("page_poison=1");
    let guest = &mut Guest::boot(parts, GUEST, attached, poison.as_slice())?;
    checks::load(guest, Driver::Bulk)?;
    checks::prepare(guest)?;
    checks::features(guest, &[&OFFERED[..], &[23]].concat())?;
    goes_through_everything(guest, daemon, Driver::Bulk)?;
    let (given, calls) = (daemon.count("inflated_bytes")?, daemon.count("discards")?);
    ensure!(
        calls < given / 4096 / 16,
        "{given} bytes of the balloon were given back by {calls} calls"
    );
    let mut steps = Steps::default();
    checks::statistics(guest, daemon)?;
    checks::hinting(guest, daemon)?;
    steps.ended("statistics and hints");
    ends_well(guest, daemon)
}

/// Neither side has anything to complain of.
fn ends_well(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<()> {
    let refused = daemon.count("refused")?;
    ensure!(
        refused == 0,
        "of a good driver {refused} parts of messages were refused"
    );
    guest.complaints()
}

/// Each driver reports free pages, which are given back; ours on QEMU's device as well.
fn free_pages_are_reported(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    const GUEST: u32 = 256;
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let _daemon = Daemon::start(program, &socket, &[])?;
    let guest = &mut Guest::boot(parts, GUEST, Attached::VhostUser(&socket), &[])?;
    checks::prepare(guest)?;
    for driver in Driver::ALL {
        let mut steps = Steps::default();
        checks::reporting(guest, driver)?;
        steps.ended(driver.name());
    }
    guest.complaints()?;
    if parts.emulated() {
        let (mut guest, _) = OfQemu::boot(parts, GUEST, directory.path(), true, &[])?;
        checks::prepare(&mut guest)?;
        checks::reporting(&mut guest, Driver::Pages)?;
        guest.complaints()?;
    }
    Ok(())
}

/// Unloaded again and again, ours leaves nothing allocated, where the kernel was built to know that.
fn our_driver_leaves_nothing(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let _daemon = Daemon::start(program, &socket, &[])?;
    let guest = &mut Guest::boot(parts, GUEST, Attached::VhostUser(&socket), &[])?;
    checks::load(guest, Driver::Bulk)?;
    checks::nothing_leaks(guest)?;
    guest.complaints()
}

/// Devices that answer wrongly, or not at all, or late.
fn hostile_devices(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    hostile::outlive(parts)
}

/// Pages of the balloon are in memory that goes offline.
fn pages_migrate(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let daemon = &mut Daemon::start(program, &socket, &["--no-reporting"])?;
    let attached = Attached::VhostUser(&socket);
    let guest = &mut Guest::boot(parts, checks::MOVABLE_GUEST, attached, &[checks::MOVABLE])?;
    checks::prepare(guest)?;
    checks::write_data(guest)?;
    for driver in Driver::ALL {
        let mut steps = Steps::default();
        checks::load(guest, driver)?;
        let pages = checks::migration(guest, daemon)?;
        daemon.reach(0)?;
        checks::unload(guest, driver)?;
        steps.ended(&format!("{}: {pages} pages", driver.name()));
    }
    checks::data_is_intact(guest)?;
    ends_well(guest, daemon)
}

/// The host's memory is huge pages, which are given back whole.
fn from_huge_pages(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let _pool = match RaisedPool::raise(HugeSize::TwoMiB, u64::from(GUEST) * MIB) {
        Ok(pool) => pool,
        Err(error) if env::var_os("CI").is_none() => {
            println!("NOT RUN: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut parts = parts.clone();
    parts.huge = true;
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let daemon = &mut Daemon::start(program, &socket, &["--no-reporting"])?;
    let guest = &mut Guest::boot(&parts, GUEST, Attached::VhostUser(&socket), &[])?;
    checks::load(guest, Driver::Bulk)?;
    checks::prepare(guest)?;
    checks::memory_comes_and_goes(guest, daemon, BALLOON)?;
    ends_well(guest, daemon)
}

/// The standard's part, on a device that others wrote, from a guest that fills free pages.
fn on_qemus_device(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let words = ["page_poison=1"];
    let (mut guest, mut balloon) = OfQemu::boot(parts, GUEST, directory.path(), false, &words)?;
    let (guest, balloon) = (&mut guest, &mut balloon);
    checks::load(guest, Driver::Pages)?;
    checks::prepare(guest)?;
    checks::features(guest, &[1, 2, 4])?;
    let total = 1024 * guest.number("awk '/^MemTotal/ { print $2 }' /proc/meminfo")?;
    let told = balloon.statistic("stat-total-memory")?;
    ensure!(
        told == total,
        "statistics: {told} bytes in all, not {total}"
    );
    goes_through_everything(guest, balloon, Driver::Pages)?;
    guest.complaints()
}

/// All that a driver does on any device.
fn goes_through_everything(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    driver: Driver,
) -> anyhow::Result<()> {
    checks::write_data(guest)?;
    let mut steps = Steps::default();
    checks::memory_comes_and_goes(guest, balloon, BALLOON)?;
    steps.ended("inflating and deflating");
    checks::cycles(guest, balloon, 10, BALLOON)?;
    steps.ended("ten cycles");
    checks::out_of_memory(guest, balloon, BALLOON)?;
    steps.ended("deflating when out of memory");
    if driver != Driver::Stock {
        checks::module_comes_and_goes(guest, balloon, driver, BALLOON)?;
        steps.ended("the module comes and goes");
        if guest.has_pci()? {
            checks::removal(guest, balloon, BALLOON)?;
            steps.ended("the device is removed");
            checks::sleep(guest, balloon, BALLOON)?;
            steps.ended("the guest sleeps");
        }
    }
    balloon.reach(0)?;
    checks::data_is_intact(guest)
}

/// Says what each step took.
struct Steps(Instant);

impl Default for Steps {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Steps {
    fn ended(&mut self, name: &str) {
        println!("  {name}, {:.1} s", self.0.elapsed().as_secs_f64());
        self.0 = Instant::now();
    }
}
