//! PASIDs, and TLBs in devices.

use super::*;
use iopt::TableOps as _;

const PASIDS: Config = Config {
    pasid_bits: 8,
    ..CONFIG
};
const TLBS: Config = Config {
    device_tlbs: true,
    ..PASIDS
};
const PASID: Pasid = Pasid(0x83);
const TLB: DeviceTlb = DeviceTlb { queue_depth: 0 };

#[test]
fn address_spaces_of_a_device_come_and_go_in_any_order() {
    for two_levels in [false, true] {
        let mut ids = IDS;
        ids[0] = ids[0] & !(1 << 19) | u32::from(two_levels) << 19;
        let (driver, model) = enabled_with(ids, PASIDS);
        assert_eq!(driver.capabilities().pasid_bits, 8);
        for pasid in [None, Some(1), Some(PASID.0), Some(0xff)] {
            model.watch(STREAM, pasid);
        }
        let at = |pasid| found(model.look_up(STREAM, pasid));
        // A PASID before the device has anything else: requests without one find no table.
        driver
            .attach_pasid(DEVICE, PASID, DOMAIN, root(0x1000))
            .unwrap();
        assert_eq!(at(Some(PASID.0)), Some((7, root(0x1000))));
        assert_eq!((at(None), at(Some(1))), (None, None));
        model.received();
        // The entry of the stream is valid: only context descriptors are received, in two steps.
        driver.attach(DEVICE, DomainId(8), root(0x2000)).unwrap();
        let context = |number, leaf| Received::Context(STREAM, number, leaf);
        assert_eq!(
            model.received(),
            [
                context(0, false),
                Received::Sync,
                context(0, true),
                Received::Sync
            ]
        );
        driver
            .attach_pasid(DEVICE, Pasid(1), DomainId(9), root(0x3000))
            .unwrap();
        driver
            .attach_pasid(DEVICE, Pasid(0xff), DOMAIN, root(0x1000))
            .unwrap();
        assert_eq!(at(None), Some((8, root(0x2000))));
        assert_eq!(at(Some(1)), Some((9, root(0x3000))));
        assert_eq!(at(Some(0xff)), Some((7, root(0x1000))));
        model.received();
        driver.detach(DEVICE).unwrap();
        assert_eq!(
            model.received(),
            [context(0, true), Received::Sync, whole(8), Received::Sync]
        );
        driver.detach_pasid(DEVICE, Pasid(1)).unwrap();
        driver.detach_pasid(DEVICE, PASID).unwrap();
        assert_eq!(
            (at(None), at(Some(1)), at(Some(PASID.0))),
            (None, None, None)
        );
        assert_eq!(at(Some(0xff)), Some((7, root(0x1000))));
        model.received();
        // The last one takes the entry of the stream with it.
        driver.detach_pasid(DEVICE, Pasid(0xff)).unwrap();
        assert_eq!(
            model.received(),
            [
                Received::Stream(STREAM, true),
                Received::Sync,
                whole(7),
                Received::Sync
            ]
        );
        // All devices found nothing, or a table that they had.
        for ((_, pasid), looked) in model.seen() {
            let right = match pasid {
                None => (8, root(0x2000)),
                Some(1) => (9, root(0x3000)),
                _ => (7, root(0x1000)),
            };
            assert!(
                found(looked).is_none_or(|found| found == right),
                "{looked:?}"
            );
        }
    }
}

