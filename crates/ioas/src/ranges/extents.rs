//! Ranges that operations work on, so that operations which run at the same time are disjoint.
//!
//! There are as many as there are threads at work, so they are a plain list.

use alloc::vec::Vec;

use runs::Span;

/// A range by its first and its last byte: it can also be all of 2^64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Extent {
    /// Everything.
    pub(crate) const ALL: Self = Self {
        first: 0,
        last: u64::MAX,
    };

    /// `span`, which is not empty.
    pub(crate) const fn of<A>(span: Span<A>) -> Self {
        Self {
            first: span.start,
            last: span.last(),
        }
    }

    pub(crate) const fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    pub(crate) const fn covers(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Part of it that lies in `span`.
    pub(crate) fn within<A>(self, span: Span<A>) -> Option<Span<A>> {
        Span::inclusive(self.first.max(span.start), self.last.min(span.last()))
    }

    /// The smallest one that has both.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            first: self.first.min(other.first),
            last: self.last.max(other.last),
        }
    }

    /// With the bytes beside it, which belong to its neighbours.
    pub(crate) const fn and_beside(self) -> Self {
        Self {
            first: self.first.saturating_sub(1),
            last: self.last.saturating_add(1),
        }
    }

    /// As a span; all of 2^64 bytes are not one, and lose the last.
    pub(crate) fn span<A>(self) -> Span<A> {
        Span::new(self.first, (self.last - self.first).saturating_add(1))
    }
}

/// Extents that operations have claimed.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    entries: Vec<Entry>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    /// Number of the operation.
    by: u64,
    /// Extent that the operation works on.
    named: Extent,
    /// The extent, and the addresses beside it as far as the operation keeps others from there.
    owned: Extent,
    /// It has panicked.
    broken: bool,
}

impl Extents {
    fn of(&self, by: u64) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| entry.by == by)
    }

    /// Extent of an operation on some of `wanted` that has panicked: there is nothing to wait for.
    pub(crate) fn broken(&self, wanted: &[Extent]) -> Option<Extent> {
        let broken = self.entries.iter().filter(|entry| entry.broken);
        let mut named = broken.map(|entry| entry.named);
        named.find(|named| wanted.iter().any(|one| one.overlaps(*named)))
    }

    /// True when operations work on some of `wanted`, or keep others from there.
    pub(crate) fn overlaps(&self, wanted: &[Extent]) -> bool {
        let mut owned = self.entries.iter().map(|entry| entry.owned);
        owned.any(|owned| wanted.iter().any(|one| one.overlaps(owned)))
    }

    /// True when others than `by` work on some of `range`, or keep others from there.
    pub(crate) fn overlaps_others(&self, by: u64, range: Extent) -> bool {
        let mut others = self.entries.iter().filter(|entry| entry.by != by);
        others.any(|entry| entry.owned.overlaps(range))
    }

    /// True when no operation but `by` is under way.
    pub(crate) fn is_alone(&self, by: u64) -> bool {
        let mut others = self.entries.iter().filter(|entry| entry.by != by);
        others.all(|entry| entry.broken)
    }

    /// True when operations are under way.
    pub(crate) fn at_work(&self) -> bool {
        self.entries.iter().any(|entry| !entry.broken)
    }

    /// Takes `wanted`, which nothing is in the way of. Returns the number of the operation.
    pub(crate) fn take(&mut self, wanted: &[Extent]) -> u64 {
        self.next += 1;
        let by = self.next;
        self.entries.extend(wanted.iter().map(|extent| Entry {
            by,
            named: *extent,
            owned: *extent,
            broken: false,
        }));
        by
    }

    /// True when the operation `by` works on all of `range`.
    pub(crate) fn has(&self, by: u64, range: Extent) -> bool {
        self.of(by).any(|entry| entry.named.covers(range))
    }

    /// Has the operation `by` keep others from `around`, too, which covers `range`.
    pub(crate) fn widen(&mut self, by: u64, range: Extent, around: Extent) -> Extent {
        let mut mine = self.entries.iter_mut().filter(|entry| entry.by == by);
        let Some(entry) = mine.find(|entry| entry.owned.covers(range)) else {
            return range;
        };
        entry.owned = entry.owned.with(around);
        entry.owned
    }

    /// Part of `around`, which covers `range`, that no operation other than `by` keeps.
    pub(crate) fn clip(&self, by: u64, mut around: Extent, range: Extent) -> Extent {
        for entry in self.entries.iter().filter(|entry| entry.by != by) {
            if entry.owned.last < range.first {
                around.first = around.first.max(entry.owned.last + 1);
            }
            if entry.owned.first > range.last {
                around.last = around.last.min(entry.owned.first - 1);
            }
        }
        around
    }

    /// The operation `by` has come to its end.
    pub(crate) fn give_back(&mut self, by: u64) {
        self.entries.retain(|entry| entry.by != by);
    }

    /// The operation `by` has panicked: what it worked on stays taken.
    pub(crate) fn abandon(&mut self, by: u64) {
        for entry in self.entries.iter_mut().filter(|entry| entry.by == by) {
            entry.broken = true;
            entry.owned = entry.named;
        }
    }

    /// Nothing is taken any more.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Everything from which operations keep others.
    pub(crate) fn all(&self) -> impl Iterator<Item = Extent> + '_ {
        self.entries.iter().map(|entry| entry.owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn extent(first: u64, last: u64) -> Extent {
        Extent { first, last }
    }

    #[test]
    fn others_are_kept_from_what_is_widened_up_to_those_on_both_sides() {
        let mut taken = Extents::default();
        let [low, here, high] = [extent(0, 9), extent(40, 49), extent(u64::MAX, u64::MAX)];
        let [_, by, other] = [low, here, high].map(|extent| taken.take(&[extent]));
        let clear = taken.clip(by, Extent::ALL, here);
        assert_eq!(clear, extent(10, u64::MAX - 1));
        assert_eq!(taken.clip(by, extent(20, 60), here), extent(20, 60));
        assert_eq!(taken.widen(by, here, clear), clear);
        assert!(taken.overlaps(&[extent(100, 100)]) && taken.overlaps_others(other, clear));
        assert!(!taken.overlaps_others(by, clear));
        // Its own range has not grown, and is all that is left of it when it panics.
        assert!(taken.has(by, here) && !taken.has(by, extent(39, 49)));
        taken.abandon(by);
        assert!(!taken.overlaps(&[extent(100, 100)]) && taken.overlaps(&[here]));
        assert_eq!(taken.broken(&[Extent::ALL]), Some(here));
        assert_eq!(taken.broken(&[low, high]), None);
    }

    #[test]
    fn an_operation_that_has_panicked_is_not_under_way() {
        let mut taken = Extents::default();
        let [first, second] = [0, 1].map(|n| taken.take(&[extent(n, n), extent(n + 10, n + 10)]));
        assert!(!taken.is_alone(first) && taken.at_work());
        taken.abandon(second);
        assert!(taken.is_alone(first) && taken.at_work());
        taken.give_back(first);
        assert!(!taken.at_work() && taken.overlaps(&[extent(11, 11)]));
        taken.clear();
        assert!(!taken.overlaps(&[Extent::ALL]));
    }
}
