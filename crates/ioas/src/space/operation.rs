//! An operation that runs beside others: it takes its range, works on it, and gives it back.
//!
//! # Taking
//!
//! The areas are looked at, and changed, under a lock that is held for a moment. There an operation first
//! takes its range: another one that wants some of it waits, and then reads again, so that it finds what a single
//! thread would find after the first operation. The work follows outside of the lock: charge, pin, tables,
//! flush. What an operation changes of an area it has in its [edit](AreaEdit) meanwhile; others go on seeing
//! what was there before.
//!
//! Several ranges are taken at once or not at all, so that no two operations wait for each other. Operations that
//! cut and join take the areas at the ends of their ranges whole, with those that touch them.
//!
//! # What is taken beside the range
//!
//! A page table is given back when nothing in what it translates is left, as far as the operation that empties
//! it keeps all others from there, until the flush. So before something is emptied, what was taken is widened
//! ([`Claim::widen`]) over the free addresses around it: to the ends of the smallest block that still has
//! something else in it, of the sizes that tables translate. Beside other operations that is at most a block of
//! 1 GiB, so that they go on, and it ends where they are. Tables left by that are noted, and an operation that
//! ends when no other is under way gives them back.
//!
//! # Panics
//!
//! When a callback of an operation panics, its range stays taken: what is there is known only in part. Later
//! operations on it fail and say so (for instance [`MapError::Panicked`]); all others go on. Memory stays pinned,
//! in an area or among the retired. Closing the address space, or dropping it, ends that too.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use iopt::Interruption;
use runs::{Iova, Span};

use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::ranges::extents::{Extent, Extents};
use crate::space::error::{MapError, UnmapError};
use crate::space::external_pin::Externals;
use crate::space::flush::Retired;
use crate::space::{Core, Ioas};

/// State that is locked for a moment only.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) areas: Areas,
    pub(crate) taken: Extents,
    /// Extents in which empty tables may be left.
    left: Vec<Extent>,
}

/// An operation has panicked on this range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panicked(pub(crate) Span<Iova>);

impl From<Panicked> for MapError {
    fn from(Panicked(range): Panicked) -> Self {
        Self::Panicked { range }
    }
}

impl From<Panicked> for UnmapError {
    fn from(Panicked(range): Panicked) -> Self {
        Self::Panicked { range }
    }
}

/// An operation, or several that belong together: no device comes or goes meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Op<'a> {
    pub(crate) ioas: &'a Ioas,
    pub(crate) core: &'a Core,
}

impl<'a> Op<'a> {
    pub(crate) const fn retired(self) -> &'a Retired {
        &self.ioas.retired
    }

    pub(crate) fn externals(self) -> &'a Arc<Externals> {
        &self.ioas.externals
    }

    /// Waits until no other operation works on what is `named`, which may depend on what is there, and takes
    /// it if `check` finds nothing wrong.
    pub(crate) fn take<N: AsRef<[Extent]>, T, E: From<Panicked>>(
        self,
        named: impl Fn(&State) -> N,
        check: impl FnOnce(&mut State) -> Result<T, E>,
    ) -> Result<(Claim<'a>, T), E> {
        let mut state = self.ioas.state.lock();
        let named = loop {
            let named = named(&state);
            if let Some(range) = state.taken.broken(named.as_ref()) {
                return Err(Panicked(range.span()).into());
            }
            if !state.taken.overlaps(named.as_ref()) {
                break named;
            }
            state = self.ioas.given_back.wait(&self.ioas.state, state);
        };
        let checked = check(&mut state)?;
        Ok((self.claim(&mut state, named.as_ref()), checked))
    }

    /// Takes those of `ranges` that are none and on which no operation has panicked, with the areas at
    /// their ends. [`Claim::check`] refuses those that are left out.
    pub(crate) fn take_each(self, ranges: &[Span<Iova>]) -> Claim<'a> {
        let formed = |range: &&Span<Iova>| {
            !range.is_empty() && Span::<Iova>::checked(range.start, range.len).is_some()
        };
        let mut state = self.ioas.state.lock();
        loop {
            let hulls = ranges.iter().filter(formed);
            let hulls = hulls.map(|range| state.hull(Extent::of(*range)));
            let sound = |hull: &Extent| state.taken.broken(&[*hull]).is_none();
            let mut named: Vec<Extent> = hulls.filter(sound).collect();
            // Most are in the same few areas.
            named.sort_unstable_by_key(|extent| extent.first);
            named.dedup_by(|next, before| {
                let joins = before.overlaps(*next);
                if joins {
                    *before = before.with(*next);
                }
                joins
            });
            if !state.taken.overlaps(&named) {
                return self.claim(&mut state, &named);
            }
            state = self.ioas.given_back.wait(&self.ioas.state, state);
        }
    }

    pub(crate) fn claim(self, state: &mut State, named: &[Extent]) -> Claim<'a> {
        let by = state.taken.take(named);
        Claim { op: self, by }
    }

    /// The area that begins at `start`, of a range that is taken, with what the address space has for it.
    pub(crate) fn edit(self, start: u64) -> Option<AreaEdit<'a>> {
        let state = &mut *self.ioas.state.lock();
        let (_, area) = state.areas.0.at_mut(start)?;
        let mut edit = self.hand_of(area.lend());
        edit.comes = true;
        Some(edit)
    }

    /// An area that is to come, on a range that is taken.
    pub(crate) const fn hand_of(self, area: HeldArea) -> AreaEdit<'a> {
        AreaEdit {
            ioas: self.ioas,
            area,
            comes: false,
        }
    }
}

