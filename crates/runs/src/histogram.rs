//! Counts of runs by size.

/// Counts of stretches by size class: class *n* holds lengths from 2^n to 2^(n+1) − 1 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeHistogram {
    classes: [Class; 64],
}

/// One class of a [`SizeHistogram`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// Number of stretches.
    pub count: u64,
    /// Their bytes together.
    pub bytes: u64,
}

impl SizeHistogram {
    /// No stretch yet.
    pub const fn new() -> Self {
        Self {
            classes: [Class { count: 0, bytes: 0 }; 64],
        }
    }

    /// Counts `count` stretches of `len` bytes each; none for `len` 0.
    #[inline]
    pub fn add(&mut self, len: u64, count: u64) {
        if let Some(log2) = len.checked_ilog2() {
            let class = &mut self.classes[log2 as usize];
            class.count += count;
            class.bytes = class.bytes.saturating_add(len.saturating_mul(count));
        }
    }

    /// The classes that hold something, smallest first: the smallest length of the class in
    /// bytes, and the class.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Class)> + '_ {
        self.classes
            .iter()
            .enumerate()
            .filter(|(_, class)| class.count > 0)
            .map(|(log2, class)| (1 << log2, *class))
    }

    /// All stretches together.
    pub fn total(&self) -> Class {
        self.classes
            .iter()
            .fold(Class::default(), |sum, class| Class {
                count: sum.count + class.count,
                bytes: sum.bytes.saturating_add(class.bytes),
            })
    }
}

impl Default for SizeHistogram {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn lengths_fall_into_their_power_of_two() {
        let mut histogram = SizeHistogram::new();
        histogram.add(4096, 2);
        histogram.add(8191, 1);
        histogram.add(8192, 1);
        histogram.add(0, 7);
        histogram.add(u64::MAX, 1);
        let classes: Vec<_> = histogram.iter().map(|(size, c)| (size, c.count)).collect();
        assert_eq!(classes, [(4096, 3), (8192, 1), (1 << 63, 1)]);
        assert_eq!(histogram.total().count, 5);
    }

    #[test]
    fn bytes_are_those_of_all_stretches_and_stay_at_the_end_of_64_bits() {
        let mut histogram = SizeHistogram::new();
        histogram.add(4096, 3);
        histogram.add(5000, 1);
        histogram.add(1 << 21, 2);
        let classes: Vec<_> = histogram.iter().map(|(size, c)| (size, c.bytes)).collect();
        let (small, large) = (3 * 4096 + 5000, 2 << 21);
        assert_eq!(classes, [(4096, small), (1 << 21, large)]);
        let all = Class {
            count: 6,
            bytes: small + large,
        };
        assert_eq!(histogram.total(), all);
        histogram.add(1 << 63, 3);
        assert_eq!(
            histogram.total(),
            Class {
                count: 9,
                bytes: u64::MAX
            }
        );
    }
}
