//! Bitmaps in which the device says which pages it has initialized, and what the driver may make of them.

use crate::guest::{FREE, Guest, HIGH, LOW, in_bulk, pages, pfn};
use runs::Span;
use virtio_balloon::device::{
    BalloonDevice, BalloonSettings, BalloonSetupError, GuestDiscard, NegotiateError,
};
use virtio_balloon::{BulkBit, ByteOrder, Features, InitBit, Queue, Refusal, Region, WIRE_PAGE};
use vm_memory::{GuestAddress, GuestMemoryBackend};

fn settings(bit: u8) -> BalloonSettings {
    BalloonSettings {
        init_on_inflate: Some(InitBit::new(bit).unwrap()),
        ..BalloonSettings::default()
    }
}

fn guest() -> Guest {
    Guest::new(settings(6))
}

/// Pages of the balloon, each with a word of its own.
fn marked(guest: &Guest, count: u64) {
    for nr in 0..count {
        guest.mark(pages(nr, 1).start, nr + 1);
    }
}

/// Inflates these pages, marked, by one message. Returns the bits of the bitmap, lowest first; those of pages that hold
/// their words still must be 0.
fn bits(guest: &mut Guest, numbers: std::ops::Range<u64>) -> Vec<bool> {
    for nr in numbers.clone() {
        guest.mark(pages(nr, 1).start, nr + 1);
    }
    let count = (numbers.end - numbers.start) as usize;
    let (head, bitmap) = guest.asking(numbers.clone().map(pfn), count.div_ceil(8));
    let _ = guest.drain(Queue::Inflate);
    let written = guest.written(Queue::Inflate);
    assert_eq!(written, [(head, count.div_ceil(8) as u32)]);
    let found = guest.read(bitmap, count.div_ceil(8));
    let bits: Vec<bool> = (0..count)
        .map(|nr| found[nr / 8] >> (nr % 8) & 1 != 0)
        .collect();
    for (nr, bit) in numbers.zip(&bits) {
        assert!(!bit || guest.word(pages(nr, 1).start) == 0, "page {nr}");
    }
    bits
}

/// A message is refused: used length 0, nothing written, nothing discarded, and the queue goes on.
fn refused(guest: &mut Guest, buffers: &[(u64, u32, bool)], expected: Refusal) {
    let before = guest.device.refusals().total();
    let behind = guest.read(FREE - 64, 64);
    let head = guest.chain(Queue::Inflate, buffers);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.written(Queue::Inflate), [(head, 0)]);
    assert_eq!(guest.device.refusals().latest(), Some(expected));
    assert_eq!(guest.device.refusals().total() - before, 1);
    assert!(guest.discards().is_empty());
    assert_eq!(guest.read(FREE - 64, 64), behind);
    assert!(bits(guest, 100..103).iter().all(|bit| *bit));
    guest.acts();
}

#[test]
fn a_bit_is_set_for_each_page_that_was_zeroed() {
    let mut guest = guest();
    guest.notes.borrow_mut().stuck = vec![pages(3, 1)];
    marked(&guest, 10);
    // Ten bits, and a byte more than they need.
    let (head, bitmap) = guest.asking((0..10).map(pfn), 3);
    let drained = guest.drain(Queue::Inflate);
    assert_eq!((drained.used, drained.notify), (1, true));
    assert_eq!(guest.written(Queue::Inflate), [(head, 2)]);
    assert_eq!(guest.read(bitmap, 3), [0xf7, 0x03, 0xa5]);
    for nr in 0..10 {
        let expected = if nr == 3 { 4 } else { 0 };
        assert_eq!(guest.word(pages(nr, 1).start), expected);
    }
    // The page that has failed can be given once more.
    guest.notes.borrow_mut().stuck.clear();
    assert_eq!(bits(&mut guest, 3..4), [true]);
    assert_eq!(guest.device.refusals().total(), 0);
}

