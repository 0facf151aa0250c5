//! A set-associative cache that is read without a lock.
//!
//! Both caches of the unit have this shape. An entry is tagged by domain, by its size and by the
//! first address of its page (or of the stretch that a table translates). Each set has a version
//! number: odd while a thread writes. A reader notes the version, reads, and starts over if the
//! version was odd or is another one afterwards; what it read is then the content of the set at
//! one instant. Writers make the version odd with a compare-and-exchange, which is the set's lock.
//!
//! The protocol of the [unit](super) says what may be written, and when.

use std::hint;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread;

use runs::{Iova, Span};

use crate::unit::DomainId;

/// Geometry of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Number of sets; the next power of two is taken, and at least 1.
    pub sets: usize,
    /// Entries of a set; 0 for a cache that keeps nothing.
    pub ways: usize,
}

/// Key of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) domain: DomainId,
    /// Any address of the stretch.
    pub(super) iova: u64,
    /// Bytes of the stretch, as a power of two.
    pub(super) log2: u32,
}

/// Value of an entry: an address, and bits of which the lowest 8 are a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheValue {
    pub(super) address: u64,
    pub(super) bits: u64,
}

pub(super) struct Cache {
    sets: Box<[Set]>,
    entries: Box<[Entry]>,
    ways: usize,
    /// The sizes that were ever inserted: bit *n* for 2^n bytes. Only a hint for readers.
    sizes: AtomicU64,
}

/// A set's head; a line of its own, since every reader loads the version.
#[repr(align(64))]
#[derive(Default)]
struct Set {
    version: AtomicU64,
    /// The way to replace next. Under the lock.
    victim: AtomicU64,
}

#[repr(align(32))]
#[derive(Default)]
struct Entry {
    /// Valid, domain and size; 0 is an entry that holds nothing.
    kind: AtomicU64,
    first: AtomicU64,
    address: AtomicU64,
    bits: AtomicU64,
}

const VALID: u64 = 1 << 63;

impl Key {
    fn kind(&self) -> u64 {
        VALID | u64::from(self.domain.0) << 8 | u64::from(self.log2)
    }

    fn first(&self) -> u64 {
        self.iova & !span_mask(self.log2)
    }
}

/// The offset bits of a stretch of 2^`log2` bytes.
fn span_mask(log2: u32) -> u64 {
    1u64.checked_shl(log2).map_or(u64::MAX, |size| size - 1)
}

impl Cache {
    pub(super) fn new(shape: CacheShape) -> Self {
        // Geometry comes from outside: bounded, so that no product overflows.
        let count = shape.sets.clamp(1, 1 << 20).next_power_of_two();
        let ways = shape.ways.min(256);
        Self {
            sets: (0..count).map(|_| Set::default()).collect(),
            entries: (0..count * ways).map(|_| Entry::default()).collect(),
            ways,
            sizes: AtomicU64::new(0),
        }
    }

