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
use balloon_rig::hostile::{self, Wrong};
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

/// A check.
type Check = fn(&Parts, &Path) -> anyhow::Result<()>;

/// In User-Mode Linux.
const UML: &[(&str, Check)] = &[
    ("page_by_page", page_by_page),
    ("all_of_the_stock_driver", all_of_the_stock_driver),
    ("all_of_our_driver", all_of_our_driver),
    ("all_of_our_driver_in_bulk", all_of_our_driver_in_bulk),
    ("pages_migrate", pages_migrate),
    ("one_guest_after_another", one_guest_after_another),
    ("our_module_comes_and_goes", our_module_comes_and_goes),
    (
        "our_driver_for_a_hundred_cycles",
        our_driver_for_a_hundred_cycles,
    ),
    (
        "our_driver_outlives_its_device",
        our_driver_outlives_its_device,
    ),
    (
        "our_driver_outlives_hostile_devices",
        our_driver_outlives_hostile_devices,
    ),
];

/// In QEMU.
const QEMU: &[(&str, Check)] = &[
    ("in_bulk_over_pci", in_bulk_over_pci),
    ("in_bulk_from_huge_pages", in_bulk_from_huge_pages),
    ("on_qemus_device", on_qemus_device),
    ("on_qemus_device_with_poison", on_qemus_device_with_poison),
];

/// MiB of the guest, and bytes that are to be in the balloon.
const GUEST: u32 = 384;
const BALLOON: u64 = 192 * MIB;

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
    let checks = match kernel.arch {
        Arch::Um => UML,
        Arch::X86 | Arch::Arm | Arch::RiscV => QEMU,
    };
    let chosen: Vec<_> = checks.iter().filter(|(name, _)| wanted(name)).collect();
    ensure!(!chosen.is_empty(), "no check has that in its name");
    let mut failed = 0;
    for (name, check) in chosen {
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
    let (mut guest, mut balloon) = PageByPage::boot(parts, 256)?;
    checks::prepare(&mut guest, Driver::Stock)?;
    checks::memory_comes_and_goes(&mut guest, &mut balloon, 96 * MIB)?;
    let (messages, pages) = balloon.counts();
    ensure!(
        (messages, pages) == (2 * 96, 96 * 256),
        "{messages} messages, and {pages} pages were given back"
    );
    Ok(())
}

/// Everything that Linux's driver has, against `dmaspace balloon`.
fn all_of_the_stock_driver(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    all_of_the_driver(parts, program, Driver::Stock)
}

/// The same of ours, by the standard's page numbers.
fn all_of_our_driver(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    all_of_the_driver(parts, program, Driver::Pages)
}

/// The same by messages in bulk.
fn all_of_our_driver_in_bulk(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    all_of_the_driver(parts, program, Driver::Bulk)
}

/// The features that `dmaspace balloon` offers to this driver.
const fn offered(driver: Driver) -> &'static [usize] {
    match driver {
        Driver::Bulk => &[0, 1, 2, 3, 4, 5, 23],
        // They know no others.
        Driver::Stock | Driver::Pages => &[0, 1, 2, 3, 4, 5],
    }
}

fn all_of_the_driver(parts: &Parts, program: &Path, driver: Driver) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let mut guest = Guest::boot(parts, GUEST, Attached::VhostUser(&socket), &[])?;
    let (guest, daemon) = (&mut guest, &mut daemon);
    checks::prepare(guest, driver)?;
    checks::write_data(guest)?;
    checks::features(guest, offered(driver))?;
    let mut steps = Steps::default();
    checks::memory_comes_and_goes(guest, daemon, BALLOON)?;
    let (given, calls) = (daemon.count("inflated_bytes")?, daemon.count("discards")?);
    ensure!(
        calls < given / 4096 / 16,
        "{given} bytes of the balloon were given back by {calls} calls"
    );
    steps.ended("inflating and deflating");
    checks::statistics(guest, daemon)?;
    steps.ended("statistics");
    if !checks::poisons(guest)? {
        let reported = daemon.reported()?;
        let free = checks::reporting(guest)?;
        until("a report of half of the free memory", || {
            Ok((daemon.reported()? - reported > free / 2).then_some(()))
        })?;
    }
    steps.ended("free page reporting");
    checks::hinting(guest, daemon)?;
    steps.ended("free page hinting");
    checks::out_of_memory(guest, daemon, BALLOON)?;
    steps.ended("deflating when out of memory");
    daemon.reach(0)?;
    checks::data_is_intact(guest)?;
    steps.ended("data outside of the balloon intact");
    guest.complaints()?;
    let refused = daemon.count("refused")?;
    ensure!(
        refused == 0,
        "of a good driver {refused} parts of messages were refused"
    );
    let ended = daemon.interrupt()?;
    ensure!(ended.success() && !socket.exists(), "after SIGINT: {ended}");
    Ok(())
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

