//! The order of writes, and capabilities from registers.

use iopt::format::RiscV;
use iopt::{Cell, Table};
use runs::PageSizes;

use super::*;
use crate::handover::UnitKind;
use crate::setup::{IdRegisters, UnitProbeError, UnitSetupError};

const CQCSR: usize = 72;
const FQCSR: usize = 76;

#[test]
fn capabilities_are_those_of_the_register() {
    let sizes = |log2: &[u32]| {
        let bits = log2.iter().map(|log2| 1 << log2).sum();
        PageSizes::from_bits(bits)
    };
    let all = [12, 16, 21, 30, 39, 48];
    for (modes, levels, sizes) in [
        (1, 0b1000, sizes(&all[..4])),
        (3, 0b1_1000, sizes(&all[..5])),
        (7, 0b11_1000, sizes(&all)),
    ] {
        for (format, other, first) in [
            (FormatId::RiscV, FormatId::RiscVG, 9),
            (FormatId::RiscVG, FormatId::RiscV, 17),
        ] {
            let (driver, _) = unit(0x10 | modes << first | 50 << 32, CONFIG);
            let can = driver.capabilities();
            let support = can.format(format).unwrap();
            assert_eq!((support.levels, support.page_sizes), (levels, sizes));
            assert_eq!(can.format(other), None);
            assert_eq!(
                (can.domain_bits, can.input_bits, can.output_bits),
                (16, 64, 50)
            );
            assert!(can.coherent_walks && !can.snoop_control && !can.caches_not_present);
            assert!(!can.dirty_tracking && !can.device_tlbs && !driver.memory_types());
        }
    }
    let (driver, _) = unit(RICH | 1 << 15, CONFIG);
    let can = driver.capabilities();
    assert!(can.dirty_tracking && can.device_tlbs && driver.memory_types());
    assert_eq!(can.pasid_bits, 0);
    // PD8, PD17, PD20; asked for; had.
    for (modes, asked, had) in [
        (0b111, 8, 8),
        (0b111, 9, 9),
        (0b111, 20, 20),
        (0b100, 5, 5),
        (0b011, 20, 17),
        (0b001, 20, 8),
        (0, 8, 0),
    ] {
        let config = Config {
            pasid_bits: asked,
            ..CONFIG
        };
        let (driver, _) = unit(PLAIN & !(7 << 38) | modes << 38, config);
        assert_eq!(driver.capabilities().pasid_bits, had, "{modes:#b} {asked}");
    }
    // Process directories are for first-stage tables.
    let (driver, _) = unit(PLAIN & !(7 << 9), PROCESSES);
    assert_eq!(driver.capabilities().pasid_bits, 0);
}

#[test]
fn what_is_not_a_unit_is_refused_by_name() {
    let refused = |capabilities, features| {
        let memory = memory();
        let model = Model::new(memory.clone(), capabilities);
        model.state().fctl = features;
        let refused = RiscvIommu::new(model, memory.clone(), CONFIG);
        assert_eq!(memory.in_use(), 0);
        refused.err().unwrap()
    };
    let kind = UnitKind::Riscv;
    let read = |capabilities| IdRegisters::one("capabilities", capabilities);
    for capabilities in [u64::MAX, 0, PLAIN ^ 0x30] {
        let nobody = UnitProbeError::NoUnit {
            kind,
            read: read(capabilities),
        };
        assert_eq!(refused(capabilities, 0), nobody.into());
    }
    let capabilities = 0x10 | 1 << 8 | 1 << 16;
    assert_eq!(
        refused(capabilities, 0),
        UnitProbeError::Tables {
            kind,
            read: read(capabilities)
        }
        .into()
    );
    let capabilities = PLAIN;
    assert_eq!(
        refused(capabilities, 1),
        UnitProbeError::BigEndian {
            read: read(capabilities)
        }
        .into()
    );
}

