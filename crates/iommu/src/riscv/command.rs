//! Commands.
//!
//! RISC-V IOMMU specification, section "Command-Queue": "IOMMU Page-Table cache invalidation commands",
//! "IOMMU Command-queue Fence commands", "IOMMU directory cache invalidation commands", "IOMMU PCIe ATS
//! commands"; chapter "IOMMU Extensions": "Non-leaf PTE Invalidation" (NL), "Address Range Invalidation"
//! (S). The first word has the operation in bits 9:0, the second an address.
//!
//! A command for one PSCID spares leaves that are marked as global, which translate for all others too: `iopt`
//! writes none, and adopts no table with one.

use crate::commands::Block;

/// A block of 2^52 pages is everything.
pub(super) const ALL: u32 = 52;

/// Tag of cached translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// A first-stage table's PSCID, while the second stage is Bare.
    Process(u32),
    /// A second-stage table's GSCID, while the first stage is Bare.
    Guest(u16),
}

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A device's context and all process contexts below it, or everything in directories.
    Device(Option<u32>),
    /// One process context.
    Process { device: u32, process: u32 },
    /// All that was made from one table, or only the leaves in a block, and the entries above them if
    /// `tables`.
    Table {
        tag: Tag,
        pages: Option<(Block, bool)>,
    },
    /// All that was made from first-stage tables: of a guest, or without a second stage.
    First(Option<u16>),
    /// All that was made from second-stage tables.
    Second,
    /// A block in the TLB of a device.
    DeviceTlb {
        device: u32,
        /// The device's id begins with a segment.
        segments: bool,
        process: Option<u32>,
        block: Block,
    },
    /// No later command begins before all earlier ones are complete.
    Barrier,
}

// Operations: opcode and func3.
const FIRST: u64 = 1;
const SECOND: u64 = 1 | 1 << 7;
const FENCE: u64 = 2;
const DEVICE: u64 = 3;
const PROCESS: u64 = 3 | 1 << 7;
const DEVICE_TLB: u64 = 4;

/// AV, in page-table and fence commands.
const ADDRESS: u64 = 1 << 10;
/// PSCV; in commands to devices, PV.
const PROCESS_VALID: u64 = 1 << 32;
/// GV; in directory commands DV, in commands to devices DSV.
const ID_VALID: u64 = 1 << 33;
/// NL.
const UPPER_LEVELS: u64 = 1 << 34;

impl Command {
    /// The two words.
    pub(super) const fn words(self) -> [u64; 2] {
        match self {
            Self::Device(None) => [DEVICE, 0],
            Self::Device(Some(device)) => [DEVICE | ID_VALID | (device as u64) << 40, 0],
            Self::Process { device, process } => [
                PROCESS | ID_VALID | (device as u64) << 40 | (process as u64) << 12,
                0,
            ],
            Self::Table { tag, pages } => {
                let operation = match tag {
                    Tag::Process(id) => FIRST | PROCESS_VALID | (id as u64) << 12,
                    Tag::Guest(id) => SECOND | ID_VALID | (id as u64) << 44,
                };
                match pages {
                    None => [operation, 0],
                    Some((block, tables)) => {
                        let upper = if tables { UPPER_LEVELS } else { 0 };
                        // ADDR is in bits 61:10, S below it.
                        let range = (block.mask > 0) as u64;
                        [
                            operation | ADDRESS | upper,
                            page_range(block) << 10 | range << 9,
                        ]
                    }
                }
            }
            Self::First(None) => [FIRST, 0],
            Self::First(Some(guest)) => [FIRST | ID_VALID | (guest as u64) << 44, 0],
            Self::Second => [SECOND, 0],
            Self::DeviceTlb {
                device,
                segments,
                process,
                block,
            } => {
                // RID, and DSEG above it.
                let mut word = DEVICE_TLB | (device as u64) << 40;
                if segments {
                    word |= ID_VALID;
                }
                if let Some(process) = process {
                    word |= PROCESS_VALID | (process as u64) << 12;
                }
                // An Invalidation Request's body: the address from bit 12 on, S in bit 11.
                let range = (block.mask > 0) as u64;
                [word, page_range(block) << 12 | range << 11]
            }
            Self::Barrier => [FENCE, 0],
        }
    }

    /// An IOFENCE.C that stores `ticket` at `address`, a multiple of 4 (AV), after all reads and writes of
    /// devices that the unit has processed (PR, PW).
    pub(super) const fn wait(address: u64, ticket: u32) -> [u64; 2] {
        [
            FENCE | ADDRESS | 1 << 12 | 1 << 13 | (ticket as u64) << 32,
            address >> 2,
        ]
    }
}

/// The page numbers of a block: where the lowest 0 is says the size, as in PCI Express' Invalidation
/// Request. All of 2^52 are a 0 in the highest of the 52 bits.
const fn page_range(block: Block) -> u64 {
    let page = block.address >> 12;
    match block.mask {
        0 => page,
        mask => page | ((1 << (mask - 1)) - 1),
    }
}
