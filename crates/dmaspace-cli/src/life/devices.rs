//! Devices of the software unit: they read, check and write every page.
//!
//! Each page has a version. A device that comes by reads the page, compares every byte with what the
//! version says, and writes the next. So a write that was lost, a page that is another one and a page
//! that is too old are all found by the next device to come.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use ioas::HostTables;
use iommu::{DeviceId, Port, SoftwareUnit};
use runs::Span;

use super::crew::{Checked, Crew, PAGE, Stage};
use super::frames::Physical;
use super::scene::{Hole, Tally};
use crate::map::pattern::{Pattern, differing, shuffled};

const WORDS: usize = PAGE as usize / 8;
/// In the version of a page that a device works on.
const TAKEN: u32 = 1 << 31;
/// So many accesses, then one into a hole.
const PROBE: u64 = 8;
/// So many accesses, then a breath: others are to run on these processors too.
const BREATH: u64 = 64;

pub(super) type SoftUnit = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// Pages from `base` on, which read as zeros at first.
#[derive(Debug)]
pub(super) struct Versions {
    base: u64,
    pages: Vec<AtomicU32>,
}

impl Checked for Versions {
    const SEEN: (u64, u64) = (2048, 2048 / PROBE / 2);

    fn discarded(&self, range: Span) {
        let first = ((range.start - self.base) / PAGE) as usize;
        let pages = self.pages.iter().skip(first);
        for version in pages.take((range.len / PAGE) as usize) {
            version.store(0, Ordering::Relaxed);
        }
    }
}

pub(super) type Devices = Crew<Versions>;

impl Devices {
    /// So many devices over the pages of `range`.
    pub(super) fn over(range: Span, devices: usize) -> Self {
        let pages = (range.len / PAGE) as usize;
        let versions = Versions {
            base: range.start,
            pages: (0..pages).map(|_| AtomicU32::new(0)).collect(),
        };
        Self::new(versions, devices, pages)
    }

    /// One for each unit begins.
    pub(super) fn begin(&mut self, units: &[(SoftUnit, DeviceId)]) -> io::Result<()> {
        self.start(units.iter().map(|(unit, device)| {
            let mut port = unit.port(*device);
            move |stage: &Stage<Versions>, tally: &Tally, number| {
                run(stage, &mut port, tally, number);
                Ok(())
            }
        }))
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

fn run(stage: &Stage<Versions>, port: &mut DevicePort, tally: &Tally, number: u64) {
    let mut count = 0u64;
    let mut seed = number;
    loop {
        let pass = stage.pass();
        seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
        for page in shuffled(stage.memory.pages.len() as u64, seed) {
            if stage.stopped() {
                return;
            }
            access(stage, port, tally, page as usize);
            count += 1;
            if count.is_multiple_of(PROBE) {
                probe(stage, port, tally, count);
            }
            if count.is_multiple_of(BREATH) {
                thread::sleep(Duration::from_micros(20));
            }
            if stage.pass() != pass {
                break;
            }
        }
        stage.ended(tally, pass);
    }
}

/// Into a hole, if there is one.
fn probe(stage: &Stage<Versions>, port: &mut DevicePort, tally: &Tally, count: u64) {
    let scene = stage.scene();
    let Some(holes) = (scene.holes.len() as u64).checked_sub(1) else {
        return;
    };
    let nth = Pattern::Processor.word(count);
    let Some(hole) = scene.holes.get((nth % (holes + 1)) as usize) else {
        return;
    };
    let page = (nth >> 32) % (hole.range.len / PAGE);
    into_hole(port, tally, *hole, hole.range.start + page * PAGE);
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
fn access(stage: &Stage<Versions>, port: &mut DevicePort, tally: &Tally, page: usize) {
    let scene = stage.scene();
    let versions = &stage.memory;
    let (offset, Some(cell)) = (page as u64 * PAGE, versions.pages.get(page)) else {
        return;
    };
    tally.accesses.fetch_add(1, Ordering::Relaxed);
    let iova = versions.base + offset;
    if let Some(hole) = scene.hole(iova) {
        return into_hole(port, tally, hole, iova);
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
        stage.noted.begin(page);
        match port.write(iova, &words) {
            Err(_) => _ = tally.faults_outside.fetch_add(1, Ordering::Relaxed),
            Ok(()) => {
                now = next;
                tally.written.fetch_add(PAGE, Ordering::Relaxed);
                stage.noted.done(page);
            }
        }
    }
    cell.store(now, Ordering::Release);
}
