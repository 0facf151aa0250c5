//! The device under drivers that are hostile, broken, slow or shuffled.

use crate::guest::{FREE, Guest, HIGH, INDIRECT, LOW, NEXT, SIZE, WRITE, at, in_bulk, pages, pfn};
use runs::Span;
use virtio_balloon::device::{BalloonSettings, QueueError};
use virtio_balloon::{Features, MOST_MESSAGE_BYTES, Queue, Refusal, WIRE_PAGE};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

/// One message is refused, goes back, and the next is taken.
fn refused(guest: &mut Guest, head: Option<u16>, expected: Refusal) {
    let before = *guest.device.refusals().counts();
    guest.pfns(Queue::Inflate, [pfn(900)]);
    let drained = guest.drain(Queue::Inflate);
    let used = guest.used(Queue::Inflate);
    assert_eq!(usize::from(drained.used), used.len());
    assert_eq!(used.first().copied() == head, head.is_some(), "{used:?}");
    let refusals = guest.device.refusals();
    assert_eq!(refusals.latest(), Some(expected));
    let new: u64 = refusals.counts().iter().sum::<u64>() - before.iter().sum::<u64>();
    assert_eq!(new, 1);
    assert_eq!(guest.discards(), [[pages(900, 1)]], "the queue goes on");
}

#[test]
fn chains_without_an_end_are_refused() {
    let mut guest = Guest::new(BalloonSettings::default());
    let table = guest.rings[0].base;
    let good = guest.buffer(&(pfn(0) as u32).to_le_bytes());
    // To itself; in a circle; out of the table.
    for (next, second) in [(40, 40), (41, 40), (41, SIZE), (41, u16::MAX)] {
        guest.descriptor(table, 40, (good, 4), NEXT, next);
        guest.descriptor(table, 41, (good, 4), NEXT, second);
        guest.offer(Queue::Inflate, 40);
        refused(&mut guest, Some(40), Refusal::Chain { head: 40 });
    }
    // Longer than 2^32 bytes.
    guest.descriptor(table, 40, (FREE, u32::MAX), NEXT, 41);
    guest.descriptor(table, 41, (FREE, 1), 0, 0);
    guest.offer(Queue::Inflate, 40);
    refused(&mut guest, Some(40), Refusal::Chain { head: 40 });
}

#[test]
fn indirect_tables_are_looked_at() {
    let mut guest = Guest::new(BalloonSettings::default());
    let table = guest.rings[0].base;
    let message = guest.buffer(&(pfn(0) as u32).to_le_bytes());
    let indirect = guest.buffer(&[0; 16 * 400]);
    let cases: &[(u64, u32)] = &[
        (indirect, 0),
        (indirect, 15),
        (indirect, u32::MAX),
        (1 << 40, 16),
        (LOW.len - 8, 16),
        (u64::MAX - 7, 16),
    ];
    guest.descriptor(indirect, 0, (message, 4), NEXT, 7);
    for &(address, len) in cases {
        guest.descriptor(table, 40, (address, len), INDIRECT, 0);
        guest.offer(Queue::Inflate, 40);
        refused(&mut guest, Some(40), Refusal::Chain { head: 40 });
    }
    // A table in a table; a table that is longer than the queue.
    guest.descriptor(indirect, 0, (indirect, 16), INDIRECT, 0);
    guest.descriptor(table, 40, (indirect, 16), INDIRECT, 0);
    guest.offer(Queue::Inflate, 40);
    refused(&mut guest, Some(40), Refusal::Chain { head: 40 });
    for nr in 0..400 {
        guest.descriptor(indirect, nr, (message, 4), NEXT, nr + 1);
    }
    guest.descriptor(indirect, 399, (message, 4), 0, 0);
    guest.descriptor(table, 40, (indirect, 16 * 400), INDIRECT, 0);
    guest.offer(Queue::Inflate, 40);
    refused(&mut guest, Some(40), Refusal::Chain { head: 40 });
    // A good one.
    guest.descriptor(indirect, SIZE - 1, (message, 4), 0, 0);
    guest.descriptor(table, 40, (indirect, 16 * u32::from(SIZE)), INDIRECT, 0);
    guest.offer(Queue::Inflate, 40);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(0, 1)]]);
}

