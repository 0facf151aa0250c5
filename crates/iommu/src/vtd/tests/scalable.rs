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
    let (second, _) = unit(CAP, ECAP | SCALABLE_BOTH | 1 << 45, Mode::ScalableSecond);
    assert!(second.capabilities().dirty_tracking);

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
    model.received();
}
