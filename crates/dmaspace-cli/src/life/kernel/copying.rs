//! Devices of the machine that never stop: each copies from page to page, and every byte that came is
//! compared.
//!
//! The first half of a page holds what the processor has written there, which follows from its place, or
//! zeros once it was discarded. The second half of another page takes it: it is filled with what must not
//! be found afterwards, the device reads and writes, and the processor compares. Such a device does not
//! learn of faults: a copy of which nothing came was one.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use hostmem::Mapping;
use runs::Span;

use super::super::crew::{Checked, Crew, PAGE, Stage};
use super::super::frames::write;
use super::super::memory::PARTS;
use super::super::scene::{Hole, Scene, Tally};
use crate::map::JobError;
use crate::map::edu::Edu;
use crate::map::kernel::Used;
use crate::map::pattern::{Pattern, differing, fill};
use crate::map::sampled::{Copier, PLACE};
use crate::sentence;

/// So many copies, then one into a hole.
const PROBE: u64 = 4;

/// Memory as a device copies it.
#[derive(Debug)]
pub(super) struct Halves {
    iova: u64,
    /// In order.
    halves: Vec<Arc<Mapping>>,
    half: u64,
    /// Offsets that were discarded, and read as zeros.
    zeros: RwLock<Vec<Span>>,
    /// One device at a time writes into each part.
    parts: Vec<Mutex<()>>,
}

impl Checked for Halves {
    const SEEN: (u64, u64) = (4, 2);

    fn discarded(&self, range: Span) {
        write(&self.zeros).push(Span::new(range.start - self.iova, range.len));
    }
}

/// The devices of a life on the kernel's tables.
pub(super) type Copying = Crew<Halves>;

impl Copying {
    /// So many devices over memory that is mapped from `iova` on.
    pub(super) fn over(iova: u64, halves: Vec<Arc<Mapping>>, devices: usize) -> Self {
        let half = halves.first().map_or(0, |half| half.len());
        let memory = Halves {
            iova,
            halves,
            half,
            zeros: RwLock::default(),
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
        };
        let pages = memory.len() / PAGE;
        Self::new(memory, devices, pages as usize)
    }

    /// Fills the memory, and has the devices begin.
    pub(super) fn begin(&mut self, devices: &[Arc<Used>]) -> io::Result<()> {
        for half in &self.memory().halves {
            // Nobody stops it: it is as quick as bringing the memory in.
            let _ = fill(half, &mut |_| ControlFlow::Continue(()));
        }
        self.start(devices.iter().cloned().map(|used| {
            move |stage: &Stage<Halves>, tally: &Tally, number| match run(
                stage, &used, tally, number,
            ) {
                Ok(()) | Err(JobError::Interrupted) => Ok(()),
                Err(error) => Err(sentence(&error)),
            }
        }))
    }
}

fn run(stage: &Stage<Halves>, used: &Used, tally: &Tally, number: u64) -> Result<(), JobError> {
    let mut device = Device {
        stage,
        tally,
        edu: Edu::new(used.device())?,
    };
    let mut count = number;
    loop {
        let pass = stage.pass();
        for part in 0..PARTS {
            if stage.stopped() {
                return Ok(());
            }
            count += 1;
            let scene = stage.scene();
            device.copy(&scene, part, count)?;
            if count.is_multiple_of(PROBE)
                && let Some(hole) = scene.holes.first().filter(|hole| hole.open)
            {
                device.probe(&scene, *hole, count)?;
            }
        }
        stage.ended(tally, pass);
    }
}

impl Halves {
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

    /// The offset of a page of `part`, another each time.
    fn page(&self, part: u64, count: u64) -> u64 {
        let pages = self.len() / PARTS / PAGE;
        (part * pages + Pattern::Device.word(count) % pages.max(1)) * PAGE
    }

    /// A page that can be read: of the first part from `part` on that is in no hole.
    fn source(&self, scene: &Scene, part: u64, count: u64) -> Option<u64> {
        let mut pages = (0..PARTS).map(|next| self.page((part + next) % PARTS, count));
        pages.find(|page| scene.hole(self.iova + page).is_none())
    }

    /// What the first half of the page at `offset` holds.
    fn held(&self, offset: u64) -> impl Iterator<Item = u64> + use<> {
        let zeros = self.zeros.read().unwrap_or_else(PoisonError::into_inner);
        let zero = zeros.iter().any(|span| span.contains(offset));
        let first = offset % self.half;
        (first..first + PLACE)
            .step_by(8)
            .map(move |offset| match zero {
                true => 0,
                false => Pattern::Processor.word(offset),
            })
    }
}

/// A device at work.
struct Device<'a> {
    stage: &'a Stage<Halves>,
    tally: &'a Tally,
    edu: Edu<'a>,
}

impl Device<'_> {
    /// Copies into a page of `part`, if it is in no hole, and compares.
    fn copy(&mut self, scene: &Scene, part: u64, count: u64) -> Result<(), JobError> {
        let (stage, tally, memory) = (self.stage, self.tally, &self.stage.memory);
        let to = memory.page(part, !count);
        let outside = scene.hole(memory.iova + to).is_none();
        let from = memory.source(scene, part + 5, count);
        let Some(from) = from.filter(|_| outside) else {
            return Ok(());
        };
        let lock = memory.parts.get(part as usize).map(Mutex::lock);
        let _alone = lock.map(|lock| lock.unwrap_or_else(PoisonError::into_inner));
        let target = memory.place(to + PLACE);
        for (cell, word) in target.iter().zip(memory.held(from)) {
            cell.store(!word, Ordering::Relaxed);
        }
        let mut go_on = || go_on(stage);
        self.edu.read(memory.iova + from, &mut go_on)?;
        stage.noted.begin((to / PAGE) as usize);
        self.edu.write(memory.iova + to + PLACE, &mut go_on)?;
        stage.noted.done((to / PAGE) as usize);
        let found = || target.iter().map(|cell| cell.load(Ordering::Relaxed));
        match found()
            .zip(memory.held(from))
            .all(|(found, word)| found == !word)
        {
            true => _ = tally.faults_outside.fetch_add(1, Ordering::Relaxed),
            false => {
                let wrong = differing(found(), memory.held(from));
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
    fn probe(&mut self, scene: &Scene, hole: Hole, count: u64) -> Result<(), JobError> {
        let (stage, memory) = (self.stage, &self.stage.memory);
        let nth = Pattern::Device.word(count) % (hole.range.len / PAGE);
        let iova = hole.range.start + nth * PAGE;
        let mut go_on = || go_on(stage);
        // Something to write that is not zero.
        let Some(from) = memory.source(scene, 0, count) else {
            return Ok(());
        };
        self.edu.read(memory.iova + from, &mut go_on)?;
        self.edu.write(iova, &mut go_on)?;
        let place = memory.place(iova - memory.iova);
        let came = place.iter().any(|cell| cell.load(Ordering::Relaxed) != 0);
        let counter = match came {
            true => &self.tally.reached,
            false => &self.tally.faults_inside,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.tally.probes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn go_on(stage: &Stage<Halves>) -> ControlFlow<()> {
    match stage.stopped() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}