#[test]
fn buffers_outside_memory_and_of_the_wrong_direction_are_refused() {
    let mut guest = Guest::new(BalloonSettings::default());
    let good = guest.buffer(&(pfn(0) as u32).to_le_bytes());
    for address in [LOW.len, LOW.len - 2, u64::MAX - 1, 1 << 50] {
        let head = guest.chain(Queue::Inflate, &[(good, 4, false), (address, 4, false)]);
        refused(&mut guest, Some(head), Refusal::Buffer { address, len: 4 });
    }
    let head = guest.chain(Queue::Inflate, &[(good, 4, false), (good, 8, true)]);
    let refusal = Refusal::Direction {
        address: good,
        len: 8,
    };
    refused(&mut guest, Some(head), refusal);
    let len = MOST_MESSAGE_BYTES as u32 + 4;
    let head = guest.chain(Queue::Inflate, &[(FREE, len, false)]);
    let refusal = Refusal::TooLong {
        bytes: len as usize,
        most: MOST_MESSAGE_BYTES,
    };
    refused(&mut guest, Some(head), refusal);
    // A long address range that costs nothing to refuse.
    let head = guest.chain(Queue::Inflate, &[(FREE, u32::MAX, false)]);
    let refusal = Refusal::TooLong {
        bytes: u32::MAX as usize,
        most: MOST_MESSAGE_BYTES,
    };
    refused(&mut guest, Some(head), refusal);
    // An empty message is nothing at all.
    guest.chain(Queue::Inflate, &[(0, 0, false)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.device.counters().chains, 15);
}

#[test]
fn messages_in_bulk_are_as_long_as_the_device_says() {
    let mut settings = in_bulk();
    let bulk = settings.bulk.as_mut().unwrap();
    bulk.message_bytes = 64;
    let mut guest = Guest::new(settings);
    guest.send(Queue::Inflate, &[0; 72]);
    let _ = guest.drain(Queue::Inflate);
    let refusal = Refusal::TooLong {
        bytes: 72,
        most: 64,
    };
    assert_eq!(guest.device.refusals().latest(), Some(refusal));
}

#[test]
fn descriptors_that_the_queue_has_not_are_counted() {
    let mut guest = Guest::new(BalloonSettings::default());
    for head in [SIZE, u16::MAX] {
        guest.offer(Queue::Inflate, head);
        refused(&mut guest, None, Refusal::Head { head, size: SIZE });
    }
    // More available than the ring has: the ring is broken, and nothing of it is taken.
    let avail = guest.rings[0].avail();
    let index = guest.rings[0].queue.next_avail();
    let wrong = index.wrapping_add(SIZE + 1);
    guest
        .memory
        .write_obj(wrong, GuestAddress(avail + 2))
        .unwrap();
    assert!(matches!(
        guest.try_drain(Queue::Inflate),
        Err(QueueError::Index { available: 257, .. })
    ));
    guest
        .memory
        .write_obj(index, GuestAddress(avail + 2))
        .unwrap();
    assert_eq!(guest.drain(Queue::Inflate).used, 0);
    // A ring that is nowhere.
    let used = guest.rings[0].used();
    guest.rings[0]
        .queue
        .set_used_ring_address(Some(LOW.len as u32), Some(0));
    assert!(matches!(
        guest.try_drain(Queue::Inflate),
        Err(QueueError::NotReady(Queue::Inflate))
    ));
    guest.rings[0]
        .queue
        .set_used_ring_address(Some(used as u32), Some(0));
    assert_eq!(guest.drain(Queue::Inflate).used, 0);
}

#[test]
fn pages_outside_memory_are_left_out() {
    let mut guest = Guest::new(BalloonSettings::default());
    let page = |address: u64| address / WIRE_PAGE;
    let last = page(LOW.len) - 1;
    let outside = [page(LOW.len), page(HIGH.start) - 1, page(1 << 43)];
    guest.pfns(
        Queue::Inflate,
        outside.into_iter().chain([last, page(HIGH.start)]),
    );
    let _ = guest.drain(Queue::Inflate);
    let expected = [last, page(HIGH.start)].map(|nr| Span::new(nr * WIRE_PAGE, WIRE_PAGE));
    assert_eq!(guest.discards(), [expected]);
    assert_eq!(guest.device.refusals().total(), 3);

    // Reports over the hole, unaligned, empty, or of buffers to be read.
    let long = (LOW.len - WIRE_PAGE, 17 << 20, true);
    guest.chain(
        Queue::Reporting,
        &[long, (FREE + 1, 4096, true), (FREE, 0, true)],
    );
    guest.chain(Queue::Reporting, &[(FREE, 4096, false), (FREE, 4096, true)]);
    assert_eq!(guest.drain(Queue::Reporting).used, 2);
    let low = Span::new(LOW.len - WIRE_PAGE, WIRE_PAGE);
    assert_eq!(
        guest.discards(),
        [[low, Span::new(HIGH.start, (1 << 20) - WIRE_PAGE)]]
    );
    assert_eq!(guest.device.refusals().total(), 7);
}

#[test]
fn buffers_of_pages_that_are_no_pages_are_refused_alone() {
    let mut guest = Guest::new(BalloonSettings::default());
    let last = !(WIRE_PAGE - 1);
    for (address, len, refusal) in [
        (
            FREE + 1,
            4096,
            Refusal::Bits {
                nr: 1,
                word: FREE + 1,
            },
        ),
        (FREE, 4095, Refusal::Bits { nr: 1, word: 4095 }),
        (FREE, 0, Refusal::Empty { nr: 1 }),
        (
            last,
            8192,
            Refusal::Wraps {
                start: last,
                pages: 2,
            },
        ),
    ] {
        let good = [7, 9].map(|nr| (pages(nr, 1).start, 4096, true));
        let buffers = [good[0], (address, len, true), good[1]];
        guest.chain(Queue::Reporting, &buffers);
        let _ = guest.drain(Queue::Reporting);
        assert_eq!(guest.discards(), [[pages(7, 1), pages(9, 1)]]);
        assert_eq!(guest.device.refusals().latest(), Some(refusal));
    }
    assert_eq!(guest.device.refusals().total(), 4);
}

#[test]
fn a_flood_is_taken_in_pieces() {
    let settings = BalloonSettings {
        drain_bytes: 4096,
        ..BalloonSettings::default()
    };
    let mut guest = Guest::new(settings);
    for _ in 0..SIZE {
        guest.pfns(Queue::Inflate, (0..1000).map(pfn));
    }
    let mut drains = 0;
    let mut used = 0;
    loop {
        let drained = guest.drain(Queue::Inflate);
        assert!(drained.used <= 2, "{drained:?}");
        used += drained.used;
        drains += 1;
        if !drained.more {
            break;
        }
    }
    assert_eq!((used, drains), (SIZE, SIZE / 2));
    // The same descriptor over and over: as many as the ring holds.
    for _ in 0..SIZE {
        guest.offer(Queue::Inflate, 0);
    }
    let drained = guest.drain(Queue::Inflate);
    assert!(drained.more && drained.used == 2);

    // Descriptors without bytes count, too.
    let table = guest.rings[at(Queue::Reporting)].base;
    for nr in 0..SIZE {
        let flags = if nr + 1 < SIZE { NEXT | WRITE } else { WRITE };
        guest.descriptor(table, nr, (FREE, 0), flags, nr + 1);
    }
    for _ in 0..SIZE {
        guest.offer(Queue::Reporting, 0);
    }
    let drained = guest.drain(Queue::Reporting);
    assert!(drained.more && drained.used == 1, "{drained:?}");
}

#[test]
fn configuration_is_written_within_its_bounds_only() {
    let mut guest = Guest::without(BalloonSettings::default(), Features(0));
    for offset in [0, 1, 3, 5, 15, 16, 23, 24, 27, 28, u64::MAX] {
        guest.device.write_config(offset, &[0xff; 64]);
        let mut config = [0; 64];
        guest.device.read_config(offset, &mut config);
        guest.device.read_config(offset, &mut []);
    }
    assert_eq!(guest.device.target(), 0);
}
