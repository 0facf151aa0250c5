//! Decoders under whatever a driver may send.

use crate::common::{Any, decoded, pages};
use proptest::prelude::*;
use runs::{GuestAddr, Span};
use virtio_balloon::{MOST_DATA_BYTES, MOST_MESSAGE_BYTES, MemoryMap, Refusal, Refusals, Region};

/// A header that is right, and these words.
fn message(words: &[u64]) -> Vec<u8> {
    let mut message = ((words.len() as u64 * 8) << 32).to_le_bytes().to_vec();
    message.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    message
}

/// The runs of a message and the only refusal.
fn refused(format: Any, message: &[u8]) -> (Vec<Span<GuestAddr>>, Refusal) {
    let (found, refusals) = decoded(format, &[message.to_vec()]);
    assert_eq!(refusals.total(), 1, "{:?}", refusals);
    let latest = refusals.latest().unwrap();
    assert_eq!(
        refusals.counts()[latest.index()],
        1,
        "counted under its own name"
    );
    assert!(!latest.to_string().is_empty() && !Refusal::NAMES[latest.index()].is_empty());
    (found, latest)
}

fn head(pfn: u64, shift: u64, len: u64) -> u64 {
    pfn | shift << 52 | len << 58
}

#[test]
fn lengths_are_checked() {
    for bytes in 0..8 {
        assert_eq!(
            refused(Any::Bitmap, &vec![0; bytes]),
            (vec![], Refusal::Length { bytes, unit: 8 })
        );
    }
    let good = message(&[head(64, 18, 0)]);
    for stated in [0u32, 7, 9, 16, u32::MAX] {
        let mut wrong = good.clone();
        wrong[4..8].copy_from_slice(&stated.to_le_bytes());
        let (stated, found) = (stated.into(), 8);
        assert_eq!(
            refused(Any::Bitmap, &wrong),
            (vec![], Refusal::Stated { stated, found })
        );
    }
    let long = message(&vec![0; MOST_DATA_BYTES / 8 + 1]);
    let (bytes, most) = (MOST_MESSAGE_BYTES + 8, MOST_MESSAGE_BYTES);
    assert_eq!(
        refused(Any::Bitmap, &long),
        (vec![], Refusal::TooLong { bytes, most })
    );
    // Three pages, and two bytes of a fourth.
    let (found, refusal) = refused(Any::Pfns, &[7, 0, 0, 0, 8, 0, 0, 0, 3, 0, 0, 0, 1, 0]);
    assert_eq!(found, [pages(7, 2), pages(3, 1)]);
    assert_eq!(refusal, Refusal::Length { bytes: 14, unit: 4 });
}

#[test]
fn a_header_of_something_else_is_refused() {
    for at in 0..4 {
        let mut wrong = message(&[head(64, 18, 0)]);
        wrong[at] = 1;
        let found = 1 << (8 * at);
        assert_eq!(
            refused(Any::Bitmap, &wrong),
            (vec![], Refusal::Header { found })
        );
    }
}

#[test]
fn a_record_behind_the_end_is_refused_and_what_comes_before_it_is_taken() {
    let good = [head(64, 18, 0), head(0, 12, 8)];
    let (found, refusal) = refused(Any::Bitmap, &message(&good));
    assert_eq!(found, [pages(64, 64)]);
    assert_eq!(
        refusal,
        Refusal::Record {
            at: 16,
            bytes: 16,
            left: 8
        }
    );
    // Data that is no multiple of 8.
    let mut odd = message(&[head(64, 18, 0)]);
    odd.extend([1, 2, 3]);
    odd[4] = 11;
    let (found, refusal) = refused(Any::Bitmap, &odd);
    assert_eq!(
        (found.len(), refusal),
        (
            1,
            Refusal::Record {
                at: 16,
                bytes: 8,
                left: 3
            }
        )
    );
}

#[test]
fn a_bitmap_of_no_whole_words_ends_the_message() {
    for len in (1..64).filter(|len| len % 8 != 0) {
        let words = [
            head(64, 18, 0),
            head(0, 12, len),
            u64::MAX,
            u64::MAX,
            head(128, 18, 0),
        ];
        let (found, refusal) = refused(Any::Bitmap, &message(&words));
        assert_eq!(found, [pages(64, 64)]);
        assert_eq!(
            refusal,
            Refusal::Bitmap {
                at: 16,
                bytes: len as usize
            }
        );
    }
}

