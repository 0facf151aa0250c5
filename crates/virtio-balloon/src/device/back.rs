//! Behind the queues: devices first, then the machine, in the one order in which it is safe.

use std::mem;
use std::vec::Vec;

use runs::{Span, merge_sorted};

use super::discard::Discard;
use super::memory::Memory;
use super::monitor::{Event, Hint, Monitor, Unrestored};
use crate::dma::Dma;

/// What the device has done since it was made, in bytes unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Messages and reports that were taken from the queues.
    pub chains: u64,
    /// What the driver gave on inflateq, each time it did.
    pub inflated: u64,
    /// What it took back on deflateq, each time it did.
    pub deflated: u64,
    /// What it reported as free.
    pub reported: u64,
    /// What it hinted at as free.
    pub hinted: u64,
    /// Hints that came without a command, or with an old one, in chains.
    pub hints_ignored: u64,
    /// Runs that were handed to [`Discard`].
    pub discards: u64,
    /// What was discarded.
    pub discarded: u64,
    /// What was not discarded, since it failed.
    pub not_discarded: u64,
    /// What was not discarded, since devices still see it.
    pub kept: u64,
    /// What devices could not be given back, each time it was tried.
    pub not_restored: u64,
}

/// Counts more; there is no more than `u64::MAX`.
pub(super) const fn add(counter: &mut u64, more: u64) {
    *counter = counter.saturating_add(more);
}

/// Of all these runs together, which are apart.
pub(super) fn bytes(runs: &[Span]) -> u64 {
    runs.iter().map(|run| run.len).sum()
}

/// The seams, and room to work in.
#[derive(Debug)]
pub(super) struct Back<D, A, M> {
    pub(super) discard: D,
    pub(super) dma: A,
    pub(super) monitor: M,
    pub(super) counters: Counters,
    /// What is to be discarded.
    todo: Vec<Span>,
    kept: Vec<Span>,
    cut: Vec<Span>,
}

impl<D: Discard, A: Dma, M: Monitor> Back<D, A, M> {
    pub(super) fn new(discard: D, dma: A, monitor: M) -> Self {
        Self {
            discard,
            dma,
            monitor,
            counters: Counters::default(),
            todo: Vec::new(),
            kept: Vec::new(),
            cut: Vec::new(),
        }
    }

    /// The guest has given these runs, which ascend and do not touch: what is whole now is released by
    /// devices and then discarded.
    pub(super) fn inflate(&mut self, memory: &mut Memory, runs: &[Span]) {
        self.todo.clear();
        add(&mut self.counters.inflated, bytes(runs));
        memory.inflate(runs, |whole| self.todo.push(whole));
        // Regions may touch.
        let merged = merge_sorted(&mut self.todo);
        // They are cut as long as none was merged over a border.
        let cut = merged == self.todo.len();
        self.todo.truncate(merged);
        if self.todo.is_empty() {
            return;
        }
        self.kept.clear();
        let (kept, counters, monitor) = (&mut self.kept, &mut self.counters, &mut self.monitor);
        self.dma.release(&self.todo, &mut |run, reason| {
            add(&mut counters.kept, run.len);
            monitor.event(Event::Kept { run, reason });
            kept.push(run);
        });
        if cut && self.kept.is_empty() {
            mem::swap(&mut self.todo, &mut self.cut);
            return self.discard_cut();
        }
        self.discard(memory);
    }

    /// The driver has reported these runs.
    pub(super) fn report(&mut self, memory: &Memory, runs: &[Span]) {
        add(&mut self.counters.reported, bytes(runs));
        self.discard_free(memory, runs);
    }

    /// The driver has hinted at these runs.
    pub(super) fn hint(&mut self, memory: &Memory, runs: &[Span]) {
        add(&mut self.counters.hinted, bytes(runs));
        if self.monitor.hinted(runs) == Hint::Discard {
            self.discard_free(memory, runs);
        }
    }

    /// Discards pages that are free, but not in the balloon: not to be had with devices.
    fn discard_free(&mut self, memory: &Memory, runs: &[Span]) {
        self.todo.clear();
        self.todo.extend_from_slice(runs);
        self.kept.clear();
        self.discard(memory);
    }

    /// Discards what is to do without what is kept, cut to whole pages in regions.
    fn discard(&mut self, memory: &Memory) {
        self.cut.clear();
        if self.kept.is_empty() {
            memory.cut(&self.todo, |part| self.cut.push(part));
            return self.discard_cut();
        }
        // Both ascend; a kept part may be longer than a run only where somebody's `Dma` is wrong.
        let mut kept = self.kept.iter().copied().peekable();
        for run in &self.todo {
            let mut at = run.start;
            let mut left = run.len;
            while left > 0 {
                let rest = Span::new(at, left);
                while kept
                    .next_if(|kept| kept.is_empty() || kept.last() < at)
                    .is_some()
                {}
                let Some(part) = kept.peek().and_then(|kept| kept.intersection(&rest)) else {
                    memory.cut(&[rest], |part| self.cut.push(part));
                    break;
                };
                let before = Span::new(at, part.start - at);
                memory.cut(&[before], |part| self.cut.push(part));
                let done = part.start - at + part.len;
                at = at.wrapping_add(done);
                left -= done;
            }
        }
        self.discard_cut();
    }

    fn discard_cut(&mut self) {
        if self.cut.is_empty() {
            return;
        }
        let (counters, monitor) = (&mut self.counters, &mut self.monitor);
        add(&mut counters.discards, self.cut.len() as u64);
        let done = self.discard.discard(&self.cut, &mut |run, cause| {
            add(&mut counters.not_discarded, run.len);
            monitor.event(Event::NotDiscarded { run, cause });
        });
        add(&mut counters.discarded, done);
    }

    /// The guest takes these runs back, which ascend and do not touch: devices are given them. What they
    /// lack afterwards is put into `lacking`.
    pub(super) fn restore(&mut self, runs: &[Span], then: Unrestored, lacking: &mut Vec<Span>) {
        let (counters, monitor) = (&mut self.counters, &mut self.monitor);
        self.dma.restore(runs, &mut |run, reason| {
            add(&mut counters.not_restored, run.len);
            monitor.event(Event::NotRestored { run, reason, then });
            lacking.push(run);
        });
    }
}