#[test]
fn bits_are_in_the_order_of_the_numbers_across_messages_that_are_merged() {
    let mut guest = guest();
    guest.notes.borrow_mut().kept = vec![pages(1, 1)];
    let messages: [(&[u64], &[u8]); 4] = [
        (&[8, 1, 3], &[0b101]),
        (&[], &[]),
        // Twice in a message, and in two messages; and a page that is none of the guest's.
        (&[2, 2, 1, 8, 1 << 19], &[0b01011]),
        (&[7, 6, 5, 4, 3, 2, 1, 0, 9], &[0b1011_1111, 1]),
    ];
    let sent = messages.map(|(numbers, bits)| {
        let numbers = numbers.iter().copied().map(pfn);
        (guest.asking(numbers, bits.len()), bits)
    });
    let _ = guest.drain(Queue::Inflate);
    let expected = [pages(0, 1), pages(2, 8)];
    assert_eq!(guest.discards(), [expected], "one call for all");
    for (((head, bitmap), bits), written) in sent.iter().zip(guest.written(Queue::Inflate)) {
        assert_eq!(written, (*head, bits.len() as u32));
        assert_eq!(guest.read(*bitmap, bits.len()), *bits);
    }
    let outside = Span::new((FREE / WIRE_PAGE + (1 << 19)) * WIRE_PAGE, WIRE_PAGE);
    let latest = guest.device.refusals().latest();
    assert_eq!(latest, Some(Refusal::OutsideRam { run: outside }));
}

#[test]
fn a_bitmap_may_lie_in_several_buffers() {
    let mut guest = guest();
    let message: Vec<u8> = (0..20)
        .flat_map(|nr| (pfn(nr) as u32).to_le_bytes())
        .collect();
    let numbers = guest.buffer(&message);
    let bitmap = guest.buffer(&[0xa5; 16]);
    let buffers = [
        (numbers, 8, false),
        (numbers + 8, 72, false),
        (bitmap, 1, true),
        (bitmap + 2, 0, true),
        (bitmap + 4, 1, true),
        (bitmap + 6, 9, true),
    ];
    let head = guest.chain(Queue::Inflate, &buffers);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.written(Queue::Inflate), [(head, 3)]);
    let x = 0xa5;
    let expected = [0xff, x, x, x, 0xff, x, 0x0f, x, x];
    assert_eq!(guest.read(bitmap, 9), expected);
}

