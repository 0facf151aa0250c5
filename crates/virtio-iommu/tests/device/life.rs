//! Endpoints and domains: how they come, move and go.

use iommu::DeviceId;
use runs::Span;
use virtio_iommu::wire::map_flags;
use virtio_iommu::{ConfigError, EndpointConfig, ReservedKind, ReservedMemory, RingError, Status};

use crate::guest::{
    Guest, PAGE, PROBE_BYTES, attach, config, detach, map, pages, try_device, unmap,
};

const RW: u32 = map_flags::READ | map_flags::WRITE;

#[test]
fn endpoints_of_a_domain_see_the_same_and_others_do_not() {
    let mut guest = Guest::new();
    for (endpoint, domain) in [(8, 1), (9, 1), (16, 2)] {
        assert_eq!(guest.send(attach(endpoint, domain)), Some(Status::Ok));
    }
    assert_eq!(guest.send(map(1, pages(1, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(
        guest.send(map(2, pages(1, 1), 8 * PAGE, RW)),
        Some(Status::Ok)
    );
    let read = |guest: &Guest| [8, 9, 16].map(|endpoint| guest.read(endpoint, PAGE));
    assert_eq!(read(&guest), [Some(0), Some(0), Some(8 * PAGE)]);
    // The first leaves, and the domain stays; then it ends with the second.
    assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok));
    assert_eq!(read(&guest), [None, Some(0), Some(8 * PAGE)]);
    assert_eq!(guest.pinned(), 2 * PAGE);
    assert_eq!(guest.send(detach(9, 1)), Some(Status::Ok));
    assert_eq!(guest.pinned(), PAGE);
    // Its number is free for another domain, in which nothing is mapped.
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(read(&guest), [None, None, Some(8 * PAGE)]);
    assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(detach(16, 2)), Some(Status::Ok));
    guest.assert_all_back();
}

#[test]
fn an_attach_elsewhere_detaches_first_and_one_to_the_same_domain_changes_nothing() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(1, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(
        (guest.read(8, PAGE), guest.device.back_end().moves),
        (Some(0), 1)
    );
    assert_eq!(guest.send(attach(8, 2)), Some(Status::Ok));
    assert_eq!((guest.read(8, PAGE), guest.pinned()), (None, 0));
    assert_eq!(guest.device.domains().collect::<Vec<_>>(), [2]);
    assert_eq!(guest.send(unmap(1, pages(1, 1))), Some(Status::NoEnt));
}

#[test]
fn an_endpoint_finds_what_was_mapped_before_it_came() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(9, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(1, 3), 0, RW)), Some(Status::Ok));
    assert_eq!(guest.send(attach(16, 1)), Some(Status::Ok));
    assert_eq!(guest.read(16, 3 * PAGE), Some(2 * PAGE));
    // A range reserved for one of them is reserved for all.
    assert_eq!(guest.send(map(1, pages(5, 1), 0, RW)), Some(Status::Inval));
    assert_eq!(guest.send(detach(16, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(5, 1), 0, RW)), Some(Status::Ok));
}

#[test]
fn a_reset_gives_everything_back() {
    let mut guest = Guest::new();
    for (endpoint, domain) in [(8, 1), (9, 2), (16, 2)] {
        assert_eq!(guest.send(attach(endpoint, domain)), Some(Status::Ok));
        let range = Span::new(u64::from(endpoint) << 30, 64 * PAGE);
        assert_eq!(guest.send(map(domain, range, 0, RW)), Some(Status::Ok));
    }
    assert!(guest.pinned() > 0 && guest.tables.in_use() > 0);
    assert!(guest.device.reset());
    guest.assert_all_back();
    assert_eq!(guest.device.negotiated(), None);
    assert!(matches!(guest.serve(), Err(RingError::NotNegotiated)));
    // It goes on as a fresh one.
    guest.device.ack_features(guest.device.features()).unwrap();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert!(guest.device.back_end().failed.is_empty());
}

