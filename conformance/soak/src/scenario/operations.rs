//! The operations: each is the call of the address space, and what it changes in the model. Devices may find anything
//! at the pages that it is at work on, and only there. Any number of threads may make operations, on whatever ranges;
//! only one may attach or detach a device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::PoisonError;

use ioas::{
    Area, AttachError, DetachError, HarvestError, Ioas, MapError, Memory, Tracking, TrackingError,
    UnmapError,
};
use iommu::Unit;
use iopt::{DirtyError, Interruption, Pending, Prot};
use runs::{GuestAddr, Iova, Offset, Span};
use shadow::{Change, Page};
use virtio_balloon::{KeepReason, MemoryMap, Refusals, Region, Releaser as _};

use super::dirty::{Period, add};
use super::model::Model;
use super::ram::without;
use super::scene::{Attached, Expect, locked};
use super::world::{Part, World, dma};
use super::{Error, PAGE};

/// A cut leaves the rest where it is.
pub(crate) const INTACT: Interruption = Interruption::Refused;

/// Result of a harvest, compared with what devices say.
#[derive(Clone, Debug, Default)]
pub(crate) struct Harvest {
    /// A unit cannot tell: everything counts as written to.
    pub(crate) blind: bool,
    /// Pages that were written to and are not in it.
    pub(crate) missed: u32,
    /// Pages in it that no device has begun to write to.
    pub(crate) more: u32,
}

/// Result of [`World::before`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alone {
    range: Span<Iova>,
    /// Count after an operation that was alone.
    after: Option<u64>,
}

/// An operation that was done in part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InPart;

fn unmapped<T>(result: &Result<T, UnmapError>) -> bool {
    result.as_ref().map_or_else(
        |cause| matches!(cause, UnmapError::Flush(_) | UnmapError::Unpin(_)),
        |_| true,
    )
}

impl World {
    /// An operation begins on `pages`: devices may find anything there from now on, until it has [ended](Self::end).
    pub(crate) fn begin(&self, pages: impl IntoIterator<Item = usize>) {
        self.begin_at(&mut self.model(), pages, |_| true);
    }

    /// The same; devices still find what is at those pages that are not `moving`.
    fn begin_at(
        &self,
        model: &mut Model,
        pages: impl IntoIterator<Item = usize>,
        moving: impl Fn(&Option<Page>) -> bool,
    ) {
        let _quiet = self.scene.quiet();
        for page in pages {
            model.begin(page);
            if moving(&model.pages[page]) {
                self.scene.set(page, Expect::Moving);
            }
        }
    }

    /// An operation has ended on `pages`: devices are to find there what the model says. What is unmapped but not
    /// flushed waits. The operation has made its `change` of a page, if it was alone there; with an error it was
    /// done in part, and without a change not at all. Returns whether it was alone at all of them.
    pub(crate) fn end(
        &self,
        pages: impl IntoIterator<Item = usize>,
        change: Result<Option<Change>, InPart>,
    ) -> bool {
        let model = &mut *self.model();
        let (mut all, mut ended, mut area) = (true, Vec::new(), None);
        for page in pages {
            let (alone, last) = model.end(page);
            match change {
                Ok(change) if alone => {
                    let fits = change.is_none_or(|it| it.apply(page, &mut model.pages[page]));
                    if !fits {
                        let text = format!("page {page}: a map over an area");
                        self.scene.complain(text);
                    }
                }
                _ if last => {
                    model.pages[page] = self.page_of_area(page, &mut area);
                    model.work[page].unflushed = true;
                }
                _ => {}
            }
            all &= alone;
            ended.extend(last.then_some(page));
        }
        self.settle_at(model, ended);
        all
    }

    /// Devices are to find what the model says where it is flushed now that something was unmapped.
    pub(crate) fn settle(&self) {
        self.settle_at(&mut self.model(), Vec::new());
    }

