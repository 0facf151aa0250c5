//! A value for every address, most of them the same.
//!
//! Kept as disjoint stretches of equal values. Neighbours that are equal are one stretch, unless that is all of
//! 2^64 bytes, and the default value is kept nowhere, so that what comes back to where it was takes no more room
//! than before.

use alloc::vec::Vec;
use core::iter;

use runs::{Joinable as _, Span};

use crate::ranges::intervals::Intervals;

#[derive(Debug)]
pub(crate) struct RangeMap<A, T>(Intervals<A, T>);

impl<A, T> Default for RangeMap<A, T> {
    fn default() -> Self {
        Self(Intervals::new())
    }
}

impl<A, T: Copy + Default + PartialEq> RangeMap<A, T> {
    /// The stretch of equal values that `address` is in, if that is not the default.
    pub(crate) fn at(&self, address: u64) -> Option<(Span<A>, T)> {
        self.0.at(address).map(|(span, value)| (span, *value))
    }

    /// The stretches with bytes in `range`, in order, as far as they lie in it.
    pub(crate) fn inside(&self, range: Span<A>) -> impl Iterator<Item = (Span<A>, T)> {
        self.0
            .overlapping(range.start, range.last())
            .filter_map(move |(span, value)| Some((span.intersection(&range)?, *value)))
    }

