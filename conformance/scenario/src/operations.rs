//! The operations: each is the call of the address space, and what it changes in the model. Devices may find anything
//! at the pages that it is at work on, and only there.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ioas::{
    AttachError, DetachError, Ioas, MapError, Memory, Observer, Tracking, TrackingError, UnmapError,
};
use iommu::Unit;
use iopt::{Interruption, Pending, Prot};
use runs::{GuestAddr, Iova, Offset, Span};
use virtio_balloon::{Dma as _, MemoryMap, Part, Reason, Refusals, Region};

use crate::model::Page;
use crate::ram::without;
use crate::scene::{Attached, Expect};
use crate::world::{Backend, World};
use crate::{Error, PAGE};

/// A cut leaves the rest where it is.
pub const INTACT: Interruption = Interruption::Refused;

/// What a harvest has found, beside what devices say.
#[derive(Clone, Debug, Default)]
pub struct Harvest {
    /// A unit cannot tell: everything counts as written to.
    pub blind: bool,
    /// What is dirty.
    pub runs: Vec<Span<Iova>>,
    /// Pages that were written to and are not in it.
    pub missed: u32,
    /// Pages in it that no device has begun to write to.
    pub more: u32,
}

fn unmapped<T>(result: &Result<T, UnmapError>) -> bool {
    result.as_ref().map_or_else(
        |cause| matches!(cause, UnmapError::Flush(_) | UnmapError::Unpin(_)),
        |_| true,
    )
}

