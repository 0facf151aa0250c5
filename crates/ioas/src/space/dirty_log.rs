//! Log of ranges that devices have written to, or could have, and that no table reports any more, until harvested.

use core::mem;

use iopt::Aperture;
use runs::{Iova, Span};

use crate::ranges::range_map::RangeMap;
use crate::space::dirty::Harvested;

/// Disjoint ranges: what it takes does not grow with what is added twice.
#[derive(Debug, Default)]
pub(crate) struct DirtyLog(RangeMap<Iova, How>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    #[default]
    Not,
    /// A dirty bit said so.
    Marked,
    /// A device could write there that leaves no trace.
    Unseen,
}

impl DirtyLog {
    /// Ranges of another process.
    pub(crate) fn of(ranges: &[Span<Iova>]) -> Self {
        let mut written = Self::default();
        ranges.iter().for_each(|range| written.add(*range));
        written
    }

    /// The ranges, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Span<Iova>> {
        self.all().map(|(range, _)| range)
    }

    fn all(&self) -> impl Iterator<Item = (Span<Iova>, How)> {
        let halves = Aperture::zeros(64).spans();
        halves.flat_map(|half| self.0.inside(half))
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Dirty bits were set in `range`.
    pub(crate) fn add(&mut self, range: Span<Iova>) {
        self.0.change(range, |how| *how = (*how).max(How::Marked));
    }

    /// A device that leaves no trace could write to `range`.
    pub(crate) fn add_unseen(&mut self, range: Span<Iova>) {
        self.0.change(range, |how| *how = How::Unseen);
    }

    pub(crate) fn append(&mut self, other: &Self) {
        for (range, how) in other.all() {
            self.0.change(range, |mine| *mine = (*mine).max(how));
        }
    }

    /// Takes out what lies in `span` and hands it to `each`. Says how many bytes were marked, and
    /// whether some were not.
    pub(crate) fn take(&mut self, span: Span<Iova>, each: &mut dyn FnMut(Span<Iova>)) -> Harvested {
        let mut found = Harvested::default();
        self.0.change_each(span, |range, how| {
            match mem::take(how) {
                How::Not => return,
                How::Marked => found.bytes += range.len,
                How::Unseen => found.blind = true,
            }
            each(range);
        });
        found
    }

    /// Takes out what lies between `first` and `last`, both included, and hands it to `each`.
    pub(crate) fn take_between(&mut self, first: u64, last: u64, each: &mut dyn FnMut(Span<Iova>)) {
        for half in Aperture::zeros(64).spans() {
            if let Some(here) = Span::inclusive(half.start.max(first), half.last().min(last)) {
                self.take(here, each);
            }
        }
    }
}
