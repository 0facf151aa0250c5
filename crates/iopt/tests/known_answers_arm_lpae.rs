//! Words of Arm's long descriptors, put together by hand from the Arm Architecture Reference Manual
//! (DDI 0487), D8.3.1 "VMSAv8-64 descriptor formats", figures and field tables of Table, Block and
//! Page descriptors.
//!
//! Stage 1, lower attributes: AttrIndx 4:2, NS 5, AP\[2:1\] 7:6, SH 9:8, AF 10, nG 11; upper: DBM 51,
//! Contiguous 52, PXN 53, UXN 54. Stage 2: MemAttr 5:2, S2AP 7:6, SH 9:8, AF 10; DBM 51,
//! Contiguous 52, XN 54:53. Bits 1:0: 01 block, 11 table or page.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::sync::atomic::AtomicU64;

use iopt::format::{
    ArmConfig, ArmGranule, ArmOptions, ArmStage1, ArmStage2, BreakBeforeMake, Entry, Granule, K4,
    K4Lpa2, K16, K16Lpa2, K64, K64Lpa, Shareability,
};
use iopt::{
    Above, BuildError, Format, FormatId, Gather, HeapArena, HeapTables, MapError, Prot, Table,
};
use runs::{PageSizes, Run, Span};

const RW: Prot = Prot::RW;
const R: Prot = Prot::READ;
const W: Prot = Prot::WRITE;
const RX: Prot = Prot::READ.union(Prot::EXECUTE);

/// Where the arenas' first table, the root, lies.
const ROOT: u64 = 0x4000_0000_0000;

/// Maps each `(iova, pa, bytes)`, then compares each `(address, word)` of the table memory.
fn check<F: Format, const LOG2: u32>(format: F, maps: &[(u64, u64, u64)], words: &[(u64, u64)]) {
    let memory = HeapArena::<AtomicU64, LOG2>::with_tables(64).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    assert_eq!(table.root().address, ROOT);
    for &(iova, pa, bytes) in maps {
        table.map(iova, &[Span::new(pa, bytes)], RW).unwrap();
        assert_eq!(table.leaf_at(iova).unwrap().run.len, bytes);
    }
    for &(address, word) in words {
        let found = memory.read(address).unwrap();
        assert_eq!(found, word, "{found:#x} at {address:#x}, not {word:#x}");
    }
}

#[test]
fn stage_1_4k_has_these_words_for_every_size() {
    // Indices 1, 3, 3 and 5 of 9 bits each, from bit 39 down.
    check::<_, 12>(
        ArmStage1::<K4>::new(48, 48).unwrap(),
        &[
            (0x80_c060_5000, 0x1_2345_6000, 4 << 10),
            (0x80_c060_6000, 0xffff_ffff_f000, 4 << 10),
            (0x80_c061_0000, 0x1_2346_0000, 64 << 10),
            (0x80_c080_0000, 0x2_0020_0000, 2 << 20),
            (0x80_c200_0000, 0x4_0200_0000, 32 << 20),
            (0x81_0000_0000, 0x40_0000_0000, 1 << 30),
            (0x84_0000_0000, 0x48_0000_0000, 16 << 30),
        ],
        &[
            (0x4000_0000_0000, 0),
            (0x4000_0000_0008, 0x0000_4000_0000_1003),
            (0x4000_0000_1018, 0x0000_4000_0000_2003),
            (0x4000_0000_2018, 0x0000_4000_0000_3003),
            // UXN, PXN; nG, AF, SH 11, AP 01, AttrIndx 0, page.
            (0x4000_0000_3020, 0),
            (0x4000_0000_3028, 0x0060_0001_2345_6f43),
            (0x4000_0000_3030, 0x0060_ffff_ffff_ff43),
            (0x4000_0000_3038, 0),
            // 16 pages, each with its own address, and Contiguous.
            (0x4000_0000_3080, 0x0070_0001_2346_0f43),
            (0x4000_0000_3088, 0x0070_0001_2346_1f43),
            (0x4000_0000_30f8, 0x0070_0001_2346_ff43),
            (0x4000_0000_3100, 0),
            // Blocks at Arm's level 2 and 1.
            (0x4000_0000_2020, 0x0060_0002_0020_0f41),
            (0x4000_0000_2080, 0x0070_0004_0200_0f41),
            (0x4000_0000_2088, 0x0070_0004_0220_0f41),
            (0x4000_0000_20f8, 0x0070_0004_03e0_0f41),
            (0x4000_0000_1020, 0x0060_0040_0000_0f41),
            (0x4000_0000_1080, 0x0070_0048_0000_0f41),
            (0x4000_0000_1088, 0x0070_0048_4000_0f41),
            (0x4000_0000_10f8, 0x0070_004b_c000_0f41),
        ],
    );
}

