//! Parts of areas: unmapped, or taken out for a while.
//!
//! An area can be cut. Leaves that go over an end of the part are first replaced by smaller ones that
//! say the same, in every domain, so that there is no moment in which the rest is missing; only where
//! a format cannot do that in place, and the caller allows it, there is one.
//!
//! What is taken out stays an area, of its own, without entries and without pins, until it is put
//! back. Then it is joined again with the neighbours from which it was cut, and leaves are merged. Areas
//! that were mapped by several calls stay several: each area notes at which end it was cut. So any number
//! of conversions between private and shared memory of a confidential guest leaves one area.

use alloc::vec::Vec;
use core::convert::Infallible;
use core::mem;

use iopt::Interruption;
use runs::{Iova, Span};

use crate::error::{MapError, UnmapError};
use crate::observer::{Observer, Step, observed};
use crate::space::{Ioas, Space, Unmapped};

impl Ioas {
    /// [`unmap`](Self::unmap) of exactly `range`: areas that reach over its ends are cut, without a
    /// moment in which the rest is missing unless `interruption` allows one.
    ///
    /// # Errors
    ///
    /// As [`unmap`](Self::unmap), and [`UnmapError::Cut`].
    pub fn unmap_cutting(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        let space = &mut *self.lock();
        if !space.check_unmap(range)? {
            return Ok(Unmapped::default());
        }
        space.externals.let_go(range)?;
        let cuts = space.cut_around(range, interruption)?;
        let (first, last) = (range.start, range.last());
        let unmapped = space.unmap_between(first, last, interruption, &mut |_| (), observer);
        unmapped.inspect_err(|_| space.join_cuts(cuts))
    }

    /// Takes `range` out of the areas that cover it: unmapped and unpinned, exactly that, until it is
    /// [put back](Self::put_back) or unmapped. This is how memory of a confidential guest becomes
    /// private. Devices go on reaching all the rest.
    ///
    /// Areas are cut at the ends of the range and joined again when it is put back. What is out
    /// already stays out. Flushes in any case, also where flushing is lazy: when it returns, no device
    /// reaches the range. Returns the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// As [`unmap_cutting`](Self::unmap_cutting), and [`UnmapError::Hole`] when no area covers some
    /// of the range: nothing has changed then.
    pub fn take_out(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
        observer: &mut dyn Observer,
    ) -> Result<u64, UnmapError> {
        let space = &mut *self.lock();
        if !space.check_unmap(range)? {
            return Ok(0);
        }
        if let Some(at) = space.first_hole(range) {
            return Err(UnmapError::Hole { range, at });
        }
        space.externals.let_go(range)?;
        let cuts = space.cut_around(range, interruption)?;
        observed(observer, Step::EmptyTables, |_| {
            let (first, last) = (range.start, range.last());
            let emptied = space.empty(first, last, interruption, &mut |_| ());
            emptied.inspect_err(|_| space.join_cuts(cuts))?;
            let mut bytes = 0;
            let Ok(()) = space.areas.0.try_for_each_mut(first, last, |span, area| {
                if !mem::replace(&mut area.out, true) {
                    bytes += span.len;
                }
                area.reserved = None;
                space.retired.add(span, area.hold.take());
                Ok::<_, Infallible>(())
            });
            Ok::<_, UnmapError>(((), bytes))
        })?;
        space.flush_observed(observer)
    }

    /// Puts back what was [taken out](Self::take_out) in `range`: pinned and mapped again as before,
    /// and leaves merged, as far as that is possible without a moment in which the rest is missing
    /// unless `interruption` allows one.
    ///
    /// # Errors
    ///
    /// As [`map`](Self::map); of what is also released its charge alone is wanted again, which it keeps.
    /// [`MapError::NotOut`] when an area that is out reaches over an end of
    /// the range: nothing has changed then. After another error, areas that came before are back, and
    /// the others still out.
    pub fn put_back(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let space = &mut *self.lock();
        if range.is_empty() {
            return Ok(());
        }
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(MapError::BeyondEnd { start: range.start });
        }
        for end in [range.start, range.last()] {
            if let Some((out, area)) = space.areas.0.at(end)
                && area.out
                && !range.covers(&out)
            {
                return Err(MapError::NotOut { range, out });
            }
        }
        space
            .retired
            .make_way(&mut *space.backend, range)
            .map_err(MapError::Flush)?;
        let outs = space.areas.0.overlapping(range.start, range.last());
        let starts: Vec<u64> = outs
            .filter(|(_, area)| area.out)
            .map(|(span, _)| span.start)
            .collect();
        for start in starts {
            let Some((_, area)) = space.areas.0.at_mut(start) else {
                continue;
            };
            let there = !area.released;
            if there {
                space.backend.map(area, &mut space.retired, observer)?;
                space.retired.listeners.mapped(area);
            } else if space.backend.is_live() {
                let kept = area.reserve(space.backend.times_charged());
                kept.map_err(MapError::OverLimit)?;
            }
            area.out = false;
            let back = area.range;
            let end = start.wrapping_add(back.len);
            space.join_at(start);
            space.join_at(end);
            if let Some((whole, _)) = space.areas.0.at(start).filter(|_| there) {
                space.resize(back, whole, interruption);
            }
        }
        Ok(())
    }
}

