//! A value for every address, most of them the same.
//!
//! Kept as disjoint stretches of equal values. Neighbours that are equal are one stretch, and the
//! default value is kept nowhere, so that what comes back to where it was takes no more room than
//! before.

use alloc::vec::Vec;
use core::iter;

use runs::Span;

use crate::intervals::Intervals;

#[derive(Debug, Default)]
pub(crate) struct Tally<T>(Intervals<T>);

impl<T: Copy + Default + PartialEq> Tally<T> {
    /// The stretch of equal values that `address` is in, if that is not the default.
    pub(crate) fn at(&self, address: u64) -> Option<(Span, T)> {
        self.0.at(address).map(|(span, value)| (span, *value))
    }

    /// The stretches with bytes in `range`, in order, as far as they lie in it.
    pub(crate) fn inside(&self, range: Span) -> impl Iterator<Item = (Span, T)> {
        self.0
            .overlapping(range.start, range.last())
            .filter_map(move |(span, value)| Some((span.intersection(&range)?, *value)))
    }

    /// What of `range` has the default value, in order.
    pub(crate) fn gaps(&self, range: Span) -> impl Iterator<Item = Span> {
        let ends = self
            .inside(range)
            .map(|(span, _)| (span.start, span.last()));
        let mut at = Some(range.start);
        let behind = range.last().checked_add(1);
        ends.map(|(start, last)| (Some(start), last.checked_add(1)))
            .chain(iter::once((behind, None)))
            .filter_map(move |(start, next)| {
                let from = at;
                at = next;
                // At the very end of the address space there is nothing behind.
                let last = start.map_or(u64::MAX, |start| start.wrapping_sub(1));
                let from = from?;
                (start != Some(from)).then(|| Span::inclusive(from, last))?
            })
    }

    /// Has `change` change the value of everything in `range`, once for each stretch of equal values.
    pub(crate) fn change(&mut self, range: Span, mut change: impl FnMut(&mut T)) {
        let mut stretches: Vec<(Span, T)> = self.inside(range).collect();
        stretches.extend(self.gaps(range).map(|gap| (gap, T::default())));
        stretches.sort_unstable_by_key(|(span, _)| span.start);
        stretches.iter_mut().for_each(|(_, value)| change(value));

        // What lies beside, of those that go over an end of the range or touch it.
        let before = range.start.checked_sub(1).and_then(|last| self.at(last));
        let behind = range.last().checked_add(1).and_then(|next| self.at(next));
        let head = before.and_then(|(span, value)| {
            Some((
                Span::inclusive(span.start, range.start.wrapping_sub(1))?,
                value,
            ))
        });
        let tail = behind.and_then(|(span, value)| {
            Some((
                Span::inclusive(range.last().wrapping_add(1), span.last())?,
                value,
            ))
        });
        let beside = before.into_iter().chain(behind).map(|(span, _)| span.start);
        let old: Vec<u64> = self
            .0
            .overlapping(range.start, range.last())
            .map(|(span, _)| span.start)
            .chain(beside)
            .collect();
        for start in old {
            self.0.remove(start);
        }

        let mut open: Option<(Span, T)> = None;
        let all = head.into_iter().chain(stretches).chain(tail);
        for (span, value) in all.filter(|(_, value)| *value != T::default()) {
            match &mut open {
                Some((before, same)) if *same == value && before.last() + 1 == span.start => {
                    before.len += span.len;
                }
                _ => self.keep(open.replace((span, value))),
            }
        }
        self.keep(open);
    }

    fn keep(&mut self, stretch: Option<(Span, T)>) {
        if let Some((span, value)) = stretch {
            let kept = self.0.insert(span, value);
            debug_assert!(kept.is_ok(), "{span} was made free");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn check(base: u64, changes: &[(u64, u64, u8)]) {
        const SIZE: u64 = 24;
        let mut plain = vec![0u8; SIZE as usize];
        let mut tally = Tally::<u8>::default();
        for (start, len, by) in changes {
            let (start, len) = (start % SIZE, 1 + len % (SIZE - start % SIZE));
            let range = Span::new(base + start, len);
            let gaps: Vec<u64> = tally
                .gaps(range)
                .flat_map(|gap| (0..gap.len).map(move |n| gap.start + n - base))
                .collect();
            let expected = (start..start + len).filter(|at| plain[*at as usize] == 0);
            assert_eq!(gaps, expected.collect::<Vec<_>>());
            tally.change(range, |value| *value = (*value + by) % 4);
            for value in &mut plain[start as usize..(start + len) as usize] {
                *value = (*value + by) % 4;
            }
            let mut found = vec![0u8; SIZE as usize];
            let mut last: Option<(Span, u8)> = None;
            for (span, value) in tally.inside(Span::new(base, SIZE)) {
                assert_ne!(value, 0);
                if let Some((before, same)) = last {
                    assert!(
                        before.last() + 1 < span.start || same != value,
                        "not joined"
                    );
                }
                found[(span.start - base) as usize..][..span.len as usize].fill(value);
                last = Some((span, value));
            }
            assert_eq!(found, plain);
        }
    }

    proptest! {
        #[test]
        fn as_a_value_for_each_address(
            changes in prop::collection::vec((0..24u64, 0..24u64, 0..4u8), 1..20),
            at in prop::sample::select(vec![0, 1, 1000, u64::MAX - 23]),
        ) {
            check(at, &changes);
        }
    }
}
