#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! A [`Run`] is a stretch that is contiguous in both address spaces: the device addresses
//! `[iova, iova + len)` are `[pa, pa + len)` in memory. A [`Span<A>`](Span) is a stretch of one
//! address space, which its type names: [`Iova`], [`Pa`], [`GuestAddr`], [`Offset`] or [`Va`]. This
//! crate holds these types and the arithmetic that every other part of the system does with them:
//!
//! * [`Joiner`] merges neighbours while they stream by; [`merge_sorted`] merges a sorted slice;
//! * [`bitmap`] turns bitmaps into runs of set bits and back;
//! * [`PageSizes`] is the set of page sizes of a format and answers, in constant time, which
//!   size fits and how often;
//! * [`SizeHistogram`] counts runs by size; [`Bytes`] prints a length.
//!
//! All lengths and addresses are bytes.

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
pub use join::{Joinable, Joiner, merge_sorted};
pub use page_sizes::PageSizes;
pub use span::{GuestAddr, Iova, Offset, Pa, Run, Span, Va};
