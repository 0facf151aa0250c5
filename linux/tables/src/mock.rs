//! The tables of iommufd's mock domains: those of AMD, version 1, for pages of 2 KiB.
//!
//! Linux's `AMDV1_IOMMUFD_SELFTEST`: every address is half of what an entry of AMD's would say, so that code which
//! takes the processor's page size for granted is found.

use iopt::format::{AmdV1, Entry};
use iopt::{Aperture, BuildError, Format, FormatId, Prot};
use runs::PageSizes;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mock(AmdV1);

impl Mock {
    #[inline(always)]
    pub(crate) fn new(levels: u8) -> Result<Self, BuildError> {
        AmdV1::new(levels.min(Self::MAX_LEVELS)).map(Self)
    }
}

impl Format for Mock {
    const ID: FormatId = FormatId::AmdV1;
    const ENTRY_BYTES: usize = 8;
    const GRANULE_LOG2: u32 = 11;
    const MIN_LEVELS: u8 = 1;
    const MAX_LEVELS: u8 = 5;
    const OUTPUT_BITS: u32 = 51;
    const HARDWARE_BITS: u64 = AmdV1::<false>::HARDWARE_BITS;
    const ACCESSED: u64 = AmdV1::<false>::ACCESSED;
    const DIRTY: u64 = AmdV1::<false>::DIRTY;
    const DIRTY_BY_ENTRY: bool = true;
    const GROWS: bool = true;

    #[inline(always)]
    fn shift(level: usize) -> u32 {
        AmdV1::<false>::shift(level) - 1
    }

    fn grown_to(self, levels: u8) -> Option<Self> {
        let known = levels <= Self::MAX_LEVELS;
        self.0.grown_to(levels).filter(|_| known).map(Self)
    }

    fn levels(&self) -> u8 {
        self.0.levels()
    }

    fn aperture(&self) -> Aperture {
        Aperture::zeros(self.0.aperture().bits - 1)
    }

    #[inline(always)]
    fn leaf_sizes(level: usize) -> PageSizes {
        PageSizes::from_bits(AmdV1::<false>::leaf_sizes(level).bits() >> 1)
    }

    fn leaf_bits(&self, prot: Prot) -> Option<u64> {
        self.0.leaf_bits(prot)
    }

    fn prot(&self, level: usize, word: u64) -> Prot {
        self.0.prot(level, word)
    }

    #[inline(always)]
    fn leaf(level: usize, pa: u64, log2: u32, bits: u64) -> u64 {
        AmdV1::<false>::leaf(level, pa << 1, log2 + 1, bits)
    }

    #[inline(always)]
    fn stride(log2: u32) -> u64 {
        2 << log2
    }

    #[inline(always)]
    fn table(&self, level: usize, table: u64) -> u64 {
        self.0.table(level, table << 1)
    }

    #[inline(always)]
    fn decode(level: usize, word: u64) -> Entry {
        match AmdV1::<false>::decode(level, word) {
            Entry::Empty => Entry::Empty,
            Entry::Table(table) => Entry::Table(table >> 1),
            Entry::Leaf { pa, log2 } => Entry::Leaf {
                pa: pa >> 1,
                log2: log2 - 1,
            },
        }
    }

    #[inline(always)]
    fn is_empty(word: u64) -> bool {
        AmdV1::<false>::is_empty(word)
    }

    fn keeps_dirty(&self) -> bool {
        true
    }
}
