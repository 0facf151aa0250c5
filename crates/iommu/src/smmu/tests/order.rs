//! The order of writes, and what devices see of it.

use super::*;
use crate::setup::{UnitProbeError, UnitSetupError};

#[test]
fn from_reset_to_translation() {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    let table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    assert_eq!(model.received(), [], "nothing before it is enabled");
    assert_eq!(driver.counters(), CommandCounters::default());
    assert_eq!(model.access(STREAM, 0x1234, true), Seen::Passed(0x1234));

    driver.enable().unwrap();
    let received = model.received();
    // All streams off; CR0 without CLIENTPD; the banks.
    let (streams, received) = received.split_at(32);
    for (n, pair) in streams.chunks(2).enumerate() {
        assert_eq!(pair, [("S2CR", n, 2 << 16), ("SMR", n, 0)]);
    }
    assert_eq!(received[0], ("CR0", 0, ON | 1));
    let (banks, received) = received[1..].split_at(2 * 6 + 11);
    assert_eq!(banks[..4], [off(0), clear(0), off(1), clear(1)].map(|t| t));
    let root = table.root().address;
    assert_eq!(
        banks[4..17],
        [
            off(2),
            clear(2),
            ("CBA2R", 2, 1),
            // Stage 1, stage 2 bypassed: non-shareable, write-back; VMID 0.
            ("CBAR", 2, 0x1_f300),
            // SEP, 48 bits.
            ("TCR2", 2, 7 << 15 | 5),
            // EPD1; inner shareable, write-back; T0SZ.
            ("TCR", 2, 1 << 23 | 0x3500 | 16),
            ("TTBR0", 2, root & 0xffff_ffff),
            // The ASID.
            ("TTBR0 high", 2, root >> 32 | 2 << 16),
            ("TTBR1", 2, 0),
            ("TTBR1 high", 2, 0),
            ("MAIR0", 2, 0x44_04ff),
            ("MAIR1", 2, 0),
            // M, TRE, AFE, CFRE, HUPCF, ASIDPNE.
            ("SCTLR", 2, 0x1127),
        ]
    );
    // Everything is forgotten; the stream; translation.
    assert_eq!(
        received,
        [
            ("TLBIALLH", 0, 0),
            ("TLBIALLNSNH", 0, 0),
            ("TLBGSYNC", 0, 0),
            ("SMR", 0, 1 << 31 | 0x123),
            ("S2CR", 0, 2),
            ("CR0", 0, ON),
        ]
    );
    for write in [false, true] {
        let seen = model.access(STREAM, 0x1234, write);
        assert_eq!(seen, Seen::Translated(DATA + 0x1234));
    }
    assert_eq!(model.access(STREAM, 0x1_0000, false), NOT_PRESENT);
    assert_eq!(model.access(0x124, 0x1234, false), NOT_MAPPED);
    let counters = driver.counters();
    assert_eq!((counters.commands, counters.waits), (2, 1));
}

const fn off(n: usize) -> Received {
    ("SCTLR", n, 0)
}

const fn clear(n: usize) -> Received {
    ("FSR", n, 0xffff_ffff)
}

#[test]
fn devices_pass_until_they_are_translated_and_what_was_cached_is_forgotten() {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    driver
        .attach(DEVICE, DOMAIN, first(&memory, 0).root())
        .unwrap();
    // Translation of another owner, with the tag that ours will have.
    let before = model::Cached {
        tag: (0, Some(2)),
        page: runs::Run::new(0x1000, Span::new(0xbad_0000, 0x1000)),
        write: true,
        global: true,
    };
    model.state().cached.push(before);
    model.state().broken.global_sync = true;
    assert!(driver.enable().is_err());
    assert_eq!(model.access(STREAM, 0x1000, true), Seen::Passed(0x1000));
    model.state().broken.global_sync = false;
    model.state().latency = 5;
    driver.enable().unwrap();
    let ours = Seen::Translated(DATA + 0x1000);
    assert_eq!(model.access(STREAM, 0x1000, true), ours);

    // Again: no stream is ever off.
    model.received();
    driver.enable().unwrap();
    assert_eq!(
        model.received(),
        [
            ("TLBIALLH", 0, 0),
            ("TLBIALLNSNH", 0, 0),
            ("TLBGSYNC", 0, 0),
            ("SMR", 0, 1 << 31 | 0x123),
            ("S2CR", 0, 2),
            ("CR0", 0, ON),
        ]
    );
    assert_eq!(model.access(STREAM, 0x1000, true), ours);

    driver.disable().unwrap();
    assert_eq!(
        model.received(),
        [
            ("CR0", 0, ON | 1),
            ("TLBIALLH", 0, 0),
            ("TLBIALLNSNH", 0, 0),
            ("TLBGSYNC", 0, 0)
        ]
    );
    assert_eq!(model.access(STREAM, 0x1000, true), Seen::Passed(0x1000));
    assert_eq!(drain(&driver), (Vec::new(), 0));
    // The device is still there.
    driver.enable().unwrap();
    assert_eq!(model.access(STREAM, 0x1000, true), ours);
    assert!(driver.tear_down().is_ok());
}

