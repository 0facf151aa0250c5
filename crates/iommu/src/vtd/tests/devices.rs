//! TLBs in devices.

use super::*;

const DEPTH: DeviceTlb = DeviceTlb { queue_depth: 31 };

fn table(mode: Mode) -> Root {
    Root {
        format: match mode {
            Mode::Legacy | Mode::ScalableSecond => FormatId::VtdSs,
            Mode::ScalableFirst => FormatId::X86_64,
        },
        address: 0x1000,
        levels: 4,
    }
}

/// Pages, or everything, in the unit's IOTLB.
fn in_unit(mode: Mode, pages: Option<(u64, u32, bool)>) -> Received {
    let granularity = if pages.is_some() { 3 } else { 2 };
    match mode {
        Mode::Legacy | Mode::ScalableSecond => Received::Iotlb(granularity, 7, pages),
        Mode::ScalableFirst => Received::PasidIotlb(granularity, 7, 0, pages),
    }
}

#[test]
fn what_the_unit_invalidates_the_device_invalidates_after_it() {
    for mode in [Mode::Legacy, Mode::ScalableSecond, Mode::ScalableFirst] {
        let (driver, model) = enabled(CAP, ECAP | SCALABLE_BOTH | DEVICE_TLBS, mode);
        assert!(driver.capabilities().device_tlbs);
        driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
        // Nobody knows the device yet.
        assert_eq!(received(&model), []);
        driver.attach(DEVICE, DOMAIN, table(mode)).unwrap();
        assert!(model.look_up(SOURCE).is_some() && model.serves_tlb(SOURCE));
        // Another one of the domain, without.
        let plain = DeviceId::pci(3, 0, 0);
        driver.attach(plain, DOMAIN, table(mode)).unwrap();
        assert!(!model.serves_tlb(0x0300));
        let pair = Invalidation::of(Span::new(0xf000, 0x2000), 1, false);
        let eight = Invalidation::of(Span::new(0x8000, 0x8000), 1, true);
        driver.invalidate(DOMAIN, &pair).unwrap();
        driver.invalidate(DOMAIN, &eight).unwrap();
        driver.invalidate_domain(DOMAIN).unwrap();
        let device = |address, mask| Received::Device(SOURCE, 0, 31, address, mask);
        assert_eq!(
            received(&model),
            [
                in_unit(mode, Some((0xf000, 0, true))),
                in_unit(mode, Some((0x1_0000, 0, true))),
                device(0xf000, 0),
                device(0x1_0000, 0),
                Received::Wait(0),
                in_unit(mode, Some((0x8000, 3, false))),
                device(0x8000, 3),
                Received::Wait(0),
                in_unit(mode, None),
                device(0, 52),
                Received::Wait(0),
            ]
        );
        assert_eq!(driver.counters().waits, 1 + 3);
        driver.detach(plain).unwrap();
        let entry = |source| match mode {
            Mode::Legacy => Received::Contexts(3, 7, source),
            _ => Received::Pasids(1, 7, 0),
        };
        assert_eq!(
            received(&model),
            [entry(0x0300), in_unit(mode, None), Received::Wait(0)]
        );
        driver.detach(DEVICE).unwrap();
        assert_eq!(
            received(&model),
            [
                entry(SOURCE),
                in_unit(mode, None),
                device(0, 52),
                Received::Wait(0)
            ]
        );
        // It is off: a scalable context entry is there, and changes.
        driver.set_device_tlb(DEVICE, None).unwrap();
        let changed = [Received::Contexts(3, 0, SOURCE), Received::Wait(0)];
        let scalable = mode != Mode::Legacy;
        assert_eq!(received(&model), changed[..if scalable { 2 } else { 0 }]);
        driver.attach(DEVICE, DOMAIN, table(mode)).unwrap();
        assert!(!model.serves_tlb(SOURCE));
        driver.invalidate_domain(DOMAIN).unwrap();
        assert_eq!(received(&model), [in_unit(mode, None), Received::Wait(0)]);
        driver.detach(DEVICE).unwrap();
        model.received();
        driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
        assert_eq!(received(&model), changed[..if scalable { 2 } else { 0 }]);
        assert_eq!(model.serves_tlb(SOURCE), scalable);
    }
}

