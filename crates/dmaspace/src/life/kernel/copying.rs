//! Devices of the machine that never stop: each copies from page to page, and every byte that came is
//! compared.
//!
//! The first half of a page holds what the processor has written there, which follows from its place, or
//! zeros once it was discarded. The second half of another page takes it: it is filled with what must not
//! be found afterwards, the device reads and writes, and the processor compares. Such a device does not
//! learn of faults: a copy of which nothing came was one.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

use hostmem::Mapping;
use runs::Span;

use super::super::frames::write;
use super::super::memory::PARTS;
use super::super::report::DmaCounts;
use super::super::scene::{Hole, Scene, Tally, Waited, Written, busy, counts, wait};
use crate::map::JobError;
use crate::map::edu::Edu;
use crate::map::kernel::Used;
use crate::map::pattern::{Pattern, differing, fill};
use crate::map::sampled::{Copier, PLACE};
use crate::sentence::sentence;

const PAGE: u64 = 4096;
/// So many copies, then one into a hole.
const PROBE: u64 = 4;
/// Copies of each device by which a change is seen, and copies into holes while there are some.
const SEEN: (u64, u64) = (4, 2);

/// Memory as a device copies it.
#[derive(Debug)]
struct Memory {
    iova: u64,
    /// The halves, in order.
    halves: Vec<Arc<Mapping>>,
    half: u64,
}

impl Memory {
    fn len(&self) -> u64 {
        self.half * self.halves.len() as u64
    }

    /// The words of a place at `offset`, which lies in a page.
    fn place(&self, offset: u64) -> &[AtomicU64] {
        let cells = self.halves.get((offset / self.half) as usize);
        let first = (offset % self.half / 8) as usize;
        let cells = cells.and_then(|half| half.cells().get(first..first + (PLACE / 8) as usize));
        cells.unwrap_or_default()
    }
}

#[derive(Debug)]
struct Shared {
    memory: Memory,
    scene: RwLock<Scene>,
    /// Offsets that were discarded, and read as zeros.
    zeros: RwLock<Vec<Span>>,
    stop: AtomicBool,
    /// The pass that is wanted.
    pass: AtomicU64,
    tallies: Vec<Tally>,
    noted: Written,
    /// One device at a time writes into each part.
    parts: Vec<Mutex<()>>,
    failed: Mutex<Option<String>>,
}

/// The devices of a life on the kernel's tables. Dropped, they stop.
#[derive(Debug)]
pub(super) struct Copying {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Copying {
    /// Fills the memory, which is mapped from `iova` on, and has the devices begin.
    pub(super) fn begin(
        devices: &[Arc<Used>],
        iova: u64,
        halves: Vec<Arc<Mapping>>,
    ) -> io::Result<Self> {
        for half in &halves {
            // Nobody stops it: it is as quick as bringing the memory in.
            let _ = fill(half, &mut |_| ControlFlow::Continue(()));
        }
        let half = halves.first().map_or(0, |half| half.len());
        let memory = Memory { iova, halves, half };
        let shared = Arc::new(Shared {
            noted: Written::new((memory.len() / PAGE) as usize),
            memory,
            scene: RwLock::default(),
            zeros: RwLock::default(),
            stop: AtomicBool::new(false),
            pass: AtomicU64::new(0),
            tallies: devices.iter().map(|_| Tally::default()).collect(),
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            failed: Mutex::default(),
        });
        let threads = Vec::new();
        let mut copying = Self { shared, threads };
        for (number, used) in devices.iter().enumerate() {
            let (shared, used) = (Arc::clone(&copying.shared), Arc::clone(used));
            let work = move || shared.run(number, &used);
            copying.threads.push(thread::Builder::new().spawn(work)?);
        }
        Ok(copying)
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
        let offset = range.start - self.shared.memory.iova;
        write(&self.shared.zeros).push(Span::new(offset, range.len));
    }

    /// What devices write to is noted anew.
    pub(super) fn note_anew(&self) {
        let _still = write(&self.shared.scene);
        self.shared.noted.clear();
    }

    /// See [`Written::sure`].
    pub(super) fn written(&self) -> Vec<u64> {
        self.shared.noted.sure()
    }

    /// See [`Written::perhaps`].
    pub(super) fn perhaps_written(&self) -> Vec<u64> {
        self.shared.noted.perhaps()
    }

    /// Waits until each device has written into every part that is not in a hole, from now on.
    pub(super) fn everywhere(&self, watch: &mut dyn FnMut() -> bool) -> Waited {
        let pass = self.shared.pass.fetch_add(1, Ordering::AcqRel) + 1;
        wait(
            &self.shared.tallies,
            &mut || self.go_on(watch),
            |tally, _| tally.passed.load(Ordering::Acquire) >= pass,
        )
    }

    /// Waits until each device has seen what is now.
    pub(super) fn seen(&self, watch: &mut dyn FnMut() -> bool) -> Waited {
        let scene = self.shared.scene.read();
        let scene = scene.unwrap_or_else(PoisonError::into_inner);
        let probes = if scene.holes.is_empty() { 0 } else { SEEN.1 };
        drop(scene);
        busy(&self.shared.tallies, SEEN.0, probes, &mut || {
            self.go_on(watch)
        })
    }

    fn go_on(&self, watch: &mut dyn FnMut() -> bool) -> bool {
        self.failed().is_none() && watch()
    }