#[test]
fn what_another_driver_had_translated_faults_from_the_beginning() {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    // It translates already, and has streams and a bank of its own.
    let attributes = 0x2a8b_0080;
    model.write32(0, attributes);
    model.write32(0xc04, 1 << 16);
    model.write32(0x804, 1 << 31 | 0x77);
    model.state().wrong.clear();
    assert_eq!(model.access(0x77, 0x1000, false), Seen::Passed(0x1000));
    model.received();
    driver
        .attach(DEVICE, DOMAIN, first(&memory, 0).root())
        .unwrap();
    driver.enable().unwrap();
    let cr0: Vec<_> = model
        .received()
        .into_iter()
        .filter(|t| t.0 == "CR0")
        .collect();
    // Never CLIENTPD; and what firmware says of what passes stays.
    let on = ON | u64::from(attributes);
    assert_eq!(cr0, [("CR0", 0, on), ("CR0", 0, on)]);
    assert_eq!(model.access(0x77, 0x1000, false), NOT_MAPPED);
    let ours = Seen::Translated(DATA + 0x1000);
    assert_eq!(model.access(STREAM, 0x1000, true), ours);
}

#[test]
fn a_domain_is_one_bank_and_the_last_device_frees_it() {
    let (driver, model, memory) = enabled();
    let table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let received = model.received();
    // The bank first, its switch last; then the stream.
    assert_eq!(received[..2], [off(2), clear(2)]);
    assert_eq!(
        received[12..],
        [
            ("SCTLR", 2, 0x1127),
            ("SMR", 0, 1 << 31 | 0x123),
            ("S2CR", 0, 2)
        ]
    );
    let other = DeviceId(0x7fff);
    driver.attach(other, DOMAIN, table.root()).unwrap();
    let added = [("SMR", 1, 1 << 31 | 0x7fff), ("S2CR", 1, 2)];
    assert_eq!(model.received(), added);
    let there = Seen::Translated(DATA + 0x2000);
    assert_eq!(model.access(STREAM, 0x2000, false), there);
    assert_eq!(model.access(0x7fff, 0x2000, false), there);

    // Off; everything forgotten and waited for.
    model.state().latency = 3;
    driver.detach(DEVICE).unwrap();
    let mut left = vec![
        ("S2CR", 0, 2 << 16),
        ("SMR", 0, 0),
        ("TLBIASID", 2, 2),
        ("TLBSYNC", 2, 0),
    ];
    assert_eq!(model.received(), left);
    assert!(model.state().cached.is_empty());
    assert_eq!(model.access(STREAM, 0x2000, false), NOT_MAPPED);
    assert_eq!(model.access(0x7fff, 0x2000, false), there);
    let gone = UnitAttachError::NotAttached { device: DEVICE };
    assert_eq!(driver.detach(DEVICE), Err(gone));

    driver.detach(other).unwrap();
    left.iter_mut().take(2).for_each(|received| received.1 = 1);
    left.extend([off(2), clear(2)]);
    assert_eq!(model.received(), left);
    assert!(model.state().cached.is_empty());
    // Bank, tag and stream register serve another domain.
    let next = first(&memory, 1);
    driver.attach(other, DomainId(8), next.root()).unwrap();
    let there = Seen::Translated(DATA + (1 << 30) + 0x2000);
    assert_eq!(model.access(0x7fff, 0x2000, false), there);
}

