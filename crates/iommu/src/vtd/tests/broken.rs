//! Units that do not answer, refuse, or lose faults: everything ends, with a name.

use std::string::ToString;
use std::vec::Vec;

use iopt::walk::Access;

use super::model::{Broken, PATIENCE};
use super::*;
use crate::fault::FaultReason;

fn timed_out(awaited: &'static str) -> UnitError {
    UnitError::TimedOut {
        awaited,
        rounds: PATIENCE,
    }
}

#[test]
fn each_status_that_does_not_follow_is_named() {
    let cap = CAP | WRITE_BUFFERS | PROTECTED_MEMORY;
    for (stuck, awaited) in [
        (1 << 26, "GSTS.QIES = 1"),
        (1 << 27, "GSTS.WBFS = 0"),
        (1 << 30, "GSTS.RTPS = 1"),
        (1 << 31, "GSTS.TES = 1"),
    ] {
        let (driver, model) = unit(cap, ECAP, Mode::Legacy);
        model.state().broken.stuck = stuck;
        assert_eq!(driver.enable(), Err(timed_out(awaited)));
        // The same unit, repaired.
        model.state().broken.stuck = 0;
        assert_eq!(driver.enable(), Ok(()));
    }
    let (driver, model) = unit(cap, ECAP, Mode::Legacy);
    model.state().broken.protects = true;
    assert_eq!(driver.enable(), Err(timed_out("PMEN.PRS = 0")));
    let (driver, model) = enabled(cap, ECAP, Mode::Legacy);
    model.state().broken.stuck = 1 << 31;
    assert_eq!(driver.disable(), Err(timed_out("GSTS.TES = 0")));
}

#[test]
fn a_wait_that_is_not_answered_ends_and_fails_the_flush() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    model.state().broken.mute = true;
    let cause = timed_out("the status of an invalidation wait");
    let failed = FlushError::Unit {
        domain: DOMAIN,
        cause,
    };
    assert_eq!(driver.invalidate_domain(DOMAIN), Err(failed));
    assert_eq!(driver.counters().waits, 1, "the one of enabling");
    // A detach that was not answered leaves the device without translation, and attached.
    assert_eq!(
        driver.detach(DEVICE),
        Err(AttachError::Unit {
            device: DEVICE,
            cause
        })
    );
    assert_eq!(model.look_up(SOURCE), None);
    assert!(matches!(
        driver.attach(DEVICE, DOMAIN, root(0x1000, 4)),
        Err(AttachError::AlreadyAttached { .. })
    ));
    model.state().broken.mute = false;
    model.told();
    driver.detach(DEVICE).unwrap();
    assert_eq!(
        told(&model),
        [
            Told::Contexts(3, 7, SOURCE),
            Told::Iotlb(2, 7, None),
            Told::Wait(0)
        ]
    );
    assert_eq!(
        driver.detach(DEVICE),
        Err(AttachError::NotAttached { device: DEVICE })
    );
}

#[test]
fn an_attach_that_is_not_answered_leaves_no_translation() {
    let (driver, model) = enabled(CAP | CACHING_MODE, ECAP, Mode::Legacy);
    model.state().broken.mute = true;
    let failed = driver.attach(DEVICE, DOMAIN, root(0x1000, 4));
    assert!(matches!(failed, Err(AttachError::Unit { .. })));
    assert_eq!(model.look_up(SOURCE), None);
    model.state().broken.mute = false;
    driver.detach(DEVICE).unwrap();
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    assert!(model.look_up(SOURCE).is_some());
}

#[test]
fn a_queue_that_is_not_emptied_fills_and_says_so() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
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
    // 255 places of 256, two for each flush.
    assert_eq!(full, 127);
    assert_eq!(error, UnitError::QueueFull { needed: 2, free: 1 });
    // Late answers are no answers to the next flush, which gets its own.
    model.state().broken.deaf = false;
    driver.invalidate_domain(DOMAIN).unwrap();
    let told = model.told();
    assert_eq!(told.len(), 256);
    // And around the end of the ring.
    for _ in 0..300 {
        driver.invalidate_domain(DOMAIN).unwrap();
    }
    assert_eq!(model.told().len(), 600);
}

