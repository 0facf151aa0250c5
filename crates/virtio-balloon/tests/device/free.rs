//! Pages that are free: reports and hints.

use crate::guest::{Act, FREE, Guest, command, hint, pages, pfn};
use runs::{GuestAddr, Span};
use virtio_balloon::device::{BalloonEvent, BalloonSettings, HintError};
use virtio_balloon::{BalloonConfig, Features, KeepReason, Queue, WIRE_PAGE};

#[test]
fn reports_are_discarded_before_they_are_used() {
    let mut guest = Guest::new(BalloonSettings::default());
    guest.watch(Queue::Reporting);
    let block = |nr: u64| (FREE + nr * (2 << 20), 2 << 20, true);
    guest.chain(Queue::Reporting, &[block(1), block(0)]);
    guest.chain(Queue::Reporting, &[block(2)]);
    let drained = guest.drain(Queue::Reporting);
    assert_eq!((drained.used, drained.notify), (2, true));
    assert_eq!(guest.notes.borrow().used, [0]);
    assert_eq!(guest.discards(), [[Span::new(FREE, 6 << 20)]]);
    assert_eq!(guest.device.counters().reported, 6 << 20);
    // It is not in the balloon.
    assert_eq!(guest.device.counters().inflated, 0);
}

#[test]
fn what_a_guest_poisons_is_not_discarded_by_reports() {
    let poison = Features::PAGE_POISON;
    for (without, value, discarded) in [
        (Features(0), 0xaau32, false),
        (Features(0), 0, true),
        (poison, 0xaa, true),
    ] {
        let mut guest = Guest::without(BalloonSettings::default(), without);
        guest.device.write_config(12, &value.to_le_bytes());
        guest.chain(Queue::Reporting, &[(FREE, 2 << 20, true)]);
        assert_eq!(guest.drain(Queue::Reporting).used, 1);
        assert_eq!(!guest.discards().is_empty(), discarded, "{value:#x}");
        // Inflating goes on: the driver fills the pages again.
        guest.pfns(Queue::Inflate, [pfn(0)]);
        let _ = guest.drain(Queue::Inflate);
        assert_eq!(guest.discards(), [[pages(0, 1)]]);
    }
}

#[test]
fn what_a_guest_has_mapped_for_devices_is_not_discarded_by_reports() {
    let mut guest = Guest::new(BalloonSettings::default());
    guest.notes.borrow_mut().kept = vec![pages(3, 2)];
    guest.chain(Queue::Reporting, &[(FREE, 2 << 20, true)]);
    assert_eq!(guest.drain(Queue::Reporting).used, 1);
    let (run, reason) = (pages(3, 2), KeepReason::MappedByGuest);
    let expected = [
        Act::Event(BalloonEvent::Kept { run, reason }),
        Act::Discard(vec![pages(0, 3), pages(5, 507)]),
    ];
    assert_eq!(guest.acts(), expected);
    assert_eq!(guest.device.counters().kept, 2 * WIRE_PAGE);
}

fn with_hints() -> Guest {
    Guest::new(BalloonSettings {
        features: Features(0x3f),
        ..BalloonSettings::default()
    })
}

fn hinted(guest: &mut Guest) -> Vec<Vec<Span<GuestAddr>>> {
    let acts = guest.acts().into_iter();
    acts.filter_map(|act| match act {
        Act::Hinted(runs) => Some(runs),
        _ => None,
    })
    .collect()
}

