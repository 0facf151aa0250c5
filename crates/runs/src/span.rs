//! Stretches of one address space and of two.

use core::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
    marker::PhantomData,
};

// Markers of address spaces, which have no values. They have all traits, so that what is generic over a space can
// derive its own.

/// Addresses that a device uses: the input of an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Iova {}

/// Physical addresses of the host, or of whatever machine runs the IOMMU: its output, and where
/// its tables lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pa {}

/// A guest's physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestAddr {}

/// Offsets in a memory object, a mapping or a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Offset {}

/// Virtual addresses of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Va {}

/// A stretch of one address space: `[start, start + len)`, in bytes.
///
/// `A` names the address space ([`Iova`], [`Pa`], [`GuestAddr`], [`Offset`], [`Va`]) and takes no room. Spans of
/// different spaces do not compare, cover or join each other:
///
/// ```compile_fail,E0308
/// use runs::{Iova, Pa, Span};
///
/// fn zero(memory: Span<Pa>) {}
///
/// zero(Span::<Iova>::new(0x20_0000, 0x1000));
/// ```
///
/// A span may end exactly at 2^64, so the inclusive [`last`](Span::last) is the end to compute
/// with; [`checked`](Span::checked) refuses one that would wrap around. In memory it is two words, `start` and then `len`.
#[repr(C)]
pub struct Span<A> {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// `Send` and `Sync` whatever `A` is.
    space: PhantomData<fn() -> A>,
}

impl<A> Span<A> {
    /// The span `[start, start + len)`, unchecked: see [`checked`](Self::checked) for input.
    #[inline]
    pub const fn new(start: u64, len: u64) -> Self {
        Self {
            start,
            len,
            space: PhantomData,
        }
    }

    /// The span `[start, start + len)`, or `None` when it is empty or ends beyond 2^64.
    #[inline]
    pub const fn checked(start: u64, len: u64) -> Option<Self> {
        if len == 0 || start.checked_add(len - 1).is_none() {
            return None;
        }
        Some(Self::new(start, len))
    }

    /// The span from `first` to `last`, both included; `None` when `last < first` or when it is
    /// the whole 64-bit space, whose length has no representation.
    #[inline]
    pub const fn inclusive(first: u64, last: u64) -> Option<Self> {
        match last.checked_sub(first) {
            Some(u64::MAX) | None => None,
            Some(n) => Some(Self::new(first, n + 1)),
        }
    }

    /// The same numbers in another address space.
    ///
    /// Only for a place where one space is the other by definition: an identity mapping, a guest's physical
    /// addresses as iovas, offsets in an object that is the whole of the other space.
    #[inline]
    pub const fn cast<B>(self) -> Span<B> {
        Span::new(self.start, self.len)
    }

    /// True for a span of no bytes.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The last byte. Of an empty span: the byte before `start`.
    #[inline]
    pub const fn last(&self) -> u64 {
        self.start.wrapping_add(self.len).wrapping_sub(1)
    }

    /// True when `address` lies inside.
    #[inline]
    pub const fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.start) < self.len
    }

    /// True when every byte of `other` lies inside; an empty `other` lies nowhere.
    #[inline]
    pub const fn covers(&self, other: &Self) -> bool {
        !other.is_empty()
            && self.contains(other.start)
            && other.len <= self.len - other.start.wrapping_sub(self.start)
    }

    /// The bytes that both have, if any.
    #[inline]
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.is_empty() || other.is_empty() {
            return None;
        }
        Self::inclusive(self.start.max(other.start), self.last().min(other.last()))
    }

    /// True when at least one byte is in both.
    #[inline]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.intersection(other).is_some()
    }

    /// True when `start` and `len` are multiples of `size`, a power of two.
    #[inline]
    pub const fn is_aligned(&self, size: u64) -> bool {
        (self.start | self.len) & size.wrapping_sub(1) == 0
    }
}

// Manual implementations, since derived ones would require the same of `A`.

impl<A> Clone for Span<A> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Span<A> {}

impl<A> Default for Span<A> {
    #[inline]
    fn default() -> Self {
        Self::new(0, 0)
    }
}

impl<A> PartialEq for Span<A> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.start == other.start && self.len == other.len
    }
}

impl<A> Eq for Span<A> {}

impl<A> PartialOrd for Span<A> {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Order by start, then by length.
impl<A> Ord for Span<A> {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        (self.start, self.len).cmp(&(other.start, other.len))
    }
}

impl<A> Hash for Span<A> {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.start, self.len).hash(state);
    }
}

impl<A> fmt::Debug for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// `0x200000+0x1000`: start and length, both hexadecimal.
impl<A> fmt::Display for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.start, self.len)
    }
}

