//! The bytes that each pattern of pages takes.

use crate::common::Any;
use crate::common::patterns::{GUEST, patterns};
use virtio_balloon::{GuestPage, MessageSource};

/// Bytes and messages of these pages in this format.
fn cost(format: Any, words: &[u64]) -> (usize, usize) {
    let page = GuestPage::SIZE_4K;
    let mut message = vec![0; format.usual()];
    let mut source = MessageSource::new(page.stretches(0, words), page);
    let (mut bytes, mut messages) = (0, 0);
    loop {
        let used = format.encode(&mut source, &mut message).unwrap();
        if used == 0 {
            return (bytes, messages);
        }
        bytes += used;
        messages += 1;
    }
}

#[test]
fn bitmap_records_never_take_more_than_two_bits_a_page() {
    let most = GUEST as usize / 64 * 16;
    for (name, words) in patterns(GUEST) {
        let (bytes, messages) = cost(Any::Bitmap, &words);
        assert!(
            bytes <= most + 8 * messages && messages <= 17,
            "{name}: {bytes} bytes, {messages} messages"
        );
    }
}

/// Formats that name each run, by order or length, take eight bytes a run at least.
#[test]
fn scattered_pages_take_far_less_than_their_runs() {
    for (name, words) in patterns(GUEST) {
        let runs = 8 * GuestPage::SIZE_4K.stretches(0, &words).count();
        let (bytes, _) = cost(Any::Bitmap, &words);
        let less = match name {
            "every second page" => 15 * bytes < runs,
            "random half" => 7 * bytes < runs,
            // No worse by more than a few words at the ends of runs.
            _ => bytes < runs + 256,
        };
        assert!(less, "{name}: {bytes} bytes, by runs {runs}");
    }
}
