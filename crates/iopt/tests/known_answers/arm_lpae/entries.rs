//! Single entries: permissions, attributes, dirty state, addresses of 52 bits.

use std::sync::atomic::AtomicU64;

use iopt::format::{
    ArmOptions, ArmStage1, ArmStage2, BreakBeforeMake, Entry, K4, K4Lpa2, K16, K16Lpa2, K64,
    K64Lpa, Shareability,
};
use iopt::{Format, Gather, HeapArena, Prot, Table, TableOps as _};
use runs::{Run, Span};

use super::{ROOT, RW};

const R: Prot = Prot::READ;
const W: Prot = Prot::WRITE;
const RX: Prot = Prot::READ.union(Prot::EXECUTE);

/// The words of a page, or block, at `level` for each of `prots`; `None` where they are refused.
fn leaves<F: Format>(format: F, level: usize, pa: u64, prots: &[(Prot, Option<u64>)]) {
    for &(prot, expected) in prots {
        let word = format
            .leaf_bits(prot)
            .map(|bits| F::leaf(level, pa, F::shift(level), bits));
        assert!(word == expected, "{prot}: {word:x?}, not {expected:x?}");
        if let Some(word) = word {
            assert_eq!(format.prot(level, word), prot, "{word:#x}");
            let log2 = F::shift(level);
            assert_eq!(F::decode(level, word), Entry::Leaf { pa, log2 });
        }
    }
}

#[test]
fn stage_1_permissions_and_attributes_are_these_words() {
    let plain = ArmStage1::<K4>::new(48, 48).unwrap();
    let privileged = Prot::PRIVILEGED;
    leaves(
        plain,
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0060_0001_2345_6f43)),
            // AP[2].
            (R, Some(0x0060_0001_2345_6fc3)),
            // No UXN, no PXN.
            (RW | RX, Some(0x0000_0001_2345_6f43)),
            (RX, Some(0x0000_0001_2345_6fc3)),
            // No AP[1].
            (RW | privileged, Some(0x0060_0001_2345_6f03)),
            (R | privileged, Some(0x0060_0001_2345_6f83)),
            // UXN stays: a page without AP[1] could otherwise still be executed by anybody.
            (RX | privileged, Some(0x0040_0001_2345_6f83)),
            // AttrIndx 1, SH 10.
            (RW | Prot::DEVICE, Some(0x0060_0001_2345_6e47)),
            (R | Prot::DEVICE, Some(0x0060_0001_2345_6ec7)),
            // AttrIndx 2, SH 10.
            (RW | Prot::UNCACHED, Some(0x0060_0001_2345_6e4b)),
            (RX | Prot::UNCACHED, Some(0x0000_0001_2345_6ecb)),
            (RW | Prot::UNCACHED | Prot::DEVICE, None),
            (RW | Prot::UNCACHED | Prot::COHERENT, None),
            (W, None),
            (Prot::empty(), None),
            (Prot::EXECUTE, None),
            (RW | Prot::COHERENT, None),
            (RX | Prot::DEVICE, None),
        ],
    );
    leaves(
        plain,
        1,
        0x1_2340_0000,
        &[(RW, Some(0x0060_0001_2340_0f41))],
    );
    // AttrIndx 7 and 2, SH 00.
    let other = plain
        .with_attribute_indices(7, 2, 5)
        .unwrap()
        .with_options(ArmOptions {
            shareability: Shareability::Non,
            ..ArmOptions::default()
        });
    leaves(
        other,
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0060_0001_2345_6c5f)),
            (RW | Prot::DEVICE, Some(0x0060_0001_2345_6e4b)),
            (RW | Prot::UNCACHED, Some(0x0060_0001_2345_6e57)),
        ],
    );
    // MAIR: 0xff is write-back memory, 0x04 is Device-nGnRE, 0x44 non-cacheable memory.
    assert_eq!(plain.mair(), 0x0000_0000_0044_04ff);
    assert_eq!(other.mair(), 0xff00_4400_0004_0000);
    let same = plain.with_attribute_indices(3, 3, 4).unwrap();
    assert_eq!(same.mair(), 0x0000_0044_ff00_0000);
    // The third as one of the others.
    for (device, uncached, mair) in [(1, 0, 0x04ff), (1, 1, 0x04ff), (0, 0, 0xff)] {
        let less = plain.with_attribute_indices(0, device, uncached).unwrap();
        assert_eq!(less.mair(), mair);
        assert_eq!(less.leaf_bits(RW | Prot::UNCACHED), None);
        assert_eq!(less.leaf_bits(RW | Prot::DEVICE).is_some(), device != 0);
        assert_eq!(less.prot(0, 0x0060_0001_2345_6f43), RW);
    }
    leaves(
        same,
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0060_0001_2345_6f4f)),
            (RW | Prot::DEVICE, None),
            (RW | Prot::UNCACHED, Some(0x0060_0001_2345_6e53)),
        ],
    );
}

