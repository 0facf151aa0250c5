//! What of the guest's addresses is memory.
//!
//! A driver names whatever it likes. [`GuestRam::keep`] hands on what lies in the guest's memory and
//! nothing else; a run over several regions comes out as one run for each, since what backs them may
//! differ. The work for a run is bounded by the number of regions that it meets.

use runs::Span;

use crate::refusal::{Refusal, Refusals};
use crate::source::WIRE_PAGE;

/// The regions of a guest's memory, ascending.
#[derive(Clone, Copy, Debug)]
pub struct GuestRam<'a> {
    regions: &'a [Span],
}

/// Why regions are not a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRam {
    /// The region is empty, ends beyond 2^64, or is not made of pages of 4 KiB.
    #[error("the region {region} is not made of pages of 4 KiB")]
    NotPages {
        /// The region.
        region: Span,
    },
    /// The region does not begin behind the one before it.
    #[error("the region {region} does not begin behind {before}")]
    NotAscending {
        /// The region.
        region: Span,
        /// The one before.
        before: Span,
    },
}

impl<'a> GuestRam<'a> {
    /// These regions: ascending, disjoint, of whole pages of 4 KiB.
    pub fn new(regions: &'a [Span]) -> Result<Self, BadRam> {
        let mut before: Option<Span> = None;
        for &region in regions {
            if Span::checked(region.start, region.len).is_none() || !region.is_aligned(WIRE_PAGE) {
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
    pub(crate) const fn known(regions: &'a [Span]) -> Self {
        Self { regions }
    }

    /// Hands the parts of `run` that are memory to `sink`, in order, and refuses the rest.
    #[inline]
    pub fn keep(&self, run: Span, refusals: &mut Refusals, sink: impl FnMut(Span)) {
        RamCursor::from(*self).keep(run, refusals, sink);
    }

    /// The region that this address lies in, or else the first one behind it, and those that follow.
    fn from(&self, address: u64) -> &'a [Span] {
        let first = self
            .regions
            .partition_point(|region| region.last() < address);
        self.regions.get(first..).unwrap_or(&[])
    }
}

/// A guest's memory, with the region that was looked at last at hand.
#[derive(Clone, Copy, Debug)]
pub struct RamCursor<'a> {
    ram: GuestRam<'a>,
    /// A region, or nothing.
    at: Span,
}

impl<'a> From<GuestRam<'a>> for RamCursor<'a> {
    fn from(ram: GuestRam<'a>) -> Self {
        Self {
            ram,
            at: Span::new(0, 0),
        }
    }
}

impl RamCursor<'_> {
    /// As [`GuestRam::keep`], and with one comparison where the run lies in the same region as the one
    /// before.
    #[inline]
    pub fn keep(&mut self, run: Span, refusals: &mut Refusals, mut sink: impl FnMut(Span)) {
        if self.at.covers(&run) {
            return sink(run);
        }
        self.search(run, refusals, sink);
    }

    #[inline(never)]
    fn search(&mut self, run: Span, refusals: &mut Refusals, mut sink: impl FnMut(Span)) {
        if run.is_empty() {
            return;
        }
        let regions = self.ram.from(run.start);
        if let Some(region) = regions.first() {
            self.at = *region;
        }
        let mut kept = 0;
        for region in regions {
            let Some(part) = region.intersection(&run) else {
                break;
            };
            kept += part.len;
            sink(part);
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
        fn what_is_kept_is_memory_and_all_of_it(
            gaps in proptest::collection::vec((0u64..4, 1u64..5), 0..6),
            runs in proptest::collection::vec((0u64..40, 0u64..30), 0..9),
        ) {
            let mut at = 0;
            let regions: Vec<_> = gaps.iter().map(|&(gap, len)| {
                let region = Span::new((at + gap) * PAGE, len * PAGE);
                at += gap + len;
                region
            }).collect();
            let ram = GuestRam::new(&regions).unwrap();
            let mut cursor = RamCursor::from(ram);
            for (start, len) in runs {
                let run = Span::new(start * PAGE, len * PAGE);
                let mut refusals = Refusals::new();
                let mut kept = Vec::new();
                cursor.keep(run, &mut refusals, |part| kept.push(part));
                let is_memory = |page: u64| regions.iter().any(|region| region.contains(page * PAGE));
                let expected: Vec<u64> = (start..start + len).filter(|page| is_memory(*page)).collect();
                let found: Vec<u64> = kept.iter().flat_map(|part| part.start / PAGE..=part.last() / PAGE).collect();
                prop_assert_eq!(&found, &expected);
                let missing = run.len - expected.len() as u64 * PAGE;
                let refusal = match missing {
                    0 => None,
                    _ if expected.is_empty() => Some(Refusal::OutsideRam { run }),
                    bytes => Some(Refusal::Hole { run, bytes }),
                };
                prop_assert_eq!(refusals.latest(), refusal);

                let mut again = (Refusals::new(), Vec::new());
                ram.keep(run, &mut again.0, |part| again.1.push(part));
                prop_assert_eq!(again, (refusals, kept));
            }
        }
    }

    #[test]
    fn regions_that_overlap_or_are_no_pages_are_refused() {
        let a = Span::new(0, 0x2000);
        let b = Span::new(0x1000, 0x1000);
        assert_eq!(
            GuestRam::new(&[a, b]).unwrap_err(),
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
                GuestRam::new(&[region]).unwrap_err(),
                BadRam::NotPages { region }
            );
        }
        let top = [Span::new(u64::MAX - 0xfff, 0x1000)];
        let mut kept = Vec::new();
        let ram = GuestRam::new(&top).unwrap();
        ram.keep(top[0], &mut Refusals::new(), |part| kept.push(part));
        assert_eq!(kept, top);
    }
}