impl State {
    /// `range` with the areas that go over its ends, and those that touch them.
    pub(crate) fn hull(&self, range: Extent) -> Extent {
        let beside = range.and_beside();
        let ends = [beside.first, range.last, beside.last];
        let areas = ends.iter().filter_map(|at| self.areas.0.at(*at));
        areas.fold(range, |hull, (area, _)| hull.with(Extent::of(area)))
    }

    /// The areas in `range`, from the first to the last.
    pub(crate) fn areas_in(&self, range: Extent) -> Option<Extent> {
        let areas = &self.areas.0;
        let (first, _) = areas.first_overlap(range.first, range.last)?;
        let last = areas.at(range.last).or_else(|| areas.before(range.last));
        let last = last.map_or(first, |(span, _)| span);
        Some(Extent::of(first).with(Extent::of(last)))
    }

    /// Addresses around `emptied`, where devices see nothing, that the operation `by` keeps others from: see the
    /// module. Also says if that is all in which tables can be empty.
    fn around(&self, by: u64, emptied: Extent) -> (Extent, bool) {
        // Areas without entries count as free, and so do those that others may be taking away. Where there are very
        // many, less is given back.
        const MOST: usize = 64;
        let mut free = Extent::ALL;
        let stays = |span: Span<Iova>, area: &HeldArea| {
            area.is_there() && !self.taken.overlaps_others(by, Extent::of(span))
        };
        let mut at = emptied.first;
        for n in 0.. {
            match self.areas.0.before(at) {
                Some((span, area)) if n < MOST && !stays(span, area) => at = span.start,
                Some((span, _)) => {
                    free.first = span.last().saturating_add(1).min(at);
                    break;
                }
                None => break,
            }
        }
        if let Some(behind) = emptied.last.checked_add(1) {
            let areas = self.areas.0.overlapping(behind, u64::MAX);
            let mut areas = areas.enumerate();
            let next = areas.find(|(n, (span, area))| *n == MOST || stays(*span, area));
            if let Some((_, (span, _))) = next {
                free.last = span.start.saturating_sub(1).max(emptied.last);
            }
        }
        let clear = self.taken.clip(by, free, emptied);
        let alone = self.taken.is_alone(by);
        // The smallest block around an address that has something else in it, as far as it is clear, and whether that
        // is all that is free. Blocks are what tables of 512 entries translate, from the smallest pages on. For
        // others it is the same: where a smaller block is not empty, no larger one is.
        let beside = |at: u64| {
            for log2 in [21, 30, 39, 48, 57] {
                let mask = (1u64 << log2) - 1;
                let block = Extent {
                    first: at & !mask,
                    last: at | mask,
                };
                if !clear.covers(block) || (log2 == 30 && !alone) {
                    let first = block.first.max(clear.first);
                    let last = block.last.min(clear.last);
                    return (Extent { first, last }, !free.covers(block));
                }
            }
            (clear, true)
        };
        let ((head, all_before), (tail, all_behind)) =
            (beside(emptied.first), beside(emptied.last));
        (emptied.with(head).with(tail), all_before && all_behind)
    }

