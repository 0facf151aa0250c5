//! Images that are damaged or forged.

use iopt::format::{AmdV1, VtdSs};
use iopt::image::{Image, ImageError};
use iopt::walk::{Access, Walker};
use iopt::{
    BuildError, Cell, DamageKind, HeapTables, Prot, Table, TableMemory, TableOps as _, Takeover,
};
use proptest::prelude::*;
use runs::{PageSizes, Span};
use std::sync::atomic::AtomicU64;

use super::{G1, PAGE, image, room, take_apart, vtd};

/// Changes bytes and makes the checksum right again.
fn forged(bytes: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.truncate(bytes.len() - 4);
    change(&mut bytes);
    // CRC-32C.
    let rest = |byte: u32| {
        (0..8).fold(byte, |crc, _| match crc & 1 {
            1 => crc >> 1 ^ 0x82f6_3b78,
            _ => crc >> 1,
        })
    };
    let rests: [u32; 256] = std::array::from_fn(|byte| rest(byte as u32));
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        crc >> 8 ^ rests[(crc as u8 ^ byte) as usize]
    });
    bytes.extend_from_slice(&(!crc).to_le_bytes());
    bytes
}

fn set(bytes: &mut [u8], offset: usize, value: u64) {
    bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
}

/// Each field of the header that says something else than the format has, with a right checksum.
#[test]
fn a_header_that_lies_is_refused_before_anything_is_read_by_it() {
    let memory = HeapTables::with_tables(64).unwrap();
    let bytes = image(&vtd(&memory));
    let lies: [(&str, usize, &[u8]); 12] = [
        ("output bits", 34, &[0]),
        ("output bits", 34, &[255]),
        ("input bits", 35, &[0]),
        ("input bits", 35, &[255]),
        ("upper input bits", 36, &[9]),
        ("upper input bits", 36, &[2]),
        ("bit of encryption", 37, &[63]),
        ("bytes of an entry", 33, &[4]),
        ("levels", 32, &[6]),
        ("page sizes", 40, &[0; 8]),
        ("page sizes", 40, &[3, 0, 0, 0, 0, 0, 0, 0]),
        ("page sizes", 40, &[0xff; 8]),
    ];
    for (what, at, lie) in lies {
        let bytes = forged(&bytes, |bytes| {
            bytes[at..at + lie.len()].copy_from_slice(lie)
        });
        match Image::parse(&bytes).unwrap_err() {
            ImageError::Configuration { what: field, .. } => assert_eq!(field, what),
            ImageError::Build(BuildError::Levels { .. }) => assert_eq!(what, "levels"),
            ImageError::Build(BuildError::PageSizes { .. }) => assert_eq!(what, "page sizes"),
            other => panic!("{what}: {other}"),
        }
    }
}

