//! Invalidation commands, and which of them a gather needs.
//!
//! VT-d specification, section 6.5.2 "Queued Invalidation Interface", one descriptor each; and the
//! same by registers: "Context Command Register", "IOTLB Invalidate Register" and "Invalidate Address
//! Register" of chapter 11.
//!
//! # Pages
//!
//! A page-selective command names 2^*mask* pages from a multiple of their size. Leaves larger than
//! 4 KiB must be named whole (Invalidate Address Register, field AM), so ranges grow to the largest
//! leaf that was removed. A range then takes one block, if one of less than twice its size covers it,
//! and else two that meet at the most aligned address inside it, each of less than twice its part.
//! What is named in excess costs another walk, and nothing else. Blocks beyond the unit's largest mask
//! are several commands. Where that comes to more than [`MOST_PAGE_COMMANDS`], or a leaf is larger
//! than the largest mask, or the unit has no such command, the whole domain is invalidated by one.

use iopt::Invalidation;
use runs::Span;

/// More page-selective commands than this for one gather are replaced by one for the whole domain:
/// two for each of the 16 ranges that a gather keeps apart, so that only a small largest mask leads
/// there.
pub const MOST_PAGE_COMMANDS: usize = 32;

/// The PASID of requests without one: the one that context entries assign (RID_PASID).
const NO_PASID: u64 = 0;

/// One command. Domains and sources are those of the unit: 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// All of the context cache.
    AllContexts,
    /// The context entry of one device, if it is cached with this domain.
    Context { domain: u16, source: u16 },
    /// All of the PASID cache.
    AllPasids,
    /// What the PASID cache has of requests without a PASID, in one domain.
    Pasid { domain: u16 },
    /// All of the IOTLB and of the paging-structure caches.
    All,
    /// All of a domain.
    Domain { domain: u16 },
    /// Pages of a domain; the caches of upper levels only if not `leaf_only`.
    Pages {
        domain: u16,
        block: Block,
        leaf_only: bool,
    },
    /// All first-stage translations of requests without a PASID, in one domain.
    FirstStage { domain: u16 },
    /// Pages of these.
    FirstStagePages {
        domain: u16,
        block: Block,
        leaf_only: bool,
    },
}

/// 2^`mask` pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) mask: u32,
}

impl Block {
    /// The second word of a page-selective descriptor, and the Invalidate Address Register.
    const fn word(self, leaf_only: bool) -> u64 {
        self.address | (leaf_only as u64) << 6 | self.mask as u64
    }
}

/// DR and DW in a descriptor, and from bit 48 on in the register.
const fn drain((reads, writes): (bool, bool)) -> (u64, u64) {
    let (reads, writes) = (reads as u64, writes as u64);
    (reads << 7 | writes << 6, reads << 49 | writes << 48)
}

/// A command given through registers.
pub(super) enum ByRegister {
    /// The Context Command Register.
    Context(u64),
    /// The IOTLB Invalidate Register, and the Invalidate Address Register before it.
    Iotlb(u64, Option<u64>),
    /// There is no such register.
    None,
}

impl Command {
    /// The first two words of the descriptor; what follows is zero. `draining` is (reads, writes).
    pub(super) fn descriptor(self, draining: (bool, bool)) -> [u64; 2] {
        let (drain, _) = drain(draining);
        let granularity = |g: u64| g << 4;
        let of = |domain: u16| u64::from(domain) << 16;
        match self {
            Self::AllContexts => [0x1 | granularity(1), 0],
            Self::Context { domain, source } => [
                0x1 | granularity(3) | of(domain) | u64::from(source) << 32,
                0,
            ],
            Self::All => [0x2 | granularity(1) | drain, 0],
            Self::Domain { domain } => [0x2 | granularity(2) | drain | of(domain), 0],
            Self::Pages {
                domain,
                block,
                leaf_only,
            } => [
                0x2 | granularity(3) | drain | of(domain),
                block.word(leaf_only),
            ],
            // These two drain without being asked.
            Self::FirstStage { domain } => [0x6 | granularity(2) | of(domain) | NO_PASID << 32, 0],
            Self::FirstStagePages {
                domain,
                block,
                leaf_only,
            } => [
                0x6 | granularity(3) | of(domain) | NO_PASID << 32,
                block.word(leaf_only),
            ],
            Self::AllPasids => [0x7 | granularity(3), 0],
            Self::Pasid { domain } => [0x7 | granularity(1) | of(domain) | NO_PASID << 32, 0],
        }
    }

    /// The same through registers. Scalable mode has only the queue.
    pub(super) fn by_register(self, draining: (bool, bool)) -> ByRegister {
        const GO: u64 = 1 << 63;
        let (_, drain) = drain(draining);
        let context = |g: u64| GO | g << 61;
        let iotlb = |g: u64, domain: u16| GO | g << 60 | drain | u64::from(domain) << 32;
        match self {
            Self::AllContexts => ByRegister::Context(context(1)),
            Self::Context { domain, source } => {
                ByRegister::Context(context(3) | u64::from(source) << 16 | u64::from(domain))
            }
            Self::All => ByRegister::Iotlb(iotlb(1, 0), None),
            Self::Domain { domain } => ByRegister::Iotlb(iotlb(2, domain), None),
            Self::Pages {
                domain,
                block,
                leaf_only,
            } => ByRegister::Iotlb(iotlb(3, domain), Some(block.word(leaf_only))),
            Self::AllPasids
            | Self::Pasid { .. }
            | Self::FirstStage { .. }
            | Self::FirstStagePages { .. } => ByRegister::None,
        }
    }
}

/// The blocks that cover what a gather names, for a unit whose largest mask is `most`; `None` when
/// they are too many, or too small for its leaves.
pub(super) fn blocks(
    what: &Invalidation,
    most: u32,
) -> Option<impl Iterator<Item = Block> + Clone> {
    // Levels have 9 bits in all of the unit's formats.
    let leaf = what.leaf_levels().checked_ilog2().unwrap_or(0) * 9;
    if leaf > most {
        return None;
    }
    let blocks = what
        .ranges()
        .iter()
        .filter(|range| !range.is_empty())
        .flat_map(move |range| cover(range, leaf))
        .flat_map(move |block| split(block, most));
    let few = blocks.clone().nth(MOST_PAGE_COMMANDS).is_none();
    few.then_some(blocks)
}

/// One or two blocks around a range, of at least 2^`least` pages.
fn cover(range: &Span, least: u32) -> impl Iterator<Item = Block> + Clone {
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
fn split(block: Block, most: u32) -> impl Iterator<Item = Block> + Clone {
    let mask = block.mask.min(most);
    (0..1u64 << (block.mask - mask)).map(move |n| Block {
        address: block.address + (n << mask << 12),
        mask,
    })
}
