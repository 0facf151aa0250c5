//! Words of ARMv7 short descriptors, put together by hand from the Arm Architecture Reference
//! Manual, ARMv7-A and ARMv7-R edition (DDI 0406C), figures B3-4 and B3-5 of section B3.5.1.
//!
//! Small page: XN 0, 1 1, B 2, C 3, AP\[1:0\] 5:4, TEX 8:6, AP\[2\] 9, S 10, nG 11. Large page: 01 1:0,
//! TEX 14:12, XN 15, else the same. Section: 1 1, B 2, C 3, XN 4, domain 8:5, AP\[1:0\] 11:10, TEX
//! 14:12, AP\[2\] 15, S 16, nG 17; supersection: 18 too. Table: 01 1:0, domain 8:5.

use std::sync::atomic::AtomicU32;

use crate::words::{check, round_trip, word};
use iopt::format::ArmV7s;
use iopt::{Format, HeapArena, Prot};
use runs::PageSizes;

/// Where the first table, the root of 16 KiB, lies.
const ROOT: u64 = 0x8000_0000;

const MAPS: [(u64, u64, u64); 5] = [
    (0x0010_1000, 0x1234_5000, 0x1000),
    (0x0010_2000, 0xffff_f000, 0x1000),
    (0x0011_0000, 0x1235_0000, 0x1_0000),
    (0x0020_0000, 0x8010_0000, 1 << 20),
    // The last entry of the root, and of a second-level table.
    (0xffff_f000, 0x1000, 0x1000),
];

#[test]
fn small_and_large_pages_sections_and_supersections() {
    check::<_, HeapArena<AtomicU32, 10>>(
        <ArmV7s>::new(),
        ROOT,
        &[&MAPS[..], &[(0x0100_0000, 0x9100_0000, 16 << 20)]].concat(),
        &[
            // The first second-level table, behind the root; domain 0.
            (ROOT + 4, 1, 0x8000_4001),
            // nG, S, TEX 001, AP 011, C, B, XN.
            (ROOT + 0x4004, 1, 0x1234_5c7f),
            (ROOT + 0x4008, 1, 0xffff_fc7f),
            (ROOT + 0x4040, 16, 0x1235_9c3d),
            (ROOT + 0x4080, 1, 0),
            (ROOT + 8, 1, 0x8013_1c1e),
            (ROOT + 0x3ffc, 1, 0x8000_4401),
            (ROOT + 0x47fc, 1, 0x0000_1c7f),
            (ROOT + 0x3c, 1, 0),
            (ROOT + 0x40, 16, 0x9107_1c1e),
            (ROOT + 0x80, 1, 0),
        ],
    );
}

#[test]
fn a_domain_is_in_tables_and_sections_and_has_no_supersections() {
    // Domain 5 is 0xa0.
    check::<_, HeapArena<AtomicU32, 10>>(
        ArmV7s::<5>::new(),
        ROOT,
        &MAPS,
        &[
            (ROOT + 4, 1, 0x8000_40a1),
            (ROOT + 0x4004, 1, 0x1234_5c7f),
            (ROOT + 8, 1, 0x8013_1cbe),
        ],
    );
    let sizes = |log2s: &[u32]| {
        let one = |all: PageSizes, log2: &u32| all.or(PageSizes::from_log2(*log2));
        log2s.iter().fold(PageSizes::NONE, one)
    };
    assert_eq!(<ArmV7s>::page_sizes(2), sizes(&[12, 16, 20, 24]));
    assert_eq!(ArmV7s::<15>::page_sizes(2), sizes(&[12, 16, 20]));
}

#[test]
fn permissions_and_memory_types() {
    let plain = <ArmV7s>::new();
    for (prot, expected) in [
        (Prot::RW, Some(0xc7f)),
        // AP[2].
        (Prot::READ, Some(0xe7f)),
        // XN 0.
        (Prot::RW | Prot::EXECUTE, Some(0xc7e)),
        // AP[1] 0.
        (Prot::RW | Prot::PRIVILEGED, Some(0xc5f)),
        // TEX 000, C 0, B 1; TEX 001, C 0, B 0.
        (Prot::RW | Prot::DEVICE, Some(0xc37)),
        (Prot::RW | Prot::UNCACHED, Some(0xc73)),
        (Prot::RW | Prot::DEVICE | Prot::UNCACHED, None),
        (Prot::WRITE, None),
        (Prot::EXECUTE, None),
        (Prot::empty(), None),
        (Prot::RW | Prot::COHERENT, None),
    ] {
        assert_eq!(word(plain, prot), expected, "{prot}");
    }
    let shared_by_none = plain.with_shareable(false);
    assert_eq!(word(shared_by_none, Prot::RW), Some(0x87f));
    // R or RW, executable or not, privileged or not, of three types; in pages, large pages,
    // sections and supersections.
    assert_eq!(round_trip(plain), 24);
    assert_eq!(round_trip(shared_by_none), 24);
    assert_eq!(round_trip(ArmV7s::<15>::new()), 24);
}