    /// The sizes that entries may have, smallest first.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u32> + use<> {
        let mut left = self.sizes.load(Ordering::Relaxed);
        std::iter::from_fn(move || {
            let log2 = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            (log2 < 64).then_some(log2)
        })
    }

    pub(super) fn find(&self, key: Key) -> Option<CacheValue> {
        let (kind, first) = (key.kind(), key.first());
        let (set, entries) = self.set(self.index(key.domain, key.log2, page(key.iova, key.log2)));
        let mut tries = 0;
        loop {
            let version = set.version.load(Ordering::Acquire);
            let mut found = None;
            for entry in entries {
                if entry.kind.load(Ordering::Relaxed) == kind
                    && entry.first.load(Ordering::Relaxed) == first
                {
                    found = Some(CacheValue {
                        address: entry.address.load(Ordering::Relaxed),
                        bits: entry.bits.load(Ordering::Relaxed),
                    });
                    break;
                }
            }
            // The loads above come before the one below; if that sees the same even version, no
            // writer came between.
            fence(Ordering::Acquire);
            if version & 1 == 0 && set.version.load(Ordering::Relaxed) == version {
                return found;
            }
            pause(&mut tries);
        }
    }

    /// Inserts, or replaces what has the same key, if `allowed` says so under the set's lock.
    pub(super) fn insert(&self, key: Key, held: CacheValue, allowed: impl FnOnce() -> bool) {
        if self.ways == 0 || key.log2 >= 64 {
            return;
        }
        let size = 1 << key.log2;
        if self.sizes.load(Ordering::Relaxed) & size == 0 {
            self.sizes.fetch_or(size, Ordering::Relaxed);
        }
        let (kind, first) = (key.kind(), key.first());
        let (set, entries) = self.set(self.index(key.domain, key.log2, page(key.iova, key.log2)));
        let locked = set.lock();
        if !allowed() {
            return;
        }
        let same = |e: &&Entry| {
            e.kind.load(Ordering::Relaxed) == kind && e.first.load(Ordering::Relaxed) == first
        };
        let free = |e: &&Entry| e.kind.load(Ordering::Relaxed) == 0;
        let entry = entries
            .iter()
            .find(same)
            .or_else(|| entries.iter().find(free))
            .or_else(|| {
                let victim = set.victim.load(Ordering::Relaxed);
                set.victim.store(victim.wrapping_add(1), Ordering::Relaxed);
                entries.get(victim as usize % self.ways)
            });
        if let Some(entry) = entry {
            entry.first.store(first, Ordering::Relaxed);
            entry.address.store(held.address, Ordering::Relaxed);
            entry.bits.store(held.bits, Ordering::Relaxed);
            entry.kind.store(kind, Ordering::Relaxed);
        }
        drop(locked);
    }

    /// Removes the domain's entries that overlap `span` and whose level is in `levels` (bit *n* for
    /// level *n*). `possible` are all sizes that such entries can have: only the sets where they
    /// can lie are visited. Returns how many were removed.
    pub(super) fn remove(
        &self,
        domain: DomainId,
        span: Span<Iova>,
        levels: u64,
        possible: u64,
    ) -> u64 {
        let matches = |entry: &Entry, kind: u64| {
            let mask = span_mask(kind as u32 & 0xff);
            let first = entry.first.load(Ordering::Relaxed);
            let level = entry.bits.load(Ordering::Relaxed) & 0xff;
            levels >> level.min(63) & 1 == 1 && first <= span.last() && span.start <= first | mask
        };
        let sets = self.sets.len() as u64;
        let places = |log2: u32| {
            let first = page(span.start, log2);
            (first, page(span.last(), log2) - first)
        };
        let sizes = (0..64).filter(|log2| possible >> log2 & 1 == 1);
        if sizes
            .clone()
            .map(|log2| places(log2).1 + 1)
            .fold(0, u64::saturating_add)
            >= sets
        {
            return self.remove_all(domain, matches);
        }
        let mut removed = 0;
        for log2 in sizes {
            let (first, more) = places(log2);
            for page in first..=first + more {
                removed += self.sweep(self.index(domain, log2, page), domain, &matches);
            }
        }
        removed
    }

    /// Removes all entries of the domain. Returns how many there were.
    pub(super) fn remove_domain(&self, domain: DomainId) -> u64 {
        self.remove_all(domain, |_, _| true)
    }

    fn remove_all(&self, domain: DomainId, matches: impl Fn(&Entry, u64) -> bool) -> u64 {
        (0..self.sets.len())
            .map(|index| self.sweep(index, domain, &matches))
            .sum()
    }

    fn sweep(&self, index: usize, domain: DomainId, matches: &impl Fn(&Entry, u64) -> bool) -> u64 {
        let (set, entries) = self.set(index);
        let _locked = set.lock();
        let mut removed = 0;
        for entry in entries {
            let kind = entry.kind.load(Ordering::Relaxed);
            let ours = kind != 0 && (kind & !VALID) >> 8 == u64::from(domain.0);
            if ours && matches(entry, kind) {
                entry.kind.store(0, Ordering::Relaxed);
                removed += 1;
            }
        }
        removed
    }

    /// Neighbouring pages lie in neighbouring sets; domains and sizes are spread.
    #[inline]
    fn index(&self, domain: DomainId, log2: u32, page: u64) -> usize {
        let spread = u64::from(domain.0)
            .wrapping_mul(0x9e37_79b9)
            .wrapping_add(u64::from(log2) * 7);
        page.wrapping_add(spread) as usize & (self.sets.len() - 1)
    }

    #[inline]
    fn set(&self, index: usize) -> (&Set, &[Entry]) {
        let entries = self
            .entries
            .get(index * self.ways..(index + 1) * self.ways)
            .unwrap_or(&[]);
        // The index was reduced to the number of sets, a power of two of at least 1.
        (&self.sets[index], entries)
    }
}

/// The number of the stretch of 2^`log2` bytes in which `iova` lies.
#[inline]
fn page(iova: u64, log2: u32) -> u64 {
    iova.checked_shr(log2).unwrap_or(0)
}

