//! The order of writes, and capabilities from registers.

use iopt::NoTables;

use runs::PageSizes;

use super::*;
use crate::handover::UnitKind;
use crate::setup::{IdRegisters, UnitProbeError, UnitSetupError};

// Control Register.
const TRANSLATE: u64 = 1;
const LOG: u64 = 1 << 2;
const COHERENT: u64 = 1 << 10;
const FETCH: u64 = 1 << 12;

#[test]
fn capabilities_are_those_of_the_registers() {
    for (hats, levels) in [(0, 0b1_1110), (1, 0b11_1110), (2, 0b111_1110)] {
        let (driver, _) = unit(hats << 10, CONFIG);
        let can = driver.capabilities();
        let support = can.format(FormatId::AmdV1).unwrap();
        assert_eq!(support.levels, levels);
        assert_eq!(support.page_sizes, PageSizes::from_log2_range(12, 51));
        assert_eq!(
            (can.domain_bits, can.input_bits, can.output_bits),
            (16, 64, 48)
        );
        assert!(can.coherent_walks && can.snoop_control);
        assert!(!can.dirty_tracking && !can.caches_not_present);
    }
    // Both of HASup and HDSup.
    for (bits, dirty) in [
        (1 << 49, false),
        (1 << 52, false),
        (1 << 49 | 1 << 52, true),
    ] {
        let (driver, model) = unit(FEATURES | bits, CONFIG);
        assert_eq!(driver.capabilities().dirty_tracking, dirty);
        driver.enable().unwrap();
        driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
        assert_eq!(model.entry(SOURCE) >> 7 & 3, if dirty { 3 } else { 0 });
    }
}

#[test]
fn what_is_not_a_unit_or_has_no_memory_is_refused_by_name() {
    let refused = |features, config, tables| {
        let few = Arc::new(HeapTables::with_tables(tables).unwrap());
        let driver = AmdVi::new(Model::new(few.clone(), features), few.clone(), config);
        let refused = driver.err().unwrap();
        assert_eq!(few.in_use(), 0, "{refused}");
        refused
    };
    let features = u64::MAX;
    let kind = UnitKind::AmdVi;
    let read = |features| IdRegisters::one("Extended Feature", features);
    let nobody = UnitProbeError::NoUnit {
        kind,
        read: read(features),
    };
    assert_eq!(refused(features, CONFIG, 64), nobody.into());
    let features = 3 << 10;
    assert_eq!(
        refused(features, CONFIG, 64),
        UnitProbeError::Tables {
            kind,
            read: read(features)
        }
        .into()
    );
    let all = Config::default();
    assert!(matches!(
        refused(FEATURES, all, 64),
        UnitSetupError::NoTables(NoTables {
            needed: 0x20_0000,
            ..
        })
    ));
}

#[test]
fn the_device_table_is_as_large_as_its_last_device_asks_and_blocks_all() {
    for (last_device, pages) in [(0, 1), (0x7f, 1), (0x80, 2), (0x17f, 4), (0xffff, 512)] {
        let config = Config {
            last_device,
            ..CONFIG
        };
        let memory = Arc::new(HeapTables::with_tables(2048).unwrap());
        let model = Model::new(memory.clone(), FEATURES);
        let driver = AmdVi::new(model.clone(), memory, config).unwrap();
        driver.enable().unwrap();
        let received = model.received();
        let Some(Received::Table(register)) =
            received.iter().find(|t| matches!(t, Received::Table(_)))
        else {
            panic!("{received:?}");
        };
        assert_eq!(register & 0xfff, pages - 1);
        assert_eq!(register & (pages * 4096 - 1) & !0xfff, 0, "aligned");
        for source in [0, last_device / 2, last_device] {
            assert_eq!(model.look_up(source), None);
        }
        let device = DeviceId(last_device.into());
        driver.attach(device, DOMAIN, root(0x1000, 1)).unwrap();
        assert_eq!(model.look_up(last_device), Some((7, 0x1000, 1)));
        if let Some(beyond) = last_device.checked_add(1) {
            let device = DeviceId(beyond.into());
            let last = last_device.into();
            let beyond = UnitAttachError::Beyond { device, last };
            assert_eq!(driver.detach(device), Err(beyond));
            assert_eq!(driver.attach(device, DOMAIN, root(0x1000, 1)), Err(beyond));
        }
    }
}

#[test]
fn enabling_sets_the_addresses_then_fetches_then_translates_then_invalidates() {
    for latency in [0, 1, 7] {
        let (driver, model) = unit(FEATURES, CONFIG);
        model.state().latency = latency;
        model.state().exclusion = 1;
        // Firmware's settings of links stay; leftovers of other logs do not.
        model.state().control = 1 << 1 | 1 << 11 | 1 << 13;
        driver.enable().unwrap();
        let received = model.received();
        let Received::Table(table) = received[2] else {
            panic!("{received:?}");
        };
        assert_eq!(
            received,
            [
                Received::Control(0, 1 << 13),
                Received::ExclusionOff,
                Received::Table(table),
                Received::Control(COHERENT | FETCH | LOG, 0),
                Received::Control(TRANSLATE, 0),
                Received::All,
                Received::Wait,
            ]
        );
        // Again, over buffers that are in use: translation is never off.
        driver.enable().unwrap();
        assert_eq!(
            model.received(),
            [
                Received::Control(0, FETCH | LOG),
                Received::Table(table),
                Received::Control(FETCH | LOG, 0),
                Received::All,
                Received::Wait,
            ]
        );
        driver.disable().unwrap();
        assert_eq!(
            model.received(),
            [Received::Control(0, TRANSLATE | FETCH | LOG)]
        );
        assert_eq!(model.state().control, COHERENT | 1 << 1 | 1 << 11);
    }
}

#[test]
fn a_unit_that_cannot_invalidate_all_at_once_invalidates_each_device_and_each_domain() {
    let (driver, model) = unit(0, CONFIG);
    driver.enable().unwrap();
    let mut received = model.received();
    received.retain(|received| {
        !matches!(
            received,
            Received::Wait | Received::Control(..) | Received::Table(_)
        )
    });
    let devices = (0..0x400).map(Received::Device);
    let domains = (0..=0xffff).map(whole);
    let expected: Vec<_> = devices.chain([Received::Barrier]).chain(domains).collect();
    assert!(
        received == expected,
        "{} and {}",
        received.len(),
        expected.len()
    );
    let counters = driver.counters();
    // 254 in each part.
    assert_eq!((counters.commands, counters.waits), (0x1_0401, 263));
}
