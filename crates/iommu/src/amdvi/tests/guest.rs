//! Guest tables, and PASIDs.

use super::*;
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
    // A unit that was left so is set to host tables.
    let (driver, model) = unit(GUEST, CONFIG);
    model.state().control = 1 << 16;
    driver.enable().unwrap();
    assert_eq!(model.state().control >> 16 & 1, 0);
    model.received();
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