    fn settle_at(&self, model: &mut Model, pages: Vec<usize>) {
        let waits = self.space.retired() > 0;
        let _quiet = self.scene.quiet();
        if !waits {
            for page in std::mem::take(&mut model.stale) {
                model.work[page].unflushed = false;
                if model.work[page].now == 0 {
                    self.scene.set(page, model.expect(page));
                }
            }
        }
        for page in pages {
            let expect = model.expect(page);
            let unflushed = &mut model.work[page].unflushed;
            if waits && (expect == Expect::Hole || *unflushed) {
                model.stale.push(page);
            } else {
                self.scene.set(page, expect);
                *unflushed = false;
            }
        }
    }

    /// State of `page` by the areas. `area` is the last that was found.
    fn page_of_area(&self, page: usize, area: &mut Option<Area>) -> Option<Page> {
        let iova = self.scene.base + page as u64 * PAGE;
        if area
            .as_ref()
            .is_none_or(|area| !area.range().contains(iova))
        {
            *area = self.space.area_at(iova);
        }
        let area = area.as_ref()?;
        let mut parts = self.parts.iter();
        let number = parts.position(|part| Arc::ptr_eq(&part.memory, area.memory()))?;
        let part = Span::new(area.part().start + (iova - area.range().start), PAGE);
        Some(Page {
            memory: self.memory_pages(number, part).start as u32,
            write: area.prot().contains(Prot::WRITE),
            out: area.is_out(),
            released: area.is_released(),
        })
    }

    /// How often operations have begun or ended in `range` and at the pages beside it; nothing while one is under
    /// way.
    fn times(&self, range: Span<Iova>) -> Option<u64> {
        let pages = self.scene.pages_of(range);
        let end = (pages.end + 1).min(self.scene.len());
        self.model().times(pages.start.saturating_sub(1)..end)
    }

    /// Argument for [`was_alone`](Self::was_alone) after an operation on `range`.
    pub(crate) fn before(&self, range: Span<Iova>) -> Alone {
        let once = 2 * self.scene.pages_of(range).len() as u64;
        let after = self.times(range).map(|times| times + once);
        Alone { range, after }
    }

    /// No other operation was at work on the range or beside it since then.
    pub(crate) fn was_alone(&self, alone: &Alone) -> bool {
        alone.after.is_some() && alone.after == self.times(alone.range)
    }

    /// `part` of memory `number`, counted in pages through all memories.
    pub(crate) fn memory_pages(&self, number: usize, part: Span<Offset>) -> Range<usize> {
        let before = self.parts.iter().take(number);
        let before: u64 = before.map(|part| part.guest.len / PAGE).sum();
        let first = (before + part.start / PAGE) as usize;
        first..first + (part.len / PAGE) as usize
    }

    /// Nothing is in the way of a map there.
    pub(crate) fn is_free(&self, range: Span<Iova>) -> bool {
        self.model().is_free(self.scene.pages_of(range))
    }

    /// Maps `part` of memory `number` at `iova`.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::map`].
    pub(crate) fn map(
        &self,
        iova: u64,
        number: usize,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<(), MapError> {
        let pages = self.scene.pages_of(Span::new(iova, part.len));
        let first = self.memory_pages(number, part).start;
        let part_of = &self.parts[number];
        let kept = part_of.discarding.read();
        let kept = kept.unwrap_or_else(PoisonError::into_inner);
        // Pages that are mapped already stay, and the map is refused.
        self.begin_at(&mut self.model(), pages.clone(), Option::is_none);
        let memory = &part_of.memory;
        let done = self.space.map(iova, memory, part, prot);
        let mapped = Change::Map {
            first: pages.start,
            memory: first,
            write: prot.contains(Prot::WRITE),
        };
        self.end(pages, Ok(done.is_ok().then_some(mapped)));
        drop(kept);
        done
    }

    /// Unmaps by `how` what is in `range`.
    ///
    /// # Errors
    ///
    /// That of `how`.
    pub(crate) fn unmap<T>(
        &self,
        range: Span<Iova>,
        how: impl FnOnce(&Ioas) -> Result<T, UnmapError>,
    ) -> Result<T, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.begin(pages.clone());
        let done = how(&self.space);
        let gone = unmapped(&done);
        self.end(pages, Ok(gone.then_some(Change::Unmap)));
        done
    }

