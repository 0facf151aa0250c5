//! Bypass mode: endpoints that see the guest's memory at its own addresses.

use virtio_iommu::wire::{attach_flags, map_flags};
use virtio_iommu::{MemoryRegion, Status, VirtioIommuConfig};

use crate::guest::{
    ENDPOINTS, Guest, HIGH, LOW, NEXT, PAGE, REGISTERS, attach, attach_with, config, detach, map,
    pages,
};

const BYPASS: u32 = attach_flags::BYPASS;
const RW: u32 = map_flags::READ | map_flags::WRITE;
const ALL: u64 = LOW.len + NEXT.len + HIGH.len;

fn bypassing() -> Guest {
    let config = VirtioIommuConfig {
        bypass: Some(true),
        ..config()
    };
    Guest::with(config, iopt::FormatId::VtdSs)
}

/// The endpoint sees all of the guest's memory, and nothing else.
fn sees_all(guest: &Guest, endpoint: u32) -> bool {
    let places = [
        0,
        LOW.len - 8,
        NEXT.start,
        HIGH.start,
        HIGH.last() - 7,
        REGISTERS.start,
    ];
    let sees = places.map(|place| guest.read(endpoint, place) == Some(place));
    let behind = guest.read(endpoint, NEXT.last() + 1);
    assert!(
        sees.iter().all(|one| *one == sees[0]) && behind.is_none(),
        "{sees:?}"
    );
    assert_eq!(sees[0], guest.writes(endpoint, PAGE, PAGE));
    sees[0]
}

#[test]
fn endpoints_without_a_domain_reach_nothing_unless_bypass_says_so() {
    let mut guest = Guest::new();
    assert!(ENDPOINTS.iter().all(|id| !sees_all(&guest, *id)));
    guest.assert_all_back();
    guest.device.write_config(36, &[1]);
    assert!(ENDPOINTS.iter().all(|id| sees_all(&guest, *id)));
    assert_eq!((guest.pinned(), guest.ledger.in_use()), (ALL, ALL));
    // Neither other values nor other fields.
    guest.device.write_config(36, &[2]);
    guest.device.write_config(0, &[0; 36]);
    assert_eq!(guest.device.config()[36], 1);
    assert_eq!(guest.device.config()[1], 0xf0);
    // A driver may write more than the byte.
    guest.device.write_config(34, &[0xff, 0xff, 0, 0xff]);
    assert!(ENDPOINTS.iter().all(|id| !sees_all(&guest, *id)));
    guest.assert_all_back();
}

#[test]
fn bypass_does_not_depend_on_what_the_driver_accepts() {
    let mut guest = bypassing();
    guest
        .device
        .ack_features(virtio_iommu::features::MAP_UNMAP)
        .unwrap();
    assert!(sees_all(&guest, 8));
    guest.device.write_config(36, &[0]);
    assert_eq!(guest.device.config()[36], 1);
    assert!(sees_all(&guest, 8));
}

#[test]
fn a_domain_takes_an_endpoint_out_of_bypass_and_detach_brings_it_back() {
    let mut guest = bypassing();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert!(!sees_all(&guest, 8) && sees_all(&guest, 9));
    assert_eq!(guest.send(map(1, pages(7, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(
        (guest.read(8, 7 * PAGE), guest.read(9, 7 * PAGE)),
        (Some(0), Some(7 * PAGE))
    );
    assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok));
    assert!(sees_all(&guest, 8));
    // An attach that fails leaves it without a domain.
    guest.device.back_end().spaces = 0;
    assert_eq!(guest.send(attach(8, 1)), Some(Status::NoMem));
    assert!(sees_all(&guest, 8));
}

#[test]
fn a_bypass_domain_shows_everything_whatever_bypass_says() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach_with(8, 1, BYPASS)), Some(Status::Ok));
    assert_eq!(guest.send(attach_with(9, 1, BYPASS)), Some(Status::Ok));
    assert!(sees_all(&guest, 8) && sees_all(&guest, 9) && !sees_all(&guest, 16));
    // Out of it, and into one with mappings.
    assert_eq!(guest.send(detach(9, 1)), Some(Status::Ok));
    assert!(!sees_all(&guest, 9));
    assert_eq!(guest.send(attach(8, 2)), Some(Status::Ok));
    assert!(!sees_all(&guest, 8));
    assert_eq!(guest.device.domains().collect::<Vec<_>>(), [2]);
    assert_eq!(guest.pinned(), 0);
    assert!(guest.device.reset());
    guest.assert_all_back();
}

#[test]
fn the_guests_memory_stays_pinned_while_endpoints_move_within_bypass() {
    let mut guest = bypassing();
    for endpoint in ENDPOINTS {
        assert_eq!(
            guest.send(attach_with(endpoint, 1, BYPASS)),
            Some(Status::Ok)
        );
    }
    for endpoint in ENDPOINTS {
        assert_eq!(guest.send(detach(endpoint, 1)), Some(Status::Ok));
        assert!(sees_all(&guest, endpoint));
    }
    assert_eq!(guest.device.back_end().moves, ENDPOINTS.len());
}

#[test]
fn bypass_survives_a_reset_of_the_device_but_not_of_the_system() {
    let mut guest = Guest::new();
    guest.device.write_config(36, &[1]);
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert!(guest.device.reset());
    assert_eq!(guest.device.config()[36], 1);
    assert!(sees_all(&guest, 8));
    assert!(guest.device.reset_system());
    assert_eq!(guest.device.config()[36], 0);
    guest.assert_all_back();
}

#[test]
fn new_memory_is_seen_and_old_memory_is_given_back() {
    let mut guest = bypassing();
    let regions = guest.regions.clone();
    guest.device.set_memory(regions[1..].to_vec()).unwrap();
    assert_eq!(
        (guest.read(8, 0), guest.read(8, NEXT.start)),
        (None, Some(NEXT.start))
    );
    assert_eq!(guest.pinned(), ALL - LOW.len);
    guest.device.set_memory(regions.clone()).unwrap();
    assert!(sees_all(&guest, 8));
    // An invalid list of regions changes nothing.
    let twice = [
        &regions[..],
        &[MemoryRegion::new(PAGE, regions[2].memory.clone())],
    ]
    .concat();
    assert!(guest.device.set_memory(twice).is_err());
    let beyond = MemoryRegion::new(u64::MAX - PAGE, regions[2].memory.clone());
    assert!(guest.device.set_memory(vec![beyond]).is_err());
    assert!(sees_all(&guest, 8));
    assert_eq!(guest.device.memory().len(), 4);
}

#[test]
fn memory_that_cannot_be_pinned_for_bypass_is_reported() {
    let mut guest = Guest::new();
    let charge = guest.ledger.charge(PAGE).unwrap();
    guest.device.write_config(36, &[1]);
    let failed = std::mem::take(&mut guest.device.back_end().failed);
    assert_eq!(failed.len(), ENDPOINTS.len());
    assert_eq!(
        failed[0],
        "endpoint 8 is not in bypass mode, as it is to be"
    );
    assert!(ENDPOINTS.iter().all(|id| !sees_all(&guest, *id)));
    assert_eq!(guest.send(attach_with(8, 1, BYPASS)), Some(Status::NoMem));
    drop(charge);
    assert_eq!(guest.pinned(), 0);
    assert_eq!(guest.send(attach_with(8, 1, BYPASS)), Some(Status::Ok));
    assert!(sees_all(&guest, 8));
}
