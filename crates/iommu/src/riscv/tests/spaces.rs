//! Address spaces by PASID, and TLBs of devices.

use iopt::format::RiscV;
use iopt::{Prot, Table, TableMapError, TableMemory, TableOps as _};

use super::*;

const PASID: Pasid = Pasid(5);

#[test]
fn the_last_process_takes_the_directory_along() {
    let config = Config {
        pasid_bits: 20,
        ..CONFIG
    };
    let (driver, model) = enabled(RICH, config);
    let before = driver.memory().in_use();
    let last = Pasid(0xf_ffff);
    for (pasid, domain, address) in [(PASID, OTHER, 0x2000), (last, DOMAIN, 0x1000)] {
        driver
            .attach_pasid(DEVICE, pasid, domain, root(address, 4))
            .unwrap();
    }
    // One goes, with accesses under way; the other stays.
    model.state().mapped.extend([(0x1000, 9), (0x2000, 9)]);
    model.state().busy = vec![(ID, Some(5), 9)];
    assert!(model.reaches(ID, Some(5), 9));
    driver.detach_pasid(DEVICE, PASID).unwrap();
    assert!(!model.reaches(ID, Some(5), 9));
    assert!(model.reaches(ID, Some(last.0.into()), 9));
    driver.detach_pasid(DEVICE, last).unwrap();
    // A page of the device directory.
    assert_eq!(driver.memory().in_use(), before + 1);
    // Then the device may have a second-stage table.
    driver.attach(DEVICE, DOMAIN, second(0x4000, 3)).unwrap();
    let guest = (Space::Gscid(7), 0x4000, 3, false);
    assert_eq!(model.look_up(ID, None), Some(guest));
}

#[test]
fn leaves_for_privileged_requests_are_reached_by_those_and_by_no_others() {
    let tables = Arc::new(HeapTables::with_tables_at(16, 1 << 40).unwrap());
    let format = RiscV::new(4).unwrap();
    let (all, privileged) = (Prot::RW, Prot::RW | Prot::PRIVILEGED);
    let page = [Span::new(1 << 30, 0x1000)];
    // Where no request has privilege there is no such leaf.
    let mut table = Table::new(format, &*tables).unwrap();
    let refused = table.map(0x6000, &page, privileged);
    let named = TableMapError::Prot {
        prot: privileged,
        format: FormatId::RiscV,
    };
    assert_eq!(refused, Err(named));
    let mut table = Table::new(format.with_supervisor_requests(true), &*tables).unwrap();
    table.map(0x5000, &page, all).unwrap();
    table.map(0x6000, &page, privileged).unwrap();
    for capabilities in [PLAIN, RICH] {
        let (driver, model) = enabled(capabilities, PROCESSES);
        model.state().tables = Some(tables.clone());
        driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
        driver
            .attach_pasid(DEVICE, PASID, DOMAIN, table.root())
            .unwrap();
        for (page, is_privileged) in [(5, false), (6, true)] {
            assert!(model.reaches_privileged(ID, 5, page));
            for process in [None, Some(5)] {
                assert_eq!(model.reaches(ID, process, page), !is_privileged);
            }
        }
        driver.detach_pasid(DEVICE, PASID).unwrap();
        assert!(!model.reaches_privileged(ID, 5, 5) && !model.reaches_privileged(ID, 5, 6));
    }
}

/// Section "Process to translate an IOVA": the process 0 is the default, and there is nothing else for requests
/// without a PASID that are to be translated.
#[test]
fn requests_with_pasid_0_are_blocked_wherever_the_unit_can_tell_them_from_those_without() {
    // No process directory: PDTV = 0 refuses all PASIDs.
    let (driver, model) = enabled(PLAIN, CONFIG);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    assert!(model.look_up(ID, None).is_some());
    assert_eq!(model.look_up(ID, Some(0)), None);
    let (driver, model) = enabled(PLAIN, PROCESSES);
    driver.attach(DEVICE, DOMAIN, second(0x4000, 4)).unwrap();
    assert!(model.look_up(ID, None).is_some());
    assert_eq!(model.look_up(ID, Some(0)), None);
    driver.detach(DEVICE).unwrap();
    // A directory, but nothing for requests without a PASID.
    driver
        .attach_pasid(DEVICE, PASID, OTHER, root(0x2000, 4))
        .unwrap();
    for process in [None, Some(0)] {
        assert_eq!(model.look_up(ID, process), None);
    }
    // Both: it is one space, but not for what only a request with a PASID can ask for.
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    model.state().mapped.extend([(0x1000, 5), (0x2000, 5)]);
    assert_eq!(model.look_up(ID, Some(0)), model.look_up(ID, None));
    assert!(model.reaches(ID, None, 5) && !model.reaches_privileged(ID, 0, 5));
    assert!(model.reaches_privileged(ID, 5, 5));
    driver.detach(DEVICE).unwrap();
    assert_eq!(model.look_up(ID, Some(0)), None);
}

