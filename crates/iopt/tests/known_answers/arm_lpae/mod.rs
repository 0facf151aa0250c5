//! Words of Arm's long descriptors, put together by hand from the Arm Architecture Reference Manual
//! (DDI 0487), D8.3.1 "VMSAv8-64 descriptor formats", figures and field tables of Table, Block and
//! Page descriptors.
//!
//! Stage 1, lower attributes: AttrIndx 4:2, NS 5, AP\[2:1\] 7:6, SH 9:8, AF 10, nG 11; upper: DBM 51,
//! Contiguous 52, PXN 53, UXN 54. Stage 2: MemAttr 5:2, S2AP 7:6, SH 9:8, AF 10; DBM 51,
//! Contiguous 52, XN 54:53. Bits 1:0: 01 block, 11 table or page.

mod entries;
mod geometry;

use std::sync::atomic::AtomicU64;

use iopt::format::{ArmStage1, ArmStage2, K4, K16, K64};
use iopt::{Above, Format, HeapArena, HeapTables, Prot, Table, TableMapError, TableOps as _};
use runs::Span;

const RW: Prot = Prot::RW;

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
            Err(TableMapError::Range(_))
        ));
    }
    table.map(0xffff_fc00_0000_0000, &page, RW).unwrap();
}
