//! Scalable mode: PASID tables, first and second stage.

use super::*;

fn first_stage(levels: u8) -> Root {
    Root {
        format: FormatId::X86_64,
        address: 0x9000,
        levels,
    }
}

#[test]
fn first_stage_tables_hang_in_the_pasid_entry() {
    let (driver, model) = unit(
        CAP | 1 << 56 | 1 << 60,
        ECAP | SCALABLE_BOTH,
        Mode::ScalableFirst,
    );
    let can = driver.capabilities();
    let support = can.format(FormatId::X86_64).unwrap();
    assert_eq!(support.levels, 1 << 4 | 1 << 5);
    assert_eq!(support.page_sizes.bits(), 1 << 12 | 1 << 21 | 1 << 30);
    assert!(can.dirty_tracking && !can.snoop_control);
    assert_eq!(can.format(FormatId::VtdSs), None);

    driver.enable().unwrap();
    assert_eq!(
        received(&model),
        [
            Received::Queue(true),
            Received::Root(driver.root() | 1 << 10),
            Received::Contexts(1, 0, 0),
            Received::Pasids(3, 0, 0),
            Received::Iotlb(1, 0, None),
            Received::Wait(0),
            Received::Translation(true),
        ]
    );
    // Functions of both halves of a bus.
    let upper = DeviceId::pci(3, 31, 7);
    driver.attach(DEVICE, DOMAIN, first_stage(4)).unwrap();
    driver.attach(upper, DomainId(8), first_stage(5)).unwrap();
    assert_eq!(model.look_up(SOURCE), Some((7, 0x9000, 4, true)));
    assert_eq!(model.look_up(0x03ff), Some((8, 0x9000, 5, true)));
    assert_eq!(model.look_up(0x03fe), None);
    assert_eq!(
        driver.attach(DEVICE, DOMAIN, first_stage(4)),
        Err(UnitAttachError::AlreadyAttached {
            device: DEVICE,
            domain: DOMAIN
        })
    );

    let what = Invalidation::of(Span::new(0xffff_8000_0000_0000, 0x20_0000), 2, false);
    driver.invalidate(DOMAIN, &what).unwrap();
    driver.detach(DEVICE).unwrap();
    assert_eq!(model.look_up(SOURCE), None);
    assert_eq!(
        received(&model),
        [
            Received::PasidIotlb(3, 7, 0, Some((0xffff_8000_0000_0000, 9, true))),
            Received::Wait(0),
            Received::Pasids(1, 7, 0),
            Received::PasidIotlb(2, 7, 0, None),
            Received::Wait(0),
        ]
    );
}

#[test]
fn second_stage_tables_too() {
    let ecap = ECAP | SCALABLE_BOTH | 1 << 45;
    let (driver, model) = enabled(CAP | CACHING_MODE, ecap, Mode::ScalableSecond);
    assert!(driver.capabilities().dirty_tracking);
    driver.attach(DEVICE, DOMAIN, root(0x5000, 3)).unwrap();
    assert_eq!(model.look_up(SOURCE), Some((7, 0x5000, 3, false)));
    driver.invalidate_domain(DOMAIN).unwrap();
    driver.detach(DEVICE).unwrap();
    assert_eq!(
        received(&model),
        [
            // In caching mode: that it was not there.
            Received::Contexts(3, 0, SOURCE),
            Received::Pasids(3, 0, 0),
            Received::Iotlb(2, 7, None),
            Received::Wait(0),
            Received::Iotlb(2, 7, None),
            Received::Wait(0),
            Received::Pasids(1, 7, 0),
            Received::Iotlb(2, 7, None),
            Received::Wait(0),
        ]
    );
}
