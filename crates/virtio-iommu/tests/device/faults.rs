//! Faults of endpoints, as the driver receives them.

use iopt::walk::Access;
use virtio_iommu::wire::map_flags;
use virtio_iommu::{FaultReport, ReportReason, RingError, Status};

use crate::guest::{Guest, PAGE, SIZE, attach, map, pages};

fn fault(address: u64) -> FaultReport {
    FaultReport {
        reason: ReportReason::Mapping,
        endpoint: 8,
        access: Some(Access::Read),
        address: Some(address),
    }
}

#[test]
fn what_a_unit_notes_becomes_a_report_of_its_endpoint() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(
        guest.send(map(1, pages(1, 1), 0, map_flags::READ)),
        Some(Status::Ok)
    );
    assert_eq!(guest.read(8, 2 * PAGE), None);
    assert!(!guest.writes(8, PAGE + 8, 8));
    assert_eq!(guest.read(9, 3 * PAGE), None);
    let units = guest.device.back_end().units.clone();
    let faults: Vec<FaultReport> = guest
        .drain()
        .iter()
        .filter_map(|fault| Some(FaultReport::of(units.endpoint_of(fault.device)?, fault)))
        .collect();
    let expected = [
        (ReportReason::Mapping, 8, Access::Read, 2 * PAGE),
        (ReportReason::Mapping, 8, Access::Write, PAGE + 8),
        (ReportReason::Domain, 9, Access::Read, 3 * PAGE),
    ]
    .map(|(reason, endpoint, access, address)| FaultReport {
        reason,
        endpoint,
        access: Some(access),
        address: Some(address),
    });
    assert_eq!(faults, expected);
    for nr in 0..4 {
        guest.give(nr, 24);
    }
    let served = guest.tell(&faults).unwrap();
    assert_eq!((served.used, served.notify, served.more), (3, true, true));
    assert_eq!(guest.used(1), [(0, 24), (1, 24), (2, 24)]);
    for (nr, fault) in (0..).zip(&faults) {
        assert_eq!(guest.fault(nr), fault.to_bytes());
    }
    // The buffer that is left is for the next one.
    let served = guest.tell(&[fault(77)]).unwrap();
    assert_eq!((served.used, served.more), (1, false));
    assert_eq!(
        (guest.used(1), guest.fault(3)),
        (vec![(3, 24)], fault(77).to_bytes())
    );
    assert_eq!(
        (
            guest.device.counters().faults,
            guest.device.counters().dropped
        ),
        (4, 0)
    );
}

#[test]
fn without_a_buffer_a_fault_is_dropped_and_counted() {
    let mut guest = Guest::new();
    guest.give(0, 24);
    let faults: Vec<_> = (0..5).map(fault).collect();
    let served = guest.tell(&faults).unwrap();
    assert_eq!((served.used, guest.used(1).len()), (1, 1));
    assert_eq!(
        (
            guest.device.counters().faults,
            guest.device.counters().dropped
        ),
        (1, 4)
    );
    let served = guest.tell(&faults).unwrap();
    assert!(served.used == 0 && !served.notify);
    assert_eq!(guest.device.counters().dropped, 9);
}

#[test]
fn a_buffer_that_is_too_small_goes_back_and_the_next_is_taken() {
    let mut guest = Guest::new();
    guest.give(0, 23);
    guest.give(1, 0);
    guest.give(2, 32);
    let _ = guest.tell(&[fault(5)]).unwrap();
    assert_eq!(guest.used(1), [(0, 0), (1, 0), (2, 24)]);
    assert_eq!(guest.fault(2), fault(5).to_bytes());
    // As it was: nothing of the fault was written.
    assert_eq!(guest.fault(0), [0; 24]);
}

#[test]
fn a_buffer_that_is_no_buffer_goes_back() {
    let mut guest = Guest::new();
    let table = 0x1000;
    // Not to be written to, and not in memory.
    guest.descriptor(table, 0, (0x9000, 24), 0, 0);
    guest.descriptor(table, 1, (1 << 50, 24), crate::guest::F_WRITE, 0);
    guest.descriptor(
        table,
        2,
        (0x9000, 24),
        crate::guest::F_WRITE | crate::guest::F_NEXT,
        2,
    );
    // A part of it is not to be written to.
    guest.descriptor(table, 4, (0x9000, 8), crate::guest::F_NEXT, 5);
    guest.descriptor(table, 5, (0x9008, 24), crate::guest::F_WRITE, 0);
    for head in [0, 1, 2, SIZE, 9999, 4] {
        guest.offer(1, head);
    }
    guest.give(3, 24);
    let served = guest.tell(&[fault(5)]).unwrap();
    assert_eq!(served.used, 5);
    assert_eq!(guest.used(1), [(0, 0), (1, 0), (2, 0), (4, 0), (3, 24)]);
}

#[test]
fn faults_of_endpoints_that_are_not_known_are_not_reported() {
    let mut guest = Guest::new();
    guest.give(0, 24);
    let mut stranger = fault(5);
    stranger.endpoint = 77;
    let served = guest.tell(&[stranger, fault(6)]).unwrap();
    assert_eq!((served.used, guest.fault(0)), (1, fault(6).to_bytes()));
    assert_eq!(
        (
            guest.device.counters().faults,
            guest.device.counters().dropped
        ),
        (1, 1)
    );
}

#[test]
fn nothing_is_sent_before_features_are_negotiated() {
    let mut guest = Guest::new();
    assert!(guest.device.reset());
    assert!(matches!(
        guest.tell(&[fault(5)]),
        Err(RingError::NotNegotiated)
    ));
}
