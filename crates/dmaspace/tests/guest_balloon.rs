//! A balloon by guest addresses, over memory of this process that a device in software reaches.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::sync::Arc;

use dmaspace::{
    DeviceId, GuestAddr, GuestBalloon, GuestBalloonError, GuestRam, Ioas, Ledger, Pinner, Prot,
    SoftwareIommu, Span, WhenUnmapped,
};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const HIGH: u64 = 1 << 32;
const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

fn pages(first: u64, pages: u64) -> Span<GuestAddr> {
    Span::new(first * PAGE, pages * PAGE)
}

#[test]
fn a_guest_gives_up_memory_and_has_it_back() {
    let room = Pinner::of_process().unwrap().room().unwrap();
    if room.is_some_and(|room| room < 8 * MIB) {
        eprintln!("SKIPPED: too little may be locked here");
        return;
    }
    let iommu = SoftwareIommu::new().unwrap();
    let ledger = Ledger::new("a counter", Some(8 * MIB), 0);
    let space = Ioas::options().ledger(ledger.clone()).over(&iommu).unwrap();
    let space = Arc::new(space);
    space.attach(iommu.device(DEVICE)).unwrap();
    let regions = [(GuestAddress(0), 1 << 20), (GuestAddress(HIGH), 1 << 20)];
    let guest = GuestMemoryMmap::<()>::from_ranges(&regions).unwrap();
    let ram = space.map_guest(&guest, Prot::RW).unwrap();
    let charged = ledger.in_use();

    // Memory that is not mapped for devices is none of this balloon's.
    let none = GuestBalloon::new(&guest, &[] as &[GuestRam], [space.clone()]);
    assert!(matches!(none, Err(GuestBalloonError::NotMapped { region }) if region.start == 0));
    let mut balloon = GuestBalloon::new(&guest, [&ram], [space.clone()]).unwrap();

    // Each page has its number; a device model holds one of them.
    for page in 0..512 {
        let at = if page < 256 { 0 } else { HIGH - MIB };
        guest
            .write_obj(page, GuestAddress(at + page * PAGE))
            .unwrap();
    }
    let held = Span::new(12 * PAGE, PAGE);
    let pin = space.pin(held, Prot::READ, WhenUnmapped::Keeps).unwrap();

    // In no order, over both regions, and a run twice.
    let high = Span::new(HIGH + 8 * PAGE, 2 * PAGE);
    let runs = [high, pages(6, 2), pages(12, 1), pages(2, 5), pages(6, 2)];
    let mut kept = Vec::new();
    let back = balloon.inflate(&runs, &mut |run, why| kept.push((run, why)));
    assert_eq!(back.unwrap(), 8 * PAGE);
    let kept: Vec<_> = kept.iter().map(|(run, _)| *run).collect();
    assert_eq!(kept, [pages(12, 1)]);
    // The charge stays, so that the guest can have its memory back; parts of a huge page may count more than the whole.
    assert!(ledger.in_use() >= charged);
    let mut port = iommu.port(DEVICE);
    let mut read = |at| {
        let mut word = [0];
        port.read(at, &mut word).ok().map(|()| word[0])
    };
    let seen = [1, 2, 5, 7, 8, 12].map(|page| read(page * PAGE));
    assert_eq!(seen, [Some(1), None, None, None, Some(8), Some(12)]);
    assert_eq!(read(HIGH + 9 * PAGE), None);

    // A run that is no memory is refused, and nothing else of the message is done.
    let bad = [pages(20, 1), pages(255, 2)];
    let refused = balloon.inflate(&bad, &mut |_, _| ());
    assert!(matches!(refused, Err(GuestBalloonError::Refused(_))));
    assert_eq!(read(20 * PAGE), Some(20));

    // Back: zeros, for the guest and its device.
    let mut lacking = 0;
    balloon.deflate(&runs, &mut |_, _| lacking += 1).unwrap();
    assert_eq!(lacking, 0);
    let found: u64 = guest.read_obj(GuestAddress(3 * PAGE)).unwrap();
    assert_eq!((found, read(3 * PAGE)), (0, Some(0)));
    guest
        .write_obj(42u64, GuestAddress(HIGH + 9 * PAGE))
        .unwrap();
    assert_eq!(read(HIGH + 9 * PAGE), Some(42));
    drop((pin, balloon));
    Arc::into_inner(space).unwrap().close().unwrap();
    assert_eq!(ledger.in_use(), 0);
}
