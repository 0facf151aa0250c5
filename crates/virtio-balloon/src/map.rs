//! The map of a guest's memory, and where a run of guest addresses lies in it.
//!
//! A driver may name any address. [`MemoryMap::resolve`] turns a run into [`Part`]s, stretches of one
//! region by the region's number and the offset there, and refuses addresses without memory. It is the
//! only look-up of a guest address: parts travel on, and their receivers find the region, with its
//! [`Region::memory`], by number. A run over several regions becomes a part of each, also where these
//! touch, since what backs them may differ. The work for a run is bounded by the regions that it meets.
//!
//! A part belongs to the map that it was resolved with. A map does not change: where regions come or go,
//! there is another map, exchanged as a whole.

use runs::{GuestAddr, Offset, Span};

use crate::refusal::{Refusal, Refusals};
use crate::source::WIRE_PAGE;

/// A region of a guest's memory, with `T`, what a monitor has there: offsets in `memory` are those in the
/// region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region<T = ()> {
    /// Its guest physical addresses.
    pub guest: Span<GuestAddr>,
    /// Bytes of the pages that back it, and of which nothing less can be given back: 4096, or a huge
    /// page. Guest addresses lie in huge pages as the host's addresses do.
    pub page: u64,
    /// The monitor's handle of the memory there.
    pub memory: T,
}

impl Region {
    /// A region backed by pages of 4 KiB.
    pub const fn new(guest: Span<GuestAddr>) -> Self {
        Self {
            guest,
            page: WIRE_PAGE,
            memory: (),
        }
    }
}

impl<T> Region<T> {
    /// The guest addresses of these offsets, which lie in the region.
    pub const fn run(&self, offsets: Span<Offset>) -> Span<GuestAddr> {
        Span::new(self.guest.start.wrapping_add(offsets.start), offsets.len)
    }

    /// The offsets of a run that begins in the region.
    pub(crate) const fn offsets(&self, run: Span<GuestAddr>) -> Span<Offset> {
        Span::new(run.start.wrapping_sub(self.guest.start), run.len)
    }
}

/// A stretch of one region of a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// The region's number in its map.
    pub region: usize,
    /// Where in the region.
    pub offsets: Span<Offset>,
}

impl Part {
    /// These offsets of the region of this number.
    pub const fn new(region: usize, offsets: Span<Offset>) -> Self {
        Self { region, offsets }
    }

    /// Returns the intersection of both parts.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.region != other.region {
            return None;
        }
        let offsets = self.offsets.intersection(&other.offsets)?;
        Some(Self::new(self.region, offsets))
    }
}

/// The regions of a guest's memory, ascending.
#[derive(Debug)]
pub struct MemoryMap<'a, T = ()> {
    regions: &'a [Region<T>],
}

impl<T> Clone for MemoryMap<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for MemoryMap<'_, T> {}

/// Why regions are not a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRam {
    /// The region is empty, ends beyond 2^64, or is not made of pages of 4 KiB.
    #[error("the region {region} is not made of pages of 4 KiB")]
    NotPages {
        /// The region.
        region: Span<GuestAddr>,
    },
    /// The region does not begin behind the one before it.
    #[error("the region {region} does not begin behind {before}")]
    NotAscending {
        /// The region.
        region: Span<GuestAddr>,
        /// The one before.
        before: Span<GuestAddr>,
    },
}

impl<'a, T> MemoryMap<'a, T> {
    /// These regions: ascending, disjoint, of whole pages of 4 KiB.
    ///
    /// # Errors
    ///
    /// Other regions: see [`BadRam`].
    pub fn new(regions: &'a [Region<T>]) -> Result<Self, BadRam> {
        let mut before: Option<Span<GuestAddr>> = None;
        for region in regions.iter().map(|region| region.guest) {
            if Span::<GuestAddr>::checked(region.start, region.len).is_none()
                || !region.is_aligned(WIRE_PAGE)
            {
                return Err(BadRam::NotPages { region });
            }
            if let Some(before) = before.filter(|before| before.last() >= region.start) {
                return Err(BadRam::NotAscending { region, before });
            }
            before = Some(region);
        }
        Ok(Self { regions })
    }

    /// Regions that [`new`](Self::new) has taken before.
    #[cfg(feature = "device")]
    pub(crate) const fn known(regions: &'a [Region<T>]) -> Self {
        Self { regions }
    }

    /// The regions, by number.
    pub const fn regions(self) -> &'a [Region<T>] {
        self.regions
    }

    /// The region of this part; none of a part of another map.
    pub fn region(self, part: &Part) -> Option<&'a Region<T>> {
        self.regions.get(part.region)
    }

    /// The guest addresses of this part; none at all of a part of another map.
    pub fn run(self, part: &Part) -> Span<GuestAddr> {
        let run = |region: &Region<T>| region.run(part.offsets);
        self.region(part).map_or(Span::new(0, 0), run)
    }

    /// Hands the parts of `run` that are memory to `sink`, in order, and refuses the rest.
    #[inline]
    pub fn resolve(self, run: Span<GuestAddr>, refusals: &mut Refusals, sink: impl FnMut(Part)) {
        Resolver::from(self).resolve(run, refusals, sink);
    }
}

/// A map, with the region that was met last at hand.
#[derive(Clone, Copy, Debug)]
pub struct Resolver<'a, T = ()> {
    map: MemoryMap<'a, T>,
    /// The number of a region, and its guest addresses, or nothing.
    at: (usize, Span<GuestAddr>),
}

