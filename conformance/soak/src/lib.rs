//! A soak: everything that an address space can do, in a random order, for a long time.
//!
//! One address space over three memories of the host, units of four formats on two nodes, devices that do
//! DMA all the time, a balloon, dirty tracking, lazy flushing, tables that move, steps that fail on demand,
//! and now and then a second process that takes the address space over and hands it back. Beside it stands
//! a shadow model, page by page; devices compare every byte with it. At quiet points all tables are compared
//! with the model by the independent walker, and what is pinned, charged and in use is counted; again and
//! again everything is given back, and all of that has to be at zero.

mod operations;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hostmem::{Backing, Mapping, Pinner};
use ioas::{Cause, Ledger};
use iommu::NodeId;
use iopt::FormatId;
use runs::Span;
use scenario::{Kind, Layout, Look, Manner, PAGE, Random, Setup, Source, TableNode, World};

pub use scenario::succeed;

/// Memories, bytes of each, and where a balloon's guest has the next.
pub(crate) const MEMORIES: u64 = 3;
pub(crate) const MEMORY: u64 = 16 << 20;
pub(crate) const GUEST: u64 = 1 << 30;
/// What may be charged: less than there is.
const LIMIT: u64 = 40 << 20;
/// Pages of device addresses, on both sides of a multiple of 1 GiB.
pub(crate) const PAGES: u64 = 16384;
pub(crate) const IOVA: u64 = (4 << 30) - PAGES / 2 * PAGE;
/// Devices; they have the units in turn.
pub(crate) const DEVICES: u64 = 7;
/// Bytes of tables.
const TABLES: u64 = 8 << 20;
/// A pin is made in steps of so many bytes.
const PIECE: u64 = 4 << 20;
/// Operations that are remembered.
const REMEMBERED: usize = 60;
/// How long devices look at the hole that the second process has cut.
const LOOK: Duration = Duration::from_millis(5);
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

/// What was counted at a quiet point.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Since the begin.
    pub at: Duration,
    /// Operations so far.
    pub operations: u64,
    /// Accesses of devices so far that found what they were to find.
    pub accesses: u64,
    /// What is in use.
    pub look: Look,
    /// Anonymous memory of this process.
    pub anonymous: u64,
    /// Open files.
    pub files: u64,
    /// Everything was given back before: nothing is to be in use.
    pub cleared: bool,
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
    let mut soak = Soak::new(settings.seed)?;
    soak.world.play(settings.threads, settings.seed)?;
    let mut outcome = Outcome::default();
    let done = soak.run(settings, stop, &mut |sample| {
        on(&sample);
        outcome.samples.push(sample);
    });
    let stopped = soak.world.stop();
    let scene = &soak.world.scene;
    outcome.wrong = scene.complaints();
    outcome.wrong.extend(stopped);
    outcome
        .wrong
        .extend(done.err().map(|cause| scenario::sentence(&*cause)));
    if outcome.wrong.is_empty() {
        outcome.wrong = drift(&outcome.samples);
    }
    outcome.faulted = scene.counts().faults_in_holes;
    let counts = soak.counts.iter();
    outcome.counts = counts
        .map(|(name, (done, refused))| (*name, *done, *refused))
        .collect();
    outcome.log = soak.log.iter().cloned().collect();
    Ok(outcome)
}

/// A world, and what is done with it.
pub(crate) struct Soak {
    pub(crate) world: World,
    pub(crate) random: Random,
    operations: u64,
    log: VecDeque<String>,
    /// By name: how often it was done, and how often it was refused.
    counts: BTreeMap<&'static str, (u64, u64)>,
}

/// What kinds of units there are: two of them have no way to force DMA to be coherent.
const UNITS: [Kind; 5] = {
    const fn kind(format: FormatId, node: u32, coherent: bool) -> Kind {
        let node = NodeId(node);
        Kind {
            format,
            node,
            coherent,
        }
    }
    [
        kind(FormatId::VtdSs, 0, true),
        kind(FormatId::AmdV1, 0, true),
        kind(FormatId::X86_64, 1, false),
        kind(FormatId::AmdV1, 1, true),
        kind(FormatId::VtdSs, 1, false),
    ]
};

impl Soak {
    fn new(seed: u64) -> Result<Self, Cause> {
        let pinner = Pinner::probe(PIECE)?;
        let mut memories = Vec::new();
        for number in 0..MEMORIES {
            let mapping = Mapping::new(Backing::Memfd, MEMORY, None)?;
            mapping.populate(&mut |_| ControlFlow::Continue(()))?;
            // One run, fragments, and large pages that are not neighbours.
            let chunk = [MEMORY, 16 << 10, 2 << 20][number as usize];
            memories.push(Source {
                guest: number * GUEST,
                mapping: Arc::new(mapping),
                layout: Some(Layout::new((number + 1) << 36, MEMORY, chunk)),
            });
        }
        let setup = Setup {
            range: Span::new(IOVA, PAGES * PAGE),
            memories,
            ledger: Ledger::new("the soak's limit", Some(LIMIT), 0),
            manner: Manner {
                only_reads: 3,
                ..Manner::default()
            },
            huge: false,
            far: NodeId(1),
        };
        // One memory for the tables of all nodes: they may move, and every unit walks all of it.
        let tables = TableNode {
            node: NodeId(0),
            at: None,
            bytes: TABLES,
        };
        Ok(Self {
            world: World::over_units(setup, pinner, &UNITS, &[tables], DEVICES as usize)?,
            random: Random::new(seed),
            operations: 0,
            log: VecDeque::new(),
            counts: BTreeMap::new(),
        })
    }

