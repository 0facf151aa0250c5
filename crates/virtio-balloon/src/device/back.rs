//! Release and discard behind the queues: devices first, then the machine, in the one order in which it is safe.

use std::time::{Duration, Instant};
use std::vec::Vec;

use runs::{GuestAddr, Span, merge_sorted};

use super::discarder::Discarder;
use super::memory::Memory;
use super::monitor::{BalloonEvent, BalloonMonitor, Hint, Unrestored};
use crate::dma::{KeepReason, Releaser};
use crate::map::{MemoryMap, Part};

/// Counters of a device since it was made, in bytes unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalloonCounters {
    /// Messages and reports that were taken from the queues.
    pub chains: u64,
    /// Pages that the driver gave on inflateq, each time it did.
    pub inflated: u64,
    /// Pages that it took back on deflateq, each time it did.
    pub deflated: u64,
    /// Pages that it reported as free.
    pub reported: u64,
    /// Pages that it hinted at as free.
    pub hinted: u64,
    /// Hints that came without a command, or with an old one, in chains.
    pub hints_ignored: u64,
    /// Parts that were handed to [`Discarder`].
    pub discards: u64,
    /// Memory that was discarded.
    pub discarded: u64,
    /// Memory that was not discarded because the discard failed.
    pub not_discarded: u64,
    /// Memory that was not discarded because devices still see it.
    pub kept: u64,
    /// Memory that devices could not be given back, each time it was tried.
    pub not_restored: u64,
    /// Time in drains of queues.
    pub busy: Duration,
    /// Time in [`Discarder`], which is a part of that.
    pub discarding: Duration,
}

/// Counts more; there is no more than `u64::MAX`.
pub(super) const fn add(counter: &mut u64, more: u64) {
    *counter = counter.saturating_add(more);
}

/// Returns the bytes of all these parts together, which are apart.
pub(super) fn bytes(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.offsets.len).sum()
}

/// Puts the guest addresses of these parts, which ascend, into `runs`, merged also where regions touch.
fn in_guest<T>(map: MemoryMap<'_, T>, parts: &[Part], runs: &mut Vec<Span<GuestAddr>>) {
    runs.clear();
    runs.extend(parts.iter().map(|part| map.run(part)));
    let merged = merge_sorted(runs);
    runs.truncate(merged);
}

/// Hands on what of these parts is in none of `kept`; both ascend.
fn without(parts: &[Part], kept: &[Part], mut sink: impl FnMut(Part)) {
    // A kept part may be longer than a part only where a foreign `Releaser` is wrong.
    let mut kept = kept.iter().peekable();
    for part in parts {
        let region = part.region;
        let mut rest = part.offsets;
        while !rest.is_empty() {
            let done = |kept: &&Part| {
                let (kept, offsets) = (kept.region, kept.offsets);
                kept < region
                    || kept == region && (offsets.is_empty() || offsets.last() < rest.start)
            };
            while kept.next_if(done).is_some() {}
            let here = kept.peek().filter(|kept| kept.region == region);
            let Some(here) = here.and_then(|kept| kept.offsets.intersection(&rest)) else {
                sink(Part::new(region, rest));
                break;
            };
            let before = here.start - rest.start;
            if before > 0 {
                sink(Part::new(region, Span::new(rest.start, before)));
            }
            let done = before + here.len;
            rest = Span::new(rest.start.wrapping_add(done), rest.len - done);
        }
    }
}

/// The seams, and room to work in.
#[derive(Debug)]
pub(super) struct Back<D, A, M> {
    pub(super) discard: D,
    pub(super) dma: A,
    pub(super) monitor: M,
    pub(super) counters: BalloonCounters,
    /// Parts made of huge pages that are whole now.
    whole: Vec<Part>,
    kept: Vec<Part>,
    /// Parts to be discarded, cut to whole pages.
    cut: Vec<Part>,
    hinted: Vec<Span<GuestAddr>>,
    /// Parts whose discard failed.
    failed: Vec<Part>,
    /// Memory that [`inflate`](Self::inflate) discarded and that is certain to hold zeros, where that is asked for.
    pub(super) zeros: Option<Vec<Span<GuestAddr>>>,
}

impl<D, A, M: BalloonMonitor> Back<D, A, M> {
    pub(super) fn new(discard: D, dma: A, monitor: M) -> Self {
        Self {
            discard,
            dma,
            monitor,
            counters: BalloonCounters::default(),
            whole: Vec::new(),
            kept: Vec::new(),
            cut: Vec::new(),
            hinted: Vec::new(),
            failed: Vec::new(),
            zeros: None,
        }
    }

