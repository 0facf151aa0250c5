//! Huge pages of the host that are only partly in the balloon, remembered until they are whole.
//!
//! A guest gives 4 KiB here and 64 KiB there; a host whose memory is huge pages gets nothing back
//! before all of one is in the balloon (discarding a part of a transparent huge page frees nothing, and
//! of a hugetlb page neither). So each page of 4 KiB has a bit, set while it is in the balloon, and each
//! huge page a count of those bits. No other state is needed, whatever the order of inflates and
//! deflates: a part of a discarded page that is deflated and inflated again makes the page whole again.
//! The memory is set aside at the start, so no guest can force more: for huge pages of 2 MiB it is 36
//! MiB for a terabyte. A sparse table would need as much under a driver that touches every huge page
//! once.
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

use core::ops::Range;

use runs::{GuestAddr, Joiner, Span, bitmap};

use crate::source::{WIRE_PAGE, WIRE_SHIFT};

/// Bits of a word.
const WORD: u64 = u64::BITS as u64;
/// Bytes that a word stands for.
const WORD_BYTES: u64 = WORD * WIRE_PAGE;

/// The bits of a stretch in a word's 64 pages: `len` bytes, at least a page, from `offset` on.
#[inline]
const fn bits_of(offset: u64, len: u64) -> u64 {
    (u64::MAX >> (WORD - len / WIRE_PAGE)) << (offset / WIRE_PAGE)
}

/// Ballooned pages of a region of the guest's memory, by pages of 4 KiB and by huge pages. Runs are guest
/// addresses.
#[derive(Debug)]
pub struct PartialHugePages<'a, A = GuestAddr> {
    region: Span<A>,
    /// log2 of the pages of 4 KiB in a huge page.
    order: u32,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRegion {
    /// Huge pages are powers of two above 4 KiB.
    #[error("huge pages of {huge} bytes: no power of two above 4096")]
    Size {
        /// The size asked for.
        huge: u64,
    },
    /// The region is empty, wraps around, or is not made of whole huge pages.
    #[error("the region {region} is not made of pages of {huge} bytes")]
    NotPages {
        /// The region.
        region: Span<GuestAddr>,
        /// Bytes of a huge page.
        huge: u64,
    },
    /// The memory to remember in is too small.
    #[error("{words} words to remember in, {needed} are needed")]
    Room {
        /// Its words.
        words: usize,
        /// Words needed.
        needed: u64,
    },
}

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
    pub fn new(
        region: Span<GuestAddr>,
        huge: u64,
        memory: &'a mut [u64],
    ) -> Result<Self, BadRegion> {
        if !huge.is_power_of_two() || huge <= WIRE_PAGE {
            return Err(BadRegion::Size { huge });
        }
        if Span::<GuestAddr>::checked(region.start, region.len).is_none()
            || !region.is_aligned(huge)
        {
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
            order: huge.ilog2() - WIRE_SHIFT,
            bits,
            counts,
            pages: 0,
            whole: 0,
        })
    }
}

impl<'a, A> PartialHugePages<'a, A> {
    /// One whose memory and [`totals`](Self::totals) have been kept since it was made for the same
    /// region.
    #[cfg(feature = "device")]
    pub(crate) fn again(
        region: Span<A>,
        huge: u64,
        memory: &'a mut [u64],
        (pages, whole): (u64, u64),
    ) -> Self {
        let counts = usize::try_from(region.len / huge).unwrap_or(0);
        let (bits, counts) = memory.split_at_mut(memory.len().saturating_sub(counts));
        Self {
            region,
            order: huge.ilog2().saturating_sub(WIRE_SHIFT),
            bits,
            counts,
            pages,
            whole,
        }
    }

    /// Pages of 4 KiB in the balloon, and whole huge pages.
    #[cfg(feature = "device")]
    pub(crate) const fn totals(&self) -> (u64, u64) {
        (self.pages, self.whole)
    }

    /// Bytes in the balloon.
    pub const fn bytes(&self) -> u64 {
        self.pages * WIRE_PAGE
    }

    /// Bytes in the balloon that lie in whole huge pages. The difference to [`bytes`](Self::bytes) waits
    /// for the rest of its huge pages.
    pub const fn whole_bytes(&self) -> u64 {
        (self.whole << self.order) * WIRE_PAGE
    }

    /// The guest has given `run`. Hands on, merged and in order, the huge pages that it touches and that
    /// are whole now. Returns the bytes that were not in the balloon before. Addresses outside the
    /// region are left out, as are parts of pages of 4 KiB.
    pub fn inflate(&mut self, run: Span<A>, whole: impl FnMut(Span<A>)) -> u64 {
        self.inflate_all([run], whole)
    }

    /// As [`inflate`](Self::inflate) with each of these runs, which ascend, in steps by words instead of
    /// runs. A huge page that several of them touch is handed on once, and neighbours are merged.
    pub fn inflate_all(
        &mut self,
        runs: impl IntoIterator<Item = Span<A>>,
        mut whole: impl FnMut(Span<A>),
    ) -> u64 {
        let mut joiner = Joiner::new();
        let mut next = 0;
        let bytes = self.change::<true>(runs, |this, nr| {
            // Several words of it, or runs, may have found it whole.
            if nr >= next {
                next = nr + 1;
                let (start, len) = (nr << this.order, 1 << this.order);
                let huge = Span::new(this.region.start + start * WIRE_PAGE, len * WIRE_PAGE);
                if let Some(run) = joiner.push(huge) {
                    whole(run);
                }
            }
        });
        if let Some(run) = joiner.finish() {
            whole(run);
        }
        bytes
    }

