//! What devices of a life may expect, and what they have counted: of the software unit, and of the machine.

use std::sync::atomic::{AtomicU64, Ordering};

use runs::Span;

use super::report::DmaCounts;

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

impl Tally {
    pub(super) fn add_to(&self, counts: &mut DmaCounts) {
        counts.accesses += self.accesses.load(Ordering::Relaxed);
        counts.read_bytes += self.read.load(Ordering::Relaxed);
        counts.written_bytes += self.written.load(Ordering::Relaxed);
        counts.wrong_bytes += self.wrong.load(Ordering::Relaxed);
        counts.faults_outside_holes += self.faults_outside.load(Ordering::Relaxed);
        counts.faults_in_holes += self.faults_inside.load(Ordering::Relaxed);
        counts.reached_in_holes += self.reached.load(Ordering::Relaxed);
    }
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