    /// Takes `range` out of what devices reach: the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::take_out`].
    pub(crate) fn take_out(&self, range: Span<Iova>) -> Result<u64, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.begin(pages.clone());
        let done = self.space.take_out(range, INTACT);
        let out = unmapped(&done);
        self.end(pages, Ok(out.then_some(Change::TakeOut)));
        done
    }

    /// Puts `range` back.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::put_back`].
    pub(crate) fn put_back(&self, range: Span<Iova>) -> Result<(), MapError> {
        let pages = self.scene.pages_of(range);
        self.begin(pages.clone());
        let done = self.space.put_back(range, INTACT);
        let back = done.as_ref().map(|()| Some(Change::PutBack));
        self.end(pages, back.map_err(|_| InPart));
        done
    }

    /// Attaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::attach`].
    pub(crate) fn attach(&self, number: usize) -> Result<(), AttachError> {
        let hardware = &self.hardware;
        let was = self.is_attached(number);
        if !was {
            self.scene.attached(number, Attached::Changing);
        }
        let (unit, id) = hardware.device(number);
        let unit = Arc::clone(&hardware.rigged[unit]) as Arc<dyn Unit>;
        let done = self.space.attach((unit, id));
        let attached = was || done.is_ok();
        self.model().attached[number] = attached;
        let now = match attached {
            true => Attached::Yes,
            false => Attached::No,
        };
        self.scene.attached(number, now);
        self.settle();
        done
    }

    /// Detaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::detach`].
    pub(crate) fn detach(&self, number: usize) -> Result<(), DetachError> {
        let hardware = &self.hardware;
        let (_, id) = hardware.device(number);
        self.scene.attached(number, Attached::Changing);
        let done = self.space.detach(id);
        if done.is_ok() {
            self.model().attached[number] = false;
            self.scene.attached(number, Attached::No);
        }
        self.settle();
        done
    }

    /// Begins to track what devices write to.
    ///
    /// # Errors
    ///
    /// Errors of [`Ioas::track_dirty`].
    pub(crate) fn track(&self, leaf: Option<u64>) -> Result<(), TrackingError> {
        let tracking = Tracking {
            leaf,
            interruption: INTACT,
        };
        let mut dirty = locked(&self.dirty);
        dirty.on = false;
        {
            let touched = &mut self.model().touched;
            touched.blurred = leaf.is_none() || touched.blurring > 0;
        }
        let fired = self.faults.fired();
        self.space.track_dirty(tracking)?;
        // Marks from before are worth nothing.
        let words = 0..self.scene.len().div_ceil(64);
        self.take_period(words.clone(), &mut Period::new(words.len()));
        drop(self.scene.take_perhaps_written(words));
        dirty.begin(self.scene.len(), fired);
        Ok(())
    }

    /// A harvest of `words` of the pages begins.
    fn take_period(&self, words: Range<usize>, period: &mut Period) {
        let model = &mut *self.model();
        let (written, touched) = (
            self.scene.take_written(words.clone()),
            model.touched.take(words.clone()),
        );
        add(&mut period.sure[words.clone()], &written);
        add(&mut period.touched[words], &touched);
    }

    /// Ends it.
    pub(crate) fn untrack(&self) {
        let mut dirty = locked(&self.dirty);
        self.space.untrack_dirty();
        dirty.on = false;
    }

    /// Harvests the addresses in `range`, which are whole words of 64 pages, and compares with what devices have
    /// written to. All addresses are harvested if a leaf goes over an end of `range`; none, if nothing is tracked. What
    /// failed on the way, if something did, comes beside: nothing of the harvest is lost by it.
    ///
    /// # Errors
    ///
    /// When there is no harvest at all.
    pub(crate) fn harvest(&self, mut range: Span<Iova>) -> Result<(Harvest, Option<Error>), Error> {
        let mut dirty = locked(&self.dirty);
        if !dirty.on {
            return Ok(Default::default());
        }
        let mut period = Period::new(self.scene.len().div_ceil(64));
        let (words, harvested, shown) = loop {
            let pages = self.scene.pages_of(range);
            let words = pages.start / 64..pages.end.div_ceil(64);
            self.take_period(words.clone(), &mut period);
            let mut pending = Pending::new(vec![0; words.len()], range, PAGE)?;
            let mut harvested = self.space.harvest(&mut pending);
            let shown = self.space.show(&mut pending).map(drop);
            self.faults.calm();
            // Once more, without a fault: nothing of it is lost.
            if let Err(HarvestError::Flush(_)) = harvested {
                harvested = self.space.harvest(&mut pending);
            }
            let shown_again = self.space.show(&mut pending)?;
            add(&mut period.found[words.clone()], shown_again.words());
            shown_again.acknowledge();
            match harvested {
                Err(HarvestError::Table(DirtyError::InsideLeaf { .. }))
                    if range != self.range() =>
                {
                    range = self.range();
                }
                _ => break (words, harvested, shown),
            }
        };
        let perhaps = self.scene.take_perhaps_written(words.clone());
        add(&mut period.perhaps[words.clone()], &perhaps);
        let blurred = {
            let touched = &self.model().touched;
            touched.look(words.clone(), &mut period.touched);
            touched.blurred || self.faults.fired() != dirty.fired
        };
        let (missed, more) = dirty.judge(words, &period);
        let blind = harvested.as_ref().is_ok_and(|found| found.blind);
        let failed = harvested.err().map(Error::from);
        let failed = failed.or_else(|| shown.err().map(Error::from));
        let found = Harvest {
            blind,
            missed,
            more: if blurred { 0 } else { more },
        };
        Ok((found, failed))
    }

    /// The guest's memory at these guest addresses is released or restored by `how`, which returns whether that was
    /// done as a whole, and what was discarded; devices may find anything there meanwhile. Says also whether no other
    /// operation was at work there.
    pub(crate) fn balloon<T>(
        &self,
        runs: &[Span<GuestAddr>],
        released: bool,
        how: impl FnOnce(&Self) -> (T, bool, Vec<Span<GuestAddr>>),
    ) -> (T, bool) {
        let memory: Vec<_> = runs.iter().flat_map(|run| self.of_guest(*run)).collect();
        let pages = {
            let model = &mut *self.model();
            let pages = model.over(&memory);
            self.begin_at(model, pages.iter().copied(), |_| true);
            pages
        };
        let (done, whole, discarded) = how(self);
        for run in discarded {
            let memory = self.of_guest(run);
            memory.flatten().for_each(|page| self.scene.zeroed(page));
        }
        let change = match released {
            true => Change::Release,
            false => Change::Restore,
        };
        let alone = self.end(pages, whole.then_some(Some(change)).ok_or(InPart));
        (done, alone)
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

    /// The devices release guest memory, and it is discarded. What stayed as it was is returned, and whether no other
    /// operation was at work there.
    pub(crate) fn release(
        &self,
        runs: &[Span<GuestAddr>],
    ) -> (Vec<(Span<GuestAddr>, KeepReason)>, bool) {
        let of_runs = |part: &&Part| runs.iter().any(|run| part.guest.overlaps(run));
        let parts = self.parts.iter().filter(of_runs);
        let alone = parts.map(|part| part.discarding.write());
        let _alone: Vec<_> = alone
            .map(|lock| lock.unwrap_or_else(PoisonError::into_inner))
            .collect();
        let (kept, alone) = self.balloon(runs, true, |world| {
            let mut kept = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            dma(&world.space).release(map, &parts, &mut |part, why| {
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
        (kept, alone)
    }

    fn discard(&self, run: Span<GuestAddr>) {
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
    pub(crate) fn restore(&self, runs: &[Span<GuestAddr>]) -> Vec<(Span<GuestAddr>, KeepReason)> {
        let held: Vec<_> = self
            .parts
            .iter()
            .map(|part| part.discarding.read())
            .collect();
        let (failed, _) = self.balloon(runs, false, |world| {
            let mut failed = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            dma(&world.space).restore(map, &parts, &mut |part, why| {
                failed.push((map.run(&part), why));
            });
            let whole = failed.is_empty();
            (failed, whole, Vec::new())
        });
        drop(held);
        failed
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
) -> (MemoryMap<'a, Arc<Memory>>, Vec<virtio_balloon::Part>) {
    let map = MemoryMap::new(regions).expect("regions of a guest");
    let mut parts = Vec::new();
    for run in runs {
        map.resolve(*run, &mut Refusals::new(), |part| parts.push(part));
    }
    (map, parts)
}
