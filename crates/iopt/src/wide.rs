//! The cell of 8 bytes that table memory has by default: entries in a row, two at a time where the processor
//! can.

use core::sync::atomic::AtomicU64;

use crate::cell::{Cell, Series};

#[cfg(all(feature = "std", target_arch = "x86_64", not(miri)))]
mod avx;

/// Entries from which on a row is long: fewer take no longer one by one.
#[cfg(all(feature = "std", target_arch = "x86_64", not(miri)))]
const LONG: usize = 32;

/// True when the series is likely to be long: it is found again further on.
#[cfg(all(feature = "std", target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn goes_far(cells: &[AtomicU64], series: Series) -> bool {
    let far = cells.get(LONG - 1);
    far.is_some_and(|cell| (cell.get() ^ series.next_after(LONG - 1)) & !series.ignored == 0)
}

/// An [`AtomicU64`], long rows of which are handled by the vectors of the processor.
///
/// Long rows of entries go through 128-bit registers on x86-64 processors with AVX, which is found out at
/// run time. Short rows, other processors and programs without the feature `std` have the rows of
/// [`AtomicU64`]. It is the cell of [`HeapTables`](crate::arena::HeapTables) and of every
/// [`AnyTable`](crate::AnyTable); a [`Table`](crate::Table) in memory of one's own has it if that memory
/// says so.
#[derive(Debug)]
#[repr(transparent)]
pub struct WideCell(AtomicU64);

impl WideCell {
    /// The same cells, for table memory of one's own. On x86-64 it must be cached (write-back), as the
    /// memory of a process is: only there accesses of 16 bytes are atomic.
    pub const fn over(cells: &[AtomicU64]) -> &[Self] {
        // SAFETY: a `WideCell` is an `AtomicU64` and nothing else (`repr(transparent)`).
        unsafe { core::slice::from_raw_parts(cells.as_ptr().cast::<Self>(), cells.len()) }
    }

    /// The same cells, one by one.
    #[inline(always)]
    pub(crate) const fn narrow(cells: &[Self]) -> &[AtomicU64] {
        // SAFETY: as in `over`.
        unsafe { core::slice::from_raw_parts(cells.as_ptr().cast::<AtomicU64>(), cells.len()) }
    }
}

macro_rules! singles {
    ($($single:ident($($word:ident),*) $(-> $result:ty)?;)*) => {$(
        #[inline(always)]
        fn $single(&self, $($word: u64),*) $(-> $result)? {
            self.0.$single($($word),*)
        }
    )*};
}

/// The rows by vectors where `$long` says that it is worth it, or else those of [`AtomicU64`].
macro_rules! rows {
    ($($row:ident($($series:ident)?) $(-> $result:ty)?, $long:expr;)*) => {$(
        #[inline(always)]
        fn $row(cells: &[Self] $(, $series: Series)?) $(-> $result)? {
            let cells = Self::narrow(cells);
            #[cfg(all(feature = "std", target_arch = "x86_64", not(miri)))]
            if $long(cells $(, $series)?) {
                return avx::$row(cells $(, $series)?);
            }
            AtomicU64::$row(cells $(, $series)?)
        }
    )*};
}

impl Cell for WideCell {
    const BYTES: usize = 8;

    singles! {
        get() -> u64;
        get_acquire() -> u64;
        set(word);
        set_release(word);
        exchange(word) -> u64;
        set_if(old, new) -> Result<(), u64>;
        set_if_and_fence(old, new) -> Result<(), u64>;
    }

    rows! {
        set_series(series), |cells: &[_], _| cells.len() >= LONG;
        match_series(series) -> usize, goes_far;
        take_series(series) -> usize, goes_far;
        union() -> u64, |cells: &[_]| cells.len() >= LONG;
        intersection() -> u64, |cells: &[_]| cells.len() >= LONG;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn atomics(words: &[u64]) -> Vec<AtomicU64> {
        words.iter().copied().map(AtomicU64::new).collect()
    }

    fn words(cells: &[AtomicU64]) -> Vec<u64> {
        cells.iter().map(Cell::get).collect()
    }

    /// A row that is the series but for a few entries.
    fn rows() -> impl Strategy<Value = (Vec<u64>, Series)> {
        let series = (any::<u64>(), any::<u64>(), 0..3u64, 0..4u64);
        let others = prop::collection::vec((0..200usize, any::<u64>()), 0..3);
        (0..200usize, series, others).prop_map(|(len, (next, stride, ignored, step), others)| {
            let stride = if step == 0 { stride } else { step << 12 };
            let series = Series {
                next,
                stride,
                ignored,
            };
            let mut row: Vec<u64> = (0..len).map(|i| series.next_after(i)).collect();
            for (at, word) in others {
                if let Some(entry) = row.get_mut(at) {
                    // Also where only bits differ that do not count.
                    *entry ^= word & 3;
                }
            }
            (row, series)
        })
    }

    proptest! {
        #[test]
        fn rows_are_what_single_entries_are((row, series) in rows(), skip in 0..3usize) {
            let wide = atomics(&row);
            let narrow = atomics(&row);
            let skip = skip.min(row.len());
            let (cells, single) = (&WideCell::over(&wide)[skip..], &narrow[skip..]);
            let series = Series { next: series.next_after(skip), ..series };
            prop_assert_eq!(WideCell::union(cells), AtomicU64::union(single));
            prop_assert_eq!(WideCell::intersection(cells), AtomicU64::intersection(single));
            let matched = AtomicU64::match_series(single, series);
            prop_assert_eq!(WideCell::match_series(cells, series), matched);
            prop_assert_eq!(words(&wide), &row[..]);
            prop_assert_eq!(
                WideCell::take_series(cells, series),
                AtomicU64::take_series(single, series)
            );
            prop_assert_eq!(words(&wide), words(&narrow));
            WideCell::set_series(cells, series);
            AtomicU64::set_series(single, series);
            prop_assert_eq!(words(&wide), words(&narrow));
        }
    }
}