/// Compaction moves pages of the balloon. Without reports: while some of few free pages are being reported, memory
/// may be so short that the balloon is deflated.
fn pages_migrate(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    for driver in Driver::ALL {
        let mut steps = Steps::default();
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut daemon = Daemon::start(program, &socket, &["--no-reporting"])?;
        let mut guest = Guest::boot(parts, 192, Attached::VhostUser(&socket), &[])?;
        checks::prepare(&mut guest, driver)?;
        checks::write_data(&mut guest)?;
        let pages = checks::migration(&mut guest, &mut daemon)?;
        daemon.reach(0)?;
        checks::data_is_intact(&mut guest)?;
        guest.complaints()?;
        steps.ended(&format!("{}: {pages} pages", driver.name()));
    }
    Ok(())
}

/// Ours is loaded, inflated, deflated, unloaded with pages in the balloon, and loaded again.
fn our_module_comes_and_goes(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    for driver in [Driver::Pages, Driver::Bulk] {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut daemon = Daemon::start(program, &socket, &[])?;
        let mut guest = Guest::boot(parts, 256, Attached::VhostUser(&socket), &[])?;
        checks::prepare(&mut guest, driver)?;
        checks::memory_comes_and_goes(&mut guest, &mut daemon, 96 * MIB)?;
        checks::module_comes_and_goes(&mut guest, &mut daemon, driver, 96 * MIB)?;
        checks::nothing_leaks(&mut guest)?;
        guest.complaints()?;
        println!("  {}", driver.name());
    }
    Ok(())
}

/// Inflated and deflated again and again, by different amounts; what was written elsewhere stays.
fn our_driver_for_a_hundred_cycles(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    for driver in [Driver::Pages, Driver::Bulk] {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut daemon = Daemon::start(program, &socket, &[])?;
        let mut guest = Guest::boot(parts, 256, Attached::VhostUser(&socket), &[])?;
        checks::prepare(&mut guest, driver)?;
        checks::write_data(&mut guest)?;
        checks::cycles(&mut guest, &mut daemon, 100, 128 * MIB)?;
        checks::data_is_intact(&mut guest)?;
        guest.complaints()?;
    }
    Ok(())
}

/// The device goes while it is asked for more, and with it all that it had.
fn our_driver_outlives_its_device(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let mut guest = Guest::boot(parts, 512, Attached::VhostUser(&socket), &[])?;
    checks::prepare(&mut guest, Driver::Pages)?;
    let free = checks::free(&mut guest)?;
    daemon.reach(64 * MIB)?;
    daemon.set_target(400 * MIB)?;
    drop(daemon);
    until("the guest's memory without a device", || {
        let held = guest.number("awk '/^nr_balloon_pages/ { print $2 }' /proc/vmstat")?;
        Ok((held == 0 && checks::free(&mut guest)? + 8 * MIB >= free).then_some(()))
    })?;
    guest.run("rmmod /dmaspace_balloon.ko").map(|_| ())
}

