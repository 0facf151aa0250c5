//! Sets of page sizes and the choice among them.

use core::fmt;

use crate::{Pa, Span};

/// A set of page sizes, as a bitmap: bit *n* stands for pages of 2^n bytes.
///
/// The same bitmap as Linux's `pgsize_bitmap` and VFIO's `iova_pgsizes`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageSizes(u64);

impl PageSizes {
    /// No size at all.
    pub const NONE: Self = Self(0);

    /// The sizes whose bits are set.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The set with the one size 2^`log2`; empty when `log2` is over 63.
    pub const fn from_log2(log2: u32) -> Self {
        Self(if log2 < 64 { 1 << log2 } else { 0 })
    }

    /// All powers of two from 2^`first` to 2^`last`, both included.
    pub const fn from_log2_range(first: u32, last: u32) -> Self {
        let mut bits = 0;
        let mut log2 = first;
        while log2 <= last && log2 < 64 {
            bits |= 1 << log2;
            log2 += 1;
        }
        Self(bits)
    }

    /// The bitmap.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// True when it holds no size.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True when it holds pages of `size` bytes.
    #[inline]
    pub const fn contains(self, size: u64) -> bool {
        size.is_power_of_two() && self.0 & size != 0
    }

    /// The sizes that are in both.
    #[inline]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The sizes that are in one of them.
    #[inline]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The sizes up to `size` bytes.
    pub const fn up_to(self, size: u64) -> Self {
        if size == 0 {
            return Self(0);
        }
        Self(self.0 & (u64::MAX >> size.leading_zeros()))
    }

    /// The smallest size in bytes; 0 when there is none.
    #[inline]
    pub const fn smallest(self) -> u64 {
        self.0 & self.0.wrapping_neg()
    }

    /// The largest size in bytes; 0 when there is none.
    #[inline]
    pub const fn largest(self) -> u64 {
        if self.0 == 0 {
            0
        } else {
            1 << (63 - self.0.leading_zeros())
        }
    }

    /// The sizes in bytes, smallest first.
    pub fn iter(self) -> impl Iterator<Item = u64> + Clone {
        (0..64)
            .map(|n| 1u64 << n)
            .filter(move |size| self.0 & size != 0)
    }

    /// The largest size with which a mapping of `memory` from `iova` on can begin, and how many such pages in a
    /// row: as many as fit, but not past the point from which a larger size becomes possible. `None` when no size
    /// fits.
    ///
    /// Constant time, whatever the number of sizes.
    #[inline]
    pub const fn step(self, iova: u64, memory: Span<Pa>) -> Option<(u64, u64)> {
        let (pa, len) = (memory.start, memory.len);
        // A size fits when it divides both addresses and is no longer than the rest.
        let aligned = (iova | pa) & (iova | pa).wrapping_neg();
        let by_alignment = if aligned == 0 {
            u64::MAX
        } else {
            aligned | (aligned - 1)
        };
        let by_length = if len == 0 {
            0
        } else {
            u64::MAX >> len.leading_zeros()
        };
        let fitting = self.0 & by_alignment & by_length;
        if fitting == 0 {
            return None;
        }
        let shift = 63 - fitting.leading_zeros();
        let size = 1u64 << shift;

        // The next larger size helps from the first point on at which both addresses are
        // multiples of it. There is one only if they are congruent modulo that size, and of the
        // larger sizes the smallest comes first.
        let larger = self.0 & !(size | (size - 1));
        let mut bytes = len;
        if larger != 0 {
            let next = larger & larger.wrapping_neg();
            if (iova ^ pa) & (next - 1) == 0 {
                let until = next - (iova & (next - 1));
                // Worth stopping for only if one such page still fits behind that point.
                if until < len && len - until >= next {
                    bytes = until;
                }
            }
        }
        Some((size, bytes >> shift))
    }
}

impl fmt::Debug for PageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSizes({self})")
    }
}

/// `4K|2M|1G`
impl fmt::Display for PageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (i, size) in self.iter().enumerate() {
            if i > 0 {
                f.write_str("|")?;
            }
            let log2 = size.trailing_zeros();
            let unit = ["", "K", "M", "G", "T", "P", "E"][log2 as usize / 10];
            write!(f, "{}{unit}", 1u64 << (log2 % 10))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::vec::Vec;

    /// The plain search: the largest size that fits here, repeated until a larger one fits.
    fn plain(sizes: &[u64], iova: u64, pa: u64, len: u64) -> Option<(u64, u64)> {
        let best = |at: u64| {
            sizes
                .iter()
                .copied()
                .filter(|s| ((iova + at) | (pa + at)) & (s - 1) == 0 && len - at >= *s)
                .max()
        };
        let size = best(0)?;
        let mut count = 0;
        while len - count * size >= size && best(count * size) == Some(size) {
            count += 1;
        }
        Some((size, count))
    }

    #[test]
    fn a_set_contains_its_sizes_and_no_sum_of_them() {
        let sizes = PageSizes::from_bits(1 << 12 | 1 << 21);
        assert!(sizes.contains(1 << 12) && sizes.contains(1 << 21));
        for other in [0, 1, 1 << 13, 3 << 12, 1 << 12 | 1 << 21, u64::MAX] {
            assert!(!sizes.contains(other), "{other:#x}");
        }
    }

    #[test]
    fn a_step_is_what_a_plain_search_finds_for_every_set_of_up_to_four_sizes() {
        // Sizes of 1 to 16 units; every set of up to four of them, every offset and length that
        // makes a difference.
        for bits in 1u64..32 {
            if bits.count_ones() > 4 {
                continue;
            }
            let sizes = PageSizes::from_bits(bits);
            let list: Vec<u64> = sizes.iter().collect();
            for iova in 0..18 {
                for pa in 0..18 {
                    for len in 0..40 {
                        assert_eq!(
                            sizes.step(iova, Span::new(pa, len)),
                            plain(&list, iova, pa, len),
                            "{sizes:?} {iova} {pa} {len}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_step_works_at_the_ends_of_the_address_space() {
        let all = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
        assert_eq!(
            all.step(0, Span::new(0, u64::MAX)),
            Some((1 << 30, u64::MAX >> 30))
        );
        assert_eq!(
            all.step(u64::MAX - 0xfff, Span::new(0, 0x1000)),
            Some((0x1000, 1))
        );
        assert_eq!(PageSizes::NONE.step(0, Span::new(0, 4096)), None);
        assert_eq!(
            PageSizes::from_log2(63).step(0, Span::new(0, 1 << 63)),
            Some((1 << 63, 1))
        );
        assert_eq!(all.step(0x800, Span::new(0, 0x1000)), None);
    }

    #[test]
    fn sets_are_printed_with_binary_units() {
        assert_eq!(
            format!("{}", PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 39)),
            "4K|2M|512G"
        );
        assert_eq!(format!("{}", PageSizes::NONE), "none");
        assert_eq!(PageSizes::from_log2_range(12, 14).bits(), 0x7000);
        assert_eq!(PageSizes::from_bits(0x7000).up_to(0x2fff).bits(), 0x3000);
        assert_eq!(PageSizes::from_bits(0x7000).largest(), 0x4000);
        assert_eq!(PageSizes::from_bits(0x7000).smallest(), 0x1000);
    }
}