    /// Why a device has stopped by itself.
    pub(super) fn failed(&self) -> Option<String> {
        let failed = self.shared.failed.lock();
        failed.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What they have counted.
    pub(super) fn counts(&self) -> DmaCounts {
        counts(&self.shared.tallies)
    }

    /// Stops them, and waits for it.
    pub(super) fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that has panicked makes no copies any more: a wait tells of it.
            let _ = thread.join();
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn run(&self, number: usize, used: &Used) {
        match self.copy_until_stopped(number, used) {
            Ok(()) | Err(JobError::Interrupted) => {}
            Err(error) => {
                let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                *failed = Some(sentence(&error));
            }
        }
    }

    fn copy_until_stopped(&self, number: usize, used: &Used) -> Result<(), JobError> {
        let mut device = Edu::new(used.device())?;
        let Some(tally) = self.tallies.get(number) else {
            return Ok(());
        };
        let mut count = number as u64;
        loop {
            let pass = self.pass.load(Ordering::Acquire);
            for part in 0..PARTS {
                if self.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                count += 1;
                let scene = self.scene.read().unwrap_or_else(PoisonError::into_inner);
                self.copy(&mut device, tally, &scene, part, count)?;
                if count.is_multiple_of(PROBE)
                    && let Some(hole) = scene.holes.first().filter(|hole| hole.open)
                {
                    self.probe(&mut device, tally, &scene, *hole, count)?;
                }
            }
            if self.pass.load(Ordering::Relaxed) == pass {
                tally.passed.store(pass, Ordering::Release);
            }
        }
    }

    /// The offset of a page of `part`, another each time.
    fn page(&self, part: u64, count: u64) -> u64 {
        let pages = self.memory.len() / PARTS / PAGE;
        (part * pages + Pattern::Device.word(count) % pages.max(1)) * PAGE
    }

    /// A page that can be read: of the first part from `part` on that is in no hole.
    fn source(&self, scene: &Scene, part: u64, count: u64) -> Option<u64> {
        let mut pages = (0..PARTS).map(|next| self.page((part + next) % PARTS, count));
        pages.find(|page| scene.hole(self.memory.iova + page).is_none())
    }

    /// What the first half of the page at `offset` holds.
    fn held(&self, offset: u64) -> impl Iterator<Item = u64> + use<> {
        let zeros = self.zeros.read().unwrap_or_else(PoisonError::into_inner);
        let zero = zeros.iter().any(|span| span.contains(offset));
        let first = offset % self.memory.half;
        (first..first + PLACE)
            .step_by(8)
            .map(move |offset| match zero {
                true => 0,
                false => Pattern::Processor.word(offset),
            })
    }

    /// Copies into a page of `part`, if it is in no hole, and compares.
    fn copy(
        &self,
        device: &mut Edu<'_>,
        tally: &Tally,
        scene: &Scene,
        part: u64,
        count: u64,
    ) -> Result<(), JobError> {
        let to = self.page(part, !count);
        let outside = scene.hole(self.memory.iova + to).is_none();
        let Some(from) = self.source(scene, part + 5, count).filter(|_| outside) else {
            return Ok(());
        };
        let lock = self.parts.get(part as usize).map(Mutex::lock);
        let _alone = lock.map(|lock| lock.unwrap_or_else(PoisonError::into_inner));
        let target = self.memory.place(to + PLACE);
        for (cell, word) in target.iter().zip(self.held(from)) {
            cell.store(!word, Ordering::Relaxed);
        }
        let mut go_on = || self.go_on();
        device.read(self.memory.iova + from, &mut go_on)?;
        self.noted.begin((to / PAGE) as usize);
        device.write(self.memory.iova + to + PLACE, &mut go_on)?;
        self.noted.done((to / PAGE) as usize);
        let found = || target.iter().map(|cell| cell.load(Ordering::Relaxed));
        match found()
            .zip(self.held(from))
            .all(|(found, word)| found == !word)
        {
            true => _ = tally.faults_outside.fetch_add(1, Ordering::Relaxed),
            false => {
                let wrong = differing(found(), self.held(from));
                tally.wrong.fetch_add(wrong, Ordering::Relaxed);
            }
        }
        tally.read.fetch_add(PLACE, Ordering::Relaxed);
        tally.written.fetch_add(PLACE, Ordering::Relaxed);
        tally.accesses.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Writes into a hole, which was discarded, and looks whether anything came. The look brings the page
    /// in again.
    fn probe(
        &self,
        device: &mut Edu<'_>,
        tally: &Tally,
        scene: &Scene,
        hole: Hole,
        count: u64,
    ) -> Result<(), JobError> {
        let nth = Pattern::Device.word(count) % (hole.range.len / PAGE);
        let iova = hole.range.start + nth * PAGE;
        let mut go_on = || self.go_on();
        // Something to write that is not zero.
        let Some(from) = self.source(scene, 0, count) else {
            return Ok(());
        };
        device.read(self.memory.iova + from, &mut go_on)?;
        device.write(iova, &mut go_on)?;
        let place = self.memory.place(iova - self.memory.iova);
        let came = place.iter().any(|cell| cell.load(Ordering::Relaxed) != 0);
        let counter = match came {
            true => &tally.reached,
            false => &tally.faults_inside,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        tally.probes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn go_on(&self) -> ControlFlow<()> {
        match self.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
