//! Orders: enabling, attaching, detaching, and what capabilities make of the registers.

use super::*;
use crate::handover::UnitKind;
use crate::lines::past_caches;
use crate::setup::{IdRegisters, UnitProbeError};

#[test]
fn capabilities_are_those_of_the_registers() {
    let (driver, _) = unit(CAP, ECAP, Mode::Legacy);
    let can = driver.capabilities();
    let support = can.format(FormatId::VtdSs).unwrap();
    assert_eq!(support.levels, 1 << 3 | 1 << 4);
    assert_eq!(support.page_sizes.bits(), 1 << 12 | 1 << 21 | 1 << 30);
    assert_eq!(
        (can.domain_bits, can.input_bits, can.output_bits),
        (8, 48, 48)
    );
    assert!(can.coherent_walks && can.snoop_control);
    assert!(!can.dirty_tracking && !can.caches_not_present);
    assert_eq!(can.format(FormatId::X86_64), None);

    let five = CAP & !(7 << 9) | 1 << 11 | CACHING_MODE;
    let (driver, _) = unit(five & !(3 << 34), ECAP & !1, Mode::Legacy);
    let can = driver.capabilities();
    assert_eq!(can.format(FormatId::VtdSs).unwrap().levels, 1 << 5);
    assert_eq!(
        can.format(FormatId::VtdSs).unwrap().page_sizes.bits(),
        1 << 12
    );
    assert!(!can.coherent_walks && can.caches_not_present);
    // A map needs a flush of the write buffers, which comes with an invalidation.
    let (driver, _) = unit(CAP | WRITE_BUFFERS, ECAP, Mode::Legacy);
    assert!(driver.capabilities().caches_not_present);
}

#[test]
fn what_is_not_a_unit_or_does_not_offer_the_mode_is_refused_by_name() {
    let refused = |cap, ecap, mode| {
        let config = Config {
            mode,
            ..Config::default()
        };
        Vtd::new(Model::new(memory(), cap, ecap), memory(), config).err()
    };
    let nobody = UnitProbeError::NoUnit {
        kind: UnitKind::Vtd,
        read: IdRegisters::two(("VER", 0x10), ("CAP", u64::MAX)),
    };
    assert_eq!(
        refused(u64::MAX, u64::MAX, Mode::Legacy),
        Some(nobody.into())
    );
    for (cap, ecap, mode) in [
        (CAP & !(7 << 9), ECAP, Mode::Legacy),
        (CAP, ECAP, Mode::ScalableFirst),
        (CAP, ECAP | 1 << 43 | 1 << 47, Mode::ScalableSecond),
        (CAP, ECAP & !QUEUED | SCALABLE_BOTH, Mode::ScalableFirst),
    ] {
        let name = match mode {
            Mode::Legacy => "legacy mode",
            Mode::ScalableSecond => "scalable mode with second-stage tables",
            Mode::ScalableFirst => "scalable mode with first-stage tables",
        };
        let refused = refused(cap, ecap, mode).map(|error| error.to_string());
        let text = std::format!("the unit does not offer {name}: CAP {cap:#x}, ECAP {ecap:#x}");
        assert_eq!(refused, Some(text));
    }
}

#[test]
fn enabling_sets_the_queue_then_the_root_then_invalidates_and_translates() {
    for latency in [0, 1, 7] {
        let (driver, model) = unit(CAP | WRITE_BUFFERS | PROTECTED_MEMORY, ECAP, Mode::Legacy);
        model.state().latency = latency;
        model.state().pmen = 1 << 31 | 1;
        driver.enable().unwrap();
        let root = model.look_up(0).map_or(driver.root(), |_| 0);
        assert_eq!(
            received(&model),
            [
                Received::Queue(true),
                Received::WriteBuffers,
                Received::Root(root),
                Received::WriteBuffers,
                Received::Contexts(1, 0, 0),
                Received::Iotlb(1, 0, None),
                Received::Wait(0),
                Received::Translation(true),
                Received::ProtectedMemoryOff,
            ]
        );
        // Again, over a queue that is in use: translation is never off.
        driver.enable().unwrap();
        let again = received(&model);
        assert_eq!(again[..2], [Received::Queue(false), Received::Queue(true)]);
        assert!(!again.contains(&Received::Translation(false)));
        driver.disable().unwrap();
        assert_eq!(
            received(&model),
            [Received::Translation(false), Received::Queue(false)]
        );
    }
}

#[test]
fn a_unit_without_a_queue_is_invalidated_by_registers() {
    for latency in [0, 3] {
        let (driver, model) = unit(CAP, ECAP & !QUEUED, Mode::Legacy);
        model.state().latency = latency;
        driver.enable().unwrap();
        assert_eq!(
            model.received(),
            [
                Received::Root(driver.root()),
                Received::Contexts(1, 0, 0),
                Received::Iotlb(1, 0, None),
                Received::Translation(true)
            ]
        );
        let what = Invalidation::of(Span::new(0x7f_f000, 0x2000), 1, true);
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(
            model.received(),
            [
                Received::Iotlb(3, 7, Some((0x7f_f000, 0, false))),
                Received::Iotlb(3, 7, Some((0x80_0000, 0, false))),
            ]
        );
        let counters = driver.counters();
        assert_eq!(
            (counters.batches, counters.commands, counters.waits),
            (2, 4, 4)
        );
    }
}

#[test]
fn a_unit_that_does_not_snoop_finds_everything_in_memory() {
    for (mode, expected) in [(Mode::Legacy, false), (Mode::ScalableFirst, true)] {
        let tables = memory();
        let (lines, read) = past_caches(tables.clone());
        let ecap = ECAP & !1 | SCALABLE_BOTH;
        let model = Model::reading(tables, CAP, ecap, read);
        let config = Config {
            mode,
            ..Config::default()
        };
        let driver = Vtd::new(model.clone(), lines, config).unwrap();
        driver.enable().unwrap();
        assert_eq!(model.look_up(SOURCE), None);
        let mut table = root(0x1000, 4);
        if mode == Mode::ScalableFirst {
            table.format = FormatId::X86_64;
        }
        driver.attach(DEVICE, DOMAIN, table).unwrap();
        assert_eq!(model.look_up(SOURCE), Some((7, 0x1000, 4, expected)));
        // The rest of each table that is there now, too.
        for other in [SOURCE & !0xff, SOURCE ^ 0x80, SOURCE ^ 0x40, !SOURCE] {
            assert_eq!(model.look_up(other), None, "{other:#x}");
        }
        driver.detach(DEVICE).unwrap();
        assert_eq!(model.look_up(SOURCE), None);
        model.received();
    }
}
