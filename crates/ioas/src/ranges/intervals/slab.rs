//! Places by 32-bit numbers, in chunks that stay where they are, with the free ones in a list.
//!
//! One vector would be simpler to reach into, but each time it grows some insertion would have to
//! move everything: 40 MB for a million areas. A chunk has 64 KiB at most, so that no insertion
//! moves more than that. The list runs through the free places themselves, so that giving a place back needs no memory.
//! A slab never shrinks: it holds as many places as were ever in use at once.

use alloc::vec::Vec;
use core::mem;
use core::ops::{Index, IndexMut};

/// The number of no place.
pub(super) const NONE: u32 = u32::MAX;

/// Content of a slab: while a place is free, it names the next free one.
pub(super) trait Place {
    /// A free place, after which comes `next`.
    fn free(next: u32) -> Self;
    /// Value passed to [`free`](Self::free); arbitrary for a place in use.
    fn next_free(&self) -> u32;
}

/// Bytes of a chunk, at most, unless one place has more.
const CHUNK: usize = 64 << 10;

pub(super) struct Slab<P> {
    /// All full but the last one.
    chunks: Vec<Vec<P>>,
    /// Places in all chunks.
    count: usize,
    /// The first free place.
    free: u32,
}

impl<P> Slab<P> {
    /// Places of a chunk: 2^`SHIFT`.
    const SHIFT: u32 = {
        let size = size_of::<P>();
        if size >= CHUNK {
            0
        } else {
            (CHUNK / size).ilog2()
        }
    };
    const MASK: usize = (1 << Self::SHIFT) - 1;
}

impl<P: Place> Slab<P> {
    pub(super) const fn new() -> Self {
        Self {
            chunks: Vec::new(),
            count: 0,
            free: NONE,
        }
    }

    /// True when every number is in use.
    pub(super) fn is_full(&self) -> bool {
        self.free == NONE && self.count >= NONE as usize
    }

    /// The number of the place that now holds `what`. The slab is not [full](Self::is_full).
    pub(super) fn add(&mut self, what: P) -> u32 {
        if self.free == NONE {
            if self.count & Self::MASK == 0 {
                self.chunks.push(Vec::new());
            }
            if let Some(chunk) = self.chunks.last_mut() {
                chunk.push(what);
            }
            self.count += 1;
            return (self.count - 1) as u32;
        }
        let at = self.free;
        self.free = self[at].next_free();
        self[at] = what;
        at
    }

    /// Frees the place `at`, which is in use, and returns what it held.
    pub(super) fn take(&mut self, at: u32) -> P {
        let free = P::free(self.free);
        self.free = at;
        mem::replace(&mut self[at], free)
    }

    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        let free = core::iter::successors(Some(self.free), |&at| {
            (at != NONE).then(|| self[at].next_free())
        });
        self.count - (free.count() - 1)
    }
}

impl<P> Index<u32> for Slab<P> {
    type Output = P;

    #[inline]
    fn index(&self, at: u32) -> &P {
        &self.chunks[at as usize >> Self::SHIFT][at as usize & Self::MASK]
    }
}

impl<P> IndexMut<u32> for Slab<P> {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut P {
        &mut self.chunks[at as usize >> Self::SHIFT][at as usize & Self::MASK]
    }
}

/// A place for a value.
pub(super) enum Slot<T> {
    Used(T),
    Free(u32),
}

impl<T> Slot<T> {
    pub(super) const fn value(&self) -> Option<&T> {
        match self {
            Self::Used(value) => Some(value),
            Self::Free(_) => None,
        }
    }

    pub(super) const fn value_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::Used(value) => Some(value),
            Self::Free(_) => None,
        }
    }
}

impl<T> Place for Slot<T> {
    fn free(next: u32) -> Self {
        Self::Free(next)
    }

    fn next_free(&self) -> u32 {
        match self {
            Self::Used(_) => NONE,
            Self::Free(next) => *next,
        }
    }
}
