//! Drivers that do what they must not.

use virtio_iommu::wire::{MOST_REQUEST_BYTES, Request};
use virtio_iommu::{RingError, Status, features};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use crate::guest::{
    ANSWER, F_INDIRECT, F_NEXT, F_WRITE, Guest, PROBE_BYTES, RINGS, SIZE, attach, detach, map,
    pages, probe, status, unmap,
};

/// Address of the bytes of requests here.
const REQUEST: u64 = 0xa000;

/// Puts a request into memory; returns its length.
fn put(guest: &Guest, request: Request) -> u32 {
    let mut buffer = [0; MOST_REQUEST_BYTES];
    let bytes = request.encode(&mut buffer);
    guest
        .memory
        .write_slice(bytes, GuestAddress(REQUEST))
        .unwrap();
    guest.blank(PROBE_BYTES + 4);
    bytes.len() as u32
}

/// The chain goes back as it is, and nothing is done.
fn ignored(guest: &mut Guest) {
    let before = guest.device.counters();
    let served = guest.serve().unwrap();
    assert_eq!(served.used, 1);
    assert!(guest.used(0).iter().all(|(_, written)| *written == 0));
    let mut answer = [0; 16];
    guest
        .memory
        .read_slice(&mut answer, GuestAddress(ANSWER))
        .unwrap();
    assert_eq!(answer, [0xee; 16]);
    let after = guest.device.counters();
    assert_eq!(after.malformed, before.malformed + 1);
    assert_eq!(after.answered, before.answered);
    assert_eq!(guest.device.domains().count(), 0);
}

#[test]
fn a_request_without_room_for_its_tail_is_not_done() {
    let mut guest = Guest::new();
    for room in [0, 1, 3, 5, 64, 200] {
        let mut buffer = [0; MOST_REQUEST_BYTES];
        let bytes = attach(8, 1).encode(&mut buffer).to_vec();
        assert_eq!(guest.send_bytes(&bytes, room), [0; 0], "{room}");
        assert_eq!(guest.device.domain_of(8), None);
    }
    assert_eq!(guest.device.counters().malformed, 6);
}

#[test]
fn requests_of_other_lengths_or_types_are_not_done() {
    let mut guest = Guest::new();
    let mut buffer = [0; MOST_REQUEST_BYTES];
    let whole = attach(8, 1).encode(&mut buffer).to_vec();
    for bytes in [
        &whole[..19],
        &whole[..4],
        &whole[..3],
        &[&whole[..], &[0]].concat(),
    ] {
        assert_eq!(guest.send_bytes(bytes, 4), [0; 0]);
    }
    for kind in [0, 6, 0x80, 0xff] {
        let mut bytes = whole.clone();
        bytes[0] = kind;
        assert_eq!(guest.send_bytes(&bytes, 4), [0; 0]);
    }
    // Longer than any request.
    assert_eq!(guest.send_bytes(&[1; 200], 4), [0; 0]);
    assert_eq!(guest.device.domains().count(), 0);
}

#[test]
fn requests_whose_feature_is_not_negotiated_are_not_known() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    let all = guest.device.features();
    guest.device.ack_features(all & !features::PROBE).unwrap();
    assert_eq!(guest.send(probe(8)), None);
    guest
        .device
        .ack_features(all & !features::MAP_UNMAP)
        .unwrap();
    assert_eq!(guest.send(map(1, pages(0, 1), 0, 1)), None);
    assert_eq!(guest.send(unmap(1, pages(0, 1))), None);
    assert!(guest.send(probe(8)).is_some() && guest.send(detach(8, 1)) == Some(Status::Ok));
}

#[test]
fn properties_have_exactly_probe_size() {
    let mut guest = Guest::new();
    let mut buffer = [0; MOST_REQUEST_BYTES];
    let bytes = probe(8).encode(&mut buffer).to_vec();
    let answer = guest.send_bytes(&bytes, PROBE_BYTES);
    // No property is written, and the status is where it is looked for.
    assert_eq!(status(&answer), Some(Status::Inval));
    assert!(
        answer[..PROBE_BYTES as usize - 4]
            .iter()
            .all(|byte| *byte == 0)
    );
    assert_eq!(status(&guest.send_bytes(&bytes, 4)), Some(Status::Inval));
    assert_eq!(guest.send_bytes(&bytes, PROBE_BYTES + 5), [0; 0]);
    assert_eq!(guest.send_bytes(&bytes, 3), [0; 0]);
}

#[test]
fn however_bytes_are_cut_into_buffers_they_are_the_same_request() {
    let mut guest = Guest::new();
    let len = u64::from(put(&guest, probe(8)));
    let cut = [
        (REQUEST, 1, false),
        (REQUEST + 1, 0, false),
        (REQUEST + 1, 2, false),
        (REQUEST + 3, (len - 3) as u32, false),
        (ANSWER, 7, true),
        (ANSWER + 7, PROBE_BYTES - 5, true),
        (ANSWER + 2 + u64::from(PROBE_BYTES), 2, true),
    ];
    guest.chain(0, &cut);
    let answer = guest.answer(PROBE_BYTES + 4);
    assert_eq!((status(&answer), answer[4]), (Some(Status::Ok), 1));
}

