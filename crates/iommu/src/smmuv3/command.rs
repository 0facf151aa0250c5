//! Commands, and which of them a gather takes.
//!
//! IHI 0070, chapter 4 "Commands": 4.3 configuration, 4.4 TLB, 4.5 ATS, 4.7.3 CMD_SYNC. The operation code
//! is bits 7:0.
//!
//! # Pages
//!
//! With ranges (SMMU_IDR3.RIL, section 4.4.1.1) a command names (NUM + 1) · 2^SCALE granules: one command a
//! range of the gather, which names less than a sixteenth in excess. Without, a command names one address and
//! what is cached of it, whatever its size: one command for each leaf of the smallest level at which any
//! was removed. Where that comes to more than [`MOST_PAGE_COMMANDS`] the whole domain is invalidated by one.
//!
//! A level is named (TTL) when leaves of one level were removed and no tables.

use iopt::Invalidation;
use runs::{Iova, Span};

use super::domains::Shape;
use crate::arm;
use crate::commands::{self, Block, MOST_PAGE_COMMANDS, Room};
use crate::driver::Place;
use crate::unit::Pasid;

/// CMD_ATC_INV: all addresses, as 2^this pages of 4 KiB.
const ALL_PAGES: u32 = 52;

/// Which translations: those of a stage-1 domain, or of a stage-2 domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    Asid { vmid: u16, asid: u16 },
    Vmid(u16),
}

/// Some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    pub(super) address: u64,
    /// Granule, granules as NUM and SCALE, and the level; `None` for what is cached of one address.
    range: Option<Range>,
    leaf_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    granule: u64,
    number: u64,
    scale: u64,
    level: u64,
}

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// CMD_CFGI_ALL.
    AllStreams,
    /// CMD_CFGI_STE; the tables that lead to it too, unless `leaf`.
    Stream { stream: u32, leaf: bool },
    /// CMD_CFGI_CD; the tables that lead to it too, unless `leaf`.
    Context { stream: u32, pasid: u32, leaf: bool },
    /// CMD_TLBI_EL2_ALL.
    AllOfEl2,
    /// CMD_TLBI_NSNH_ALL.
    AllOfEl1,
    /// CMD_TLBI_NH_ASID or CMD_TLBI_S12_VMALL.
    Domain(Tag),
    /// CMD_TLBI_NH_VA or CMD_TLBI_S2_IPA.
    Pages(Tag, Pages),
    /// CMD_ATC_INV: 2^`mask` pages of 4 KiB.
    Device {
        stream: u32,
        pasid: Option<Pasid>,
        address: u64,
        mask: u32,
    },
    /// CMD_SYNC without a signal.
    Sync,
}

impl Command {
    /// A block of a device's TLB.
    pub(super) const fn device(place: Place, address: u64, mask: u32) -> Self {
        Self::Device {
            stream: place.device.0,
            pasid: place.pasid,
            address,
            mask,
        }
    }

    /// All of a device's TLB.
    pub(super) const fn whole_device(place: Place) -> Self {
        Self::device(place, 0, ALL_PAGES)
    }

    /// The two words.
    pub(super) fn words(self) -> [u64; 2] {
        match self {
            // CMD_CFGI_STE_RANGE, Range = 31.
            Self::AllStreams => [0x04, 31],
            Self::Stream { stream, leaf } => [0x03 | u64::from(stream) << 32, leaf.into()],
            Self::Context {
                stream,
                pasid,
                leaf,
            } => [
                0x05 | u64::from(pasid) << 12 | u64::from(stream) << 32,
                leaf.into(),
            ],
            Self::AllOfEl2 => [0x20, 0],
            Self::AllOfEl1 => [0x30, 0],
            Self::Domain(tag) => [tag.word(0x11, 0x28), 0],
            Self::Pages(tag, pages) => {
                let leaf = u64::from(pages.leaf_only);
                let (first, second) = match pages.range {
                    None => (0, 0),
                    Some(range) => (
                        range.number << 12 | range.scale << 20,
                        range.level << 8 | range.granule << 10,
                    ),
                };
                [tag.word(0x12, 0x2a) | first, pages.address | second | leaf]
            }
            Self::Device {
                stream,
                pasid,
                address,
                mask,
            } => {
                // SubstreamID and SSV.
                let pasid = pasid.map_or(0, |pasid| u64::from(pasid.0) << 12 | 1 << 11);
                [
                    0x40 | pasid | u64::from(stream) << 32,
                    address | u64::from(mask),
                ]
            }
            Self::Sync => [0x46, 0],
        }
    }

