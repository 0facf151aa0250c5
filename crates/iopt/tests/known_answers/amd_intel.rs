//! Words of AMD's and Intel's tables, put together by hand from the specifications' field tables.
//!
//! * AMD v1 (48882, tables 14 to 17): PR 0, A 5, D 6, Next Level 11:9, address 51:12, FC 60, IR 61,
//!   IW 62.
//! * x86-64 (AMD64 APM 2, 5.3): P 0, R/W 1, U/S 2, A 5, D 6, PS 7, address 51:12, NX 63.
//! * VT-d second stage (D51397, 9.8): R 0, W 1, PS 7, A 8, D 9, SNP 11, address 51:12.

use std::sync::atomic::AtomicU64;

use crate::words::{check, round_trip, word};
use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::{Format, HeapArena, Prot};

type Memory = HeapArena<AtomicU64, 12>;

const ROOT: u64 = 0x4000_0000_0000;
const R: Prot = Prot::READ;
const W: Prot = Prot::WRITE;
const RW: Prot = Prot::RW;

#[test]
fn amd_v1_has_pages_of_every_power_of_two() {
    check::<_, Memory>(
        AmdV1::new(3).unwrap(),
        ROOT,
        &[
            // Index 1 at each level.
            (0x4020_1000, 0x1234_5000, 0x1000),
            // 8 KiB: bit 12 is 0, in two entries with Next Level 7.
            (0x4020_2000, 0x1234_6000, 0x2000),
            // 64 KiB: bits 14:12 are 1 and bit 15 is 0, in sixteen.
            (0x4021_0000, 0x1235_0000, 0x1_0000),
            // 2 MiB in one entry of the level above, and 8 MiB in four, whose bits 21:12 are 1.
            (0x4040_0000, 0x8020_0000, 2 << 20),
            (0x4080_0000, 0x8080_0000, 8 << 20),
            // 1 GiB at the root.
            (0x8000_0000, 0x1_4000_0000, 1 << 30),
        ],
        &[
            // PR, IR, IW, and the number of levels below: 2, then 1.
            (ROOT + 8, 1, 0x6000_4000_0000_1401),
            (ROOT + 0x1008, 1, 0x6000_4000_0000_2201),
            (ROOT + 0x2008, 1, 0x6000_0000_1234_5001),
            (ROOT + 0x2010, 2, 0x6000_0000_1234_6e01),
            (ROOT + 0x2080, 16, 0x6000_0000_1235_7e01),
            (ROOT + 0x2100, 1, 0),
            (ROOT + 0x1010, 1, 0x6000_0000_8020_0001),
            (ROOT + 0x1020, 4, 0x6000_0000_80bf_fe01),
            (ROOT + 0x10, 1, 0x6000_0001_4000_0001),
        ],
    );
}

#[test]
fn amd_v1_permissions() {
    let format = AmdV1::new(4).unwrap();
    assert_eq!(word(format, R), Some(0x2000_0000_0000_0001));
    assert_eq!(word(format, W), Some(0x4000_0000_0000_0001));
    assert_eq!(
        word(format, RW | Prot::COHERENT),
        Some(0x7000_0000_0000_0001)
    );
    assert_eq!(word(format, RW | Prot::EXECUTE), None);
    assert!(<AmdV1>::is_dirty(0x6000_0000_0000_5061));
    assert!(!<AmdV1>::is_dirty(0x6000_0000_0000_5021));
    assert_eq!(round_trip(format), 6);
}

#[test]
fn x86_64_has_pages_of_three_sizes() {
    check::<_, Memory>(
        X86_64::new(4).unwrap(),
        ROOT,
        &[
            (0x80_4020_1000, 0x1234_5000, 0x1000),
            (0x80_4040_0000, 0x8020_0000, 2 << 20),
            (0x80_8000_0000, 0x1_4000_0000, 1 << 30),
        ],
        &[
            // Tables: P, R/W, U/S, A.
            (ROOT + 8, 1, 0x4000_0000_1027),
            (ROOT + 0x1008, 1, 0x4000_0000_2027),
            (ROOT + 0x2008, 1, 0x4000_0000_3027),
            // P, R/W, U/S and NX; PS above the lowest level.
            (ROOT + 0x3008, 1, 0x8000_0000_1234_5007),
            (ROOT + 0x2010, 1, 0x8000_0000_8020_0087),
            (ROOT + 0x1010, 1, 0x8000_0001_4000_0087),
        ],
    );
    // The upper half: the last entry of each table.
    check::<_, Memory>(
        X86_64::new(5).unwrap(),
        ROOT,
        &[(0xffff_ffff_ffff_f000, 0x1000, 0x1000)],
        &[
            (ROOT + 0xff8, 1, 0x4000_0000_1027),
            (ROOT + 0x4ff8, 1, 0x8000_0000_0000_1007),
        ],
    );
}

#[test]
fn x86_64_permissions() {
    let format = X86_64::new(4).unwrap();
    assert_eq!(word(format, R), Some(0x8000_0000_0000_0005));
    assert_eq!(word(format, RW | Prot::EXECUTE), Some(7));
    assert_eq!(
        word(format, RW | Prot::PRIVILEGED),
        Some(0x8000_0000_0000_0003)
    );
    assert_eq!(word(format, W), None);
    assert!(<X86_64>::is_dirty(0x47) && !<X86_64>::is_dirty(0x27));
    // Writable or not, executable or not, privileged or not.
    assert_eq!(round_trip(format), 8);
}

#[test]
fn vt_d_second_stage_has_pages_of_three_sizes() {
    check::<_, Memory>(
        VtdSs::new(3).unwrap(),
        ROOT,
        &[
            (0x4020_1000, 0x1234_5000, 0x1000),
            (0x4040_0000, 0x8020_0000, 2 << 20),
            (0x8000_0000, 0x1_4000_0000, 1 << 30),
        ],
        &[
            (ROOT + 8, 1, 0x4000_0000_1003),
            (ROOT + 0x1008, 1, 0x4000_0000_2003),
            (ROOT + 0x2008, 1, 0x1234_5003),
            (ROOT + 0x1010, 1, 0x8020_0083),
            (ROOT + 0x10, 1, 0x1_4000_0083),
        ],
    );
}

#[test]
fn vt_d_second_stage_permissions() {
    let format = VtdSs::new(4).unwrap();
    assert_eq!(word(format, R), Some(1));
    assert_eq!(word(format, W), Some(2));
    assert_eq!(word(format, RW | Prot::COHERENT), Some(0x803));
    assert_eq!(word(format, R | Prot::EXECUTE), None);
    assert!(VtdSs::is_dirty(0x303) && !VtdSs::is_dirty(0x103));
    assert_eq!(round_trip(format), 6);
}