/// A stretch that is contiguous in both address spaces: the device's `[iova, iova + len)` is
/// `[pa, pa + len)` in physical memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Run {
    /// First address as the device sees it.
    pub iova: u64,
    /// Physical (output) address of the first byte.
    pub pa: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Run {
    /// The run that maps device addresses from `iova` on to `memory`.
    #[inline]
    pub const fn new(iova: u64, memory: Span<Pa>) -> Self {
        Self {
            iova,
            pa: memory.start,
            len: memory.len,
        }
    }

    /// The part at these addresses of the device, which lie in the run.
    #[inline]
    pub const fn part(&self, input: Span<Iova>) -> Self {
        let rest = self.skip(input.start.wrapping_sub(self.iova));
        Self {
            len: input.len,
            ..rest
        }
    }

    /// The rest after the first `bytes` bytes.
    #[inline]
    pub const fn skip(&self, bytes: u64) -> Self {
        Self {
            iova: self.iova.wrapping_add(bytes),
            pa: self.pa.wrapping_add(bytes),
            len: self.len.saturating_sub(bytes),
        }
    }

    /// The device's side.
    #[inline]
    pub const fn input(&self) -> Span<Iova> {
        Span::new(self.iova, self.len)
    }

    /// The memory's side.
    #[inline]
    pub const fn output(&self) -> Span<Pa> {
        Span::new(self.pa, self.len)
    }

    /// True when `next` goes on where this run ends, in both address spaces.
    #[inline]
    pub const fn is_followed_by(&self, next: &Run) -> bool {
        self.iova.wrapping_add(self.len) == next.iova
            && self.pa.wrapping_add(self.len) == next.pa
            // Nothing follows the last byte of an address space.
            && next.iova != 0
            && next.pa != 0
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// `0x200000 -> 0x40000000 +0x1000`: iova, physical address, length, all hexadecimal.
impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} -> {:#x} +{:#x}", self.iova, self.pa, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A marker that has none of the traits itself.
    const _: () = {
        const fn has_all<
            T: Copy + Ord + Hash + Default + fmt::Debug + fmt::Display + Send + Sync,
        >() {
        }
        has_all::<Span<core::cell::Cell<*const str>>>();
        assert!(size_of::<Span<Iova>>() == 16);
    };

    #[test]
    fn a_span_may_end_at_the_top_of_the_address_space() {
        let top = Span::<Iova>::checked(u64::MAX - 0xfff, 0x1000).unwrap();
        assert_eq!(top.last(), u64::MAX);
        assert!(top.contains(u64::MAX));
        assert!(!top.contains(0));
        assert_eq!(Span::<Iova>::checked(u64::MAX - 0xfff, 0x1001), None);
        assert_eq!(Span::<Iova>::checked(5, 0), None);
        assert_eq!(Span::<Iova>::inclusive(0, u64::MAX), None);
    }

    /// [`Span::new`] checks nothing.
    #[test]
    fn a_span_that_wraps_around_covers_what_it_contains() {
        let span = Span::<Iova>::new(u64::MAX - 0xfff, 0x2000);
        for (other, covers) in [
            (Span::new(0, 0x1000), true),
            (Span::new(0, 0x1001), false),
            (Span::new(u64::MAX, 1), true),
            (Span::new(u64::MAX, u64::MAX), false),
            (Span::new(0x1000, 1), false),
            (span, true),
        ] {
            assert_eq!(span.covers(&other), covers, "{other}");
        }
    }

    #[test]
    fn covering_and_overlap_agree_with_counting_bytes() {
        for a in 0..6u64 {
            for la in 0..5 {
                for b in 0..6u64 {
                    for lb in 0..5 {
                        let (x, y) = (Span::<Iova>::new(a, la), Span::new(b, lb));
                        let common = (0..12).filter(|&i| x.contains(i) && y.contains(i)).count();
                        assert_eq!(x.overlaps(&y), common > 0, "{x} {y}");
                        assert_eq!(x.intersection(&y).map_or(0, |s| s.len as usize), common);
                        assert_eq!(x.covers(&y), lb > 0 && common as u64 == lb, "{x} {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_run_is_followed_only_when_both_sides_go_on() {
        let run = Run::new(0x1000, Span::new(0x9000, 0x2000));
        assert!(run.is_followed_by(&Run::new(0x3000, Span::new(0xb000, 0x1000))));
        assert!(!run.is_followed_by(&Run::new(0x3000, Span::new(0xc000, 0x1000))));
        assert!(!run.is_followed_by(&Run::new(0x4000, Span::new(0xb000, 0x1000))));
        let top = Run::new(u64::MAX - 0xfff, Span::new(0x9000, 0x1000));
        assert!(!top.is_followed_by(&Run::new(0, Span::new(0xa000, 0x1000))));
    }
}
