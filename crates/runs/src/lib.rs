//! Memory moves in runs, never page by page.
//!
//! It turns pages, folios and bitmaps into stretches; all other crates of `dmaspace` use it.
//!
//! A [`Run`] is a stretch that is contiguous in both address spaces: what a device calls
//! `[iova, iova + len)` is `[pa, pa + len)` in memory. A [`Span<A>`](Span) is a stretch of one
//! address space, which its type names: [`Iova`], [`Pa`], [`GuestAddr`], [`Offset`] or [`Va`]. This
//! crate holds these types and the arithmetic that every other part of the system does with them:
//!
//! * [`Joiner`] merges neighbours while they stream by; [`merge_sorted`] merges a sorted slice;
//! * [`bitmap`] turns bitmaps into runs of set bits and back;
//! * [`PageSizes`] is the set of page sizes of a format and answers, in constant time, which
//!   size fits and how often;
//! * [`SizeHistogram`] counts runs by size; [`Bytes`] prints a length.
//!
//! All lengths and addresses are bytes. Nothing here allocates, and nothing panics on any input.
//!
//! ```
//! use runs::{Joiner, Pa, PageSizes, Span};
//!
//! // Three folios, the first two adjacent in memory: two runs.
//! let mut runs = Vec::new();
//! let mut joiner = Joiner::new();
//! let folios = [(0x20_0000, 0x1000), (0x20_1000, 0x3000), (0x80_0000, 0x1000)];
//! for folio in folios.map(|(at, len)| Span::<Pa>::new(at, len)) {
//!     runs.extend(joiner.push(folio));
//! }
//! runs.extend(joiner.finish());
//! assert_eq!(runs, [Span::new(0x20_0000, 0x4000), Span::new(0x80_0000, 0x1000)]);
//!
//! // 4 MiB at a 2 MiB boundary is two 2 MiB pages.
//! let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
//! assert_eq!(sizes.step(0x20_0000, Span::new(0x4020_0000, 4 << 20)), Some((2 << 20, 2)));
//! ```

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod bitmap;
mod bytes;
mod histogram;
mod join;
mod page_sizes;
mod span;

pub use bytes::Bytes;
pub use histogram::SizeHistogram;
pub use join::{Joiner, merge_sorted};
pub use page_sizes::PageSizes;
pub use span::{GuestAddr, Iova, Offset, Pa, Run, Span, Va};
