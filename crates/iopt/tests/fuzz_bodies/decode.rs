//! Decoders: any word at any level says something that the format's other functions agree with.

use iopt::format::Entry;
use iopt::{Format, Prot};

use super::Bytes;
use super::formats::{self, Do, Room};

macro_rules! targets {
    ($($name:ident)*) => {$(
        pub(super) fn $name(data: &[u8]) {
            formats::$name(Decode, &mut Bytes(data));
        }
    )*};
}
targets! { amdv1 x86_64 vtd_ss arm_stage1 arm_stage2 armv7s riscv riscv_g dart }

#[derive(Clone, Copy)]
struct Decode;

impl Do for Decode {
    fn with<F: Format, M: Room>(self, format: F, data: &mut Bytes<'_>) {
        while !data.is_empty() {
            let level = data.below(F::MAX_LEVELS.into());
            word::<F>(format, level, data.u64());
            leaf::<F>(format, data);
            table::<F>(format, data);
        }
    }
}

/// Any word.
fn word<F: Format>(format: F, level: usize, word: u64) {
    let word = word & (u64::MAX >> (64 - 8 * F::ENTRY_BYTES));
    let entry = F::decode(level, word);
    if F::is_empty(word) {
        assert_eq!(entry, Entry::Empty, "{word:#x}");
    }
    assert_eq!(F::decode(level, 0), Entry::Empty);
    // Read of any word; of leaves it must also be right.
    let prot = format.prot(level, word);
    match entry {
        Entry::Empty => {}
        Entry::Table(address) => assert_eq!(address >> F::OUTPUT_BITS, 0, "{word:#x}"),
        Entry::Leaf { pa, log2 } => {
            let what = format!("{word:#x} at level {level}: {pa:#x}, 2^{log2}");
            assert!(
                log2 < 64 && formats::leaf_sizes::<F>(level).contains(1 << log2),
                "{what}"
            );
            assert_eq!(pa & ((1 << log2) - 1), 0, "{what}");
            assert_eq!(pa >> F::OUTPUT_BITS, 0, "{what}");
            // The decoded leaf can be encoded again, where the format has the permissions in this setting.
            if let Some(bits) = format.leaf_bits(prot) {
                let again = F::leaf(level, pa, log2, bits);
                assert_eq!(F::decode(level, again), entry, "{what}: {again:#x}");
                assert_eq!(format.prot(level, again), prot, "{what}: {again:#x}");
            }
        }
    }
}

/// Any leaf that the format can express.
fn leaf<F: Format>(format: F, data: &mut Bytes<'_>) {
    let prot = Prot::from_bits_truncate(data.u16().into());
    let level = data.below(format.levels().into());
    let sizes: Vec<u64> = F::leaf_sizes(level).iter().collect();
    let (nth, pa, hardware) = (data.u8(), data.u64(), data.u64());
    let (Some(bits), false) = (format.leaf_bits(prot), sizes.is_empty()) else {
        return;
    };
    let size = sizes[usize::from(nth) % sizes.len()];
    let end = 1 << format.output_bits();
    let pa = pa & (end - 1) & !(size - 1);
    if size > end {
        return;
    }
    let log2 = size.trailing_zeros();
    let word = F::leaf(level, pa, log2, bits);
    let what = format!("{word:#x} at level {level}: {pa:#x}, 2^{log2}, {prot}");
    assert_eq!(word & !(u64::MAX >> (64 - 8 * F::ENTRY_BYTES)), 0, "{what}");
    assert!(!F::is_empty(word), "{what}");
    assert_eq!(F::decode(level, word), Entry::Leaf { pa, log2 }, "{what}");
    assert_eq!(format.prot(level, word), prot, "{what}");
    // It stays this leaf, whatever hardware sets in it.
    let set = word ^ hardware & F::HARDWARE_BITS;
    assert_eq!(
        F::decode(level, set),
        Entry::Leaf { pa, log2 },
        "{what}: {set:#x}"
    );
    // The leaf behind it in memory.
    let next = pa + size;
    let block = F::LINEAR_LOG2.min(63);
    if next < end && next >> block == pa >> block {
        assert_eq!(
            word.wrapping_add(F::stride(log2)),
            F::leaf(level, next, log2, bits),
            "{what}"
        );
    }
}

/// Any table that the format can lead to.
fn table<F: Format>(format: F, data: &mut Bytes<'_>) {
    let (level, table) = (data.below(format.levels().into()), data.u64());
    if level == 0 {
        return;
    }
    let end = 1u64 << format.output_bits();
    let table = table & (end - 1) & !(F::TABLE_BYTES - 1);
    let word = format.table(level, table);
    assert!(!F::is_empty(word), "{word:#x}");
    assert_eq!(F::decode(level, word), Entry::Table(table), "{word:#x}");
}