/// A set whose version is odd; it becomes even again when this is dropped.
struct Locked<'s> {
    set: &'s Set,
    version: u64,
}

impl Set {
    fn lock(&self) -> Locked<'_> {
        let mut tries = 0;
        loop {
            let version = self.version.load(Ordering::Relaxed);
            if version & 1 == 0
                && self
                    .version
                    .compare_exchange_weak(
                        version,
                        version + 1,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                // A reader that sees any of the stores to come also sees the odd version.
                fence(Ordering::Release);
                return Locked { set: self, version };
            }
            pause(&mut tries);
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.set.version.store(self.version + 2, Ordering::Release);
    }
}

/// Waits a moment for a thread that holds a set for a few stores; longer only when that thread lost
/// its processor.
fn pause(tries: &mut u32) {
    *tries += 1;
    if *tries % 64 == 0 {
        thread::yield_now();
    } else {
        hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const D: DomainId = DomainId(3);

    fn key(iova: u64, log2: u32) -> Key {
        Key {
            domain: D,
            iova,
            log2,
        }
    }

    #[test]
    fn a_reader_never_sees_half_an_entry() {
        let cache = Cache::new(CacheShape { sets: 1, ways: 1 });
        let end = Instant::now() + Duration::from_millis(100);
        thread::scope(|scope| {
            // Two keys fight for one entry; everything in it tells which one it is.
            for first in [0x1000u64, 0x2000] {
                let cache = &cache;
                scope.spawn(move || {
                    let mut n = first;
                    while Instant::now() < end {
                        for _ in 0..1000 {
                            n += 0x10_0000;
                            cache.insert(
                                key(first, 12),
                                CacheValue {
                                    address: n,
                                    bits: n,
                                },
                                || true,
                            );
                        }
                    }
                });
            }
            let mut found = 0u64;
            while Instant::now() < end || found == 0 {
                for n in 0..2000 {
                    let first = 0x1000 << (n & 1);
                    if let Some(held) = cache.find(key(first, 12)) {
                        assert_eq!(held.address, held.bits);
                        assert_eq!(held.address & 0xf_ffff, first);
                        found += 1;
                    }
                }
            }
        });
    }

    #[test]
    fn a_reader_waits_while_a_set_is_written() {
        let cache = Cache::new(CacheShape { sets: 1, ways: 1 });
        cache.insert(
            key(0x1000, 12),
            CacheValue {
                address: 1,
                bits: 1,
            },
            || true,
        );
        thread::scope(|scope| {
            let (set, entries) = cache.set(0);
            let locked = set.lock();
            entries[0].address.store(2, Ordering::Relaxed);
            let reader = scope.spawn(|| cache.find(key(0x1000, 12)));
            thread::sleep(Duration::from_millis(20));
            let early = reader.is_finished();
            entries[0].bits.store(2, Ordering::Relaxed);
            drop(locked);
            assert!(!early);
            assert_eq!(
                reader.join().unwrap(),
                Some(CacheValue {
                    address: 2,
                    bits: 2
                })
            );
        });
    }

    #[test]
    fn removing_visits_every_set_in_which_an_overlapping_entry_can_lie() {
        let sizes = [12, 16, 21, 30, 39];
        let possible = sizes.iter().fold(0, |all, log2| all | 1 << log2);
        for sets in [1, 8, 64, 4096] {
            let cache = Cache::new(CacheShape { sets, ways: 8 });
            for start in (0..40).map(|n| n * 0x1234_5000) {
                for len in [0x1000, 0x3000, 0x20_0000, 0x4000_0000] {
                    let held = |level| CacheValue {
                        address: 0,
                        bits: level,
                    };
                    for log2 in sizes {
                        cache.insert(key(start, log2), held(1), || true);
                        cache.insert(key(start + len - 1, log2), held(1), || true);
                        let other = Key {
                            domain: DomainId(4),
                            ..key(start, log2)
                        };
                        cache.insert(other, held(1), || true);
                    }
                    let span = Span::new(start, len);
                    assert_eq!(cache.remove(D, span, 0b01, possible), 0);
                    assert!(cache.remove(D, span, 0b10, possible) > 0);
                    for log2 in sizes {
                        assert_eq!(cache.find(key(start, log2)), None, "{sets} {span} {log2}");
                        assert_eq!(cache.find(key(start + len - 1, log2)), None);
                    }
                    assert!(cache.remove_domain(DomainId(4)) > 0);
                }
            }
        }
    }
}
