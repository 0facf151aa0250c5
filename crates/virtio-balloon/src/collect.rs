//! Runs of all messages of a drained queue, sorted and merged, in memory of a fixed size.
//!
//! Whatever order a driver names pages in, one run is one discard afterwards. Runs that arrive in
//! order, or go on where the last one ended or began, are merged as they come; the rest is sorted when
//! the collector is full, or the queue is empty. What is still more than half of the room after that is
//! handed on and the room is free again, so runs may come apart there, and none is lost.
//!
//! Push what [`GuestRam::keep`](crate::GuestRam::keep) has let through. A device pushes the runs of
//! all messages that wait in the queue, calls [`finish`](RunCollector::finish), and does what the
//! pages ask for; only then it gives the messages back.

use runs::{Span, merge_sorted};

/// Sorted, merged runs of pages.
#[derive(Debug)]
pub struct RunCollector<'a> {
    room: &'a mut [Span],
    used: usize,
    /// The run that came last, with all that was merged with it; empty when there is none. There is
    /// always a place for it behind the others.
    open: Span,
    /// There is a gap between each run and the one before it, the open one included: nothing is to be
    /// sorted or merged.
    sorted: bool,
}

impl<'a> RunCollector<'a> {
    /// An empty collector; it merges as far as this many runs reach. Without any room each run is
    /// handed on by itself.
    pub fn new(room: &'a mut [Span]) -> Self {
        Self {
            room,
            used: 0,
            open: Span::new(0, 0),
            sorted: true,
        }
    }

    /// Takes a run; what of it is beyond 2^64 is left out. When there is no room, runs go to `spill`:
    /// sorted and merged among themselves.
    #[inline]
    pub fn push(&mut self, run: Span, spill: impl FnMut(&[Span])) {
        // Mostly a run comes behind the open one, and there is room for it. Nothing comes behind a run
        // that ends at the top, nor behind none at all, whose last byte is the top, too.
        let behind = run.start > self.open.last().saturating_add(1);
        if behind
            && Span::checked(run.start, run.len).is_some()
            && let Some([place, _, ..]) = self.room.get_mut(self.used..)
        {
            *place = self.open;
            self.used += 1;
            self.open = run;
            return;
        }
        self.push_any(run, spill);
    }

    #[inline(never)]
    fn push_any(&mut self, run: Span, mut spill: impl FnMut(&[Span])) {
        let most = (u64::MAX - run.start).saturating_add(1);
        let run = Span::new(run.start, run.len.min(most));
        if run.is_empty() {
            return;
        }
        if self.open.is_empty() {
            if self.room.is_empty() {
                return spill(&[run]);
            }
            self.open = run;
            return;
        }
        // Nothing follows the last byte of an address space, and all of it has no length.
        if let Some(len) = self.open.len.checked_add(run.len) {
            let open = self.open;
            if run.start == open.start.wrapping_add(open.len) && run.start != 0 {
                self.open.len = len;
                return;
            }
            if open.start == run.start.wrapping_add(run.len) && open.start != 0 {
                self.open = Span::new(run.start, len);
                self.sorted &= self.latest().is_none_or(|before| has_gap(before, &run));
                return;
            }
        }
        self.sorted &= has_gap(&self.open, &run);
        self.close();
        if self.used == self.room.len() {
            self.merge();
            if self.used > self.room.len() / 2 {
                self.hand_on(&mut spill);
            }
            // The latest run may be another one now.
            self.sorted = self.latest().is_none_or(|before| has_gap(before, &run));
        }
        self.open = run;
    }

    /// The run before the open one.
    fn latest(&self) -> Option<&Span> {
        self.room.get(self.used.checked_sub(1)?)
    }

    /// Puts the open run to the others.
    fn close(&mut self) {
        let open = core::mem::take(&mut self.open);
        if let Some(place) = self.room.get_mut(self.used).filter(|_| !open.is_empty()) {
            *place = open;
            self.used += 1;
        }
    }

    /// Hands on all that is left, sorted and merged. The collector is empty afterwards.
    pub fn finish(&mut self, mut spill: impl FnMut(&[Span])) {
        self.close();
        self.merge();
        self.hand_on(&mut spill);
    }

    fn merge(&mut self) {
        if !self.sorted {
            let (runs, _) = self.room.split_at_mut(self.used);
            runs.sort_unstable_by_key(|run| run.start);
            self.used = merge_sorted(runs);
            self.sorted = true;
        }
    }

