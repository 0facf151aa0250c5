//! What devices of a life may expect, and what they have counted: of the software unit, and of the machine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use runs::Span;

use super::report::DmaCounts;

/// How long a device may be without an access before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Addresses that devices are not to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) range: Span,
    /// It is cut and flushed: whatever gets through is wrong. Otherwise it is on its way.
    pub(super) open: bool,
}

/// What devices may expect. It does not change while an access is under way.
#[derive(Debug, Default)]
pub(super) struct Scene {
    pub(super) holes: Vec<Hole>,
    /// Where devices write; everywhere without a word.
    pub(super) writes: Option<Vec<Span>>,
}

impl Scene {
    /// Devices may or may not reach `ranges` from now on.
    pub(super) fn moving(&mut self, ranges: &[Span]) {
        for range in ranges {
            self.holes.retain(|hole| hole.range != *range);
            let (range, open) = (*range, false);
            self.holes.push(Hole { range, open });
        }
    }

    /// What was on its way is done: holes are open.
    pub(super) fn open(&mut self) {
        self.holes.iter_mut().for_each(|hole| hole.open = true);
    }

    pub(super) fn hole(&self, iova: u64) -> Option<Hole> {
        let mut holes = self.holes.iter();
        holes.find(|hole| hole.range.contains(iova)).copied()
    }

    pub(super) fn writes(&self, iova: u64) -> bool {
        let inside = |spans: &Vec<Span>| spans.iter().any(|span| span.contains(iova));
        self.writes.as_ref().is_none_or(inside)
    }
}

/// What a device has done.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) accesses: AtomicU64,
    pub(super) probes: AtomicU64,
    /// The last pass that was wanted and has come to its end.
    pub(super) passed: AtomicU64,
    pub(super) read: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) wrong: AtomicU64,
    pub(super) faults_outside: AtomicU64,
    pub(super) faults_inside: AtomicU64,
    pub(super) reached: AtomicU64,
}

/// What all of them have counted.
pub(super) fn counts(tallies: &[Tally]) -> DmaCounts {
    let mut counts = DmaCounts::default();
    for tally in tallies {
        counts.accesses += tally.accesses.load(Ordering::Relaxed);
        counts.read_bytes += tally.read.load(Ordering::Relaxed);
        counts.written_bytes += tally.written.load(Ordering::Relaxed);
        counts.wrong_bytes += tally.wrong.load(Ordering::Relaxed);
        counts.faults_outside_holes += tally.faults_outside.load(Ordering::Relaxed);
        counts.faults_in_holes += tally.faults_inside.load(Ordering::Relaxed);
        counts.reached_in_holes += tally.reached.load(Ordering::Relaxed);
    }
    counts
}

/// Why a wait for devices ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// They have done what was waited for.
    Done,
    /// The watcher wanted to stop.
    Stopped,
    /// One has done nothing for a long time.
    Stuck,
}

/// Waits until every device has `done` it, as long as `watch` says so.
pub(super) fn wait(
    tallies: &[Tally],
    watch: &mut dyn FnMut() -> bool,
    done: impl Fn(&Tally, usize) -> bool,
) -> Waited {
    let sum = || -> Vec<u64> {
        let accesses = tallies.iter().map(|tally| &tally.accesses);
        accesses
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    };
    let (mut seen, mut since) = (sum(), Instant::now());
    loop {
        if !watch() {
            return Waited::Stopped;
        }
        let mut all = tallies.iter().enumerate();
        if all.all(|(number, tally)| done(tally, number)) {
            return Waited::Done;
        }
        let now = sum();
        if now.iter().zip(&seen).all(|(now, seen)| now > seen) {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() > PATIENCE {
            return Waited::Stuck;
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Waits until each device has made `count` accesses more, and `probes` more into holes.
pub(super) fn busy(
    tallies: &[Tally],
    count: u64,
    probes: u64,
    watch: &mut dyn FnMut() -> bool,
) -> Waited {
    let now = |tally: &Tally| {
        let accesses = tally.accesses.load(Ordering::Relaxed);
        (accesses, tally.probes.load(Ordering::Relaxed))
    };
    let before: Vec<_> = tallies.iter().map(now).collect();
    wait(tallies, watch, |tally, number| {
        let (accesses, probed) = before.get(number).copied().unwrap_or_default();
        let (a, p) = now(tally);
        a >= accesses + count && p >= probed + probes
    })
}

/// What devices have written to, a bit for each page: noted before a write, and after it.
#[derive(Debug)]
pub(super) struct Written {
    before: Vec<AtomicU64>,
    after: Vec<AtomicU64>,
}

impl Written {
    /// Nothing of so many pages.
    pub(super) fn new(pages: usize) -> Self {
        let words = || (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0));
        Self {
            before: words().collect(),
            after: words().collect(),
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        let words = self.before.iter().chain(&self.after);
        words.for_each(|word| word.store(0, Ordering::Relaxed));
    }

    pub(super) fn begin(&self, page: usize) {
        mark(&self.before, page);
    }

    pub(super) fn done(&self, page: usize) {
        mark(&self.after, page);
    }

    /// What they have written to for sure by now.
    pub(super) fn sure(&self) -> Vec<u64> {
        load(&self.after)
    }

    /// What they have written to at most.
    pub(super) fn perhaps(&self) -> Vec<u64> {
        load(&self.before)
    }
}

fn load(words: &[AtomicU64]) -> Vec<u64> {
    let words = words.iter().map(|word| word.load(Ordering::Acquire));
    words.collect()
}

fn mark(words: &[AtomicU64], page: usize) {
    if let Some(word) = words.get(page / 64) {
        word.fetch_or(1 << (page % 64), Ordering::Release);
    }
}
