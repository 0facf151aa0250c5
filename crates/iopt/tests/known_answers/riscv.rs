//! Words of RISC-V tables, put together by hand from the RISC-V Privileged Architecture (20240411):
//! figure "Sv39 page table entry" (section 10.4.1), chapter 11 "Svnapot", chapter 12 "Svpbmt".
//!
//! V 0, R 1, W 2, X 3, U 4, G 5, A 6, D 7, page number 53:10 (address >> 2), PBMT 62:61, N 63.

use std::sync::atomic::AtomicU64;

use crate::words::{check, round_trip, word};
use iopt::format::{RiscV, RiscVG};
use iopt::{Format, HeapArena, Prot};

/// Where the first table, the root, lies. Entries hold it shifted: 0x1000_0000_0000.
const ROOT: u64 = 0x4000_0000_0000;

#[test]
fn sv39_has_pages_groups_megapages_and_gigapages() {
    check::<_, HeapArena<AtomicU64, 12>>(
        RiscV::new(3).unwrap(),
        ROOT,
        &[
            // Index 1 at each level; 0x1234_5000 >> 2 = 0x48d_1400.
            (0x4020_1000, 0x1234_5000, 0x1000),
            // The highest page.
            (0x4020_2000, 0xff_ffff_ffff_f000, 0x1000),
            // 64 KiB from entry 0x10 on; 0x1235_0000 >> 2 = 0x48d_4000, page number ...1000.
            (0x4021_0000, 0x1235_0000, 0x1_0000),
            (0x4040_0000, 0x8020_0000, 2 << 20),
            (0x8000_0000, 0x1_4000_0000, 1 << 30),
        ],
        &[
            // Tables: V alone.
            (ROOT + 8, 1, 0x1000_0000_0401),
            (ROOT + 0x1008, 1, 0x1000_0000_0801),
            // V, R, W, U, A, D: 0xd7.
            (ROOT + 0x2008, 1, 0x048d_14d7),
            (ROOT + 0x2010, 1, 0x003f_ffff_ffff_fcd7),
            (ROOT + 0x2080, 16, 0x8000_0000_048d_60d7),
            (ROOT + 0x2100, 1, 0),
            (ROOT + 0x1010, 1, 0x2008_00d7),
            (ROOT + 0x10, 1, 0x5000_00d7),
        ],
    );
    // The upper half: the last entry of each table.
    check::<_, HeapArena<AtomicU64, 12>>(
        RiscV::new(3).unwrap(),
        ROOT,
        &[(0xffff_ffff_ffff_f000, 0x1000, 0x1000)],
        &[
            (ROOT + 0xff8, 1, 0x1000_0000_0401),
            (ROOT + 0x2ff8, 1, 0x4d7),
        ],
    );
}

#[test]
fn sv48_and_sv57_have_terapages_and_petapages() {
    check::<_, HeapArena<AtomicU64, 12>>(
        RiscV::new(4).unwrap(),
        ROOT,
        &[(0x80_0000_0000, 0x100_0000_0000, 512 << 30)],
        &[(ROOT + 8, 1, 0x40_0000_00d7)],
    );
    check::<_, HeapArena<AtomicU64, 12>>(
        RiscV::new(5).unwrap(),
        ROOT,
        &[
            (1 << 48, 0x3_0000_0000_0000, 256 << 40),
            (0, 0x100_0000_0000, 512 << 30),
        ],
        &[
            (ROOT + 8, 1, 0xc000_0000_00d7),
            (ROOT, 1, 0x1000_0000_0401),
            (ROOT + 0x1000, 1, 0x40_0000_00d7),
        ],
    );
}

#[test]
fn second_stage_roots_have_2048_entries() {
    for levels in 3..=5 {
        let format = RiscVG::new(levels).unwrap();
        let shift = 12 + 9 * (u32::from(levels) - 1);
        let size = 1u64 << shift;
        check::<_, HeapArena<AtomicU64, 12>>(
            format,
            ROOT,
            &[
                (512 << shift, 3 << shift, size),
                (2047 << shift, 5 << shift, size),
                (0, 0x1000, 0x1000),
            ],
            &[
                (ROOT + 0x1000, 1, 3 << (shift - 2) | 0xd7),
                (ROOT + 0x3ff8, 1, 5 << (shift - 2) | 0xd7),
                // The next table lies behind all 16 KiB.
                (ROOT, 1, 0x1000_0000_1001),
            ],
        );
        assert_eq!(format.aperture(), iopt::Aperture::zeros(shift + 11));
    }
}

#[test]
fn permissions_updates_and_memory_types() {
    let plain = RiscV::new(3).unwrap();
    let x = Prot::EXECUTE;
    let all = Prot::RW | x;
    for (prot, expected) in [
        (Prot::READ, Some(0x53)),
        (Prot::RW, Some(0xd7)),
        (x, Some(0x59)),
        (Prot::READ | x, Some(0x5b)),
        (all, Some(0xdf)),
        // No request has privilege.
        (Prot::RW | Prot::PRIVILEGED, None),
        // Writing needs reading (W without R is reserved), and a leaf one of R and X.
        (Prot::WRITE, None),
        (Prot::WRITE | x, None),
        (Prot::empty(), None),
        (Prot::RW | Prot::COHERENT, None),
        // No Svpbmt.
        (Prot::RW | Prot::DEVICE, None),
        (Prot::RW | Prot::UNCACHED, None),
    ] {
        assert_eq!(word(plain, prot), expected, "{prot}");
    }
    let updating = plain.with_hardware_updates(true);
    assert_eq!(word(updating, Prot::RW), Some(0x17));
    assert_eq!(word(updating, Prot::READ), Some(0x13));
    // U 0.
    let supervised = plain.with_supervisor_requests(true);
    assert_eq!(word(supervised, Prot::RW), Some(0xd7));
    assert_eq!(word(supervised, Prot::RW | Prot::PRIVILEGED), Some(0xc7));
    let typed = plain.with_memory_types(true);
    // PBMT 1 is bit 61, PBMT 2 bit 62.
    assert_eq!(
        word(typed, Prot::RW | Prot::UNCACHED),
        Some(0x2000_0000_0000_00d7)
    );
    assert_eq!(
        word(typed, Prot::RW | Prot::DEVICE),
        Some(0x4000_0000_0000_00d7)
    );
    assert_eq!(word(typed, Prot::RW | Prot::DEVICE | Prot::UNCACHED), None);
    // The second stage has no privilege: U is always set.
    let second = RiscVG::new(3).unwrap();
    assert_eq!(word(second, Prot::RW), Some(0xd7));
    assert_eq!(word(second, Prot::RW | Prot::PRIVILEGED), None);

    // R, RW, X, RX, RWX; then of three types; then privileged or not.
    assert_eq!(round_trip(plain), 5);
    assert_eq!(round_trip(updating), 5);
    let typed = RiscV::new(5).unwrap().with_memory_types(true);
    assert_eq!(round_trip(typed), 15);
    assert_eq!(round_trip(typed.with_supervisor_requests(true)), 30);
    assert_eq!(round_trip(RiscVG::new(5).unwrap()), 5);
    assert_eq!(round_trip(second.with_memory_types(true)), 15);
    assert!(RiscV::new(2).is_err() && RiscVG::new(6).is_err());
}
