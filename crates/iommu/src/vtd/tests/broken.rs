//! Units that do not answer, refuse, or lose faults: everything ends, with a name.

use std::string::ToString;

use iopt::walk::Access;

use super::model::Broken;
use super::*;
use crate::fault::FaultReason;

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
fn faults_have_the_names_of_their_reasons() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    model.fault(SOURCE, 0x7000, true, 6);
    model.fault(SOURCE, 0x8000, false, 2);
    let (faults, _) = drain(&driver);
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
}
