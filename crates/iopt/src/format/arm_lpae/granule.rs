//! The granules: how tables are cut, and where the bits of an address go in an entry.

use core::fmt;

use super::super::mask;

/// A granule, with the width of its output addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArmGranule {
    /// 4 KiB, 48 bits.
    K4,
    /// 4 KiB with LPA2 (TCR.DS): 52 bits, blocks of 512 GiB.
    K4Lpa2,
    /// 16 KiB, 48 bits.
    K16,
    /// 16 KiB with LPA2 (TCR.DS): 52 bits, blocks of 64 GiB.
    K16Lpa2,
    /// 64 KiB, 48 bits.
    K64,
    /// 64 KiB with LPA: 52 bits, blocks of 4 TiB.
    K64Lpa,
}

impl ArmGranule {
    /// The name of stage 1 tables with it.
    pub const fn stage1_name(self) -> &'static str {
        match self {
            Self::K4 => "arm-s1-4k",
            Self::K4Lpa2 => "arm-s1-4k-lpa2",
            Self::K16 => "arm-s1-16k",
            Self::K16Lpa2 => "arm-s1-16k-lpa2",
            Self::K64 => "arm-s1-64k",
            Self::K64Lpa => "arm-s1-64k-lpa",
        }
    }

    /// The name of stage 2 tables with it.
    pub const fn stage2_name(self) -> &'static str {
        match self {
            Self::K4 => "arm-s2-4k",
            Self::K4Lpa2 => "arm-s2-4k-lpa2",
            Self::K16 => "arm-s2-16k",
            Self::K16Lpa2 => "arm-s2-16k-lpa2",
            Self::K64 => "arm-s2-64k",
            Self::K64Lpa => "arm-s2-64k-lpa",
        }
    }
}

/// A granule as a type, so that levels and shifts are constants to the compiler.
pub trait Granule: Copy + fmt::Debug + PartialEq + Eq + Send + Sync + 'static {
    /// Which one.
    const KIND: ArmGranule;
    /// Bytes of a page and of a table, as a power of two.
    const LOG2: u32;
    /// Input address bits that a full table resolves: an entry has 8 bytes.
    const STRIDE: u32 = Self::LOG2 - 3;
    /// The highest level that has blocks (D8.3.1, "Block descriptor": Arm's level 1, 2 and 2; one
    /// level higher with 52 bits).
    const LARGEST_BLOCK: usize;
    /// The most levels that stage 1 can have.
    const STAGE1_LEVELS: u8;
    /// The most levels that stage 2 can have (D8.2.6, initial lookup levels of stage 2).
    const STAGE2_LEVELS: u8;
    /// The most bits of an input address of stage 1.
    const STAGE1_INPUT_BITS: u32;
    /// The most bits of an output address, and so of an input address of stage 2.
    const ADDRESS_BITS: u32;
    /// Address bits that are not in their places: the first, the last, and where the first is
    /// (D8.3.1, "Output address").
    const MOVED: Option<(u32, u32, u32)>;
    /// Entries of a contiguous group at each level from the lowest, as a power of two (D8.7.1,
    /// "Contiguous bit").
    const GROUPS: &'static [u32];
    /// An entry holds the address in one piece up to this bit.
    const LINEAR_LOG2: u32 = match Self::MOVED {
        Some((first, _, _)) => first,
        None => 64,
    };

    /// Entries of a contiguous group at `level`, as a power of two; 0 where there are none.
    #[inline(always)]
    fn contiguous_log2(level: usize) -> u32 {
        Self::GROUPS.get(level).copied().unwrap_or(0)
    }

    /// The bits of an entry that hold the address.
    #[inline(always)]
    fn spread(address: u64) -> u64 {
        let places = mask(Self::LOG2, Self::ADDRESS_BITS - 1);
        match Self::MOVED {
            None => address & places,
            Some((first, last, at)) => {
                let moved = (address & mask(first, last)) >> (first - at);
                (address & places & !mask(first, last)) | moved
            }
        }
    }

    /// The address that an entry holds: the reverse of [`spread`](Self::spread).
    #[inline(always)]
    fn collect(word: u64) -> u64 {
        let places = mask(Self::LOG2, Self::ADDRESS_BITS - 1);
        match Self::MOVED {
            None => word & places,
            Some((first, last, at)) => {
                let moved = (word & mask(at, at + last - first)) << (first - at);
                (word & places & !mask(first, last)) | moved
            }
        }
    }
}

macro_rules! granules {
    ($(
        $(#[$doc:meta])* $name:ident: $log2:literal, blocks to $block:literal,
        levels $stage1:literal $stage2:literal, input $input:literal, output $output:literal,
        moved $moved:expr, groups $groups:expr;
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;

        impl Granule for $name {
            const KIND: ArmGranule = ArmGranule::$name;
            const LOG2: u32 = $log2;
            const LARGEST_BLOCK: usize = $block;
            const STAGE1_LEVELS: u8 = $stage1;
            const STAGE2_LEVELS: u8 = $stage2;
            const STAGE1_INPUT_BITS: u32 = $input;
            const ADDRESS_BITS: u32 = $output;
            const MOVED: Option<(u32, u32, u32)> = $moved;
            const GROUPS: &'static [u32] = &$groups;
        }
    )*};
}

granules! {
    /// 4 KiB pages, 48-bit output addresses; blocks of 2 MiB and 1 GiB; groups of 16 pages or
    /// blocks (64 KiB, 32 MiB, 16 GiB).
    K4: 12, blocks to 2, levels 4 4, input 48, output 48,
        moved None, groups [4, 4, 4];
    /// 4 KiB pages with LPA2: as [`K4`], and blocks of 512 GiB; address bits 51:50 are in bits 9:8.
    K4Lpa2: 12, blocks to 3, levels 5 5, input 52, output 52,
        moved Some((50, 51, 8)), groups [4, 4, 4];
    /// 16 KiB pages, 48-bit output addresses; blocks of 32 MiB; groups of 128 pages (2 MiB) or 32
    /// blocks (1 GiB).
    K16: 14, blocks to 1, levels 4 3, input 48, output 48,
        moved None, groups [7, 5];
    /// 16 KiB pages with LPA2: as [`K16`], and blocks of 64 GiB; address bits 51:50 are in bits
    /// 9:8.
    K16Lpa2: 14, blocks to 2, levels 4 4, input 52, output 52,
        moved Some((50, 51, 8)), groups [7, 5];
    /// 64 KiB pages, 48-bit output addresses; blocks of 512 MiB; groups of 32 pages (2 MiB) or
    /// blocks (16 GiB).
    K64: 16, blocks to 1, levels 3 3, input 52, output 48,
        moved None, groups [5, 5];
    /// 64 KiB pages with LPA: as [`K64`], and blocks of 4 TiB; address bits 51:48 are in bits
    /// 15:12.
    K64Lpa: 16, blocks to 2, levels 3 3, input 52, output 52,
        moved Some((48, 51, 12)), groups [5, 5];
}
