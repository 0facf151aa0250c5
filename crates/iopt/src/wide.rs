//! Entries in a row, two at a time: the cells of table memory on x86-64 processors with AVX.
//!
//! A [`WideCell`] is an [`AtomicU64`] whose rows ([`Cell::set_series`] and its like) go through
//! 128-bit registers. That is a choice of the table memory, by its type: the engine is the same, and
//! without the feature `std` there is no such cell.
//!
//! # Why this is allowed on linked tables
//!
//! Others read and write a linked table at any time, so each entry must be accessed as an atomic of
//! 8 bytes. The compiler's own vectors promise nothing of that kind. The instructions here do: on a
//! processor with AVX, a load or store of 16 bytes that is aligned to 16 is atomic as a whole (Intel
//! SDM, volume 3, section 9.1.1 "Guaranteed Atomic Operations"; AMD APM, volume 2, section 7.3.2
//! "Access Atomicity"), and with it each of its halves. They are written as inline assembly, which
//! the compiler takes for accesses to memory that it knows nothing of, no more and no less than that
//! many relaxed accesses one after the other. Wider vectors promise nothing, so none are used.
//!
//! # Why a cell proves the processor
//!
//! Cells come into being only by [`WideCell::over`], or in [`HeapStorage`](crate::arena::HeapStorage),
//! and both look for AVX first. Whoever has a `&[WideCell]` may execute these instructions.

use core::arch::asm;
use core::sync::atomic::AtomicU64;

use crate::cell::{Cell, Series};

/// An entry of 8 bytes in table memory of an x86-64 processor with AVX: see the
/// [module](self).
#[derive(Debug)]
#[repr(transparent)]
pub struct WideCell(AtomicU64);

/// Entries that one turn of a loop handles.
const TURN: usize = 8;

/// Puts the first eight entries of a series into `a` to `d`, and eight times its step into both
/// halves of `eight`.
macro_rules! first_eight {
    () => {
        "vmovq {a}, {next}
        vmovq {x}, {stride}
        vpaddq {x}, {x}, {a}
        vpunpcklqdq {a}, {a}, {x}
        vmovq {eight}, {stride}
        vpunpcklqdq {eight}, {eight}, {eight}
        vpsllq {x}, {eight}, 1
        vpsllq {eight}, {eight}, 3
        vpaddq {b}, {a}, {x}
        vpaddq {c}, {b}, {x}
        vpaddq {d}, {c}, {x}"
    };
}

/// Goes on to the next eight.
macro_rules! next_eight {
    () => {
        "vpaddq {a}, {a}, {eight}
        vpaddq {b}, {b}, {eight}
        vpaddq {c}, {c}, {eight}
        vpaddq {d}, {d}, {eight}"
    };
}

impl WideCell {
    /// True when this processor has what these cells need.
    pub fn available() -> bool {
        std::is_x86_feature_detected!("avx")
    }

    /// The same cells, for table memory of one's own; `None` where the processor has no AVX.
    pub fn over(cells: &[AtomicU64]) -> Option<&[Self]> {
        // SAFETY: a `WideCell` is an `AtomicU64` and nothing else (`repr(transparent)`).
        Self::available().then(|| unsafe {
            core::slice::from_raw_parts(cells.as_ptr().cast::<Self>(), cells.len())
        })
    }

    /// The same cells, one by one.
    #[inline(always)]
    fn narrow(cells: &[Self]) -> &[AtomicU64] {
        // SAFETY: as in `over`.
        unsafe { core::slice::from_raw_parts(cells.as_ptr().cast::<AtomicU64>(), cells.len()) }
    }

    /// The cells before the first that is aligned to 16 bytes (none or one), those that are taken
    /// in turns, and the rest.
    #[inline(always)]
    fn turns(cells: &[Self]) -> (&[Self], &[Self], &[Self]) {
        let head = (cells.as_ptr() as usize / size_of::<Self>() % 2).min(cells.len());
        let (head, rest) = cells.split_at(head);
        let (turns, tail) = rest.split_at(rest.len() / TURN * TURN);
        (head, turns, tail)
    }

