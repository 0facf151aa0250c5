//! Memory that the device has written to, not acknowledged yet.
//!
//! ```text
//! Table::harvest ──▶ Pending ──flush_with(unit)──▶ Shown ──▶ acknowledge, or put back
//! ```
//!
//! [`Table::harvest`](crate::Table::harvest) moves dirty bits out of the table into a bitmap. Until the unit
//! has invalidated what it has cached, it goes on writing to those pages without setting the bit anew; a copy
//! made before the flush would miss these writes. So the bits can be looked at only through
//! [`PendingHarvest`], which only a flush gives. Only acknowledging clears a bit. Bits that are put back stay
//! pending and are shown again after the next flush: they do not return into the table, since that would cost
//! a store for each entry, and another flush to get them out again.
//!
//! ```
//! # use iopt::{HeapTables, Pending, Prot, Table, TableOps as _, format::VtdSs};
//! # use runs::Span;
//! # let memory = HeapTables::with_tables(16)?;
//! # let mut table = Table::new(VtdSs::new(4)?, &memory)?;
//! # table.map(0, &[Span::new(0x10_0000, 64 << 10)], Prot::RW)?;
//! table.track_dirty(true)?;
//! let all = Span::new(0, 64 << 10);
//! let mut pending = Pending::new([0u64; 1], all, 4096)?;
//! # table.set_dirty(Span::new(0x3000, 0x2000))?;
//! table.harvest(all, &mut pending)?;
//! let shown = pending.flush_with(|what| {
//!     assert_eq!(what.ranges(), [Span::new(0x3000, 0x2000)]);
//!     Ok::<_, std::io::Error>(()) // here the unit invalidates, and is waited for
//! })?;
//! assert_eq!(shown.runs().collect::<Vec<_>>(), [Span::new(0x3000, 0x2000)]);
//! shown.acknowledge(); // these pages were copied
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! Before the flush there is nothing to look at:
//!
//! ```compile_fail,E0599
//! # use iopt::Pending;
//! # use runs::Span;
//! let pending = Pending::new([0u64; 1], Span::new(0, 4096), 4096).unwrap();
//! pending.runs();
//! ```

use core::mem;

use runs::{Iova, Span, bitmap};

use crate::gather::{Gather, Invalidation};

/// A bitmap of what was harvested from tables, with what must be flushed before it may be looked
/// at.
///
/// The words are the caller's: an array, a slice, a vector. They must be the same at each call of
/// `as_ref` and `as_mut`.
#[derive(Debug)]
#[must_use = "what was harvested into it is dirty memory that has not been copied"]
pub struct Pending<W> {
    words: W,
    span: Span<Iova>,
    /// Bytes of a bit, as a power of two.
    log2: u32,
    gather: Gather,
}