#[test]
fn stage_2_permissions_and_attributes_are_these_words() {
    let plain = ArmStage2::<K4>::new(48, 48).unwrap();
    leaves(
        plain,
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0040_0001_2345_67ff)),
            (R, Some(0x0040_0001_2345_677f)),
            (W, Some(0x0040_0001_2345_67bf)),
            (RW | RX, Some(0x0000_0001_2345_67ff)),
            (RX, Some(0x0000_0001_2345_677f)),
            // MemAttr 0001, SH 10.
            (RW | Prot::DEVICE, Some(0x0040_0001_2345_66c7)),
            // MemAttr 0101, SH 10.
            (RW | Prot::UNCACHED, Some(0x0040_0001_2345_66d7)),
            (RX | Prot::UNCACHED, Some(0x0000_0001_2345_6657)),
            (RW | Prot::UNCACHED | Prot::DEVICE, None),
            (Prot::empty(), None),
            (Prot::EXECUTE, None),
            (W | Prot::EXECUTE, None),
            (RW | Prot::COHERENT, None),
            (RW | Prot::PRIVILEGED, None),
            (RX | Prot::DEVICE, None),
        ],
    );
    leaves(
        plain,
        2,
        0x1_4000_0000,
        &[(RW, Some(0x0040_0001_4000_07fd))],
    );
    // FWB: MemAttr 0111 as asked, 0110 forced write-back, 0101 non-cacheable, 0001 device.
    leaves(
        plain.with_forced_write_back(),
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0040_0001_2345_67df)),
            (RW | Prot::COHERENT, Some(0x0040_0001_2345_67db)),
            (R | Prot::COHERENT, Some(0x0040_0001_2345_675b)),
            (RW | Prot::DEVICE, Some(0x0040_0001_2345_66c7)),
            (RW | Prot::DEVICE | Prot::COHERENT, None),
            (RW | Prot::UNCACHED, Some(0x0040_0001_2345_66d7)),
            (RW | Prot::UNCACHED | Prot::COHERENT, None),
            (RW | Prot::UNCACHED | Prot::DEVICE, None),
        ],
    );
}

#[test]
fn dirty_state_is_dbm_and_the_write_permission() {
    let options = ArmOptions {
        dirty: true,
        break_before_make: BreakBeforeMake::NotNeeded,
        ..ArmOptions::default()
    };
    let one = ArmStage1::<K4>::new(48, 48).unwrap().with_options(options);
    assert_eq!(one.break_before_make(), BreakBeforeMake::NotNeeded);
    // DBM and AP[2]: clean; hardware clears AP[2].
    let (clean, dirty) = (0x0068_0001_2345_6fc3, 0x0068_0001_2345_6f43);
    leaves(
        one,
        0,
        0x1_2345_6000,
        &[(RW, Some(clean)), (R, Some(0x0060_0001_2345_6fc3))],
    );
    type One = ArmStage1<K4>;
    assert_eq!(one.prot(0, dirty), RW);
    assert_eq!((One::is_dirty(clean), One::is_dirty(dirty)), (false, true));
    assert_eq!((One::cleaned(clean), One::cleaned(dirty)), (clean, clean));
    // Without DBM AP[2] is a permission.
    assert!(!One::is_dirty(0x0060_0001_2345_6f43));
    assert_eq!(One::cleaned(0x0060_0001_2345_6f43), 0x0060_0001_2345_6f43);
    assert_eq!(One::HARDWARE_BITS, 0x0080_0000_0000_0480);
    // A leaf that has lost DBM keeps its dirty state in bit 55, which hardware ignores.
    let was_dirty = One::dirtied(0x0060_0001_2345_6fc3);
    assert_eq!(was_dirty, 0x0060_0001_2345_6fc3 | 1 << 55);
    assert!(One::is_dirty(was_dirty));
    assert_eq!(One::cleaned(was_dirty), 0x0060_0001_2345_6fc3);

    let two = ArmStage2::<K4>::new(48, 48).unwrap().with_options(options);
    // DBM without S2AP[1]: clean; hardware sets S2AP[1].
    let (clean, dirty) = (0x0048_0001_2345_677f, 0x0048_0001_2345_67ff);
    leaves(
        two,
        0,
        0x1_2345_6000,
        &[
            (RW, Some(clean)),
            (W, Some(0x0048_0001_2345_673f)),
            (R, Some(0x0040_0001_2345_677f)),
        ],
    );
    type Two = ArmStage2<K4>;
    assert_eq!(two.prot(0, dirty), RW);
    assert_eq!((Two::is_dirty(clean), Two::is_dirty(dirty)), (false, true));
    assert_eq!((Two::cleaned(clean), Two::cleaned(dirty)), (clean, clean));
    assert!(!Two::is_dirty(0x0040_0001_2345_67ff));
    assert_eq!(Two::HARDWARE_BITS, 0x0080_0000_0000_0480);
    // A leaf that has lost DBM keeps its dirty state in bit 55, which hardware ignores.
    let was_dirty = Two::dirtied(0x0040_0001_2345_677f);
    assert_eq!(was_dirty, 0x0040_0001_2345_677f | 1 << 55);
    assert!(Two::is_dirty(was_dirty));
    assert_eq!(Two::cleaned(was_dirty), 0x0040_0001_2345_677f);
}

