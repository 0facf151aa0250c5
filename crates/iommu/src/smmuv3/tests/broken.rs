//! Units that do not answer, or stop: everything ends, with a name.

use super::model::PATIENCE;
use super::*;

fn timed_out(awaited: &'static str) -> UnitError {
    UnitError::TimedOut {
        awaited,
        rounds: PATIENCE,
    }
}

/// A unit that answers through memory, or by its index.
fn with(msi: bool) -> (Driver, Model) {
    let mut ids = IDS;
    ids[0] |= if msi { MSI } else { 0 };
    enabled_with(ids, CONFIG)
}

#[test]
fn each_status_that_does_not_follow_is_named() {
    for (bit, name) in [
        (1 << 3, "CR0ACK.CMDQEN = 1"),
        (1 << 2, "CR0ACK.EVENTQEN = 1"),
        (1, "CR0ACK.SMMUEN = 1"),
    ] {
        let (driver, model) = unit(IDS, CONFIG);
        model.state().broken.stuck = bit;
        assert_eq!(driver.enable(), Err(timed_out(name)));
        // Devices are blocked meanwhile.
        assert_eq!(model.state().gbpa >> 20 & 1, 1);
        model.state().broken.stuck = 0;
        model.wait(0);
        assert_eq!(driver.enable(), Ok(()));
        driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
        assert_eq!(found(model.look_up(STREAM, None)), Some((7, root(0x1000))));
        model.state().broken.stuck = bit;
        assert_eq!(driver.disable(), Err(timed_out("CR0ACK = 0")));
        model.state().broken.stuck = 0;
        assert_eq!(driver.disable(), Ok(()));
        model.told();
    }
    let (driver, model) = unit(IDS, CONFIG);
    model.state().broken.bypass = true;
    let update = Err(timed_out("GBPA.Update = 0"));
    assert_eq!(driver.enable(), update);
    assert_eq!(driver.disable(), update);
    model.state().broken.bypass = false;
    model.state().broken.interrupts = true;
    model.state().irq = 1;
    model.wait(0);
    driver
        .enable()
        .unwrap_or_else(|cause| assert_eq!(cause, timed_out("IRQ_CTRLACK = 0")));
}

#[test]
fn a_wait_that_is_not_answered_ends_and_fails_the_flush() {
    for (msi, name) in [
        (false, "CMDQ_CONS = CMDQ_PROD"),
        (true, "the store of a CMD_SYNC"),
    ] {
        let (driver, model) = with(msi);
        driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
        assert!(model.look_up(STREAM, None).is_ok());
        model.state().broken.mute = true;
        let cause = timed_out(name);
        let failed = FlushError::Unit {
            domain: DOMAIN,
            cause,
        };
        let waits = driver.counters().waits;
        assert_eq!(driver.invalidate_domain(DOMAIN), Err(failed));
        assert_eq!(driver.counters().waits, waits);
        // A detach that was not answered leaves the device without translation, and attached.
        let device = DEVICE;
        assert_eq!(
            driver.detach(DEVICE),
            Err(AttachError::Unit { device, cause })
        );
        assert_eq!(found(model.look_up(STREAM, None)), None);
        assert!(matches!(
            driver.attach(DEVICE, DOMAIN, root(0x1000)),
            Err(AttachError::AlreadyAttached { .. })
        ));
        model.state().broken.mute = false;
        model.told();
        driver.detach(DEVICE).unwrap();
        let told = model.told();
        let own = [Told::Stream(STREAM, true), Told::Sync, whole(7), Told::Sync];
        assert_eq!(told[told.len() - 4..], own);
        assert!(matches!(
            driver.detach(DEVICE),
            Err(AttachError::NotAttached { .. })
        ));
    }
}

