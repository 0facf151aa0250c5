//! Words of Apple DART tables. There is no public specification; the words are those that Linux's
//! driver and the Asahi Linux project's tools write and that the hardware accepts.
//!
//! Valid 0; sub-page first 63:52, last 51:40. Version 1: part of the page not looked at 1, no
//! writes 7, no reads 8, address 35:12. Version 2: not cached 1, no writes 2, no reads 3, address
//! bits 41:14 in 37:10.

use std::sync::atomic::AtomicU64;

use crate::words::{check, round_trip, word};
use iopt::format::{Dart1, Dart1Page4K, Dart2, DartConfig, DartVersion};
use iopt::{Format, FormatId, HeapArena, Prot, Table};

/// Where the first table, the root, lies.
const V1_ROOT: u64 = 0x8_0000_0000;
const V2_ROOT: u64 = 0x200_0000_0000;

#[test]
fn version_1_with_pages_of_16k_and_up_to_four_roots() {
    check::<_, HeapArena<AtomicU64, 14>>(
        Dart1::new(2, 36).unwrap(),
        V1_ROOT,
        // Index 1, from bit 25 and bit 14; and the last ones, with the highest page.
        &[
            (0x200_4000, 0x9_1234_4000, 0x4000),
            (0xf_ffff_c000, 0xf_ffff_c000, 0x4000),
        ],
        &[
            (V1_ROOT + 8, 1, 0x8_0000_4001),
            (V1_ROOT + 0x4008, 1, 0x000f_ff09_1234_4003),
            (V1_ROOT + 0x3ff8, 1, 0x8_0000_8001),
            (V1_ROOT + 0xbff8, 1, 0x000f_ff0f_ffff_c003),
        ],
    );
    // 38 bits: four roots of 16 KiB.
    check::<_, HeapArena<AtomicU64, 14>>(
        Dart1::new(2, 38).unwrap(),
        V1_ROOT,
        &[
            (0x10_0000_0000, 0x4000, 0x4000),
            (0x3f_ffff_c000, 0, 0x4000),
        ],
        &[
            (V1_ROOT + 0x4000, 1, 0x8_0001_0001),
            (V1_ROOT + 0xfff8, 1, 0x8_0001_4001),
            (V1_ROOT + 0x1_0000, 1, 0x000f_ff00_0000_4003),
        ],
    );
}

#[test]
fn version_1_with_pages_of_4k() {
    // 32 bits: four roots of 512 entries; index 1 from bit 21 and bit 12.
    check::<_, HeapArena<AtomicU64, 12>>(
        Dart1Page4K::new(2, 32).unwrap(),
        V1_ROOT,
        &[
            (0x20_1000, 0x9_1234_5000, 0x1000),
            (0x4000_0000, 0xf_ffff_f000, 0x1000),
        ],
        &[
            (V1_ROOT + 8, 1, 0x8_0000_4001),
            (V1_ROOT + 0x4008, 1, 0x000f_ff09_1234_5003),
            (V1_ROOT + 0x1000, 1, 0x8_0000_5001),
            (V1_ROOT + 0x5000, 1, 0x000f_ff0f_ffff_f003),
        ],
    );
}

#[test]
fn version_2_holds_42_bits_shifted_by_four() {
    check::<_, HeapArena<AtomicU64, 14>>(
        Dart2::new(2, 36).unwrap(),
        V2_ROOT,
        &[
            (0x200_4000, 0x2ab_cdec_4000, 0x4000),
            (0x200_8000, 0x3ff_ffff_c000, 0x4000),
        ],
        &[
            // 0x200_0000_4000 >> 4.
            (V2_ROOT + 8, 1, 0x20_0000_0401),
            (V2_ROOT + 0x4008, 1, 0x000f_ff2a_bcde_c403),
            (V2_ROOT + 0x4010, 1, 0x000f_ff3f_ffff_fc03),
        ],
    );
    // Three levels for 42 bits: 6 bits from bit 36 on in the root, then 11 bits each.
    check::<_, HeapArena<AtomicU64, 14>>(
        Dart2::new(3, 42).unwrap(),
        V2_ROOT,
        &[(0x3ff_ffff_c000, 0x4000, 0x4000)],
        &[
            (V2_ROOT + 8 * 63, 1, 0x20_0000_0401),
            (V2_ROOT + 0x7ff8, 1, 0x20_0000_0801),
            (V2_ROOT + 0xbff8, 1, 0x000f_ff00_0000_0403),
        ],
    );
}

#[test]
fn permissions() {
    const WHOLE: u64 = 0x000f_ff00_0000_0000;
    let v1 = Dart1::default();
    assert_eq!(word(v1, Prot::RW), Some(WHOLE | 0x003));
    assert_eq!(word(v1, Prot::READ), Some(WHOLE | 0x083));
    assert_eq!(word(v1, Prot::WRITE), Some(WHOLE | 0x103));
    assert_eq!(word(v1, Prot::RW | Prot::COHERENT), None);
    let v2 = Dart2::default();
    assert_eq!(word(v2, Prot::RW), Some(WHOLE | 0x3));
    assert_eq!(word(v2, Prot::READ), Some(WHOLE | 0x7));
    assert_eq!(word(v2, Prot::WRITE), Some(WHOLE | 0xb));
    assert_eq!(word(v2, Prot::RW | Prot::COHERENT), Some(WHOLE | 0x1));
    for refused in [
        Prot::empty(),
        Prot::READ | Prot::EXECUTE,
        Prot::READ | Prot::PRIVILEGED,
        Prot::READ | Prot::DEVICE,
        Prot::READ | Prot::UNCACHED,
    ] {
        assert_eq!(word(v1, refused), None);
        assert_eq!(word(v2, refused), None);
    }
    assert_eq!(round_trip(v1), 3);
    assert_eq!(round_trip(Dart1Page4K::default()), 3);
    assert_eq!(round_trip(v2), 6);
    assert_eq!(round_trip(Dart2::new(3, 42).unwrap()), 6);
}

#[test]
fn sizes_and_names() {
    for (refused, why) in [
        (Dart1::new(1, 32).err(), "dart1 has no tables of 1 levels"),
        (Dart2::new(4, 42).err(), "dart2 has no tables of 4 levels"),
        (
            Dart1::new(2, 39).err(),
            "dart1: input address bits 39 is not within 32 to 38",
        ),
        (
            Dart1Page4K::new(2, 33).err(),
            "dart1-4k: input address bits 33 is not within 32 to 32",
        ),
        (
            Dart2::new(2, 31).err(),
            "dart2: input address bits 31 is not within 32 to 38",
        ),
    ] {
        assert_eq!(refused.unwrap().to_string(), why);
    }
    let format = Dart2::new(3, 42).unwrap();
    let config = DartConfig {
        version: DartVersion::V2,
        page_log2: 14,
        input_bits: 42,
    };
    assert_eq!(format.id(), FormatId::Dart(config));
    let memory = HeapArena::<AtomicU64, 14>::with_tables_at(16, V2_ROOT).unwrap();
    let table = Table::new(format, &memory).unwrap();
    assert_eq!(table.root().levels, 3);
}