#[test]
fn pasids_are_refused_by_name() {
    let (driver, _) = enabled(PASIDS);
    let refused = |pasid, root| {
        driver
            .attach_pasid(DEVICE, pasid, DOMAIN, root)
            .unwrap_err()
    };
    for pasid in [Pasid(0), Pasid(0x100), Pasid(u32::MAX)] {
        let named = UnitAttachError::Pasid {
            device: DEVICE,
            pasid,
            bits: 8,
        };
        assert_eq!(refused(pasid, root(0x1000)), named);
        assert_eq!(driver.detach_pasid(DEVICE, pasid), Err(named));
    }
    let format = second(0x1000).format;
    assert_eq!(
        refused(PASID, second(0x1000)),
        UnitAttachError::Format { format }
    );
    let none = UnitAttachError::NotAttached { device: DEVICE };
    assert_eq!(driver.detach_pasid(DEVICE, PASID), Err(none));
    // One stage at a time.
    let other = UnitAttachError::OtherStage { device: DEVICE };
    driver.attach(DEVICE, DomainId(8), second(0x1000)).unwrap();
    assert_eq!(refused(PASID, root(0x1000)), other);
    assert_eq!(driver.detach_pasid(DEVICE, PASID), Err(none));
    driver.detach(DEVICE).unwrap();
    driver
        .attach_pasid(DEVICE, PASID, DOMAIN, root(0x1000))
        .unwrap();
    assert_eq!(
        driver.attach(DEVICE, DomainId(8), second(0x1000)),
        Err(other)
    );
    assert_eq!(
        refused(PASID, root(0x1000)),
        UnitAttachError::AlreadyAttached {
            device: DEVICE,
            domain: DOMAIN
        }
    );
    // Without PASIDs there are none.
    let (driver, model) = enabled(CONFIG);
    let bits = 0;
    let (device, pasid) = (DEVICE, Pasid(1));
    assert_eq!(
        driver.attach_pasid(DEVICE, pasid, DOMAIN, root(0x1000)),
        Err(UnitAttachError::Pasid {
            device,
            pasid,
            bits
        })
    );
    driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
    assert_eq!(model.look_up(STREAM, Some(1)), Err(0x08));
    model.received();
}

#[test]
fn tables_of_contexts_are_as_large_as_pasids_ask_and_come_back() {
    // Pages for one device with one PASID: a table of the first level, and one or two of the second.
    for (bits, level, pages) in [
        (0, 1, 1),
        (1, 1, 1),
        (6, 1, 1),
        (7, 1, 3),
        (20, 1, 34),
        (7, 0, 2),
        (10, 0, 16),
    ] {
        let mut ids = IDS;
        ids[0] = ids[0] & !(1 << 19) | level << 19;
        let memory = Arc::new(HeapTables::with_tables(256).unwrap());
        let model = Model::new(memory.clone(), ids);
        let config = Config {
            pasid_bits: bits,
            ..CONFIG
        };
        let driver = SmmuV3::new(model.clone(), memory.clone(), config).unwrap();
        driver.enable().unwrap();
        let before = memory.in_use();
        driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
        if let Some(last) = (1u32 << bits).checked_sub(1).filter(|last| *last > 0) {
            driver
                .attach_pasid(DEVICE, Pasid(last), DOMAIN, root(0x1000))
                .unwrap();
            assert_eq!(
                found(model.look_up(STREAM, Some(last))),
                Some((7, root(0x1000)))
            );
        }
        // A page of streams, and one for domains.
        assert_eq!(memory.in_use() - before, pages + 2, "{bits} bits");
        model.received();
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), 0);
    }
}

