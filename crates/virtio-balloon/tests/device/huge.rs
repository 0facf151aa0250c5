//! Memory that is backed by huge pages, and what a device knows that goes on elsewhere.

use crate::guest::{Act, Guest, HIGH, LOW, pages, pfn};
use runs::{GuestAddr, Span};
use virtio_balloon::device::{BalloonDevice, BalloonSettings, BalloonSetupError, BalloonState};
use virtio_balloon::{BadRegion, Features, Queue, Region, Stats, WIRE_PAGE};

const HUGE: u64 = 2 << 20;
/// Pages of a huge page.
const FULL: u64 = HUGE / WIRE_PAGE;

fn on_huge_pages(without: Features) -> Guest {
    let mut guest = Guest::fresh(BalloonSettings::default(), HUGE);
    let offered = guest.device.features();
    guest.device.negotiate(offered.without(without)).unwrap();
    guest
}

fn inflate(guest: &mut Guest, from: u64, to: u64) -> Vec<Vec<Span<GuestAddr>>> {
    guest.runs(Queue::Inflate, &[pages(from, to - from)]);
    let _ = guest.drain(Queue::Inflate);
    guest.discards()
}

fn deflate(guest: &mut Guest, from: u64, to: u64) {
    guest.runs(Queue::Deflate, &[pages(from, to - from)]);
    let _ = guest.drain(Queue::Deflate);
    guest.acts();
}

#[test]
fn a_huge_page_is_discarded_when_all_of_it_is_in_the_balloon() {
    let mut guest = on_huge_pages(Features(0));
    assert!(inflate(&mut guest, 10, FULL + 3).is_empty());
    assert_eq!(guest.device.waiting(), (FULL - 7) * WIRE_PAGE);
    // The rest of the first, and all but a page of the second.
    assert_eq!(inflate(&mut guest, 0, 10), [[pages(0, FULL)]]);
    deflate(&mut guest, 1, 2);
    assert!(inflate(&mut guest, FULL + 3, 2 * FULL - 1).is_empty());
    // Both become whole in one drain: one run.
    guest.pfns(Queue::Inflate, [pfn(2 * FULL - 1), pfn(1)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(0, 2 * FULL)]]);
    assert_eq!(guest.device.waiting(), 0);
}

#[test]
fn parts_of_huge_pages_are_remembered_only_where_the_driver_reports() {
    let mut guest = on_huge_pages(Features::MUST_TELL_HOST);
    assert!(inflate(&mut guest, 0, 500).is_empty());
    assert_eq!(guest.device.waiting(), 0);
    assert!(inflate(&mut guest, 500, FULL).is_empty(), "forgotten");
    // Within a drain no part is in use.
    for (from, to) in [(100, FULL), (0, 100)] {
        guest.runs(Queue::Inflate, &[pages(from, to - from)]);
    }
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(0, FULL)]]);

    let mut guest = on_huge_pages(Features(0));
    assert!(inflate(&mut guest, 0, 500).is_empty());
    assert_eq!(inflate(&mut guest, 500, FULL), [[pages(0, FULL)]]);
}

#[test]
fn reports_and_kept_parts_leave_huge_pages_whole() {
    let mut guest = on_huge_pages(Features(0));
    let whole = pages(FULL, FULL);
    let report = Span::<GuestAddr>::new(whole.start - 3 * WIRE_PAGE, HUGE + 5 * WIRE_PAGE);
    guest.chain(Queue::Reporting, &[(report.start, report.len as u32, true)]);
    let _ = guest.drain(Queue::Reporting);
    assert_eq!(guest.discards(), [[whole]]);

    // Devices keep a page: of its huge page nothing is given back.
    guest.notes.borrow_mut().kept = vec![pages(FULL + 7, 1)];
    guest.runs(Queue::Inflate, &[pages(0, 3 * FULL)]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[pages(0, FULL), pages(2 * FULL, FULL)]]);
}

