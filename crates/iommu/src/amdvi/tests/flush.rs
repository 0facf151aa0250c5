//! Roots that grow.

use iopt::format::AmdV1;
use iopt::{Gather, Prot, Table, TableOps as _};

use super::*;

#[test]
fn a_table_that_has_grown_is_walked_from_its_new_root_by_all_devices_of_the_domain() {
    let (driver, model) = enabled(CONFIG);
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(1).unwrap(), &tables).unwrap();
    table
        .map(0, &[Span::new(0x9000, 0x1000)], Prot::RW)
        .unwrap();
    let old = table.root();
    // The first and the last of the table; another domain; one that is not attached any more.
    let devices = [0, SOURCE, 0x3ff];
    for device in devices {
        driver.attach(DeviceId(device.into()), DOMAIN, old).unwrap();
    }
    let (other, gone) = (DeviceId(5), DeviceId(6));
    driver.attach(other, DomainId(8), root(0x5000, 2)).unwrap();
    driver.attach(gone, DOMAIN, old).unwrap();
    driver.detach(gone).unwrap();
    for device in devices {
        assert_eq!(model.look_up(device), Some((7, old.address, 1)));
    }
    model.received();

    let mut gather = Gather::new();
    let new = table.grow(6, &mut gather).unwrap();
    model.state().broken.mute = true;
    let failed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    assert!(matches!(failed, Err(FlushError::Unit { .. })));
    model.state().broken.mute = false;
    model.received();
    // The stores are not visible to the unit yet; it is notified by the flush.
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    table.reclaim(flushed);
    assert_eq!(
        model.received(),
        [
            Received::Device(0),
            Received::Device(SOURCE),
            Received::Device(0x3ff),
            Received::Barrier,
            whole(7),
            Received::Wait
        ]
    );
    for device in devices {
        assert_eq!(model.look_up(device), Some((7, new.address, 6)));
    }
    assert_eq!(model.look_up(5), Some((8, 0x5000, 2)));
    assert_eq!(model.look_up(6), None);
    // A device that comes now comes to the new root.
    let refused = driver.attach(gone, DOMAIN, old);
    assert!(matches!(refused, Err(UnitAttachError::OtherRoot { .. })));
    driver.attach(gone, DOMAIN, new).unwrap();
}

#[test]
fn a_root_that_the_unit_cannot_walk_is_refused_and_the_old_one_stays() {
    let (driver, model) = unit(1 << 6, CONFIG);
    driver.enable().unwrap();
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(4).unwrap(), &tables).unwrap();
    table
        .map(0, &[Span::new(0x9000, 0x1000)], Prot::RW)
        .unwrap();
    let old = table.root();
    driver.attach(DEVICE, DOMAIN, old).unwrap();
    model.received();
    let mut gather = Gather::new();
    table.grow(5, &mut gather).unwrap();
    let refused = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap_err();
    let cause = UnitAttachError::Levels {
        format: FormatId::AmdV1,
        levels: 5,
        offered: 0b1_1110,
    };
    let domain = DOMAIN;
    assert_eq!(refused, FlushError::Root { domain, cause });
    assert_eq!(model.received(), []);
    assert_eq!(model.look_up(SOURCE), Some((7, old.address, 4)));
    let _ = gather.never_walked();
}
