//! Interface of a format's file, and the shape of its tables.

use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::Aperture;
use crate::prot::Prot;

/// One format, read from its specification.
pub(super) trait Spec {
    /// Each level's permissions are looked at when it is read; otherwise all of them together,
    /// when the leaf is.
    const CHECKS_EACH_LEVEL: bool = true;

    /// The shape of the walker's tables; `None` when the format has no such root.
    fn shape(walker: &Walker) -> Option<Shape>;

    /// Decodes `word`, met at `level` on the way to `iova`.
    fn read(walker: &Walker, iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason>;

    /// The first and the last byte of the page of 2^`log2` bytes that accesses may touch, where the
    /// leaf `word` leads to; the whole page unless the format can say otherwise. None where the first
    /// lies behind the last.
    fn open(walker: &Walker, word: u64, log2: u32) -> (u64, u64) {
        let _ = (walker, word);
        (0, low_bits(log2))
    }

    /// The entry `word` of a table at `level`, a leaf or one that leads to a table, with the bits
    /// that the unit sets in it when it is used for `access`: as far as the walker's unit does so.
    fn marked(walker: &Walker, level: u8, leaf: bool, word: u64, access: Access) -> u64;
}

/// How the tables below one root are laid out.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Addresses that the root translates.
    pub(super) aperture: Aperture,
    /// The smallest page, as a power of two.
    pub(super) page_log2: u32,
    /// Bits of the input address that index a table below the root. The root takes all that the
    /// aperture has left.
    pub(super) index_bits: u32,
    /// Bytes of an entry, as a power of two: 3, or 2.
    pub(super) entry_log2: u32,
    /// The root's address is a multiple of this power of two.
    pub(super) root_log2: u32,
}

impl Shape {
    /// Pages of 4 KiB, tables of 512 entries of 8 bytes, and a root that is not larger.
    pub(super) const fn of_512(aperture: Aperture) -> Self {
        Self {
            aperture,
            page_log2: 12,
            index_bits: 9,
            entry_log2: 3,
            root_log2: 12,
        }
    }

    /// Bytes that one entry at `level` translates, as a power of two.
    pub(super) const fn shift(&self, level: u8) -> u32 {
        self.page_log2 + self.index_bits * level as u32
    }

    /// Bytes that a table at `level`, below the root, translates, as a power of two.
    pub(super) const fn span_log2(&self, level: u8) -> u32 {
        let log2 = self.shift(level) + self.index_bits;
        if log2 > 64 { 64 } else { log2 }
    }

    /// Offset in bytes of the entry for `iova` in its table.
    pub(super) fn offset(&self, level: u8, top: u8, iova: u64) -> u64 {
        let index = (iova & low_bits(self.aperture.bits)) >> self.shift(level).min(63);
        let index = if level == top {
            index
        } else {
            index & low_bits(self.index_bits)
        };
        index << self.entry_log2
    }
}

/// A present entry, decoded.
pub(super) enum Entry {
    /// A table at `level`.
    Table { address: u64, level: u8, prot: Prot },
    /// A page of 2^`log2` bytes at `pa`, a multiple of the size.
    Leaf { pa: u64, log2: u32, prot: Prot },
}

/// Bytes that one entry at `level` translates, as a power of two, in the formats that index each
/// level with 9 bits, above 12 bits of offset.
pub(super) const fn shift(level: u8) -> u32 {
    12 + 9 * level as u32
}

/// A mask of the bits below `bit`.
pub(super) const fn low_bits(bit: u32) -> u64 {
    if bit >= 64 { u64::MAX } else { (1 << bit) - 1 }
}