#[test]
fn domains_do_not_see_each_other() {
    let (driver, model, memory) = enabled();
    let tables: Vec<_> = (0..4).map(|n| first(&memory, n)).collect();
    for (n, table) in (0..).zip(&tables) {
        driver
            .attach(DeviceId(n), DomainId(n), table.root())
            .unwrap();
    }
    let guest = second(&memory, 40);
    driver
        .attach(DeviceId(4), DomainId(4), guest.root())
        .unwrap();
    for n in 0..4u16 {
        let there = Seen::Translated(DATA + (u64::from(n) << 30) + 0x3000);
        assert_eq!(model.access(n, 0x3000, true), there);
    }
    let there = Seen::Translated(DATA + 0x3000);
    assert_eq!(model.access(4, 0x3000, true), there);
    // A flush of one leaves the others' translations.
    driver.invalidate_domain(DomainId(1)).unwrap();
    driver.invalidate_domain(DomainId(4)).unwrap();
    let tags: Vec<_> = model.state().cached.iter().map(|it| it.tag).collect();
    assert_eq!(tags, [(0, Some(2)), (0, Some(4)), (0, Some(5))]);
}

#[test]
fn stage_2_takes_banks_that_know_nothing_else_first() {
    let (driver, model, memory) = enabled();
    let guest = second(&memory, 40).root();
    let host = first(&memory, 0).root();
    for (n, root, bank) in [
        (0, guest, 0),
        (1, host, 2),
        (2, guest, 1),
        (3, guest, 3),
        (4, host, 4),
        (5, host, 5),
    ] {
        driver.attach(DeviceId(n), DomainId(n), root).unwrap();
        let received = model.received();
        assert_eq!(received.last(), Some(&("S2CR", n as usize, bank)));
        let seen = model.access(n as u16, 0x1000, true);
        assert_eq!(seen, Seen::Translated(DATA + 0x1000));
    }
    for (root, available) in [(guest, 6), (host, 4)] {
        let full = UnitAttachError::NoRoom {
            device: DEVICE,
            what: "context banks for this stage",
            available,
        };
        assert_eq!(driver.attach(DEVICE, DOMAIN, root), Err(full));
    }
    assert_eq!(model.received(), []);
    // A domain that has a bank takes more devices, until streams run out.
    for n in 6..16 {
        driver.attach(DeviceId(n), DomainId(5), host).unwrap();
    }
    let full = driver.attach(DEVICE, DomainId(5), host).unwrap_err();
    assert_eq!(
        full.to_string(),
        "01:04.3: all 16 stream mapping registers are in use"
    );
    driver.detach(DeviceId(9)).unwrap();
    driver.attach(DEVICE, DomainId(5), host).unwrap();
}

#[test]
fn streams_that_are_not_matched_are_indices() {
    let memory = memory();
    // 6 bits.
    let idr0 = IDR0 & !(1 << 27 | 15 << 9) | 6 << 9;
    let (driver, model) = unit_with(memory.clone(), V2, [idr0, IDR1, IDR2]);
    driver.enable().unwrap();
    model.received();
    let root = first(&memory, 0).root();
    driver.attach(DeviceId(63), DOMAIN, root).unwrap();
    assert_eq!(model.received().last(), Some(&("S2CR", 63, 2)));
    let there = Seen::Translated(DATA);
    assert_eq!(model.access(63, 0, false), there);
    // Streams that are not attached are mapped to a fault: ICF.
    assert_eq!(model.access(62, 0, false), Seen::Global(0));
    driver.detach(DeviceId(63)).unwrap();
    assert_eq!(
        model.received()[..2],
        [("S2CR", 63, 2 << 16), ("TLBIASID", 2, 2)]
    );
    assert_eq!(model.access(63, 0, false), Seen::Global(0));
    let config = Config { ignored: 1, ..V2 };
    let (ignored, writable) = (1, 0);
    let refused = UnitSetupError::Probe(UnitProbeError::StreamMask { ignored, writable });
    assert_eq!(Smmu::new(model.clone(), config).err(), Some(refused));
    let (device, last) = (DeviceId(64), 63);
    let beyond = UnitAttachError::Beyond { device, last };
    assert_eq!(driver.attach(device, DOMAIN, root), Err(beyond));
    assert_eq!(driver.detach(device), Err(beyond));
}

