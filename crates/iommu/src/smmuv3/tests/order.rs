//! The order of writes.

use super::*;
use crate::fault::FaultReason;
use crate::lines::past_caches;

// CR0.
const ON: u32 = 1 << 3 | 1 << 4;
const EVENTS: u32 = 1 << 2;

#[test]
fn enabling_blocks_then_invalidates_configuration_then_translations_and_translates_last() {
    for latency in [0, 1, 7] {
        let (driver, model) = unit(IDS, CONFIG);
        model.state().latency = latency;
        // An earlier owner has left a unit that translates, an interrupt, and an error.
        model.state().gbpa = 1 << 12;
        model.state().irq = 7;
        model.state().gerror = 1 << 4;
        model.write32(0x28, 0xd75);
        model.write32(0x2c, 6);
        model.write32(0x20, 1);
        while model.read32(0x24) != 1 {
            model.wait(0);
        }
        assert_eq!(model.received(), [Received::Control(1)], "the owner before");
        driver.enable().unwrap();
        let expected = [
            Received::Abort(true),
            Received::Control(0),
            Received::Control(ON),
            Received::Control(ON | EVENTS),
            Received::AllStreams,
            Received::Sync,
            Received::AllOfEl1,
            Received::Sync,
            Received::Control(ON | EVENTS | 1),
        ];
        assert_eq!(model.received(), expected);
        assert_eq!(model.read32(0x54), 0, "interrupts");
        assert_eq!(model.read32(0x60), model.read32(0x64), "errors");
        // Attributes of bypass stay.
        assert_eq!(model.read32(0x44), 1 << 20 | 1 << 12);
        // Again, the same.
        driver.enable().unwrap();
        assert_eq!(model.received(), expected);
        driver.disable().unwrap();
        assert_eq!(
            model.received(),
            [Received::Abort(false), Received::Control(0)]
        );
        assert_eq!(model.read32(0x44), 1 << 12);
        let counters = driver.counters();
        assert_eq!(
            (counters.batches, counters.commands, counters.waits),
            (2, 6, 2)
        );
    }
}

#[test]
fn translations_of_a_hypervisor_are_forgotten_where_there_can_be_some() {
    let mut ids = IDS;
    ids[0] = ids[0] & !(1 << 10) | 1 << 9;
    let (driver, model) = unit(ids, CONFIG);
    driver.enable().unwrap();
    let mut received = model.received();
    received.retain(|received| !matches!(received, Received::Control(_) | Received::Abort(_)));
    assert_eq!(
        received,
        [
            Received::AllStreams,
            Received::Sync,
            Received::AllOfEl2,
            Received::AllOfEl1,
            Received::Sync
        ]
    );
    // Without ATS there is nothing to check.
    assert_eq!(model.read32(0x20), 0b1101);
}

#[test]
fn the_vmid_of_stage_1_is_as_good_an_asid_as_any() {
    let (driver, model) = enabled(CONFIG);
    let domain = DomainId(VMID.into());
    driver.attach(DEVICE, domain, root(0x2000)).unwrap();
    assert_eq!(
        found(model.look_up(STREAM, None)),
        Some((VMID, root(0x2000)))
    );
}

#[test]
fn the_stream_table_is_as_large_as_its_last_device_asks() {
    for (last_device, two_levels, one_level) in [
        (0, 1, 1),
        (0x3f, 1, 1),
        (0x40, 1, 2),
        (0x3ff, 1, 16),
        (0xffff, 2, 1024),
        (0x7fff_ffff, 2, 1024),
    ] {
        for (level, pages) in [(1, two_levels), (0, one_level)] {
            let mut ids = IDS;
            ids[0] = ids[0] & !(3 << 27) | level << 27;
            let memory = Arc::new(HeapTables::with_tables(2048).unwrap());
            let model = Model::new(memory.clone(), ids);
            let config = Config {
                last_device,
                ..CONFIG
            };
            let driver = SmmuV3::new(model.clone(), memory.clone(), config).unwrap();
            assert_eq!(memory.in_use(), pages + 3, "{last_device:#x}");
            driver.enable().unwrap();
            // The unit has 16 bits.
            let last = last_device.min(0xffff);
            driver.attach(DeviceId(last), DOMAIN, root(0x1000)).unwrap();
            assert_eq!(found(model.look_up(last, None)), Some((7, root(0x1000))));
            let device = DeviceId(last + 1);
            assert_eq!(
                driver.attach(device, DOMAIN, root(0x1000)),
                Err(UnitAttachError::Beyond { device, last })
            );
            model.received();
            assert!(driver.tear_down().is_ok());
            assert_eq!(memory.in_use(), 0);
        }
    }
}