/// Devices that answer wrongly, or not at all.
fn our_driver_outlives_hostile_devices(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    for wrong in Wrong::ALL {
        let start = Instant::now();
        hostile::outlive(parts, wrong).with_context(|| format!("{wrong:?}"))?;
        println!("  {wrong:?}, {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// A guest that connects after another finds the target, and an empty balloon.
fn one_guest_after_another(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let bytes = 32 * MIB;
    daemon.set_target(bytes)?;
    for _ in 0..2 {
        let mut guest = Guest::boot(parts, 128, Attached::VhostUser(&socket), &[])?;
        checks::prepare(&mut guest, Driver::Stock)?;
        // What the guest has done, since the device could still believe the one before.
        until("a balloon without a word", || {
            let pages = guest.number("awk '/^balloon_inflate/ { print $2 }' /proc/vmstat")?;
            Ok((4096 * pages >= bytes && daemon.actual()? == bytes).then_some(()))
        })?;
        drop(guest);
        daemon.wait_for("disconnected")?;
    }
    Ok(())
}

/// MiB of the guests in QEMU, which are slower by far, and bytes in their balloons.
const EMULATED: u32 = 192;
const SMALL_BALLOON: u64 = 80 * MIB;

/// Messages in bulk over PCI from a guest of several processors, which fills free pages.
fn in_bulk_over_pci(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let attached = Attached::VhostUser(&socket);
    let mut guest = Guest::boot(parts, EMULATED, attached, &["page_poison=1"])?;
    checks::prepare(&mut guest, Driver::Bulk)?;
    checks::features(&mut guest, offered(Driver::Bulk))?;
    goes_through_everything(&mut guest, &mut daemon, Driver::Bulk)?;
    let refused = daemon.count("refused")?;
    ensure!(refused == 0, "{refused} parts of messages were refused");
    Ok(())
}

/// The host's memory is huge pages, which are given back whole.
fn in_bulk_from_huge_pages(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    let bytes = u64::from(EMULATED) * MIB;
    let _pool = match RaisedPool::raise(HugeSize::TwoMiB, bytes) {
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
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let mut guest = Guest::boot(&parts, EMULATED, Attached::VhostUser(&socket), &[])?;
    checks::prepare(&mut guest, Driver::Bulk)?;
    checks::memory_comes_and_goes(&mut guest, &mut daemon, SMALL_BALLOON)?;
    guest.complaints()
}

/// The standard's part, on a device that others wrote.
fn on_qemus_device(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let (mut guest, mut balloon) = OfQemu::boot(parts, EMULATED, directory.path(), true, &[])?;
    let (guest, balloon) = (&mut guest, &mut balloon);
    checks::prepare(guest, Driver::Pages)?;
    checks::features(guest, &[1, 2, 4, 5])?;
    let mut steps = Steps::default();
    let total = 1024 * guest.number("awk '/^MemTotal/ { print $2 }' /proc/meminfo")?;
    let told = balloon.statistic("stat-total-memory")?;
    ensure!(
        told == total,
        "statistics: {told} bytes in all, not {total}"
    );
    steps.ended("statistics");
    checks::reporting(guest)?;
    steps.ended("free page reporting");
    goes_through_everything(guest, balloon, Driver::Pages)
}

/// The same of a guest that fills free pages; pages of the balloon migrate.
fn on_qemus_device_with_poison(parts: &Parts, _program: &Path) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let words = ["page_poison=1"];
    let (mut guest, mut balloon) = OfQemu::boot(parts, EMULATED, directory.path(), false, &words)?;
    checks::prepare(&mut guest, Driver::Pages)?;
    checks::features(&mut guest, &[1, 2, 4])?;
    checks::write_data(&mut guest)?;
    let mut steps = Steps::default();
    checks::cycles(&mut guest, &mut balloon, 3, SMALL_BALLOON)?;
    steps.ended("three cycles");
    let pages = checks::migration(&mut guest, &mut balloon)?;
    steps.ended(&format!("migration of {pages} pages"));
    balloon.reach(0)?;
    checks::data_is_intact(&mut guest)?;
    guest.complaints()
}

fn goes_through_everything(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    driver: Driver,
) -> anyhow::Result<()> {
    checks::write_data(guest)?;
    let mut steps = Steps::default();
    checks::memory_comes_and_goes(guest, balloon, SMALL_BALLOON)?;
    steps.ended("inflating and deflating");
    checks::out_of_memory(guest, balloon, SMALL_BALLOON)?;
    steps.ended("deflating when out of memory");
    checks::module_comes_and_goes(guest, balloon, driver, SMALL_BALLOON)?;
    steps.ended("the module comes and goes");
    checks::removal(guest, balloon, SMALL_BALLOON)?;
    steps.ended("the device is removed");
    checks::sleep(guest, balloon, SMALL_BALLOON)?;
    steps.ended("the guest sleeps");
    checks::data_is_intact(guest)?;
    guest.complaints()
}