#[test]
fn after_a_reset_that_an_endpoint_does_not_follow_nothing_goes_on() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(1, 1), 0, RW)), Some(Status::Ok));
    guest.device.back_end().no_detach = Some(8);
    assert!(!guest.device.reset() && guest.device.needs_reset());
    assert_eq!(
        guest.device.back_end().failed,
        ["endpoint 8 still reaches memory that it must not reach"]
    );
    guest.device.ack_features(guest.device.features()).unwrap();
    assert!(matches!(guest.serve(), Err(RingError::NeedsReset)));
    // Its memory stays pinned as long as it can reach it.
    assert_eq!((guest.read(8, PAGE), guest.pinned()), (Some(0), PAGE));
    guest.device.back_end().no_detach = None;
    assert!(guest.device.reset() && !guest.device.needs_reset());
    guest.assert_all_back();
}

#[test]
fn an_endpoint_that_stays_in_bypass_stops_the_device() {
    let mut guest = Guest::new();
    guest.device.write_config(36, &[1]);
    guest.device.back_end().no_detach = Some(9);
    guest.device.write_config(36, &[0]);
    assert!(guest.device.needs_reset());
    assert!(matches!(guest.serve(), Err(RingError::NeedsReset)));
    guest.device.back_end().no_detach = None;
    assert!(guest.device.reset());
    guest.assert_all_back();
}

#[test]
fn endpoints_are_plugged_in_and_out() {
    let mut guest = Guest::new();
    let (unit, device) = (guest.unit.clone(), DeviceId(20));
    guest.device.back_end().units.insert(20, unit, device);
    assert_eq!(guest.send(attach(20, 1)), Some(Status::NoEnt));
    guest.device.add_endpoint(&EndpointConfig::new(20)).unwrap();
    let twice = guest.device.add_endpoint(&EndpointConfig::new(20));
    assert_eq!(twice, Err(ConfigError::Endpoint { id: 20 }));
    assert_eq!(guest.send(attach(20, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(1, 1), 0, RW)), Some(Status::Ok));
    assert!(guest.device.remove_endpoint(20));
    assert!(!guest.device.remove_endpoint(20));
    assert_eq!(guest.send(attach(20, 1)), Some(Status::NoEnt));
    guest.assert_all_back();
    assert_eq!(guest.device.back_end().units.endpoint_of(device), Some(20));
}

#[test]
fn a_device_that_is_dropped_gives_everything_back() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(1, 9), 0, RW)), Some(Status::Ok));
    let Guest {
        device,
        ram,
        ledger,
        unit,
        ..
    } = guest;
    drop(device);
    assert_eq!((ram[0].pinned(), ledger.in_use()), (0, 0));
    assert!(unit.port(DeviceId(8)).read(PAGE, &mut [0]).is_err());
}

#[test]
fn what_is_no_device_is_refused_by_name() {
    let reserved = |range| ReservedMemory {
        kind: ReservedKind::Reserved,
        range,
    };
    let try_endpoint = |parts: Vec<ReservedMemory>| {
        let mut config = config();
        config.endpoints.push(EndpointConfig {
            id: 30,
            reserved: parts,
        });
        try_device(config).map(|_| ()).unwrap_err()
    };
    let msi = ReservedMemory::X86_MSI;
    assert_eq!(
        try_endpoint(vec![msi.clone(), msi]),
        ConfigError::Msi { id: 30 }
    );
    let overlap = try_endpoint(vec![reserved(8..=9), reserved(0..=8)]);
    assert_eq!(overlap, ConfigError::Overlap { id: 30, at: 8 });
    let many = (0..4).map(|nr| reserved(nr..=nr)).collect();
    let room = PROBE_BYTES;
    assert_eq!(
        try_endpoint(many),
        ConfigError::Probe {
            id: 30,
            needed: 96,
            room
        }
    );
    let mut twice = config();
    twice.endpoints.push(EndpointConfig::new(8));
    assert_eq!(
        try_device(twice).unwrap_err(),
        ConfigError::Endpoint { id: 8 }
    );
    let mut range = config();
    #[allow(clippy::reversed_empty_ranges, reason = "it is refused")]
    let reversed = 9..=8;
    range.domains = Some(reversed);
    let refused = try_device(range).unwrap_err();
    assert_eq!(refused, ConfigError::Range { first: 9, last: 8 });
}