#[test]
fn what_is_not_a_tree_of_this_format_is_refused_by_name() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = vtd(&memory);
    let bytes = image(&table);
    let format = VtdSs::new(4).unwrap();
    let check = |bytes: &[u8]| Image::parse(bytes).and_then(|image| image.check(&format));
    assert_eq!(check(&forged(&bytes, |_| ())), Ok(()));
    let refused = |change: &dyn Fn(&mut Vec<u8>)| check(&forged(&bytes, change)).unwrap_err();
    let kind = |change: &dyn Fn(&mut Vec<u8>)| match refused(change) {
        ImageError::Damage(damage) => damage.kind,
        other => panic!("{other}"),
    };

    assert_eq!(refused(&|bytes| bytes[0] = b'X'), ImageError::Magic);
    assert_eq!(refused(&|bytes| bytes[8] = 2), ImageError::Version(2));
    assert_eq!(check(&[]), Err(ImageError::Length { said: 84, there: 0 }));
    let header = |field| ImageError::Header { field };
    assert_eq!(refused(&|bytes| bytes[24] = 77), header("format"));
    assert_eq!(refused(&|bytes| bytes[26] = 1), header("format"));
    assert_eq!(refused(&|bytes| bytes[32] = 0), header("levels"));
    assert_eq!(refused(&|bytes| bytes[79] = 1), header("reserved bytes"));
    assert_eq!(refused(&|bytes| bytes[64] += 1), header("number of tables"));
    assert!(matches!(
        // With what x86-64 has in the place of VT-d's zeroes.
        refused(&|bytes| (bytes[24], bytes[36]) = (2, 2)),
        ImageError::Format { .. }
    ));
    assert!(matches!(
        refused(&|bytes| bytes[34] = 48),
        ImageError::Configuration {
            what: "output bits",
            ..
        }
    ));
    let other = Image::parse(&bytes).unwrap().check(&VtdSs::new(5).unwrap());
    assert!(matches!(
        other,
        Err(ImageError::Configuration { what: "levels", .. })
    ));

    // The root's entries begin at 80, the first record behind them.
    let root = 80;
    let record = |n: usize| root + 4096 + n * (16 + 4096);
    let address =
        |n: usize| u64::from_le_bytes(bytes[record(n)..record(n) + 8].try_into().unwrap());
    // A link to nowhere, to the root, to a table of another level, and twice to one.
    assert_eq!(
        kind(&|bytes| set(bytes, root + 8, 3 | 0x7000)),
        DamageKind::Foreign { table: 0x7000 }
    );
    let own = table.root().address;
    assert_eq!(
        kind(&|bytes| set(bytes, root + 8, 3 | own)),
        DamageKind::Foreign { table: own }
    );
    let level_2: Vec<usize> = (0..table.tables() as usize - 1)
        .filter(|n| bytes[record(*n) + 8] == 2)
        .collect();
    let low = (0..table.tables() as usize - 1)
        .find(|n| bytes[record(*n) + 8] == 0)
        .unwrap();
    assert_eq!(
        kind(&|bytes| set(bytes, root + 8, 3 | address(low))),
        DamageKind::Foreign {
            table: address(low)
        }
    );
    assert_eq!(
        kind(&|bytes| set(bytes, root + 8, 3 | address(level_2[0]))),
        DamageKind::Shared {
            table: address(level_2[0])
        }
    );
    // Nothing leads to a table any more.
    assert!(matches!(
        refused(&|bytes| set(bytes, root, 0)),
        ImageError::Unlinked { .. }
    ));
    // A bit that the format does not write, in a leaf, in a link, and beside nothing.
    let leaf = record(low) + 16 + 5 * 8;
    for (offset, word) in [
        (leaf, (9 * G1 + PAGE) | 3 | 1 << 60),
        (root, address(level_2[0]) | 3 | 1 << 11),
        (leaf + 16 * 8, 1 << 40),
    ] {
        assert_eq!(kind(&|bytes| set(bytes, offset, word)), DamageKind::Unknown);
    }
    // Tables out of order, misaligned, over the root, or above its level.
    for (offset, value) in [
        (record(0), address(1)),
        (record(0), address(0) + 8),
        (record(0), own),
        (record(0) + 8, 3),
        (record(0) + 8, 255),
        (record(0) + 8, 1 << 8 | 2),
    ] {
        assert!(matches!(
            refused(&|bytes| set(bytes, offset, value)),
            ImageError::Address { .. }
        ));
    }
}

/// Links are counted some thousand tables at a time.
#[test]
fn of_many_tables_the_last_is_linked_once_as_well() {
    const TABLES: u64 = 4100;
    let memory = HeapTables::with_tables(1 << 13).unwrap();
    let format = VtdSs::new(4).unwrap();
    let mut table = Table::with_page_sizes(format, &memory, PageSizes::from_bits(PAGE)).unwrap();
    let run = Span::new(G1, TABLES << 21);
    table.map(0, &[run], Prot::RW).unwrap();
    let bytes = image(&table);
    // The table that lies last is that of the last pages, and lies behind the one before.
    let mut below = Vec::new();
    table.for_each_table(&mut |address, level| below.extend((level == 0).then_some(address)));
    let [.., before, last] = below[..] else {
        panic!("{below:x?}")
    };
    let place = bytes
        .chunks_exact(8)
        .position(|word| word == (last | 3).to_le_bytes());
    let forged = forged(&bytes, |bytes| set(bytes, place.unwrap() * 8, before | 3));
    let refused = Image::parse(&forged).and_then(|image| image.check(&format));
    assert!(
        matches!(refused, Err(ImageError::Damage(damage)) if damage.kind == DamageKind::Shared { table: before }),
        "{refused:?}"
    );
}

