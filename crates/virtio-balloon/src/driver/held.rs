//! A set of the guest's pages: a bit for each.
//!
//! A bitmap needs no memory while pages come and go, gives runs in order, and shows which pages were
//! never taken. The cost is a bit for each page of the guest from the start.

use core::ops::Range;

use runs::{GuestAddr, Span, bitmap};

use crate::source::GuestPage;

/// Pages of a span of addresses, as bits in words that the caller provides.
#[derive(Debug)]
pub(super) struct PageSet<W> {
    words: W,
    span: Span<GuestAddr>,
    page: GuestPage,
    count: u64,
    /// No page lies in a word before this one, so that taking from the front does not search again.
    low: usize,
}

/// Words for a set of this span's pages.
pub(super) const fn words(span: Span<GuestAddr>, page: GuestPage) -> usize {
    (span.len >> page.shift()).div_ceil(64) as usize
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> PageSet<W> {
    /// The empty set, in words that are all 0.
    pub(super) const fn new(words: W, span: Span<GuestAddr>, page: GuestPage) -> Self {
        let (count, low) = (0, 0);
        Self {
            words,
            span,
            page,
            count,
            low,
        }
    }

    /// Bytes of its pages.
    pub(super) const fn bytes(&self) -> u64 {
        self.count << self.page.shift()
    }

    /// True when these are whole pages of the span.
    pub(super) fn fits(&self, run: Span<GuestAddr>) -> bool {
        run.is_aligned(self.page.bytes()) && self.span.covers(&run)
    }

    /// Takes the lowest run out, so many bytes of it at most.
    pub(super) fn take_front(&mut self, bytes: u64) -> Option<Span<GuestAddr>> {
        let run = self.front(bytes).next()?;
        self.remove(run);
        Some(run)
    }

    fn bits(&self, run: Span<GuestAddr>) -> Range<u64> {
        let first = (run.start - self.span.start) >> self.page.shift();
        first..first + (run.len >> self.page.shift())
    }

    /// Puts pages in; false, and all is as it was, unless all of them fit and none was there.
    pub(super) fn insert(&mut self, run: Span<GuestAddr>) -> bool {
        if !self.fits(run) || self.any(run) {
            return false;
        }
        let bits = self.bits(run);
        self.low = self.low.min((bits.start / 64) as usize);
        self.count += bitmap::set(self.words.as_mut(), bits);
        true
    }

    /// Takes pages out; false, and all is as it was, unless all of them were there.
    pub(super) fn remove(&mut self, run: Span<GuestAddr>) -> bool {
        if !self.all(run) {
            return false;
        }
        let bits = self.bits(run);
        self.count -= bitmap::clear(self.words.as_mut(), bits);
        let words = self.words.as_ref();
        while words.get(self.low) == Some(&0) {
            self.low += 1;
        }
        true
    }

    /// True when any of these pages, which fit, is in the set.
    pub(super) fn any(&self, run: Span<GuestAddr>) -> bool {
        bitmap::count(self.words.as_ref(), self.bits(run)) > 0
    }

    /// True when all these pages are in the set.
    pub(super) fn all(&self, run: Span<GuestAddr>) -> bool {
        let there = |bits: Range<u64>| {
            bitmap::count(self.words.as_ref(), bits.clone()) == bits.end - bits.start
        };
        self.fits(run) && there(self.bits(run))
    }

    /// The lowest pages, as runs, so many bytes at most.
    pub(super) fn front(&self, bytes: u64) -> impl Iterator<Item = Span<GuestAddr>> + Clone {
        let words = self.words.as_ref().get(self.low..).unwrap_or(&[]);
        let base = self.span.start + ((self.low as u64 * 64) << self.page.shift());
        let mut left = bytes & !(self.page.bytes() - 1);
        self.page.stretches(base, words).map_while(move |run| {
            let len = run.len.min(left);
            left -= len;
            (len > 0).then(|| Span::new(run.start, len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn it_is_the_plain_set(ops in proptest::collection::vec((any::<bool>(), 0u64..300, 1u64..140), 0..60)) {
            let page = GuestPage::SIZE_4K;
            let span = Span::new(1 << 20, 300 << 12);
            let mut set = PageSet::new(vec![0u64; words(span, page)], span, page);
            let mut plain = BTreeSet::new();
            for (put, first, pages) in ops {
                let run = Span::new((1 << 20) + (first << 12), pages << 12);
                let range = first..first + pages;
                let fits = first + pages <= 300;
                if put {
                    let new = fits && range.clone().all(|nr| !plain.contains(&nr));
                    prop_assert_eq!(set.insert(run), new);
                    if new { plain.extend(range); }
                } else {
                    let there = fits && range.clone().all(|nr| plain.contains(&nr));
                    prop_assert_eq!(set.remove(run), there);
                    if there { plain.retain(|nr| !range.contains(nr)); }
                }
                prop_assert_eq!(set.bytes(), (plain.len() as u64) << 12);
                let front: Vec<u64> = set.front(7 << 12)
                    .flat_map(|run| (0..run.len >> 12).map(move |nr| ((run.start - (1 << 20)) >> 12) + nr))
                    .collect();
                let expected: Vec<u64> = plain.iter().copied().take(7).collect();
                prop_assert_eq!(front, expected);
            }
        }
    }
}
