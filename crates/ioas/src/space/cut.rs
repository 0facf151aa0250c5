//! Parts of areas: unmapped, or taken out for a while.
//!
//! An area can be cut. Leaves that go over an end of the part are first replaced by smaller ones that
//! say the same, in every domain, so that there is no moment in which the rest is missing; only where
//! a format cannot do that in place, and the caller allows it, there is one.
//!
//! A part that is taken out stays an area, of its own, without entries and without pins, until it is put
//! back. Then it is joined again with the neighbours from which it was cut, and leaves are merged. Areas
//! that were mapped by several calls stay several: each area notes at which end it was cut. So any number
//! of conversions between private and shared memory of a confidential guest leaves one area.

use alloc::vec::Vec;
use core::convert::Infallible;

use iopt::Interruption;
use runs::{Iova, Span};

use crate::ranges::extents::Extent;
use crate::space::error::{MapError, UnmapError};
use crate::space::observed::Observed;
use crate::space::operation::{Claim, Op, State};
use crate::space::unmap::check_unmap;
use crate::space::{Ioas, Unmapped};

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
    ) -> Result<Unmapped, UnmapError> {
        self.observed(&mut ()).unmap_cutting(range, interruption)
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
    ) -> Result<u64, UnmapError> {
        if !check_unmap(range)? {
            return Ok(0);
        }
        let (core, extent) = (self.gate.read(), Extent::of(range));
        let op = self.op(&core);
        let check = |state: &mut State| match state.first_hole(range) {
            Some(at) => Err(UnmapError::Hole { range, at }),
            None => Ok(()),
        };
        let (claim, ()) = op.take(|state| [state.hull(extent)], check)?;
        claim.run(|claim| {
            self.externals.drop_pins(range)?;
            let cuts = op.cut_around(range, interruption)?;
            let mut gone = self.retired.gone();
            let emptied = op.empty(claim, extent, interruption, &mut |_| ());
            emptied.inspect_err(|_| op.join_cuts(cuts))?;
            // Given back outside of the lock.
            let mut reserved = Vec::new();
            {
                let areas = &mut self.state.lock().areas.0;
                let Ok(()) = areas.try_for_each_mut(extent.first, extent.last, |span, area| {
                    area.out = true;
                    reserved.extend(area.reserved.take());
                    gone.add(span, area.hold.take());
                    Ok::<_, Infallible>(())
                });
            }
            drop(reserved);
            op.flush_gone(&mut gone, &mut ())
        })
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
    pub fn put_back(&self, range: Span<Iova>, interruption: Interruption) -> Result<(), MapError> {
        if range.is_empty() {
            return Ok(());
        }
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(MapError::BeyondEnd { start: range.start });
        }
        let (core, extent) = (self.gate.read(), Extent::of(range));
        let op = self.op(&core);
        let check = |state: &mut State| {
            for end in [range.start, range.last()] {
                let there = state.areas.0.at(end).filter(|(_, area)| area.out);
                if let Some((out, _)) = there.filter(|(out, _)| !range.covers(out)) {
                    return Err(MapError::NotOut { range, out });
                }
            }
            let outs = state.areas.0.overlapping(range.start, range.last());
            let outs = outs.filter(|(_, area)| area.out);
            Ok(Vec::from_iter(outs.map(|(span, _)| span.start)))
        };
        let (claim, starts) = op.take(|state| [state.hull(extent)], check)?;
        claim.run(|claim| {
            self.retired
                .make_way(&*core.backend, range)
                .map_err(MapError::Flush)?;
            starts
                .into_iter()
                .try_for_each(|start| op.put_back(claim, start, interruption))
        })
    }
}

