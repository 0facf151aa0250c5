//! The stock guest as a program: `cargo xtask balloon`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use balloon_rig::bench::Bench;
use balloon_rig::checks::{self, Balloon, MIB};
use balloon_rig::daemon::Daemon;
use balloon_rig::guest::{Driver, Guest, Parts, until};
use balloon_rig::hostile::{self, Wrong};
use balloon_rig::page_by_page::PageByPage;
use clap::Parser;

/// Boots a stock Linux guest against balloons of ours.
#[derive(Parser)]
struct Options {
    /// The command line `dmaspace`.
    #[arg(long, value_name = "PROGRAM")]
    dmaspace: PathBuf,
    /// Where `cargo xtask linux` has left a kernel and its modules.
    #[arg(long, value_name = "DIRECTORY")]
    linux: PathBuf,
    /// More words for the guests' kernel, such as page_poison=1; may be repeated.
    #[arg(long, value_name = "WORD")]
    word: Vec<String>,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Time Linux's driver and ours, instead of checks. The guests' memory is a file in TMPDIR.
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

const CHECKS: &[(&str, Check)] = &[
    ("page_by_page", page_by_page),
    ("all_of_the_stock_driver", all_of_the_stock_driver),
    ("all_of_our_driver", all_of_our_driver),
    ("all_of_our_driver_in_bulk", all_of_our_driver_in_bulk),
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
    let parts = Parts::find(&options.linux, &options.word)?;
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
    let chosen: Vec<_> = CHECKS.iter().filter(|(name, _)| wanted(name)).collect();
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

fn all_of_the_driver(parts: &Parts, program: &Path, driver: Driver) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let mut daemon = Daemon::start(program, &socket, &[])?;
    let mut guest = Guest::boot(parts, GUEST, &socket, &[])?;
    let (guest, daemon) = (&mut guest, &mut daemon);
    checks::prepare(guest, driver)?;
    checks::write_data(guest)?;
    let step = |name: &str, start: Instant| {
        println!("  {name}, {:.1} s", start.elapsed().as_secs_f64());
        Instant::now()
    };
    let mut at = Instant::now();
    checks::features(guest, driver)?;
    at = step("features", at);
    checks::memory_comes_and_goes(guest, daemon, BALLOON)?;
    let (given, calls) = (daemon.count("inflated_bytes")?, daemon.count("discards")?);
    ensure!(
        calls < given / 4096 / 16,
        "{given} bytes of the balloon were given back by {calls} calls"
    );
    at = step("inflating and deflating", at);
    checks::statistics(guest, daemon)?;
    at = step("statistics", at);
    checks::reporting(guest, daemon)?;
    at = step("free page reporting", at);
    checks::hinting(guest, daemon)?;
    at = step("free page hinting", at);
    checks::out_of_memory(guest, daemon, BALLOON)?;
    at = step("deflating when out of memory", at);
    let pages = checks::migration(guest, daemon)?;
    at = step(&format!("migration of {pages} pages"), at);
    daemon.reach(0)?;
    checks::data_is_intact(guest)?;
    step("data outside of the balloon intact", at);
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

/// Ours is loaded, inflated, deflated, unloaded with pages in the balloon, and loaded again.
fn our_module_comes_and_goes(parts: &Parts, program: &Path) -> anyhow::Result<()> {
    for driver in [Driver::Pages, Driver::Bulk] {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut daemon = Daemon::start(program, &socket, &[])?;
        let mut guest = Guest::boot(parts, 256, &socket, &[])?;
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
        let mut guest = Guest::boot(parts, 256, &socket, &[])?;
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
    let mut guest = Guest::boot(parts, 512, &socket, &[])?;
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
        let mut guest = Guest::boot(parts, 128, &socket, &[])?;
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
