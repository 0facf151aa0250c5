//! Commands.
//!
//! AMD IOMMU specification, section 2.4 "Commands": 2.4.1 COMPLETION_WAIT, 2.4.2
//! INVALIDATE_DEVTAB_ENTRY, 2.4.3 INVALIDATE_IOMMU_PAGES, 2.4.8 INVALIDATE_IOMMU_ALL. The operation
//! code is the first half's bits 63:60.

use crate::commands::Block;

/// Blocks of up to 2^52 pages: all that there is.
pub(super) const MOST_PAGES: u32 = 52;

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// One device's entry.
    Device { source: u16 },
    /// Pages of a domain, and the caches of upper levels too if `tables`.
    Pages {
        domain: u16,
        block: Block,
        tables: bool,
    },
    /// Everything.
    All,
    /// No later command begins before all earlier ones are complete.
    Barrier,
}

impl Command {
    /// All of a domain.
    pub(super) const fn domain(domain: u16) -> Self {
        let (address, mask) = (0, MOST_PAGES);
        Self::Pages {
            domain,
            block: Block { address, mask },
            tables: true,
        }
    }

    /// The two halves.
    pub(super) const fn words(self) -> [u64; 2] {
        match self {
            // F, flush queue.
            Self::Barrier => [1 << 60 | 1 << 2, 0],
            Self::Device { source } => [2 << 60 | source as u64, 0],
            Self::Pages {
                domain,
                block,
                tables,
            } => [
                3 << 60 | (domain as u64) << 32,
                range(block) | (tables as u64) << 1,
            ],
            Self::All => [8 << 60, 0],
        }
    }

    /// A COMPLETION_WAIT that stores `ticket` at `address`, a multiple of 8 below 2^52 (S).
    pub(super) const fn wait(address: u64, ticket: u64) -> [u64; 2] {
        [1 << 60 | address & 0x000f_ffff_ffff_fff8 | 1, ticket]
    }
}

/// Address and S: as in a level-7 leaf, the size is where the lowest 0 is, from bit 12 on. 2^64 bytes
/// are a 0 in bit 63.
const fn range(block: Block) -> u64 {
    if block.mask == 0 {
        return block.address;
    }
    let ones = (1 << (block.mask + 11)) - 1;
    block.address | ones & !0xfff | 1
}
