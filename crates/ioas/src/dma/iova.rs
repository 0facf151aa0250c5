//! An allocator of device addresses that many threads use.
//!
//! A length of up to 2^10 granules is rounded up to a power of two, its *class*, and the range is aligned to its
//! own length; so tables can have one leaf for it where the format has that size. Each thread has a *magazine* for
//! each class: the ranges that it freed last. A driver that maps buffers of a few sizes takes a range from its
//! magazine and frees it there, under a lock that no other thread wants. A full magazine gives half of its
//! ranges to the class's *depot*, which all threads share, and an empty one takes as many from there: so ranges that
//! one thread allocates and another frees stay in circulation. Only when the depot is empty, or full, the tree of all
//! ranges is asked; and always for longer lengths.
//!
//! When the tree has no room, everything in magazines and depots goes back to it, and the search is repeated once.
//!
//! Locks: a magazine's, then a depot's, then the tree's; no call holds two of one kind. Nothing is allocated in
//! magazines and depots after [`Iovas::new`]: several ranges are put only into an empty magazine.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::array;

use runs::{Iova, Span};

use crate::lock::Mutex;
use crate::ranges::intervals::Intervals;

/// Powers of two of the granule that are cached: 4 KiB to 4 MiB where it is 4 KiB.
const CLASSES: usize = 11;
/// Ranges in a magazine, at most.
const MAGAZINE: usize = 64;
/// Ranges in a depot, at most.
const DEPOT: usize = 32 * MAGAZINE;
/// Bytes that the entries of two cache lines translate, in pages of 4 KiB: lines are prefetched in pairs.
const LINES: u64 = 64 << 10;
/// Ranges are aligned to their length, up to this.
const LARGEST: u64 = 1 << 30;

/// Starts of free ranges of one class.
type Starts = Vec<u64>;

/// A thread's magazines, in cache lines of their own.
#[repr(align(128))]
struct Magazines(Mutex<[Starts; CLASSES]>);

/// The ranges of some windows. See the [module](self).
pub(crate) struct Iovas {
    windows: Box<[Span<Iova>]>,
    granule: u64,
    magazines: Box<[Magazines]>,
    depots: [Mutex<Starts>; CLASSES],
    /// Ranges that are allocated, or in magazines and depots.
    taken: Mutex<Intervals<Iova, ()>>,
}

/// Allocation of a length: the whole length, and its class if it has one.
#[derive(Clone, Copy)]
struct Size {
    len: u64,
    class: Option<usize>,
}

impl Size {
    /// Alignment of the start, bytes.
    fn align(self) -> u64 {
        1 << self.len.min(LARGEST).ilog2()
    }
}

impl Iovas {
    /// All of `windows`, which are in order and disjoint, in units of `granule` bytes, a power of two, for about as
    /// many `threads` at once.
    pub(crate) fn new(windows: &[Span<Iova>], granule: u64, threads: usize) -> Self {
        let empty = |most| move |_| Starts::with_capacity(most);
        let magazines = || Magazines(Mutex::new(array::from_fn(empty(MAGAZINE))));
        Self {
            windows: windows.into(),
            granule,
            magazines: (0..threads.max(1)).map(|_| magazines()).collect(),
            depots: array::from_fn(|_| Mutex::new(Starts::with_capacity(DEPOT))),
            taken: Mutex::new(Intervals::default()),
        }
    }

    /// Allocation of `len` bytes; `None` if no range is that long.
    fn size(&self, len: u64) -> Option<Size> {
        let granules = len.div_ceil(self.granule).max(1);
        let class = granules.checked_next_power_of_two()?.trailing_zeros() as usize;
        if class < CLASSES {
            let len = self.granule << class;
            return Some(Size {
                len,
                class: Some(class),
            });
        }
        let len = granules.checked_mul(self.granule)?;
        Some(Size { len, class: None })
    }

    /// A range of at least `len` bytes that no one else has; or the length of the longest that there is.
    pub(crate) fn allocate(&self, len: u64) -> Result<Span<Iova>, u64> {
        let Some(size) = self.size(len) else {
            return Err(self.longest());
        };
        let cached = size.class.and_then(|class| self.take(class));
        let found = cached.or_else(|| self.cut_more(size)).or_else(|| {
            self.drain();
            self.cut(size)
        });
        match found {
            Some(start) => Ok(Span::new(start, size.len)),
            None => Err(self.longest()),
        }
    }

