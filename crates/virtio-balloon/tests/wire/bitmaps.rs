//! Ways through bitmaps by words, beside the plain ones bit by bit and run by run.

use crate::common::{ALL, Any, PAGES, decoded, joined};
use proptest::prelude::*;
use runs::{GuestAddr, Span};
use virtio_balloon::{BitmapRecords, GuestPage, LePfns, MessageFormat, MessageSource, Refusal};

/// Words as they are in bitmaps: empty, full, one of a few bits, anything.
fn words() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![
        3 => Just(0u64),
        6 => Just(u64::MAX),
        1 => (0u32..64).prop_map(|bit| 1 << bit),
        1 => (0u32..64).prop_map(|bit| u64::MAX << bit),
        1 => (0u32..64).prop_map(|bit| u64::MAX >> bit),
        2 => any::<u64>(),
    ];
    proptest::collection::vec(word, 0..60)
}

proptest! {
    #[test]
    fn a_bitmap_makes_the_same_messages_as_its_runs(
        words in words(),
        base in prop_oneof![Just(0u64), Just(64), Just(1), Just(128)],
        top in any::<bool>(),
        buffer in 8usize..200,
        by_words in proptest::collection::vec(any::<bool>(), 40),
    ) {
        for page in PAGES {
            // At the top, bits of the last words have no page.
            let all = 64 << page.shift();
            let base = (base << page.shift()).wrapping_sub(if top { 20 * all } else { 0 });
            let runs: Vec<_> = page.stretches(base, &words).collect();
            for format in ALL {
                let mut plain = MessageSource::new(runs.iter().copied(), page);
                let mut source = MessageSource::new(page.stretches(base, &words), page);
                // Some messages by words, others by runs, from the same source.
                for by_words in by_words.iter().copied().chain(std::iter::repeat(true)) {
                    let mut expected = vec![0xaa; buffer];
                    let mut found = expected.clone();
                    let result = format.encode(&mut plain, &mut expected);
                    let by = match by_words {
                        true => format.encode_bitmap(&mut source, &mut found),
                        false => format.encode(&mut source, &mut found),
                    };
                    prop_assert_eq!(by, result, "{:?}", page);
                    prop_assert_eq!(found, expected);
                    if matches!(result, Ok(0) | Err(_)) {
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn words_come_out_as_their_bits_do(
        bitmap in proptest::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 1..8),
        start in prop_oneof![0u64..1 << 30, (1u64 << 52) - 3000..1 << 52],
        shift in 12u32..52,
    ) {
        let mut message = vec![0; 8];
        let data = 8 * (1 + bitmap.len() as u32);
        message[4..].copy_from_slice(&data.to_le_bytes());
        let head = start | u64::from(shift) << 52 | (8 * bitmap.len() as u64) << 58;
        message.extend([head].iter().chain(&bitmap).flat_map(|word| word.to_le_bytes()));
        let (found, refusals) = decoded(Any::Bitmap, &[message]);

        // A run in each word at most; what ends beyond the last address is left out as a whole.
        let mut expected: Vec<(u128, u128)> = Vec::new();
        let mut beyond = 0;
        for (nr, word) in (0u32..).zip(&bitmap) {
            let mut bit = 0;
            while bit < 64 {
                let bits = (word >> bit).trailing_ones();
                let first = (u128::from(start) << 12) + (u128::from(64 * nr + bit) << shift);
                if bits > 0 && first + (u128::from(bits) << shift) <= 1 << 64 {
                    expected.push((first, u128::from(bits) << shift));
                } else {
                    beyond += u64::from(bits > 0);
                }
                bit += bits.max(1);
            }
        }
        let found: Vec<_> = found.iter().map(|run| (u128::from(run.start), u128::from(run.len))).collect();
        prop_assert_eq!(found, expected);
        prop_assert_eq!(refusals.total(), beyond);
        let wraps = |refusal| matches!(refusal, Refusal::Wraps { .. });
        prop_assert!(refusals.latest().is_none_or(wraps));
    }
}

#[test]
fn pages_that_were_named_otherwise_are_not_named_again() {
    let page = GuestPage::SIZE_4K;
    let words = [0b1110_0110];
    let mut source = MessageSource::new(page.stretches(0, &words), page);
    // The first run and a page of the second.
    let mut message = [0; 64];
    let used = LePfns.encode(&mut source, &mut message[..12]).unwrap();
    assert_eq!(used, 12);
    let format = BitmapRecords;
    let used = format.encode_bitmap(&mut source, &mut message).unwrap();
    let (found, _) = decoded(Any::Bitmap, &[message[..used].to_vec()]);
    assert_eq!(found, [Span::new(6 << 12, 2 << 12)]);
}

#[test]
fn the_word_in_which_a_message_ends_is_not_sent_twice() {
    let words = [1, 0, u64::MAX, u64::MAX, u64::MAX, 6];
    let page = GuestPage::SIZE_4K;
    let format = BitmapRecords;
    let mut source = MessageSource::new(page.stretches(0, &words), page);
    let mut message = [0; 24];
    let mut found = Vec::new();
    // The first word; two blocks (the last of them three words behind); the last word.
    for bytes in [24, 24, 24, 0] {
        let used = format.encode_bitmap(&mut source, &mut message).unwrap();
        assert_eq!(used, bytes);
        found.extend(decoded(Any::Bitmap, &[message[..used].to_vec()]).0);
        if used == 0 {
            break;
        }
    }
    let at = |first: u64, pages: u64| Span::new(first << 12, pages << 12);
    assert_eq!(found, [at(0, 1), at(128, 128), at(256, 64), at(321, 2)]);
    // Nothing is left for page numbers either.
    assert_eq!(LePfns.encode(&mut source, &mut [0; 64]), Ok(0));
}

#[test]
fn several_bitmaps_share_messages() {
    let page = GuestPage::SIZE_4K;
    let first = [u64::MAX, 0, 0b101];
    let second = [1u64, u64::MAX, u64::MAX];
    let none: [u64; 0] = [];
    // The last one's words begin at no multiple of 64 pages: it is encoded by runs, in messages of its own.
    let bitmaps: [(u64, &[u64]); 5] = [
        (0, &first),
        (1 << 30, &none),
        (2 << 30, &[0, 0]),
        (3 << 30, &second),
        ((4 << 30) + (1 << 12), &first),
    ];
    let runs: Vec<Span<GuestAddr>> = page.stretches_of(&bitmaps).collect();
    let expected: Vec<Span<GuestAddr>> = bitmaps
        .iter()
        .flat_map(|(base, words)| page.stretches(*base, words))
        .collect();
    assert_eq!(runs, expected);
    for buffer in (24..160).step_by(8) {
        let mut source = MessageSource::new(page.stretches_of(&bitmaps), page);
        let mut messages = Vec::new();
        loop {
            let mut message = vec![0; buffer];
            let format = BitmapRecords;
            let used = format.encode_bitmap(&mut source, &mut message).unwrap();
            if used == 0 {
                break;
            }
            message.truncate(used);
            messages.push(message);
        }
        let (found, refusals) = decoded(Any::Bitmap, &messages);
        assert_eq!(refusals.total(), 0);
        assert_eq!(joined(&found), joined(&expected), "{buffer}");
        // A block and a word; a word and a block of two; and the last bitmap.
        if buffer >= 56 {
            assert_eq!(messages[0].len(), 8 + 24 + 24, "{buffer}");
        }
    }
}
