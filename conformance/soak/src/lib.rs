//! A soak: everything that an address space can do, in a random order, for a long time.
//!
//! One address space over three memories of the host, units of four formats on two nodes, devices that do
//! DMA all the time, a balloon, dirty tracking, lazy flushing, tables that move, steps that fail on demand,
//! and now and then a second process that takes the address space over and hands it back. Beside it stands
//! a shadow model, page by page; devices compare every byte with it. At quiet points all tables are compared
//! with the model by the independent walker, and what is pinned, charged and in use is counted; again and
//! again everything is given back, and all of that has to be at zero.

mod balloon;
mod dirty;
mod faults;
mod handover;
mod hardware;
mod model;
mod object;
mod operations;
mod quiet;
mod random;
mod scene;
mod world;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ioas::Cause;

pub use handover::succeed;
pub use quiet::Sample;

use hardware::{DEVICES, UNITS, device};
use quiet::kernel;
use world::World;

pub(crate) const PAGE: u64 = 4096;
/// Memories, bytes of each, and where a balloon's guest has the next.
pub(crate) const MEMORIES: usize = 3;
pub(crate) const MEMORY: u64 = 16 << 20;
pub(crate) const GUEST: u64 = 1 << 30;
pub(crate) const MEMORY_PAGES: usize = MEMORIES * (MEMORY / PAGE) as usize;
/// What may be charged: less than there is.
pub(crate) const LIMIT: u64 = 40 << 20;
/// Pages of device addresses, on both sides of a multiple of 1 GiB.
pub(crate) const PAGES: usize = 16384;
pub(crate) const IOVA: u64 = (4 << 30) - PAGES as u64 / 2 * PAGE;
/// So much more anonymous memory at the end than after the first quarter is no leak: what the allocator
/// keeps and the logs of this program.
const TOLERANCE: u64 = 4 << 20;

/// What to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// From which everything follows but the order of threads.
    pub seed: u64,
    /// How long.
    pub time: Duration,
    /// Threads that play devices.
    pub threads: usize,
    /// Operations between two quiet points.
    pub quiet_every: u64,
    /// Quiet points between two at which everything was given back.
    pub clear_every: u64,
    /// Operations between two handovers.
    pub handover_every: u64,
    /// The program that takes over and hands back ([`succeed`]), and its arguments.
    pub successor: Vec<OsString>,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// At the quiet points.
    pub samples: Vec<Sample>,
    /// By name: how often an operation was done, and how often it was refused.
    pub counts: Vec<(&'static str, u64, u64)>,
    /// Accesses that were to fault, and did.
    pub faulted: u64,
    /// What was wrong.
    pub wrong: Vec<String>,
    /// The last operations.
    pub log: Vec<String>,
}

/// Soaks until the time is over, something is wrong, or `stop` is set.
///
/// # Errors
///
/// When there is no memory to begin with, or a second process cannot be had.
pub fn run(
    settings: &Settings,
    stop: &AtomicBool,
    on: &mut dyn FnMut(&Sample),
) -> Result<Outcome, Cause> {
    let begun = kernel()?;
    let mut world = World::new(settings.seed)?;
    let threads = play(&world, settings);
    let mut outcome = Outcome::default();
    let done = soak(&mut world, settings, begun, stop, &mut |sample| {
        on(&sample);
        outcome.samples.push(sample);
    });
    world.scene.stop();
    for thread in threads {
        if thread.join().is_err() {
            world
                .scene
                .complain("a device's thread has panicked".into());
        }
    }
    outcome.wrong = world.scene.complaints();
    outcome
        .wrong
        .extend(done.err().map(|cause| cause.to_string()));
    if outcome.wrong.is_empty() {
        outcome.wrong = drift(&outcome.samples);
    }
    outcome.faulted = world.scene.faulted.load(Ordering::Relaxed);
    let counts = world.counts.iter();
    outcome.counts = counts
        .map(|(name, (done, refused))| (*name, *done, *refused))
        .collect();
    outcome.log = world.log.iter().cloned().collect();
    Ok(outcome)
}