    /// Gives back the range for `len` bytes that [`allocate`](Self::allocate) has returned, which begins at `start`.
    pub(crate) fn free(&self, start: u64, len: u64) {
        match self.size(len).and_then(|size| size.class) {
            Some(class) => self.put(class, start),
            None => self.join([start]),
        }
    }

    fn magazines(&self) -> &Magazines {
        &self.magazines[place() % self.magazines.len()]
    }

    /// A start from this thread's magazine, which is filled from the depot when it is empty.
    fn take(&self, class: usize) -> Option<u64> {
        let magazine = &mut self.magazines().0.lock()[class];
        if magazine.is_empty() {
            let depot = &mut *self.depots[class].lock();
            let rest = depot.len().saturating_sub(MAGAZINE / 2);
            magazine.extend(depot.drain(rest..));
        }
        magazine.pop()
    }

    /// Puts a start into this thread's magazine. Of a full one the older half goes to the depot, or, when that is
    /// full, to the tree.
    fn put(&self, class: usize, start: u64) {
        let magazine = &mut self.magazines().0.lock()[class];
        if magazine.len() == MAGAZINE {
            let older = magazine.drain(..MAGAZINE / 2);
            let depot = &mut *self.depots[class].lock();
            if depot.len() + MAGAZINE / 2 <= DEPOT {
                depot.extend(older);
            } else {
                self.join(older);
            }
        }
        magazine.push(start);
    }

    /// The lowest free range of that size in the tree.
    fn cut(&self, size: Size) -> Option<u64> {
        let taken = &mut *self.taken.lock();
        let start = taken.gap(size.len, size.align(), &self.windows)?;
        // Full at 2^32 ranges: then there is no room either.
        taken.insert(Span::new(start, size.len), ()).ok()?;
        Some(start)
    }

    /// The same, and some that follow for this thread's magazine, so that threads do not store entries to one line.
    fn cut_more(&self, size: Size) -> Option<u64> {
        let start = self.cut(size)?;
        if let Some(class) = size.class {
            let magazine = &mut self.magazines().0.lock()[class];
            // Another thread may have filled it meanwhile.
            if magazine.is_empty() {
                let more = (LINES / size.len).min(MAGAZINE as u64 / 2);
                magazine.extend((1..more).map_while(|_| self.cut(size)));
                // The lowest is used first.
                magazine.reverse();
            }
        }
        Some(start)
    }

    fn join(&self, starts: impl IntoIterator<Item = u64>) {
        let taken = &mut *self.taken.lock();
        for start in starts {
            let range = taken.remove(start);
            debug_assert!(range.is_some(), "{start:#x} is freed twice");
        }
    }

    /// Returns everything that is cached to the tree.
    fn drain(&self) {
        for magazines in &self.magazines {
            for magazine in &mut *magazines.0.lock() {
                self.join(magazine.drain(..));
            }
        }
        for depot in &self.depots {
            self.join(depot.lock().drain(..));
        }
    }

    /// The longest length that could be allocated now, in whole granules.
    fn longest(&self) -> u64 {
        let taken = &mut *self.taken.lock();
        let mut fits = |granules: u64| {
            let size = granules
                .checked_mul(self.granule)
                .and_then(|len| self.size(len));
            size.is_some_and(|size| taken.gap(size.len, size.align(), &self.windows).is_some())
        };
        let (mut longest, mut most) = (0, u64::MAX / self.granule);
        while longest < most {
            let half = longest + (most - longest).div_ceil(2);
            match fits(half) {
                true => longest = half,
                false => most = half - 1,
            }
        }
        longest * self.granule
    }
}