    /// Goes over the cells that hold the entries of the series, and empties them with `TAKE`;
    /// returns how many there were.
    #[inline(always)]
    fn go_along<const TAKE: bool>(cells: &[Self], mut series: Series) -> usize {
        let narrow = |cells: &[Self], series| {
            if TAKE {
                AtomicU64::take_series(Self::narrow(cells), series)
            } else {
                AtomicU64::match_series(Self::narrow(cells), series)
            }
        };
        let (head, turns, _) = Self::turns(cells);
        if turns.is_empty() || narrow(head, series) < head.len() {
            return narrow(cells, series);
        }
        series.next = series.next_after(head.len());
        let mut left = turns.len() / TURN;
        // SAFETY: `left` times 64 bytes from `turns` on are cells, which may be loaded and stored by
        // anybody at any time, and the first of them is aligned to 16 bytes. The processor has AVX,
        // since there are cells. What the loads and stores are is argued at the head of this file.
        unsafe {
            asm!(
                first_eight!(),
                "vmovq {compared}, {mask}",
                "vpunpcklqdq {compared}, {compared}, {compared}",
                "vpxor {zero}, {zero}, {zero}",
                "2:",
                "vpxor {x}, {a}, xmmword ptr [{cells}]",
                "vpxor {y}, {b}, xmmword ptr [{cells} + 16]",
                "vpxor {z}, {c}, xmmword ptr [{cells} + 32]",
                "vpxor {w}, {d}, xmmword ptr [{cells} + 48]",
                "vpor {x}, {x}, {y}",
                "vpor {z}, {z}, {w}",
                "vpor {x}, {x}, {z}",
                "vptest {x}, {compared}",
                "jnz 3f",
                ".if {take}",
                "vmovdqa xmmword ptr [{cells}], {zero}",
                "vmovdqa xmmword ptr [{cells} + 16], {zero}",
                "vmovdqa xmmword ptr [{cells} + 32], {zero}",
                "vmovdqa xmmword ptr [{cells} + 48], {zero}",
                ".endif",
                next_eight!(),
                "add {cells}, 64",
                "dec {left}",
                "jnz 2b",
                "3:",
                cells = inout(reg) turns.as_ptr() => _,
                left = inout(reg) left,
                next = in(reg) series.next,
                stride = in(reg) series.stride,
                mask = in(reg) !series.ignored,
                take = const TAKE as u32,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                x = out(xmm_reg) _, y = out(xmm_reg) _, z = out(xmm_reg) _, w = out(xmm_reg) _,
                eight = out(xmm_reg) _, compared = out(xmm_reg) _, zero = out(xmm_reg) _,
                options(nostack),
            );
        }
        let done = turns.len() - left * TURN;
        series.next = series.next_after(done);
        let done = head.len() + done;
        // Where it ended among the next eight, or the cells that are left over.
        done + narrow(cells.get(done..).unwrap_or(&[]), series)
    }
}

/// All cells of `$turns`, which is not empty, by the instruction `$by`: or, and.
macro_rules! fold {
    ($by:literal, $turns:expr) => {{
        let turns: &[WideCell] = $turns;
        let bits: u64;
        // SAFETY: as in `go_along`; nothing is stored.
        unsafe {
            asm!(
                "vmovdqa {a}, xmmword ptr [{cells}]",
                "vmovdqa {b}, {a}",
                "vmovdqa {c}, {a}",
                "vmovdqa {d}, {a}",
                "2:",
                concat!($by, " {a}, {a}, xmmword ptr [{cells}]"),
                concat!($by, " {b}, {b}, xmmword ptr [{cells} + 16]"),
                concat!($by, " {c}, {c}, xmmword ptr [{cells} + 32]"),
                concat!($by, " {d}, {d}, xmmword ptr [{cells} + 48]"),
                "add {cells}, 64",
                "dec {left}",
                "jnz 2b",
                concat!($by, " {a}, {a}, {b}"),
                concat!($by, " {c}, {c}, {d}"),
                concat!($by, " {a}, {a}, {c}"),
                "vpunpckhqdq {b}, {a}, {a}",
                concat!($by, " {a}, {a}, {b}"),
                "vmovq {bits}, {a}",
                cells = inout(reg) turns.as_ptr() => _,
                left = inout(reg) turns.len() / TURN => _,
                bits = lateout(reg) bits,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                options(nostack, readonly),
            );
        }
        bits
    }};
}

