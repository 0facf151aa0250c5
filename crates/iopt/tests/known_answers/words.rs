//! Words of tables, compared with words that were put together by hand.

use iopt::format::Entry;
use iopt::{Format, HeapArena, Prot, Table, TableOps as _};
use runs::Span;

/// Maps each `(iova, pa, bytes)` in a new table whose root is at `root`, then compares each
/// `(address, count, word)` of the table memory: `count` neighbouring entries are that word.
pub(crate) fn check<F: Format, A: Room>(
    format: F,
    root: u64,
    maps: &[(u64, u64, u64)],
    words: &[(u64, u64, u64)],
) {
    let memory = A::at(root);
    let mut table = Table::new(format, &memory).unwrap();
    assert_eq!(table.root().address, root);
    for &(iova, pa, bytes) in maps {
        table.map(iova, &[Span::new(pa, bytes)], Prot::RW).unwrap();
        assert_eq!(table.leaf_at(iova).unwrap().run.len, bytes);
    }
    for &(first, count, word) in words {
        for nth in 0..count {
            let address = first + nth * F::ENTRY_BYTES as u64;
            let found = memory.word(address);
            assert_eq!(found, word, "{address:#x}: {found:#x}, not {word:#x}");
        }
    }
}

/// Table memory that the comparison can be made in.
pub(crate) trait Room: iopt::TableMemory + Sized {
    /// Room for some tables from an address on.
    fn at(base: u64) -> Self;
    /// The entry at an address.
    fn word(&self, address: u64) -> u64;
}

macro_rules! room {
    ($($cell:ty, $log2:literal;)*) => {$(
        impl Room for HeapArena<$cell, $log2> {
            fn at(base: u64) -> Self {
                Self::with_tables_at(64, base).unwrap()
            }
            fn word(&self, address: u64) -> u64 {
                self.read(address).unwrap()
            }
        }
    )*};
}
room! {
    std::sync::atomic::AtomicU64, 12;
    std::sync::atomic::AtomicU64, 14;
    std::sync::atomic::AtomicU32, 10;
}

/// Entry of the lowest level's page at 0 with these permissions; `None` when they are refused.
pub(crate) fn word<F: Format>(format: F, prot: Prot) -> Option<u64> {
    let bits = format.leaf_bits(prot)?;
    Some(F::leaf(0, 0, F::GRANULE_LOG2, bits))
}

/// Each combination of permissions that the format takes is read back from leaves of every size,
/// and the addresses are, too. Returns how many combinations there were.
pub(crate) fn round_trip<F: Format>(format: F) -> usize {
    let mut taken = 0;
    for flags in 0..=Prot::all().bits() {
        let prot = Prot::from_bits_truncate(flags);
        let Some(bits) = format.leaf_bits(prot) else {
            continue;
        };
        taken += 1;
        for level in 0..usize::from(format.levels()) {
            for size in F::leaf_sizes(level).iter() {
                let highest = (1u64 << F::OUTPUT_BITS) - size;
                for pa in [0, size, highest & !(highest >> 1), highest] {
                    let log2 = size.trailing_zeros();
                    let word = F::leaf(level, pa, log2, bits);
                    assert_eq!(word >> (8 * F::ENTRY_BYTES - 1) >> 1, 0);
                    assert!(!F::is_empty(word));
                    assert_eq!(F::decode(level, word), Entry::Leaf { pa, log2 });
                    assert_eq!(format.prot(level, word), prot, "level {level}: {word:#x}");
                    if pa < highest {
                        let next = F::leaf(level, pa + size, log2, bits);
                        assert_eq!(word + F::stride(log2), next);
                    }
                }
            }
        }
    }
    taken
}
