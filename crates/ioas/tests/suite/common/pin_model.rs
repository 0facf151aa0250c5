//! The plain model of pins: for each page of each object the number of its users and the pin that holds
//! it; for each pin its pages, also those that it did not let go.

use std::collections::{BTreeMap, BTreeSet};

use runs::{Offset, Span};

pub(crate) const SPACES: usize = 3;
/// Pages that the kernel of this test charges together.
pub(crate) const CHARGED: u64 = 4;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fail {
    Nothing,
    /// The n-th call of a kind.
    Pin(u64),
    Reader(u64),
    Release(u64),
    Unpin(u64),
}

/// An area: first page in the window, pages, object, first page of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) object: usize,
    pub(crate) first: u64,
}

#[derive(Default)]
pub(crate) struct Model {
    pub(crate) areas: [Vec<Place>; SPACES],
    /// Pages that have users: how many, and the pin that holds it.
    pub(crate) pages: BTreeMap<(usize, u64), (u64, usize)>,
    /// Pages of each pin, also those that it did not let go of. What it lost at its end stays here.
    pub(crate) pins: BTreeMap<usize, BTreeSet<u64>>,
    pub(crate) next: usize,
}

impl Model {
    /// Stretches that are not held.
    pub(crate) fn gaps(&self, place: Place) -> Vec<Span<Offset>> {
        let mut gaps: Vec<Span<Offset>> = Vec::new();
        for page in place.first..place.first + place.len {
            if self.pages.contains_key(&(place.object, page)) {
                continue;
            }
            match gaps.last_mut().filter(|gap| gap.start + gap.len == page) {
                Some(gap) => gap.len += 1,
                None => gaps.push(Span::new(page, 1)),
            }
        }
        gaps
    }

    /// Number of stretches of different pins: each has a reader of its own.
    pub(crate) fn readers(&self, place: Place) -> u64 {
        let pins = (place.first..place.first + place.len)
            .map(|page| self.pages[&(place.object, page)].1)
            .collect::<Vec<_>>();
        1 + pins.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
    }

    pub(crate) fn hold(&mut self, place: Place) {
        for gap in self.gaps(place) {
            let pages = gap.start..gap.start + gap.len;
            self.pins.insert(self.next, pages.clone().collect());
            for page in pages {
                self.pages.insert((place.object, page), (0, self.next));
            }
            self.next += 1;
        }
        for page in place.first..place.first + place.len {
            self.pages.get_mut(&(place.object, page)).unwrap().0 += 1;
        }
    }

    /// Lets go of a part. `fails` says which call of each kind fails. Returns unpinned pages and
    /// whether anything failed.
    pub(crate) fn release(&mut self, place: Place, calls: &mut Calls) -> (u64, bool) {
        let mut groups: Vec<(usize, BTreeSet<u64>)> = Vec::new();
        let mut last = None;
        for page in place.first..place.first + place.len {
            let held = self.pages.get_mut(&(place.object, page)).unwrap();
            held.0 -= 1;
            let (users, pin) = *held;
            if users > 0 {
                last = None;
                continue;
            }
            self.pages.remove(&(place.object, page));
            match groups.last_mut().filter(|_| last == Some(pin)) {
                Some((_, group)) => drop(group.insert(page)),
                None => groups.push((pin, [page].into())),
            }
            last = Some(pin);
        }
        let (mut unpinned, mut failed) = (0, false);
        for (nth, (pin, group)) in groups.iter().enumerate() {
            // Groups that come later are in use while this one goes.
            let later = groups[nth + 1..].iter().any(|(other, _)| other == pin);
            let used = later || self.pages.values().any(|(_, other)| other == pin);
            if used {
                if calls.release() {
                    failed = true;
                } else {
                    self.pins
                        .get_mut(pin)
                        .unwrap()
                        .retain(|page| !group.contains(page));
                    unpinned += group.len() as u64;
                }
            } else if calls.unpin() {
                failed = true;
            } else {
                unpinned += self.pins.remove(pin).unwrap().len() as u64;
            }
        }
        (unpinned, failed)
    }

    /// Pages that the kernel has pinned.
    pub(crate) fn pinned(&self) -> u64 {
        self.pins.values().map(|pages| pages.len() as u64).sum()
    }

    pub(crate) fn charged(&self) -> u64 {
        let groups = |pages: &BTreeSet<u64>| {
            let groups: BTreeSet<u64> = pages.iter().map(|page| page / CHARGED).collect();
            groups.len() as u64
        };
        self.pins.values().map(groups).sum::<u64>() * CHARGED
    }

    /// Charge of a new pin of `gap`.
    pub(crate) fn charge(gap: Span<Offset>) -> u64 {
        (gap.last() / CHARGED - gap.start / CHARGED + 1) * CHARGED
    }

    /// Cuts areas at `at`.
    pub(crate) fn cut(&mut self, space: usize, at: u64) {
        let areas = &mut self.areas[space];
        let through = |area: &&mut Place| area.at < at && at < area.at + area.len;
        if let Some(area) = areas.iter_mut().find(through) {
            let front = at - area.at;
            let tail = Place {
                at,
                len: area.len - front,
                first: area.first + front,
                ..*area
            };
            area.len = front;
            areas.push(tail);
            areas.sort_by_key(|area| area.at);
        }
    }
}

/// Calls that fail, as in [`Faults`].
pub(crate) struct Calls {
    pub(crate) fail: Fail,
    pub(crate) releases: u64,
    pub(crate) unpins: u64,
}

impl Calls {
    pub(crate) const fn new(fail: Fail) -> Self {
        Self {
            fail,
            releases: 0,
            unpins: 0,
        }
    }

    pub(crate) fn release(&mut self) -> bool {
        self.releases += 1;
        matches!(self.fail, Fail::Release(n) if n + 1 == self.releases)
    }

    pub(crate) fn unpin(&mut self) -> bool {
        self.unpins += 1;
        matches!(self.fail, Fail::Unpin(n) if n + 1 == self.unpins)
    }
}