    fn run(
        &mut self,
        settings: &Settings,
        stop: &AtomicBool,
        on: &mut dyn FnMut(Sample),
    ) -> Result<(), Cause> {
        let start = Instant::now();
        let mut points = 0;
        let mut next = settings.quiet_every;
        let mut next_handover = settings.handover_every;
        loop {
            let over = start.elapsed() >= settings.time || stop.load(Ordering::Relaxed);
            if over || self.operations >= next {
                next = self.operations + settings.quiet_every;
                points += 1;
                on(self.sample(start, false)?);
                if over || points % settings.clear_every == 0 {
                    self.clear();
                    on(self.sample(start, true)?);
                }
            }
            if over || !self.world.scene.complaints().is_empty() {
                return Ok(());
            }
            self.step();
            if self.operations >= next_handover {
                next_handover = self.operations + settings.handover_every;
                self.hand_over(&settings.successor)?;
            }
        }
    }

    /// Compares everything, and counts.
    fn sample(&mut self, start: Instant, cleared: bool) -> Result<Sample, Cause> {
        Ok(Sample {
            look: self.world.look()?,
            at: start.elapsed(),
            operations: self.operations,
            accesses: self.world.scene.counts().read_bytes / PAGE,
            anonymous: anonymous()?,
            files: std::fs::read_dir("/proc/self/fd")?.count() as u64,
            cleared,
        })
    }

    /// The address space goes to a second process, which cuts a hole and closes it, and comes back.
    fn hand_over(&mut self, command: &[OsString]) -> Result<(), Cause> {
        let area = self.some_area(ioas::Area::is_there);
        let Some(area) = area.filter(|_| self.world.is_live()) else {
            return Ok(());
        };
        let hole = self.some_part(area);
        let (mut second, _) = self.world.hand_over(command)?;
        self.world.hole_of(&mut second, Some(hole), &mut |_| {
            thread::sleep(LOOK);
            Ok(())
        })?;
        let left = self.world.take_back(second)?;
        let kernel = left.kernel.most();
        if left.charged > 0 || kernel > 0 {
            return Err(format!("the second process has left {left:?}").into());
        }
        self.note("hand over", &format!("hole {hole}"), Ok(()));
        Ok(())
    }

    /// Notes what came of an operation; an error that no fault has brought about is a complaint.
    pub(crate) fn note(
        &mut self,
        name: &'static str,
        what: &str,
        result: Result<(), (String, bool)>,
    ) {
        let world = &mut self.world;
        let fired = world.faults.disarm();
        if fired {
            world.blur();
            // What a flush that failed has left behind is made up for.
            if let Err(cause) = world.space.flush() {
                world
                    .scene
                    .complain(format!("a flush after a failure: {cause}"));
            }
        }
        world.settle([]);
        let counts = self.counts.entry(name).or_default();
        let said = match result {
            Ok(()) => {
                counts.0 += 1;
                "done".into()
            }
            Err((cause, expected)) => {
                counts.1 += 1;
                if !expected && !fired {
                    let text = format!("{name} {what}: refused: {cause}");
                    world.scene.complain(text);
                }
                format!("refused: {cause}")
            }
        };
        let fault = if fired { ", with a fault" } else { "" };
        self.operations += 1;
        self.log
            .push_back(format!("{}: {name} {what}: {said}{fault}", self.operations));
        if self.log.len() > REMEMBERED {
            self.log.pop_front();
        }
    }
}

fn anonymous() -> Result<u64, Cause> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(number.ok_or("no RssAnon")?.trim().parse::<u64>()? << 10)
}

/// Where everything was given back nothing may be left, and what cannot be counted exactly may not grow.
fn drift(samples: &[Sample]) -> Vec<String> {
    let cleared: Vec<&Sample> = samples.iter().filter(|sample| sample.cleared).collect();
    let mut wrong = Vec::new();
    for sample in &cleared {
        if !sample.look.is_nothing() {
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
            self.look.areas,
            self.look.domains,
            self.look.pinned >> 10,
            self.look.charged >> 10,
            self.look.tables,
            self.look.kernel.most() >> 10,
            self.anonymous >> 10,
            self.files,
            if self.cleared { " cleared" } else { "" },
        )
    }
}