#[test]
fn faults_come_oldest_first_by_name() {
    let (driver, model) = enabled(CONFIG);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    let stream = u64::from(STREAM) << 32;
    // SSV and a PASID; a read.
    model.event([0x10 | 1 << 11 | 0x4321 << 12 | stream, 1 << 35, 0x7123, 0]);
    model.event([0x13 | stream, 0, 0x8fff, 0]);
    model.event([0x0a | stream, 0, 0x9999, 0]);
    model.event([0x08 | 5 << 12 | stream, 0, 0, 0]);
    for code in (1..0x22).chain([0xff]) {
        model.event([code, 0, 0, 0]);
    }
    let (faults, lost) = drain(&driver);
    assert_eq!((faults.len(), lost), (38, 0));
    assert_eq!(
        faults[0],
        Fault {
            device: DEVICE,
            pasid: Some(Pasid(0x4321)),
            domain: None,
            iova: 0x7000,
            access: Some(iopt::walk::Access::Read),
            reason: FaultReason::Reported {
                code: 0x10,
                meaning: "F_TRANSLATION: not present",
                details: crate::Details::default(),
            },
        }
    );
    let said = |n: usize| std::format!("{}", faults[n]);
    assert_eq!(
        said(1),
        "03:05.1: write of 0x8000: F_PERMISSION: not allowed (reason 0x13)"
    );
    // Events about configuration have no address.
    assert_eq!((faults[2].iova, faults[2].pasid), (0, None));
    assert!(
        said(2).starts_with("03:05.1: access to 0x0: C_BAD_CD"),
        "{}",
        said(2)
    );
    // RnW: F_UUT, F_TRANSL_FORBIDDEN, F_WALK_EABT, those of translation, F_TLB_CONFLICT.
    let directed: Vec<_> = faults[4..]
        .iter()
        .filter(|fault| fault.access.is_some())
        .map(|fault| match fault.reason {
            crate::FaultReason::Reported { code, .. } => code,
            _ => 0,
        })
        .collect();
    let expected = [0x01, 0x07, 0x0b, 0x10, 0x11, 0x12, 0x13, 0x20];
    assert_eq!(directed, expected);
    assert_eq!(faults[3].pasid, Some(Pasid(5)));
    assert!(said(37).contains("without a name"), "{}", said(37));
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

#[test]
fn an_event_that_cannot_be_written_is_acknowledged_and_lost() {
    let (driver, model) = enabled(CONFIG);
    model.state().gerror ^= 1 << 2;
    model.event([0x10, 0, 0x6000, 0]);
    assert_eq!(drain(&driver), (Vec::new(), 1));
    model.event([0x10, 0, 0x6000, 0]);
    assert_eq!(drain(&driver).0.len(), 1);
    driver.disable().unwrap();
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

#[test]
fn a_unit_that_does_not_snoop_finds_everything_in_memory() {
    let ids = [IDR0 & !(1 << 4), IDR1, 0, IDR3, 0, IDR5];
    let config = Config {
        pasid_bits: 10,
        ..CONFIG
    };
    let tables = memory();
    let (lines, read) = past_caches(tables.clone());
    let model = Model::reading(tables, ids, read);
    let driver = SmmuV3::new(model.clone(), lines, config).unwrap();
    assert!(!driver.capabilities().coherent_walks);
    driver.enable().unwrap();
    assert_eq!(found(model.look_up(STREAM, None)), None);
    let there = Some((7, root(0x1000)));
    driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
    let pasid = Pasid(0x83);
    driver
        .attach_pasid(DEVICE, pasid, DOMAIN, root(0x1000))
        .unwrap();
    assert_eq!(found(model.look_up(STREAM, None)), there);
    assert_eq!(found(model.look_up(STREAM, Some(0x83))), there);
    // The rest of each table that is there now, too.
    for stream in [STREAM ^ 1, STREAM ^ 0x3f, STREAM ^ 0x40, 0x3ff] {
        assert_eq!(found(model.look_up(stream, None)), None, "{stream:#x}");
    }
    for pasid in [0x82, 0xbc, 0x43, 0x3ff] {
        assert_eq!(
            found(model.look_up(STREAM, Some(pasid))),
            None,
            "{pasid:#x}"
        );
    }
    driver.detach_pasid(DEVICE, pasid).unwrap();
    assert_eq!(found(model.look_up(STREAM, Some(0x83))), None);
    assert_eq!(found(model.look_up(STREAM, None)), there);
    driver.detach(DEVICE).unwrap();
    assert_eq!(found(model.look_up(STREAM, None)), None);
    model.received();
}
