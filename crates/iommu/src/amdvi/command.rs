//! Commands.
//!
//! AMD IOMMU specification, section 2.4 "Commands": 2.4.1 COMPLETION_WAIT, 2.4.2
//! INVALIDATE_DEVTAB_ENTRY, 2.4.3 INVALIDATE_IOMMU_PAGES, 2.4.4 INVALIDATE_IOTLB_PAGES, 2.4.8
//! INVALIDATE_IOMMU_ALL. The operation code is the first half's bits 63:60.

use crate::commands::Block;

/// Blocks of up to 2^52 pages: all that there is.
pub(super) const MOST_PAGES: u32 = Block::ALL.mask;

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// One device's entry.
    Device { source: u16 },
    /// Pages of a domain, and the caches of upper levels too if `tables`.
    Pages {
        domain: u16,
        block: Block,
        tables: bool,
    },
    /// Pages of a guest table: of a PASID in a domain, and the caches of upper levels too if `tables`.
    GuestPages {
        domain: u16,
        pasid: u32,
        block: Block,
        tables: bool,
    },
    /// Pages in a device's TLB, of which the device takes `depth` commands at a time, 0 for 32.
    InDevice {
        source: u16,
        depth: u8,
        block: Block,
    },
    /// Everything.
    All,
    /// No later command begins before all earlier ones are complete.
    Barrier,
}

impl Command {
    /// All of a domain.
    pub(super) const fn domain(domain: u16) -> Self {
        Self::Pages {
            domain,
            block: Block::ALL,
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
            // GN.
            Self::GuestPages {
                domain,
                pasid,
                block,
                tables,
            } => [
                3 << 60 | (domain as u64) << 32 | pasid as u64,
                range(block) | 1 << 2 | (tables as u64) << 1,
            ],
            Self::InDevice {
                source,
                depth,
                block,
            } => {
                // Maxpend, and QueueID: the device itself.
                let depth = if depth == 0 { 32 } else { depth as u64 };
                let source = source as u64;
                [4 << 60 | source << 32 | depth << 24 | source, range(block)]
            }
            Self::All => [8 << 60, 0],
        }
    }

    /// A COMPLETION_WAIT that stores `ticket` at `address`, a multiple of 8 below 2^52 (S).
    pub(super) const fn wait(address: u64, ticket: u64) -> [u64; 2] {
        [1 << 60 | address & 0x000f_ffff_ffff_fff8 | 1, ticket]
    }
}

/// Address and S.
const fn range(block: Block) -> u64 {
    let (address, size) = block.sized();
    address | size as u64
}