impl<'a, T> From<MemoryMap<'a, T>> for Resolver<'a, T> {
    fn from(map: MemoryMap<'a, T>) -> Self {
        Self {
            map,
            at: (0, Span::new(0, 0)),
        }
    }
}

impl<T> Resolver<'_, T> {
    /// As [`MemoryMap::resolve`], and with one comparison where the run lies in the same region as the one
    /// before.
    #[inline]
    pub fn resolve(
        &mut self,
        run: Span<GuestAddr>,
        refusals: &mut Refusals,
        mut sink: impl FnMut(Part),
    ) {
        let (region, guest) = self.at;
        if guest.covers(&run) {
            return sink(Part::new(
                region,
                Span::new(run.start - guest.start, run.len),
            ));
        }
        self.search(run, refusals, sink);
    }

    #[inline(never)]
    fn search(
        &mut self,
        run: Span<GuestAddr>,
        refusals: &mut Refusals,
        mut sink: impl FnMut(Part),
    ) {
        if run.is_empty() {
            return;
        }
        let before = |region: &Region<T>| region.guest.last() < run.start;
        let first = self.map.regions.partition_point(before);
        let regions = self.map.regions.get(first..).unwrap_or(&[]);
        if let Some(region) = regions.first() {
            self.at = (first, region.guest);
        }
        let mut kept = 0;
        for (number, region) in (first..).zip(regions) {
            let Some(part) = region.guest.intersection(&run) else {
                break;
            };
            kept += part.len;
            sink(Part::new(number, region.offsets(part)));
        }
        if kept == 0 {
            refusals.add(Refusal::OutsideRam { run });
        } else if kept < run.len {
            let bytes = run.len - kept;
            refusals.add(Refusal::Hole { run, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const PAGE: u64 = WIRE_PAGE;

    proptest! {
        #[test]
        fn what_is_resolved_is_memory_and_all_of_it(
            gaps in proptest::collection::vec((0u64..4, 1u64..5), 0..6),
            runs in proptest::collection::vec((0u64..40, 0u64..30), 0..9),
        ) {
            let mut at = 0;
            let regions: Vec<_> = gaps.iter().map(|&(gap, len)| {
                let region = Span::new((at + gap) * PAGE, len * PAGE);
                at += gap + len;
                Region::new(region)
            }).collect();
            let map = MemoryMap::new(&regions).unwrap();
            let mut resolver = Resolver::from(map);
            for (start, len) in runs {
                let run = Span::new(start * PAGE, len * PAGE);
                let mut refusals = Refusals::new();
                let mut kept = Vec::new();
                resolver.resolve(run, &mut refusals, |part| kept.push(part));
                // Each part lies in its region.
                for part in &kept {
                    let guest = map.region(part).unwrap().guest;
                    prop_assert!(guest.covers(&map.run(part)), "{:?} in {}", part, guest);
                }
                let is_memory = |page: u64| regions.iter().any(|region| region.guest.contains(page * PAGE));
                let expected: Vec<u64> = (start..start + len).filter(|page| is_memory(*page)).collect();
                let found = kept.iter().map(|part| map.run(part));
                let found: Vec<u64> = found.flat_map(|run| run.start / PAGE..=run.last() / PAGE).collect();
                prop_assert_eq!(&found, &expected);
                let missing = run.len - expected.len() as u64 * PAGE;
                let refusal = match missing {
                    0 => None,
                    _ if expected.is_empty() => Some(Refusal::OutsideRam { run }),
                    bytes => Some(Refusal::Hole { run, bytes }),
                };
                prop_assert_eq!(refusals.latest(), refusal);

                let mut again = (Refusals::new(), Vec::new());
                map.resolve(run, &mut again.0, |part| again.1.push(part));
                prop_assert_eq!(again, (refusals, kept));
            }
        }
    }

    #[test]
    fn a_run_over_regions_that_touch_is_a_part_of_each() {
        let regions = [0, 2 * PAGE].map(|start| Region::new(Span::new(start, 2 * PAGE)));
        let map = MemoryMap::new(&regions).unwrap();
        let mut parts = Vec::new();
        let run = Span::new(PAGE, 2 * PAGE);
        map.resolve(run, &mut Refusals::new(), |part| parts.push(part));
        let (end, begin) = (Span::new(PAGE, PAGE), Span::new(0, PAGE));
        assert_eq!(parts, [Part::new(0, end), Part::new(1, begin)]);
        assert_eq!(map.run(&parts[1]), Span::new(2 * PAGE, PAGE));
        assert_eq!(parts[0].intersection(&parts[1]), None);
        let another = Part::new(2, begin);
        assert!(map.region(&another).is_none() && map.run(&another).is_empty());
    }

    #[test]
    fn regions_that_overlap_or_are_no_pages_are_refused() {
        let a = Span::new(0, 0x2000);
        let b = Span::new(0x1000, 0x1000);
        assert_eq!(
            MemoryMap::new(&[a, b].map(Region::new)).unwrap_err(),
            BadRam::NotAscending {
                region: b,
                before: a
            }
        );
        for region in [
            Span::new(0, 0),
            Span::new(0x800, 0x1000),
            Span::new(u64::MAX - 0xfff, 0x2000),
        ] {
            assert_eq!(
                MemoryMap::new(&[Region::new(region)]).unwrap_err(),
                BadRam::NotPages { region }
            );
        }
        let top = [Region::new(Span::new(u64::MAX - 0xfff, 0x1000))];
        let mut kept = Vec::new();
        let map = MemoryMap::new(&top).unwrap();
        map.resolve(top[0].guest, &mut Refusals::new(), |part| {
            kept.push(map.run(&part))
        });
        assert_eq!(kept, [top[0].guest]);
    }
}
