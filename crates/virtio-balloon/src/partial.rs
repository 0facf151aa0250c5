//! Huge pages of the host that are only partly in the balloon, remembered until they are whole.
//!
//! A guest gives 4 KiB here and 64 KiB there; a host whose memory is huge pages gets nothing back
//! before all of one is in the balloon (discarding a part of a transparent huge page frees nothing, and
//! of a hugetlb page neither). So each page of 4 KiB has a bit, set while it is in the balloon, and each
//! huge page a count of those bits. That is all there is to know, whatever order pages come and go in:
//! a part of a discarded page that is deflated and inflated again makes the page whole again. The memory
//! is set aside at the start, so no guest can force more: for huge pages of 2 MiB it is 36 MiB for a
//! terabyte.
//!
//! # Protocol
//!
//! A device calls [`inflate`](PartialHugePages::inflate) when it takes a message and discards what it is
//! given before the message goes back. It calls [`deflate`](PartialHugePages::deflate) *before* a
//! message of deflateq goes back. That is enough where `VIRTIO_BALLOON_F_MUST_TELL_HOST` is negotiated:
//! until then the driver does not use the pages (VIRTIO 1.3, 5.5.6.1). Where it is not, the driver may use
//! a page again before the device has heard of it, and the rest of its huge page, inflated meanwhile,
//! would take it along. Then a device must not remember: it calls [`forget`](PartialHugePages::forget)
//! when the queue is drained, and discards only what became whole within it, since the pages of
//! messages that are not yet back are not in use either (ibid.).
//!
//! Pages that are inflated twice are whole again: a driver that was not asked to tell may have used
//! them in between.

use core::fmt;

use runs::{Joiner, Span, bitmap};

use crate::source::WIRE_PAGE;

/// What of a region of the guest's memory is in the balloon, by pages of 4 KiB and by huge pages.
#[derive(Debug)]
pub struct PartialHugePages<'a> {
    region: Span,
    huge: u64,
    /// A bit for each page of 4 KiB.
    bits: &'a mut [u64],
    /// For each huge page, how many of its bits are set.
    counts: &'a mut [u64],
    /// Pages of 4 KiB in the balloon.
    pages: u64,
    /// Huge pages of which all is in the balloon.
    whole: u64,
}

/// Why a region cannot be remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadRegion {
    /// Huge pages are powers of two above 4 KiB.
    Size {
        /// What was asked for.
        huge: u64,
    },
    /// The region is empty, wraps around, or is not made of whole huge pages.
    NotPages {
        /// The region.
        region: Span,
        /// Bytes of a huge page.
        huge: u64,
    },
    /// The memory to remember in is too small.
    Room {
        /// Its words.
        words: usize,
        /// Words needed.
        needed: u64,
    },
}

impl fmt::Display for BadRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { huge } => write!(f, "huge pages of {huge} bytes"),
            Self::NotPages { region, huge } => {
                write!(
                    f,
                    "the region {region} is not made of pages of {huge} bytes"
                )
            }
            Self::Room { words, needed } => {
                write!(f, "{words} words to remember in, {needed} are needed")
            }
        }
    }
}

impl core::error::Error for BadRegion {}

impl<'a> PartialHugePages<'a> {
    /// Words that a region of `len` bytes in huge pages of `huge` bytes takes.
    pub const fn words(len: u64, huge: u64) -> u64 {
        if huge == 0 {
            return 0;
        }
        (len / WIRE_PAGE).div_ceil(64) + len / huge
    }

    /// A region, none of it in the balloon: whole huge pages of `huge` bytes, by the guest's addresses
    /// (which lie in the host's huge pages as the region's own address does). `memory` is
    /// [`words`](Self::words) long at least, and is overwritten.
    pub fn new(region: Span, huge: u64, memory: &'a mut [u64]) -> Result<Self, BadRegion> {
        if !huge.is_power_of_two() || huge <= WIRE_PAGE {
            return Err(BadRegion::Size { huge });
        }
        if Span::checked(region.start, region.len).is_none() || !region.is_aligned(huge) {
            return Err(BadRegion::NotPages { region, huge });
        }
        let needed = Self::words(region.len, huge);
        let words = memory.len();
        let room = usize::try_from(needed)
            .ok()
            .and_then(|needed| memory.get_mut(..needed));
        let Some(room) = room else {
            return Err(BadRegion::Room { words, needed });
        };
        room.fill(0);
        // The counts come last; they are fewer than `needed`, which is a `usize`.
        let (bits, counts) = room.split_at_mut((needed - region.len / huge) as usize);
        Ok(Self {
            region,
            huge,
            bits,
            counts,
            pages: 0,
            whole: 0,
        })
    }