#[test]
fn regions_need_not_be_whole_huge_pages() {
    let region = |start: u64, len: u64| Region {
        guest: Span::new(start, len),
        page: HUGE,
        memory: (),
    };
    let regions = [region(WIRE_PAGE, 3 * HUGE), region(HIGH.start, WIRE_PAGE)];
    let mut guest = on_huge_pages(Features(0));
    guest.device.set_regions(regions).unwrap();
    let small = Span::new(HIGH.start, 2 * WIRE_PAGE);
    guest.runs(Queue::Inflate, &[Span::new(HUGE, HUGE), small]);
    let _ = guest.drain(Queue::Inflate);
    assert_eq!(guest.discards(), [[Span::new(HUGE, HUGE)]]);
    assert_eq!(guest.device.refusals().total(), 1, "the rest of the second");

    for page in [0, 1, 4097, 2048] {
        let wrong = Region { page, ..regions[0] };
        let made = BalloonDevice::new(BalloonSettings::default(), [wrong], (), (), ());
        let error = BalloonSetupError::Region(BadRegion::Size { huge: page });
        assert_eq!(made.err(), Some(error));
    }
}

#[test]
fn a_device_goes_on_from_the_state_of_another() {
    let mut old = on_huge_pages(Features::PAGE_POISON);
    old.device.set_target(HUGE);
    assert!(inflate(&mut old, 10, FULL).is_empty());
    old.device.write_config(4, &7u32.to_le_bytes());
    old.send(Queue::Stats, &[0; 10]);
    let _ = old.drain(Queue::Stats);
    let state: BalloonState = old.device.state();

    let mut new = Guest::fresh(BalloonSettings::default(), HUGE);
    new.device.restore(&state).unwrap();
    assert_eq!(new.device.state(), state);
    assert_eq!(new.device.negotiated(), old.device.negotiated());
    assert_eq!(
        (new.device.target(), new.device.actual()),
        (HUGE, 7 * WIRE_PAGE)
    );
    assert_eq!(new.device.waiting(), (FULL - 10) * WIRE_PAGE);
    assert_eq!(inflate(&mut new, 0, 10), [[pages(0, FULL)]]);
    // The buffer for statistics is the new one's.
    assert!(new.request_stats().unwrap());
    assert_eq!(new.used(Queue::Stats).len(), 1);

    // Negotiated features must be offered there, too.
    let settings = BalloonSettings {
        features: Features::MUST_TELL_HOST,
        ..BalloonSettings::default()
    };
    let mut poor = Guest::fresh(settings, HUGE);
    assert!(poor.device.restore(&state).is_err());
    assert_eq!(poor.device.negotiated(), None);
}

#[test]
fn a_state_that_makes_no_sense_is_taken_as_far_as_it_does() {
    let mut guest = Guest::fresh(BalloonSettings::default(), HUGE);
    let mut state = on_huge_pages(Features(0)).device.state();
    state.partial[0].bits = vec![u64::MAX; 1 << 12];
    state.partial[1].region = Span::new(u64::MAX - 4095, 4096);
    state.partial[1].bits = vec![u64::MAX; 3];
    guest.device.restore(&state).unwrap();
    assert_eq!(guest.device.waiting(), 0, "all of it is whole");
    let saved = guest.device.state().partial;
    let set: u32 = saved[0].bits.iter().map(|word| word.count_ones()).sum();
    assert_eq!(u64::from(set), LOW.len / WIRE_PAGE);
    assert!(saved[1].bits.iter().all(|word| *word == 0));
}

#[test]
fn after_a_reset_nothing_is_in_the_balloon() {
    let mut guest = on_huge_pages(Features(0));
    guest.device.set_target(HUGE);
    assert!(inflate(&mut guest, 1, FULL).is_empty());
    guest.device.write_config(4, &511u32.to_le_bytes());
    guest.device.write_config(12, &7u32.to_le_bytes());
    guest.send(Queue::Stats, &[0; Stats::MOST_BYTES]);
    let _ = guest.drain(Queue::Stats);
    guest.acts();
    assert!(guest.device.reset().is_empty());
    assert_eq!(
        guest.acts(),
        [Act::Restore(vec![LOW, HIGH])],
        "devices see all"
    );
    let mut config = [0; 16];
    guest.device.read_config(0, &mut config);
    assert_eq!(
        config[..4],
        (FULL as u32).to_le_bytes(),
        "it is still wanted"
    );
    assert_eq!(config[4..], [0; 12]);
    assert!(guest.try_drain(Queue::Inflate).is_err());
    guest.device.negotiate(guest.device.features()).unwrap();
    assert!(guest.request_stats().is_err());
    assert!(inflate(&mut guest, 0, 1).is_empty());
}