impl Cell for WideCell {
    const BYTES: usize = 8;

    #[inline(always)]
    fn get(&self) -> u64 {
        self.0.get()
    }

    #[inline(always)]
    fn get_acquire(&self) -> u64 {
        self.0.get_acquire()
    }

    #[inline(always)]
    fn set(&self, word: u64) {
        self.0.set(word);
    }

    #[inline(always)]
    fn set_release(&self, word: u64) {
        self.0.set_release(word);
    }

    #[inline(always)]
    fn exchange(&self, word: u64) -> u64 {
        self.0.exchange(word)
    }

    #[inline(always)]
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0.set_if(old, new)
    }

    #[inline(always)]
    fn set_if_and_fence(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0.set_if_and_fence(old, new)
    }

    #[inline(always)]
    fn set_series(cells: &[Self], mut series: Series) {
        let (head, turns, tail) = Self::turns(cells);
        if turns.is_empty() {
            return AtomicU64::set_series(Self::narrow(cells), series);
        }
        AtomicU64::set_series(Self::narrow(head), series);
        series.next = series.next_after(head.len());
        // SAFETY: as in `go_along`.
        unsafe {
            asm!(
                first_eight!(),
                "2:",
                "vmovdqa xmmword ptr [{cells}], {a}",
                "vmovdqa xmmword ptr [{cells} + 16], {b}",
                "vmovdqa xmmword ptr [{cells} + 32], {c}",
                "vmovdqa xmmword ptr [{cells} + 48], {d}",
                next_eight!(),
                "add {cells}, 64",
                "dec {left}",
                "jnz 2b",
                cells = inout(reg) turns.as_ptr() => _,
                left = inout(reg) turns.len() / TURN => _,
                next = in(reg) series.next,
                stride = in(reg) series.stride,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                x = out(xmm_reg) _, eight = out(xmm_reg) _,
                options(nostack),
            );
        }
        series.next = series.next_after(turns.len());
        AtomicU64::set_series(Self::narrow(tail), series);
    }

    #[inline(always)]
    fn match_series(cells: &[Self], series: Series) -> usize {
        Self::go_along::<false>(cells, series)
    }

    #[inline(always)]
    fn take_series(cells: &[Self], series: Series) -> usize {
        Self::go_along::<true>(cells, series)
    }

    #[inline(always)]
    fn union(cells: &[Self]) -> u64 {
        let (head, turns, tail) = Self::turns(cells);
        if turns.is_empty() {
            return AtomicU64::union(Self::narrow(cells));
        }
        let bits = fold!("vpor", turns);
        bits | AtomicU64::union(Self::narrow(head)) | AtomicU64::union(Self::narrow(tail))
    }

    #[inline(always)]
    fn intersection(cells: &[Self]) -> u64 {
        let (head, turns, tail) = Self::turns(cells);
        if turns.is_empty() {
            return AtomicU64::intersection(Self::narrow(cells));
        }
        let bits = fold!("vpand", turns);
        bits & AtomicU64::intersection(Self::narrow(head))
            & AtomicU64::intersection(Self::narrow(tail))
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
            let Some(cells) = WideCell::over(&wide) else {
                // Nothing to compare on such a processor.
                return Ok(());
            };
            let (cells, single) = (&cells[skip..], &narrow[skip..]);
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