    /// Notes where tables may be left that are empty: those that the first and the last page of `emptied` go
    /// through. Once for a block of 2 MiB, and for so many of them: others stay until something is unmapped there
    /// again.
    fn leave(&mut self, emptied: Extent, page: u64) {
        const MOST: usize = 256;
        let ends = [
            Extent {
                first: emptied.first,
                last: emptied.last.min(emptied.first.saturating_add(page - 1)),
            },
            Extent {
                first: emptied.first.max(emptied.last.saturating_sub(page - 1)),
                last: emptied.last,
            },
        ];
        for end in ends {
            let known = self
                .left
                .iter()
                .any(|left| left.first >> 21 == end.first >> 21);
            if !known && self.left.len() < MOST {
                self.left.push(end);
            }
        }
    }

    /// Somewhere where tables may be left that are empty, when no operation is under way.
    fn take_left(&mut self) -> Option<Extent> {
        if self.taken.at_work() {
            return None;
        }
        while let Some(left) = self.left.pop() {
            let taken = self.taken.overlaps(&[left]);
            if !taken && self.is_vacant(left) {
                return Some(left);
            }
        }
        None
    }

    /// True when devices see nothing of `range`.
    fn is_vacant(&self, range: Extent) -> bool {
        let mut areas = self.areas.0.overlapping(range.first, range.last);
        areas.all(|(_, area)| !area.is_there())
    }
}

/// Ranges that an operation has taken. Dropped otherwise than by [`run`](Self::run), it has panicked, and they
/// stay taken.
pub(crate) struct Claim<'a> {
    op: Op<'a>,
    by: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.op.ioas.state.lock().taken.abandon(self.by);
        self.op.ioas.given_back.notify();
    }
}

impl Claim<'_> {
    /// Has `work` work on the ranges, and gives them back.
    pub(crate) fn run<T>(self, work: impl FnOnce(&Self) -> T) -> T {
        let result = work(&self);
        self.give_back();
        result
    }

    /// Refuses what was left out of what is taken since an operation on it has panicked.
    pub(crate) fn check(&self, range: Span<Iova>) -> Result<(), Panicked> {
        let state = &*self.op.ioas.state.lock();
        if state.taken.has(self.by, Extent::of(range)) {
            return Ok(());
        }
        let hull = state.hull(Extent::of(range));
        let broken = state.taken.broken(&[hull]);
        Err(Panicked(broken.map_or(range, Extent::span)))
    }

    /// `emptied` lies in what is taken, and is to be emptied: keeps others from what lies around it, too, and
    /// returns all from which they are kept.
    pub(crate) fn widen(&self, emptied: Extent) -> Extent {
        let granule = self.op.core.backend.granule();
        let state = &mut *self.op.ioas.state.lock();
        let (around, all) = state.around(self.by, emptied);
        if !all {
            state.leave(emptied, granule);
        }
        state.taken.widen(self.by, emptied, around)
    }

    /// Gives the ranges back. When no other operation is under way, tables that were left are given back, too.
    fn give_back(self) {
        let (op, mut claim) = (self.op, self);
        while let Some((next, left, owned)) = claim.swap() {
            claim = next;
            let backend = &*op.core.backend;
            let (areas, refused) = (Some((left, owned)), Interruption::Refused);
            let done = backend.empty(left, areas, refused, &mut |_| ());
            if done.is_ok() && op.retired().is_strict() {
                // Unflushed holds wait for the next flush.
                let _ = op.retired().flush(backend);
            } else {
                backend.leave_gathered();
            }
        }
    }

    /// Gives the ranges back. When no other operation is under way, takes one where tables were left, and what is
    /// around it.
    fn swap(self) -> Option<(Self, Extent, Extent)> {
        let op = self.op;
        let state = &mut *op.ioas.state.lock();
        state.taken.give_back(self.by);
        op.ioas.given_back.notify();
        mem::forget(self);
        let left = state.take_left()?;
        let claim = op.claim(state, &[left]);
        let (around, _) = state.around(claim.by, left);
        let owned = state.taken.widen(claim.by, left, around);
        Some((claim, left, owned))
    }
}

