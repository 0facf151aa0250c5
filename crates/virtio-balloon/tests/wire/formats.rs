//! The formats: known answers byte by byte, and any set of pages through any of them.

use std::collections::BTreeSet;

use crate::common::{ALL, Any, PAGES, decoded, joined, messages, pages, runs_of};
use proptest::prelude::*;
use runs::{GuestAddr, Span};
use virtio_balloon::{
    BitmapRecords, EncodeError, GuestPage, LePfns, MOST_MESSAGE_BYTES, MessageFormat, MessageSource,
};

/// The one message for these runs of 4 KiB pages.
fn one(format: Any, runs: &[Span<GuestAddr>]) -> Vec<u8> {
    one_of(format, GuestPage::SIZE_4K, runs)
}

fn one_of(format: Any, page: GuestPage, runs: &[Span<GuestAddr>]) -> Vec<u8> {
    let all = messages(format, page, runs, 1 << 16);
    assert_eq!(all.len(), 1);
    all.into_iter().next().unwrap()
}

/// Words of 64 bits behind the header.
fn words(message: &[u8]) -> Vec<u64> {
    message[8..]
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

fn head(pfn: u64, shift: u64, len: u64) -> u64 {
    pfn | shift << 52 | len << 58
}

#[test]
fn page_numbers_byte_by_byte() {
    let message = one(Any::Pfns, &[pages(0x0102_0304, 2), pages(0xffff_ffff, 1)]);
    assert_eq!(message, [4, 3, 2, 1, 5, 3, 2, 1, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(
        decoded(Any::Pfns, &[message]).0,
        [pages(0x0102_0304, 2), pages(0xffff_ffff, 1)]
    );
}

#[test]
fn a_page_number_has_32_bits() {
    let mut source = MessageSource::new([pages(0xffff_ffff, 2)], GuestPage::SIZE_4K);
    let refused = LePfns.encode(&mut source, &mut [0; 64]);
    assert_eq!(
        refused,
        Err(EncodeError::Beyond {
            address: 1 << 44,
            last: (1 << 44) - 1
        })
    );
}

#[test]
fn the_message_byte_by_byte() {
    // One page: a header of command, flag, id and length, one head, one word of bitmap.
    let message = one(Any::Bitmap, &[pages(0x12345, 1)]);
    assert_eq!(
        message,
        [
            0, 0, 0, 0, 16, 0, 0, 0, // 16 bytes follow
            0x40, 0x23, 0x01, 0, 0, 0, 0xc0,
            0x20, // page 0x12340, shift 12, 8 bytes of bitmap
            0x20, 0, 0, 0, 0, 0, 0, 0, // the sixth bit
        ]
    );
}

#[test]
fn the_record_byte_by_byte() {
    // All fields of the head at their ends: page 2^52 - 64, and the block of 2^18 bytes there.
    let message = one(Any::Bitmap, &[pages((1 << 52) - 64, 64)]);
    assert_eq!(
        message[8..],
        [0xc0, 0xff, 0xff, 0xff, 0xff, 0xff, 0x2f, 0x01]
    );
    assert_eq!(words(&message), [head((1 << 52) - 64, 18, 0)]);
}

#[test]
fn a_run_becomes_words_and_blocks() {
    // 10 pages before a border of 64, 5 times 64, 7 pages behind it, and a page in the same word.
    let runs = [pages(54, 10 + 320 + 7), pages(400, 1)];
    let message = one(Any::Bitmap, &runs);
    assert_eq!(
        words(&message),
        [
            head(0, 12, 8),
            0x3ff << 54,
            head(64, 20, 0),  // 256 pages, the largest first
            head(320, 18, 0), // 64 pages, which are not aligned to their size in general
            head(384, 12, 8),
            0x7f | 1 << 16,
        ]
    );
    assert_eq!(joined(&decoded(Any::Bitmap, &[message]).0), runs);
}

#[test]
fn records_come_in_any_order() {
    // As the series sent them: the word at the end before the middle.
    let words = [
        head(0, 12, 8),
        1 << 63,
        head(128, 12, 8),
        1,
        head(64, 18, 0),
    ];
    let mut message = vec![0, 0, 0, 0, 40, 0, 0, 0];
    message.extend(words.into_iter().flat_map(u64::to_le_bytes));
    let (mut found, refusals) = decoded(Any::Bitmap, &[message]);
    assert_eq!(refusals.total(), 0);
    found.sort();
    assert_eq!(joined(&found), [pages(63, 66)]);
}

#[test]
fn bitmaps_of_up_to_56_bytes_are_taken() {
    let mut message = vec![0, 0, 0, 0, 64, 0, 0, 0];
    let bits = [1u64 << 63, 1, 0, 0, 0, 0, 1 << 63];
    message.extend(
        [head(100, 12, 56)]
            .into_iter()
            .chain(bits)
            .flat_map(u64::to_le_bytes),
    );
    assert_eq!(
        joined(&decoded(Any::Bitmap, &[message]).0),
        [pages(163, 2), pages(100 + 447, 1)]
    );
}

#[test]
fn both_end_words_are_little_endian() {
    let message = one(Any::Bitmap, &[pages(63, 66)]);
    assert_eq!(
        message[16..24],
        [0, 0, 0, 0, 0, 0, 0, 0x80],
        "the last bit of the first word"
    );
    assert_eq!(
        message[40..48],
        [1, 0, 0, 0, 0, 0, 0, 0],
        "the first bit of the last word"
    );
}

#[test]
fn fields_are_plain_little_endian() {
    // The bytes are the same on every machine.
    let run = [pages(0x8_7654_3210_fdc0, 64)];
    assert_eq!(
        one(Any::Bitmap, &run)[8..],
        [0xc0, 0xfd, 0x10, 0x32, 0x54, 0x76, 0x28, 0x01]
    );
}

#[test]
fn guests_with_64k_pages() {
    // Pages 65 and 66 of 64 KiB: page numbers count 4 KiB, bits 64 KiB.
    let run = Span::new(65 << 16, 2 << 16);
    let message = one_of(Any::Bitmap, GuestPage::SIZE_64K, &[run]);
    assert_eq!(words(&message), [head(64 * 16, 16, 8), 0b110]);
    assert_eq!(decoded(Any::Bitmap, &[message]).0, [run]);
    // 64 of them are a block of 4 MiB.
    let run = Span::new(64 << 16, 64 << 16);
    let message = one_of(Any::Bitmap, GuestPage::SIZE_64K, &[run]);
    assert_eq!(words(&message), [head(64 * 16, 22, 0)]);
    // The standard's format names every 4 KiB of a page.
    let numbers = one_of(
        Any::Pfns,
        GuestPage::SIZE_64K,
        &[Span::new(0x3_0000, 0x1_0000)],
    );
    let expected: Vec<u8> = (48u32..64).flat_map(u32::to_le_bytes).collect();
    assert_eq!(numbers, expected);
}

#[test]
fn an_exact_multiple_of_the_window_loses_no_page() {
    // The origin's window: 262,144 pages. Bitmaps of one and two of them, full, and with the ends only.
    for windows in [1u64, 2] {
        for page in PAGES {
            let all = windows * 262_144;
            let mut ends = vec![0u64; (all / 64) as usize];
            ends[0] = 1;
            *ends.last_mut().unwrap() = 1 << 63;
            for words in [vec![u64::MAX; ends.len()], ends] {
                let base = 3 * (262_144 << page.shift());
                let runs: Vec<_> = page.stretches(base, &words).collect();
                assert_eq!(
                    runs.last().unwrap().last(),
                    base + (all << page.shift()) - 1
                );
                for format in ALL {
                    let all = messages(format, page, &runs, MOST_MESSAGE_BYTES);
                    let (found, refusals) = decoded(format, &all);
                    assert_eq!(
                        (joined(&found), refusals.total()),
                        (runs.clone(), 0),
                        "{format:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_message_is_never_longer_than_the_buffer_or_the_limit() {
    let scattered: Vec<_> = (0..10_000).map(|nr| pages(100 * nr, 1)).collect();
    for format in ALL {
        for buffer in [24, 25, 31, 100, 1 << 20] {
            for message in messages(format, GuestPage::SIZE_4K, &scattered, buffer) {
                assert!(
                    message.len() <= buffer.min(MOST_MESSAGE_BYTES),
                    "{format:?}"
                );
            }
        }
    }
}

#[test]
fn a_buffer_without_room_for_a_record_is_an_error_and_an_empty_source_is_none() {
    for format in ALL {
        // Two pages that need the longest record of each format.
        let runs = [pages(1, 2), pages(64, 4096)];
        for bytes in 0..format.shortest() {
            let mut source = MessageSource::new(runs, GuestPage::SIZE_4K);
            let mut buffer = vec![0; bytes];
            let mut last = Ok(1);
            while matches!(last, Ok(1..)) {
                last = format.encode(&mut source, &mut buffer);
            }
            let Err(EncodeError::Buffer { needed, .. }) = last else {
                panic!("{format:?} {bytes}: {last:?}");
            };
            assert!(
                needed > bytes && needed <= format.shortest(),
                "{format:?} {bytes}: {last:?}"
            );
        }
        let mut source = MessageSource::new([], GuestPage::SIZE_4K);
        assert_eq!(format.encode(&mut source, &mut [0; 24]), Ok(0));
    }
}

#[test]
fn mistakes_of_the_driver_are_named() {
    let run = Span::new(0x1_1000, 0x1000);
    let mut source = MessageSource::new([run], GuestPage::SIZE_64K);
    let refused = BitmapRecords.encode(&mut source, &mut [0; 64]);
    assert_eq!(
        refused,
        Err(EncodeError::NotPages {
            run,
            page: 0x1_0000
        })
    );
}

/// A set of pages: near each other, in long runs, and far away, close to the highest address that
/// page numbers reach.
fn page_sets() -> impl Strategy<Value = BTreeSet<u64>> {
    let near = proptest::collection::btree_set(0u64..700, 0..120);
    let runs = proptest::collection::vec((0u64..20_000, 1u64..9000), 0..4);
    let far = proptest::collection::btree_set((1u64 << 28) - 200..1 << 28, 0..40);
    (near, runs, far).prop_map(|(near, runs, far)| {
        let runs = runs
            .into_iter()
            .flat_map(|(first, count)| first..first + count);
        near.into_iter().chain(far).chain(runs).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_set_of_pages_comes_out_the_same(set in page_sets(), buffer in 24usize..3000) {
        for page in PAGES {
            let runs = runs_of(&set, page);
            for format in ALL {
                let all = messages(format, page, &runs, buffer);
                let (found, refusals) = decoded(format, &all);
                prop_assert_eq!(refusals.total(), 0, "{:?}", format);
                // Runs that are encoded in order come out in order, and so need no sorting.
                prop_assert_eq!(joined(&found), runs.clone(), "{:?} {:?}", format, page);
            }
        }
    }
}