#[test]
fn addresses_of_52_bits_are_spread_over_the_entry() {
    // LPA2: 51:50 in 9:8, and no SH. 64 KiB: 51:48 in 15:12.
    let k4 = ArmStage1::<K4Lpa2>::new(52, 52).unwrap();
    leaves(
        k4,
        0,
        0x000f_ffff_ffff_f000,
        &[
            (RW, Some(0x0063_ffff_ffff_ff43)),
            (RW | Prot::DEVICE, Some(0x0063_ffff_ffff_ff47)),
            (RW | Prot::UNCACHED, Some(0x0063_ffff_ffff_ff4b)),
        ],
    );
    // Blocks of 512 GiB, at Arm's level 0.
    leaves(
        k4,
        3,
        0x000c_0080_0000_0000,
        &[(RW, Some(0x0060_0080_0000_0f41))],
    );
    let k4 = ArmStage2::<K4Lpa2>::new(52, 52).unwrap();
    leaves(
        k4,
        0,
        0x0007_ffff_ffff_f000,
        &[(RW, Some(0x0043_ffff_ffff_f5ff))],
    );
    let k16 = ArmStage1::<K16Lpa2>::new(52, 52).unwrap();
    leaves(
        k16,
        0,
        0x000b_ffff_ffff_c000,
        &[(RW, Some(0x0063_ffff_ffff_ce43))],
    );
    // 64 GiB, at Arm's level 1.
    leaves(
        k16,
        2,
        0x0008_0010_0000_0000,
        &[(RW, Some(0x0060_0010_0000_0e41))],
    );
    let k64 = ArmStage1::<K64Lpa>::new(52, 52).unwrap();
    leaves(
        k64,
        0,
        0x000f_ffff_ffff_0000,
        &[(RW, Some(0x0060_ffff_ffff_ff43))],
    );
    // 4 TiB, at Arm's level 1.
    leaves(
        k64,
        2,
        0x000a_0400_0000_0000,
        &[(RW, Some(0x0060_0400_0000_af41))],
    );
    // Tables: the address likewise.
    fn table<F: Format>(format: F, address: u64, word: u64) {
        assert_eq!(format.table(1, address), word);
        assert_eq!(F::decode(1, word), Entry::Table(address));
    }
    table(k4, 0x000c_0000_0001_2000, 0x0000_0000_0001_2303);
    table(k16, 0x0004_0000_0001_4000, 0x0000_0000_0001_4103);
    table(k64, 0x0003_0000_0004_0000, 0x0000_0000_0004_3003);
}