#[test]
fn a_group_with_a_missing_entry_is_refused() {
    let memory = HeapTables::with_tables(64).unwrap();
    let format = AmdV1::new(4).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    table
        .map(16 * PAGE, &[Span::new(G1, 16 * PAGE)], Prot::RW)
        .unwrap();
    let mut lowest = 0;
    table.for_each_table(&mut |address, level| {
        if level == 0 {
            lowest = address;
        }
    });
    let bytes = image(&table);
    assert_eq!(Image::parse(&bytes).unwrap().check(&format), Ok(()));
    memory.entries(lowest, 512)[20].set(0);
    let bytes = image(&table);
    let refused = Image::parse(&bytes).unwrap().check(&format);
    assert!(
        matches!(refused, Err(ImageError::Damage(damage)) if damage.kind == DamageKind::Group),
        "{refused:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_byte_that_is_wrong_or_missing_is_noticed(
        at in any::<prop::sample::Index>(),
        flip in 1u8..=255,
        cut in any::<prop::sample::Index>(),
        more in prop::collection::vec(any::<u8>(), 1..20),
    ) {
        let memory = HeapTables::with_tables(16).unwrap();
        let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
        table.map(5 * PAGE, &[Span::new(G1, 3 * PAGE)], Prot::RW).unwrap();
        let bytes = image(&table);
        prop_assert!(Image::parse(&bytes).is_ok());
        let mut damaged = bytes.clone();
        let at = at.index(bytes.len());
        damaged[at] ^= flip;
        prop_assert!(Image::parse(&damaged).is_err(), "byte {at}");
        prop_assert!(Image::parse(&bytes[..cut.index(bytes.len())]).is_err());
        let mut longer = bytes;
        longer.extend(more);
        prop_assert!(Image::parse(&longer).is_err());
    }

    /// With a right checksum over wrong words nothing is restored that is not a tree, and nothing
    /// panics; what is accepted is walked and taken apart like any table.
    #[test]
    fn any_words_are_refused_or_become_a_table(
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<u64>(), 0u8..4), 1..4),
    ) {
        let memory = HeapTables::with_tables(64).unwrap();
        let bytes = image(&vtd(&memory));
        let bytes = forged(&bytes, |bytes| {
            for (at, value, kind) in &changes {
                let offset = 80 + at.index((bytes.len() - 80) / 8 - 1) * 8;
                let value = match kind {
                    0 => *value,
                    1 => memory.base() + value % 16 * PAGE + 3,
                    2 => (value % G1 / PAGE * PAGE) | 3,
                    _ => 0,
                };
                set(bytes, offset, value);
            }
        });
        if let Ok(image) = Image::parse(&bytes) {
            let _ = Walker::new(image.root()).walk(&image, 5 * PAGE, Access::Read, &mut ());
            let (cells, metas) = room::<AtomicU64>(12);
            let mut takeover: Takeover<_> =
                Takeover::new((&cells[..], &metas[..]), memory.base()).unwrap();
            let format = VtdSs::new(4).unwrap();
            let there = takeover.restore(&image, format);
            let room = HeapTables::with_tables(64).unwrap();
            match image.restore(format, &room) {
                Ok(mut table) => {
                    take_apart(&mut table);
                    prop_assert_eq!(room.in_use(), 1);
                    let taken = matches!(there, Err(ImageError::Taken { .. }));
                    prop_assert!(there.is_ok() || taken);
                }
                Err(_) => prop_assert!(there.is_err()),
            }
        }
    }
}
