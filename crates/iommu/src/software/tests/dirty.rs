//! Accessed and dirty bits, set as hardware sets them.

use iopt::format::{ArmConfig, ArmGranule};
use iopt::walk::WalkReason;

use super::*;

/// Bits of VT-d's second stage (Intel VT-d, section 9.8).
const A: u64 = 1 << 8;
const D: u64 = 1 << 9;

fn tracking() -> (Unit_, Words, Data) {
    let mut config = quick();
    config.capabilities.dirty_tracking = true;
    unit_with(config)
}

fn entry(words: &Words, address: u64) -> u64 {
    words.read_u64(address).unwrap()
}

#[test]
fn a_read_marks_as_accessed_and_the_first_write_as_dirty() {
    let (unit, words, data) = tracking();
    let leaf = DATA | RW;
    words.set(0x3000, leaf);
    words.set(0x3008, (DATA + 0x1000) | RW);
    let mut port = unit.port(NIC);
    read(&mut port, 0).unwrap();
    assert_eq!(entry(&words, 0x1000), 0x2000 | RW | A);
    assert_eq!(entry(&words, 0x2000), 0x3000 | RW | A);
    assert_eq!(entry(&words, 0x3000), leaf | A);
    assert_eq!(port.counters().walks, 1);
    // It is cached, but not as dirty.
    port.write(8, &[1]).unwrap();
    assert_eq!(entry(&words, 0x3000), leaf | A | D);
    assert_eq!((port.counters().walks, cell(&data, DATA + 8)), (2, 1));
    // Now it is.
    port.write(16, &[2]).unwrap();
    read(&mut port, 16).unwrap();
    assert_eq!(port.counters().walks, 2);
    // A page without an access stays as it was; one that is written at once is marked at once.
    assert_eq!(entry(&words, 0x3008), (DATA + 0x1000) | RW);
    port.write(0x1000, &[3]).unwrap();
    assert_eq!(entry(&words, 0x3008), (DATA + 0x1000) | RW | A | D);
    assert_eq!(port.counters().walks, 3);
}

#[test]
fn what_was_cleaned_is_marked_again_after_a_flush_and_not_before() {
    let (unit, words, _) = tracking();
    let leaf = DATA | RW;
    words.set(0x3000, leaf);
    let mut port = unit.port(NIC);
    port.write(0, &[1]).unwrap();
    words.set(0x3000, leaf | A);
    port.write(0, &[2]).unwrap();
    assert_eq!(entry(&words, 0x3000), leaf | A, "the unit has it as dirty");
    unit.invalidate_ranges(D1, &page(0), 1, false).unwrap();
    port.write(0, &[3]).unwrap();
    assert_eq!(entry(&words, 0x3000), leaf | A | D);
}

#[test]
fn a_write_that_is_refused_marks_nothing_as_dirty() {
    let (unit, words, _) = tracking();
    let leaf = DATA | 0b01;
    words.set(0x3000, leaf);
    let mut port = unit.port(NIC);
    assert!(port.write(0, &[1]).is_err());
    assert_eq!(entry(&words, 0x3000), leaf);
}

#[test]
fn a_unit_that_cannot_tell_marks_nothing() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    let mut port = unit.port(NIC);
    read(&mut port, 0).unwrap();
    port.write(0, &[1]).unwrap();
    port.write(0, &[2]).unwrap();
    assert_eq!(port.counters().walks, 1);
    for (address, word) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, DATA)] {
        assert_eq!(entry(&words, address), word | RW);
    }
}

const ARM: ArmConfig = ArmConfig {
    granule: ArmGranule::K4,
    input_bits: 39,
    upper: false,
};

/// A format: tables that lead from 0x1000 on to a leaf at [`DATA`], and what that leaf is after a read
/// and after a write.
struct DirtyCase {
    format: FormatId,
    tables: Vec<u64>,
    leaf: u64,
    read: u64,
    written: u64,
    /// A unit that does not mark the leaf refuses it.
    needed: bool,
}

fn all_kept() -> [DirtyCase; 5] {
    // AMD: present, next level, readable and writable; Arm: table or page, AP or S2AP, DBM.
    const AMD: u64 = 1 | 3 << 61;
    const DBM: u64 = 1 << 51;
    let riscv = |address: u64| address >> 12 << 10;
    let page = riscv(DATA) | 0b1_0111;
    let stage_1 = DATA | DBM | 0b11 << 6 | 0b11;
    let stage_2 = DATA | DBM | 0b1 << 6 | 0b1111 << 2 | 0b11;
    [
        DirtyCase {
            format: FormatId::AmdV1,
            tables: vec![0x2000 | 2 << 9 | AMD, 0x3000 | 1 << 9 | AMD],
            leaf: DATA | AMD,
            read: DATA | AMD | 1 << 5,
            written: DATA | AMD | 0b11 << 5,
            needed: false,
        },
        DirtyCase {
            format: FormatId::X86_64,
            tables: vec![0x2000 | 7, 0x3000 | 7, 0x4000 | 7],
            leaf: DATA | 7,
            read: DATA | 7 | 1 << 5,
            written: DATA | 7 | 0b11 << 5,
            needed: false,
        },
        DirtyCase {
            format: FormatId::RiscV,
            tables: vec![riscv(0x2000) | 1, riscv(0x3000) | 1],
            leaf: page,
            read: page | 1 << 6,
            written: page | 0b11 << 6,
            needed: true,
        },
        DirtyCase {
            format: FormatId::ArmStage1(ARM),
            tables: vec![0x2000 | 0b11, 0x3000 | 0b11],
            leaf: stage_1,
            read: stage_1 | 1 << 10,
            written: (stage_1 | 1 << 10) & !(1 << 7),
            needed: true,
        },
        DirtyCase {
            format: FormatId::ArmStage2(ARM),
            tables: vec![0x2000 | 0b11, 0x3000 | 0b11],
            leaf: stage_2,
            read: stage_2 | 1 << 10,
            written: stage_2 | 1 << 10 | 1 << 7,
            needed: true,
        },
    ]
}

#[test]
fn every_format_keeps_it_in_its_own_way() {
    for tracks in [true, false] {
        for kept in all_kept() {
            let format = kept.format;
            let levels = kept.tables.len() as u8 + 1;
            let mut config = quick();
            config.capabilities.dirty_tracking = tracks;
            config.capabilities = config.capabilities.with_format(FormatSupport {
                format,
                levels: 1 << levels,
                page_sizes: PageSizes::from_bits(1 << 12),
            });
            let words = Words::new(32);
            for (n, table) in (1..).zip(&kept.tables) {
                words.set(n << 12, *table);
            }
            let place = u64::from(levels) << 12;
            words.set(place, kept.leaf);
            let unit = SoftwareUnit::with_config(words.clone(), data(4096), config);
            let address = 0x1000;
            let root = Root {
                format,
                address,
                levels,
            };
            unit.attach(NIC, D1, root).unwrap();
            let mut port = unit.port(NIC);
            let found = read(&mut port, 8);
            if kept.needed && !tracks {
                let refused = matches!(
                    found,
                    Err(FaultReason::Walk(fault)) if fault.reason == WalkReason::AccessFlag
                );
                assert!(refused, "{format}: {found:?}");
                continue;
            }
            assert_eq!(found, Ok(DATA + 8), "{format}");
            let read = if tracks { kept.read } else { kept.leaf };
            assert_eq!(entry(&words, place), read, "{format}");
            port.write(8, &[1]).unwrap();
            let written = if tracks { kept.written } else { kept.leaf };
            assert_eq!(entry(&words, place), written, "{format}");
        }
    }
}