#[test]
fn a_device_has_tables_of_one_stage_at_a_time() {
    let (driver, _) = enabled(PLAIN, PROCESSES);
    let refused = |driver: &Driver, pasid, root| {
        let attached = driver.attach_pasid(DEVICE, Pasid(pasid), OTHER, root);
        attached.unwrap_err()
    };
    let two = UnitAttachError::OtherStage { device: DEVICE };
    assert_eq!(refused(&driver, 5, second(0x4000, 3)), two);
    driver.attach(DEVICE, DOMAIN, second(0x4000, 3)).unwrap();
    assert_eq!(refused(&driver, 5, root(0x1000, 3)), two);
    driver.detach(DEVICE).unwrap();
    driver
        .attach_pasid(DEVICE, PASID, OTHER, root(0x1000, 3))
        .unwrap();
    let asked = second(0x4000, 3);
    assert_eq!(driver.attach(DEVICE, DOMAIN, asked), Err(two));
}

#[test]
fn a_process_without_memory_takes_nothing() {
    let (driver, model) = enabled(
        PLAIN,
        Config {
            pasid_bits: 20,
            ..CONFIG
        },
    );
    // The page for the device's context is there.
    driver.attach(DEVICE, DOMAIN, second(0x4000, 3)).unwrap();
    driver.detach(DEVICE).unwrap();
    let memory = driver.memory();
    let free = 64 - memory.in_use();
    let mut taken: Vec<_> = (0..free).map(|_| memory.allocate(4096).unwrap()).collect();
    for missing in 0..3 {
        let failed = driver.attach_pasid(DEVICE, PASID, OTHER, root(0x1000, 3));
        assert!(
            matches!(failed, Err(UnitAttachError::NoTables { .. })),
            "{failed:?}"
        );
        assert_eq!(memory.in_use(), 64 - missing);
        assert_eq!(model.look_up(ID, Some(5)), None);
        let mut chain = Chain::empty();
        chain.push(memory, taken.pop().unwrap());
        memory.reclaim(chain);
    }
    driver
        .attach_pasid(DEVICE, PASID, OTHER, root(0x1000, 3))
        .unwrap();
    assert!(model.look_up(ID, Some(5)).is_some());
}

/// Commands that detach a device with a TLB.
fn leaves(first: Received) -> [Received; 8] {
    let all = Received::Tlb(ID, false, None, (0, 52));
    let context = Received::Device(Some(ID));
    [
        first,
        Received::Fence,
        whole(7),
        Received::Fence,
        all,
        Received::Wait,
        context,
        Received::Wait,
    ]
}

const TLB: Option<DeviceTlb> = Some(DeviceTlb { queue_depth: 2 });

