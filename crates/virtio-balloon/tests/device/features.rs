//! The device, feature by feature.

use crate::guest::{
    Act, FREE, Guest, bulk_messages, command, hint, in_bulk, pages, pfn, send_bulk,
};
use virtio_balloon::device::{
    BalloonDevice, BalloonEvent, BalloonSettings, BalloonSetupError, Bulk, NegotiateError,
    QueueError,
};
use virtio_balloon::{
    BULK_CONFIG_BYTES, BulkBit, ByteOrder, CONFIG_BYTES, Features, Numbering, Queue, Refusal,
    Region, Stats, Tag, WIRE_PAGE,
};

#[test]
fn runs_are_merged_across_the_messages_of_a_drained_queue() {
    let mut guest = Guest::new(BalloonSettings::default());
    // 512 pages in two messages, of which each has every second one.
    for odd in [1, 0] {
        guest.pfns(Queue::Inflate, (0..256).map(|nr| pfn(2 * nr + odd)));
    }
    guest.pfns(Queue::Inflate, [pfn(1000)]);
    guest.mark(FREE + 5 * WIRE_PAGE, 0x55);
    let drained = guest.drain(Queue::Inflate);
    assert_eq!(
        (drained.used, drained.notify, drained.more),
        (3, true, false)
    );
    assert_eq!(guest.used(Queue::Inflate).len(), 3);
    assert_eq!(guest.discards(), [[pages(0, 512), pages(1000, 1)]]);
    assert_eq!(guest.word(FREE + 5 * WIRE_PAGE), 0);
    let counters = guest.device.counters();
    assert_eq!((counters.discards, counters.chains), (2, 3));
    assert_eq!(counters.discarded, 513 * WIRE_PAGE);
    assert_eq!(guest.device.refusals().total(), 0);
}

#[test]
fn a_bitmap_becomes_one_discard_per_run() {
    let runs = [pages(3, 200), pages(300, 1), pages(302, 500)];
    let mut guest = Guest::new(in_bulk());
    send_bulk(&mut guest, Queue::Inflate, &runs);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [runs]);
    send_bulk(&mut guest, Queue::Deflate, &runs);
    let _ = guest.drain(Queue::Deflate);
    assert_eq!(guest.acts(), [Act::Restore(runs.to_vec())]);
    assert_eq!(guest.device.refusals().total(), 0);
}

#[test]
fn without_the_bulk_bit_queues_take_page_numbers() {
    let bulk = BulkBit::DEFAULT.feature();
    let mut guest = Guest::without(in_bulk(), bulk);
    guest.pfns(Queue::Inflate, [pfn(7)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(7, 1)]]);
    guest.pfns(Queue::Deflate, [pfn(7)]);
    let _ = guest.drain(Queue::Deflate);
    assert_eq!(guest.acts(), [Act::Restore(vec![pages(7, 1)])]);
    assert_eq!(guest.device.refusals().total(), 0);
}

#[test]
fn the_bulk_bit_is_offered_only_when_the_monitor_says_so() {
    let guest = Guest::fresh(BalloonSettings::default(), WIRE_PAGE);
    let device_bits = Features(0x00ff_ffff | 0xfffc << 48);
    let offered = guest.device.features();
    assert_eq!(offered.0 & device_bits.0 & !0x3f, 0, "{offered:?}");
    assert_eq!(guest.device.config_bytes(), CONFIG_BYTES);

    let bit = BulkBit::new(9).unwrap();
    let settings = BalloonSettings {
        bulk: Some(Bulk {
            bit,
            ..Bulk::default()
        }),
        ..BalloonSettings::default()
    };
    let guest = Guest::fresh(settings, WIRE_PAGE);
    assert_eq!(
        guest.device.features(),
        offered.with(bit.feature()),
        "this bit and no other"
    );
    assert_eq!(guest.device.config_bytes(), BULK_CONFIG_BYTES);
    let mut config = [0; BULK_CONFIG_BYTES];
    guest.device.read_config(0, &mut config);
    assert_eq!(config[16..], [1, 0, 0, 0, 8, 0x80, 0, 0]);
}

#[test]
fn a_longest_message_is_one_that_holds_a_record() {
    for (message_bytes, good) in [
        (0, false),
        (23, false),
        (24, true),
        (32_776, true),
        (32_777, false),
    ] {
        let mut settings = in_bulk();
        settings.bulk = settings.bulk.map(|bulk| Bulk {
            message_bytes,
            ..bulk
        });
        let none: [Region; 0] = [];
        let made = BalloonDevice::new(settings, none, (), (), ()).map(|_| ());
        let refused = BalloonSetupError::Message {
            bytes: message_bytes,
        };
        assert_eq!(made, if good { Ok(()) } else { Err(refused) });
    }
}

