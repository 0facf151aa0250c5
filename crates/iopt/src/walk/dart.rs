//! Apple's DART, as far as it is known how units read its tables.
//!
//! There is no public specification. This file follows observations: by Asahi Linux, in its
//! boot loader m1n1 (`src/dart.c`, `proxyclient/m1n1/hw/dart.py` and `dart8110.py`: the fields
//! of an entry, the root registers, the error bits), and in what Linux writes, with which these
//! units work (`io-pgtable-dart.c` and its commit messages: the fields again, and what bit 1
//! does).
//!
//! | bits | version 1 (T8020, T8103) | version 2 (T6000, T8110) |
//! |---|---|---|
//! | 0 | valid | valid |
//! | 1 | sub-page protection is off | not cached |
//! | 2, 3 | | writing, reading is forbidden |
//! | 7, 8 | writing, reading is forbidden | |
//! | 39:10 | | address bits 43:14 |
//! | 39:12 | address bits 39:12 | |
//! | 51:40 | end of what accesses may touch | the same |
//! | 63:52 | start of it | the same |
//!
//! Linux keeps 36 and 42 bits of an address. Where the field has more they count here too, and an
//! address that the unit does not have is a fault: a unit that would drop them leads nowhere else
//! than into memory that was not named.
//!
//! Version 2 leaves that are cached are reported as [`Prot::COHERENT`]: Linux marks all others as not.
//!
//! The fields of the sub-page protection count 4096ths of the page, the end is the last that is
//! open. Version 2 always looks at them. In entries that lead to a table only bit 0 and the address
//! are known to count; other bits are not set there. Bits without a name are ignored. Units keep neither
//! access nor dirty state, and have no leaves but pages.

use super::spec::{Entry, Shape, Spec, low_bits};
use super::walker::Walker;
use super::{Access, WalkReason};
use crate::format::{Aperture, DartConfig, DartVersion, FormatId};
use crate::prot::Prot;

/// The most roots that a stream has, as a power of two.
const ROOTS_LOG2: u32 = 2;

/// Both versions.
pub(super) struct Dart;

impl Spec for Dart {
    /// A table has the size of a page. Below the roots there are two levels of them, or three
    /// (T8110, `TCR.FOUR_LEVELS`, which counts the register). There are up to four roots, selected
    /// by the address bits above (`TTBR0` to `TTBR3`, which hold whole pages); here they lie side by
    /// side.
    fn shape(walker: &Walker) -> Option<Shape> {
        let config = config(walker)?;
        let page_log2 = match (config.version, config.page_log2) {
            (DartVersion::V1, 12) => 12,
            (_, 14) => 14,
            _ => return None,
        };
        let levels = walker.root().levels;
        let index_bits = page_log2 - 3;
        let bits = u32::from(config.input_bits);
        let most = page_log2 + index_bits * u32::from(levels) + ROOTS_LOG2;
        let known = (2..=3).contains(&levels) && bits > page_log2 && bits <= most;
        known.then(|| Shape {
            aperture: Aperture::zeros(bits),
            page_log2,
            index_bits,
            entry_log2: 3,
            root_log2: page_log2,
        })
    }

    fn read(walker: &Walker, _iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason> {
        let bit = |n: u32| word >> n & 1 != 0;
        let config = config(walker).ok_or(WalkReason::NotPresent)?;
        if !bit(0) {
            return Err(WalkReason::NotPresent);
        }
        let log2 = u32::from(config.page_log2);
        let field = word & low_bits(40);
        let (address, no_read, no_write, coherent) = match config.version {
            DartVersion::V1 => (field, bit(8), bit(7), false),
            DartVersion::V2 => (field << 4, bit(3), bit(2), !bit(1)),
        };
        let address = address & !low_bits(log2);
        if let Some(level) = level.checked_sub(1) {
            return Ok(Entry::Table {
                address,
                level,
                prot: Prot::RW,
            });
        }
        let mut prot = Prot::empty();
        prot.set(Prot::READ, !no_read);
        prot.set(Prot::WRITE, !no_write);
        prot.set(Prot::COHERENT, coherent);
        Ok(Entry::Leaf {
            pa: address,
            log2,
            prot,
        })
    }

    fn open(walker: &Walker, word: u64, log2: u32) -> (u64, u64) {
        let off = word >> 1 & 1 != 0;
        match config(walker).map(|config| config.version) {
            Some(DartVersion::V2) => {}
            Some(DartVersion::V1) if !off => {}
            _ => return (0, low_bits(log2)),
        }
        let unit = log2 - 12;
        let (start, end) = (word >> 52 & 0xfff, word >> 40 & 0xfff);
        (start << unit, end << unit | low_bits(unit))
    }

    fn marked(_walker: &Walker, _level: u8, _leaf: bool, word: u64, _access: Access) -> u64 {
        word
    }
}

const fn config(walker: &Walker) -> Option<DartConfig> {
    match walker.root().format {
        FormatId::Dart(config) => Some(config),
        _ => None,
    }
}