#[test]
fn an_attach_that_is_not_answered_leaves_no_translation() {
    let config = Config {
        pasid_bits: 4,
        ..CONFIG
    };
    for step in 0..2 {
        for context in [false, true] {
            for root in [root(0x1000), second(0x1000)] {
                let (driver, model) = enabled(config);
                if context {
                    // Its entry is valid already.
                    let other = super::root(0x7000);
                    driver
                        .attach_pasid(DEVICE, Pasid(1), DomainId(1), other)
                        .unwrap();
                    if root != super::root(0x1000) {
                        continue;
                    }
                }
                model.watch(STREAM, None);
                // The first or the second of two batches, each of a command and a wait.
                model.stop(1, 2 * step);
                let failed = driver.attach(DEVICE, DOMAIN, root);
                let Err(AttachError::Unit { cause, .. }) = failed else {
                    panic!("{failed:?}");
                };
                assert!(matches!(
                    cause,
                    UnitError::Command {
                        error: "CERROR_ILL",
                        ..
                    }
                ));
                model.stop(0, u32::MAX);
                driver.detach(DEVICE).unwrap();
                assert_eq!(found(model.look_up(STREAM, None)), None);
                driver.attach(DEVICE, DOMAIN, root).unwrap();
                assert_eq!(found(model.look_up(STREAM, None)), Some((7, root)));
                let wrong = |looked: Looked| found(looked).is_some_and(|found| found != (7, root));
                assert!(!model.seen().into_iter().any(|(_, looked)| wrong(looked)));
                model.told();
            }
        }
    }
}

#[test]
fn a_queue_that_is_not_emptied_fills_and_says_so() {
    for msi in [false, true] {
        let (driver, model) = with(msi);
        driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
        model.told();
        model.state().broken.deaf = true;
        let mut full = 0;
        let error = loop {
            match driver.invalidate_domain(DOMAIN).unwrap_err() {
                FlushError::Unit { cause, .. } => match cause {
                    UnitError::TimedOut { .. } => full += 1,
                    other => break other,
                },
                other => panic!("{other}"),
            }
            assert!(full < 200, "no end");
        };
        // 256 places, two for each flush.
        assert_eq!(full, 128);
        assert_eq!(error, UnitError::QueueFull { needed: 2, free: 0 });
        // Late answers are no answers to the next flush, which gets its own.
        model.state().broken.deaf = false;
        driver.invalidate_domain(DOMAIN).unwrap();
        assert_eq!(model.told().len(), 258);
        // And around the end of the ring.
        for _ in 0..300 {
            driver.invalidate_domain(DOMAIN).unwrap();
        }
        assert_eq!(model.told().len(), 600);
    }
}

#[test]
fn a_unit_that_stops_fails_one_flush_and_serves_the_next() {
    for msi in [false, true] {
        for (error, name) in [
            (1, "CERROR_ILL"),
            (2, "CERROR_ABT"),
            (3, "CERROR_ATC_INV_SYNC"),
            (9, "a command error without a name"),
        ] {
            for at in 0..3 {
                for latency in [0, 5] {
                    let (driver, model) = with(msi);
                    driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
                    model.told();
                    model.state().latency = latency;
                    model.stop(error, at);
                    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
                    let format = iopt::format::ArmStage1::<iopt::format::K4>::new(48, 48).unwrap();
                    let mut table = iopt::Table::new(format, &tables).unwrap();
                    let mut gather = iopt::Gather::new();
                    for page in [0x1000, 0x9000] {
                        let memory = [Span::new(0x8000, 0x1000)];
                        table.map(page, &memory, iopt::Prot::RW).unwrap();
                        let range = Span::new(page, 0x1000);
                        table.unmap(range, &mut gather, &mut iopt::Discard).unwrap();
                    }
                    let flush = |what: &Invalidation| driver.invalidate(DOMAIN, what);
                    let failed = gather.flush_with(flush).unwrap_err();
                    let FlushError::Unit { cause, .. } = failed else {
                        panic!("{failed}");
                    };
                    let UnitError::Command {
                        error: named,
                        command,
                        record,
                    } = cause
                    else {
                        panic!("{cause}");
                    };
                    assert_eq!((named, record >> 24), (name, u64::from(error)));
                    assert_eq!(command[0] & 0xff, if at < 2 { 0x12 } else { 0x46 });
                    assert_eq!(model.told().len() as u32, at);
                    model.stop(0, u32::MAX);
                    let flushed = gather.flush_with(flush).unwrap();
                    table.reclaim(flushed);
                    assert_eq!(model.told().len(), 3);
                }
            }
        }
    }
    // A unit that has given up altogether says that.
    let (driver, model) = with(false);
    driver.attach(DEVICE, DOMAIN, root(0x1000)).unwrap();
    model.state().gerror ^= 1 << 8;
    let refused = UnitError::Refused {
        register: "SMMU_GERROR",
        value: 1 << 8,
    };
    assert_eq!(
        driver.invalidate_domain(DOMAIN),
        Err(FlushError::Unit {
            domain: DOMAIN,
            cause: refused
        })
    );
}
