//! Runs of all messages of a drained queue, sorted and merged, in memory of a fixed size.
//!
//! One run is one discard afterwards, in whatever order a driver names its pages. Runs that arrive in
//! order, or go on where the last one ended or began, are merged as they come; the rest is sorted when
//! the collector is full, or the queue is empty. If more than half of the room is still taken after
//! that, all runs are handed on and the room is free again, so runs may come apart there, and none is
//! lost.
//!
//! Push the parts that [`MemoryMap::resolve`](crate::MemoryMap::resolve) yields. A device pushes the parts
//! of all messages that wait in the queue, calls [`finish`](RunCollector::finish), and acts on the parts;
//! only then does it give the messages back. Parts of different regions are never merged.

use core::mem;

use runs::{Offset, Span};

use crate::map::Part;

/// Sorted, merged parts of a guest's memory.
#[derive(Debug)]
pub struct RunCollector<'a> {
    room: &'a mut [Part],
    /// So many are there, none of them empty. The last one is open: it came last, with all that was merged with
    /// it.
    used: usize,
    /// There is a gap between each part and the one before it: nothing is to be sorted or merged.
    sorted: bool,
}

impl<'a> RunCollector<'a> {
    /// An empty collector; it merges as far as this many parts reach. Without any room each part is
    /// handed on by itself.
    pub fn new(room: &'a mut [Part]) -> Self {
        Self {
            room,
            used: 0,
            sorted: true,
        }
    }

    /// Takes a part; what of it is beyond 2^64 is left out. When there is no room, parts go to `spill`:
    /// sorted and merged among themselves.
    #[inline]
    pub fn push(&mut self, part: Part, spill: impl FnMut(&[Part])) {
        // Mostly a part comes behind the open one, and there is room for it.
        if let Some([open, place, ..]) = self.room.get_mut(self.used.wrapping_sub(1)..) {
            if has_gap(open, &part)
                && Span::<Offset>::checked(part.offsets.start, part.offsets.len).is_some()
            {
                *place = part;
                self.used += 1;
                return;
            }
        }
        self.push_any(part, spill);
    }

    #[inline(never)]
    fn push_any(&mut self, part: Part, mut spill: impl FnMut(&[Part])) {
        let start = part.offsets.start;
        let most = (u64::MAX - start).saturating_add(1);
        let run = Span::new(start, part.offsets.len.min(most));
        let part = Part::new(part.region, run);
        if run.is_empty() {
            return;
        }
        if self.room.is_empty() {
            return spill(&[part]);
        }
        let (before, open) = match self.room.get_mut(..self.used) {
            Some([.., before, open]) => (Some(&*before), Some(open)),
            Some([open]) => (None, Some(open)),
            _ => (None, None),
        };
        if let Some(open) = open {
            let Part { region, offsets } = *open;
            // Nothing follows the last byte of an address space, and all of it has no length.
            let len = offsets.len.checked_add(run.len);
            if let Some(len) = len.filter(|_| region == part.region) {
                if run.start == offsets.start.wrapping_add(offsets.len) && run.start != 0 {
                    open.offsets.len = len;
                    return;
                }
                if offsets.start == run.start.wrapping_add(run.len) && offsets.start != 0 {
                    open.offsets = Span::new(run.start, len);
                    self.sorted &= before.is_none_or(|before| has_gap(before, &part));
                    return;
                }
            }
            self.sorted &= has_gap(open, &part);
        }
        if self.used == self.room.len() {
            self.merge();
            if self.used > self.room.len() / 2 {
                self.hand_on(&mut spill);
            }
            // The latest part may be another one now.
            let latest = self.used.checked_sub(1).and_then(|at| self.room.get(at));
            self.sorted = latest.is_none_or(|latest| has_gap(latest, &part));
        }
        if let Some(place) = self.room.get_mut(self.used) {
            *place = part;
            self.used += 1;
        }
    }

