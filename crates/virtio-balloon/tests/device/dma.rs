//! The device with others that reach the guest's memory by themselves.

use crate::guest::{Act, FREE, Guest, HIGH, LOW, pages, pfn};
use runs::Span;
use virtio_balloon::device::{
    BalloonEvent, BalloonSettings, NegotiateError, PassthroughError, QueueError, Unrestored,
};
use virtio_balloon::{Features, KeepReason, Queue, WIRE_PAGE};

fn with_devices(unrestored: Unrestored) -> Guest {
    let settings = BalloonSettings {
        features: Features(0x3f),
        unrestored,
        ..BalloonSettings::default()
    };
    let mut guest = Guest::fresh(settings, WIRE_PAGE);
    guest.notes.borrow_mut().attached = true;
    guest.device.negotiate(guest.device.features()).unwrap();
    guest
}

#[test]
fn devices_let_go_before_memory_is_discarded_and_it_is_used_afterwards() {
    let mut guest = with_devices(Unrestored::Hold);
    guest.watch(Queue::Inflate);
    guest.pfns(Queue::Inflate, 0..4);
    guest.pfns(Queue::Inflate, [pfn(0), pfn(2)]);
    guest.pfns(Queue::Inflate, [pfn(1)]);
    let _ = guest.drain(Queue::Inflate);
    let runs = vec![Span::new(0, 4 * WIRE_PAGE), pages(0, 3)];
    assert_eq!(guest.notes.borrow().used, [0, 0], "nothing is used before");
    assert_eq!(
        guest.acts(),
        [Act::Release(runs.clone()), Act::Discard(runs)]
    );
    assert_eq!(guest.used(Queue::Inflate).len(), 3);

    guest.watch(Queue::Deflate);
    guest.pfns(Queue::Deflate, [pfn(0), pfn(1)]);
    guest.pfns(Queue::Deflate, [pfn(2)]);
    let _ = guest.drain(Queue::Deflate);
    assert_eq!(guest.notes.borrow().used, [0, 1], "a message at a time");
    assert_eq!(
        guest.acts(),
        [
            Act::Restore(vec![pages(0, 2)]),
            Act::Restore(vec![pages(2, 1)])
        ]
    );
}

#[test]
fn what_devices_keep_is_reported_and_not_discarded() {
    let mut guest = with_devices(Unrestored::Hold);
    let kept = [pages(0, 1), pages(5, 2), pages(9, 1)];
    guest.notes.borrow_mut().kept = kept.to_vec();
    guest.pfns(Queue::Inflate, (0..10).map(pfn));
    guest.mark(FREE + 5 * WIRE_PAGE, 0x55);
    let _ = guest.drain(Queue::Inflate);
    let reason = KeepReason::PinnedElsewhere;
    let mut expected = vec![Act::Release(vec![pages(0, 10)])];
    expected.extend(kept.map(|run| Act::Event(BalloonEvent::Kept { run, reason })));
    expected.push(Act::Discard(vec![pages(1, 4), pages(7, 2)]));
    assert_eq!(guest.acts(), expected);
    assert_eq!(guest.word(FREE + 5 * WIRE_PAGE), 0x55);
    let counters = guest.device.counters();
    assert_eq!(
        (counters.kept, counters.discarded),
        (4 * WIRE_PAGE, 6 * WIRE_PAGE)
    );
}

#[test]
fn a_message_whose_pages_devices_cannot_be_given_is_held() {
    let mut guest = with_devices(Unrestored::Hold);
    guest.pfns(Queue::Inflate, (0..8).map(pfn));
    let _ = guest.drain(Queue::Inflate);
    guest.acts();
    guest.notes.borrow_mut().lost = vec![pages(2, 1)];
    guest.pfns(Queue::Deflate, [pfn(0)]);
    let held = guest.pfns(Queue::Deflate, (1..4).map(pfn));
    guest.pfns(Queue::Deflate, [pfn(4)]);
    let drained = guest.drain(Queue::Deflate);
    assert_eq!((drained.used, drained.held, drained.more), (1, true, false));
    let lost = BalloonEvent::NotRestored {
        run: pages(2, 1),
        reason: KeepReason::Limit,
        then: Unrestored::Hold,
    };
    assert_eq!(guest.events(), [lost]);
    assert_eq!(guest.used(Queue::Deflate).len(), 1);
    // It stays so, and only what is missing is tried.
    assert!(guest.drain(Queue::Deflate).held);
    assert_eq!(
        guest.acts(),
        [Act::Restore(vec![pages(2, 1)]), Act::Event(lost)]
    );
    // The other queues go on.
    guest.pfns(Queue::Inflate, [pfn(20)]);
    assert_eq!(guest.drain(Queue::Inflate).used, 1);
    guest.acts();
    guest.notes.borrow_mut().lost.clear();
    let drained = guest.drain(Queue::Deflate);
    assert_eq!((drained.used, drained.held), (2, false));
    assert_eq!(guest.used(Queue::Deflate)[0], held);
    assert_eq!(
        guest.acts(),
        [
            Act::Restore(vec![pages(2, 1)]),
            Act::Restore(vec![pages(4, 1)])
        ]
    );
    assert_eq!(guest.device.counters().not_restored, 2 * WIRE_PAGE);
}

