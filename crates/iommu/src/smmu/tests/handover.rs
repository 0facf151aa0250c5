//! Handing over.

use super::*;
use crate::handover::{Frozen, UnitAdoptError, UnitMemory};

type Listed = Vec<(DomainId, Root)>;

fn freeze(driver: Smmu<Model>) -> (Frozen, Listed) {
    let mut tables = Vec::new();
    let frozen = driver.freeze(&mut |held| match held {
        UnitMemory::Table { domain, root } => tables.push((domain, root)),
        UnitMemory::Structure { name, .. } => panic!("{name}"),
    });
    let (frozen, _) = frozen.map_err(|(_, cause)| cause).unwrap();
    let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
    (frozen, tables)
}

fn refused(model: &Model, config: Config, frozen: &Frozen, tables: &Listed) -> &'static str {
    let adopted = Smmu::adopt(model.clone(), config, frozen, tables.iter().copied());
    match adopted {
        Err(UnitAdoptError::Register { name, .. }) => name,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("adopted"),
    }
}

#[test]
fn a_successor_goes_on_with_the_banks_and_streams() {
    for (ignored, idr0) in [(0, IDR0), (0x7000, IDR0), (0, IDR0 | 1 << 8)] {
        let memory = memory();
        let config = Config { ignored, ..V2 };
        let (driver, model) = unit_with(memory.clone(), config, [idr0, IDR1, IDR2]);
        driver.enable().unwrap();
        let (host, guest) = (first(&memory, 0).root(), second(&memory, 40).root());
        let theirs = DomainId(9);
        driver.attach(DEVICE, DOMAIN, host).unwrap();
        driver.attach(DeviceId(4), theirs, guest).unwrap();
        driver.attach(DeviceId(5), DOMAIN, host).unwrap();
        // Detached, without an answer.
        driver.attach(DeviceId(6), DomainId(10), host).unwrap();
        model.state().broken.bank_sync = true;
        driver.detach(DeviceId(6)).unwrap_err();
        let (frozen, tables) = freeze(driver);
        model.state().broken.bank_sync = false;
        // Bank by bank, those that only know stage 2 first; once for each device.
        let host_twice = [(theirs, guest), (DOMAIN, host), (DOMAIN, host)];
        assert_eq!(tables, host_twice);
        for stream in [STREAM, 4, 5] {
            assert_eq!(model.access(stream, 0, true), Seen::Translated(DATA));
        }
        model.received();

        let other = |change: fn(&mut Root)| {
            let mut tables = tables.clone();
            tables.iter_mut().for_each(|listed| change(&mut listed.1));
            refused(&model, config, &frozen, &tables)
        };
        assert_eq!(other(|root| root.address ^= 1 << 20), "TTBR0");
        assert_eq!(other(|root| root.levels += 3), "TTBR0");
        let mut fewer = tables.clone();
        fewer.truncate(1);
        assert_eq!(refused(&model, config, &frozen, &fewer), "TTBR0");
        let narrow = ArmStage2::<K4>::new(39, 40).unwrap();
        let format = iopt::Format::id(&narrow);
        let mut swapped = tables.clone();
        swapped[0].1.format = format;
        assert_eq!(refused(&model, config, &frozen, &swapped), "TCR");
        let config_other = Config {
            ignored: ignored ^ 0x100,
            ..V2
        };
        let name = refused(&model, config_other, &frozen, &tables);
        assert_eq!(name, "the ignored bits");

        let heir = Smmu::adopt(model.clone(), config, &frozen, tables.clone()).unwrap();
        assert_eq!(model.received(), [], "it has told the unit nothing");
        let there = heir.attach(DEVICE, DOMAIN, host);
        assert!(matches!(
            there,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        heir.invalidate_domain(DOMAIN).unwrap();
        heir.invalidate_domain(theirs).unwrap();
        assert_eq!(heir.counters().waits, 2);
        heir.attach(DeviceId(6), DomainId(10), host).unwrap();
        for device in [DEVICE, DeviceId(5)] {
            assert_eq!(
                model.access(device.0 as u16, 0, true),
                Seen::Translated(DATA)
            );
            heir.detach(device).unwrap();
            assert_eq!(model.access(device.0 as u16, 0, true), NOT_MAPPED);
        }
        assert_eq!(model.access(4, 0, true), Seen::Translated(DATA));
        assert_eq!(model.access(6, 0, true), Seen::Translated(DATA));
        // The bank is free: it has no member left.
        let next = first(&memory, 1).root();
        heir.attach(DEVICE, DomainId(11), next).unwrap();
        let there = Seen::Translated(DATA + (1 << 30));
        assert_eq!(model.access(STREAM, 0, true), there);
        heir.disable().unwrap();
        assert_eq!(refused(&model, config, &frozen, &tables), "CR0");
    }
}

#[test]
fn a_unit_that_does_not_answer_is_not_frozen() {
    let (driver, model, memory) = enabled();
    driver
        .attach(DEVICE, DOMAIN, first(&memory, 0).root())
        .unwrap();
    model.state().broken.global_sync = true;
    let Err((driver, cause)) = driver.freeze(&mut |_| panic!("listed")) else {
        panic!("frozen");
    };
    assert!(matches!(cause, UnitError::TimedOut { .. }));
    model.state().broken.global_sync = false;
    driver.detach(DEVICE).unwrap();
}

#[test]
fn a_unit_that_is_not_in_use_hands_nothing_over() {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    let root = first(&memory, 0).root();
    driver.attach(DEVICE, DOMAIN, root).unwrap();
    let (frozen, tables) = freeze(driver);
    assert_eq!(tables, []);
    let heir = Smmu::adopt(model.clone(), V2, &frozen, tables).unwrap();
    assert_eq!(model.received(), []);
    heir.attach(DEVICE, DOMAIN, root).unwrap();
    heir.enable().unwrap();
    assert_eq!(model.access(STREAM, 0, true), Seen::Translated(DATA));
}