    /// A CMD_SYNC that stores `ticket` at `address`, a multiple of 4 (SIG_IRQ, with an MSI to memory that is
    /// cached and inner shareable).
    pub(super) fn sync_with_ticket(address: u64, ticket: u32) -> [u64; 2] {
        [
            0x46 | 1 << 12 | 3 << 22 | 0xf << 24 | u64::from(ticket) << 32,
            address & ((1 << 52) - 1) & !3,
        ]
    }
}

impl Tag {
    /// The first word of a command for stage 1, or for stage 2.
    const fn word(self, first: u64, second: u64) -> u64 {
        match self {
            Self::Asid { vmid, asid } => first | (vmid as u64) << 32 | (asid as u64) << 48,
            Self::Vmid(vmid) => second | (vmid as u64) << 32,
        }
    }
}

/// Bytes of a leaf at a level, as a power of two.
fn leaf_log2(level: u32, shape: Shape) -> u32 {
    (shape.log2 + level * arm::stride(shape.log2)).min(63)
}

/// The blocks of a device's TLB that cover what a gather names; `None` when they are too many.
pub(super) fn device_pages<'r>(
    what: &Invalidation,
    shape: Shape,
    room: &'r mut Room,
) -> Option<&'r [Block]> {
    let largest = leaf_log2(what.leaf_levels().max(1).ilog2(), shape);
    commands::blocks_of(what, largest - 12, ALL_PAGES, room)
}

/// The pages that cover what a gather names; `None` when they are too many commands.
pub(super) fn pages(
    what: &Invalidation,
    shape: Shape,
    ranges: bool,
) -> Option<impl Iterator<Item = Pages>> {
    let levels = what.leaf_levels().max(1);
    let leaf_only = !what.tables_unlinked();
    let log2 = |level: u32| leaf_log2(level, shape);
    // Leaves are named whole. A gather's ranges hold them whole, but it may come from elsewhere.
    let largest = log2(levels.ilog2());
    let step = if ranges {
        None
    } else {
        Some(log2(levels.trailing_zeros()))
    };
    // TTL: Arm's level, counted from the other end. It has no word for its level 0.
    let level = match levels.ilog2() {
        level @ 0..3 if leaf_only && levels.is_power_of_two() => 3 - u64::from(level),
        _ => 0,
    };
    let ends = move |range: &Span<Iova>| {
        let first = range.start >> largest << largest;
        (first, range.last() | ((1 << largest) - 1))
    };
    let some = what.ranges().iter().filter(|range| !range.is_empty());
    // NUM and SCALE have five bits each in every unit: 32 · 2^31 granules.
    let too_long = |range| {
        let (first, last) = ends(range);
        (last - first) >> shape.log2 >> 36 != 0
    };
    if ranges && some.clone().any(too_long) {
        return None;
    }
    let named = move |range: &Span<Iova>| {
        let (first, last) = ends(range);
        // Steps after the first.
        let more = step.map_or(0, |step| (last - first) >> step);
        (0..=more).map(move |n| match step {
            Some(step) => Pages {
                address: first + (n << step),
                range: None,
                leaf_only,
            },
            None => Pages {
                address: first,
                range: granules((last - first) >> shape.log2, level, shape),
                leaf_only,
            },
        })
    };
    let all = some.flat_map(named);
    let few = all.clone().nth(MOST_PAGE_COMMANDS).is_none();
    few.then_some(all)
}

/// One granule and `more`, in a form that covers them.
fn granules(more: u64, level: u64, shape: Shape) -> Option<Range> {
    // One granule of any level would be a reserved form.
    if more == 0 && level == 0 {
        return None;
    }
    // More than 32 are counted in larger units.
    let scale = u64::from((u64::BITS - more.leading_zeros()).saturating_sub(5));
    Some(Range {
        granule: u64::from((shape.log2 - 10) / 2),
        number: more >> scale,
        scale,
        level,
    })
}