#[test]
fn stage_1_16k_has_these_words_for_every_size() {
    // Indices 1 (bit 47), 2 (from bit 36), 3 (from bit 25), 5 (from bit 14).
    check::<_, 14>(
        ArmStage1::<K16>::new(48, 48).unwrap(),
        &[
            (0x8020_0601_4000, 0x1_2345_4000, 16 << 10),
            (0x8020_0601_8000, 0xffff_ffff_c000, 16 << 10),
            (0x8020_0620_0000, 0x1_2340_0000, 2 << 20),
            (0x8020_0800_0000, 0x2_0200_0000, 32 << 20),
            (0x8020_4000_0000, 0x3_4000_0000, 1 << 30),
        ],
        &[
            (0x4000_0000_0008, 0x0000_4000_0000_4003),
            (0x4000_0000_4010, 0x0000_4000_0000_8003),
            (0x4000_0000_8018, 0x0000_4000_0000_c003),
            (0x4000_0000_c028, 0x0060_0001_2345_4f43),
            (0x4000_0000_c030, 0x0060_ffff_ffff_cf43),
            // 128 pages.
            (0x4000_0000_c400, 0x0070_0001_2340_0f43),
            (0x4000_0000_c408, 0x0070_0001_2340_4f43),
            (0x4000_0000_c7f8, 0x0070_0001_235f_cf43),
            (0x4000_0000_c800, 0),
            (0x4000_0000_8020, 0x0060_0002_0200_0f41),
            // 32 blocks.
            (0x4000_0000_8100, 0x0070_0003_4000_0f41),
            (0x4000_0000_8108, 0x0070_0003_4200_0f41),
            (0x4000_0000_81f8, 0x0070_0003_7e00_0f41),
        ],
    );
}

#[test]
fn stage_1_64k_has_these_words_for_every_size() {
    // Indices 1 (from bit 42), 3 (from bit 29), 5 (from bit 16).
    check::<_, 16>(
        ArmStage1::<K64>::new(48, 48).unwrap(),
        &[
            (0x400_6005_0000, 0x1_2345_0000, 64 << 10),
            (0x400_6006_0000, 0xffff_ffff_0000, 64 << 10),
            (0x400_6020_0000, 0x1_2340_0000, 2 << 20),
            (0x400_8000_0000, 0x2_2000_0000, 512 << 20),
            (0x404_0000_0000, 0x8_0000_0000, 16 << 30),
        ],
        &[
            (0x4000_0000_0008, 0x0000_4000_0001_0003),
            (0x4000_0001_0018, 0x0000_4000_0002_0003),
            (0x4000_0002_0028, 0x0060_0001_2345_0f43),
            (0x4000_0002_0030, 0x0060_ffff_ffff_0f43),
            // 32 pages.
            (0x4000_0002_0100, 0x0070_0001_2340_0f43),
            (0x4000_0002_0108, 0x0070_0001_2341_0f43),
            (0x4000_0002_01f8, 0x0070_0001_235f_0f43),
            (0x4000_0001_0020, 0x0060_0002_2000_0f41),
            // 32 blocks.
            (0x4000_0001_0100, 0x0070_0008_0000_0f41),
            (0x4000_0001_0108, 0x0070_0008_2000_0f41),
            (0x4000_0001_01f8, 0x0070_000b_e000_0f41),
        ],
    );
}

#[test]
fn stage_2_4k_with_two_tables_side_by_side_as_root_has_these_words() {
    // 40 bits: a root of 1,024 entries in 8 KiB. The last index of each level.
    check::<_, 12>(
        ArmStage2::<K4>::new(40, 48).unwrap(),
        &[
            (0xff_ffff_f000, 0x1_2345_6000, 4 << 10),
            (0xff_ffff_0000 - 0x1_0000, 0x1_2346_0000, 64 << 10),
            (0xff_4000_0000, 0xffff_c000_0000, 1 << 30),
        ],
        &[
            (0x4000_0000_1ff8, 0x0000_4000_0000_2003),
            (0x4000_0000_2ff8, 0x0000_4000_0000_3003),
            // XN 10; AF, SH 11, S2AP 11, MemAttr 1111, page.
            (0x4000_0000_3ff8, 0x0040_0001_2345_67ff),
            (0x4000_0000_3f00, 0x0050_0001_2346_07ff),
            (0x4000_0000_3f08, 0x0050_0001_2346_17ff),
            (0x4000_0000_1fe8, 0x0040_ffff_c000_07fd),
        ],
    );
}

