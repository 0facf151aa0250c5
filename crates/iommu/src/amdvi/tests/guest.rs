//! Guest tables, and PASIDs.

use super::*;
use crate::handover::{UnitAdoptError, UnitMemory};
use crate::setup::{IdRegisters, UnitProbeError, UnitSetupError};

/// GTSup, IASup, GIoSup, PASIDs of 20 bits, guest CR3 tables of 3 levels.
pub(super) const GUEST: u64 = 1 << 4 | 1 << 6 | 1 << 48 | 19 << 32 | 2 << 14;
const OTHER: DomainId = DomainId(8);
const SECOND: DeviceId = DeviceId::pci(1, 0, 0);

const fn config(pasid_bits: u32) -> Config {
    Config {
        mode: Mode::Guest,
        pasid_bits,
        ..CONFIG
    }
}

pub(super) fn table(address: u64) -> Root {
    Root {
        format: FormatId::X86_64,
        address,
        levels: 4,
    }
}

fn guests(pasid_bits: u32) -> (Driver, Model) {
    let (driver, model) = unit(GUEST, config(pasid_bits));
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

/// All of a PASID.
const fn all(source: u16, pasid: u32) -> Received {
    Received::GuestPages(source, pasid, 0, 52, true)
}

#[test]
fn what_the_unit_cannot_do_is_refused_by_name() {
    let refused = |features, config| {
        let model = Model::new(memory(), features);
        AmdVi::new(model, memory(), config).err()
    };
    for missing in [4, 6, 48] {
        let features = GUEST & !(1 << missing);
        let read = IdRegisters::one("Extended Feature", features);
        let mode = "guest tables for all requests";
        let refusal = Some(UnitSetupError::Probe(UnitProbeError::Mode { mode, read }));
        assert_eq!(refused(features, config(0)), refusal);
    }
    for (features, mode, asked, offered) in [
        (GUEST, Mode::Guest, 21, 20),
        (GUEST, Mode::Host, 1, 0),
        // PASmax, and levels.
        (GUEST & !(0x1f << 32) | 7 << 32, Mode::Guest, 9, 8),
        (GUEST & !(3 << 14), Mode::Guest, 10, 9),
        (GUEST & !(3 << 14) | 1 << 14, Mode::Guest, 19, 18),
    ] {
        let config = |bits| Config {
            mode,
            ..config(bits)
        };
        let refusal = UnitSetupError::Probe(UnitProbeError::Pasids { asked, offered });
        assert_eq!(refused(features, config(asked)), Some(refusal));
        assert_eq!(refused(features, config(offered)), None);
    }
    let served = Config {
        device_tlbs: true,
        ..config(8)
    };
    let (driver, _) = unit(GUEST, served);
    let can = driver.capabilities();
    let support = can.format(FormatId::X86_64).unwrap();
    assert_eq!((support.levels, can.pasid_bits), (1 << 4, 8));
    assert_eq!(support.page_sizes.bits(), 1 << 12 | 1 << 21 | 1 << 30);
    assert_eq!(can.format(FormatId::AmdV1), None);
    assert!(!can.device_tlbs && !can.dirty_tracking && !can.snoop_control);
    for pasid in [0, 256] {
        let (device, pasid, bits) = (DEVICE, Pasid(pasid), 8);
        let refusal = Err(UnitAttachError::Pasid {
            device,
            pasid,
            bits,
        });
        assert_eq!(
            driver.attach_pasid(DEVICE, pasid, DOMAIN, table(0)),
            refusal
        );
        assert_eq!(driver.detach_pasid(DEVICE, pasid), refusal);
    }
}

#[test]
fn guest_tables_are_switched_on_before_translation() {
    let (driver, model) = unit(GUEST, config(0));
    driver.enable().unwrap();
    let received = model.received();
    let on = |bit| {
        received
            .iter()
            .position(|received| matches!(received, Received::Control(set, _) if set & bit != 0))
            .unwrap()
    };
    assert!(on(1 << 16) < on(1), "{received:?}");
    // A unit that somebody has left so is set to host tables.
    let (driver, model) = unit(GUEST, CONFIG);
    model.state().control = 1 << 16;
    driver.enable().unwrap();
    assert_eq!(model.state().control >> 16 & 1, 0);
    model.received();
}

#[test]
fn each_pasid_has_its_table_in_guest_cr3_tables_of_all_levels() {
    for (bits, pages) in [(1, 1), (9, 1), (10, 2), (18, 2), (19, 3), (20, 3)] {
        let (driver, model) = guests(bits);
        assert_eq!(model.look_up_guest(SOURCE, Some(1)), None);
        let before = driver.memory().in_use();
        let last = (1u32 << bits) - 1;
        driver
            .attach_pasid(DEVICE, Pasid(last), DOMAIN, table(0x1000))
            .unwrap();
        assert_eq!(model.received(), [Received::Device(SOURCE), Received::Wait]);
        assert_eq!(driver.memory().in_use() - before, pages, "{bits} bits");
        let found = model.look_up_guest(SOURCE, Some(last.into()));
        assert_eq!(found, Some((SOURCE, 0x1000)));
        for pasid in [None, Some(u64::from(last) - 1), Some(u64::from(last) + 1)] {
            assert_eq!(model.look_up_guest(SOURCE, pasid), None, "{bits} bits");
        }
        let memory = driver.memory().clone();
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), 0);
    }
}