/// PAS, and PPN of 44 bits in registers and directories.
#[test]
fn structures_and_tables_lie_wherever_the_unit_has_addresses() {
    let at = |base, capabilities| {
        let memory = Arc::new(HeapTables::with_tables_at(64, base).unwrap());
        let model = Model::new(memory.clone(), capabilities);
        let driver = RiscvIommu::new(model.clone(), memory.clone(), PROCESSES)?;
        Ok::<_, UnitSetupError>((driver, model, memory))
    };
    let (top, pages) = (1 << 56, 64 << 12);
    let last = top - 1;
    for (bits, base) in [(56, top - pages), (56, 1 << 52), (44, (1 << 44) - pages)] {
        let capabilities = PLAIN & !(0x3f << 32) | bits << 32;
        let (driver, model, memory) = at(base, capabilities).unwrap();
        driver.enable().unwrap();
        let table = Table::new(RiscV::new(3).unwrap(), memory).unwrap();
        driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
        let found = model.look_up(ID, None).unwrap();
        assert_eq!((found.1, found.2), (table.root().address, 3));
        assert!(found.1 >= base);
        driver.detach(DEVICE).unwrap();
    }
    let narrow = PLAIN & !(0x3f << 32) | 55 << 32;
    let refused = UnitSetupError::Addresses { last, bits: 55 };
    assert_eq!(at(top - pages, narrow).err(), Some(refused));
}

#[test]
fn the_directory_has_as_few_levels_as_hold_the_devices_and_the_unit_takes() {
    // Base and extended contexts: bits that 1, 2 and 3 levels hold.
    for (capabilities, holds) in [(PLAIN, [7, 16, 24]), (RICH, [6, 15, 24])] {
        for device_bits in [1, 6, 7, 8, 15, 16, 17, 24, 32] {
            for no_modes in [0, 1 << 2, 1 << 3, 1 << 2 | 1 << 3, 0b11100] {
                let config = Config {
                    device_bits,
                    ..CONFIG
                };
                let (driver, model) = unit(capabilities, config);
                model.state().broken.no_modes = no_modes;
                let bits = device_bits.min(24);
                let fits = |n: &usize| holds[*n] >= bits && no_modes >> (n + 2) & 1 == 0;
                let Some(levels) = (0..3).find(fits) else {
                    let refused = driver.enable();
                    assert!(
                        matches!(
                            refused,
                            Err(UnitError::Refused {
                                register: "ddtp",
                                ..
                            })
                        ),
                        "{refused:?}"
                    );
                    continue;
                };
                driver.enable().unwrap();
                assert_eq!(model.state().ddtp & 0xf, levels as u64 + 2);
                let last = (1u32 << bits) - 1;
                for device in [0, last] {
                    assert_eq!(model.look_up(device.into(), None), None);
                    driver
                        .attach(DeviceId(device), DOMAIN, root(0x1000, 3))
                        .unwrap();
                    let there = (Space::Pscid(7), 0x1000, 3, false);
                    assert_eq!(model.look_up(device.into(), None), Some(there));
                }
                let device = DeviceId(last + 1);
                let beyond = UnitAttachError::Beyond { device, last };
                assert_eq!(driver.detach(device), Err(beyond));
                assert_eq!(driver.attach(device, DOMAIN, root(0x1000, 3)), Err(beyond));
                let beyond = driver.set_device_tlb(device, None);
                assert!(matches!(beyond, Err(UnitAttachError::Beyond { .. })));
                model.received();
            }
        }
    }
}

const FORGET: [Received; 5] = [
    Received::Device(None),
    Received::Fence,
    Received::First(None),
    Received::Second,
    Received::Wait,
];

#[test]
fn enabling_starts_the_queues_then_points_to_the_directory_then_invalidates() {
    let on = [
        Received::Queue(CQCSR, true),
        Received::Queue(FQCSR, true),
        Received::Mode(3),
    ];
    // Earlier states: Off, Bare, a directory of another driver; and the writes of `ddtp` that come first.
    for (before, first) in [
        (0, &[Received::Mode(0)][..]),
        (1, &[]),
        (4 | 0x55 << 10, &[Received::Mode(0)]),
    ] {
        for latency in [0, 1, 7] {
            let (driver, model) = unit(PLAIN, CONFIG);
            model.state().latency = latency;
            model.state().ddtp = before;
            driver.enable().unwrap();
            let expected = [first, &on, &FORGET].concat();
            assert_eq!(model.received(), expected, "{before:#x}");
        }
    }
    let (driver, model) = unit(PLAIN, CONFIG);
    driver.enable().unwrap();
    model.received();
    // Again: translation is never off.
    driver.enable().unwrap();
    let off = [Received::Queue(FQCSR, false), Received::Queue(CQCSR, false)];
    let again = [&off[..], &on[..2], &FORGET].concat();
    assert_eq!(model.received(), again);
    driver.disable().unwrap();
    let disabled = [&[Received::Mode(0), Received::Mode(1)], &off[..]].concat();
    assert_eq!(model.received(), disabled);
    assert_eq!(model.state().ddtp & 0xf, 1);
}

