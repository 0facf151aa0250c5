//! Devices that never stop: threads that read, check and write every page, from the first step to the
//! last.
//!
//! Each page has a version. A device that comes by reads the page, compares every byte with what the
//! version says, and writes the next. So a write that was lost, a page that is another one and a page
//! that is too old are all found by the next device to come.
//!
//! What devices may expect is a [`Scene`], which does not change while an access is under way: where the
//! holes are, which of them are sure to fault, and where devices write.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ioas::HostTables;
use iommu::{DeviceId, Port, SoftwareUnit};
use runs::Span;

use super::frames::{Physical, write};
use super::report::DmaCounts;
use super::scene::{Hole, Scene, Tally, Waited, Written, busy, counts, wait};
use crate::map::pattern::{Pattern, differing, shuffled};

/// Bytes of an access.
pub(super) const PAGE: u64 = 4096;
const WORDS: usize = PAGE as usize / 8;
/// In the version of a page that a device works on.
const TAKEN: u32 = 1 << 31;
/// So many accesses, then one into a hole.
const PROBE: u64 = 8;
/// So many accesses, then a breath: others are to run on these processors too.
const BREATH: u64 = 64;

pub(super) type SoftUnit = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// What the threads share.
#[derive(Debug)]
struct Shared {
    base: u64,
    versions: Vec<AtomicU32>,
    scene: RwLock<Scene>,
    stop: AtomicBool,
    /// The pass that is wanted.
    pass: AtomicU64,
    tallies: Vec<Tally>,
    /// What is written to while it is tracked.
    noted: Written,
}

/// The devices of a life. Dropped, they stop.
#[derive(Debug)]
pub(super) struct Devices {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Devices {
    /// One for each unit, over the pages of `range`, which read as zeros; an error where there can be no
    /// threads.
    pub(super) fn begin(units: &[(SoftUnit, DeviceId)], range: Span) -> io::Result<Self> {
        let pages = (range.len / PAGE) as usize;
        let shared = Arc::new(Shared {
            base: range.start,
            versions: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            scene: RwLock::default(),
            stop: AtomicBool::new(false),
            pass: AtomicU64::new(0),
            tallies: units.iter().map(|_| Tally::default()).collect(),
            noted: Written::new(pages),
        });
        let threads = Vec::new();
        let mut devices = Self { shared, threads };
        for (number, (unit, device)) in units.iter().enumerate() {
            let (shared, mut port) = (Arc::clone(&devices.shared), unit.port(*device));
            let work = move || shared.run(number, &mut port);
            devices.threads.push(thread::Builder::new().spawn(work)?);
        }
        Ok(devices)
    }

    /// See [`Scene::moving`].
    pub(super) fn moving(&self, ranges: &[Span]) {
        write(&self.shared.scene).moving(ranges);
    }

    /// See [`Scene::open`].
    pub(super) fn open(&self) {
        write(&self.shared.scene).open();
    }

    /// There are no holes any more.
    pub(super) fn closed(&self) {
        write(&self.shared.scene).holes.clear();
    }

    /// `range` was discarded: it reads as zeros. It lies in a hole.
    pub(super) fn discarded(&self, range: Span) {
        let first = ((range.start - self.shared.base) / PAGE) as usize;
        let pages = self.shared.versions.iter().skip(first);
        for version in pages.take((range.len / PAGE) as usize) {
            version.store(0, Ordering::Relaxed);
        }
    }

    /// Devices write nowhere but there, and what they wrote to is noted anew.
    pub(super) fn write_only(&self, spans: Vec<Span>) {
        let mut scene = write(&self.shared.scene);
        self.shared.noted.clear();
        scene.writes = Some(spans);
    }

    /// Devices write everywhere.
    pub(super) fn write_everywhere(&self) {
        write(&self.shared.scene).writes = None;
    }

    /// A bit for each page: what devices have written to for sure by now.
    pub(super) fn written(&self) -> Vec<u64> {
        self.shared.noted.sure()
    }

    /// What they have written to at most.
    pub(super) fn perhaps_written(&self) -> Vec<u64> {
        self.shared.noted.perhaps()
    }

    /// Waits until each device has been everywhere from now on.
    pub(super) fn everywhere(&self, watch: &mut dyn FnMut() -> bool) -> Waited {
        let pass = self.shared.pass.fetch_add(1, Ordering::AcqRel) + 1;
        wait(&self.shared.tallies, watch, |tally, _| {
            tally.passed.load(Ordering::Acquire) >= pass
        })
    }