    /// Stretches of `range` with the default value, in order.
    pub(crate) fn gaps(&self, range: Span<A>) -> impl Iterator<Item = Span<A>> {
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

    /// Has `change` change the value of everything in `range`, once for each stretch of equal values,
    /// in order.
    pub(crate) fn change(&mut self, range: Span<A>, mut change: impl FnMut(&mut T)) {
        self.change_each(range, |_, value| change(value));
    }

    /// The same; `change` receives what of `range` the stretch is.
    pub(crate) fn change_each(&mut self, range: Span<A>, mut change: impl FnMut(Span<A>, &mut T)) {
        // Neighbours are included, since changed stretches may be joined with them.
        let (before, behind) = (
            range.start.saturating_sub(1),
            range.last().saturating_add(1),
        );
        let mut near = self.0.overlapping(before, behind);
        let mut next = || near.next().map(|(span, value)| (span, *value));
        let mut first = next();
        let head = first.filter(|(span, _)| span.last() < range.start);
        first = if head.is_some() { next() } else { first };
        let all = first.filter(|(span, _)| *span == range);
        first = if all.is_some() { next() } else { first };
        if first.is_none_or(|(span, _)| span.start > range.last()) {
            let mut value = all.map_or_else(T::default, |(_, value)| value);
            change(range, &mut value);
            return self.set(range, all.map(|(_, value)| value), value, [head, first]);
        }
        let near = self.0.overlapping(before, behind);
        let old: Vec<(Span<A>, T)> = near.map(|(span, value)| (span, *value)).collect();
        let mut new = Joined(Vec::with_capacity(old.len() + 2));
        let mut changed = |new: &mut Joined<A, T>, span: Option<Span<A>>, mut value: T| {
            if let Some(here) = span {
                change(here, &mut value);
                new.push(span, value);
            }
        };
        // Rest of the range without a value yet.
        let mut rest = Some(range);
        for &(span, value) in &old {
            if span.start < range.start {
                let last = span.last().min(range.start - 1);
                new.push(Span::inclusive(span.start, last), value);
            }
            if let Some(todo) = rest.filter(|todo| todo.start <= span.last()) {
                if span.start > todo.start {
                    let last = todo.last().min(span.start - 1);
                    changed(&mut new, Span::inclusive(todo.start, last), T::default());
                }
                changed(&mut new, span.intersection(&todo), value);
                let next = span.last().checked_add(1);
                rest = next.and_then(|next| Span::inclusive(next, todo.last()));
            }
            if span.last() > range.last() {
                let start = span.start.max(range.last() + 1);
                new.push(Span::inclusive(start, span.last()), value);
            }
        }
        changed(&mut new, rest, T::default());
        self.replace(&old, &new.0);
    }

    /// Has `value` in `range`, which is one stretch of the value `old`, or of none; `beside` it are
    /// stretches that touch it.
    fn set(&mut self, range: Span<A>, old: Option<T>, value: T, beside: [Option<(Span<A>, T)>; 2]) {
        if old.unwrap_or_default() == value {
            return;
        }
        let joins = |beside: Option<(Span<A>, T)>| {
            let same = beside.filter(|(_, same)| *same == value);
            same.map(|(span, _)| span)
        };
        let [head, tail] = beside.map(joins);
        if old.is_some() && value != T::default() && head.is_none() && tail.is_none() {
            if let Some((_, there)) = self.0.at_mut(range.start) {
                *there = value;
            }
            return;
        }
        let mut whole = range;
        if let Some(joined) = head.and_then(|head| head.join(&whole)) {
            self.0.remove(joined.start);
            whole = joined;
        }
        if old.is_some() {
            self.0.remove(range.start);
        }
        if let Some((tail, joined)) = tail.and_then(|tail| Some((tail, whole.join(&tail)?))) {
            self.0.remove(tail.start);
            whole = joined;
        }
        if value != T::default() {
            let kept = self.0.insert(whole, value);
            debug_assert!(kept.is_ok(), "{whole} was made free");
        }
    }

    /// Has the stretches `new` where `old` are. Most are often the same, or differ in the value only.
    fn replace(&mut self, old: &[(Span<A>, T)], new: &[(Span<A>, T)]) {
        let same = |list: &[(Span<A>, T)], span: Span<A>| {
            let place = list.binary_search_by_key(&span.start, |(span, _)| span.start);
            place.ok().filter(|place| list[*place].0 == span)
        };
        for (span, value) in old {
            match same(new, *span).map(|place| new[place].1) {
                None => {
                    self.0.remove(span.start);
                }
                Some(now) if now != *value => {
                    if let Some((_, value)) = self.0.at_mut(span.start) {
                        *value = now;
                    }
                }
                Some(_) => {}
            }
        }
        for (span, value) in new {
            if same(old, *span).is_none() {
                let kept = self.0.insert(*span, *value);
                debug_assert!(kept.is_ok(), "{span} was made free");
            }
        }
    }
}

/// Stretches in order: joined where they are equal, and without the default.
struct Joined<A, T>(Vec<(Span<A>, T)>);

impl<A, T: Copy + Default + PartialEq> Joined<A, T> {
    fn push(&mut self, span: Option<Span<A>>, value: T) {
        let Some(span) = span.filter(|_| value != T::default()) else {
            return;
        };
        if let Some((before, same)) = self.0.last_mut() {
            if let Some(joined) = before.join(&span).filter(|_| *same == value) {
                *before = joined;
                return;
            }
        }
        self.0.push((span, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;
    use runs::Iova;

    fn check(base: u64, changes: &[(u64, u64, u8)]) {
        const SIZE: u64 = 24;
        let mut plain = vec![0u8; SIZE as usize];
        let mut range_map = RangeMap::<Iova, u8>::default();
        for (start, len, by) in changes {
            let (start, len) = (start % SIZE, 1 + len % (SIZE - start % SIZE));
            let range = Span::new(base + start, len);
            let gaps: Vec<u64> = range_map
                .gaps(range)
                .flat_map(|gap| (0..gap.len).map(move |n| gap.start + n - base))
                .collect();
            let expected = (start..start + len).filter(|at| plain[*at as usize] == 0);
            assert_eq!(gaps, expected.collect::<Vec<_>>());
            range_map.change(range, |value| *value = (*value + by) % 4);
            for value in &mut plain[start as usize..(start + len) as usize] {
                *value = (*value + by) % 4;
            }
            let mut found = vec![0u8; SIZE as usize];
            let mut last: Option<(Span<Iova>, u8)> = None;
            for (span, value) in range_map.inside(Span::new(base, SIZE)) {
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

    /// All of 2^64 bytes are no stretch.
    #[test]
    fn all_of_the_address_space_may_have_one_value() {
        let [low, high] = [0, 1 << 63].map(|start| Span::<Iova>::new(start, 1 << 63));
        for [first, second] in [[low, high], [high, low]] {
            let mut map = RangeMap::<Iova, u8>::default();
            map.change(first, |value| *value = 1);
            map.change(second, |value| *value = 1);
            // Through several stretches, too.
            for part in [Span::new(first.start + 7, 9), first, second] {
                map.change(part, |value| *value += 1);
            }
            map.change(first, |value| *value = 2);
            for half in [low, high] {
                let all = map.inside(half).filter(|(_, value)| *value == 2);
                assert_eq!(all.map(|(span, _)| span.len).sum::<u64>(), half.len);
            }
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
