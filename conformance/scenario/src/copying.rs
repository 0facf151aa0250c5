//! Devices of the machine that never stop: each copies from page to page, and every byte that came is compared.
//!
//! The first half of a page holds what the processor has written there, which follows from its place, or zeros once
//! it was discarded. The second half of another page takes it: it is filled with what must not be found afterwards,
//! the device reads and writes, and the processor compares. Such a device does not learn of faults: a copy of which
//! nothing came was one.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hostmem::Mapping;

use crate::pattern::{Pattern, differing};
use crate::scene::{Expect, Scene};
use crate::{PAGE, PARTS};

/// Bytes of a copy.
pub const PLACE: u64 = 2048;
/// So many copies, then one into a hole.
const PROBE: u64 = 4;

/// Fills the device's buffer of [`PLACE`] bytes from an address (false), or writes it there (true). It asks the
/// function while it waits.
pub type Copy<'a> =
    dyn FnMut(bool, u64, &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), String> + 'a;

/// The memory that devices of the machine copy: halves of equal length one behind the other.
#[derive(Clone, Debug)]
pub struct Halves {
    pub(crate) halves: Vec<Arc<Mapping>>,
    /// One device at a time writes into each part.
    pub(crate) parts: Arc<[Mutex<()>]>,
}

/// A device at work.
struct Device<'a> {
    scene: &'a Scene,
    memory: &'a Halves,
    number: usize,
    copy: &'a mut Copy<'a>,
}

impl Halves {
    /// Plays device `number`, which copies by `copy`, until it is to stop.
    ///
    /// # Errors
    ///
    /// That of `copy`.
    pub fn play(&self, scene: &Scene, number: usize, copy: &mut Copy<'_>) -> Result<(), String> {
        let copy =
            &mut |write, iova, go_on: &mut dyn FnMut() -> ControlFlow<()>| copy(write, iova, go_on);
        let mut device = Device {
            scene,
            memory: self,
            number,
            copy,
        };
        let mut count = number as u64;
        loop {
            let pass = scene.pass();
            for part in 0..PARTS {
                if scene.stopped() {
                    return Ok(());
                }
                count += 1;
                device.copy(part, count)?;
                if count % PROBE == 0 {
                    device.probe(count)?;
                }
            }
            // One that was broken off ends with the number of the one before.
            scene.passed(number, pass);
        }
    }
}

impl Device<'_> {
    /// The words of a place at `offset`, which lies in a page.
    fn place(&self, offset: u64) -> &[AtomicU64] {
        let half = self.memory.halves.first().map_or(1, |half| half.len());
        let cells = self.memory.halves.get((offset / half) as usize);
        let first = (offset % half / 8) as usize;
        let cells = cells.and_then(|half| half.cells().get(first..first + (PLACE / 8) as usize));
        cells.unwrap_or_default()
    }

    /// The offset of a page of `part`, another each time.
    fn page(&self, part: u64, count: u64) -> u64 {
        let pages = self.scene.len() as u64 / PARTS;
        (part * pages + Pattern::Device.word(count) % pages.max(1)) * PAGE
    }

    fn expect(&self, offset: u64) -> Expect {
        self.scene.expect(self.number, (offset / PAGE) as usize)
    }

    fn is_mapped(&self, offset: u64) -> bool {
        matches!(self.expect(offset), Expect::Mapped { .. })
    }

    /// A page that can be read: of the first part from `part` on that is mapped.
    fn source(&self, part: u64, count: u64) -> Option<u64> {
        let mut pages = (0..PARTS).map(|next| self.page((part + next) % PARTS, count));
        pages.find(|page| self.is_mapped(*page))
    }

    /// What the first half of the page at `offset` holds.
    fn held(&self, offset: u64) -> impl Iterator<Item = u64> + use<> {
        let version = &self.scene.versions[(offset / PAGE) as usize];
        let zero = version.load(Ordering::SeqCst) == 0;
        let half = self.memory.halves.first().map_or(1, |half| half.len());
        let first = offset % half;
        (first..first + PLACE)
            .step_by(8)
            .map(move |offset| match zero {
                true => 0,
                false => Pattern::Processor.word(offset),
            })
    }

    fn transfer(&mut self, from: u64, to: u64) -> Result<(), String> {
        let (scene, base) = (self.scene, self.scene.base);
        let go_on = &mut || match scene.stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        (self.copy)(false, base + from, go_on)?;
        let page = (to / PAGE) as usize;
        let noted = self.is_mapped(to);
        if noted {
            scene.begin_write(page);
        }
        (self.copy)(true, base + to, go_on)?;
        if noted {
            scene.end_write(page);
        }
        Ok(())
    }

    /// Copies into a page of `part`, if that is mapped, and compares.
    fn copy(&mut self, part: u64, count: u64) -> Result<(), String> {
        let _gate = self.scene.gate();
        let to = self.page(part, !count);
        let from = self.source((part + 5) % PARTS, count);
        let Some(from) = from.filter(|_| self.is_mapped(to)) else {
            return Ok(());
        };
        let memory = self.memory;
        let lock = memory.parts.get(part as usize).map(Mutex::lock);
        let _alone = lock.map(|lock| lock.unwrap_or_else(PoisonError::into_inner));
        for (cell, word) in self.place(to + PLACE).iter().zip(self.held(from)) {
            cell.store(!word, Ordering::Relaxed);
        }
        self.transfer(from, to + PLACE)?;
        let target = self.place(to + PLACE);
        let found = || target.iter().map(|cell| cell.load(Ordering::Relaxed));
        let (device_counts, at) = (self.scene.device_counts(self.number), self.scene.base + to);
        let nothing = found()
            .zip(self.held(from))
            .all(|(found, word)| found == !word);
        let wrong = differing(found(), self.held(from));
        if nothing {
            device_counts.faults_outside.fetch_add(1, Ordering::Relaxed);
            self.scene
                .complain(format!("of a copy to {at:#x} nothing came"));
        } else if wrong > 0 {
            device_counts.wrong.fetch_add(wrong, Ordering::Relaxed);
            self.scene
                .complain(format!("of a copy to {at:#x} {wrong} bytes differ"));
        }
        device_counts.read.fetch_add(PLACE, Ordering::Relaxed);
        device_counts.written.fetch_add(PLACE, Ordering::Relaxed);
        device_counts.accesses.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Writes into a hole, which was discarded, and looks whether anything came. The look brings the page in again.
    fn probe(&mut self, count: u64) -> Result<(), String> {
        let manner = self.scene.gate();
        let Some(hole) = manner.focus.first().copied() else {
            return Ok(());
        };
        let nth = Pattern::Device.word(count) % (hole.len / PAGE);
        let offset = hole.start + nth * PAGE - self.scene.base;
        // Something to write that is not zero.
        let from = self.source(0, count);
        let Some(from) = from.filter(|_| self.expect(offset) == Expect::Hole) else {
            return Ok(());
        };
        self.transfer(from, offset)?;
        let mut place = self.place(offset).iter();
        let device_counts = self.scene.device_counts(self.number);
        match place.any(|cell| cell.load(Ordering::Relaxed) != 0) {
            true => {
                device_counts.reached.fetch_add(1, Ordering::Relaxed);
                self.scene
                    .complain(format!("a copy reached the hole at offset {offset:#x}"));
            }
            false => _ = device_counts.faults_inside.fetch_add(1, Ordering::Relaxed),
        }
        device_counts.probes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