impl World {
    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let started = Instant::now();
        let done = work(self);
        self.took = started.elapsed();
        done
    }

    /// Devices may find anything at `pages` from now on, until they are [settled](Self::settle).
    pub(crate) fn moving(&mut self, pages: impl IntoIterator<Item = usize>) {
        let _quiet = self.scene.quiet();
        for page in pages {
            self.scene.set(page, Expect::Moving);
            self.dirty.touch(page);
        }
    }

    /// Devices are to find at `pages` what the model says. What is unmapped but not flushed waits.
    pub fn settle(&mut self, pages: impl IntoIterator<Item = usize>) {
        let waits = self.space.retired() > 0;
        let _quiet = self.scene.quiet();
        if !waits {
            for page in self.stale.drain(..) {
                self.scene.set(page, self.model.expect(page));
            }
        }
        for page in pages {
            let expect = self.model.expect(page);
            if waits && expect == Expect::Hole {
                self.stale.push(page);
            } else {
                self.scene.set(page, expect);
            }
        }
    }

    /// What the areas say about `pages`, after an operation that was done in part.
    fn learn(&mut self, pages: impl IntoIterator<Item = usize>) {
        for page in pages {
            let area = self.space.area_at(self.scene.base + page as u64 * PAGE);
            if let (Some(page), Some(area)) = (&mut self.model.pages[page], area) {
                (page.out, page.released) = (area.is_out(), area.is_released());
            }
        }
    }

    /// `part` of memory `number`, counted in pages through all memories.
    pub(crate) fn memory_pages(&self, number: usize, part: Span<Offset>) -> Range<usize> {
        let before = self.parts.iter().take(number);
        let before: u64 = before.map(|part| part.guest.len / PAGE).sum();
        let first = (before + part.start / PAGE) as usize;
        first..first + (part.len / PAGE) as usize
    }

    /// Nothing is in the way of a map there.
    pub fn is_free(&self, range: Span<Iova>) -> bool {
        self.model.is_free(self.scene.pages_of(range))
    }

    /// Maps `part` of memory `number` at `iova`.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::map`].
    pub fn map(
        &mut self,
        iova: u64,
        number: usize,
        part: Span<Offset>,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = Span::new(iova, part.len);
        let (pages, free) = (self.scene.pages_of(range), self.is_free(range));
        if free {
            self.moving(pages.clone());
        }
        let memory = Arc::clone(&self.parts[number].memory);
        let done = self.timed(|world| world.space.map(iova, &memory, part, prot, observer));
        if done.is_ok() {
            if !free {
                self.scene.complain(format!("map {range}: over an area"));
            }
            let memory = self.memory_pages(number, part);
            for (page, memory) in pages.clone().zip(memory) {
                self.model.pages[page] = Some(Page {
                    memory: memory as u32,
                    write: prot.contains(Prot::WRITE),
                    out: false,
                    released: false,
                });
            }
        }
        if free {
            self.settle(pages);
        }
        done
    }

    /// Unmaps by `how` what is in `range`.
    ///
    /// # Errors
    ///
    /// That of `how`.
    pub fn unmap<T>(
        &mut self,
        range: Span<Iova>,
        how: impl FnOnce(&Ioas) -> Result<T, UnmapError>,
    ) -> Result<T, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| how(&world.space));
        if unmapped(&done) {
            self.model.pages[pages.clone()].fill(None);
        }
        self.settle(pages);
        done
    }

    /// Takes `range` out of what devices reach: the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::take_out`].
    pub fn take_out(&mut self, range: Span<Iova>) -> Result<u64, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| world.space.take_out(range, INTACT, &mut ()));
        self.cut = true;
        if unmapped(&done) {
            self.model.change(pages.clone(), |page| page.out = true);
        }
        self.settle(pages);
        done
    }

    /// Puts `range` back.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::put_back`].
    pub fn put_back(&mut self, range: Span<Iova>) -> Result<(), MapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| world.space.put_back(range, INTACT, &mut ()));
        match done {
            Ok(()) => self.model.change(pages.clone(), |page| page.out = false),
            Err(_) => self.learn(pages.clone()),
        }
        self.settle(pages);
        done
    }

    /// Attaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::attach`].
    pub fn attach(&mut self, number: usize) -> Result<(), AttachError> {
        let Backend::Own(hardware) = &self.backend else {
            return Err(AttachError::AlreadyAttached);
        };
        let was = self.model.attached[number];
        if !was {
            self.scene.attached(number, Attached::Changing);
        }
        let (unit, id) = hardware.device(number);
        let unit = Arc::clone(&hardware.rigged[unit]) as Arc<dyn Unit>;
        let done = self.timed(|world| world.space.attach((unit, id)));
        if was || done.is_ok() {
            self.model.attached[number] = true;
        }
        let now = match self.model.attached[number] {
            true => Attached::Yes,
            false => Attached::No,
        };
        self.scene.attached(number, now);
        self.settle([]);
        done
    }

    /// Detaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::detach`].
    pub fn detach(&mut self, number: usize) -> Result<(), DetachError> {
        let Backend::Own(hardware) = &self.backend else {
            return Ok(());
        };
        let (_, id) = hardware.device(number);
        self.scene.attached(number, Attached::Changing);
        let done = self.timed(|world| world.space.detach(id));
        if done.is_ok() {
            self.model.attached[number] = false;
            self.scene.attached(number, Attached::No);
        }
        self.settle([]);
        done
    }

    /// Begins to track what devices write to.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::track_dirty`].
    pub fn track(&mut self, leaf: Option<u64>) -> Result<(), TrackingError> {
        let tracking = Tracking {
            leaf,
            interruption: INTACT,
        };
        self.timed(|world| world.space.track_dirty(tracking))?;
        // Marks from before are worth nothing.
        drop((self.scene.take_written(), self.scene.take_perhaps_written()));
        self.dirty.begin(self.scene.len(), leaf.is_none());
        Ok(())
    }

    /// Ends it.
    pub fn untrack(&mut self) {
        self.timed(|world| world.space.untrack_dirty());
        self.dirty.end();
    }

    /// Harvests all addresses, and compares with what devices have written to. What failed on the way, if
    /// something did, comes beside: nothing of the harvest is lost by it.
    ///
    /// # Errors
    ///
    /// When there is no harvest at all.
    pub fn harvest(&mut self) -> Result<(Harvest, Option<Error>), Error> {
        let range = self.range();
        let words = vec![0; self.scene.len().div_ceil(64)];
        let mut pending = Pending::new(words, range, PAGE)?;
        let sure = self.scene.take_written();
        let (harvested, shown) = self.timed(|world| {
            let harvested = world.space.harvest(&mut pending);
            (harvested, world.space.show(&mut pending).map(drop))
        });
        if self.faults.calm() {
            self.dirty.blur();
        }
        // Once more, without a fault: nothing of it is lost.
        let shown_again = self.space.show(&mut pending)?;
        let (words, runs) = (
            shown_again.words().to_vec(),
            shown_again.runs().collect::<Vec<_>>(),
        );
        shown_again.acknowledge();
        let perhaps = self.scene.take_perhaps_written();
        let (missed, more) = self.dirty.judge(&sure, perhaps, words);
        let blind = harvested.as_ref().is_ok_and(|found| found.blind);
        let failed = harvested.err().map(Error::from);
        let failed = failed.or_else(|| shown.err().map(Error::from));
        let found = Harvest {
            blind,
            runs,
            missed,
            more,
        };
        Ok((found, failed))
    }

    /// The guest's memory at these guest addresses is released or restored by `how`, which returns what stayed as
    /// it was and what was discarded; devices may find anything there meanwhile.
    pub(crate) fn balloon<T>(
        &mut self,
        runs: &[Span<GuestAddr>],
        released: bool,
        how: impl FnOnce(&mut Self) -> (T, bool, Vec<Span<GuestAddr>>),
    ) -> T {
        let memory: Vec<_> = runs.iter().flat_map(|run| self.of_guest(*run)).collect();
        let pages = self.model.over(&memory);
        self.moving(pages.iter().copied());
        let (done, whole, discarded) = self.timed(how);
        for run in discarded {
            let memory = self.of_guest(run);
            memory.flatten().for_each(|page| self.scene.zeroed(page));
        }
        for page in &pages {
            if let Some(page) = &mut self.model.pages[*page] {
                page.released = released;
            }
        }
        if !whole {
            self.learn(pages.iter().copied());
        }
        self.settle(pages);
        done
    }

    /// The pages of memory at guest addresses.
    fn of_guest(&self, run: Span<GuestAddr>) -> impl Iterator<Item = Range<usize>> + use<> {
        let inside = self.parts.iter().enumerate().filter_map(|(number, part)| {
            let both = part.guest.intersection(&run)?;
            let inside = Span::new(both.start - part.guest.start, both.len);
            Some(self.memory_pages(number, inside))
        });
        inside.collect::<Vec<_>>().into_iter()
    }

    /// The devices release guest memory, and it is discarded. What stayed as it was is returned.
    pub fn release(&mut self, runs: &[Span<GuestAddr>]) -> Vec<(Span<GuestAddr>, Reason)> {
        let kept = self.balloon(runs, true, |world| {
            let mut kept = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            world.dma.release(map, &parts, &mut |part, why| {
                kept.push((map.run(&part), why));
            });
            let whole = kept.is_empty();
            (kept, whole, Vec::new())
        });
        for run in runs {
            let mut left = vec![*run];
            for (span, _) in &kept {
                left = left
                    .into_iter()
                    .flat_map(|part| without(part, span))
                    .collect();
            }
            left.into_iter().for_each(|run| self.discard(run));
        }
        kept
    }

    fn discard(&mut self, run: Span<GuestAddr>) {
        for part in &self.parts {
            let Some(both) = part.guest.intersection(&run) else {
                continue;
            };
            let inside = Span::new(both.start - part.guest.start, both.len);
            let mut kept = 0;
            let done = part
                .discard
                .discard(&[inside], &mut |span, _| kept += span.len);
            if done.is_err() || kept > 0 {
                let text = format!("guest memory {run} is not discarded: {done:?}, kept {kept}");
                self.scene.complain(text);
                return;
            }
        }
        self.of_guest(run)
            .flatten()
            .for_each(|page| self.scene.zeroed(page));
    }

    /// The devices have guest memory back. What stayed as it was is returned.
    pub fn restore(&mut self, runs: &[Span<GuestAddr>]) -> Vec<(Span<GuestAddr>, Reason)> {
        self.balloon(runs, false, |world| {
            let mut failed = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            world.dma.restore(map, &parts, &mut |part, why| {
                failed.push((map.run(&part), why));
            });
            let whole = failed.is_empty();
            (failed, whole, Vec::new())
        })
    }
}

/// The guest's memory, and what of the runs is in it.
#[expect(
    clippy::expect_used,
    reason = "they were looked at when the world was made"
)]
fn resolved<'a>(
    regions: &'a [Region<Arc<Memory>>],
    runs: &[Span<GuestAddr>],
) -> (MemoryMap<'a, Arc<Memory>>, Vec<Part>) {
    let map = MemoryMap::new(regions).expect("regions of a guest");
    let mut parts = Vec::new();
    for run in runs {
        map.resolve(*run, &mut Refusals::new(), |part| parts.push(part));
    }
    (map, parts)
}