#[test]
fn every_feature_is_offered_and_no_other_can_be_taken() {
    let settings = BalloonSettings {
        features: Features(0x3f),
        ..BalloonSettings::default()
    };
    let mut guest = Guest::fresh(settings, WIRE_PAGE);
    let offered = guest.device.features();
    assert!(offered.contains(Features(0x3f)) && offered.contains(Features::VERSION_1));
    for bit in 0..64 {
        let feature = Features(1 << bit);
        let result = guest.device.negotiate(feature);
        if offered.contains(feature) {
            assert_eq!(result, Ok(()));
            assert_eq!(guest.device.negotiated(), Some(feature));
        } else {
            let refused = NegotiateError::NotOffered { features: feature };
            assert_eq!(result, Err(refused));
            assert_eq!(guest.device.negotiated(), None);
        }
    }
    let unknown = Features(1 << 6);
    let wrong = BalloonSettings {
        features: unknown,
        ..BalloonSettings::default()
    };
    let none: [Region; 0] = [];
    let made = BalloonDevice::new(wrong, none, (), (), ());
    assert_eq!(made.err(), Some(BalloonSetupError::Feature { unknown }));
}

#[test]
fn queues_have_the_numbers_of_either_way() {
    for (numbering, numbers, reporting) in [
        (Numbering::Compressed, 4, 2),
        (Numbering::Specification, 5, 4),
    ] {
        let settings = BalloonSettings {
            numbering,
            ..BalloonSettings::default()
        };
        let mut guest = Guest::without(settings, Features::STATS_VQ);
        let device = &mut guest.device;
        assert_eq!(device.queues(), numbers);
        assert_eq!(device.number(Queue::Reporting), Some(reporting));
        assert_eq!(device.queue(reporting), Some(Queue::Reporting));
        assert_eq!(device.number(Queue::Stats), None);
        assert_eq!(device.queue(1), Some(Queue::Deflate));
        assert!(matches!(
            guest.try_drain(Queue::Stats),
            Err(QueueError::NoQueue(Queue::Stats))
        ));
    }
    let mut guest = Guest::fresh(BalloonSettings::default(), WIRE_PAGE);
    assert_eq!(guest.device.queue(0), None);
    assert!(matches!(
        guest.try_drain(Queue::Inflate),
        Err(QueueError::NotNegotiated)
    ));
}

#[test]
fn a_target_is_set_and_progress_comes_back() {
    let mut guest = Guest::new(BalloonSettings::default());
    assert_eq!(guest.device.set_target((7 << 20) + 5), 7 << 20);
    assert_eq!(guest.acts(), [Act::ConfigChanged]);
    guest.device.set_target(7 << 20);
    assert_eq!(guest.acts(), [], "it is the same");
    let mut config = [0xff; 20];
    guest.device.read_config(0, &mut config);
    assert_eq!(config[..4], (7u32 << 8).to_le_bytes());
    assert_eq!(config[4..], [0; 16], "and nothing behind the end");

    guest.device.write_config(4, &0x100u32.to_le_bytes());
    let event = BalloonEvent::Progress {
        target: 7 << 20,
        actual: 1 << 20,
    };
    assert_eq!(guest.events(), [event]);
    assert_eq!(guest.device.actual(), 1 << 20);
    // Byte by byte, as legacy drivers do; and to fields that are not theirs.
    for (nr, byte) in 0x200u32.to_le_bytes().into_iter().enumerate() {
        guest.device.write_config(4 + nr as u64, &[byte]);
    }
    guest.device.write_config(0, &[0xff; 4]);
    guest.device.write_config(u64::MAX, &[0xff; 4]);
    assert_eq!(guest.events().len(), 1);
    assert_eq!(
        (guest.device.actual(), guest.device.target()),
        (2 << 20, 7 << 20)
    );
    assert_eq!(guest.device.set_target(u64::MAX), (1 << 44) - 4096);
}

fn stats(values: impl Fn(Tag) -> u64) -> (Stats, Vec<u8>) {
    let mut stats = Stats::default();
    Tag::ALL
        .into_iter()
        .for_each(|tag| stats.set(tag, values(tag)));
    let mut buffer = [0; Stats::MOST_BYTES];
    let used = stats.encode(&mut buffer, ByteOrder::Little);
    (stats, buffer[..used].to_vec())
}

