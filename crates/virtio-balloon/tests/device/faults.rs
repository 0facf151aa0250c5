//! Each access to the guest's memory fails: to rings, descriptors and messages.

use virtio_balloon::device::{BalloonSettings, Drained, QueueError};
use virtio_balloon::{ByteOrder, Features, InitBit, Queue, Stats, Tag, WIRE_PAGE};

use crate::faulty::{Away, Faulty};
use crate::guest::{Guest, at, pages, pfn};

const INIT: InitBit = match InitBit::new(7) {
    Ok(bit) => bit,
    Err(_) => panic!("it is proposed"),
};

/// Two chains of a driver.
type Put = fn(&mut Guest) -> [u16; 2];

/// Two chains for each queue, and the pages that they name.
const QUEUES: [(Queue, Put, u64); 6] = [
    (Queue::Inflate, |guest| messages(guest, Queue::Inflate), 2),
    (Queue::Inflate, asking, 2),
    (Queue::Deflate, |guest| messages(guest, Queue::Deflate), 2),
    (Queue::Stats, statistics, 0),
    (Queue::FreePage, hints, 1),
    (Queue::Reporting, reports, 2),
];

fn messages(guest: &mut Guest, queue: Queue) -> [u16; 2] {
    [0, 8].map(|page| guest.pfns(queue, [pfn(page)]))
}

/// With bitmaps of what is initialized.
fn asking(guest: &mut Guest) -> [u16; 2] {
    let init = INIT.feature();
    let offered = guest.device.features();
    guest.device.negotiate(offered.with(init)).unwrap();
    [0, 8].map(|page| guest.asking([pfn(page)], 1).0)
}

fn statistics(guest: &mut Guest) -> [u16; 2] {
    let mut stats = Stats::default();
    stats.set(Tag::ALL[0], 7);
    let mut message = [0; Stats::MOST_BYTES];
    let used = stats.encode(&mut message, ByteOrder::Little);
    [(); 2].map(|()| guest.send(Queue::Stats, &message[..used]))
}

fn hints(guest: &mut Guest) -> [u16; 2] {
    let id = guest.device.start_hints().unwrap();
    let command = guest.send(Queue::FreePage, &id.to_le_bytes());
    [command, report(guest, Queue::FreePage, 0)]
}

fn reports(guest: &mut Guest) -> [u16; 2] {
    [0, 8].map(|page| report(guest, Queue::Reporting, page))
}

fn report(guest: &mut Guest, queue: Queue, page: u64) -> u16 {
    guest.chain(queue, &[(pages(page, 1).start, WIRE_PAGE as u32, true)])
}

fn guest() -> Guest {
    let settings = BalloonSettings {
        init_on_inflate: Some(INIT),
        features: BalloonSettings::default()
            .features
            .with(Features::FREE_PAGE_HINT),
        ..BalloonSettings::default()
    };
    Guest::without(settings, INIT.feature())
}

/// Pages that the device has taken or given back.
fn pages_done(guest: &Guest) -> u64 {
    let done = guest.device.counters();
    (done.inflated + done.deflated + done.reported + done.hinted) / WIRE_PAGE
}

/// Drains with the access number `nth` failing; false when there are no such.
fn drain(
    guest: &mut Guest,
    queue: Queue,
    nth: u64,
    away: Away,
) -> (Result<Drained, QueueError>, bool) {
    let memory = Faulty::new(&guest.memory, nth, away);
    let ring = &mut guest.rings[at(queue)].queue;
    let drained = guest.device.drain(queue, ring, &memory);
    (drained, memory.failed())
}

fn drain_all(guest: &mut Guest, queue: Queue) {
    for _ in 0..4 {
        if !guest.drain(queue).more {
            return;
        }
    }
    panic!("{queue:?} never ends");
}

/// Asks with the buffer that the device keeps, if it keeps one: all buffers are back then.
fn ask(guest: &mut Guest, queue: Queue) {
    if queue == Queue::Stats {
        assert!(guest.request_stats().unwrap());
    }
}

