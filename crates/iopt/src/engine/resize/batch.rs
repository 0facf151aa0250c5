//! Extents that are broken before one flush, where a format asks for break-before-make.

use super::scan::Extent;
use crate::format::Format;

/// Extents that are broken before one flush.
const EXTENTS: usize = 16;
/// Their entries together; the largest group has 128 (Arm, granule of 16 KiB).
const WORDS: usize = 256;
const LARGEST: usize = 128;

/// Extents that are broken, and the words that their entries had.
pub(super) struct Batch {
    extents: [Option<Extent>; EXTENTS],
    count: usize,
    words: [u64; WORDS],
    used: usize,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self {
            extents: [None; EXTENTS],
            count: 0,
            words: [0; WORDS],
            used: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.count < EXTENTS && self.used + LARGEST <= WORDS
    }

    pub(super) fn push(&mut self, extent: &Extent, entries: usize) -> &mut [u64] {
        if let Some(slot) = self.extents.get_mut(self.count) {
            *slot = Some(*extent);
            self.count += 1;
        }
        let first = self.used;
        self.used = (first + entries).min(WORDS);
        self.words.get_mut(first..self.used).unwrap_or(&mut [])
    }

    pub(super) fn extents<F: Format>(&self) -> impl Iterator<Item = (&Extent, &[u64])> {
        let mut rest = &self.words[..];
        self.extents.iter().flatten().map(move |extent| {
            let (words, behind) = rest.split_at(extent.entries::<F>().min(rest.len()));
            rest = behind;
            (extent, words)
        })
    }
}