    fn hand_on(&mut self, spill: &mut impl FnMut(&[Span])) {
        let used = core::mem::take(&mut self.used);
        if let Some(runs) = self.room.get(..used).filter(|runs| !runs.is_empty()) {
            spill(runs);
        }
    }
}

/// True when `next` begins behind `run`, with at least a byte between them.
#[inline]
fn has_gap(run: &Span, next: &Span) -> bool {
    next.start
        .checked_sub(run.last())
        .is_some_and(|gap| gap > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    fn collect(runs: &[(u64, u64)], room: usize) -> Vec<Vec<Span>> {
        let mut room = vec![Span::default(); room];
        let mut collector = RunCollector::new(&mut room);
        let mut batches = Vec::new();
        for &(start, len) in runs {
            collector.push(Span::new(start, len), |runs| batches.push(runs.to_vec()));
        }
        collector.finish(|runs| batches.push(runs.to_vec()));
        collector.finish(|_| panic!("it is empty"));
        batches
    }

    fn bytes<'a>(runs: impl IntoIterator<Item = &'a Span>) -> BTreeSet<u64> {
        runs.into_iter()
            .flat_map(|run| run.start..run.start + run.len)
            .collect()
    }

    proptest! {
        #[test]
        fn collected_runs_cover_the_same_bytes_and_each_batch_is_merged(
            runs in proptest::collection::vec((0u64..80, 0u64..9), 0..60),
            room in 0usize..12,
        ) {
            let batches = collect(&runs, room);
            let plain: BTreeSet<u64> = runs.iter().flat_map(|&(start, len)| start..start + len).collect();
            prop_assert_eq!(bytes(batches.iter().flatten()), plain);
            for batch in &batches {
                prop_assert!(batch.len() <= room.max(1));
                for pair in batch.windows(2) {
                    prop_assert!(pair[0].last() + 1 < pair[1].start, "{:?}", batch);
                }
            }
        }

        #[test]
        fn runs_at_the_top_of_the_address_space_are_as_others(
            runs in proptest::collection::vec((0u64..60, 0u64..70), 0..40),
            room in 1usize..40,
            ascend in any::<bool>(),
        ) {
            let mut runs = runs;
            if ascend {
                runs.sort();
            }
            let base = u64::MAX - 63;
            let high: Vec<_> = runs.iter().map(|&(start, len)| (base + start, len)).collect();
            // What is beyond the top is left out.
            let low: Vec<_> = runs.iter().map(|&(start, len)| (start, len.min(64 - start))).collect();
            let expected = collect(&low, room);
            let found = collect(&high, room).into_iter().map(|batch| {
                batch.iter().map(|run| Span::new(run.start - base, run.len)).collect()
            });
            prop_assert_eq!(found.collect::<Vec<Vec<_>>>(), expected);
        }

        #[test]
        fn with_room_for_all_there_is_one_batch(runs in proptest::collection::vec((0u64..400, 1u64..9), 1..60)) {
            let batches = collect(&runs, 64);
            prop_assert_eq!(batches.len(), 1);
            let total: u64 = batches[0].iter().map(|run| run.len).sum();
            prop_assert_eq!(total as usize, bytes(&batches[0]).len());
        }
    }

    #[test]
    fn pages_in_falling_order_need_room_for_one_run() {
        let falling: Vec<_> = (0..100).rev().map(|page| (page * 4096, 4096)).collect();
        assert_eq!(collect(&falling, 1), [[Span::new(0, 100 * 4096)]]);
    }

    #[test]
    fn a_run_that_grows_downwards_over_others_is_sorted() {
        let found = collect(&[(10, 1), (14, 1), (9, 5)], 4);
        assert_eq!(found, [[Span::new(9, 6)]]);
        let touching = collect(&[(10, 1), (14, 1), (11, 3)], 4);
        assert_eq!(touching, [[Span::new(10, 5)]]);
    }

    #[test]
    fn runs_that_wrap_around_end_at_the_top() {
        let found = collect(&[(u64::MAX, 2), (u64::MAX - 9, u64::MAX), (5, 1)], 4);
        assert_eq!(found, [[Span::new(5, 1), Span::new(u64::MAX - 9, 10)]]);
    }

    #[test]
    fn nothing_is_joined_around_the_top_of_the_address_space() {
        let top = u64::MAX - 0xfff;
        let found = collect(&[(top, 0x1000), (0, 0x1000)], 4);
        assert_eq!(found, [[Span::new(0, 0x1000), Span::new(top, 0x1000)]]);
    }
}