    /// Hands on all that is left, sorted and merged. The collector is empty afterwards.
    pub fn finish(&mut self, mut spill: impl FnMut(&[Part])) {
        self.merge();
        self.hand_on(&mut spill);
    }

    fn merge(&mut self) {
        if !self.sorted {
            let (parts, _) = self.room.split_at_mut(self.used);
            // One number: sorting compares nothing else, and pairs take twice as long.
            parts.sort_unstable_by_key(|part| {
                (part.region as u128) << 64 | u128::from(part.offsets.start)
            });
            self.used = merge_sorted(parts);
        }
        self.sorted = true;
    }

    fn hand_on(&mut self, spill: &mut impl FnMut(&[Part])) {
        let used = mem::take(&mut self.used);
        if let Some(parts) = self.room.get(..used).filter(|parts| !parts.is_empty()) {
            spill(parts);
        }
    }
}

/// True when `next` is in a later region than `part`, or behind it with at least a byte between them.
#[inline]
fn has_gap(part: &Part, next: &Part) -> bool {
    if part.region != next.region {
        return part.region < next.region;
    }
    let gap = next.offsets.start.checked_sub(part.offsets.last());
    gap.is_some_and(|gap| gap > 1)
}

/// Merges sorted parts in place, none of them empty. Returns how many are left at the beginning.
fn merge_sorted(parts: &mut [Part]) -> usize {
    let mut kept = 0;
    for at in 0..parts.len() {
        let next = parts[at];
        if kept > 0 && !has_gap(&parts[kept - 1], &next) {
            let open = &mut parts[kept - 1].offsets;
            let last = open.last().max(next.offsets.last());
            open.len = (last - open.start).saturating_add(1);
            continue;
        }
        parts[kept] = next;
        kept += 1;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    fn collect_parts(parts: impl IntoIterator<Item = Part>, room: usize) -> Vec<Vec<Part>> {
        let mut room = vec![Part::default(); room];
        let mut collector = RunCollector::new(&mut room);
        let mut batches = Vec::new();
        for part in parts {
            collector.push(part, |parts| batches.push(parts.to_vec()));
        }
        collector.finish(|parts| batches.push(parts.to_vec()));
        collector.finish(|_| panic!("it is empty"));
        batches
    }

    /// Runs of one region.
    fn collect(runs: &[(u64, u64)], room: usize) -> Vec<Vec<Span<Offset>>> {
        let parts = runs
            .iter()
            .map(|&(start, len)| Part::new(3, Span::new(start, len)));
        let batches = collect_parts(parts, room).into_iter();
        batches
            .map(|batch| batch.iter().map(|part| part.offsets).collect())
            .collect()
    }

    fn bytes<'a>(runs: impl IntoIterator<Item = &'a Span<Offset>>) -> BTreeSet<u64> {
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
            // Bytes beyond the top are left out.
            let low: Vec<_> = runs.iter().map(|&(start, len)| (start, len.min(64 - start))).collect();
            let expected = collect(&low, room);
            let found = collect(&high, room).into_iter().map(|batch| {
                batch.iter().map(|run| Span::new(run.start - base, run.len)).collect()
            });
            prop_assert_eq!(found.collect::<Vec<Vec<_>>>(), expected);
        }

        #[test]
        fn regions_are_collected_as_each_by_itself(
            parts in proptest::collection::vec((0usize..4, 0u64..40, 0u64..9), 0..60),
        ) {
            let all = parts.iter().map(|&(region, start, len)| Part::new(region, Span::new(start, len)));
            let found = collect_parts(all, 64).into_iter().flatten();
            let mut expected = Vec::new();
            for region in 0..4 {
                let its: Vec<_> = parts.iter().filter(|part| part.0 == region).map(|part| (part.1, part.2)).collect();
                expected.extend(collect(&its, 64).into_iter().flatten().map(|run| Part::new(region, run)));
            }
            prop_assert_eq!(found.collect::<Vec<_>>(), expected);
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