#[test]
fn a_message_is_handed_back_or_the_device_stops_where_the_policy_says_so() {
    let mut guest = with_devices(Unrestored::HandBack);
    guest.notes.borrow_mut().lost = vec![pages(0, 1)];
    guest.pfns(Queue::Deflate, [pfn(0)]);
    assert_eq!(guest.drain(Queue::Deflate).used, 1);
    assert_eq!(guest.events().len(), 1);

    let mut guest = with_devices(Unrestored::NeedsReset);
    guest.notes.borrow_mut().lost = vec![pages(0, 1)];
    guest.pfns(Queue::Deflate, [pfn(0)]);
    assert!(guest.drain(Queue::Deflate).held);
    assert!(matches!(
        guest.events()[..],
        [BalloonEvent::NotRestored { .. }, BalloonEvent::NeedsReset]
    ));
    assert!(guest.device.needs_reset());
    for queue in [Queue::Inflate, Queue::Deflate, Queue::Stats] {
        assert!(matches!(
            guest.try_drain(queue),
            Err(QueueError::NeedsReset)
        ));
    }
    // With the reset, devices are given everything back; here they lack a page of it.
    assert_eq!(guest.device.reset(), [pages(0, 1)]);
    guest.notes.borrow_mut().lost.clear();
    guest.acts();
    assert_eq!(guest.device.reset(), []);
    assert_eq!(guest.acts(), [Act::Restore(vec![LOW, HIGH])]);
    assert!(!guest.device.needs_reset() && guest.device.negotiated().is_none());
}

#[test]
fn with_devices_the_driver_must_tell_and_reports_are_not_offered() {
    let settings = BalloonSettings {
        features: Features(0x3f).without(Features::MUST_TELL_HOST),
        ..BalloonSettings::default()
    };
    let mut guest = Guest::fresh(settings, WIRE_PAGE);
    guest.notes.borrow_mut().attached = true;
    let offered = guest.device.features();
    assert!(offered.contains(Features::MUST_TELL_HOST), "required");
    for feature in [Features::PAGE_REPORTING, Features::FREE_PAGE_HINT] {
        assert!(!offered.contains(feature));
        let refused = NegotiateError::NotOffered { features: feature };
        let taken = offered.with(feature);
        assert_eq!(guest.device.negotiate(taken), Err(refused));
    }
    let untold = offered.without(Features::MUST_TELL_HOST);
    assert_eq!(
        guest.device.negotiate(untold),
        Err(NegotiateError::MustTellHost)
    );
    assert_eq!(guest.device.negotiate(offered), Ok(()));
}

#[test]
fn devices_cannot_be_attached_where_the_driver_uses_pages_without_a_word() {
    let settings = BalloonSettings {
        features: Features(0x3f),
        ..BalloonSettings::default()
    };
    let told = Features::MUST_TELL_HOST;
    for (features, expected) in [
        (
            told.with(Features::PAGE_REPORTING),
            Err(PassthroughError::Reporting),
        ),
        (
            told.with(Features::FREE_PAGE_HINT),
            Err(PassthroughError::Hinting),
        ),
        (Features::STATS_VQ, Err(PassthroughError::MustTellHost)),
        (told, Ok(())),
    ] {
        let mut guest = Guest::fresh(settings, WIRE_PAGE);
        guest.device.negotiate(features).unwrap();
        assert_eq!(guest.device.devices_attached(), expected);
        let offered = guest.device.features();
        let attached = expected.is_ok();
        assert_eq!(offered.contains(Features::PAGE_REPORTING), !attached);
    }
    // Before anything is negotiated devices may come, and what was read before is not taken.
    let mut guest = Guest::fresh(settings, WIRE_PAGE);
    let before = guest.device.features();
    assert_eq!(guest.device.devices_attached(), Ok(()));
    assert!(guest.device.negotiate(before).is_err());
    guest.device.devices_detached();
    assert_eq!(guest.device.negotiate(before), Ok(()));
}

#[test]
fn what_is_kept_of_a_region_says_nothing_of_another() {
    let (low, high) = (pages(0, 2), Span::new(HIGH.start + FREE, 2 * WIRE_PAGE));
    for (kept, gone) in [(high, low), (low, high)] {
        let mut guest = with_devices(Unrestored::Hold);
        guest.notes.borrow_mut().kept = vec![kept];
        guest.runs(Queue::Inflate, &[low, high]);
        let _ = guest.drain(Queue::Inflate);
        let reason = KeepReason::PinnedElsewhere;
        assert_eq!(
            guest.acts(),
            [
                Act::Release(vec![low, high]),
                Act::Event(BalloonEvent::Kept { run: kept, reason }),
                Act::Discard(vec![gone])
            ]
        );
    }
}