#[test]
fn a_run_goes_on_where_the_address_is_split() {
    /// Four pages across a boundary of the address bits that are elsewhere.
    fn crossing<F: Format, const LOG2: u32>(format: F, boundary: u64, words: [u64; 4]) {
        let page = 1 << LOG2;
        let memory = HeapArena::<AtomicU64, LOG2>::with_tables(64).unwrap();
        let mut table = Table::new(format, &memory).unwrap();
        let (iova, pa) = (5 * page, boundary - 2 * page);
        table.map(iova, &[Span::new(pa, 4 * page)], RW).unwrap();
        // The tables were made one after the other; the lowest is the last.
        let lowest = ROOT + (u64::from(format.levels()) - 1) * page;
        for (index, word) in (5..).zip(words) {
            let found = memory.read(lowest + 8 * index).unwrap();
            assert_eq!(found, word, "{found:#x}, not {word:#x}");
        }
        let range = Span::new(iova, 4 * page);
        for offset in (0..4).map(|n| n * page + 1) {
            assert_eq!(table.translate(iova + offset), Some(pa + offset));
        }
        let (mut gather, mut runs) = (Gather::new(), Vec::new());
        table
            .unmap(range, &mut gather, &mut |run| runs.push(run))
            .unwrap();
        assert_eq!(runs, [Run::new(iova, Span::new(pa, 4 * page))]);
        drop(gather.never_walked());
    }
    crossing::<_, 12>(
        ArmStage1::<K4Lpa2>::new(52, 52).unwrap(),
        1 << 50,
        [
            0x0063_ffff_ffff_ec43,
            0x0063_ffff_ffff_fc43,
            0x0060_0000_0000_0d43,
            0x0060_0000_0000_1d43,
        ],
    );
    crossing::<_, 14>(
        ArmStage1::<K16Lpa2>::new(52, 52).unwrap(),
        1 << 51,
        [
            0x0063_ffff_ffff_8d43,
            0x0063_ffff_ffff_cd43,
            0x0060_0000_0000_0e43,
            0x0060_0000_0000_4e43,
        ],
    );
    crossing::<_, 16>(
        ArmStage1::<K64Lpa>::new(52, 52).unwrap(),
        1 << 48,
        [
            0x0060_ffff_fffe_0f43,
            0x0060_ffff_ffff_0f43,
            0x0060_0000_0000_1f43,
            0x0060_0000_0001_1f43,
        ],
    );
}

#[test]
fn what_the_granule_does_not_have_is_read_as_hardware_reads_it() {
    type F4 = ArmStage1<K4>;
    // 0b01 is reserved at the lowest level; bit 0 alone says that there is nothing.
    assert_eq!(F4::decode(0, 0x1001), Entry::Empty);
    assert_eq!(F4::decode(0, !1), Entry::Empty);
    assert!(F4::is_empty(!1));
    // There are blocks of 512 GiB only with LPA2.
    assert_eq!(F4::decode(3, 0x0000_0080_0000_0001), Entry::Empty);
    let (pa, log2) = (0x80_0000_0000, 39);
    assert_eq!(
        ArmStage1::<K4Lpa2>::decode(3, 0x0000_0080_0000_0001),
        Entry::Leaf { pa, log2 }
    );
    assert_eq!(ArmStage1::<K16>::decode(2, 0x10_0000_0001), Entry::Empty);
    assert_eq!(ArmStage1::<K64>::decode(2, 0x400_0000_0001), Entry::Empty);
    // Groups have the address of their first entry; where there are none the bit is not looked at.
    assert_eq!(
        F4::decode(0, 0x0010_0001_2345_6003),
        Entry::Leaf {
            pa: 0x1_2345_0000,
            log2: 16
        }
    );
    assert_eq!(
        ArmStage1::<K4Lpa2>::decode(3, 0x0010_0080_0000_0001),
        Entry::Leaf { pa, log2 }
    );
    // A table's upper attributes and ignored bits do not disturb.
    assert_eq!(
        F4::decode(1, 0x8fff_1234_5678_9fff),
        Entry::Table(0x1234_5678_9000)
    );
}

#[test]
fn permissions_are_read_back_as_they_were_written() {
    fn all<F: Format>(format: F) {
        let mut expressed = 0;
        for prot in (0..128).filter_map(Prot::from_bits) {
            let Some(bits) = format.leaf_bits(prot) else {
                continue;
            };
            expressed += 1;
            for level in 0..usize::from(format.levels()) {
                for log2 in F::leaf_sizes(level).iter().map(u64::trailing_zeros) {
                    let word = F::leaf(level, 0, log2, bits);
                    assert_eq!(format.prot(level, word), prot, "{word:#x}");
                    assert!(!F::is_empty(word));
                }
            }
        }
        assert!(expressed >= 6, "{expressed}");
    }
    for dirty in [false, true] {
        let options = ArmOptions {
            dirty,
            ..ArmOptions::default()
        };
        let one = ArmStage1::<K4>::new(48, 48).unwrap().with_options(options);
        all(one);
        all(one.with_attribute_indices(5, 6, 3).unwrap());
        all(one.with_attribute_indices(5, 6, 6).unwrap());
        all(ArmStage1::<K16Lpa2>::new(48, 48)
            .unwrap()
            .with_options(options));
        let two = ArmStage2::<K64>::new(48, 48).unwrap().with_options(options);
        all(two);
        all(two.with_forced_write_back());
        let lpa = ArmStage2::<K64Lpa>::new(48, 48)
            .unwrap()
            .with_options(options);
        all(lpa.with_forced_write_back());
    }
}