#[test]
fn extended_stream_ids_have_16_bits_and_their_valid_bit_elsewhere() {
    let memory = memory();
    let idr = [IDR0 | 1 << 8, IDR1, IDR2];
    let config = Config {
        ignored: 0x8f00,
        ..V2
    };
    let (driver, model) = unit_with(memory.clone(), config, idr);
    driver.enable().unwrap();
    assert_eq!(model.received().last(), Some(&("CR0", 0, ON | 1 << 3)));
    let root = first(&memory, 0).root();
    driver.attach(DeviceId(0xf123), DOMAIN, root).unwrap();
    assert_eq!(
        model.received()[13..],
        [("SMR", 0, 0x8f00_7023), ("S2CR", 0, 1 << 10 | 2)]
    );
    for stream in [0xf123, 0x7023, 0xff23] {
        assert_eq!(model.access(stream, 0, true), Seen::Translated(DATA));
        let device = DeviceId(stream.into());
        let domain = DOMAIN;
        let there = UnitAttachError::AlreadyAttached { device, domain };
        assert_eq!(driver.attach(device, domain, root), Err(there));
    }
    for stream in [0x7022, 0x6023] {
        assert_eq!(model.access(stream, 0, true), NOT_MAPPED);
    }
    let device = DeviceId(0x1_7023);
    assert!(matches!(
        driver.attach(device, DOMAIN, root),
        Err(UnitAttachError::Beyond { last: 0xffff, .. })
    ));
    driver.detach(DeviceId(0x7023)).unwrap();
    assert_eq!(model.access(0x7023, 0, true), NOT_MAPPED);
}

#[test]
fn a_look_at_the_masks_changes_nothing() {
    let new = |model: &Model, ignored| {
        let config = Config { ignored, ..V2 };
        let driver = Smmu::new(model.clone(), config);
        driver.map(|driver| driver.features.ids)
    };
    let model = Model::new(memory(), 2, [IDR0, IDR1, IDR2]);
    let before = model.state().smr.clone();
    assert_eq!(new(&model, 0x7f00), Ok(0x7fff));
    assert_eq!(model.state().smr, before);
    // A unit without the upper bits of either.
    model.state().broken.match_bits = 0x7f00_7000;
    assert_eq!(new(&model, 0x00ff), Ok(0x0fff));
    let (ignored, writable) = (0x01ff, 0x00ff);
    let refused = UnitSetupError::Probe(UnitProbeError::StreamMask { ignored, writable });
    assert_eq!(new(&model, ignored), Err(refused));
    model.state().broken.match_bits = 0;
    // In use: one that is not valid is asked.
    model.write32(0, 0);
    model.received();
    let in_use = UnitProbeError::InUse { streams: 16 };
    assert_eq!(new(&model, 0), Err(in_use.into()));
    model.state().smr[7] = 0x1234;
    assert_eq!(new(&model, 0), Ok(0x7fff));
    assert!(
        model
            .received()
            .iter()
            .all(|received| received.0 == "SMR" && received.1 == 7)
    );
    assert_eq!(model.state().smr[7], 0x1234);
}

#[test]
fn a_root_of_tables_side_by_side_is_aligned_to_all_of_them() {
    let (driver, model, memory) = enabled();
    let wide = ArmStage2::<K4>::new(43, 48).unwrap();
    let mut root = Table::new(wide, memory.clone()).unwrap().root();
    assert_eq!(root.levels, 3);
    driver.attach(DEVICE, DOMAIN, root).unwrap();
    driver.detach(DEVICE).unwrap();
    model.received();
    // Sixteen.
    root.address += 0x8000;
    assert!(matches!(
        driver.attach(DEVICE, DOMAIN, root),
        Err(UnitAttachError::RootAddress { .. })
    ));
    assert_eq!(model.received(), []);
}