#[test]
fn hints_are_taken_from_their_command_to_its_end() {
    let mut guest = with_hints();
    hint(&mut guest, 0);
    let _ = guest.drain(Queue::FreePage);
    assert_eq!(guest.acts(), [], "nobody has asked");

    let id = guest.device.start_hints().unwrap();
    assert_eq!(id, BalloonConfig::HINT_FIRST);
    assert_eq!(guest.acts(), [Act::ConfigChanged]);
    let mut config = [0; 16];
    guest.device.read_config(0, &mut config);
    assert_eq!(BalloonConfig::from_bytes(&config).free_page_hint_cmd_id, id);

    hint(&mut guest, 1);
    command(&mut guest, id);
    let runs = [hint(&mut guest, 0), hint(&mut guest, 2)];
    command(&mut guest, BalloonConfig::HINT_STOP);
    hint(&mut guest, 1);
    let drained = guest.drain(Queue::FreePage);
    assert_eq!((drained.used, drained.notify), (6, true));
    assert_eq!(
        guest.acts(),
        [
            Act::Event(BalloonEvent::HintsBegin { id }),
            Act::Hinted(runs.to_vec()),
            Act::Event(BalloonEvent::HintsEnd)
        ]
    );
    assert_eq!(guest.device.counters().hints_ignored, 3);
    assert_eq!(guest.device.counters().hinted, 4 << 20);

    // Stopped by the device: what the driver still sends is not taken, nor what it says.
    let id = guest.device.start_hints().unwrap();
    assert_eq!(id, BalloonConfig::HINT_FIRST + 1);
    command(&mut guest, id);
    let _ = guest.drain(Queue::FreePage);
    guest.device.stop_hints();
    hint(&mut guest, 0);
    command(&mut guest, id);
    hint(&mut guest, 0);
    let _ = guest.drain(Queue::FreePage);
    assert_eq!(hinted(&mut guest), Vec::<Vec<Span<GuestAddr>>>::new());

    // A new command goes on; an old one's hints are not taken.
    let next = guest.device.start_hints().unwrap();
    command(&mut guest, id);
    hint(&mut guest, 0);
    command(&mut guest, next);
    let run = hint(&mut guest, 1);
    let _ = guest.drain(Queue::FreePage);
    assert_eq!(hinted(&mut guest), [[run]]);

    guest.device.finish_hints();
    assert_eq!(guest.acts(), [Act::ConfigChanged]);
    hint(&mut guest, 1);
    let _ = guest.drain(Queue::FreePage);
    assert_eq!(hinted(&mut guest), Vec::<Vec<Span<GuestAddr>>>::new());
    guest.device.read_config(0, &mut config);
    let done = BalloonConfig::from_bytes(&config).free_page_hint_cmd_id;
    assert_eq!(done, BalloonConfig::HINT_DONE);
}

#[test]
fn hints_are_discarded_only_where_the_monitor_says_so() {
    for discard in [false, true] {
        let mut guest = with_hints();
        guest.notes.borrow_mut().discard_hints = discard;
        guest.watch(Queue::FreePage);
        let id = guest.device.start_hints().unwrap();
        command(&mut guest, id);
        let run = hint(&mut guest, 0);
        guest.mark(run.start, 7);
        let _ = guest.drain(Queue::FreePage);
        assert!(guest.notes.borrow().used.iter().all(|used| *used == 0));
        let expected = if discard { vec![vec![run]] } else { vec![] };
        assert_eq!(guest.discards(), expected);
        assert_eq!(guest.word(run.start) == 0, discard);
    }
}

#[test]
fn an_id_is_not_used_again_before_the_driver_has_stopped() {
    let mut guest = with_hints();
    let mut state = guest.device.state();
    state.hints.latest = u32::MAX - 1;
    guest.device.restore(&state).unwrap();
    assert_eq!(guest.device.start_hints(), Ok(u32::MAX));
    assert_eq!(guest.device.start_hints(), Err(HintError::Ids));
    command(&mut guest, BalloonConfig::HINT_STOP);
    let _ = guest.drain(Queue::FreePage);
    assert_eq!(guest.device.start_hints(), Ok(BalloonConfig::HINT_FIRST));

    let mut guest = Guest::new(BalloonSettings::default());
    assert_eq!(guest.device.start_hints(), Err(HintError::NotNegotiated));
}