#[test]
fn a_devices_tlb_is_invalidated_after_the_unit() {
    for config in [CONFIG, PROCESSES] {
        let (driver, model) = enabled(PLAIN, config);
        driver.set_device_tlb(DEVICE, TLB).unwrap();
        // The least counts.
        let deeper = Some(DeviceTlb { queue_depth: 0 });
        driver.set_device_tlb(DeviceId(3), deeper).unwrap();
        driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
        model.received();

        // The device asks all the time, and keeps what it is answered.
        let page = (0x1000, 5);
        model.state().mapped.insert(page);
        model.state().busy = vec![(ID, None, 5)];
        assert!(model.reaches(ID, None, 5));
        model.state().mapped.remove(&page);
        let what = Invalidation::of(Span::new(0x5000, 0x1000), 1, false);
        driver.invalidate(DOMAIN, &what).unwrap();
        let leaf = Received::Table(Space::Pscid(7), Some(((0x5000, 0), false)));
        let tlb = |range| Received::Tlb(ID, false, None, range);
        assert_eq!(
            model.received(),
            [leaf, Received::Fence, tlb((0x5000, 0)), Received::Wait]
        );
        assert!(!model.reaches(ID, None, 5));

        // More than the device takes at a time: 3 ranges.
        let mut gather = iopt::Gather::new();
        let tables = HeapTables::with_tables(64).unwrap();
        let mut table = iopt::Table::new(iopt::format::RiscV::new(4).unwrap(), &tables).unwrap();
        for page in [0u64, 1, 4, 8, 12] {
            let memory = [Span::new(1 << 30 | page << 12, 0x1000)];
            table.map(page << 12, &memory, iopt::Prot::RW).unwrap();
        }
        for page in [0u64, 4, 8] {
            let page = Span::new(page << 12, 0x1000);
            table.unmap(page, &mut gather, &mut iopt::NoRuns).unwrap();
        }
        let flushed = gather
            .flush_with(|what| driver.invalidate(DOMAIN, what))
            .unwrap();
        table.reclaim(flushed);
        let received = model.received();
        let expected = [
            Received::Fence,
            tlb((0, 0)),
            tlb((0x4000, 0)),
            Received::Fence,
            tlb((0x8000, 0)),
            Received::Wait,
        ];
        assert_eq!(received[3..], expected);

        model.state().mapped.insert(page);
        assert!(model.reaches(ID, None, 5));
        driver.detach(DEVICE).unwrap();
        assert!(!model.reaches(ID, None, 5));
    }
}

#[test]
fn a_unit_without_ats_serves_no_tlb() {
    let (driver, _) = enabled(PLAIN & !(1 << 25), CONFIG);
    assert_eq!(
        driver.set_device_tlb(DEVICE, TLB),
        Err(UnitAttachError::NoDeviceTlbs { device: DEVICE })
    );
    assert_eq!(driver.set_device_tlb(DEVICE, None), Ok(()));
}

#[test]
fn a_detach_can_be_repeated_at_each_step_until_the_tlb_has_answered() {
    for config in [CONFIG, PROCESSES] {
        // Each command of a detach in turn is the one at which the unit stops.
        for at in 0..8 {
            let (driver, model) = enabled(PLAIN, config);
            driver.set_device_tlb(DEVICE, TLB).unwrap();
            driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
            model.state().mapped.insert((0x1000, 5));
            assert!(model.reaches(ID, None, 5));
            // Enabling was five.
            model.state().broken.stops = Some((1 << 8, 5 + at));
            let failed = driver.detach(DEVICE);
            assert!(matches!(failed, Err(UnitAttachError::Unit { .. })), "{at}");
            // Others of the domain may come and be flushed. The unit may forget at any time.
            model.state().broken.stops = None;
            model.state().contexts.clear();
            driver.attach(DeviceId(1), DOMAIN, root(0x1000, 4)).unwrap();
            driver.invalidate_domain(DOMAIN).unwrap();
            model.received();
            driver.detach(DEVICE).unwrap();
            let first = match config {
                CONFIG => Received::Device(Some(ID)),
                _ => Received::Process(ID, 0),
            };
            let all = leaves(first);
            let again = if at < 6 { &all[..] } else { &all[6..] };
            assert_eq!(model.received(), again, "{at}");
            assert!(!model.reaches(ID, None, 5));
            assert!(model.reaches(1, None, 5));
        }
    }
}

#[test]
fn enabling_again_invalidates_tlbs() {
    for (config, table) in [(CONFIG, second(0x4000, 3)), (PROCESSES, root(0x1000, 3))] {
        let (driver, model) = enabled(PLAIN, config);
        let before = driver.memory().in_use();
        driver.set_device_tlb(DEVICE, TLB).unwrap();
        driver.attach(DEVICE, DOMAIN, table).unwrap();
        assert!(driver.memory().in_use() - before >= 4, "an empty table");
        model.state().mapped.insert((table.address, 5));
        assert!(model.reaches(ID, None, 5));
        model.state().mapped.clear();
        driver.enable().unwrap();
        let received = model.received();
        let all = Received::Tlb(ID, false, None, (0, 52));
        assert!(received.ends_with(&[Received::Second, Received::Fence, all, Received::Wait]));
        assert!(!model.reaches(ID, None, 5));
        driver.detach(DEVICE).unwrap();
        let memory = driver.memory().clone();
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), 0);
    }
}