impl Space {
    /// Joins the areas that meet at `at`, if they were cut there.
    pub(crate) fn join_at(&mut self, at: u64) {
        let before = at.checked_sub(1).and_then(|last| self.areas.0.at(last));
        let (Some((head, area)), Some((tail, next))) = (before, self.areas.0.at(at)) else {
            return;
        };
        if tail.start != at || !area.goes_on_in(next) {
            return;
        }
        let next = self.areas.remove(at);
        if let (Some((_, mut area)), Some((_, next))) = (self.areas.remove(head.start), next) {
            area.join(next);
            let joined = self.areas.insert(area);
            debug_assert!(joined.is_ok(), "{head} grew into the place of {tail}");
        }
    }

    /// The first address of `range` that is in no area.
    pub(crate) fn first_hole(&self, range: Span<Iova>) -> Option<u64> {
        let mut at = range.start;
        while let Some((span, _)) = self.areas.0.at(at) {
            if span.last() >= range.last() {
                return None;
            }
            at = span.last() + 1;
        }
        Some(at)
    }

    /// Joins areas again that were cut, as far as both parts are there as they were.
    pub(crate) fn join_cuts(&mut self, cuts: [Option<u64>; 2]) {
        for at in cuts.into_iter().flatten() {
            self.join_at(at);
        }
    }

    /// Cuts tables and areas at both ends of `range`. Returns where areas were cut.
    pub(crate) fn cut_around(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
    ) -> Result<[Option<u64>; 2], UnmapError> {
        // Behind the last byte of the address space nothing can be cut.
        let ends = [Some(range.start), range.last().checked_add(1)];
        let granule = self.backend.granule();
        // Also where an area ends anyway: a back end may have mapped it together with the next.
        let cuts = ends.map(|end| Some((end?, self.areas.0.at(end?)?.0)));
        for (at, area) in cuts.into_iter().flatten() {
            if area.start < at && at & (granule - 1) != 0 {
                return Err(UnmapError::CutsArea { range, area });
            }
        }
        for (at, _) in cuts.into_iter().flatten() {
            self.backend.cut(at, interruption)?;
        }
        Ok(cuts.map(|cut| {
            let (at, _) = cut?;
            self.split_area(at).then_some(at)
        }))
    }

    /// Cuts the area at `at` in two; false when none goes through it.
    pub(crate) fn split_area(&mut self, at: u64) -> bool {
        let start = self.areas.0.at(at).map_or(at, |(area, _)| area.start);
        if start == at {
            return false;
        }
        let Some((_, mut head)) = self.areas.remove(start) else {
            return false;
        };
        let tail = head.split_at(at);
        let cut = self.areas.insert(head).is_ok() && self.areas.insert(tail).is_ok();
        debug_assert!(cut, "where one area was there is room for its pieces");
        true
    }

    /// After `range` was mapped in `area`: leaves as large as they can be, or, while dirty tracking
    /// wants small ones, not larger than that. Where that cannot be done in place leaves say the same
    /// in another size.
    pub(crate) fn resize(
        &mut self,
        range: Span<Iova>,
        area: Span<Iova>,
        interruption: Interruption,
    ) {
        let _ = match self.tracking.and_then(|tracking| tracking.leaf) {
            Some(leaf) => self.backend.split(range, leaf, interruption),
            None if range == area => Ok(()),
            None => self.backend.merge(range, area, interruption),
        };
    }
}