/// Why there is no such bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PendingError {
    /// It stands for no bytes, or for bytes beyond 2^64.
    #[error("{0} has no bytes or ends beyond 2^64")]
    Span(Span<Iova>),
    /// The bytes of a bit are not a power of two.
    #[error("a bit of {0:#x} bytes: not a power of two")]
    Granularity(u64),
    /// Too few words for its bits.
    #[error("a bitmap of {given} words where {needed} are needed")]
    Words {
        /// Words that are needed.
        needed: u64,
        /// Words that were given.
        given: usize,
    },
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> Pending<W> {
    /// A bitmap in `words` that stands for the device addresses `span`, a bit for each
    /// `granularity` bytes, a power of two. Bits that are set already are pending: what an earlier
    /// one left.
    ///
    /// A leaf that is dirty sets every bit that it has a byte in: all of its bits where the
    /// granularity divides the leaf, and one bit for several leaves where it is coarser. Bits stand
    /// for multiples of the granularity, so the first and the last may reach over the span.
    pub fn new(words: W, span: Span<Iova>, granularity: u64) -> Result<Self, PendingError> {
        if Span::<Iova>::checked(span.start, span.len).is_none() {
            return Err(PendingError::Span(span));
        }
        if !granularity.is_power_of_two() {
            return Err(PendingError::Granularity(granularity));
        }
        let pending = Self {
            words,
            span,
            log2: granularity.trailing_zeros(),
            gather: Gather::new(),
        };
        let given = pending.words.as_ref().len();
        let needed = pending.bit(span.last()) / 64 + 1;
        if (given as u64) < needed {
            return Err(PendingError::Words { needed, given });
        }
        Ok(pending)
    }

    /// The device addresses that it stands for.
    pub fn span(&self) -> Span<Iova> {
        self.span
    }

    /// Bytes of a bit.
    pub fn granularity(&self) -> u64 {
        1 << self.log2
    }

    /// Has `work` harvest into the same bitmap by borrowed words, for callees without a type parameter.
    pub fn with_words<T>(&mut self, work: impl FnOnce(&mut Pending<&mut [u64]>) -> T) -> T {
        /// The harvest stays to be invalidated when `work` panics, too.
        struct Lent<'a> {
            pending: Pending<&'a mut [u64]>,
            gather: &'a mut Gather,
        }
        impl Drop for Lent<'_> {
            fn drop(&mut self) {
                mem::swap(&mut self.pending.gather, self.gather);
            }
        }
        let mut lent = Lent {
            pending: Pending {
                words: self.words.as_mut(),
                span: self.span,
                log2: self.log2,
                gather: mem::take(&mut self.gather),
            },
            gather: &mut self.gather,
        };
        work(&mut lent.pending)
    }

    /// Invalidation that the unit has to do before the bits can be shown.
    pub fn invalidation(&self) -> &Invalidation {
        self.gather.invalidation()
    }

    /// Has `flush` invalidate in every unit that walks the tables, and shows the bits. When `flush`
    /// fails everything stays pending, to be flushed again. `flush` is not called when there is
    /// nothing to invalidate.
    pub fn flush_with<E>(
        &mut self,
        flush: impl FnOnce(&Invalidation) -> Result<(), E>,
    ) -> Result<PendingHarvest<'_, W>, E> {
        // A harvest unlinks no table: there is none to give back.
        let _flushed = self.gather.flush_with(flush)?;
        Ok(PendingHarvest { pending: self })
    }

    /// Notes that `range` was written to, by a writer that needs no flush: a processor, or a device
    /// whose writes came out in an unmap that is flushed. Addresses outside the bitmap are ignored.
    pub fn mark(&mut self, range: Span<Iova>) {
        self.set(range);
    }

    /// Notes leaves at these levels that were dirty and are clean now.
    #[inline]
    pub(crate) fn harvested(&mut self, leaves: Span<Iova>, leaf_levels: u32) {
        self.set(leaves);
        self.gather.add(leaves, leaf_levels);
    }

    fn set(&mut self, range: Span<Iova>) {
        if let Some(range) = self.span.intersection(&range) {
            let bits = self.bit(range.start)..self.bit(range.last()) + 1;
            bitmap::set(self.words.as_mut(), bits);
        }
    }

    /// The bit that stands for `address`, which lies in the span.
    fn bit(&self, address: u64) -> u64 {
        (address >> self.log2) - (self.span.start >> self.log2)
    }

    /// Addresses in the span that the bits `[first, last]` stand for.
    fn addresses(&self, first: u64, last: u64) -> Option<Span<Iova>> {
        let base = self.span.start >> self.log2;
        // Bits behind the span's last one belong to no page.
        let last = last.min(self.bit(self.span.last()));
        if first > last {
            return None;
        }
        let start = (base + first) << self.log2;
        let end = (base + last) << self.log2 | (self.granularity() - 1);
        Span::inclusive(start.max(self.span.start), end.min(self.span.last()))
    }
}

