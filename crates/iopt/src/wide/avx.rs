//! Long rows of cells, two entries at a time.
//!
//! # Why this is allowed on linked tables
//!
//! Others read and write a linked table at any time, so each entry must be accessed as an atomic of
//! 8 bytes. The compiler's own vectors promise nothing of that kind. The instructions here do: on a
//! processor with AVX, a `VMOVDQA` of 16 bytes to or from cached memory is atomic as a whole (Intel
//! SDM, volume 3, section 9.1.1 "Guaranteed Atomic Operations"; AMD APM, volume 2, section 7.3.2
//! "Access Atomicity"), and with it each of its halves. They are written as inline assembly, which
//! the compiler takes for accesses to memory that it knows nothing of, no more and no less than that
//! many relaxed accesses one after the other. Wider vectors promise nothing, so none are used.

use core::arch::asm;
use core::sync::atomic::AtomicU64;

use crate::cell::{Cell, Series};

/// Entries of a block, which one iteration of a loop handles.
const BLOCK: usize = 8;

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

/// A row on a processor with AVX: the cells before the first that is aligned to 16 bytes (none or one),
/// those of whole blocks, of which there is at least one, and the rest.
struct Blocks<'c> {
    head: &'c [AtomicU64],
    blocks: &'c [AtomicU64],
    tail: &'c [AtomicU64],
}

impl<'c> Blocks<'c> {
    #[inline(always)]
    fn of(cells: &'c [AtomicU64]) -> Option<Self> {
        let head = (cells.as_ptr().addr() / size_of::<u64>() % 2).min(cells.len());
        let (head, rest) = cells.split_at(head);
        let (blocks, tail) = rest.split_at(rest.len() / BLOCK * BLOCK);
        let any = !blocks.is_empty() && std::is_x86_feature_detected!("avx");
        any.then_some(Self { head, blocks, tail })
    }
}

/// Goes over the cells that hold the entries of the series, and empties them with `TAKE`;
/// returns how many there were.
#[inline(always)]
fn go_along<const TAKE: bool>(cells: &[AtomicU64], mut series: Series) -> usize {
    let single = |cells: &[AtomicU64], series| {
        if TAKE {
            AtomicU64::take_series(cells, series)
        } else {
            AtomicU64::match_series(cells, series)
        }
    };
    let Some(Blocks { head, blocks, .. }) = Blocks::of(cells) else {
        return single(cells, series);
    };
    if single(head, series) < head.len() {
        return 0;
    }
    series.next = series.next_after(head.len());
    let mut left = blocks.len() / BLOCK;
    // SAFETY: `left` times 64 bytes from `blocks` on are cells, which may be loaded and stored by
    // any thread at any time, and the first of them is aligned to 16 bytes; the processor has AVX
    // (`Blocks`). The head of this file argues which loads and stores these are.
    unsafe {
        asm!(
            first_eight!(),
            "vmovq {compared}, {mask}",
            "vpunpcklqdq {compared}, {compared}, {compared}",
            "vpxor {zero}, {zero}, {zero}",
            "2:",
            "vmovdqa {x}, xmmword ptr [{cells}]",
            "vmovdqa {y}, xmmword ptr [{cells} + 16]",
            "vmovdqa {z}, xmmword ptr [{cells} + 32]",
            "vmovdqa {w}, xmmword ptr [{cells} + 48]",
            "vpxor {x}, {x}, {a}",
            "vpxor {y}, {y}, {b}",
            "vpxor {z}, {z}, {c}",
            "vpxor {w}, {w}, {d}",
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
            cells = inout(reg) blocks.as_ptr() => _,
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
    let done = blocks.len() - left * BLOCK;
    series.next = series.next_after(done);
    let done = head.len() + done;
    // Where it ended among the next eight, or the cells that are left over.
    done + single(cells.get(done..).unwrap_or(&[]), series)
}

/// All cells of the row by the instruction `$by`, and what the others come to by `$single`.
macro_rules! fold {
    ($by:literal, $cells:expr, $single:path, $join:expr) => {{
        let cells: &[AtomicU64] = $cells;
        let Some(Blocks { head, blocks, tail }) = Blocks::of(cells) else {
            return $single(cells);
        };
        let bits: u64;
        // SAFETY: as in `go_along`; nothing is stored.
        unsafe {
            asm!(
                "vmovdqa {a}, xmmword ptr [{cells}]",
                "vmovdqa {b}, {a}",
                "vmovdqa {c}, {a}",
                "vmovdqa {d}, {a}",
                "2:",
                "vmovdqa {x}, xmmword ptr [{cells}]",
                "vmovdqa {y}, xmmword ptr [{cells} + 16]",
                "vmovdqa {z}, xmmword ptr [{cells} + 32]",
                "vmovdqa {w}, xmmword ptr [{cells} + 48]",
                concat!($by, " {a}, {a}, {x}"),
                concat!($by, " {b}, {b}, {y}"),
                concat!($by, " {c}, {c}, {z}"),
                concat!($by, " {d}, {d}, {w}"),
                "add {cells}, 64",
                "dec {left}",
                "jnz 2b",
                concat!($by, " {a}, {a}, {b}"),
                concat!($by, " {c}, {c}, {d}"),
                concat!($by, " {a}, {a}, {c}"),
                "vpunpckhqdq {b}, {a}, {a}",
                concat!($by, " {a}, {a}, {b}"),
                "vmovq {bits}, {a}",
                cells = inout(reg) blocks.as_ptr() => _,
                left = inout(reg) blocks.len() / BLOCK => _,
                bits = lateout(reg) bits,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                x = out(xmm_reg) _, y = out(xmm_reg) _, z = out(xmm_reg) _, w = out(xmm_reg) _,
                options(nostack, readonly),
            );
        }
        $join($join(bits, $single(head)), $single(tail))
    }};
}

#[inline(never)]
pub(super) fn set_series(cells: &[AtomicU64], mut series: Series) {
    let Some(Blocks { head, blocks, tail }) = Blocks::of(cells) else {
        return AtomicU64::set_series(cells, series);
    };
    AtomicU64::set_series(head, series);
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
            cells = inout(reg) blocks.as_ptr() => _,
            left = inout(reg) blocks.len() / BLOCK => _,
            next = in(reg) series.next,
            stride = in(reg) series.stride,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            x = out(xmm_reg) _, eight = out(xmm_reg) _,
            options(nostack),
        );
    }
    series.next = series.next_after(blocks.len());
    AtomicU64::set_series(tail, series);
}

#[inline(never)]
pub(super) fn match_series(cells: &[AtomicU64], series: Series) -> usize {
    go_along::<false>(cells, series)
}

#[inline(never)]
pub(super) fn take_series(cells: &[AtomicU64], series: Series) -> usize {
    go_along::<true>(cells, series)
}

#[inline(never)]
pub(super) fn union(cells: &[AtomicU64]) -> u64 {
    fold!("vpor", cells, AtomicU64::union, |a, b| a | b)
}

#[inline(never)]
pub(super) fn intersection(cells: &[AtomicU64]) -> u64 {
    fold!("vpand", cells, AtomicU64::intersection, |a, b| a & b)
}
