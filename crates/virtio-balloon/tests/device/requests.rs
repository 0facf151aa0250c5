//! Requests of the host: which pages does the guest not use?

use crate::guest::{Act, FREE, Guest, SIZE, at, bulk_messages, in_bulk, pages};
use runs::{GuestAddr, Span};
use virtio_balloon::device::{Bulk, Device, Event, QueueError, Settings, SetupError};
use virtio_balloon::{
    BulkBit, BulkFormat, Config, Features, GuestPage, HostRequest, Numbering, Queue, Refusal,
    Region, ResponseHeader, Source,
};
use virtio_queue::QueueT as _;
use vm_memory::{Bytes as _, GuestAddress};

const BUFFER: u64 = FREE - 0x1000;

fn settings(format: BulkFormat) -> Settings {
    Settings {
        bulk: Some(Bulk {
            requests: true,
            ..Bulk::new(format)
        }),
        ..Settings::default()
    }
}

fn buffer(guest: &mut Guest) -> u16 {
    guest.chain(Queue::Requests, &[(BUFFER, 16, true)])
}

/// Messages of an answer: these runs, in messages of 4096 bytes, and an end.
fn answer(guest: &mut Guest, format: BulkFormat, id: u16, runs: &[Span<GuestAddr>]) {
    let end = ResponseHeader::default().to_bytes().to_vec();
    let mut messages = bulk_messages(format, runs);
    messages.push(end);
    let last = messages.len() - 1;
    for (nr, mut message) in messages.into_iter().enumerate() {
        let header = ResponseHeader {
            command: 0,
            flag: u8::from(nr == last),
            id,
            data_len: message.len() as u32 - 8,
        };
        message[..8].copy_from_slice(&header.to_bytes());
        guest.send(Queue::Requests, &message);
    }
}

#[test]
fn the_queue_is_there_only_where_the_monitor_wants_it_and_the_bulk_bit_is_taken() {
    let bulk = BulkBit::DEFAULT.feature();
    for numbering in [Numbering::Specification, Numbering::Compressed] {
        for (wanted, without, there) in [
            (true, Features(0), true),
            (true, bulk, false),
            (false, Features(0), false),
        ] {
            let mut settings = settings(BulkFormat::Ranges);
            settings.numbering = numbering;
            if let Some(bulk) = &mut settings.bulk {
                bulk.requests = wanted;
            }
            let mut guest = Guest::without(settings, without);
            let number = guest.device.number(Queue::Requests);
            assert_eq!(number.is_some(), there);
            if let Some(number) = number {
                assert_eq!(guest.device.queue(number), Some(Queue::Requests));
                assert_eq!(number, guest.device.queues() - 1);
            } else {
                let refused = guest.request_unused();
                assert!(matches!(refused, Err(QueueError::NoQueue(Queue::Requests))));
            }
            let mut config = [0; 32];
            guest.device.read_config(0, &mut config);
            let flags = Config::from_bytes(&config).bulk_flags;
            assert_eq!(flags & Config::BULK_REQUESTS != 0, wanted);
        }
    }
    // A format without a header cannot tell an answer from another message.
    for format in [BulkFormat::Chunks, BulkFormat::ScatterGather] {
        let none: [Region; 0] = [];
        let refused = Device::new(settings(format), none, (), (), ()).map(|_| ());
        assert_eq!(refused, Err(SetupError::Requests { format }));
    }
    assert!(
        in_bulk(BulkFormat::Chunks)
            .bulk
            .is_some_and(|bulk| !bulk.requests)
    );
}