/// Chains that came back. A byte of bitmap that was written to one has the bit of its page.
fn used(guest: &mut Guest, queue: Queue) -> Vec<u16> {
    let written = guest.written(queue).into_iter();
    let heads = written.map(|(head, bytes)| {
        if bytes > 0 {
            let bitmap = guest.rings[at(queue)].base + 16 * (u64::from(head) + 1);
            let address = u64::from_le_bytes(guest.read(bitmap, 8).try_into().unwrap());
            assert_eq!((bytes, guest.read(address, 1)), (1, vec![1]));
        }
        head
    });
    heads.collect()
}

/// A drain with one fault, and what follows. False when it came to its end without the fault.
fn survives(queue: Queue, put: Put, named: u64, nth: u64, away: Away) -> bool {
    let what = format!("{queue:?}, access {nth}, {away:?}");
    let mut guest = guest();
    let sent = put(&mut guest);
    let (drained, failed) = drain(&mut guest, queue, nth, away);
    // Told, or counted, or still to be done.
    let refused = guest.device.refusals().total();
    let told = match &drained {
        Ok(drained) => refused > 0 || drained.more,
        Err(error) => !error.to_string().is_empty(),
    };
    // Refusals of a second buffer are no fault.
    let spare = u64::from(queue == Queue::Stats);
    if !failed {
        assert_eq!((refused, drained.unwrap().more), (spare, false), "{what}");
        assert_eq!(pages_done(&guest), named, "{what}");
        return false;
    }
    assert!(told, "{what}: {drained:?}");

    drain_all(&mut guest, queue);
    let refused = guest.device.refusals().total() - spare;
    assert!(
        pages_done(&guest) + refused >= named && pages_done(&guest) <= named,
        "{what}"
    );
    ask(&mut guest, queue);
    let mut back = used(&mut guest, queue);
    // A ring that cannot be written to keeps chains, and that is said.
    let ring = matches!(drained, Err(QueueError::Ring(..)));
    let all = sent.iter().all(|head| back.contains(head));
    assert!(
        all || ring,
        "{what}: {sent:?} was sent, and {back:?} is back"
    );

    // The next are served as if nothing had been.
    let before = (pages_done(&guest), guest.device.refusals().total());
    let next = put(&mut guest);
    drain_all(&mut guest, queue);
    ask(&mut guest, queue);
    back.extend(used(&mut guest, queue));
    assert!(back.ends_with(&next), "{what}: {back:?}");
    let known = back
        .iter()
        .all(|head| sent.contains(head) || next.contains(head));
    back.sort_unstable();
    assert!(
        known && back.is_sorted_by(|one, next| one < next),
        "{what}: {back:?}"
    );
    let after = (pages_done(&guest), guest.device.refusals().total());
    assert_eq!(after, (before.0 + named, before.1 + spare), "{what}");
    true
}

#[test]
fn each_access_to_memory_that_fails_in_a_drain_is_reported_and_the_queue_goes_on() {
    for (queue, put, named) in QUEUES {
        for away in [Away::Once, Away::Since] {
            let faults = (0..).take_while(|nth| survives(queue, put, named, *nth, away));
            // Three ranges, flags, index, for each chain its head and a descriptor, and what follows.
            assert!(faults.count() >= 12, "{queue:?}");
        }
    }
}

#[test]
fn a_request_for_statistics_that_does_not_reach_its_buffer_can_be_made_again() {
    let queue = Queue::Stats;
    for away in [Away::Once, Away::Since] {
        for nth in 0.. {
            let what = format!("access {nth}, {away:?}");
            let mut guest = guest();
            let sent = guest.send(queue, &[]);
            drain_all(&mut guest, queue);
            let memory = Faulty::new(&guest.memory, nth, away);
            let ring = &mut guest.rings[at(queue)].queue;
            let asked = guest.device.request_stats(ring, &memory);
            if !memory.failed() {
                assert!(asked.unwrap() && nth >= 5, "{what}");
                break;
            }
            assert!(asked.is_err(), "{what}");
            ask(&mut guest, queue);
            assert_eq!(guest.used(queue), [sent], "{what}");
        }
    }
}
