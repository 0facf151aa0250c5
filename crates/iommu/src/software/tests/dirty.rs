//! Accessed and dirty bits, set as hardware sets them.

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
    // A page that nobody has touched stays as it was; one that is written at once is marked at once.
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