fn play(world: &World, settings: &Settings) -> Vec<thread::JoinHandle<()>> {
    let threads = settings.threads.max(1);
    let thread = |number: usize| {
        let devices = (0..DEVICES).filter(|device| device % threads == number % threads);
        let port = |number: usize| {
            (
                number,
                world.units[number % UNITS.len()].port(device(number)),
            )
        };
        let mut ports: Vec<_> = devices.map(port).collect();
        let (scene, seed) = (
            Arc::clone(&world.scene),
            settings.seed ^ (number as u64 + 1),
        );
        thread::spawn(move || scene.play(&mut ports, seed))
    };
    (0..threads).map(thread).collect()
}

fn soak(
    world: &mut World,
    settings: &Settings,
    begun: (u64, u64),
    stop: &AtomicBool,
    on: &mut dyn FnMut(Sample),
) -> Result<(), Cause> {
    let start = Instant::now();
    let mut points = 0;
    let mut next = settings.quiet_every;
    let mut next_handover = settings.handover_every;
    loop {
        let over = start.elapsed() >= settings.time || stop.load(Ordering::Relaxed);
        if over || world.operations >= next {
            next = world.operations + settings.quiet_every;
            points += 1;
            let mut sample = world.look(begun)?;
            sample.at = start.elapsed();
            on(sample);
            if over || points % settings.clear_every == 0 {
                world.clear();
                let mut sample = world.look(begun)?;
                sample.at = start.elapsed();
                sample.cleared = true;
                on(sample);
            }
        }
        if over || !world.scene.complaints().is_empty() {
            return Ok(());
        }
        world.step();
        if world.operations >= next_handover {
            next_handover = world.operations + settings.handover_every;
            world.hand_over(&settings.successor)?;
        }
    }
}

/// Where everything was given back nothing may be left, and what cannot be counted exactly may not grow.
fn drift(samples: &[Sample]) -> Vec<String> {
    let cleared: Vec<&Sample> = samples.iter().filter(|sample| sample.cleared).collect();
    let mut wrong = Vec::new();
    for sample in &cleared {
        let Sample {
            pinned,
            charged,
            tables,
            locked,
            kernel_pinned,
            areas,
            domains,
            ..
        } = sample;
        let left = [
            pinned,
            charged,
            tables,
            locked,
            kernel_pinned,
            areas,
            domains,
        ];
        if left.iter().any(|left| **left > 0) {
            wrong.push(format!("something is left: {sample:?}"));
        }
    }
    // Behind a quarter of the time everything was there once.
    if let (Some(early), Some(last)) = (cleared.get(cleared.len() / 4), cleared.last()) {
        if last.anonymous > early.anonymous + TOLERANCE {
            let (from, to) = (early.anonymous >> 10, last.anonymous >> 10);
            wrong.push(format!("anonymous memory grew from {from} KiB to {to} KiB"));
        }
        if last.files != early.files {
            let (from, to) = (early.files, last.files);
            wrong.push(format!("open files: {from}, and then {to}"));
        }
    }
    wrong
}

impl Outcome {
    /// As a table: at most `rows` quiet points, and those at which everything was given back.
    pub fn table(&self, rows: usize) -> String {
        let mut text = String::from(
            "| time s | operations | accesses | areas | domains | pinned KiB | charged KiB | table pages | kernel KiB | anonymous KiB | files |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        let step = self.samples.len().div_ceil(rows.max(1)).max(1);
        let shown = self.samples.iter().enumerate();
        let last = self.samples.len().saturating_sub(1);
        for (_, sample) in shown.filter(|(n, _)| n % step == step - 1 || *n == last) {
            let _ = writeln!(text, "{sample}");
        }
        text
    }
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "| {:.1} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |{}",
            self.at.as_secs_f64(),
            self.operations,
            self.accesses,
            self.areas,
            self.domains,
            self.pinned >> 10,
            self.charged >> 10,
            self.tables,
            self.locked.max(self.kernel_pinned) >> 10,
            self.anonymous >> 10,
            self.files,
            if self.cleared { " cleared" } else { "" },
        )
    }
}