/// A number of the calling thread: the same in each call, and another one in other threads as far as possible.
#[cfg(feature = "std")]
pub(super) fn place() -> usize {
    use core::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    std::thread_local! {
        static PLACE: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that ends has no number any more, and shares one.
    PLACE.try_with(|place| *place).unwrap_or(0)
}

/// The same: stacks are some pages apart.
#[cfg(not(feature = "std"))]
pub(super) fn place() -> usize {
    let here = 0u8;
    core::ptr::from_ref(&here).addr() >> 13
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    /// Ranges are those of a plain list: inside the windows, aligned, disjoint; and all of them come back.
    fn check(windows: &[Span<Iova>], steps: &[(u64, u64)]) {
        let iovas = Iovas::new(windows, 4096, 1);
        let mut plain = BTreeMap::new();
        for (len, nth) in steps {
            let old = plain.iter().nth(*nth as usize % plain.len().max(1));
            if let Some((start, len)) = old.filter(|_| *nth % 3 == 0) {
                let (start, len): (u64, u64) = (*start, *len);
                iovas.free(start, len);
                plain.remove(&start);
                continue;
            }
            match iovas.allocate(*len) {
                Ok(range) => {
                    assert!(range.len >= *len && range.is_aligned(4096));
                    assert_eq!(range.start % (1 << range.len.ilog2()), 0);
                    assert!(windows.iter().any(|window| window.covers(&range)));
                    let beside = plain.range(..=range.last()).next_back();
                    if let Some((start, len)) = beside {
                        let there = Span::<Iova>::new(*start, iovas.size(*len).unwrap().len);
                        assert!(there.last() < range.start, "{range} is taken");
                    }
                    plain.insert(range.start, *len);
                }
                Err(longest) => {
                    assert!(longest < *len, "{longest:#x} bytes were free");
                }
            }
        }
        for (start, len) in plain {
            iovas.free(start, len);
        }
        iovas.drain();
        assert_eq!(iovas.taken.lock().len(), 0);
    }

    proptest! {
        /// Threads that share a magazine come between the steps of each other's allocations.
        #[test]
        fn magazines_and_depots_never_grow(
            steps in prop::collection::vec((0..100u8, 1..80usize), 1..300),
        ) {
            let iovas = Iovas::new(&[Span::new(0, 1 << 32)], 4096, 1);
            let capacities = || {
                let magazines = iovas.magazines[0].0.lock().each_ref().map(Vec::capacity);
                let depots = iovas.depots.each_ref().map(|depot| depot.lock().capacity());
                (magazines, depots)
            };
            let first = capacities();
            let size = iovas.size(4096).unwrap();
            let mut allocated = Vec::new();
            for (step, times) in steps {
                for _ in 0..times {
                    match step {
                        0 => iovas.drain(),
                        1..40 => allocated.extend(iovas.cut_more(size)),
                        40..50 => allocated.extend(iovas.take(0)),
                        _ => allocated.pop().into_iter().for_each(|start| iovas.put(0, start)),
                    }
                    prop_assert!(iovas.magazines[0].0.lock()[0].len() <= MAGAZINE);
                    prop_assert!(iovas.depots[0].lock().len() <= DEPOT);
                }
                prop_assert_eq!(capacities(), first);
            }
            allocated.into_iter().for_each(|start| iovas.put(0, start));
            iovas.drain();
            prop_assert_eq!(iovas.taken.lock().len(), 0);
        }

        #[test]
        fn ranges_are_disjoint_and_come_back(
            steps in prop::collection::vec((1..0x60_0000u64, any::<u64>()), 1..200),
            small in prop::collection::vec((1..0x4000u64, any::<u64>()), 1..200),
        ) {
            let windows = [Span::new(0x1000, 0x7f_f000), Span::new(0x8000_0000, 0x200_0000)];
            check(&windows, &steps);
            check(&[Span::new(0x1000, 0x2_f000)], &small);
            check(&[Span::new(0x2_f000u64.wrapping_neg(), 0x2_f000)], &small);
        }
    }

    #[test]
    fn a_full_window_says_how_long_a_range_is_left() {
        let iovas = Iovas::new(&[Span::new(0x10_0000, 0x10_0000)], 4096, 4);
        let ranges: Vec<Span<Iova>> = (0..256).map(|_| iovas.allocate(4096).unwrap()).collect();
        assert_eq!(iovas.allocate(1), Err(0));
        // Every other page, and two neighbours.
        for range in ranges.iter().step_by(2) {
            iovas.free(range.start, 4096);
        }
        assert_eq!(iovas.allocate(0x2000), Err(0x1000));
        iovas.free(ranges[1].start, 4096);
        let both = iovas.allocate(0x2000).unwrap();
        assert_eq!(both, Span::new(0x10_0000, 0x2000));
        assert_eq!(iovas.allocate(u64::MAX), Err(0x1000));
    }

    #[test]
    fn what_one_thread_frees_another_allocates() {
        let iovas = Iovas::new(&[Span::new(0, 1 << 20)], 4096, 2);
        let (sender, receiver) = std::sync::mpsc::sync_channel(64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    sender.send(iovas.allocate(4096).unwrap()).unwrap();
                }
                drop(sender);
            });
            scope.spawn(|| {
                for range in receiver {
                    iovas.free(range.start, 4096);
                }
            });
        });
        iovas.drain();
        assert_eq!(iovas.taken.lock().len(), 0);
    }
}