#[test]
fn chains_that_are_none_go_back_as_they_are() {
    let mut guest = Guest::new();
    let table = guest.queues[0].desc_table();
    let len = put(&guest, attach(8, 1));
    let request = (REQUEST, len);
    // A loop, one without an end in the table, and a buffer to read behind one to write.
    guest.descriptor(table, 0, request, F_NEXT, 0);
    guest.offer(0, 0);
    ignored(&mut guest);
    guest.descriptor(table, 0, (REQUEST, 0), F_NEXT, 0);
    guest.offer(0, 0);
    ignored(&mut guest);
    guest.descriptor(table, 0, request, F_NEXT, SIZE);
    guest.offer(0, 0);
    ignored(&mut guest);
    guest.chain(0, &[(ANSWER, 4, true), (REQUEST, len, false)]);
    ignored(&mut guest);
    guest.chain(
        0,
        &[
            (REQUEST, len, false),
            (ANSWER, 4, true),
            (REQUEST, 0, false),
        ],
    );
    ignored(&mut guest);
    // Indirect tables: no multiple of a descriptor, outside of memory, one in the other.
    guest.descriptor(table, 0, (0xb000, 17), F_INDIRECT, 0);
    guest.offer(0, 0);
    ignored(&mut guest);
    guest.descriptor(table, 0, (RINGS, 32), F_INDIRECT, 0);
    guest.offer(0, 0);
    ignored(&mut guest);
    guest.descriptor(0xb000, 0, (0xb000, 32), F_INDIRECT, 0);
    guest.descriptor(table, 0, (0xb000, 32), F_INDIRECT, 0);
    guest.offer(0, 0);
    ignored(&mut guest);
    // One that is good.
    guest.descriptor(0xb000, 0, request, F_NEXT, 1);
    guest.descriptor(0xb000, 1, (ANSWER, 4), F_WRITE, 0);
    guest.offer(0, 0);
    assert_eq!(status(&guest.answer(4)), Some(Status::Ok));
}

#[test]
fn an_indirect_table_is_no_way_around_the_length_of_a_chain() {
    let mut guest = Guest::new();
    let table = guest.queues[0].desc_table();
    let len = put(&guest, attach(8, 1));
    let offer = |guest: &mut Guest, count: u16| {
        guest.descriptor(0xb000, 0, (REQUEST, len), F_NEXT, 1);
        for nr in 1..count - 1 {
            guest.descriptor(0xb000, nr, (REQUEST, 0), F_NEXT, nr + 1);
        }
        guest.descriptor(0xb000, count - 1, (ANSWER, 4), F_WRITE, 0);
        guest.descriptor(table, 0, (0xb000, 16 * u32::from(count)), F_INDIRECT, 0);
        guest.offer(0, 0);
    };
    for more in [SIZE + 1, SIZE + 2] {
        offer(&mut guest, more);
        ignored(&mut guest);
    }
    offer(&mut guest, SIZE);
    assert_eq!(status(&guest.answer(4)), Some(Status::Ok));
}

#[test]
fn an_answer_that_cannot_be_written_means_that_nothing_is_done() {
    let mut guest = Guest::new();
    let len = put(&guest, attach(8, 1));
    for room in [(RINGS - 2, 4), (RINGS, 4), (u64::MAX - 1, 4)] {
        guest.chain(0, &[(REQUEST, len, false), (room.0, room.1, true)]);
        ignored(&mut guest);
    }
    // Not even partly.
    guest.chain(
        0,
        &[(REQUEST, len, false), (ANSWER, 2, true), (RINGS, 2, true)],
    );
    ignored(&mut guest);
    guest.chain(0, &[(REQUEST, len, false), (ANSWER, 4, false)]);
    ignored(&mut guest);
}

#[test]
fn a_ring_that_holds_more_than_it_can_is_refused() {
    let mut guest = Guest::new();
    for _ in 0..=SIZE {
        guest.offer(0, 0);
    }
    match guest.serve() {
        Err(RingError::Index { available, size }) => {
            assert_eq!((available, size), (SIZE + 1, SIZE))
        }
        other => panic!("{other:?}"),
    }
    guest.queues[0].set_ready(false);
    assert!(matches!(guest.serve(), Err(RingError::NotReady)));
    guest.queues[0].set_ready(true);
    guest.queues[0].set_used_ring_address(Some(RINGS as u32), None);
    assert!(matches!(guest.serve(), Err(RingError::NotReady)));
}

#[test]
fn heads_that_are_no_descriptors_are_passed_over() {
    let mut guest = Guest::new();
    let len = put(&guest, attach(8, 1));
    guest.offer(0, SIZE);
    guest.offer(0, u16::MAX);
    guest.chain(0, &[(REQUEST, len, false), (ANSWER, 4, true)]);
    let served = guest.serve().unwrap();
    assert_eq!((served.used, guest.used(0)), (1, vec![(0, 4)]));
    assert_eq!(guest.device.counters().malformed, 2);
}

#[test]
fn one_call_serves_what_was_there_and_says_when_there_is_more() {
    let mut guest = Guest::new();
    let len = put(&guest, attach(8, 1));
    for _ in 0..SIZE {
        guest.chain(0, &[(REQUEST, len, false), (ANSWER, 4, true)]);
    }
    let served = guest.serve().unwrap();
    assert_eq!(
        (served.used, served.more, served.notify),
        (SIZE, false, true)
    );
    assert_eq!(guest.device.counters().with(Status::Ok), u64::from(SIZE));
}
