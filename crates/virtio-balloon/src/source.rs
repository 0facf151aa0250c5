//! Sorted runs on their way into messages.
//!
//! A [`MessageSource`] stands in front of the runs that a driver wants to tell: the encoders take from it as
//! much as a message holds, and go on with the rest of a run in the next one. It looks at each run once:
//! runs ascend, do not overlap, and are made of whole pages of the guest. A run that does not comply is a
//! mistake of the driver's own and ends the encoding; a device checks for itself.

use runs::{GuestAddr, Span, bitmap};

/// Bytes for which a page number stands on the wire, whatever the size of the guest's pages (VIRTIO
/// 1.3, 5.5.6, "historical, and independent of the guest page size").
pub const WIRE_PAGE: u64 = 4096;

/// Bits of an address below the page number.
pub(crate) const WIRE_SHIFT: u32 = WIRE_PAGE.trailing_zeros();

/// The size of the guest's own pages: those that it gives to the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestPage(u32);

impl GuestPage {
    /// Pages of 4 KiB.
    pub const SIZE_4K: Self = Self(12);
    /// Pages of 16 KiB.
    pub const SIZE_16K: Self = Self(14);
    /// Pages of 64 KiB.
    pub const SIZE_64K: Self = Self(16);

    /// The size as a power of two.
    pub const fn shift(self) -> u32 {
        self.0
    }

    /// Bytes of a page.
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// The stretches whose bits are set, bit *n* standing for the page at `base` + *n* pages. Bits
    /// beyond 2^64 are left out.
    pub fn stretches(self, base: u64, words: &[u64]) -> Stretches<'_> {
        Stretches {
            bits: bitmap::runs(words),
            base,
            page: self,
            rest: &[],
        }
    }

    /// The stretches of several bitmaps, each as [`stretches`](Self::stretches) with its base, ascending.
    pub fn stretches_of<'a>(self, bitmaps: &'a [(u64, &'a [u64])]) -> Stretches<'a> {
        let mut stretches = self.stretches(0, &[]);
        stretches.rest = bitmaps;
        stretches.next_bitmap();
        stretches
    }
}

/// Iterator of [`GuestPage::stretches`] and [`GuestPage::stretches_of`].
#[derive(Clone, Debug)]
pub struct Stretches<'a> {
    bits: bitmap::Runs<'a>,
    base: u64,
    page: GuestPage,
    /// The bitmaps behind this one.
    rest: &'a [(u64, &'a [u64])],
}

impl Stretches<'_> {
    /// Goes on to the next bitmap, if there is one.
    fn next_bitmap(&mut self) -> bool {
        let Some(((base, words), rest)) = self.rest.split_first() else {
            return false;
        };
        (self.base, self.bits, self.rest) = (*base, bitmap::runs(words), rest);
        true
    }
}

impl Iterator for Stretches<'_> {
    type Item = Span<GuestAddr>;

    #[inline]
    fn next(&mut self) -> Option<Span<GuestAddr>> {
        let bytes = self.page.bytes();
        loop {
            let Some(run) = self.bits.next() else {
                match self.next_bitmap() {
                    true => continue,
                    false => return None,
                }
            };
            let start = run.start.checked_mul(bytes);
            let start = start.and_then(|start| start.checked_add(self.base));
            let len = (run.end - run.start).checked_mul(bytes);
            if let Some(span) = start
                .zip(len)
                .and_then(|(start, len)| Span::checked(start, len))
            {
                return Some(span);
            }
        }
    }
}

/// A bitmap whose words are 64 pages at multiples of 64 pages, from the first bit on that is not encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a> {
    pub(crate) words: &'a [u64],
    pub(crate) base: u64,
    pub(crate) bit: u64,
}

/// Runs to be encoded, front to back.
#[derive(Clone, Debug)]
pub struct MessageSource<I> {
    runs: I,
    page: GuestPage,
    /// Rest of the run at the front; empty before the first.
    front: Span<GuestAddr>,
    /// The last byte of the run that was taken last.
    last: Option<u64>,
}

impl<I: Iterator<Item = Span<GuestAddr>>> MessageSource<I> {
    /// These runs, ascending and disjoint, of whole pages of this size. Runs that are merged (see
    /// [`runs::Joiner`]) make the shortest messages.
    pub fn new(runs: impl IntoIterator<IntoIter = I>, page: GuestPage) -> Self {
        Self {
            runs: runs.into_iter(),
            page,
            front: Span::new(0, 0),
            last: None,
        }
    }

    /// The size of the guest's pages.
    pub(crate) const fn page(&self) -> GuestPage {
        self.page
    }

