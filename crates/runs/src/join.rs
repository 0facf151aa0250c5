//! Merging neighbours.

use crate::{Run, Span};

/// A range that can be merged with its neighbour: a [`Span`] or a [`Run`].
pub trait Joinable: Copy {
    /// One stretch for both, when `next` goes on exactly where `self` ends.
    fn join(&self, next: &Self) -> Option<Self>;
    /// True for a stretch of no bytes.
    fn is_nothing(&self) -> bool;
}

impl<A> Joinable for Span<A> {
    #[inline]
    fn join(&self, next: &Self) -> Option<Self> {
        let len = self.len.checked_add(next.len)?;
        (self.start.checked_add(self.len)? == next.start).then_some(Span::new(self.start, len))
    }

    #[inline]
    fn is_nothing(&self) -> bool {
        self.len == 0
    }
}

impl Joinable for Run {
    #[inline]
    fn join(&self, next: &Self) -> Option<Self> {
        let len = self.len.checked_add(next.len)?;
        self.is_followed_by(next).then_some(Run { len, ..*self })
    }

    #[inline]
    fn is_nothing(&self) -> bool {
        self.len == 0
    }
}

/// Merges a stream of stretches: neighbours become one, everything else passes through in order.
///
/// Batches do not matter: a run may begin in one and end in another.
#[derive(Clone, Debug)]
pub struct Joiner<T> {
    open: Option<T>,
}

impl<T: Joinable> Joiner<T> {
    /// Holds nothing yet.
    pub const fn new() -> Self {
        Self { open: None }
    }

    /// Takes the next stretch; gives back the one before it when the two are not neighbours.
    /// A stretch of no bytes changes nothing.
    #[inline]
    pub fn push(&mut self, next: T) -> Option<T> {
        if next.is_nothing() {
            return None;
        }
        match self.open {
            None => {
                self.open = Some(next);
                None
            }
            Some(open) => match open.join(&next) {
                Some(joined) => {
                    self.open = Some(joined);
                    None
                }
                None => self.open.replace(next),
            },
        }
    }

    /// Takes a whole batch and shows each stretch to `each`. Complete stretches are then at the
    /// batch's beginning; returns their number. The rest of the batch has no meaning any more.
    #[inline]
    pub fn push_all(&mut self, batch: &mut [T], mut each: impl FnMut(&T)) -> usize {
        let mut complete = 0;
        let mut open = self.open.take();
        for i in 0..batch.len() {
            let next = batch[i];
            each(&next);
            if next.is_nothing() {
                continue;
            }
            match open.and_then(|open| open.join(&next)) {
                Some(joined) => open = Some(joined),
                None => {
                    // Never more come out than went in: this place was read already.
                    if let Some(before) = open.replace(next) {
                        batch[complete] = before;
                        complete += 1;
                    }
                }
            }
        }
        self.open = open;
        complete
    }

    /// The last stretch, when the stream has ended. The joiner is empty afterwards.
    #[inline]
    pub fn finish(&mut self) -> Option<T> {
        self.open.take()
    }
}

impl<T: Joinable> Default for Joiner<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Merges a slice that is sorted by start, in place; overlapping spans become one. Returns how
/// many spans are left at its beginning.
pub fn merge_sorted<A>(spans: &mut [Span<A>]) -> usize {
    let mut kept = 0;
    for i in 0..spans.len() {
        let next = spans[i];
        if next.is_empty() {
            continue;
        }
        if kept > 0 {
            let open = &mut spans[kept - 1];
            // `next` begins inside the open span or right behind it.
            if next.start <= open.last() || next.start == open.last().wrapping_add(1) {
                let last = open.last().max(next.last());
                open.len = (last - open.start).saturating_add(1);
                continue;
            }
        }
        spans[kept] = next;
        kept += 1;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pa;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn joined_runs_say_the_same_as_their_pages(pages in proptest::collection::vec((0u64..40, 0u64..40), 0..60)) {
            let mut joiner = Joiner::new();
            let mut out = Vec::new();
            for &(iova, pa) in &pages {
                out.extend(joiner.push(Run::new(iova << 12, Span::new(pa << 12, 4096))));
            }
            out.extend(joiner.finish());
            let again: Vec<_> = out
                .iter()
                .flat_map(|r| (0..r.len >> 12).map(move |i| ((r.iova >> 12) + i, (r.pa >> 12) + i)))
                .collect();
            prop_assert_eq!(again, pages);
            for pair in out.windows(2) {
                prop_assert!(!pair[0].is_followed_by(&pair[1]), "{:?}", pair);
            }
        }

        #[test]
        fn batches_are_joined_as_one_by_one(
            runs in proptest::collection::vec((0u64..8, 0u64..4), 0..60),
            size in 1usize..9,
        ) {
            let mut runs: Vec<_> = runs.into_iter().map(|(at, len)| Span::<Pa>::new(at, len)).collect();
            let mut joiner = Joiner::new();
            let mut expected: Vec<_> = runs.iter().filter_map(|run| joiner.push(*run)).collect();
            expected.extend(joiner.finish());
            let mut found = Vec::new();
            for batch in runs.chunks_mut(size) {
                let complete = joiner.push_all(batch, |_| ());
                found.extend_from_slice(&batch[..complete]);
            }
            found.extend(joiner.finish());
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn a_merged_slice_covers_the_same_bytes(mut spans in proptest::collection::vec((0u64..60, 0u64..9), 0..30)) {
            spans.sort();
            let bytes: BTreeSet<u64> = spans.iter().flat_map(|&(s, l)| s..s + l).collect();
            let mut spans: Vec<_> = spans.into_iter().map(|(s, l)| Span::<Pa>::new(s, l)).collect();
            let n = merge_sorted(&mut spans);
            let merged = &spans[..n];
            let again: Vec<u64> = merged.iter().flat_map(|s| s.start..s.start + s.len).collect();
            prop_assert_eq!(again, bytes.into_iter().collect::<Vec<_>>());
            for pair in merged.windows(2) {
                prop_assert!(pair[0].last() + 1 < pair[1].start);
            }
        }
    }

    #[test]
    fn spans_at_the_top_of_the_address_space_merge() {
        let mut spans = [Span::<Pa>::new(u64::MAX - 9, 5), Span::new(u64::MAX - 4, 5)];
        assert_eq!(merge_sorted(&mut spans), 1);
        assert_eq!(spans[0], Span::new(u64::MAX - 9, 10));
        let mut joiner = Joiner::new();
        assert_eq!(joiner.push(Span::<Pa>::new(u64::MAX, 1)), None);
        assert_eq!(joiner.push(Span::new(0, 1)), Some(Span::new(u64::MAX, 1)));
    }
}