#[test]
fn messages_without_room_for_their_bits_are_refused() {
    let mut guest = guest();
    marked(&guest, 10);
    let message: Vec<u8> = (0..10)
        .flat_map(|nr| (pfn(nr) as u32).to_le_bytes())
        .collect();
    let address = guest.buffer(&message);
    let numbers = (address, 40, false);
    let place = FREE - 64;
    let (pages, needed) = (10, 2);
    refused(&mut guest, &[numbers], Refusal::NoBitmap { pages });
    for bytes in [0, 1] {
        let short = Refusal::ShortBitmap {
            pages,
            bytes,
            needed,
        };
        refused(&mut guest, &[numbers, (place, bytes as u32, true)], short);
    }
    // One that is not to be written counts as page numbers.
    let readable = [numbers, (place, 8, false)];
    refused(&mut guest, &readable, Refusal::NoBitmap { pages: 12 });
    // Before the numbers, or between them.
    let (bitmap, len) = ((place, 2, true), 40);
    let direction = Refusal::Direction { address, len };
    refused(&mut guest, &[bitmap, numbers], direction);
    refused(&mut guest, &[numbers, bitmap, numbers], direction);
    // Outside of memory, as far as it is needed.
    for address in [LOW.len, LOW.len - 1, u64::MAX] {
        let outside = Refusal::Buffer { address, len: 2 };
        refused(&mut guest, &[numbers, (address, 16, true)], outside);
    }
    for nr in 0..10 {
        assert_eq!(guest.word(FREE + nr * WIRE_PAGE), nr + 1);
    }
    let last = LOW.len - 2;
    let head = guest.chain(Queue::Inflate, &[numbers, (last, 16, true)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.written(Queue::Inflate), [(head, 2)]);
    assert_eq!(guest.read(last, 2), [0xff, 0x03]);
}

#[test]
fn whole_numbers_are_taken_where_the_length_is_none() {
    let mut guest = guest();
    let mut message = (pfn(0) as u32).to_le_bytes().to_vec();
    message.extend([1, 2, 3]);
    let numbers = guest.buffer(&message);
    let bitmap = guest.buffer(&[0xa5; 2]);
    let head = guest.chain(Queue::Inflate, &[(numbers, 7, false), (bitmap, 2, true)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.written(Queue::Inflate), [(head, 1)]);
    assert_eq!(guest.read(bitmap, 2), [1, 0xa5]);
    let length = Refusal::Length { bytes: 7, unit: 4 };
    assert_eq!(guest.device.refusals().latest(), Some(length));
}

#[test]
fn a_page_that_kept_its_data_has_no_bit() {
    // Pinned by another user; refused by the machine; both, over one another.
    let mut guest = guest();
    guest.notes.borrow_mut().kept = vec![pages(1, 2)];
    guest.notes.borrow_mut().stuck = vec![pages(2, 1), pages(5, 1), pages(7, 1)];
    let expected = [true, false, false, true, true, false, true, false];
    assert_eq!(bits(&mut guest, 0..8), expected);
    for nr in [1, 2, 5, 7] {
        assert_eq!(guest.word(pages(nr, 1).start), nr + 1);
    }
    // Less than a page.
    let mut guest = self::guest();
    guest.notes.borrow_mut().stuck = vec![Span::new(pages(1, 1).start, 512)];
    assert_eq!(bits(&mut guest, 0..3), [true, false, true]);
    // A backing that keeps what is discarded.
    let mut guest = self::guest();
    guest.notes.borrow_mut().keeping = vec![1];
    let high = (HIGH.start - FREE) / WIRE_PAGE;
    assert_eq!(bits(&mut guest, high..high + 3), [false; 3]);
    assert_eq!(guest.word(HIGH.start), high + 1);
    assert_eq!(bits(&mut guest, 0..3), [true; 3], "of this region alone");
    // A part of a huge page waits for the rest of it.
    let mut guest = Guest::fresh(settings(6), 4 * WIRE_PAGE);
    guest.device.negotiate(guest.device.features()).unwrap();
    let expected = [true, true, true, true, false, false, false];
    assert_eq!(bits(&mut guest, 0..7), expected);
    for nr in 4..7 {
        assert_eq!(guest.word(pages(nr, 1).start), nr + 1);
    }
    assert_eq!(bits(&mut guest, 7..8), [true], "and then all of it goes");
    assert_eq!(guest.word(pages(4, 1).start), 0);
}

#[test]
fn a_discarder_that_does_not_say_so_gives_no_zeros() {
    let mut guest = guest();
    let regions: Vec<Region> = virtio_balloon::device::regions(&guest.memory, WIRE_PAGE);
    let mut device = BalloonDevice::new(settings(6), regions, (), (), ()).unwrap();
    device.negotiate(device.features()).unwrap();
    let (head, bitmap) = guest.asking((0..9).map(pfn), 2);
    let ring = &mut guest.rings[0].queue;
    let _ = device.drain(Queue::Inflate, ring, &guest.memory).unwrap();
    assert_eq!(guest.written(Queue::Inflate), [(head, 2)]);
    assert_eq!(guest.read(bitmap, 2), [0, 0]);
}

#[test]
fn zeros_are_not_what_a_guest_that_poisons_takes_for_initialized() {
    for (poison, zeros) in [(0u32, true), (0xaaaa_aaaa, false)] {
        let mut guest = guest();
        guest.device.write_config(12, &poison.to_le_bytes());
        assert_eq!(bits(&mut guest, 0..3), [zeros; 3]);
        assert_eq!(guest.discards(), [[pages(0, 3)]]);
        let mut guest = Guest::without(settings(6), Features::PAGE_POISON);
        guest.device.write_config(12, &poison.to_le_bytes());
        assert_eq!(bits(&mut guest, 0..3), [true; 3]);
    }
}

#[test]
fn a_page_that_the_device_writes_a_bitmap_to_has_no_bit() {
    let mut guest = guest();
    let numbers = guest.buffer(
        &(0..8)
            .flat_map(|nr| (pfn(nr) as u32).to_le_bytes())
            .collect::<Vec<_>>(),
    );
    // At the end of page 2, and over the border of pages 5 and 6, which the other message names.
    let inside = [pages(3, 1).start - 1, pages(6, 1).start - 1];
    guest.chain(
        Queue::Inflate,
        &[(numbers, 32, false), (inside[0], 9, true)],
    );
    let (first, second) = ((inside[1], 1, true), (inside[1] + 1, 1, true));
    let twice = [(numbers, 32, false), (numbers, 32, false), first, second];
    guest.chain(Queue::Inflate, &twice);
    let _ = guest.drain(Queue::Inflate);
    let expected = 0b1001_1011;
    assert_eq!(guest.read(inside[0], 2), [expected, 0]);
    assert_eq!(guest.read(inside[1], 2), [expected, expected]);
}

#[test]
fn the_bit_is_offered_only_where_it_is_configured_and_is_that_one() {
    let plain = Guest::fresh(BalloonSettings::default(), WIRE_PAGE);
    let offered = plain.device.features();
    for bit in [6, 7, 22, 63] {
        let mut guest = Guest::fresh(settings(bit), WIRE_PAGE);
        let init = Features(1 << bit);
        assert_eq!(guest.device.features(), offered.with(init));
        assert_eq!(guest.device.config_bytes(), 16);
        guest.device.negotiate(offered.with(init)).unwrap();
        let other = offered.with(Features(1 << 8));
        assert!(guest.device.negotiate(other).is_err());
        // Not accepted: messages are as they were.
        guest.device.negotiate(offered).unwrap();
        guest.pfns(Queue::Inflate, [pfn(0)]);
        let _ = guest.drain(Queue::Inflate);
        assert_eq!(guest.used(Queue::Inflate).len(), 1);
        let (_, bitmap) = guest.asking([pfn(1)], 1);
        let _ = guest.drain(Queue::Inflate);
        assert_eq!(guest.used(Queue::Inflate).len(), 1);
        let direction = Refusal::Direction {
            address: bitmap,
            len: 1,
        };
        assert_eq!(guest.device.refusals().latest(), Some(direction));
    }
}

#[test]
fn one_of_messages_in_bulk_and_of_bitmaps_is_accepted() {
    let init_on_inflate = settings(7).init_on_inflate;
    let both = BalloonSettings {
        init_on_inflate,
        ..in_bulk()
    };
    let (init, bulk) = (Features(1 << 7), BulkBit::DEFAULT.feature());
    let mut guest = Guest::fresh(both, WIRE_PAGE);
    let offered = guest.device.features();
    assert!(offered.contains(init.with(bulk)));
    let refused = Err(NegotiateError::BulkAndInit);
    assert_eq!(guest.device.negotiate(offered), refused);
    assert_eq!(guest.device.negotiated(), None);
    for one in [init, bulk] {
        assert_eq!(guest.device.negotiate(offered.without(one)), Ok(()));
    }
    let bit = BulkBit::DEFAULT.number();
    let same = BalloonSettings {
        init_on_inflate: InitBit::new(bit).ok(),
        ..in_bulk()
    };
    let none: [Region; 0] = [];
    let made = BalloonDevice::new(same, none, (), (), ()).err();
    assert_eq!(made, Some(BalloonSetupError::SameBit { bit }));
}

#[test]
fn what_is_taken_back_has_no_bitmap() {
    let mut guest = guest();
    bits(&mut guest, 0..4);
    guest.pfns(Queue::Deflate, (0..4).map(pfn));
    let _ = guest.drain(Queue::Deflate);
    assert_eq!(guest.used(Queue::Deflate).len(), 1);
    assert_eq!(guest.device.counters().deflated, 4 * WIRE_PAGE);
    assert_eq!(guest.device.refusals().total(), 0);
}

#[test]
fn bits_of_a_legacy_guest_are_in_the_order_of_its_numbers() {
    let settings = BalloonSettings {
        legacy_order: ByteOrder::Big,
        ..settings(6)
    };
    let mut guest = Guest::without(settings, Features::VERSION_1);
    guest.notes.borrow_mut().stuck = vec![pages(9, 1)];
    let big: Vec<u8> = [pfn(3), pfn(9), pfn(4)]
        .iter()
        .flat_map(|pfn| (*pfn as u32).to_be_bytes())
        .collect();
    let (numbers, bitmap) = (guest.buffer(&big), guest.buffer(&[0xa5]));
    guest.chain(Queue::Inflate, &[(numbers, 12, false), (bitmap, 1, true)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.read(bitmap, 1), [0b101]);
}

#[test]
fn on_memory_of_this_machine_a_locked_page_keeps_its_data_and_has_no_bit() {
    let mut guest = guest();
    marked(&guest, 9);
    let regions = GuestDiscard::regions(&guest.memory, WIRE_PAGE).unwrap();
    let discard = GuestDiscard::new();
    let mut device = BalloonDevice::new(settings(6), regions, discard, (), ()).unwrap();
    device.negotiate(device.features()).unwrap();
    let locked = GuestAddress(pages(4, 1).start);
    let host = guest.memory.get_host_address(locked).unwrap();
    // SAFETY: the page is memory of the guest, mapped for as long as the guest lives.
    let done = unsafe { libc::mlock(host.cast(), WIRE_PAGE as usize) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    let (head, bitmap) = guest.asking([0, 1, 2, 4, 6, 7, 8].map(pfn), 1);
    let ring = &mut guest.rings[0].queue;
    let _ = device.drain(Queue::Inflate, ring, &guest.memory).unwrap();
    assert_eq!(guest.written(Queue::Inflate), [(head, 1)]);
    assert_eq!(guest.read(bitmap, 1), [0b111_0111]);
    for nr in 0..9 {
        let kept = [3, 4, 5].contains(&nr);
        let expected = if kept { nr + 1 } else { 0 };
        assert_eq!(guest.word(pages(nr, 1).start), expected, "page {nr}");
    }
    assert_eq!(device.counters().not_discarded, WIRE_PAGE);
}
