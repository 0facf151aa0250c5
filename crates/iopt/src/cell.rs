//! One entry in memory.
//!
//! The engine computes with entries of type `u64`, and the cell narrows them to their width in
//! memory. So one engine serves all widths, without a second type parameter for words.
//!
//! # Rows
//!
//! The engine handles the entries of one table in rows. One call writes a series of entries, counts
//! how many cells hold a series, empties these, or collects the bits that are set in any cell. A
//! series is a first entry and a step, so eight entries are compared with one decision, whatever the
//! format; decoding looks at the first entry of a row only. Rows are methods of the cell so that
//! vector instructions come as another cell ([`WideCell`](crate::WideCell)) and not as another engine.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// One entry of a table, as it lies in memory: an atomic integer, because a device, the software
/// unit and the dirty logic read and write a linked table at any time.
///
/// The engine computes with `u64`; a cell of a narrower format keeps the low bits. The cell is a
/// type parameter so that a checker of thread interleavings can bring its own.
pub trait Cell {
    /// Size of the entry in bytes.
    const BYTES: usize;

    /// Reads the entry, relaxed.
    fn get(&self) -> u64;
    /// Reads the entry; what its writer released is visible afterwards.
    fn get_acquire(&self) -> u64;
    /// Writes the entry, relaxed.
    fn set(&self, word: u64);
    /// Writes the entry; everything stored before is visible to readers that read it by
    /// [`get_acquire`](Self::get_acquire), or follow it as hardware does.
    fn set_release(&self, word: u64);
    /// Replaces the entry and returns the old one, so that no bit that hardware sets is lost.
    fn exchange(&self, word: u64) -> u64;
    /// Replaces the entry if it is `old`; the entry found otherwise is the error.
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64>;

    /// A sequentially consistent fence.
    #[inline(always)]
    fn fence() {
        core::sync::atomic::fence(Ordering::SeqCst);
    }

    /// [`set_if`](Self::set_if), and a [`fence`](Self::fence) when it has replaced the entry.
    #[inline(always)]
    fn set_if_and_fence(&self, old: u64, new: u64) -> Result<(), u64> {
        self.set_if(old, new)?;
        Self::fence();
        Ok(())
    }

    // Entries in a row. Each is accessed by itself, as by `get` and `set`; in which order is open.

    /// Writes the entries of the series, one into each cell.
    #[inline(always)]
    fn set_series(cells: &[Self], mut series: Series)
    where
        Self: Sized,
    {
        // Eight at a time: the store is the least of what a loop has to do.
        let eights = cells.chunks_exact(8);
        let rest = eights.remainder();
        for eight in eights {
            for (nth, cell) in eight.iter().enumerate() {
                cell.set(series.next_after(nth));
            }
            series.next = series.next_after(8);
        }
        for cell in rest {
            cell.set(series.next);
            series.next = series.next.wrapping_add(series.stride);
        }
    }

    /// How many cells, from the first on, hold the entries of the series.
    #[inline(always)]
    fn match_series(cells: &[Self], series: Series) -> usize
    where
        Self: Sized,
    {
        go_along(cells, series, |_| {})
    }

    /// As [`match_series`](Self::match_series), and empties these cells.
    #[inline(always)]
    fn take_series(cells: &[Self], series: Series) -> usize
    where
        Self: Sized,
    {
        go_along(cells, series, |cell| cell.set(0))
    }

    /// All bits that are set in one of the cells.
    #[inline(always)]
    fn union(cells: &[Self]) -> u64
    where
        Self: Sized,
    {
        // Several sums, so that none waits for another.
        let eights = cells.chunks_exact(8);
        let rest = eights.remainder().iter();
        let mut bits = [0; 4];
        for eight in eights {
            let [a, b, c, d, e, f, g, h] = eight else {
                break;
            };
            bits[0] |= a.get() | b.get();
            bits[1] |= c.get() | d.get();
            bits[2] |= e.get() | f.get();
            bits[3] |= g.get() | h.get();
        }
        let rest = rest.fold(0, |bits, cell| bits | cell.get());
        bits.iter().fold(rest, |all, bits| all | bits)
    }

    /// All bits that are set in each of the cells.
    #[inline(always)]
    fn intersection(cells: &[Self]) -> u64
    where
        Self: Sized,
    {
        cells.iter().fold(u64::MAX, |bits, cell| bits & cell.get())
    }
}

/// Entries that go on by a constant step, as those of leaves do that lie one behind the other in
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Series {
    /// The next entry.
    pub next: u64,
    /// Difference between an entry and the one behind it.
    pub stride: u64,
    /// Bits that may be anything where entries are compared.
    pub ignored: u64,
}

impl Series {
    /// The entry `count` behind the next.
    #[inline(always)]
    pub const fn next_after(&self, count: usize) -> u64 {
        self.next
            .wrapping_add(self.stride.wrapping_mul(count as u64))
    }
}

/// Goes over the cells that hold the entries of the series and calls `each` for them; returns how
/// many there were.
#[inline(always)]
fn go_along<C: Cell>(cells: &[C], mut series: Series, each: impl Fn(&C)) -> usize {
    // Eight at a time, with one decision: most series are long.
    let mut done = 0;
    for eight in cells.chunks_exact(8) {
        let mut next = series.next;
        let mut differs = 0;
        for cell in eight {
            differs |= cell.get() ^ next;
            next = next.wrapping_add(series.stride);
        }
        if differs & !series.ignored != 0 {
            break;
        }
        eight.iter().for_each(&each);
        series.next = next;
        done += 8;
    }
    for cell in cells.iter().skip(done) {
        if (cell.get() ^ series.next) & !series.ignored != 0 {
            break;
        }
        each(cell);
        series.next = series.next.wrapping_add(series.stride);
        done += 1;
    }
    done
}

macro_rules! atomic_cell {
    ($atomic:ty, $int:ty) => {
        impl Cell for $atomic {
            const BYTES: usize = size_of::<$int>();

            #[inline(always)]
            fn get(&self) -> u64 {
                u64::from(self.load(Ordering::Relaxed))
            }

            #[inline(always)]
            fn get_acquire(&self) -> u64 {
                u64::from(self.load(Ordering::Acquire))
            }

            #[inline(always)]
            fn set(&self, word: u64) {
                self.store(word as $int, Ordering::Relaxed);
            }

            #[inline(always)]
            fn set_release(&self, word: u64) {
                self.store(word as $int, Ordering::Release);
            }

            #[inline(always)]
            fn exchange(&self, word: u64) -> u64 {
                u64::from(self.swap(word as $int, Ordering::AcqRel))
            }

            #[inline(always)]
            fn set_if_and_fence(&self, old: u64, new: u64) -> Result<(), u64> {
                // On x86 a locked instruction is the fence: a second one costs as much again
                // (Intel SDM, volume 3, section 9.2.2; AMD APM, volume 2, section 7.4.2).
                if cfg!(all(
                    any(target_arch = "x86", target_arch = "x86_64"),
                    not(miri)
                )) {
                    let result = self.compare_exchange(
                        old as $int,
                        new as $int,
                        Ordering::SeqCst,
                        Ordering::Acquire,
                    );
                    compiler_fence(Ordering::SeqCst);
                    return result.map(|_| ()).map_err(u64::from);
                }
                self.set_if(old, new)?;
                Self::fence();
                Ok(())
            }

            #[inline(always)]
            fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
                self.compare_exchange(
                    old as $int,
                    new as $int,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                )
                .map(|_| ())
                .map_err(u64::from)
            }
        }
    };
}

atomic_cell!(AtomicU64, u64);
atomic_cell!(AtomicU32, u32);