/// An area that an operation changes. Dropped, it is among the areas as it is then, also when the operation
/// panics; a new one that holds nothing is not, unless it has come to its end well.
pub(crate) struct AreaEdit<'a> {
    ioas: &'a Ioas,
    pub(crate) area: HeldArea,
    /// It is to be among the areas even if nothing is held for it.
    pub(crate) comes: bool,
}

impl Drop for AreaEdit<'_> {
    fn drop(&mut self) {
        if !self.comes && self.area.hold.is_none() {
            return;
        }
        let area = self.area.lend();
        let areas = &mut self.ioas.state.lock().areas;
        match areas.0.at_mut(area.range.start) {
            Some((_, there)) => *there = area,
            None => {
                let inserted = areas.insert(area).is_ok();
                debug_assert!(inserted, "its range is taken");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use iopt::Prot;
    use proptest::prelude::*;
    use runs::Offset;

    use crate::areas::area::Area;
    use crate::{Ledger, Memory, Synthetic};

    const PAGE: u64 = 4096;
    /// Bytes that tables translate, log2.
    const TABLES: [u32; 5] = [21, 30, 39, 48, 57];

    fn area(memory: &Arc<Memory>, range: Span<Iova>, out: bool) -> HeldArea {
        let area = Area {
            range,
            memory: Arc::clone(memory),
            offset: 0,
            prot: Prot::RW,
            out,
            released: false,
            cut: [false; 2],
        };
        area.into()
    }

    fn memory() -> Arc<Memory> {
        let runs = [Span::new(0, 1 << 63)];
        Memory::new(Arc::new(Synthetic::new(runs)), &Ledger::unlimited())
    }

    /// Areas of some bytes each, without gaps up to the end of the address space, the last of one byte.
    #[test]
    fn areas_are_found_up_to_the_last_byte() {
        let (memory, mut state) = (memory(), State::default());
        let starts = [u64::MAX - 8, u64::MAX - 3, u64::MAX];
        let ends = [u64::MAX - 4, u64::MAX - 1, u64::MAX];
        let spans: Vec<Extent> = starts
            .into_iter()
            .zip(ends)
            .map(|(first, last)| Extent { first, last })
            .collect();
        for span in &spans {
            let area = area(&memory, span.span(), false);
            state.areas.insert(area).unwrap();
        }
        for first in starts[0] - 2..=u64::MAX {
            for last in first..=u64::MAX {
                let range = Extent { first, last };
                let inside = spans.iter().filter(|span| span.overlaps(range));
                let inside = inside.copied().reduce(Extent::with);
                assert_eq!(state.areas_in(range), inside, "{range:?}");
                let beside = range.and_beside();
                let touched = spans.iter().filter(|span| span.overlaps(beside));
                let hull = touched.fold(range, |hull, span| hull.with(*span));
                assert_eq!(state.hull(range), hull, "{range:?}");
            }
        }
    }

    /// An address near the borders of what tables translate.
    fn address() -> impl Strategy<Value = u64> {
        let steps = TABLES.map(|log2| (0u64..3).prop_map(move |n| n << log2));
        let near = prop::sample::select(vec![0, PAGE, PAGE.wrapping_neg()]);
        (steps, near).prop_map(|(steps, near)| {
            let sum = steps
                .iter()
                .fold(0, |sum: u64, step| sum.wrapping_add(*step));
            sum.wrapping_add(near) & !(PAGE - 1)
        })
    }

    fn pages() -> impl Strategy<Value = u64> {
        prop::sample::select(vec![PAGE, 512 * PAGE, 3 << 30])
    }

    proptest! {
        /// The range kept around an emptied one: nothing that stays or that others have, all that a table
        /// translates which has nothing else, and not more than 1 GiB beside others.
        #[test]
        fn whole_tables_around_what_is_emptied_are_kept_from_others(
            areas in prop::collection::vec((address(), pages(), any::<bool>()), 0..6),
            others in prop::collection::vec((address(), pages(), any::<bool>()), 0..3),
            emptied in address(),
        ) {
            let (memory, mut state) = (memory(), State::default());
            let emptied = Extent { first: emptied, last: emptied | (PAGE - 1) };
            for (start, len, out) in areas {
                let Some(span) = Span::<Iova>::checked(start, len) else { continue };
                if !Extent::of(span).overlaps(emptied) {
                    // Some overlap each other.
                    let _ = state.areas.insert(area(&memory, span, out));
                }
            }
            state.areas.insert(area(&memory, emptied.span(), false)).unwrap();
            let by = state.taken.take(&[emptied]);
            for (start, len, panicked) in others {
                let Some(span) = Span::<Offset>::checked(start, len) else { continue };
                let extent = Extent::of(span);
                if !state.taken.overlaps(&[extent]) {
                    let other = state.taken.take(&[extent]);
                    if panicked {
                        state.taken.abandon(other);
                    }
                }
            }
            let (around, all) = state.around(by, emptied);
            prop_assert!(around.covers(emptied));
            prop_assert!(!state.taken.overlaps_others(by, around));
            let stays = |(span, area): &(Span<Iova>, &HeldArea)| {
                area.is_there() && !state.taken.overlaps_others(by, Extent::of(*span))
            };
            let beside = [
                (emptied.first > 0).then(|| Extent { first: 0, last: emptied.first - 1 }),
                (emptied.last < u64::MAX).then(|| Extent { first: emptied.last + 1, last: u64::MAX }),
            ];
            let staying: Vec<Extent> = beside
                .into_iter()
                .flatten()
                .flat_map(|side| state.areas.0.overlapping(side.first, side.last))
                .filter(stays)
                .map(|(span, _)| Extent::of(span))
                .collect();
            prop_assert!(staying.iter().all(|extent| !extent.overlaps(around)));
            let alone = state.taken.is_alone(by);
            let mut left = false;
            for log2 in TABLES {
                let mask = (1u64 << log2) - 1;
                let block = Extent { first: emptied.first & !mask, last: emptied.first | mask };
                let free = staying.iter().all(|extent| !extent.overlaps(block));
                let clear = free && !state.taken.overlaps_others(by, block);
                prop_assert!(!clear || around.covers(block) || (log2 > 30 && !alone), "{log2}");
                prop_assert!(alone || log2 != 30 || block.covers(around));
                left |= free && !around.covers(block);
            }
            prop_assert!(!all || !left);
            prop_assert!(all || left || !alone);
        }
    }

    #[test]
    fn tables_that_are_left_are_taken_when_no_operation_is_under_way() {
        let (memory, mut state) = (memory(), State::default());
        let range = |first, pages: u64| Extent {
            first,
            last: first + pages * PAGE - 1,
        };
        // Both ends, each once.
        state.leave(range(0, 2048), PAGE);
        state.leave(range(PAGE, 1), PAGE);
        state.leave(range(1 << 30, 1), PAGE);
        let by = state.taken.take(&[range(1 << 40, 1)]);
        assert_eq!(state.take_left(), None);
        // Neither where an operation has panicked nor where something is mapped again.
        state.taken.abandon(by);
        state.leave(range(1 << 40, 1), PAGE);
        state.leave(range(1 << 41, 1), PAGE);
        let again = area(&memory, range(1 << 41, 1).span(), false);
        state.areas.insert(again).unwrap();
        let left = core::iter::from_fn(|| state.take_left());
        let expected = [range(1 << 30, 1), range(2047 * PAGE, 1), range(0, 1)];
        assert_eq!(Vec::from_iter(left), expected);
    }
}
