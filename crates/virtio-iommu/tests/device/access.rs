//! Each access to the memory of rings and buffers fails.

use virtio_iommu::wire::{MOST_REQUEST_BYTES, Request, map_flags};
use virtio_iommu::{FaultReport, ReportReason, RingError, Served, Status};
use vm_memory::{Bytes as _, GuestAddress};

use crate::faulty::{Away, Faulty};
use crate::guest::{
    ANSWER, Guest, PAGE, PROBE_BYTES, attach, detach, map, pages, probe, status, unmap,
};

const RW: u32 = map_flags::READ | map_flags::WRITE;
/// Address of the bytes of requests here.
const REQUEST: u64 = 0xa000;

/// Requests before this one, and what it changes.
const REQUESTS: [(usize, fn() -> Request); 5] = [
    (0, || attach(8, 1)),
    (1, || map(1, pages(1, 4), 0, RW)),
    (2, || probe(8)),
    (2, || unmap(1, pages(1, 4))),
    (1, || detach(8, 1)),
];

/// State of endpoint 8: its domain, the word it reads, and how much is pinned for it.
fn state(guest: &Guest) -> (Option<u32>, Option<u64>, u64) {
    let domain = guest.device.domain_of(8);
    (domain, guest.read(8, PAGE), guest.pinned())
}

/// Puts the request into the ring; returns the bytes of its answer.
fn put(guest: &mut Guest, request: Request) -> u32 {
    let mut buffer = [0; MOST_REQUEST_BYTES];
    let bytes = request.encode(&mut buffer);
    let address = GuestAddress(REQUEST);
    guest.memory.write_slice(bytes, address).unwrap();
    let room = request.answer_bytes(PROBE_BYTES as usize) as u32;
    guest.blank(room);
    let half = bytes.len() as u32 / 2;
    let rest = (REQUEST + u64::from(half), bytes.len() as u32 - half, false);
    // Buffers in pieces: any of them may be the one that fails.
    let tail = (ANSWER + u64::from(room) - 4, 4, true);
    match room {
        4 => guest.chain(0, &[(REQUEST, half, false), rest, tail]),
        _ => {
            let properties = (ANSWER, room - 4, true);
            guest.chain(0, &[(REQUEST, half, false), rest, properties, tail]);
        }
    }
    room
}

/// The status that lies in the buffer of an answer of so many bytes; `None` where none was written.
fn written(guest: &Guest, room: u32) -> Option<Status> {
    let mut answer = vec![0; room as usize];
    let address = GuestAddress(ANSWER);
    guest.memory.read_slice(&mut answer, address).unwrap();
    (!answer.ends_with(&[0xee; 4])).then(|| status(&answer).unwrap())
}

fn serve(guest: &mut Guest, nth: u64, away: Away) -> (Result<Served, RingError>, bool) {
    let memory = Faulty::new(&guest.memory, nth, away);
    let served = guest.device.requests(&mut guest.queues[0], &memory);
    (served, memory.failed())
}

/// A request with one fault, and the rest of the endpoint's life. False when it came to its end without
/// the fault.
fn survives(
    guest: &mut Guest,
    (before, request): (usize, fn() -> Request),
    nth: u64,
    away: Away,
) -> bool {
    let what = format!("{:?}, access {nth}, {away:?}", request());
    for (_, request) in &REQUESTS[..before] {
        assert_eq!(guest.send(request()), Some(Status::Ok));
    }
    let unchanged = state(guest);
    let room = put(guest, request());
    let counted = guest.device.counters();
    let (served, failed) = serve(guest, nth, away);
    let now = guest.device.counters();
    let answer = written(guest, room);
    if !failed {
        assert_eq!(
            (served.unwrap().used, answer),
            (1, Some(Status::Ok)),
            "{what}"
        );
        let _ = guest.used(0);
        assert!(guest.device.reset());
        guest.device.ack_features(guest.device.features()).unwrap();
        return false;
    }
    // The failure is reported, or counted as no request, or as a refused one, or the request is still in the ring.
    let answered = |status| now.with(status) - counted.with(status);
    let refused = Status::ALL
        .into_iter()
        .skip(1)
        .any(|status| answered(status) > 0);
    let told = match &served {
        Ok(served) => served.more || refused || now.malformed > counted.malformed,
        Err(error) => !error.to_string().is_empty(),
    };
    assert!(told, "{what}: {served:?}");
    // A request without an answer has no effect, unless the back end was notified.
    let told = std::mem::take(&mut guest.device.back_end().failed);
    let unanswered = told == ["an answer, Ok, cannot be written"];
    assert!(unanswered || told.is_empty(), "{what}: {told:?}");
    if answer != Some(Status::Ok) && !unanswered {
        assert_eq!(state(guest), unchanged, "{what}: {answer:?}");
    }
    assert!(guest.ledger.in_use() == guest.pinned(), "{what}");

    // The request that is still in the ring is served, and so is the next one.
    guest.serve().map(drop).unwrap();
    let room = put(guest, probe(8));
    guest.serve().map(drop).unwrap();
    assert_eq!(written(guest, room), Some(Status::Ok), "{what}");
    // A chain that did not come back may do so with the next.
    assert!(guest.used(0).len() <= 3, "{what}");
    if guest.device.domain_of(8).is_some() {
        assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok), "{what}");
    }
    guest.assert_all_back();
    for (_, request) in REQUESTS {
        assert_eq!(guest.send(request()), Some(Status::Ok), "{what}");
    }
    guest.assert_all_back();
    true
}

#[test]
fn each_access_to_memory_that_fails_in_a_request_is_reported_and_what_was_not_done_changed_nothing()
{
    let mut guest = Guest::new();
    for request in REQUESTS {
        for away in [Away::Once, Away::Since] {
            let faults = (0..).take_while(|nth| survives(&mut guest, request, *nth, away));
            // Three ranges, flags, index, head, descriptors, the buffers, and the way back.
            assert!(faults.count() >= 15);
        }
    }
}

#[test]
fn each_access_to_memory_that_fails_while_faults_are_reported_is_reported_and_every_fault_is_counted()
 {
    let fault = FaultReport {
        reason: ReportReason::Mapping,
        endpoint: 8,
        access: None,
        address: Some(5 * PAGE),
    };
    for away in [Away::Once, Away::Since] {
        for nth in 0.. {
            let what = format!("access {nth}, {away:?}");
            let mut guest = Guest::new();
            for nr in 0..3 {
                guest.give(nr, 24);
            }
            let memory = Faulty::new(&guest.memory, nth, away);
            let told = guest
                .device
                .faults(&mut guest.queues[1], &memory, &[fault; 2]);
            let failed = memory.failed();
            let counted = guest.device.counters();
            if !failed {
                assert_eq!((told.unwrap().used, counted.faults), (2, 2), "{what}");
                assert!(nth >= 12);
                break;
            }
            // A queue that cannot be used leaves them to the caller.
            let all = counted.faults + counted.dropped;
            assert!(all == 2 || told.is_err() && all == 0, "{what}: {counted:?}");
            let left = guest.tell(&[fault]).map(|served| served.used);
            assert!(left.is_ok_and(|used| used <= 2), "{what}");
        }
    }
}
