//! PASIDs: several address spaces of one device.

use std::vec::Vec;

use iopt::TableMemory;

use super::*;
use crate::setup::{UnitProbeError, UnitSetupError};

const OTHER: DomainId = DomainId(8);

fn first_stage(address: u64) -> Root {
    Root {
        format: FormatId::X86_64,
        address,
        levels: 4,
    }
}

fn config(mode: Mode, pasid_bits: u32) -> Config {
    Config {
        mode,
        pasid_bits,
        ..Config::default()
    }
}

fn with_pasids(mode: Mode, pasid_bits: u32) -> (Driver, Model) {
    // Directories of many PASIDs are large.
    let memory = Arc::new(HeapTables::with_tables(256).unwrap());
    let model = Model::new(memory.clone(), CAP, ECAP | SCALABLE_BOTH | PASIDS);
    let driver = Vtd::new(model.clone(), memory, config(mode, pasid_bits)).unwrap();
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

#[test]
fn the_bits_asked_for_are_given_or_refused_by_name() {
    let refused = |mode, pasid_bits, ecap| {
        let model = Model::new(memory(), CAP, ecap);
        Vtd::new(model, memory(), config(mode, pasid_bits)).err()
    };
    let scalable = ECAP | SCALABLE_BOTH;
    let few = scalable | 1 << 40 | 7 << 35;
    for (mode, ecap, asked, offered) in [
        (Mode::Legacy, scalable | PASIDS, 1, 0),
        (Mode::ScalableFirst, scalable, 1, 0),
        // PSS without PASID says nothing.
        (Mode::ScalableFirst, scalable | 19 << 35, 1, 0),
        (Mode::ScalableSecond, few, 9, 8),
        (Mode::ScalableSecond, scalable | 1 << 40 | 31 << 35, 21, 20),
    ] {
        let refusal = UnitSetupError::Probe(UnitProbeError::Pasids { asked, offered });
        assert_eq!(refused(mode, asked, ecap), Some(refusal));
        assert_eq!(refused(mode, offered, ecap), None);
    }
    let (driver, _) = with_pasids(Mode::ScalableFirst, 8);
    assert_eq!(driver.capabilities().pasid_bits, 8);
}

#[test]
fn a_first_stage_is_flushed_for_each_pasid_of_the_domain_and_a_second_once() {
    let one = Invalidation::of(Span::new(0x5000, 0x1000), 1, false);
    let pages = Some((0x5000, 0, true));
    let second = DeviceId::pci(4, 0, 0);
    let (driver, model) = with_pasids(Mode::ScalableFirst, 20);
    let attach = |device, pasid, domain, address| {
        driver
            .attach_pasid(device, Pasid(pasid), domain, first_stage(address))
            .unwrap();
    };
    attach(DEVICE, 5, DOMAIN, 0x1000);
    attach(second, 5, DOMAIN, 0x1000);
    attach(second, 9, DOMAIN, 0x1000);
    attach(DEVICE, 6, OTHER, 0x2000);
    driver.invalidate(DOMAIN, &one).unwrap();
    assert_eq!(
        received(&model),
        [
            Received::PasidIotlb(3, 7, 5, pages),
            Received::PasidIotlb(3, 7, 9, pages),
            Received::Wait(0)
        ]
    );
    // Requests without a PASID, too; and each detach takes one away.
    driver.attach(second, DOMAIN, first_stage(0x1000)).unwrap();
    driver.detach_pasid(second, Pasid(9)).unwrap();
    driver.detach_pasid(second, Pasid(5)).unwrap();
    model.received();
    driver.invalidate_domain(DOMAIN).unwrap();
    driver.invalidate(OTHER, &one).unwrap();
    let mut found = received(&model);
    found[..2].sort_by_key(|received| match received {
        Received::PasidIotlb(_, _, pasid, _) => *pasid,
        _ => u32::MAX,
    });
    assert_eq!(
        found,
        [
            Received::PasidIotlb(2, 7, 0, None),
            Received::PasidIotlb(2, 7, 5, None),
            Received::Wait(0),
            Received::PasidIotlb(3, 8, 6, pages),
            Received::Wait(0)
        ]
    );

    let (driver, model) = with_pasids(Mode::ScalableSecond, 20);
    for pasid in 1..4 {
        driver
            .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, root(0x1000, 4))
            .unwrap();
    }
    driver.invalidate(DOMAIN, &one).unwrap();
    assert_eq!(
        received(&model),
        [Received::Iotlb(3, 7, pages), Received::Wait(0)]
    );
}

#[test]
fn pages_of_many_pasids_become_one_command_each() {
    let (driver, model) = with_pasids(Mode::ScalableFirst, 12);
    let attach = |pasids: core::ops::Range<u32>| {
        for pasid in pasids {
            driver
                .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, first_stage(0x1000))
                .unwrap();
        }
    };
    // A range of two blocks.
    let pair = Invalidation::of(Span::new(0xf000, 0x2000), 1, false);
    for (pasids, commands, waits) in [(1..17, 32, 1), (17..18, 17, 1), (18..301, 300, 3)] {
        attach(pasids);
        let before = driver.counters();
        driver.invalidate(DOMAIN, &pair).unwrap();
        let after = driver.counters();
        // A queue of 128 places holds 126 commands and their wait.
        assert_eq!(
            (after.commands - before.commands, after.waits - before.waits),
            (commands, waits)
        );
        let mut named: Vec<_> = received(&model)
            .into_iter()
            .filter_map(|received| match received {
                Received::PasidIotlb(_, 7, pasid, _) => Some(pasid),
                Received::Wait(_) => None,
                other => panic!("{other:?}"),
            })
            .collect();
        named.dedup();
        assert_eq!(named.len() as u32, *named.last().unwrap());
    }
}

#[test]
fn without_memory_for_the_tables_of_a_pasid_nothing_changes() {
    let (driver, model) = with_pasids(Mode::ScalableSecond, 20);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    let memory = driver.memory();
    let mut taken = Vec::new();
    while let Ok(page) = memory.allocate(4096) {
        taken.push(page);
    }
    let few = driver.attach_pasid(DEVICE, Pasid(64), OTHER, root(0x2000, 4));
    assert!(
        matches!(few, Err(UnitAttachError::NoTables { .. })),
        "{few:?}"
    );
    assert_eq!(model.look_up_pasid(SOURCE, Some(64)), None);
    // In the PASID table that is there.
    driver
        .attach_pasid(DEVICE, Pasid(63), OTHER, root(0x2000, 4))
        .unwrap();
    assert_eq!(
        model.look_up_pasid(SOURCE, Some(63)),
        Some((8, 0x2000, 4, false))
    );
    assert_eq!(received(&model), []);
}
