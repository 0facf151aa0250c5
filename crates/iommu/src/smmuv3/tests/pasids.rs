//! PASIDs.

use super::*;

const PASIDS: Config = Config {
    pasid_bits: 8,
    ..CONFIG
};
const PASID: Pasid = Pasid(0x83);

#[test]
fn a_device_has_tables_of_one_stage_at_a_time() {
    let (driver, _) = enabled(PASIDS);
    let refused = |pasid, root| {
        driver
            .attach_pasid(DEVICE, pasid, DOMAIN, root)
            .unwrap_err()
    };
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
