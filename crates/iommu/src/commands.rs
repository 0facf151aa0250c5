//! Common parts of drivers that give commands: the number that a gather takes, and its count.
//!
//! # Pages
//!
//! A command for pages names 2^*mask* of them from a multiple of their size (VT-d: Invalidate Address Register, field
//! AM; AMD-Vi: INVALIDATE_IOMMU_PAGES, bit S). Leaves larger than 4 KiB must be named whole, so ranges grow to the size
//! of the highest level at which a leaf was removed; leaves of sizes between those of levels are whole in a gather's
//! ranges. A range then takes one block, if one of less than twice its size covers it, and else two that meet at the
//! most aligned address inside it, each of less than twice its part. Pages named in excess cost another walk, and
//! nothing else. Blocks beyond the unit's largest mask are several commands. Where that comes to more than
//! [`MOST_PAGE_COMMANDS`], or a leaf is larger than the largest mask, or the unit has no such command, the whole domain
//! is invalidated by one. Commands that are given for each of several address spaces or devices count together
//! ([`parts`]).

use arrayvec::ArrayVec;
use iopt::Invalidation;
use runs::{Iova, Span};

/// More commands for pages than this for one gather are replaced by one for the whole domain:
/// two for each of the 16 ranges that a gather keeps apart, so that only a small largest mask leads
/// there.
pub const MOST_PAGE_COMMANDS: usize = 32;

/// The commands that a unit has been given in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandCounters {
    /// Batches of commands that were begun: one for a flush, an attach or a detach that needs any.
    pub batches: u64,
    /// Commands that are complete, without those for waiting.
    pub commands: u64,
    /// Times that the driver has waited for completion: once for a batch that the queue holds at a
    /// time, once for each command that is given through registers.
    pub waits: u64,
}

/// 2^`mask` pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub(crate) address: u64,
    pub(crate) mask: u32,
}

impl Block {
    /// All of an address space.
    pub(crate) const ALL: Self = Self {
        address: 0,
        mask: 52,
    };

    /// The address with the size in it, as translations are invalidated in devices (PCI Express Base
    /// Specification, section 10.3 "ATS Invalidation"), and by AMD-Vi: with the flag S, the size is where
    /// the lowest 0 is, from bit 12 on. 2^64 bytes are a 0 in bit 63. The flag is true for more than one
    /// page.
    pub(crate) const fn sized(self) -> (u64, bool) {
        if self.mask == 0 {
            return (self.address, false);
        }
        let ones = (1 << (self.mask + 11)) - 1;
        (self.address | ones & !0xfff, true)
    }
}

/// Room for the blocks of one flush.
pub(crate) type Room = ArrayVec<Block, MOST_PAGE_COMMANDS>;

/// Commands for each of `times` address spaces or devices: these blocks, or everything (`None`)
/// where the blocks, or all commands together, are too many.
pub(crate) fn parts(
    blocks: Option<&[Block]>,
    times: usize,
) -> impl Iterator<Item = Option<Block>> + Clone {
    let few = |count: usize| count.saturating_mul(times) <= MOST_PAGE_COMMANDS;
    let blocks = blocks.filter(|blocks| few(blocks.len()));
    let all = blocks.is_none().then_some(None);
    let blocks = blocks.unwrap_or_default().iter();
    all.into_iter().chain(blocks.copied().map(Some))
}

/// The blocks that cover what a gather names, for a unit whose largest mask is `most`; `None` when
/// they are too many, or too small for its leaves.
pub(crate) fn blocks<'r>(
    what: &Invalidation,
    most: u32,
    room: &'r mut Room,
) -> Option<&'r [Block]> {
    // Levels have 9 bits in all of the unit's formats.
    let leaf = what.leaf_levels().checked_ilog2().unwrap_or(0) * 9;
    blocks_of(what, leaf, most, room)
}

/// The same where the largest leaf that was removed has 2^`leaf` pages.
pub(crate) fn blocks_of<'r>(
    what: &Invalidation,
    leaf: u32,
    most: u32,
    room: &'r mut Room,
) -> Option<&'r [Block]> {
    if leaf > most {
        return None;
    }
    for range in what.ranges().iter().filter(|range| !range.is_empty()) {
        for block in cover(range, leaf).flat_map(|block| split(block, most)) {
            room.try_push(block).ok()?;
        }
    }
    Some(room)
}

/// One or two blocks around a range, of at least 2^`least` pages.
fn cover(range: &Span<Iova>, least: u32) -> impl Iterator<Item = Block> {
    let (first, last) = (range.start >> 12 >> least, range.last() >> 12 >> least);
    let around = |first: u64, last: u64| {
        // The bits in which addresses of the block differ.
        let bits = u64::BITS - (first ^ last).leading_zeros();
        Block {
            address: first >> bits << bits << least << 12,
            mask: bits + least,
        }
    };
    let one = around(first, last);
    let count = last - first + 1;
    let waste = 1u64.checked_shl(one.mask - least).unwrap_or(u64::MAX) / 2 >= count;
    let (one, two) = if waste {
        // Where the highest bit that differs becomes 1.
        let middle = last >> (one.mask - least - 1) << (one.mask - least - 1);
        // Each part is shorter than the alignment of where they meet.
        let below = (middle - first).next_power_of_two();
        (
            around(middle - below, middle - 1),
            Some(around(middle, last)),
        )
    } else {
        (one, None)
    };
    core::iter::once(one).chain(two)
}

/// A block in pieces of at most 2^`most` pages.
fn split(block: Block, most: u32) -> impl Iterator<Item = Block> {
    let mask = block.mask.min(most);
    (0..1u64 << (block.mask - mask)).map(move |n| Block {
        address: block.address + (n << mask << 12),
        mask,
    })
}
