//! What is written in which order.

use iopt::TableMemory;

use super::*;
use crate::fault::FaultReason;
use crate::lines::past_caches;
use crate::setup::UnitSetupError;

// CR0.
const ON: u32 = 1 << 3 | 1 << 4;
const EVENTS: u32 = 1 << 2;

#[test]
fn enabling_blocks_then_invalidates_configuration_then_translations_and_translates_last() {
    for latency in [0, 1, 7] {
        let (driver, model) = unit(IDS, CONFIG);
        model.state().latency = latency;
        // Somebody has left a unit that translates, an interrupt, and an error.
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
fn a_request_finds_nothing_or_all_of_an_entry_at_each_step() {
    for two_levels in [false, true] {
        for root in [root(0x1234_5000), second(0x1234_5000)] {
            let mut ids = IDS;
            ids[0] = ids[0] & !(3 << 27) | u32::from(two_levels) << 27;
            let (driver, model) = enabled_with(ids, CONFIG);
            model.watch(STREAM, None);
            let none = if two_levels { 0x02 } else { 0x04 };
            assert_eq!(model.seen(), [((STREAM, None), Err(none))]);
            for domain in [7u16, 8] {
                driver
                    .attach(DEVICE, DomainId(domain.into()), root)
                    .unwrap();
                assert_eq!(
                    model.received(),
                    [
                        Received::Stream(STREAM, false),
                        Received::Sync,
                        Received::Stream(STREAM, true),
                        Received::Sync
                    ]
                );
                let seen = model.seen();
                let results: Vec<_> = seen.iter().map(|(_, looked)| found(*looked)).collect();
                assert_eq!(results.last(), Some(&Some((domain, root))));
                let before = &results[..results.len() - 1];
                assert!(before.iter().all(Option::is_none), "{seen:x?}");
                assert_eq!(found(model.look_up(STREAM ^ 1, None)), None);
                driver.detach(DEVICE).unwrap();
                let tag = match root.format {
                    FormatId::ArmStage1(_) => whole(domain),
                    _ => Received::Vmid(domain),
                };
                assert_eq!(
                    model.received(),
                    [
                        Received::Stream(STREAM, true),
                        Received::Sync,
                        tag,
                        Received::Sync
                    ]
                );
                assert_eq!(model.seen(), [((STREAM, None), Err(0x04))]);
                assert_eq!(
                    driver.detach(DEVICE),
                    Err(UnitAttachError::NotAttached { device: DEVICE })
                );
            }
        }
    }
}

#[test]
fn a_device_goes_from_one_stage_to_the_other_and_back() {
    let (driver, model) = enabled(CONFIG);
    model.watch(STREAM, None);
    for _ in 0..3 {
        for root in [root(0x1000), second(0x6000)] {
            driver.attach(DEVICE, DOMAIN, root).unwrap();
            assert_eq!(found(model.look_up(STREAM, None)), Some((7, root)));
            driver.detach(DEVICE).unwrap();
        }
    }
    let wrong = |looked: &Looked| match found(*looked) {
        None => false,
        Some(found) => found != (7, root(0x1000)) && found != (7, second(0x6000)),
    };
    assert!(!model.seen().iter().any(|(_, looked)| wrong(looked)));
    model.received();
}

#[test]
fn devices_and_domains_that_the_unit_cannot_have_are_refused_by_name() {
    let (driver, model) = enabled(CONFIG);
    let good = root(0x1000);
    driver.attach(DEVICE, DOMAIN, good).unwrap();
    model.received();
    let other = DeviceId::pci(1, 0, 0);
    let refused = |device, domain, root| driver.attach(device, domain, root).unwrap_err();
    let device = DeviceId(0x400);
    let last = 0x3ff;
    assert_eq!(
        refused(device, DOMAIN, good),
        UnitAttachError::Beyond { device, last }
    );
    assert_eq!(
        driver.detach(device),
        Err(UnitAttachError::Beyond { device, last })
    );
    assert_eq!(
        refused(DEVICE, DomainId(8), second(0x1000)),
        UnitAttachError::AlreadyAttached {
            device: DEVICE,
            domain: DOMAIN
        }
    );
    let asked = second(0x1000);
    assert_eq!(
        refused(other, DOMAIN, asked),
        UnitAttachError::OtherRoot {
            domain: DOMAIN,
            there: good,
            asked
        }
    );
    // Stage 1 has this VMID.
    let domain = DomainId(VMID.into());
    assert_eq!(
        refused(other, domain, second(0x2000)),
        UnitAttachError::ReservedDomain { domain }
    );
    let levels = Root { levels: 3, ..good };
    assert!(matches!(
        refused(other, DOMAIN, levels),
        UnitAttachError::Levels {
            offered: 0b1_0000,
            ..
        }
    ));
    assert!(matches!(
        refused(other, DOMAIN, root(1 << 48)),
        UnitAttachError::RootAddress { .. }
    ));
    assert_eq!(found(model.look_up(0x0100, None)), None);
    assert_eq!(found(model.look_up(STREAM, None)), Some((7, good)));
    assert_eq!(model.received(), []);
    // As an ASID the number is as good as any.
    driver.attach(other, domain_of(VMID), root(0x2000)).unwrap();
    assert_eq!(
        found(model.look_up(0x0100, None)),
        Some((VMID, root(0x2000)))
    );
}

fn domain_of(number: u16) -> DomainId {
    DomainId(number.into())
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
fn without_memory_nothing_is_attached_and_nothing_is_lost() {
    let few = Arc::new(HeapTables::with_tables(16).unwrap());
    let taken: Vec<_> = (0..12).map(|_| few.allocate(4096).unwrap()).collect();
    let model = Model::new(few.clone(), IDS);
    let driver = SmmuV3::new(model, few.clone(), CONFIG).unwrap();
    assert!(matches!(
        driver.attach(DEVICE, DOMAIN, root(0x1000)),
        Err(UnitAttachError::NoTables { .. })
    ));
    assert!(matches!(
        driver.detach(DEVICE),
        Err(UnitAttachError::NotAttached { .. })
    ));
    assert!(driver.tear_down().is_ok());
    assert_eq!(few.in_use(), taken.len() as u64);
    // Nor is there room for the queues.
    let model = Model::new(few.clone(), IDS);
    let _more = few.allocate(4096);
    let refused = SmmuV3::new(model, few.clone(), CONFIG).err().unwrap();
    assert!(matches!(refused, UnitSetupError::NoTables(_)));
    assert_eq!(few.in_use(), taken.len() as u64 + 1);
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
    // What is about configuration has no address.
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
fn a_full_event_queue_says_so_and_goes_on() {
    for log2 in [19, 3, 0] {
        let mut ids = IDS;
        ids[1] = ids[1] & !(0x1f << 16) | log2 << 16;
        let (driver, model) = enabled_with(ids, CONFIG);
        let places = 1 << log2.min(7);
        for round in 0..5 {
            for n in 0..places + 1 + round {
                model.event([0x10, 0, n << 12, 0]);
            }
            let (faults, lost) = drain(&driver);
            assert_eq!((faults.len() as u64, lost), (places, 1));
            assert!(faults.iter().map(|fault| fault.iova >> 12).eq(0..places));
            model.event([0x10, 0, 0x5000, 0]);
            let (faults, lost) = drain(&driver);
            assert_eq!((faults.len(), lost), (1, 0));
        }
        // An abort of a write is acknowledged, and counts as a loss.
        model.state().gerror ^= 1 << 2;
        model.event([0x10, 0, 0x6000, 0]);
        assert_eq!(drain(&driver), (Vec::new(), 1));
        model.event([0x10, 0, 0x6000, 0]);
        assert_eq!(drain(&driver).0.len(), 1);
        driver.disable().unwrap();
        assert_eq!(drain(&driver), (Vec::new(), 0));
        model.received();
    }
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