#[test]
fn what_another_driver_has_left_is_stopped_and_put_in_order() {
    // Both byte orders.
    let (driver, model) = unit(PLAIN | 1 << 27, CONFIG);
    // BE, WSI and GXL; Bare; all queues on, with errors.
    model.state().fctl = 0b111;
    model.state().ddtp = 1;
    let csrs = [CQCSR, FQCSR, model::PQCSR];
    model.state().csrs = csrs.map(|csr| (csr, 1 << 16 | 0x301)).into();
    driver.enable().unwrap();
    let received = model.received();
    let expected = [
        Received::Mode(0),
        Received::Queue(model::PQCSR, false),
        Received::Queue(FQCSR, false),
        Received::Queue(CQCSR, false),
        // Interrupts stay as they are.
        Received::Features(0b010),
        Received::Queue(CQCSR, true),
        Received::Queue(FQCSR, true),
        Received::Mode(3),
    ];
    assert_eq!(received, [&expected[..], &FORGET].concat());
    assert_eq!(model.state().csrs[&model::PQCSR], 0);
}

#[test]
fn a_device_is_found_when_attached_and_not_any_more_when_detached() {
    for capabilities in [PLAIN, RICH] {
        for (table, space, gone) in [
            (root(0x1234_5000, 4), Space::Pscid(7), vec![whole(7)]),
            (
                second(0x1234_4000, 5),
                Space::Gscid(7),
                vec![
                    Received::First(Some(7)),
                    Received::Table(Space::Gscid(7), None),
                ],
            ),
        ] {
            let (driver, model) = enabled(capabilities, CONFIG);
            assert_eq!(model.look_up(ID, None), None);
            driver.attach(DEVICE, DOMAIN, table).unwrap();
            // The unit remembers nothing that is not valid.
            assert_eq!(model.received(), []);
            let there = (space, table.address, table.levels.into(), false);
            assert_eq!(model.look_up(ID, None), Some(there));
            assert_eq!(model.look_up(ID ^ 1, None), None);
            assert_eq!(model.look_up(ID, Some(1)), None, "no PASIDs");
            // It uses what it can meanwhile, and keeps nothing.
            model.state().mapped.insert((table.address, 5));
            model.state().busy = vec![(ID, None, 5)];
            assert!(model.reaches(ID, None, 5));
            driver.detach(DEVICE).unwrap();
            let first = [Received::Device(Some(ID)), Received::Fence];
            let expected = [&first, &gone[..], &[Received::Wait]].concat();
            assert_eq!(model.received(), expected);
            assert!(!model.reaches(ID, None, 5));
            assert_eq!(
                driver.detach(DEVICE),
                Err(UnitAttachError::NotAttached { device: DEVICE })
            );
            // The domain's number may be used for another table, by another device too.
            let other = DeviceId(1);
            driver.attach(other, DOMAIN, root(0x6000, 3)).unwrap();
            driver.attach(DEVICE, DOMAIN, root(0x6000, 3)).unwrap();
            assert!(!model.reaches(1, None, 5));
            let there = (Space::Pscid(7), 0x6000, 3, false);
            assert_eq!(model.look_up(ID, None), Some(there));
        }
    }
}

#[test]
fn accessed_and_dirty_bits_are_asked_for_where_there_are_any() {
    for (capabilities, first, second_stage) in [(PLAIN, 0, 0), (RICH, 1 << 8, 1 << 7)] {
        let (driver, _) = enabled(capabilities, PROCESSES);
        driver.attach(DeviceId(0), DOMAIN, root(0x1000, 3)).unwrap();
        let guest = second(0x4000, 3);
        driver.attach(DeviceId(1), DomainId(8), guest).unwrap();
        let memory = driver.memory();
        let control = |device| {
            let inner = driver.inner.lock();
            inner.devices.find(memory, device).unwrap().0.cells[0].get()
        };
        assert_eq!(control(0) & (3 << 7), first);
        assert_eq!(control(1) & (3 << 7), second_stage);
    }
}
