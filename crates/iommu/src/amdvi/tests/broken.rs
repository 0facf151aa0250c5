//! Units that do not answer, stop, or lose faults: everything ends, with a name.

use std::string::ToString;

use iopt::walk::Access;

use super::*;
use crate::amdvi::capabilities::RING;
use crate::fault::FaultReason;

#[test]
fn a_unit_that_has_started_by_halves_may_translate_and_is_flushed() {
    for stuck in [1 << 3, 1 << 4] {
        let (driver, model) = unit(FEATURES, CONFIG);
        model.state().broken.stuck = stuck;
        assert!(driver.enable().is_err());
        let fetches = stuck != 1 << 4;
        assert_eq!(driver.invalidate_domain(DOMAIN).is_ok(), fetches);
        model.state().broken.stuck = 0;
        assert_eq!(driver.enable(), Ok(()));
        model.state().broken.stuck = stuck;
        let off = timed_out("Status.CmdBufRun and EventLogRun = 0");
        assert_eq!(driver.enable(), Err(off));
    }
}

/// No call has drained the events of the first time.
#[test]
fn a_unit_that_stops_again_is_not_blamed_for_what_was_before() {
    let (driver, model) = enabled(CONFIG);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    let stop = |event| {
        // The buffer begins anew.
        model.state().broken.stops = Some((event, 0));
        model.state().fetched = 0;
        let failed = driver.invalidate_domain(DOMAIN).unwrap_err();
        model.state().broken.stops = None;
        match failed {
            FlushError::Unit {
                cause: UnitError::Command { error, .. },
                ..
            } => error,
            other => panic!("{other}"),
        }
    };
    assert_eq!(stop(5), "ILLEGAL_COMMAND_ERROR");
    assert_eq!(stop(6), "COMMAND_HARDWARE_ERROR");
    assert_eq!(stop(5), "ILLEGAL_COMMAND_ERROR");
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(drain(&driver), (Vec::new(), 0));
    model.received();
}

const READ: u64 = 0;
const WRITE: u64 = 1 << 53;
/// PR and PE.
const DENIED: u64 = 1 << 52 | 1 << 54;

fn page_fault(flags: u64) -> u64 {
    2 << 60 | flags | 7 << 32 | u64::from(SOURCE)
}