    /// The guest has given these parts, which ascend and do not touch: what is whole now is released by
    /// devices and then discarded.
    pub(super) fn inflate<T>(&mut self, memory: &mut Memory<T>, parts: &[Part])
    where
        D: Discarder<T>,
        A: Releaser<T>,
    {
        add(&mut self.counters.inflated, bytes(parts));
        let whole = memory.inflate(parts, &mut self.whole);
        if whole.is_empty() {
            return;
        }
        let map = memory.map();
        self.kept.clear();
        let (kept, counters, monitor) = (&mut self.kept, &mut self.counters, &mut self.monitor);
        self.dma.release(map, whole, &mut |part, reason| {
            keep(part, reason, map, (counters, monitor, kept));
        });
        let mut parts = whole;
        if !self.kept.is_empty() {
            self.cut.clear();
            without(whole, &self.kept, |part| {
                memory.cut(part, |part| self.cut.push(part));
            });
            parts = &self.cut;
        }
        self.failed.clear();
        let failed = self.zeros.is_some().then_some(&mut self.failed);
        let (discard, counters) = (&mut self.discard, &mut self.counters);
        discard_all(discard, map, parts, counters, &mut self.monitor, failed);
        if let Some(zeros) = &mut self.zeros {
            self.failed.sort_unstable();
            without(parts, &self.failed, |part| {
                if discard.gives_zeros(map, part.region) {
                    zeros.push(map.run(&part));
                }
            });
        }
    }

    /// The driver has reported these parts.
    pub(super) fn report<T>(&mut self, memory: &Memory<T>, parts: &[Part])
    where
        D: Discarder<T>,
        A: Releaser<T>,
    {
        add(&mut self.counters.reported, bytes(parts));
        self.discard_free(memory, parts);
    }

    /// The driver has hinted at these parts.
    pub(super) fn hint<T>(&mut self, memory: &Memory<T>, parts: &[Part])
    where
        D: Discarder<T>,
        A: Releaser<T>,
    {
        add(&mut self.counters.hinted, bytes(parts));
        in_guest(memory.map(), parts, &mut self.hinted);
        if self.monitor.hinted(&self.hinted) == Hint::Discard {
            self.discard_free(memory, parts);
        }
    }

    /// Discards pages that are free, but not in the balloon: not to be had with devices that reach all memory. What
    /// the guest has mapped for devices is not free, whatever the driver says, and stays.
    fn discard_free<T>(&mut self, memory: &Memory<T>, parts: &[Part])
    where
        D: Discarder<T>,
        A: Releaser<T>,
    {
        let map = memory.map();
        self.kept.clear();
        let (kept, counters, monitor) = (&mut self.kept, &mut self.counters, &mut self.monitor);
        self.dma.held(map, parts, &mut |part, reason| {
            keep(part, reason, map, (counters, monitor, kept));
        });
        self.cut.clear();
        without(parts, &self.kept, |part| {
            memory.cut(part, |part| self.cut.push(part));
        });
        let (discard, counters) = (&mut self.discard, &mut self.counters);
        discard_all(discard, map, &self.cut, counters, &mut self.monitor, None);
    }

    /// The guest takes these parts back, which ascend and do not touch: devices are given them. Parts
    /// that devices lack afterwards are put into `lacking`, by guest addresses.
    pub(super) fn restore<T>(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        then: Unrestored,
        lacking: &mut Vec<Span<GuestAddr>>,
    ) where
        A: Releaser<T>,
    {
        let (counters, monitor) = (&mut self.counters, &mut self.monitor);
        self.dma.restore(map, parts, &mut |part, reason| {
            add(&mut counters.not_restored, part.offsets.len);
            let run = map.run(&part);
            monitor.event(BalloonEvent::NotRestored { run, reason, then });
            lacking.push(run);
        });
    }
}

/// Reports that devices keep a part, and notes it.
fn keep<T, M: BalloonMonitor>(
    part: Part,
    reason: KeepReason,
    map: MemoryMap<'_, T>,
    (counters, monitor, kept): (&mut BalloonCounters, &mut M, &mut Vec<Part>),
) {
    add(&mut counters.kept, part.offsets.len);
    let run = map.run(&part);
    monitor.event(BalloonEvent::Kept { run, reason });
    kept.push(part);
}

/// Discards these parts, which are whole pages; where that fails, it is put into `not`.
fn discard_all<T, D: Discarder<T>, M: BalloonMonitor>(
    discard: &mut D,
    map: MemoryMap<'_, T>,
    parts: &[Part],
    counters: &mut BalloonCounters,
    monitor: &mut M,
    mut not: Option<&mut Vec<Part>>,
) {
    if parts.is_empty() {
        return;
    }
    add(&mut counters.discards, parts.len() as u64);
    let begun = Instant::now();
    let done = discard.discard(map, parts, &mut |part, cause| {
        add(&mut counters.not_discarded, part.offsets.len);
        let run = map.run(&part);
        monitor.event(BalloonEvent::NotDiscarded { run, cause });
        if let Some(not) = &mut not {
            not.push(part);
        }
    });
    counters.discarding += begun.elapsed();
    add(&mut counters.discarded, done);
}