#[test]
fn a_tlb_is_refused_by_name_where_it_cannot_be_served() {
    let refusal = Err(UnitAttachError::NoDeviceTlbs { device: DEVICE });
    for ecap in [ECAP, (ECAP | DEVICE_TLBS) & !QUEUED] {
        let (driver, _) = enabled(CAP, ecap, Mode::Legacy);
        assert!(!driver.capabilities().device_tlbs);
        assert_eq!(driver.set_device_tlb(DEVICE, Some(DEPTH)), refusal);
        assert_eq!(driver.set_device_tlb(DEVICE, None), Ok(()));
    }
    for mode in [Mode::Legacy, Mode::ScalableFirst] {
        let (driver, model) = enabled(CAP, ECAP | SCALABLE_BOTH | DEVICE_TLBS, mode);
        let device = DeviceId(1 << 16);
        assert_eq!(
            driver.set_device_tlb(device, Some(DEPTH)),
            Err(UnitAttachError::Elsewhere { device, segment: 0 })
        );
        driver.attach(DEVICE, DOMAIN, table(mode)).unwrap();
        let attached = Err(UnitAttachError::AlreadyAttached {
            device: DEVICE,
            domain: DOMAIN,
        });
        for tlb in [None, Some(DEPTH)] {
            assert_eq!(driver.set_device_tlb(DEVICE, tlb), attached);
        }
        assert!(!model.serves_tlb(SOURCE));
    }
}

#[test]
fn each_pasid_of_a_device_is_forgotten_there() {
    let ecap = ECAP | SCALABLE_BOTH | DEVICE_TLBS | 1 << 40 | 19 << 35 | 1 << 41;
    for mode in [Mode::ScalableSecond, Mode::ScalableFirst] {
        let memory = Arc::new(HeapTables::with_tables(64).unwrap());
        let model = Model::new(memory.clone(), CAP, ecap);
        let config = Config {
            mode,
            pasid_bits: 10,
            ..Config::default()
        };
        let driver = Vtd::new(model.clone(), memory, config).unwrap();
        driver.enable().unwrap();
        let all = DeviceTlb { queue_depth: 32 };
        driver.set_device_tlb(DEVICE, Some(all)).unwrap();
        driver.attach(DEVICE, DOMAIN, table(mode)).unwrap();
        driver
            .attach_pasid(DEVICE, Pasid(0x3ff), DOMAIN, table(mode))
            .unwrap();
        let attached = driver.set_device_tlb(DEVICE, None);
        assert!(matches!(
            attached,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        model.received();
        let eight = Invalidation::of(Span::new(0x8000, 0x8000), 1, false);
        driver.invalidate(DOMAIN, &eight).unwrap();
        let found = received(&model);
        assert_eq!(
            found[found.len() - 3..],
            [
                Received::Device(SOURCE, 0, 0, 0x8000, 3),
                Received::Device(SOURCE, 0x3ff, 0, 0x8000, 3),
                Received::Wait(0)
            ]
        );
        driver.detach(DEVICE).unwrap();
        model.received();
        // By its PASID it is attached still.
        let attached = driver.set_device_tlb(DEVICE, None);
        assert!(matches!(
            attached,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        driver.detach_pasid(DEVICE, Pasid(0x3ff)).unwrap();
        let found = received(&model);
        assert_eq!(found[0], Received::Pasids(1, 7, 0x3ff));
        assert_eq!(
            found[2..],
            [Received::Device(SOURCE, 0x3ff, 0, 0, 52), Received::Wait(0)]
        );
        driver.set_device_tlb(DEVICE, None).unwrap();
    }
}

#[test]
fn a_device_that_does_not_answer_fails_the_flush() {
    let (driver, model) = enabled(CAP, ECAP | DEVICE_TLBS, Mode::Legacy);
    driver.set_device_tlb(DEVICE, Some(DEPTH)).unwrap();
    driver.attach(DEVICE, DOMAIN, table(Mode::Legacy)).unwrap();
    // Enabling was three descriptors; the second of this batch is the device's.
    model.state().broken.stops = Some((1 << 6, 4));
    let failed = driver.invalidate_domain(DOMAIN).unwrap_err();
    let FlushError::Unit {
        cause: UnitError::Command { error, command, .. },
        ..
    } = failed
    else {
        panic!("{failed}");
    };
    assert!(error.starts_with("ITE"), "{error}");
    assert_eq!(command[0] & 0xf, 3);
    // The wait behind it was for nobody.
    assert_eq!(received(&model).len(), 3);
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(received(&model).len(), 3);
}