#[test]
fn a_device_tlb_is_invalidated_after_the_unit() {
    let (driver, model) = enabled(TLBS);
    assert!(driver.capabilities().device_tlbs);
    let tables = Arc::new(HeapTables::with_tables_at(64, 1 << 40).unwrap());
    let model = model.with_tables(tables.clone());
    let format = iopt::format::ArmStage1::<iopt::format::K4>::new(48, 48).unwrap();
    let mut table = iopt::Table::new(format, &*tables).unwrap();
    let memory = [Span::new(0x8000_0000, 0x8000)];
    table.map(0x10_0000, &memory, iopt::Prot::RW).unwrap();
    driver.set_device_tlb(DEVICE, Some(TLB)).unwrap();
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    driver
        .attach_pasid(DEVICE, PASID, DOMAIN, table.root())
        .unwrap();
    // Another device of the domain has no TLB.
    let other = DeviceId(5);
    driver.attach(other, DOMAIN, table.root()).unwrap();
    assert_eq!(model.translate_for_device(5, None, 0x10_0000), None);
    for pasid in [None, Some(PASID.0)] {
        for page in [0x10_0000, 0x10_1000] {
            let expected = Some(page - 0x10_0000 + 0x8000_0000);
            assert_eq!(model.translate_for_device(STREAM, pasid, page), expected);
        }
    }
    model.received();
    let mut gather = iopt::Gather::new();
    table
        .unmap(Span::new(0x10_1000, 0x1000), &mut gather, &mut iopt::NoRuns)
        .unwrap();
    let waits = driver.counters().waits;
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    table.reclaim(flushed);
    assert_eq!(driver.counters().waits, waits + 1);
    let received = model.received();
    assert!(matches!(received[0], Received::Pages(..)), "{received:?}");
    assert_eq!(
        received[1..],
        [
            Received::Sync,
            Received::Device(STREAM, None, 0x10_1000, 0),
            Received::Device(STREAM, Some(PASID.0), 0x10_1000, 0),
            Received::Sync
        ]
    );
    for pasid in [None, Some(PASID.0)] {
        assert_eq!(model.translate_for_device(STREAM, pasid, 0x10_1000), None);
        assert!(
            model
                .translate_for_device(STREAM, pasid, 0x10_0000)
                .is_some()
        );
    }
    // All of it, and what goes with a detach.
    driver.invalidate_domain(DOMAIN).unwrap();
    let all = |pasid| Received::Device(STREAM, pasid, 0, 52);
    assert_eq!(
        model.received(),
        [
            whole(7),
            Received::Sync,
            all(None),
            all(Some(PASID.0)),
            Received::Sync
        ]
    );
    driver.detach_pasid(DEVICE, PASID).unwrap();
    assert_eq!(
        model.received()[2..],
        [whole(7), Received::Sync, all(Some(PASID.0)), Received::Sync]
    );
    driver.detach(DEVICE).unwrap();
    assert_eq!(
        model.received()[2..],
        [whole(7), Received::Sync, all(None), Received::Sync]
    );
    assert_eq!(model.translate_for_device(STREAM, None, 0x10_0000), None);
    // Off again: the domain's flushes have one part only.
    driver.set_device_tlb(DEVICE, None).unwrap();
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    model.received();
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(model.received(), [whole(7), Received::Sync]);
    assert_eq!(model.translate_for_device(STREAM, None, 0x10_0000), None);
}

#[test]
fn device_tlbs_are_refused_by_name() {
    let (driver, _) = enabled(PASIDS);
    let none = UnitAttachError::NoDeviceTlbs { device: DEVICE };
    assert_eq!(driver.set_device_tlb(DEVICE, Some(TLB)), Err(none));
    assert_eq!(driver.set_device_tlb(DEVICE, None), Ok(()));
    let (driver, model) = enabled(TLBS);
    for attach in [None, Some(PASID)] {
        match attach {
            None => driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap(),
            Some(pasid) => driver
                .attach_pasid(DEVICE, pasid, DOMAIN, root(0x1000))
                .unwrap(),
        }
        for tlb in [None, Some(TLB)] {
            assert!(matches!(
                driver.set_device_tlb(DEVICE, tlb),
                Err(UnitAttachError::AlreadyAttached { .. })
            ));
        }
        match attach {
            None => driver.detach(DEVICE).unwrap(),
            Some(pasid) => driver.detach_pasid(DEVICE, pasid).unwrap(),
        }
    }
    // Said twice is said once.
    for tlb in [Some(TLB), Some(TLB), None, None] {
        driver.set_device_tlb(DEVICE, tlb).unwrap();
    }
    driver.attach(DEVICE, DOMAIN, second(0x1000)).unwrap();
    model.received();
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(model.received(), [Received::Vmid(7), Received::Sync]);
}