    /// Bytes in the balloon.
    pub const fn bytes(&self) -> u64 {
        self.pages * WIRE_PAGE
    }

    /// Bytes in the balloon that lie in whole huge pages. The difference to [`bytes`](Self::bytes) waits
    /// for the rest of its huge pages.
    pub const fn whole_bytes(&self) -> u64 {
        self.whole * self.huge
    }

    /// The guest has given `run`. Hands on, merged and in order, the huge pages that it touches and that
    /// are whole now. Returns the bytes that were not in the balloon before. What of the run is outside
    /// the region is left out, as are parts of pages of 4 KiB.
    pub fn inflate(&mut self, run: Span, mut whole: impl FnMut(Span)) -> u64 {
        let mut joiner = Joiner::new();
        let before = self.pages;
        self.each(run, |this, nr, pages| {
            let Some(count) = this.counts.get_mut(nr) else {
                return;
            };
            let full = this.huge / WIRE_PAGE;
            let new = bitmap::set(this.bits, pages);
            *count += new;
            this.pages += new;
            if *count == full {
                this.whole += u64::from(new > 0);
                let start = this.region.start + nr as u64 * this.huge;
                if let Some(run) = joiner.push(Span::new(start, this.huge)) {
                    whole(run);
                }
            }
        });
        if let Some(run) = joiner.finish() {
            whole(run);
        }
        (self.pages - before) * WIRE_PAGE
    }

    /// The guest takes `run` back. Returns the bytes that were in the balloon. What is outside the
    /// region is left out.
    pub fn deflate(&mut self, run: Span) -> u64 {
        let before = self.pages;
        self.each(run, |this, nr, pages| {
            let Some(count) = this.counts.get_mut(nr) else {
                return;
            };
            let gone = bitmap::clear(this.bits, pages);
            // There is a page in each part, so of a whole huge page one is gone.
            this.whole -= u64::from(*count == this.huge / WIRE_PAGE);
            *count -= gone;
            this.pages -= gone;
        });
        (before - self.pages) * WIRE_PAGE
    }

    /// Nothing is in the balloon any more, as far as this remembers: after a reset, or where parts must
    /// not be remembered. Takes a step for each word.
    pub fn forget(&mut self) {
        self.bits.fill(0);
        self.counts.fill(0);
        self.pages = 0;
        self.whole = 0;
    }