#[test]
fn a_buffer_of_statistics_is_held_until_it_is_asked_for() {
    let mut guest = Guest::new(BalloonSettings::default());
    assert!(matches!(guest.request_stats(), Err(QueueError::NoBuffer)));
    let (first, message) = stats(|tag| tag.number().into());
    let head = guest.send(Queue::Stats, &message);
    let drained = guest.drain(Queue::Stats);
    assert_eq!((drained.used, drained.notify), (0, false));
    let told = |stats, asked| Act::Stats(Box::new(stats), asked);
    assert_eq!(guest.acts(), [told(first, false)]);
    assert!(guest.used(Queue::Stats).is_empty());

    for round in 1..200 {
        assert!(guest.request_stats().unwrap());
        assert_eq!(guest.used(Queue::Stats).len(), 1);
        assert!(
            matches!(guest.request_stats(), Err(QueueError::NoBuffer)),
            "the answer is not there"
        );
        let (answer, message) = stats(|tag| round << 32 | u64::from(tag.number()));
        guest.send(Queue::Stats, &message);
        let _ = guest.drain(Queue::Stats);
        assert_eq!(guest.acts(), [told(answer, true)]);
    }
    assert_eq!(guest.device.refusals().total(), 0);

    // A second buffer: the first goes back, and the device has one.
    let extra = guest.send(Queue::Stats, &message);
    let drained = guest.drain(Queue::Stats);
    assert_eq!((drained.used, drained.notify), (1, true));
    assert_eq!(
        guest.device.refusals().latest(),
        Some(Refusal::Spare { head: extra })
    );
    guest.request_stats().unwrap();
    assert_eq!(guest.used(Queue::Stats), [extra - 1, extra]);
    let _ = head;
}

#[test]
fn the_first_statistics_of_a_legacy_driver_are_not_read() {
    let settings = BalloonSettings {
        legacy_order: ByteOrder::Big,
        ..BalloonSettings::default()
    };
    let mut guest = Guest::without(settings, Features::VERSION_1);
    guest.send(Queue::Stats, &[0xaa; 160]);
    let _ = guest.drain(Queue::Stats);
    assert_eq!(guest.acts(), []);
    guest.request_stats().unwrap();
    let (stats, _) = stats(|tag| tag.number().into());
    let mut big = [0; Stats::MOST_BYTES];
    stats.encode(&mut big, ByteOrder::Big);
    guest.send(Queue::Stats, &big);
    let _ = guest.drain(Queue::Stats);
    assert_eq!(guest.acts(), [Act::Stats(Box::new(stats), true)]);
}

#[test]
fn page_numbers_of_a_legacy_driver_are_in_its_byte_order() {
    let settings = BalloonSettings {
        legacy_order: ByteOrder::Big,
        ..BalloonSettings::default()
    };
    let big: Vec<u8> = [pfn(3), pfn(4), pfn(9)]
        .iter()
        .flat_map(|pfn| (*pfn as u32).to_be_bytes())
        .collect();
    let mut guest = Guest::without(settings, Features::VERSION_1);
    guest.send(Queue::Inflate, &big);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(3, 2), pages(9, 1)]]);
    guest.send(Queue::Deflate, &big);
    let _ = guest.drain(Queue::Deflate);
    assert_eq!(guest.device.counters().deflated, 3 * WIRE_PAGE);
    assert_eq!(guest.device.refusals().total(), 0);
    // One of the standard is little-endian whatever the setting says.
    let mut guest = Guest::new(settings);
    guest.pfns(Queue::Inflate, [pfn(3)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(3, 1)]]);
}

#[test]
fn what_the_machine_does_not_take_is_reported() {
    let mut guest = Guest::new(BalloonSettings::default());
    guest.notes.borrow_mut().stuck = vec![pages(1, 2)];
    guest.pfns(Queue::Inflate, (0..4).map(pfn));
    let drained = guest.drain(Queue::Inflate);
    assert_eq!(drained.used, 1);
    assert!(matches!(
        guest.events()[..],
        [BalloonEvent::NotDiscarded { run, .. }] if run == pages(1, 2)
    ));
    assert_eq!(guest.device.counters().not_discarded, 2 * WIRE_PAGE);
}

#[test]
fn inflating_and_hinting_share_no_buffer() {
    // A round of hints in the midst of inflating in bulk: each queue has its own messages, in its own
    // form, and what is hinted is neither in the balloon nor discarded.
    let settings = BalloonSettings {
        features: Features(0x3f),
        ..in_bulk()
    };
    let mut guest = Guest::new(settings);
    let id = guest.device.start_hints().unwrap();
    command(&mut guest, id);
    let free = hint(&mut guest, 2);
    let taken = [pages(0, 130)];
    send_bulk(&mut guest, Queue::Inflate, &taken);
    hint(&mut guest, 1);
    // A message for inflateq on free_page_vq is none there.
    let strayed = bulk_messages(&taken).remove(0);
    guest.send(Queue::FreePage, &strayed);
    guest.acts();
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [taken]);
    let _ = guest.drain(Queue::FreePage);
    let acts = guest.acts();
    assert!(matches!(&acts[1], Act::Hinted(runs) if runs.contains(&free)));
    assert!(!acts.iter().any(|act| matches!(act, Act::Discard(_))));
    assert_eq!(guest.device.counters().inflated, 130 * WIRE_PAGE);
    assert!(matches!(
        guest.device.refusals().latest(),
        Some(Refusal::TooLong { most: 4, .. })
    ));
}
