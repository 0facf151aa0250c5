//! TLBs in devices.

use std::string::ToString;

use iopt::format::AmdV1;
use iopt::{Gather, Table, TableOps as _};

use super::*;

const SERVED: Config = Config {
    device_tlbs: true,
    ..CONFIG
};
const DEPTH: DeviceTlb = DeviceTlb { queue_depth: 31 };

/// A device with a TLB, in the domain.
fn attached(config: Config) -> (Driver, Model) {
    let (driver, model) = enabled(config);
    driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    assert_eq!(model.received(), [Received::Device(SOURCE), Received::Wait]);
    (driver, model)
}

const fn in_device(address: u64, mask: u32) -> Received {
    Received::InDevice(SOURCE, 31, address, mask)
}

#[test]
fn pages_in_many_devices_become_one_command_each() {
    let (driver, model) = enabled(SERVED);
    let pair = Invalidation::of(Span::new(0xf000, 0x2000), 1, false);
    for (devices, each) in [(1..17, 2), (17..18, 1)] {
        for device in devices.clone() {
            let device = DeviceId(device);
            // Maxpend counts to 32, the register begins with 0 there.
            let all = DeviceTlb { queue_depth: 0 };
            driver.set_device_tlb(device, Some(all)).unwrap();
            driver.attach(device, DOMAIN, root(0x1000, 4)).unwrap();
        }
        model.received();
        driver.invalidate(DOMAIN, &pair).unwrap();
        let received = model.received();
        let device = |received: &&Received| matches!(received, Received::InDevice(_, 32, _, _));
        let count = received.iter().filter(device).count();
        assert_eq!(count as u32, (devices.end - 1) * each);
        let pages = received
            .iter()
            .filter(|received| matches!(received, Received::Pages(..)));
        assert_eq!(pages.count(), 2);
    }
}

#[test]
fn a_new_root_is_new_to_devices_too() {
    let (driver, model) = enabled(SERVED);
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(1).unwrap(), &tables).unwrap();
    driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    model.received();
    let mut gather = Gather::new();
    table.grow(2, &mut gather).unwrap();
    let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    table.reclaim(flushed.unwrap());
    assert_eq!(
        model.received(),
        [
            Received::Device(SOURCE),
            Received::Barrier,
            whole(7),
            Received::Barrier,
            in_device(0, 52),
            Received::Wait
        ]
    );
    assert!(model.serves_tlb(SOURCE));
}

#[test]
fn a_device_that_does_not_answer_fails_the_flush_by_name() {
    let config = Config {
        segment: 3,
        ..SERVED
    };
    let (driver, model) = enabled(config);
    let device = DeviceId(3 << 16 | DEVICE.0);
    driver.set_device_tlb(device, Some(DEPTH)).unwrap();
    driver.attach(device, DOMAIN, root(0x1000, 4)).unwrap();
    // An old one is no answer to this flush.
    model.event(7 << 60 | 0x100, 0);
    driver.invalidate_domain(DOMAIN).unwrap();
    model.state().broken.silent = true;
    let cause = UnitError::DeviceTimedOut { device };
    let failed = FlushError::Unit {
        domain: DOMAIN,
        cause,
    };
    for _ in 0..300 {
        assert_eq!(driver.invalidate_domain(DOMAIN), Err(failed));
        assert_eq!(
            driver.detach(device),
            Err(UnitAttachError::Unit { device, cause })
        );
        // The fault names it, too.
        let (faults, lost) = drain(&driver);
        assert!(faults.iter().any(|fault| fault.device == device));
        assert_eq!(lost, 0);
    }
    // Another domain has nothing to do with it.
    driver.invalidate_domain(DomainId(8)).unwrap();
    model.state().broken.silent = false;
    driver.detach(device).unwrap();
    driver.set_device_tlb(device, None).unwrap();
}

#[test]
fn what_a_log_cannot_tell_is_not_taken_for_an_answer() {
    let (driver, model) = attached(SERVED);
    for n in 0..300 {
        model.event(2 << 60, n << 12);
    }
    let failed = driver.invalidate_domain(DOMAIN).unwrap_err();
    assert!(failed.to_string().contains("EventLogRun = 0"), "{failed}");
    driver.invalidate_domain(DomainId(8)).unwrap();
    assert_eq!(drain(&driver).1, 1);
    driver.invalidate_domain(DOMAIN).unwrap();
    // An event that does not arrive may be the one.
    model.state().broken.silent = true;
    model.state().broken.late = true;
    let failed = driver.invalidate_domain(DOMAIN).unwrap_err();
    assert!(failed.to_string().contains("an event"), "{failed}");
}