    /// The guest takes `run` back. Returns the bytes that were in the balloon. Addresses outside
    /// the region are left out.
    pub fn deflate(&mut self, run: Span<A>) -> u64 {
        self.deflate_all([run])
    }

    /// As [`deflate`](Self::deflate) with each of these runs, in steps by words instead of runs.
    pub fn deflate_all(&mut self, runs: impl IntoIterator<Item = Span<A>>) -> u64 {
        self.change::<false>(runs, |_, _| ())
    }

    /// Nothing is in the balloon any more, as far as this remembers: after a reset, or where parts must
    /// not be remembered. Takes a step for each word.
    pub fn forget(&mut self) {
        self.bits.fill(0);
        self.counts.fill(0);
        self.pages = 0;
        self.whole = 0;
    }

    /// Sets or clears the bits of these runs. Calls `whole` with the numbers of the huge pages that
    /// were touched and are whole then, some of them more than once. Returns the bytes that changed.
    fn change<const SET: bool>(
        &mut self,
        runs: impl IntoIterator<Item = Span<A>>,
        mut whole: impl FnMut(&Self, u64),
    ) -> u64 {
        let mut changed = 0;
        // A word that lies in one huge page, and its bits gathered from the runs that lie in it: 64 pages
        // from an offset into the region on.
        let (mut at, mut mask) = (0, 0);
        for run in runs {
            let offset = run.start.wrapping_sub(self.region.start);
            let inside = offset.wrapping_sub(at);
            if mask != 0 && inside < WORD_BYTES && run.is_aligned(WIRE_PAGE) {
                // Not the run of no bytes either.
                if run.len.wrapping_sub(1) < WORD_BYTES - inside {
                    mask |= bits_of(inside, run.len);
                    continue;
                }
            }
            let Some(pages) = self.pages_of(&run) else {
                continue;
            };
            if mask != 0 {
                changed += self.change_word::<SET>(at, mask, &mut whole);
                mask = 0;
            }
            let count = pages.end - pages.start;
            if self.order >= WORD.ilog2() && pages.start % WORD + count <= WORD {
                at = (pages.start - pages.start % WORD) * WIRE_PAGE;
                mask = bits_of(pages.start * WIRE_PAGE - at, count * WIRE_PAGE);
            } else {
                changed += self.change_pages::<SET>(pages, &mut whole);
            }
        }
        if mask != 0 {
            changed += self.change_word::<SET>(at, mask, &mut whole);
        }
        changed * WIRE_PAGE
    }

    /// The pages of 4 KiB that lie in the run and in the region, by their bits; at least one.
    #[inline]
    fn pages_of(&self, run: &Span<A>) -> Option<Range<u64>> {
        let inside = if self.region.covers(run) {
            *run
        } else {
            self.region.intersection(run)?
        };
        let offset = inside.start - self.region.start;
        let first = offset.div_ceil(WIRE_PAGE);
        let end = (offset + inside.len) / WIRE_PAGE;
        (first < end).then_some(first..end)
    }

    /// Changes these bits, at least one, of the word at this offset, which lies in one huge page.
    #[inline]
    fn change_word<const SET: bool>(
        &mut self,
        at: u64,
        mask: u64,
        whole: &mut impl FnMut(&Self, u64),
    ) -> u64 {
        let Some(bits) = self.bits.get_mut((at / WORD_BYTES) as usize) else {
            return 0;
        };
        let before = *bits;
        *bits = if SET { before | mask } else { before & !mask };
        let changed = u64::from((before ^ *bits).count_ones());
        self.count::<SET>(at >> (self.order + WIRE_SHIFT), changed, whole);
        changed
    }

    /// Changes these pages, huge page by huge page.
    fn change_pages<const SET: bool>(
        &mut self,
        pages: Range<u64>,
        whole: &mut impl FnMut(&Self, u64),
    ) -> u64 {
        let mut changed = 0;
        let mut at = pages.start;
        while at < pages.end {
            let nr = at >> self.order;
            let until = ((nr + 1) << self.order).min(pages.end);
            let part = if SET {
                bitmap::set(self.bits, at..until)
            } else {
                bitmap::clear(self.bits, at..until)
            };
            self.count::<SET>(nr, part, whole);
            changed += part;
            at = until;
        }
        changed
    }

    /// So many bits of this huge page, of which at least one was named, were set or cleared.
    #[inline]
    fn count<const SET: bool>(
        &mut self,
        nr: u64,
        changed: u64,
        whole: &mut impl FnMut(&Self, u64),
    ) {
        let Some(count) = self.counts.get_mut(nr as usize) else {
            return;
        };
        let full = 1 << self.order;
        if SET {
            *count += changed;
            self.pages += changed;
            if *count == full {
                self.whole += u64::from(changed > 0);
                whole(self, nr);
            }
        } else {
            self.whole -= u64::from(*count == full);
            *count -= changed;
            self.pages -= changed;
        }
    }
}

#[cfg(test)]
mod tests;