#[test]
fn shifts_outside_their_range_are_refused_alone() {
    for shift in (0..12).chain(52..64) {
        let words = [
            head(0, shift, 0),
            head(0, shift, 8),
            u64::MAX,
            head(64, 18, 0),
        ];
        let (found, refusals) = decoded(Any::Bitmap, &[message(&words)]);
        assert_eq!(found, [pages(64, 64)], "the record behind it is taken");
        assert_eq!(refusals.total(), 2);
        assert_eq!(
            refusals.latest(),
            Some(Refusal::Shift {
                at: 16,
                shift: shift as u32
            })
        );
    }
}

#[test]
fn pages_beyond_the_last_address_are_refused() {
    let last = (1 << 52) - 1;
    // A block, and bits, that go on behind page 2^52 - 1.
    let (found, refusal) = refused(Any::Bitmap, &message(&[head(last, 13, 0), head(1, 12, 0)]));
    assert_eq!(
        (found, refusal),
        (
            vec![pages(1, 1)],
            Refusal::Wraps {
                start: last << 12,
                pages: 2
            }
        )
    );
    let (found, refusal) = refused(Any::Bitmap, &message(&[head(last, 12, 8), 0b101]));
    assert_eq!(
        (found, refusal),
        (
            vec![pages(last, 1)],
            Refusal::Wraps {
                start: last << 12,
                pages: 1
            }
        )
    );
    // The last page itself is one.
    let words = [head(last, 12, 0), head(last, 12, 8), 1];
    let (found, refusals) = decoded(Any::Bitmap, &[message(&words)]);
    assert_eq!((found, refusals.total()), (vec![pages(last, 1); 2], 0));
}

#[test]
fn records_outside_memory_are_refused() {
    // 1 MiB of memory, a hole, memory from 2 MiB to 4 MiB.
    let regions = [Span::new(0, 1 << 20), Span::new(2 << 20, 2 << 20)];
    let of_map = regions.map(Region::new);
    let map = MemoryMap::new(&of_map).unwrap();
    // A block over both regions and beyond, one in the hole, one behind the end, a bit in memory.
    let words = [
        head(0, 23, 0),
        head(256, 18, 0),
        head(1 << 40, 18, 0),
        head(0, 12, 8),
        1,
    ];
    let mut refusals = Refusals::new();
    let mut kept = Vec::new();
    for run in decoded(Any::Bitmap, &[message(&words)]).0 {
        map.resolve(run, &mut refusals, |part| kept.push(map.run(&part)));
    }
    assert_eq!(
        kept,
        [regions[0], regions[1], pages(0, 1)],
        "holes are skipped, the rest is taken"
    );
    let hole = Refusal::Hole {
        run: Span::new(0, 8 << 20),
        bytes: 5 << 20,
    };
    let outside = Refusal::OutsideRam {
        run: pages(1 << 40, 64),
    };
    assert_eq!(refusals.counts()[hole.index()], 1);
    assert_eq!(refusals.counts()[outside.index()], 2);
    assert_eq!(refusals.total(), 3);
    assert_eq!(refusals.latest(), Some(outside));
    let mut again = Refusals::new();
    map.resolve(Span::new(0, 8 << 20), &mut again, |_| ());
    assert_eq!(again.latest(), Some(hole));
}

/// Any bytes, and bytes that are nearly right: a header that fits, words with small fields.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        any::<u64>(),
        (0u64..4096, 0u64..64, 0u64..64).prop_map(|(pfn, shift, len)| head(pfn, shift, len)),
        (0u64..4096, prop_oneof![Just(0u64), Just(8), Just(16)])
            .prop_map(|(pfn, len)| head(pfn, 12, len)),
        Just(0),
        Just(u64::MAX),
    ];
    let words = proptest::collection::vec(word, 0..40);
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        (any::<[u8; 2]>(), words)
            .prop_map(|(first, words)| [&first[..], &message(&words)].concat()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_decoded_or_refused(data in bytes()) {
        for (_, body) in crate::fuzz_bodies::TARGETS {
            body(&data);
        }
    }
}
