//! The first process of a guest that measures: maps and unmaps by Linux's DMA API and by `ioas::Dma`, by its VFIO and
//! iommufd and by `ioas::Ioas`, under one clock.
//!
//! See `guest::samples` for the clock, and `guest::dma` for what becomes of the samples.

#![deny(unsafe_code)]

use std::{
    fs::{self, File},
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use guest::{
    benchmark::{Domain, Linux},
    machines::{EDU, Unit},
    pci::Device,
    samples::{REPEATS, SIZES, SPACES, Said, Sample, THREADS, Way, Who},
    start::{self, say},
};
use iopt::FormatId;
use ours::{Behind, Ours};
use space::Space;

#[allow(unsafe_code)]
mod clock;
mod ours;
mod space;
mod trace;

/// The file in which the kernel names its clock.
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// The processor's counter, as the kernel calls it.
const COUNTER: &str = match cfg!(target_arch = "aarch64") {
    true => "arch_sys_counter",
    false => "tsc",
};

/// Seconds in which the clock becomes that.
const PATIENCE: u32 = 60;

fn main() -> ExitCode {
    let measured = start::mount()
        .and_then(|()| start::results())
        .and_then(|mut results| {
            let last = match run(&mut results) {
                Ok(()) => Said::Done,
                Err(error) => Said::Failed(format!("{error:#}")),
            };
            say(&mut results, &last)
        });
    if let Err(error) = measured {
        println!("init: {error:#}");
    }
    start::power_off()
}

fn run(results: &mut File) -> anyhow::Result<()> {
    let words = fs::read_to_string("/proc/cmdline")?;
    let name = start::word(&words, "dmaspace.unit").context("the command line names no unit")?;
    let unit = Unit::find(name).with_context(|| format!("there is no unit {name}"))?;
    let source = || fs::read_to_string(CLOCK).context(CLOCK);
    // The kernel calibrates it for some seconds.
    for _ in 0..PATIENCE {
        if source()?.trim() == COUNTER {
            break;
        }
        thread::sleep(Duration::from_secs(1));
    }
    ensure!(source()?.trim() == COUNTER, "the clock is {}", source()?);
    let (instructions, ns) = clock::check();
    say(results, &Said::Clock(instructions, ns))?;
    say(results, &Said::Empty(clock::empty()))?;
    if start::word(&words, "dmaspace.tables").is_some() {
        // The kernel's tables are not its own: of what is measured only its DMA API is different.
        Device(EDU).unbind()?;
        return rounds(results, None);
    }
    let format = match unit {
        Unit::Intel => FormatId::VtdSs,
        Unit::Amd => FormatId::AmdV1,
        _ => anyhow::bail!("only its DMA API is measured behind {name}"),
    };
    say(results, &Said::Zero(clock::zero()))?;
    if words
        .split_whitespace()
        .any(|word| word == "dmaspace.trace")
    {
        return trace::run(results, format);
    }
    // VFIO and iommufd with lines of ours in the kernel: nothing else is measured.
    let patched = words
        .split_whitespace()
        .any(|word| word == "dmaspace.patch");
    for (_, way) in Way::ALL.into_iter().take(if patched { 2 } else { 3 }) {
        let space = Space::new(way, format)?;
        for _ in 0..REPEATS {
            for (memory, present) in SPACES
                .into_iter()
                .flat_map(|one| [(one, true), (one, false)])
            {
                say(results, &Said::Space(space.run(way, memory, present)?))?;
            }
        }
    }
    Device(EDU).unbind()?;
    if patched {
        return Ok(());
    }
    let strict = Ours::new(format, false, Behind::Driver)?;
    let lazy = Ours::new(format, true, Behind::Driver)?;
    let software = Ours::new(format, false, Behind::Software)?;
    rounds(results, Some([&strict, &lazy, &software]))
}

/// Linux's DMA API, and beside it ours, if there is any: with a driver, strict and lazy, and with the unit in software.
fn rounds(results: &mut File, ours: Option<[&Ours; 3]>) -> anyhow::Result<()> {
    for _ in 0..REPEATS {
        let direct = Linux::new(Domain::Identity)?;
        take(
            results,
            (Who::Direct, false),
            THREADS[0],
            SIZES[0],
            |n, size| direct.run(n, size),
        )?;
        drop(direct);
        for (late, domain) in [(false, Domain::Strict), (true, Domain::Lazy)] {
            let linux = Linux::new(domain)?;
            for threads in THREADS {
                for size in SIZES {
                    take(results, (Who::Linux, late), threads, size, |n, size| {
                        linux.run(n, size)
                    })?;
                    if let Some([strict, lazy, _]) = ours {
                        let ours = if late { lazy } else { strict };
                        take(results, (Who::Ours, late), threads, size, |n, size| {
                            ours.run(n, size)
                        })?;
                    }
                }
            }
        }
        if let Some([.., software]) = ours {
            for size in SIZES {
                take(results, (Who::Software, false), 1, size, |n, size| {
                    software.run(n, size)
                })?;
            }
        }
    }
    Ok(())
}

/// Takes a sample: nanoseconds of a map and of an unmap.
fn take(
    results: &mut File,
    (who, lazy): (Who, bool),
    threads: u32,
    size: u64,
    run: impl FnOnce(u32, u64) -> anyhow::Result<[f64; 2]>,
) -> anyhow::Result<()> {
    let [map, unmap] = run(threads, size)
        .with_context(|| format!("{who:?}, {threads} threads, {size:#x} bytes"))?;
    let sample = Sample {
        who,
        lazy,
        threads,
        size,
        map,
        unmap,
    };
    say(results, &Said::Sample(sample))
}