#[test]
fn all_bits_of_a_guest_cr3_table_s_address_are_in_the_entry() {
    for base in [0x5555_5554_0000, 0xaaaa_aaa8_0000] {
        let memory = Arc::new(HeapTables::with_tables_at(64, base).unwrap());
        let model = Model::new(memory.clone(), GUEST);
        let driver = AmdVi::new(model.clone(), memory, config(20)).unwrap();
        driver.enable().unwrap();
        driver.attach(DEVICE, DOMAIN, table(0x7000)).unwrap();
        assert_eq!(model.look_up_guest(SOURCE, None), Some((SOURCE, 0x7000)));
    }
}

#[test]
fn address_spaces_of_one_device_come_and_go_alone() {
    let (driver, model) = guests(20);
    let look_up = |pasid| model.look_up_guest(SOURCE, pasid).map(|found| found.1);
    driver.attach(DEVICE, DOMAIN, table(0x1000)).unwrap();
    driver
        .attach_pasid(DEVICE, Pasid(1), OTHER, table(0x2000))
        .unwrap();
    driver
        .attach_pasid(DEVICE, Pasid(0x4_0000), DOMAIN, table(0x1000))
        .unwrap();
    assert_eq!(look_up(None), Some(0x1000));
    assert_eq!(look_up(Some(1)), Some(0x2000));
    assert_eq!(look_up(Some(0x4_0000)), Some(0x1000));
    model.received();
    let refused = driver.attach_pasid(DEVICE, Pasid(2), OTHER, table(0x1000));
    let (there, asked) = (table(0x2000), table(0x1000));
    let domain = OTHER;
    assert_eq!(
        refused,
        Err(UnitAttachError::OtherRoot {
            domain,
            there,
            asked
        })
    );
    let refused = driver.attach_pasid(DEVICE, Pasid(1), DOMAIN, table(0x1000));
    let device = DEVICE;
    assert_eq!(
        refused,
        Err(UnitAttachError::AlreadyAttached { device, domain })
    );

    driver.detach_pasid(DEVICE, Pasid(0x4_0000)).unwrap();
    assert_eq!(model.received(), [all(SOURCE, 0x4_0000), Received::Wait]);
    assert_eq!(look_up(Some(0x4_0000)), None);
    driver.detach(DEVICE).unwrap();
    assert_eq!(model.received(), [all(SOURCE, 0), Received::Wait]);
    assert_eq!((look_up(None), look_up(Some(1))), (None, Some(0x2000)));
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach(DEVICE), gone);
    assert_eq!(driver.detach_pasid(DEVICE, Pasid(0x4_0000)), gone);
    let other = Err(UnitAttachError::NotAttached { device: SECOND });
    assert_eq!(driver.detach_pasid(SECOND, Pasid(1)), other);
    // A detach that was not answered: no translation, and attached.
    model.state().broken.mute = true;
    assert!(driver.detach_pasid(DEVICE, Pasid(1)).is_err());
    model.state().broken.mute = false;
    assert_eq!(look_up(Some(1)), None);
    let again = driver.attach_pasid(DEVICE, Pasid(1), OTHER, table(0x2000));
    assert_eq!(
        again,
        Err(UnitAttachError::AlreadyAttached { device, domain })
    );
    driver.detach_pasid(DEVICE, Pasid(1)).unwrap();
    driver
        .attach_pasid(DEVICE, Pasid(1), OTHER, table(0x3000))
        .unwrap();
    assert_eq!(look_up(Some(1)), Some(0x3000));
}