#[test]
fn a_queue_that_stops_fails_one_flush_and_serves_the_next() {
    for mode in [Mode::Legacy, Mode::ScalableSecond] {
        for (bit, name) in [(4, "IQE"), (5, "ICE"), (6, "ITE")] {
            for at in 0..3 {
                let (driver, model) = enabled(CAP, ECAP | SCALABLE_BOTH, mode);
                let enabling = if mode == Mode::Legacy { 3 } else { 4 };
                model.state().broken.stops = Some((1 << bit, enabling + at));
                let what = Invalidation::of(Span::new(0xf000, 0x2000), 1, false);
                let failed = driver.invalidate(DOMAIN, &what).unwrap_err();
                let FlushError::Unit { cause, .. } = failed else {
                    panic!("{failed}");
                };
                let UnitError::Command {
                    error,
                    command,
                    record,
                } = cause
                else {
                    panic!("{cause}");
                };
                assert!(error.starts_with(name), "{error}");
                let kind = if at < 2 { 2 } else { 5 };
                assert_eq!((command[0] & 0xf, record), (kind, 3), "{cause}");
                // What was left was taken out as waits for nobody.
                let left = told(&model);
                let pages = left.iter().filter(|told| matches!(told, Told::Iotlb(..)));
                assert_eq!(pages.count() as u32, at);
                assert_eq!(left.len(), 3);
                driver.invalidate(DOMAIN, &what).unwrap();
                assert_eq!(told(&model).len(), 3);
            }
        }
    }
}

#[test]
fn register_commands_that_hang_or_are_refused_are_named() {
    let (driver, model) = enabled(CAP, ECAP & !QUEUED, Mode::Legacy);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    model.state().broken.busy = true;
    let hung = |result: Result<(), FlushError>| match result {
        Err(FlushError::Unit { cause, .. }) => cause,
        other => panic!("{other:?}"),
    };
    let waited = timed_out("IOTLB.IVT = 0");
    assert_eq!(hung(driver.invalidate_domain(DOMAIN)), waited);
    // It is busy still: nothing is written over it.
    assert_eq!(hung(driver.invalidate_domain(DOMAIN)), waited);
    assert_eq!(
        driver.detach(DEVICE),
        Err(AttachError::Unit {
            device: DEVICE,
            cause: timed_out("CCMD.ICC = 0")
        })
    );
    model.state().broken = Broken {
        refuses: true,
        ..Broken::default()
    };
    let cause = hung(driver.invalidate_domain(DOMAIN));
    assert_eq!(
        cause,
        UnitError::Refused {
            register: "IOTLB",
            value: 0
        }
    );
    model.told();
}

#[test]
fn faults_come_oldest_first_and_a_full_log_says_so() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    let drain = || {
        let mut faults = Vec::new();
        let lost = driver.drain_faults(&mut |fault| faults.push(fault));
        (faults, lost)
    };
    assert_eq!(drain(), (Vec::new(), 0));
    // Three faults, two records: the third is lost.
    model.fault(SOURCE, 0x7000, true, 6);
    model.fault(SOURCE, 0x8000, false, 2);
    model.fault(SOURCE, 0x9000, false, 5);
    let (faults, lost) = drain();
    assert_eq!(lost, 1);
    assert_eq!(faults.len(), 2);
    assert_eq!((faults[0].device, faults[0].iova), (DEVICE, 0x7000));
    assert_eq!(faults[0].access, Access::Read);
    assert_eq!(
        faults[0].reason,
        FaultReason::Reported {
            code: 6,
            meaning: "reading is not allowed",
            details: crate::Details::default(),
        }
    );
    assert_eq!(
        faults[1].to_string(),
        "03:05.1: write of 0x8000: no context entry for the device (reason 0x2)"
    );
    assert_eq!(drain(), (Vec::new(), 0));
    // The next ones are in records 0, 1, but the first pending is 1 after one more.
    model.fault(SOURCE, 0xa000, true, 6);
    assert_eq!(drain().0.len(), 1);
    model.fault(SOURCE, 0xb000, true, 6);
    model.fault(SOURCE, 0xc000, true, 6);
    let pages: Vec<_> = drain().0.iter().map(|fault| fault.iova).collect();
    assert_eq!(pages, [0xb000, 0xc000]);
    model.told();
}

#[test]
fn interrupts_are_reserved() {
    let (driver, _) = unit(CAP, ECAP, Mode::Legacy);
    let mut spans = Vec::new();
    driver.reserved(DEVICE, &mut |span| spans.push(span));
    assert_eq!(spans, [Span::new(0xfee0_0000, 0x10_0000)]);
}