    /// Waits until each device has made `count` accesses more, and, while there are holes, as many into
    /// these as fall to them.
    pub(super) fn busy(&self, count: u64, watch: &mut dyn FnMut() -> bool) -> Waited {
        let scene = self.shared.scene.read();
        let holes = !scene
            .unwrap_or_else(PoisonError::into_inner)
            .holes
            .is_empty();
        let probes = if holes { count / PROBE / 2 } else { 0 };
        busy(&self.shared.tallies, count, probes, watch)
    }

    /// What they have counted.
    pub(super) fn counts(&self) -> DmaCounts {
        counts(&self.shared.tallies)
    }

    /// Stops them, and waits for it.
    pub(super) fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A device that has panicked has counted no pass, so that a wait has told of it.
            let _ = thread.join();
        }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A word of the page at `offset`, of which `version` was written.
fn word(offset: u64, version: u32) -> u64 {
    match version {
        0 => 0,
        version => Pattern::Device.word(offset ^ u64::from(version) << 40),
    }
}

type DevicePort = Port<Arc<HostTables>, Arc<Physical>>;

impl Shared {
    fn run(&self, number: usize, port: &mut DevicePort) {
        let Some(tally) = self.tallies.get(number) else {
            return;
        };
        let mut count = 0u64;
        let mut seed = number as u64;
        loop {
            let pass = self.pass.load(Ordering::Acquire);
            seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
            for page in shuffled(self.versions.len() as u64, seed) {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                self.access(port, tally, page as usize);
                count += 1;
                if count.is_multiple_of(PROBE) {
                    self.probe(port, tally, count);
                }
                if count.is_multiple_of(BREATH) {
                    thread::sleep(Duration::from_micros(20));
                }
                if self.pass.load(Ordering::Relaxed) != pass {
                    break;
                }
            }
            // A pass that was broken off ends with the number of the one before.
            if self.pass.load(Ordering::Relaxed) == pass {
                tally.passed.store(pass, Ordering::Release);
            }
        }
    }

    /// Into a hole, if there is one.
    fn probe(&self, port: &mut DevicePort, tally: &Tally, count: u64) {
        let scene = self.scene.read().unwrap_or_else(PoisonError::into_inner);
        let Some(holes) = (scene.holes.len() as u64).checked_sub(1) else {
            return;
        };
        let nth = Pattern::Processor.word(count);
        let Some(hole) = scene.holes.get((nth % (holes + 1)) as usize) else {
            return;
        };
        let page = (nth >> 32) % (hole.range.len / PAGE);
        Self::into_hole(port, tally, *hole, hole.range.start + page * PAGE);
    }

    fn into_hole(port: &mut DevicePort, tally: &Tally, hole: Hole, iova: u64) {
        let mut words = [0; WORDS];
        let read = port.read(iova, &mut words);
        if !hole.open {
            return;
        }
        tally.probes.fetch_add(1, Ordering::Relaxed);
        for reached in [read.is_ok(), port.write(iova, &words).is_ok()] {
            let counter = match reached {
                true => &tally.reached,
                false => &tally.faults_inside,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads, checks and perhaps writes a page.
    fn access(&self, port: &mut DevicePort, tally: &Tally, page: usize) {
        let scene = self.scene.read().unwrap_or_else(PoisonError::into_inner);
        let (offset, Some(cell)) = (page as u64 * PAGE, self.versions.get(page)) else {
            return;
        };
        tally.accesses.fetch_add(1, Ordering::Relaxed);
        let iova = self.base + offset;
        if let Some(hole) = scene.hole(iova) {
            return Self::into_hole(port, tally, hole, iova);
        }
        let version = loop {
            let version = cell.fetch_or(TAKEN, Ordering::Acquire);
            if version & TAKEN == 0 {
                break version;
            }
            thread::yield_now();
        };
        let mut words = [0; WORDS];
        let offsets = || (offset..offset + PAGE).step_by(8);
        match port.read(iova, &mut words) {
            Err(_) => _ = tally.faults_outside.fetch_add(1, Ordering::Relaxed),
            Ok(()) => {
                let expected = offsets().map(|offset| word(offset, version));
                let wrong = differing(words.into_iter(), expected);
                tally.wrong.fetch_add(wrong, Ordering::Relaxed);
                tally.read.fetch_add(PAGE, Ordering::Relaxed);
            }
        }
        let mut now = version;
        if scene.writes(iova) {
            let next = (version + 1) & !TAKEN;
            for (cell, offset) in words.iter_mut().zip(offsets()) {
                *cell = word(offset, next);
            }
            self.noted.begin(page);
            match port.write(iova, &words) {
                Err(_) => _ = tally.faults_outside.fetch_add(1, Ordering::Relaxed),
                Ok(()) => {
                    now = next;
                    tally.written.fetch_add(PAGE, Ordering::Relaxed);
                    self.noted.done(page);
                }
            }
        }
        cell.store(now, Ordering::Release);
    }
}