    /// For each huge page that the run touches, its number and the pages of 4 KiB, by their bits.
    fn each(&mut self, run: Span, mut f: impl FnMut(&mut Self, usize, core::ops::Range<u64>)) {
        let Some(run) = self.region.intersection(&run) else {
            return;
        };
        let first = (run.start - self.region.start).div_ceil(WIRE_PAGE);
        let end = (run.last() - self.region.start + 1) / WIRE_PAGE;
        let full = self.huge / WIRE_PAGE;
        let mut at = first;
        while at < end {
            let nr = at / full;
            let until = ((nr + 1) * full).min(end);
            f(self, nr as usize, at..until);
            at = until;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    const PAGE: u64 = WIRE_PAGE;

    /// The plain set of pages, with the whole huge pages counted anew each time.
    #[derive(Default)]
    struct Model(BTreeSet<u64>);

    impl Model {
        fn is_whole(&self, huge: u64, full: u64) -> bool {
            (huge * full..(huge + 1) * full).all(|page| self.0.contains(&page))
        }
    }

    /// Pages of 4 KiB in a huge page, huge pages, and steps: inflate or deflate, first page, pages.
    fn steps() -> impl Strategy<Value = (u64, u64, Vec<(bool, u64, u64)>)> {
        (
            prop_oneof![Just(2u64), Just(4), Just(16), Just(512)],
            1u64..6,
        )
            .prop_flat_map(|(full, huge)| {
                let all = full * huge;
                let step = (any::<bool>(), 0..all + 3, 1..2 * full + 2);
                (
                    Just(full),
                    Just(huge),
                    proptest::collection::vec(step, 0..40),
                )
            })
    }

    proptest! {
        #[test]
        fn it_is_the_plain_set_of_pages((full, huge, steps) in steps(), base in 0u64..4) {
            let bytes = full * PAGE;
            let region = Span::new(base * bytes, huge * bytes);
            let mut memory = vec![u64::MAX; PartialHugePages::words(region.len, bytes) as usize];
            let mut tracker = PartialHugePages::new(region, bytes, &mut memory).unwrap();
            let mut model = Model::default();
            for (inflate, first, pages) in steps {
                let run = Span::new(region.start + first * PAGE, pages * PAGE);
                let inside: Vec<u64> = (first..first + pages).filter(|page| *page < full * huge).collect();
                if inflate {
                    let mut found = Vec::new();
                    let new = tracker.inflate(run, |run| found.push(run));
                    let mut expected_new = 0;
                    for page in &inside {
                        expected_new += u64::from(model.0.insert(*page));
                    }
                    prop_assert_eq!(new, expected_new * PAGE);
                    let touched: BTreeSet<u64> = inside.iter().map(|page| page / full).collect();
                    let expected: Vec<u64> = touched.into_iter().filter(|nr| model.is_whole(*nr, full)).collect();
                    let whole: Vec<u64> = found.iter()
                        .flat_map(|run| (run.start - region.start) / bytes..(run.last() + 1 - region.start) / bytes)
                        .collect();
                    prop_assert_eq!(whole, expected);
                    for pair in found.windows(2) {
                        prop_assert!(pair[0].last() + 1 < pair[1].start);
                    }
                } else {
                    let gone = tracker.deflate(run);
                    let expected = inside.iter().filter(|page| model.0.remove(page)).count() as u64;
                    prop_assert_eq!(gone, expected * PAGE);
                }
                prop_assert_eq!(tracker.bytes(), model.0.len() as u64 * PAGE);
                let whole = (0..huge).filter(|nr| model.is_whole(*nr, full)).count() as u64;
                prop_assert_eq!(tracker.whole_bytes(), whole * bytes);
            }
            tracker.forget();
            prop_assert_eq!(tracker.bytes() + tracker.whole_bytes(), 0);
            prop_assert_eq!(tracker.inflate(region, |_| ()), region.len);
        }
    }

    #[test]
    fn a_page_that_came_back_makes_its_huge_page_whole_again() {
        let mut memory = [0; 17];
        let region = Span::new(4 << 20, 4 << 20);
        let mut tracker =
            PartialHugePages::new(region, 2 << 20, &mut memory[..]).map_err(|error| {
                assert_eq!(
                    error,
                    BadRegion::Room {
                        words: 17,
                        needed: 18
                    }
                )
            });
        assert!(tracker.is_err());
        let mut memory = [0; 18];
        tracker = PartialHugePages::new(region, 2 << 20, &mut memory[..]).map_err(|_| ());
        let mut tracker = tracker.unwrap();
        let mut whole = Vec::new();
        tracker.inflate(Span::new(4 << 20, 4 << 20), |run| whole.push(run));
        assert_eq!(whole, [region], "two neighbours are one run");
        let page = Span::new((6 << 20) + 0x5000, 0x1000);
        assert_eq!(tracker.deflate(page), 0x1000);
        assert_eq!(tracker.deflate(page), 0, "it is not in the balloon");
        assert_eq!(tracker.whole_bytes(), 2 << 20);
        whole.clear();
        tracker.inflate(page, |run| whole.push(run));
        assert_eq!(whole, [Span::new(6 << 20, 2 << 20)]);
    }

    #[test]
    fn parts_of_pages_and_other_addresses_change_nothing() {
        let mut memory = [0; 9];
        let region = Span::new(2 << 20, 2 << 20);
        let mut tracker = PartialHugePages::new(region, 2 << 20, &mut memory).unwrap();
        for run in [
            Span::new(0, 2 << 20),
            Span::new(4 << 20, u64::MAX),
            Span::new((2 << 20) + 1, 0x1ffe),
            Span::new(2 << 20, 0),
        ] {
            assert_eq!(tracker.inflate(run, |_| panic!("nothing is whole")), 0);
            assert_eq!(tracker.deflate(run), 0);
        }
        assert_eq!(tracker.inflate(Span::new(0, u64::MAX), |_| ()), 2 << 20);
    }

    #[test]
    fn regions_that_are_not_huge_pages_are_refused() {
        let refused = |region, huge| PartialHugePages::new(region, huge, &mut [0; 64]).unwrap_err();
        let region = Span::new(0x1000, 2 << 20);
        assert_eq!(
            refused(region, 2 << 20),
            BadRegion::NotPages {
                region,
                huge: 2 << 20
            }
        );
        assert_eq!(refused(region, 4096), BadRegion::Size { huge: 4096 });
        assert_eq!(refused(region, 0), BadRegion::Size { huge: 0 });
        let empty = Span::new(0, 0);
        assert_eq!(
            refused(empty, 2 << 20),
            BadRegion::NotPages {
                region: empty,
                huge: 2 << 20
            }
        );
    }
}
