//! Sources of physical addresses, and stand-ins for them.

use std::fmt;
use std::os::unix::fs::FileExt;

use crate::mapping::Mapping;
use crate::nodes::open_pagemap;

/// Source of the addresses in a pin's runs.
///
/// The two stand-ins take their addresses from a window between 2^40 and 2^43 that belongs to the
/// mapping alone, so that no two pages of this process share an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSource {
    /// The real page frames, from `/proc/self/pagemap`; needs `CAP_SYS_ADMIN`.
    Pagemap,
    /// The offset in the memory file, which is one single run.
    FileOffset,
    /// Invented addresses in a shuffled layout: the mapping's largest pages (2 MiB for
    /// transparent huge pages, else [`Backing::page`](crate::Backing::page)) change places with
    /// each other.
    Synthetic {
        /// Equal seeds give equal layouts.
        seed: u64,
    },
}

impl FrameSource {
    /// The best source for a mapping: the real frames where this process may see them, which one
    /// look at a page of its own stack tells; else the offset in the memory file, else invented
    /// addresses.
    pub fn detect(mapping: &Mapping) -> Self {
        if frames_are_visible() {
            Self::Pagemap
        } else if mapping.fd().is_some() {
            Self::FileOffset
        } else {
            Self::Synthetic { seed: 0 }
        }
    }

    /// True for real frames.
    pub const fn is_real(self) -> bool {
        matches!(self, Self::Pagemap)
    }
}

/// Name in reports.
impl fmt::Display for FrameSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pagemap => "page frames (pagemap)",
            Self::FileOffset => "offsets in the memory file, not page frames",
            Self::Synthetic { .. } => "synthetic addresses in a shuffled layout, not page frames",
        })
    }
}

/// Bit 63 of an entry: the page is there. Bits 0 to 54 are its frame number, or 0 for a process
/// that may not know it. Source: Linux `Documentation/admin-guide/mm/pagemap.rst`.
pub(crate) const ENTRY_PRESENT: u64 = 1 << 63;
pub(crate) const ENTRY_FRAME: u64 = (1 << 55) - 1;

fn frames_are_visible() -> bool {
    let Ok(pagemap) = open_pagemap() else {
        return false;
    };
    let mut entry = [0; 8];
    let on_stack = entry.as_ptr() as u64;
    match pagemap.read_exact_at(&mut entry, on_stack / 4096 * 8) {
        Ok(()) => u64::from_ne_bytes(entry) & ENTRY_FRAME != 0,
        Err(_) => false,
    }
}

/// A fixed shuffling of the numbers below `n`, in constant time and memory: a Feistel network
/// over the next power of four, walked until it falls below `n` (cycle walking).
///
/// Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shuffle {
    n: u64,
    half_bits: u32,
    seed: u64,
}

impl Shuffle {
    pub(crate) fn new(n: u64, seed: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        Self {
            n,
            half_bits: bits.div_ceil(2).max(1),
            seed,
        }
    }

    /// Place of `i`; both are below `n`. An `i` that is not stays where it is.
    pub(crate) fn place(&self, i: u64) -> u64 {
        if i >= self.n {
            return i;
        }
        let mut x = i;
        loop {
            x = self.round_trip(x);
            // The network permutes its domain, so the walk from below `n` returns there.
            if x < self.n {
                return x;
            }
        }
    }

    fn round_trip(&self, x: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 1..=4 {
            let mixed = mix(right ^ self.seed.wrapping_add(round << 56)) & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.half_bits | right
    }
}

/// The finaliser of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_shuffle_uses_every_place_once(n in 1u64..5000, seed: u64) {
            let shuffle = Shuffle::new(n, seed);
            let mut used = vec![false; n as usize];
            for i in 0..n {
                let place = shuffle.place(i) as usize;
                prop_assert!(!std::mem::replace(&mut used[place], true), "{} twice", place);
            }
        }
    }

    #[test]
    fn a_shuffle_leaves_few_neighbours_together() {
        let shuffle = Shuffle::new(100_000, 1);
        let together = (1..100_000)
            .filter(|&i| shuffle.place(i) == shuffle.place(i - 1) + 1)
            .count();
        assert!(together < 20, "{together}");
        assert_ne!(shuffle.place(5), Shuffle::new(100_000, 2).place(5));
    }
}
