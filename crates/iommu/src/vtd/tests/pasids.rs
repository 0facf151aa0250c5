//! PASIDs: several address spaces of one device.

use std::vec::Vec;

use iopt::TableMemory;

use super::*;
use crate::error::UnitSetupError;
use crate::handover::UnitAdoptError;

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

fn with_pasids(mode: Mode, pasid_bits: u32, ecap: u64) -> (Driver, Model) {
    // Directories of many PASIDs are large.
    let memory = Arc::new(HeapTables::with_tables(256).unwrap());
    let model = Model::new(memory.clone(), CAP, ECAP | SCALABLE_BOTH | PASIDS | ecap);
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
        let refusal = ProbeError::Pasids { asked, offered };
        assert_eq!(refused(mode, asked, ecap), Some(refusal));
        assert_eq!(refused(mode, offered, ecap), None);
    }
    let (driver, model) = with_pasids(Mode::ScalableFirst, 8, 0);
    assert_eq!(driver.capabilities().pasid_bits, 8);
    for pasid in [0, 256, u32::MAX] {
        let pasid = Pasid(pasid);
        let bits = 8;
        let refusal = Err(UnitAttachError::Pasid {
            device: DEVICE,
            pasid,
            bits,
        });
        let root = first_stage(0x1000);
        assert_eq!(driver.attach_pasid(DEVICE, pasid, DOMAIN, root), refusal);
        assert_eq!(driver.detach_pasid(DEVICE, pasid), refusal);
    }
    assert_eq!(received(&model), []);
    let (driver, _) = enabled(CAP, scalable | PASIDS, Mode::ScalableFirst);
    let none = driver.attach_pasid(DEVICE, Pasid(1), DOMAIN, first_stage(0x1000));
    assert!(matches!(none, Err(UnitAttachError::Pasid { bits: 0, .. })));
}

#[test]
fn each_pasid_has_its_table_in_directories_of_all_sizes() {
    for (bits, pages) in [(1, 1), (13, 1), (15, 1), (16, 2), (20, 32)] {
        let (driver, model) = with_pasids(Mode::ScalableFirst, bits, 0);
        let before = driver.memory().in_use();
        let last = (1u32 << bits) - 1;
        driver
            .attach_pasid(DEVICE, Pasid(last), DOMAIN, first_stage(0x1000))
            .unwrap();
        // Context table, directory, PASID table.
        assert_eq!(driver.memory().in_use() - before, 2 + pages, "{bits} bits");
        let found = Some((7, 0x1000, 4, true));
        assert_eq!(model.look_up_pasid(SOURCE, Some(last.into())), found);
        for pasid in [None, Some(u64::from(last) - 1), Some(u64::from(last) + 1)] {
            assert_eq!(model.look_up_pasid(SOURCE, pasid), None, "{bits} bits");
        }
        let memory = driver.memory().clone();
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), 0);
    }
}