/// Pending bits, after the flush: their pages can be copied now.
///
/// Bits that are not acknowledged stay pending, also when this is dropped.
#[derive(Debug)]
#[must_use = "what is not acknowledged stays pending"]
pub struct PendingHarvest<'p, W> {
    pending: &'p mut Pending<W>,
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> PendingHarvest<'_, W> {
    /// The device addresses that were written to, as long runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = Span<Iova>> + '_ {
        bitmap::runs(self.pending.words.as_ref())
            .filter_map(|bits| self.pending.addresses(bits.start, bits.end - 1))
    }

    /// The bits: bit 0 of word 0 stands for the granule in which the span begins.
    pub fn words(&self) -> &[u64] {
        self.pending.words.as_ref()
    }

    /// True when nothing was written to.
    pub fn is_empty(&self) -> bool {
        self.runs().next().is_none()
    }

    /// Everything that was shown is taken care of.
    pub fn acknowledge(self) {
        self.pending.words.as_mut().fill(0);
    }

    /// Acknowledges `range`; a bit that stands for more than that stays.
    pub fn acknowledge_part(&mut self, range: Span<Iova>) {
        let Some(inside) = self.pending.span.intersection(&range) else {
            return;
        };
        let (mut first, mut end) = (
            self.pending.bit(inside.start),
            self.pending.bit(inside.last()) + 1,
        );
        let whole = |bit| {
            let addresses = self.pending.addresses(bit, bit);
            addresses.is_some_and(|addresses| range.covers(&addresses))
        };
        first += u64::from(!whole(first));
        end -= u64::from(!whole(end - 1));
        bitmap::clear(self.pending.words.as_mut(), first..end);
    }

    /// Nothing is taken care of: all of it is shown again after the next flush, with what is
    /// harvested until then.
    pub fn put_back(self) {}
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    fn shown<W: AsRef<[u64]> + AsMut<[u64]>>(pending: &mut Pending<W>) -> Vec<Span<Iova>> {
        let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
        shown.runs().collect()
    }

    #[test]
    fn a_leaf_sets_all_its_bits_at_any_granularity() {
        let span = Span::new(0x40_0000, 0x20_0000);
        for log2 in 8..=21 {
            let mut pending = Pending::new(vec![0; 128], span, 1 << log2).unwrap();
            pending.harvested(Span::new(0x41_0000, 0x1_0000), 1);
            let size = 1u64 << log2;
            let start = 0x41_0000 & !(size - 1);
            let end = 0x42_0000u64.next_multiple_of(size);
            assert_eq!(shown(&mut pending), [Span::new(start, end - start)]);
            let bits: u32 = pending.words.iter().map(|word| word.count_ones()).sum();
            assert_eq!(u64::from(bits), (end - start) >> log2);
        }
    }

    #[test]
    fn bits_at_the_top_of_the_address_space_and_beside_the_span_are_right() {
        let top = Span::new(0u64.wrapping_sub(0x3800), 0x3800);
        let mut pending = Pending::new([0; 1], top, 0x1000).unwrap();
        pending.mark(Span::new(top.start, 1));
        pending.mark(Span::new(u64::MAX, 1));
        pending.mark(Span::new(0, 0x1000));
        pending.mark(Span::new(top.start - 0x1000, 0x1000));
        let first = Span::new(top.start, 0x800);
        let last = Span::new(0u64.wrapping_sub(0x1000), 0x1000);
        assert_eq!(shown(&mut pending), [first, last]);
        // Garbage behind the last bit stands for nothing.
        let mut pending = Pending::new([u64::MAX; 2], top, 0x1000).unwrap();
        assert_eq!(shown(&mut pending), [top]);
    }

    #[test]
    fn what_is_not_acknowledged_stays() {
        let span = Span::new(0x1000, 0x10_0000);
        let mut pending = Pending::new([0; 4], span, 0x1000).unwrap();
        pending.mark(Span::new(0x2000, 0x4000));
        pending.flush_with(|_| Ok::<_, ()>(())).unwrap().put_back();
        drop(pending.flush_with(|_| Ok::<_, ()>(())).unwrap());
        assert_eq!(shown(&mut pending), [Span::new(0x2000, 0x4000)]);
        let mut part = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
        // Half a page is not the page.
        part.acknowledge_part(Span::new(0x2800, 0x2000));
        part.acknowledge_part(Span::new(0x5100, 0x200));
        part.acknowledge_part(Span::new(0, 0x1000));
        let left = [Span::new(0x2000, 0x1000), Span::new(0x4000, 0x2000)];
        assert_eq!(part.runs().collect::<Vec<_>>(), left);
        part.acknowledge();
        assert_eq!(shown(&mut pending), []);
    }

    #[test]
    fn a_failed_flush_shows_nothing_and_loses_nothing() {
        let span = Span::new(0, 0x4000);
        let mut pending = Pending::new([0; 1], span, 0x1000).unwrap();
        pending.harvested(Span::new(0x1000, 0x1000), 1);
        assert!(pending.flush_with(|_| Err("time-out")).is_err());
        let shown = pending.flush_with(|what| {
            assert_eq!(what.ranges(), [Span::new(0x1000, 0x1000)]);
            Ok::<_, ()>(())
        });
        let runs: Vec<_> = shown.unwrap().runs().collect();
        assert_eq!(runs, [Span::new(0x1000, 0x1000)]);
        // Bits that were put back need no second flush.
        assert!(pending.flush_with(|_| Err(())).is_ok());
    }

    #[test]
    fn a_bitmap_that_cannot_be_is_refused() {
        let span = Span::new(0x3000, 65 << 12);
        let new = |words: &mut [u64], span, size| Pending::new(words, span, size).map(|_| ());
        let words = PendingError::Words {
            needed: 2,
            given: 1,
        };
        assert_eq!(new(&mut [0], span, 0x1000), Err(words));
        assert_eq!(new(&mut [0; 2], span, 0x1000), Ok(()));
        let odd = PendingError::Granularity(0x1800);
        assert_eq!(new(&mut [0; 2], span, 0x1800), Err(odd));
        let empty = Span::new(5, 0);
        let none = PendingError::Span(empty);
        assert_eq!(new(&mut [0; 2], empty, 0x1000), Err(none));
        // Unaligned ends take a bit more.
        let odd = Span::new(0x3800, 64 << 12);
        assert_eq!(new(&mut [0], odd, 0x1000), Err(words));
    }
}