#[test]
fn faults_come_oldest_first_by_name() {
    let (driver, model) = enabled(CONFIG);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    model.event(page_fault(DENIED | WRITE), 0x7123);
    model.event(page_fault(READ), 0x8000);
    model.event(page_fault(1 << 52 | 1 << 55), 0x9000);
    for code in [1, 3, 4, 7, 8, 9, 15] {
        model.event(code << 60 | 0x100, code << 12);
    }
    let (faults, lost) = drain(&driver);
    assert_eq!((faults.len(), lost), (10, 0));
    assert_eq!(
        faults[0],
        Fault {
            device: DEVICE,
            pasid: None,
            domain: Some(DOMAIN),
            iova: 0x7000,
            access: Some(Access::Write),
            reason: FaultReason::Reported {
                code: 0x2070,
                meaning: "IO_PAGE_FAULT: not allowed",
                details: crate::Details::default(),
            },
        }
    );
    let said: Vec<_> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(
        said[1],
        "03:05.1 (domain 7): access to 0x8000: IO_PAGE_FAULT: not present (reason 0x2000)"
    );
    for (said, name) in said[2..].iter().zip([
        "IO_PAGE_FAULT: reserved",
        "01:00.0: access to 0x1000: ILLEGAL_DEV_TABLE_ENTRY",
        "DEV_TAB_HARDWARE_ERROR",
        "PAGE_TAB_HARDWARE_ERROR",
        "IOTLB_INV_TIMEOUT",
        "INVALID_DEVICE_REQUEST",
        "INVALID_PPR_REQUEST",
        "without a name",
    ]) {
        assert!(said.contains(name), "{said}");
    }
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

/// RW means something of an access that met an entry.
#[test]
fn an_event_says_what_was_asked_for_where_it_knows() {
    let (driver, model) = enabled(CONFIG);
    let (present, interrupt, request) = (1 << 52, 1 << 51, 1 << 56);
    let (read, write) = (Some(Access::Read), Some(Access::Write));
    for (code, flags, access) in [
        (0x2, present, read),
        (0x2, present | WRITE, write),
        (0xd, present | WRITE, write),
        (0x2, WRITE, None),
        (0x2, present | interrupt | WRITE, None),
        (0x2, present | request | WRITE, None),
        (0x1, WRITE, None),
        (0x7, present | WRITE, None),
    ] {
        model.event(code << 60 | flags | u64::from(SOURCE), 0x7000);
        let (faults, _) = drain(&driver);
        assert_eq!(faults[0].access, access, "{code:#x} {flags:#x}");
        let FaultReason::Reported { code: said, .. } = faults[0].reason else {
            panic!("{}", faults[0]);
        };
        assert_eq!(u64::from(said), code << 12 | flags >> 48);
    }
}

#[test]
fn a_log_that_is_not_ours_is_left_alone() {
    let (driver, model) = unit(FEATURES, CONFIG);
    model.write64(0x2010, 0x40);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    assert_eq!(model.read64(0x2010), 0x40);
    driver.enable().unwrap();
    model.event(page_fault(READ), 0x1000);
    assert_eq!(drain(&driver).0.len(), 1);
    driver.disable().unwrap();
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

/// A unit that takes the head over while the log is off alone: it has room for 255 events between restarts.
#[test]
fn a_full_log_goes_on_where_the_unit_ignores_the_head_while_it_logs() {
    let (driver, model) = enabled(CONFIG);
    model.state().broken.keeps_head = true;
    for latency in [0, 3] {
        model.state().latency = latency;
        for _ in 0..3 {
            // Read one by one: nothing comes twice.
            for n in 0..255 {
                model.event(page_fault(READ), n << 12);
                let (faults, lost) = drain(&driver);
                assert_eq!((faults.len(), lost), (1, 0));
                assert_eq!(faults[0].iova, n << 12);
            }
            model.event(page_fault(READ), 0);
            assert_eq!(drain(&driver), (Vec::new(), 1));
            // Latency ends with a wait, as that of a flush.
            driver.invalidate_domain(DOMAIN).unwrap();
            assert_eq!(model.read64(0x2010), 0);
            // And all at once.
            for n in 0..300 {
                model.event(page_fault(READ), n << 12);
            }
            let (faults, lost) = drain(&driver);
            assert_eq!((faults.len(), lost), (255, 1));
            driver.invalidate_domain(DOMAIN).unwrap();
        }
    }
}

/// A successor reads on where its predecessor has stopped, whatever the register says.
#[test]
fn what_was_read_before_a_handover_is_not_read_again() {
    for keeps_head in [false, true] {
        let (driver, model) = enabled(CONFIG);
        model.state().broken.keeps_head = keeps_head;
        model.event(page_fault(READ), 0x1000);
        assert_eq!(drain(&driver).0.len(), 1);
        model.event(page_fault(READ), 0x2000);
        let frozen = driver.freeze(&mut |_| ());
        let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
        model.event(page_fault(READ), 0x3000);
        let heir = AmdVi::adopt(model.clone(), memory, CONFIG, &frozen).unwrap();
        let (faults, lost) = drain(&heir);
        let addresses: Vec<_> = faults.iter().map(|fault| fault.iova).collect();
        assert_eq!((addresses.as_slice(), lost), (&[0x2000, 0x3000][..], 0));
    }
}

#[test]
fn an_event_that_does_not_arrive_is_counted_as_lost() {
    let (driver, model) = enabled(CONFIG);
    // Every place has held an event.
    for _ in 0..RING {
        model.event(page_fault(READ), 0x7000);
        assert_eq!(drain(&driver).0.len(), 1);
    }
    model.event(page_fault(READ), 0x1000);
    model.state().broken.late = true;
    model.event(page_fault(READ), 0x2000);
    model.state().broken.late = false;
    model.event(page_fault(READ), 0x3000);
    let (faults, lost) = drain(&driver);
    assert_eq!((faults.len(), faults[0].iova, lost), (1, 0x1000, 1));
    let (faults, lost) = drain(&driver);
    assert_eq!((faults.len(), faults[0].iova, lost), (1, 0x3000, 0));
}