#[test]
fn a_request_goes_into_the_buffer_and_its_answer_to_the_monitor() {
    // So many that they take several messages.
    let runs: Vec<Span<GuestAddr>> = (0..1500).map(|nr| pages(2 * nr, 1)).collect();
    for format in BulkFormat::ALL
        .into_iter()
        .filter(|format| format.has_header())
    {
        let mut guest = Guest::new(settings(format));
        assert!(matches!(guest.request_unused(), Err(QueueError::NoBuffer)));
        let head = buffer(&mut guest);
        let drained = guest.drain(Queue::Requests);
        assert_eq!((drained.used, drained.notify), (0, false));
        for id in 1..4 {
            guest.mark(BUFFER, u64::MAX);
            guest.mark(BUFFER + 8, u64::MAX);
            assert_eq!(guest.request_unused().unwrap(), (id, true));
            assert_eq!(guest.written(Queue::Requests), 16);
            assert!(matches!(guest.request_unused(), Err(QueueError::NoBuffer)));
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&guest.word(BUFFER).to_le_bytes());
            bytes[8..].copy_from_slice(&guest.word(BUFFER + 8).to_le_bytes());
            let request = HostRequest {
                command: HostRequest::UNUSED_PAGES,
                param: id.into(),
            };
            assert_eq!(bytes, request.to_bytes());

            answer(&mut guest, format, id, &runs);
            let _ = guest.drain(Queue::Requests);
            assert_eq!(guest.written(Queue::Requests), 0);
            let mut found = Vec::new();
            let mut ends = 0;
            for act in guest.acts() {
                match act {
                    Act::Unused(of, runs) if ends == 0 && of == id => found.extend(runs),
                    Act::Event(Event::UnusedEnd { id: of }) if of == id => ends += 1,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!((found, ends), (runs.clone(), 1), "{format:?}");
            buffer(&mut guest);
            let _ = guest.drain(Queue::Requests);
        }
        assert_eq!(guest.used(Queue::Requests)[0], head);
        assert_eq!(guest.device.refusals().total(), 0);
        // Nothing of it went anywhere: it is in no balloon.
        let counters = guest.device.counters();
        assert_eq!((counters.inflated, counters.discards), (0, 0));
    }
}

#[test]
fn every_part_of_an_answer_with_more_runs_than_there_is_room_for_has_its_id() {
    let format = BulkFormat::BitmapRecords;
    let mut guest = Guest::new(settings(format));
    let high = Span::new(4 << 30, 1 << 30);
    guest.device.set_regions([Region::new(high)]).unwrap();
    buffer(&mut guest);
    let _ = guest.drain(Queue::Requests);
    let (id, _) = guest.request_unused().unwrap();
    // Every second page: nothing can be merged.
    let runs: Vec<Span<GuestAddr>> = (0..50_000)
        .map(|nr| Span::new(high.start + 8192 * nr, 4096))
        .collect();
    let page = GuestPage::SIZE_4K;
    let mut source = Source::new(runs.iter().copied(), page);
    let mut message = vec![0; 32_776];
    let used = format.encode(page, &mut source, &mut message).unwrap();
    let header = ResponseHeader {
        command: 0,
        flag: ResponseHeader::DONE,
        id,
        data_len: used as u32 - 8,
    };
    message[..8].copy_from_slice(&header.to_bytes());
    guest.send(Queue::Requests, &message[..used]);
    let _ = guest.drain(Queue::Requests);
    let acts = guest.acts();
    let (last, parts) = acts.split_last().unwrap();
    assert_eq!(*last, Act::Event(Event::UnusedEnd { id }));
    assert!(parts.len() > 1, "one part is enough for all of them");
    let mut found: Vec<Span<GuestAddr>> = Vec::new();
    for part in parts {
        match part {
            Act::Unused(of, runs) if *of == id => found.extend(runs),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found, runs);
}

#[test]
fn the_id_after_the_largest_is_1_and_a_driver_is_notified_when_it_wants_to_be() {
    let mut guest = Guest::new(settings(BulkFormat::Ranges));
    let mut state = guest.device.state();
    state.requests.latest = u16::MAX;
    guest.device.restore(&state).unwrap();
    let ring = &mut guest.rings[at(Queue::Requests)];
    ring.queue.set_event_idx(true);
    // VIRTIO_F_EVENT_IDX: behind the available ring stands which used entry the driver waits for.
    let used_event = GuestAddress(ring.avail() + 4 + 2 * u64::from(SIZE));
    for (id, event, notify) in [(1, 0u16, true), (2, 100, false), (3, 2, true)] {
        buffer(&mut guest);
        let _ = guest.drain(Queue::Requests);
        guest.memory.write_obj(event, used_event).unwrap();
        assert_eq!(guest.request_unused().unwrap(), (id, notify));
    }
}

#[test]
fn what_answers_no_request_is_refused() {
    let format = BulkFormat::Ranges;
    let run = [pages(3, 4)];
    let mut guest = Guest::new(settings(format));
    let refused = |guest: &mut Guest, expected: Refusal| {
        let drained = guest.drain(Queue::Requests);
        assert_eq!(drained.used, 1, "{expected:?}");
        assert_eq!(guest.device.refusals().latest(), Some(expected));
        assert_eq!(guest.acts(), []);
    };
    let message = |command, flag, id| {
        let mut message = bulk_messages(format, &run).remove(0);
        let data_len = message.len() as u32 - 8;
        let header = ResponseHeader {
            command,
            flag,
            id,
            data_len,
        };
        message[..8].copy_from_slice(&header.to_bytes());
        message
    };
    // Nobody has asked.
    guest.send(Queue::Requests, &message(0, 0, 1));
    refused(&mut guest, Refusal::Header { found: 1 << 16 });
    buffer(&mut guest);
    let _ = guest.drain(Queue::Requests);
    let (id, _) = guest.request_unused().unwrap();
    for (command, flag, other) in [(1, 0, id), (0, 2, id), (0, 0, id + 1), (0, 1, 0)] {
        guest.send(Queue::Requests, &message(command, flag, other));
        let found = u32::from(command) | u32::from(flag) << 8 | u32::from(other) << 16;
        refused(&mut guest, Refusal::Header { found });
    }
    guest.send(Queue::Requests, &[0; 7]);
    refused(&mut guest, Refusal::Length { bytes: 7, unit: 8 });
    // Buffers of no use, and one too many: the one before goes back.
    guest.chain(Queue::Requests, &[(BUFFER, 15, true)]);
    refused(
        &mut guest,
        Refusal::Length {
            bytes: 15,
            unit: 16,
        },
    );
    let head = guest.chain(Queue::Requests, &[(BUFFER, 8, true), (BUFFER, 8, true)]);
    refused(&mut guest, Refusal::Chain { head });
    buffer(&mut guest);
    let _ = guest.drain(Queue::Requests);
    let head = buffer(&mut guest);
    refused(&mut guest, Refusal::Spare { head });
    // A buffer that is no memory: there is none then.
    guest.chain(Queue::Requests, &[(20 << 20, 16, true)]);
    refused_place(&mut guest);

    // Of an answer, what is no memory of the guest is left out, and the rest is taken.
    buffer(&mut guest);
    let _ = guest.drain(Queue::Requests);
    let (id, _) = guest.request_unused().unwrap();
    let runs = [pages(1, 1), Span::new(20 << 20, 1 << 20)];
    answer(&mut guest, format, id, &runs);
    let _ = guest.drain(Queue::Requests);
    assert_eq!(
        guest.acts(),
        [
            Act::Unused(id, vec![runs[0]]),
            Act::Event(Event::UnusedEnd { id })
        ]
    );
    let latest = guest.device.refusals().latest();
    assert_eq!(latest, Some(Refusal::OutsideRam { run: runs[1] }));
    // It has ended: nothing more answers this request, or the one before.
    for over in [id, id - 1] {
        guest.send(Queue::Requests, &message(0, 0, over));
        let found = u32::from(over) << 16;
        refused(&mut guest, Refusal::Header { found });
    }
    // The driver begins anew: what it had given is forgotten.
    buffer(&mut guest);
    let _ = guest.drain(Queue::Requests);
    guest.device.reset();
    guest.device.negotiate(guest.device.features()).unwrap();
    assert!(matches!(guest.request_unused(), Err(QueueError::NoBuffer)));
}

fn refused_place(guest: &mut Guest) {
    let _ = guest.drain(Queue::Requests);
    assert!(matches!(guest.request_unused(), Err(QueueError::NoBuffer)));
    let (address, len) = (20 << 20, 16);
    let latest = guest.device.refusals().latest();
    assert_eq!(latest, Some(Refusal::Buffer { address, len }));
}