#[test]
fn the_upper_half_is_indexed_by_the_bits_that_count() {
    // 42 bits: the root has 8 entries; bits 63:42 are 1.
    let format = ArmStage1::<K4>::new(42, 48).unwrap().upper();
    assert_eq!(format.aperture().above, Above::Ones);
    check::<_, 12>(
        format,
        &[(0xffff_ffff_ffff_f000, 0x1_2345_6000, 4 << 10)],
        &[
            (0x4000_0000_0038, 0x0000_4000_0000_1003),
            (0x4000_0000_1ff8, 0x0000_4000_0000_2003),
            (0x4000_0000_2ff8, 0x0000_4000_0000_3003),
            (0x4000_0000_3ff8, 0x0060_0001_2345_6f43),
        ],
    );
    let memory = HeapTables::with_tables(16).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let page = [Span::new(0, 4096)];
    for iova in [0, 0xffff_fbff_ffff_f000] {
        assert!(matches!(
            table.map(iova, &page, RW),
            Err(MapError::Range(_))
        ));
    }
    table.map(0xffff_fc00_0000_0000, &page, RW).unwrap();
}

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
    // XN alone, AP[1] 1 (RES1), nG 0.
    leaves(
        plain.with_one_privilege(),
        0,
        0x1_2345_6000,
        &[
            (RW, Some(0x0040_0001_2345_6743)),
            (R, Some(0x0040_0001_2345_67c3)),
            (RX, Some(0x0000_0001_2345_67c3)),
            (RW | privileged, None),
        ],
    );
    // nG 0.
    leaves(
        plain.with_global_leaves(),
        0,
        0x1_2345_6000,
        &[(RW, Some(0x0060_0001_2345_6743))],
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
    // What has lost DBM keeps that it was dirty in bit 55, which hardware ignores.
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
    // What has lost DBM keeps that it was dirty in bit 55, which hardware ignores.
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
        assert_eq!(runs, [Run::new(iova, pa, 4 * page)]);
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
fn the_sizes_are_those_of_the_granule() {
    let sizes = |list: &[u32]| {
        list.iter().fold(PageSizes::NONE, |all, log2| {
            all.or(PageSizes::from_log2(*log2))
        })
    };
    assert_eq!(
        ArmStage1::<K4>::page_sizes(4),
        sizes(&[12, 16, 21, 25, 30, 34])
    );
    assert_eq!(
        ArmStage2::<K4Lpa2>::page_sizes(5),
        sizes(&[12, 16, 21, 25, 30, 34, 39])
    );
    assert_eq!(ArmStage1::<K16>::page_sizes(4), sizes(&[14, 21, 25, 30]));
    assert_eq!(
        ArmStage1::<K16Lpa2>::page_sizes(4),
        sizes(&[14, 21, 25, 30, 36])
    );
    assert_eq!(ArmStage1::<K64>::page_sizes(3), sizes(&[16, 21, 29, 34]));
    assert_eq!(
        ArmStage2::<K64Lpa>::page_sizes(3),
        sizes(&[16, 21, 29, 34, 42])
    );
}

/// Levels and entries of the root for so many input bits.
fn stage1<G: Granule>(bits: u32) -> (u8, usize) {
    let format = ArmStage1::<G>::new(bits, 48).unwrap();
    let levels = format.levels();
    (levels, format.entries(usize::from(levels) - 1))
}

fn stage2<G: Granule>(bits: u32) -> (u8, usize) {
    let format = ArmStage2::<G>::new(bits, 48).unwrap();
    let levels = format.levels();
    assert_eq!(format.with_levels(levels), Ok(format));
    (levels, format.entries(usize::from(levels) - 1))
}

#[test]
fn a_walk_begins_where_the_input_size_says() {
    // D8.2.7 to D8.2.9: how many bits each level resolves.
    assert_eq!(stage1::<K4>(48), (4, 512));
    assert_eq!(stage1::<K4>(40), (4, 2));
    assert_eq!(stage1::<K4>(39), (3, 512));
    assert_eq!(stage1::<K4>(32), (3, 4));
    assert_eq!(stage1::<K4Lpa2>(52), (5, 16));
    assert_eq!(stage1::<K4Lpa2>(48), (4, 512));
    assert_eq!(stage1::<K16>(48), (4, 2));
    assert_eq!(stage1::<K16>(47), (3, 2048));
    assert_eq!(stage1::<K16>(36), (2, 2048));
    assert_eq!(stage1::<K16>(32), (2, 128));
    assert_eq!(stage1::<K16Lpa2>(52), (4, 32));
    assert_eq!(stage1::<K64>(52), (3, 1024));
    assert_eq!(stage1::<K64>(48), (3, 64));
    assert_eq!(stage1::<K64>(42), (2, 8192));
    assert_eq!(stage1::<K64Lpa>(32), (2, 8));
    // D8.2.6: up to 16 tables side by side.
    assert_eq!(stage2::<K4>(48), (4, 512));
    assert_eq!(stage2::<K4>(44), (4, 32));
    assert_eq!(stage2::<K4>(43), (3, 8192));
    assert_eq!(stage2::<K4>(40), (3, 1024));
    assert_eq!(stage2::<K4>(35), (3, 32));
    assert_eq!(stage2::<K4>(34), (2, 8192));
    assert_eq!(stage2::<K4>(32), (2, 2048));
    assert_eq!(stage2::<K4Lpa2>(52), (4, 8192));
    assert_eq!(stage2::<K16>(48), (3, 4096));
    assert_eq!(stage2::<K16>(40), (2, 32768));
    assert_eq!(stage2::<K16Lpa2>(52), (4, 32));
    assert_eq!(stage2::<K16Lpa2>(51), (3, 32768));
    assert_eq!(stage2::<K64>(48), (3, 64));
    assert_eq!(stage2::<K64>(46), (2, 131072));
    assert_eq!(stage2::<K64>(33), (1, 131072));
    assert_eq!(stage2::<K64Lpa>(52), (3, 1024));
    // Or one table, at a level more.
    let more = ArmStage2::<K4>::new(40, 48)
        .unwrap()
        .with_levels(4)
        .unwrap();
    assert_eq!((more.levels(), more.entries(3)), (4, 2));
    let more = ArmStage2::<K4Lpa2>::new(52, 48).unwrap().with_levels(5);
    assert_eq!(more.unwrap().entries(4), 16);
    for (levels, result) in [
        (2, ArmStage2::<K4>::new(40, 48).unwrap().with_levels(2)),
        (5, ArmStage2::<K4>::new(40, 48).unwrap().with_levels(5)),
        (4, ArmStage2::<K4>::new(39, 48).unwrap().with_levels(4)),
        (0, ArmStage2::<K4>::new(32, 48).unwrap().with_levels(0)),
    ] {
        assert!(matches!(result, Err(BuildError::Levels { levels: l, .. }) if l == levels));
    }
    // With 48 bits the 16 KiB granule has no level 0 in stage 2.
    let none = ArmStage2::<K16>::new(48, 48).unwrap().with_levels(4);
    assert!(none.is_err());
}

#[test]
fn settings_out_of_range_are_named() {
    let message = |result: Result<(), BuildError>| result.unwrap_err().to_string();
    assert_eq!(
        message(ArmStage1::<K4>::new(49, 48).map(drop)),
        "arm-s1-4k: an input size in bits of 49 is not within 32 to 48"
    );
    assert_eq!(
        message(ArmStage2::<K64>::new(52, 48).map(drop)),
        "arm-s2-64k: an input size in bits of 52 is not within 32 to 48"
    );
    assert_eq!(
        message(ArmStage1::<K16Lpa2>::new(31, 48).map(drop)),
        "arm-s1-16k-lpa2: an input size in bits of 31 is not within 32 to 52"
    );
    assert_eq!(
        message(ArmStage1::<K64>::new(48, 52).map(drop)),
        "arm-s1-64k: an output size in bits of 52 is not within 32 to 48"
    );
    let format = ArmStage1::<K4>::new(48, 48).unwrap();
    assert_eq!(
        message(format.with_attribute_indices(8, 0, 1).map(drop)),
        "arm-s1-4k: a MAIR index of 8 is not within 0 to 7"
    );
    assert_eq!(
        message(format.with_attribute_indices(2, 3, 9).map(drop)),
        "arm-s1-4k: a MAIR index of 9 is not within 0 to 7"
    );
}

#[test]
fn a_unit_is_told_granule_input_size_and_half() {
    let config = |granule, input_bits, upper| ArmConfig {
        granule,
        input_bits,
        upper,
    };
    assert_eq!(
        ArmStage1::<K16>::new(47, 40).unwrap().upper().id(),
        FormatId::ArmStage1(config(ArmGranule::K16, 47, true))
    );
    assert_eq!(
        ArmStage2::<K64Lpa>::new(40, 40).unwrap().id(),
        FormatId::ArmStage2(config(ArmGranule::K64Lpa, 40, false))
    );
    assert_eq!(ArmStage2::<K64>::new(40, 40).unwrap().output_bits(), 40);
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
        all(one.with_one_privilege());
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