    /// Returns the rest of the run at the front, if there is a rest at all. Never empty.
    #[inline]
    pub(crate) fn front(&mut self) -> Result<Option<Span<GuestAddr>>, EncodeError> {
        while self.front.is_empty() {
            let Some(run) = self.runs.next() else {
                return Ok(None);
            };
            if run.is_empty() {
                continue;
            }
            if Span::<GuestAddr>::checked(run.start, run.len).is_none()
                || !run.is_aligned(self.page.bytes())
            {
                let page = self.page.bytes();
                return Err(EncodeError::NotPages { run, page });
            }
            if let Some(last) = self.last.filter(|last| *last >= run.start) {
                return Err(EncodeError::NotAscending { run, last });
            }
            self.last = Some(run.last());
            self.front = run;
        }
        Ok(Some(self.front))
    }

    /// The first `len` bytes of the front have been encoded.
    #[inline]
    pub(crate) fn advance(&mut self, len: u64) {
        let len = len.min(self.front.len);
        self.front = Span::new(self.front.start.wrapping_add(len), self.front.len - len);
    }
}

impl<'a> MessageSource<Stretches<'a>> {
    /// The bitmap itself, the first that is not encoded, where its bits stand for pages of the source and
    /// its words for 64 of them at a multiple of 64.
    pub(crate) fn words(&self) -> Option<Words<'a>> {
        let Stretches { bits, base, .. } = &self.runs;
        let page = self.page;
        let (words, base, block) = (bits.words(), *base, 64 << page.shift());
        let end = (words.len() as u64).checked_mul(block)?.checked_add(base);
        if self.runs.page != page || base % block != 0 || end.is_none() {
            return None;
        }
        let bit = match self.front.is_empty() {
            true => bits.position(),
            false => (self.front.start - base) >> page.shift(),
        };
        Some(Words { words, base, bit })
    }

    /// All of this bitmap has been encoded. False when there is no other.
    pub(crate) fn next_bitmap(&mut self) -> bool {
        self.runs.next_bitmap()
    }

    /// All bits before this one have been encoded.
    pub(crate) fn seek(&mut self, bit: u64) {
        self.front = Span::new(0, 0);
        self.runs.bits.seek(bit);
        // The bit may lie in the run that was taken last; a bitmap ascends by itself.
        self.last = None;
    }
}

/// Why runs were not encoded. The incomplete message must not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The run is not made of whole pages of the guest, or ends beyond 2^64.
    #[error("{run} is not made of pages of {page} bytes")]
    NotPages {
        /// The run.
        run: Span<GuestAddr>,
        /// Bytes of a page.
        page: u64,
    },
    /// The run does not begin behind the one before it.
    #[error("{run} does not begin behind {last:#x}, where the run before it ends")]
    NotAscending {
        /// The run.
        run: Span<GuestAddr>,
        /// The last byte of the one before.
        last: u64,
    },
    /// The format has no number for this page.
    #[error("the page at {address:#x} has no number: the format ends at {last:#x}")]
    Beyond {
        /// The page's address.
        address: u64,
        /// The last byte that the format reaches.
        last: u64,
    },
    /// The buffer holds not even the shortest message for what comes next.
    #[error("a buffer of {bytes} bytes, and the next record needs {needed}")]
    Buffer {
        /// Its bytes.
        bytes: usize,
        /// Bytes needed.
        needed: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn runs_that_are_no_pages_or_do_not_ascend_are_refused() {
        let refused = |runs: &[Span<GuestAddr>], page| {
            let mut source = MessageSource::new(runs.iter().copied(), page);
            loop {
                match source.front() {
                    Ok(Some(run)) => source.advance(run.len),
                    Ok(None) => return None,
                    Err(error) => return Some(error),
                }
            }
        };
        let good = [
            Span::new(0x1000, 0x1000),
            Span::new(0, 0),
            Span::new(0x2000, 0x1000),
        ];
        assert_eq!(refused(&good, GuestPage::SIZE_4K), None);
        assert_eq!(
            refused(&good, GuestPage::SIZE_64K),
            Some(EncodeError::NotPages {
                run: good[0],
                page: 0x1_0000
            })
        );
        let twice = [Span::new(0x1000, 0x2000), Span::new(0x2000, 0x1000)];
        assert_eq!(
            refused(&twice, GuestPage::SIZE_4K),
            Some(EncodeError::NotAscending {
                run: twice[1],
                last: 0x2fff
            })
        );
        let wraps = [Span::new(u64::MAX - 0xfff, 0x2000)];
        assert!(refused(&wraps, GuestPage::SIZE_4K).is_some());
    }

    #[test]
    fn bits_become_stretches_and_none_wraps_around() {
        let words = [0b1011u64, 1];
        let found: Vec<_> = GuestPage::SIZE_64K.stretches(1 << 32, &words).collect();
        let at = |page: u64, pages: u64| Span::new((1 << 32) + (page << 16), pages << 16);
        assert_eq!(found, [at(0, 2), at(3, 1), at(64, 1)]);
        let top = u64::MAX - 0xffff;
        assert_eq!(GuestPage::SIZE_64K.stretches(top, &[1]).count(), 1);
        assert_eq!(GuestPage::SIZE_64K.stretches(top, &[0b10]).count(), 0);
    }
}