impl Observed<'_> {
    /// [`Ioas::unmap_cutting`], observed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn unmap_cutting(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
    ) -> Result<Unmapped, UnmapError> {
        let (ioas, observer) = (self.ioas, &mut *self.observer);
        if !check_unmap(range)? {
            return Ok(Unmapped::default());
        }
        let (core, extent) = (ioas.gate.read(), Extent::of(range));
        let op = ioas.op(&core);
        let (claim, ()) = op.take(|state| [state.hull(extent)], |_| Ok::<_, UnmapError>(()))?;
        claim.run(|claim| {
            ioas.externals.drop_pins(range)?;
            let cuts = op.cut_around(range, interruption)?;
            let (note, gone) = (&mut |_| (), &mut ioas.retired.gone());
            let unmapped = op.unmap_taken(claim, extent, interruption, note, gone, observer);
            unmapped.inspect_err(|_| op.join_cuts(cuts))
        })
    }
}

impl Op<'_> {
    /// Puts the area that begins at `start` back.
    fn put_back(
        self,
        claim: &Claim<'_>,
        start: u64,
        interruption: Interruption,
    ) -> Result<(), MapError> {
        let Some(mut edit) = self.edit(start) else {
            return Ok(());
        };
        let backend = &self.core.backend;
        let (there, back) = (!edit.area.released, edit.area.range);
        if there {
            let owned = || claim.widen(Extent::of(back));
            backend.map(&mut edit.area, &owned, self.retired(), &mut ())?;
            self.retired().listeners.mapped(&edit.area);
        } else if backend.is_live() {
            let kept = edit.area.reserve(backend.times_charged());
            kept.map_err(MapError::OverLimit)?;
        }
        edit.area.out = false;
        drop(edit);
        let whole = {
            let state = &mut *self.ioas.state.lock();
            state.join_at(start);
            state.join_at(start.wrapping_add(back.len));
            state.areas.0.at(start).map(|(whole, _)| whole)
        };
        if let Some(whole) = whole.filter(|_| there) {
            self.resize(back, whole, interruption);
        }
        Ok(())
    }

    /// Joins areas again that were cut, as far as both parts are there as they were.
    pub(crate) fn join_cuts(self, cuts: [Option<u64>; 2]) {
        let state = &mut *self.ioas.state.lock();
        for at in cuts.into_iter().flatten() {
            state.join_at(at);
        }
    }

    /// Cuts tables and areas at both ends of `range`. Returns where areas were cut.
    pub(crate) fn cut_around(
        self,
        range: Span<Iova>,
        interruption: Interruption,
    ) -> Result<[Option<u64>; 2], UnmapError> {
        // No cut is possible behind the last byte of the address space.
        let ends = [Some(range.start), range.last().checked_add(1)];
        let granule = self.core.backend.granule();
        // Also where an area ends anyway: a back end may have mapped it together with the next.
        let cuts = {
            let areas = &self.ioas.state.lock().areas.0;
            ends.map(|end| Some((end?, areas.at(end?)?.0)))
        };
        for (at, area) in cuts.into_iter().flatten() {
            if area.start < at && at & (granule - 1) != 0 {
                return Err(UnmapError::CutsArea { range, area });
            }
        }
        for (at, _) in cuts.into_iter().flatten() {
            self.core.backend.cut(at, interruption)?;
        }
        let state = &mut *self.ioas.state.lock();
        Ok(cuts.map(|cut| {
            let (at, _) = cut?;
            state.split_area(at).then_some(at)
        }))
    }

    /// After `range` was mapped in `area`: leaves as large as they can be, or, while dirty tracking
    /// wants small ones, not larger than that. Where that cannot be done in place leaves say the same
    /// in another size.
    pub(crate) fn resize(self, range: Span<Iova>, area: Span<Iova>, interruption: Interruption) {
        let backend = &self.core.backend;
        let _ = match self.core.tracking.and_then(|tracking| tracking.leaf) {
            Some(leaf) => backend.split(range, leaf, interruption),
            None if range == area => Ok(()),
            None => backend.merge(range, area, interruption),
        };
    }
}

impl State {
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
}