#[test]
fn address_spaces_of_one_device_come_and_go_alone() {
    for (mode, table, first) in [
        (Mode::ScalableFirst, first_stage as fn(u64) -> Root, true),
        (Mode::ScalableSecond, |address| root(address, 4), false),
    ] {
        let (driver, model) = with_pasids(mode, 20, 0);
        let look_up = |pasid| model.look_up_pasid(SOURCE, pasid);
        let found = |domain, address| Some((domain, address, 4, first));
        let all = |domain, pasid| match first {
            true => Received::PasidIotlb(2, domain, pasid, None),
            false => Received::Iotlb(2, domain, None),
        };
        driver.attach(DEVICE, DOMAIN, table(0x1000)).unwrap();
        driver
            .attach_pasid(DEVICE, Pasid(1), OTHER, table(0x2000))
            .unwrap();
        driver
            .attach_pasid(DEVICE, Pasid(0x4_0000), DOMAIN, table(0x1000))
            .unwrap();
        // Nothing was cached.
        assert_eq!(received(&model), []);
        assert_eq!(look_up(None), found(7, 0x1000));
        assert_eq!(look_up(Some(1)), found(8, 0x2000));
        assert_eq!(look_up(Some(0x4_0000)), found(7, 0x1000));
        // A domain has one root, and a PASID one domain.
        let refused = driver.attach_pasid(DEVICE, Pasid(2), OTHER, table(0x1000));
        assert!(matches!(refused, Err(UnitAttachError::OtherRoot { .. })));
        let refused = driver.attach_pasid(DEVICE, Pasid(1), DOMAIN, table(0x1000));
        assert_eq!(
            refused,
            Err(UnitAttachError::AlreadyAttached {
                device: DEVICE,
                domain: OTHER
            })
        );

        driver.detach_pasid(DEVICE, Pasid(0x4_0000)).unwrap();
        assert_eq!(
            received(&model),
            [
                Received::Pasids(1, 7, 0x4_0000),
                all(7, 0x4_0000),
                Received::Wait(0)
            ]
        );
        assert_eq!(look_up(Some(0x4_0000)), None);
        assert_eq!(look_up(None), found(7, 0x1000));
        driver.detach(DEVICE).unwrap();
        assert_eq!(
            received(&model),
            [Received::Pasids(1, 7, 0), all(7, 0), Received::Wait(0)]
        );
        assert_eq!(look_up(None), None);
        assert_eq!(look_up(Some(1)), found(8, 0x2000));
        let gone = Err(UnitAttachError::NotAttached { device: DEVICE });
        assert_eq!(driver.detach(DEVICE), gone);
        assert_eq!(driver.detach_pasid(DEVICE, Pasid(0x4_0000)), gone);
        // A detach that was not answered: the others stay, and this one counts as attached.
        model.state().broken.mute = true;
        assert!(driver.detach_pasid(DEVICE, Pasid(1)).is_err());
        model.state().broken.mute = false;
        assert_eq!(look_up(Some(1)), None);
        driver.attach(DEVICE, DOMAIN, table(0x1000)).unwrap();
        let again = driver.attach_pasid(DEVICE, Pasid(1), OTHER, table(0x2000));
        assert!(matches!(
            again,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        driver.detach_pasid(DEVICE, Pasid(1)).unwrap();
        assert_eq!(look_up(None), found(7, 0x1000));
    }
}

#[test]
fn a_first_stage_is_flushed_for_each_pasid_of_the_domain_and_a_second_once() {
    let one = Invalidation::of(Span::new(0x5000, 0x1000), 1, false);
    let pages = Some((0x5000, 0, true));
    let second = DeviceId::pci(4, 0, 0);
    let (driver, model) = with_pasids(Mode::ScalableFirst, 20, 0);
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

    let (driver, model) = with_pasids(Mode::ScalableSecond, 20, 0);
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
    let (driver, model) = with_pasids(Mode::ScalableFirst, 12, 0);
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
fn a_successor_knows_all_pasids() {
    let (driver, model) = with_pasids(Mode::ScalableFirst, 16, 1 << 2);
    let depth = DeviceTlb { queue_depth: 3 };
    driver.set_device_tlb(DEVICE, Some(depth)).unwrap();
    driver
        .attach(DEVICE, OTHER, first_stage(0x20_0000))
        .unwrap();
    for pasid in 1..=600 {
        driver
            .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, first_stage(0x10_0000))
            .unwrap();
    }
    let used = driver.memory().in_use();
    model.received();
    let (mut pages, mut tables) = (Vec::new(), Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        UnitMemory::Structure { span, .. } => pages.push((span.start, span.len)),
        UnitMemory::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    pages.sort();
    pages.dedup();
    assert_eq!(pages.iter().map(|(_, len)| len / 4096).sum::<u64>(), used);
    let theirs = |domain| tables.iter().filter(|table| table.0 == domain).count();
    assert_eq!((theirs(DOMAIN), theirs(OTHER)), (600, 1));
    model.received();

    let adopt = |bits| {
        let config = config(Mode::ScalableFirst, bits);
        Vtd::adopt(model.clone(), memory.clone(), config, &frozen)
    };
    assert!(matches!(
        adopt(15),
        Err(ProbeError::Setup(UnitSetupError::Adopt(
            UnitAdoptError::Register {
                name: "bits of a PASID",
                ..
            }
        )))
    ));
    let heir = adopt(16).unwrap();
    assert_eq!(received(&model), []);
    let again = heir.attach_pasid(DEVICE, Pasid(600), DOMAIN, first_stage(0x10_0000));
    assert!(matches!(
        again,
        Err(UnitAttachError::AlreadyAttached { .. })
    ));
    // What it must flush by PASID, and in the device.
    heir.invalidate_domain(DOMAIN).unwrap();
    let found = model.received();
    let pasids = found
        .iter()
        .filter(|received| matches!(received, Received::PasidIotlb(2, 7, _, None)));
    let devices = found
        .iter()
        .filter(|received| matches!(received, Received::Device(SOURCE, 1.., 3, 0, 52)));
    assert_eq!((pasids.count(), devices.count()), (600, 600));
    for pasid in 1..=600 {
        heir.detach_pasid(DEVICE, Pasid(pasid)).unwrap();
    }
    heir.detach(DEVICE).unwrap();
    let (_, memory) = heir.tear_down().unwrap();
    assert_eq!(memory.in_use(), 0);
}

#[test]
fn without_memory_for_the_tables_of_a_pasid_nothing_changes() {
    let (driver, model) = with_pasids(Mode::ScalableSecond, 20, 0);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    let memory = driver.memory();
    let mut taken = Vec::new();
    while let Ok(page) = memory.allocate(4096) {
        taken.push(page);
    }
    let few = driver.attach_pasid(DEVICE, Pasid(64), OTHER, root(0x2000, 4));
    assert!(
        matches!(few, Err(UnitAttachError::Memory { .. })),
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