#[test]
fn an_attach_that_is_not_answered_leaves_no_translation() {
    let (driver, model) = guests(9);
    model.state().broken.deaf = true;
    let failed = driver.attach(DEVICE, DOMAIN, table(0x1000));
    assert!(matches!(failed, Err(UnitAttachError::Unit { .. })));
    model.state().broken.deaf = false;
    assert_eq!(model.look_up_guest(SOURCE, None), None);
    driver.detach(DEVICE).unwrap();
    driver.attach(DEVICE, DOMAIN, table(0x1000)).unwrap();
    assert!(model.look_up_guest(SOURCE, None).is_some());
}

#[test]
fn a_flush_names_each_member_of_the_domain() {
    let (driver, model) = guests(20);
    let one = Invalidation::of(Span::new(0xffff_8000_0000_5000, 0x1000), 1, false);
    driver.attach(DEVICE, DOMAIN, table(0x1000)).unwrap();
    driver
        .attach_pasid(DEVICE, Pasid(5), DOMAIN, table(0x1000))
        .unwrap();
    driver
        .attach_pasid(SECOND, Pasid(0xf_ffff), DOMAIN, table(0x1000))
        .unwrap();
    driver
        .attach_pasid(DEVICE, Pasid(6), OTHER, table(0x2000))
        .unwrap();
    model.received();
    driver.invalidate(DOMAIN, &one).unwrap();
    let pages =
        |source, pasid| Received::GuestPages(source, pasid, 0xffff_8000_0000_5000, 0, false);
    let (first, second) = (SOURCE, SECOND.0 as u16);
    assert_eq!(
        model.received(),
        [
            pages(first, 0),
            pages(first, 5),
            pages(second, 0xf_ffff),
            Received::Wait
        ]
    );
    driver.invalidate_domain(OTHER).unwrap();
    assert_eq!(model.received(), [all(first, 6), Received::Wait]);
    // Pages of many members become one command each, and one wait.
    for pasid in 10..41 {
        driver
            .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, table(0x1000))
            .unwrap();
    }
    model.received();
    driver.invalidate(DOMAIN, &one).unwrap();
    let received = model.received();
    assert_eq!(received.len(), 34 + 1);
    let whole = received
        .iter()
        .filter(|received| matches!(received, Received::GuestPages(_, _, 0, 52, true)));
    assert_eq!(whole.count(), 34);
}

#[test]
fn where_absent_entries_are_cached_they_are_forgotten_too() {
    let (driver, model) = unit(
        GUEST,
        Config {
            caches_not_present: true,
            ..config(9)
        },
    );
    driver.enable().unwrap();
    model.received();
    driver
        .attach_pasid(DEVICE, Pasid(3), DOMAIN, table(0x1000))
        .unwrap();
    assert_eq!(
        model.received(),
        [
            Received::Device(SOURCE),
            Received::Barrier,
            all(SOURCE, 3),
            Received::Wait
        ]
    );
}

#[test]
fn a_successor_knows_all_pasids() {
    let (driver, model) = guests(12);
    driver.attach(DEVICE, OTHER, table(0x20_0000)).unwrap();
    for pasid in 1..=20 {
        driver
            .attach_pasid(SECOND, Pasid(pasid * 100), DOMAIN, table(0x10_0000))
            .unwrap();
    }
    let used = driver.memory().in_use();
    model.received();
    let (mut pages, mut tables) = (0, Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        UnitMemory::Structure { span, .. } => pages += span.len / 4096,
        UnitMemory::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    assert_eq!(pages, used);
    let mut expected = std::vec![(OTHER, table(0x20_0000))];
    expected.resize(21, (DOMAIN, table(0x10_0000)));
    assert_eq!(tables, expected);
    model.received();
    let adopt = |config| AmdVi::adopt(model.clone(), memory.clone(), config, &frozen);
    for (config, name) in [(CONFIG, "the mode"), (config(11), "bits of a PASID")] {
        match adopt(config) {
            Err(UnitAdoptError::Register { name: found, .. }) => assert_eq!(found, name),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("adopted"),
        }
    }
    let heir = adopt(config(12)).unwrap();
    assert_eq!(model.received(), []);
    heir.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(model.received().len(), 20 + 1);
    for pasid in 1..=20 {
        heir.detach_pasid(SECOND, Pasid(pasid * 100)).unwrap();
    }
    heir.detach(DEVICE).unwrap();
    let (_, memory) = heir.tear_down().unwrap();
    assert_eq!(memory.in_use(), 0);
}
