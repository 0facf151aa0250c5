//! Units that do not answer, refuse, or lose faults: everything ends, with a name.

use std::string::ToString;
use std::vec::Vec;

use iopt::walk::Access;

use super::model::Broken;
use super::*;
use crate::fault::FaultReason;

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
        Err(UnitAttachError::Unit {
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
    model.received();
}

/// Fault Recording Register: T1 and T2, which say nothing of interrupt requests.
#[test]
fn a_record_says_what_was_asked_for_where_it_knows() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    let (read, write) = (Some(Access::Read), Some(Access::Write));
    for (types, reason, access, said) in [
        (0, 5, write, "write of 0x7000"),
        (1 << 62, 6, read, "read of 0x7000"),
        // An atomic operation, and a page request.
        (1 << 62 | 1 << 28, 5, write, "write of 0x7000"),
        (1 << 28, 5, None, "access to 0x7000"),
        (1 << 62, 0x22, None, "access to 0x7000"),
        (0, 0x30, write, "write of 0x7000"),
    ] {
        model.fault(SOURCE, 0x7000, false, reason);
        for record in &mut model.state().records {
            if record.1 >> 63 == 1 {
                record.1 |= types;
            }
        }
        let (faults, _) = drain(&driver);
        assert_eq!((faults.len(), faults[0].access), (1, access), "{reason:#x}");
        let text = faults[0].to_string();
        assert!(text.contains(&std::format!(": {said}: ")), "{text}");
    }
}

#[test]
fn faults_come_oldest_first_and_a_full_log_says_so() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    let drain = || drain(&driver);
    assert_eq!(drain(), (Vec::new(), 0));
    // Three faults, two records: the third is lost.
    model.fault(SOURCE, 0x7000, true, 6);
    model.fault(SOURCE, 0x8000, false, 2);
    model.fault(SOURCE, 0x9000, false, 5);
    let (faults, lost) = drain();
    assert_eq!(lost, 1);
    assert_eq!(faults.len(), 2);
    assert_eq!((faults[0].device, faults[0].iova), (DEVICE, 0x7000));
    assert_eq!(faults[0].access, Some(Access::Read));
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
    model.received();
}

#[test]
fn interrupts_are_reserved() {
    let (driver, _) = unit(CAP, ECAP, Mode::Legacy);
    let mut spans = Vec::new();
    driver.reserved(DEVICE, &mut |span| spans.push(span));
    assert_eq!(spans, [Span::new(0xfee0_0000, 0x10_0000)]);
}
