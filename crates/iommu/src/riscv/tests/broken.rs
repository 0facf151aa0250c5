//! Units that do not answer, stop, or lose faults: everything ends, with a name.

use std::string::ToString;

use iopt::walk::Access;

use super::*;
use crate::fault::{Details, FaultReason, RequestKind, SecondStage};

#[test]
fn each_register_that_does_not_take_a_value_is_named() {
    let refused = |result| match result {
        Err(UnitError::Refused { register, .. }) => register,
        other => panic!("{other:?}"),
    };
    for (base, name) in [(24, "cqb"), (40, "fqb")] {
        let (driver, model) = unit(PLAIN, CONFIG);
        model.state().broken.no_base = Some(base);
        assert_eq!(refused(driver.enable()), name);
        // Nothing is translated by a queue that is not ours.
        assert_eq!(model.state().ddtp & 0xf, 0);
    }
    let (driver, model) = unit(PLAIN | 1 << 27, CONFIG);
    model.state().fctl = 1;
    model.state().broken.fixed = true;
    assert_eq!(refused(driver.enable()), "fctl");
    let (driver, model) = enabled(PLAIN, CONFIG);
    model.state().broken.no_modes = 1 << 1;
    assert_eq!(refused(driver.disable()), "ddtp");
    model.state().broken.no_modes = 1;
    model.state().ddtp |= 3;
    assert_eq!(refused(driver.disable()), "ddtp");
}

#[test]
fn a_process_beside_one_that_has_failed_to_leave_finds_the_context_valid_again() {
    let (driver, model) = enabled(PLAIN, PROCESSES);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    model.state().broken.mute = true;
    let pages = driver.memory().in_use();
    driver.detach(DEVICE).unwrap_err();
    assert_eq!(driver.memory().in_use(), pages, "of its directory");
    driver
        .attach_pasid(DEVICE, Pasid(5), DomainId(8), root(0x2000, 4))
        .unwrap();
    assert_eq!(model.look_up(ID, None), None);
    assert!(model.look_up(ID, Some(5)).is_some());
    model.state().broken.mute = false;
    driver.detach(DEVICE).unwrap();
    assert!(model.look_up(ID, Some(5)).is_some());
}

#[test]
fn a_unit_that_does_not_start_again_says_so_to_the_next() {
    let (driver, model) = enabled(PLAIN, CONFIG);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    model.state().broken.stops = Some((1 << 9, 5));
    model.state().broken.stuck = Some(72);
    for _ in 0..3 {
        assert!(driver.invalidate_domain(DOMAIN).is_err());
    }
    model.state().broken = model::Broken::default();
    assert!(driver.invalidate_domain(DOMAIN).is_err(), "found stopped");
    driver.invalidate_domain(DOMAIN).unwrap();
}

/// The first word of a record: TTYP 3, an untranslated write; and 2, a read.
const WRITE: u64 = 3 << 34 | ID << 40;
const READ: u64 = 2 << 34 | ID << 40;

#[test]
fn faults_come_oldest_first_by_name() {
    let (driver, model) = enabled(PLAIN, CONFIG);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    model.fault(WRITE | 15, 0x7123);
    model.fault(READ | 13 | 1 << 32 | 0x4_5678 << 12, 0x8000);
    // Not caused by an access.
    model.fault(23, 0x9000);
    let named = [
        1, 4, 5, 6, 7, 12, 20, 21, 256, 257, 258, 259, 260, 261, 262, 263, 264, 265, 266, 267, 268,
        269, 270, 271, 272, 273, 274,
    ];
    for cause in named {
        model.fault(READ | cause, 0);
    }
    model.fault(READ | 0xfff, 0);
    let (faults, lost) = drain(&driver);
    assert_eq!((faults.len(), lost), (named.len() + 4, 0));
    assert_eq!(
        faults[0],
        Fault {
            device: DEVICE,
            pasid: None,
            domain: None,
            iova: 0x7123,
            access: Some(Access::Write),
            reason: FaultReason::Reported {
                code: 15,
                meaning: "write/AMO page fault",
                details: Details {
                    request: Some(RequestKind::Untranslated { execute: false }),
                    privileged: Some(false),
                    second_stage: None,
                },
            },
        }
    );
    let said: Vec<_> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(
        said[1],
        "03:05.1 PASID 284280: read of 0x8000: read page fault (reason 0xd)"
    );
    assert_eq!(
        said[2],
        "00:00.0: no request, 0x9000: write/AMO guest-page fault (reason 0x17, second stage of 0x0)"
    );
    let (unknown, known) = said[3..].split_last().unwrap();
    assert!(unknown.contains("without a name"), "{unknown}");
    let mut known: Vec<_> = known.to_vec();
    assert!(!known.iter().any(|said| said.contains("without a name")));
    known.sort();
    known.dedup();
    assert_eq!(known.len(), named.len());
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

/// Section "Fault/Event-Queue (FQ)": the fields of a record, and table "Fault record TTYP field encodings".
#[test]
fn nothing_that_a_record_says_is_dropped() {
    let (driver, model) = enabled(PLAIN, CONFIG);
    // PV and PRIV, with PID 5.
    let process = 5 << 12 | 1 << 32;
    let privileged = process | 1 << 33;
    let untranslated = |execute| Some(RequestKind::Untranslated { execute });
    let translated = |execute| Some(RequestKind::Translated { execute });
    let (read, write) = (Access::Read, Access::Write);
    // TTYP, and what it is.
    let kinds = [
        (0, Some(RequestKind::None), None),
        (1, untranslated(true), Some(read)),
        (2, untranslated(false), Some(read)),
        (3, untranslated(false), Some(write)),
        (4, None, Some(write)),
        (5, translated(true), Some(read)),
        (6, translated(false), Some(read)),
        (7, translated(false), Some(write)),
        (8, Some(RequestKind::Translation), Some(write)),
        (9, Some(RequestKind::Message), None),
        (10, None, Some(write)),
        (63, None, Some(write)),
    ];
    let seconds = [
        (0x8765_4320, 0x8765_4320, None),
        (0x8765_4321, 0x8765_4320, Some(read)),
        (0x8765_4323, 0x8765_4320, Some(write)),
        // Bit 1 says nothing by itself.
        (0x8765_4322, 0x8765_4320, None),
    ];
    for (kind, request, access) in kinds {
        for (said, address, table) in seconds {
            for (flags, pasid) in [
                (0, None),
                (process, Some(Pasid(5))),
                (privileged, Some(Pasid(5))),
            ] {
                for cause in [15, 23] {
                    let header = ID << 40 | kind << 34 | flags | cause;
                    model.fault_of_second(header, 0x7fff_1234_5678, said);
                    let (faults, lost) = drain(&driver);
                    let second = SecondStage { address, table };
                    let FaultReason::Reported { details, .. } = faults[0].reason else {
                        panic!("{}", faults[0]);
                    };
                    let expected = Details {
                        request,
                        privileged: Some(flags == privileged),
                        second_stage: (cause == 23).then_some(second),
                    };
                    assert_eq!((faults.len(), lost, details), (1, 0, expected));
                    let Fault { iova, device, .. } = faults[0];
                    assert_eq!((iova, device), (0x7fff_1234_5678, DEVICE));
                    assert_eq!((faults[0].pasid, faults[0].access), (pasid, access));
                }
            }
        }
    }
    for (header, second, said) in [
        (
            1 << 34 | privileged | 20,
            0x5001,
            "read of 0x1234 for execution with privilege: instruction guest-page fault \
             (reason 0x14, second stage of 0x5000, a table's read)",
        ),
        (
            7 << 34 | process | 7,
            0,
            "translated write of 0x1234: write/AMO access fault (reason 0x7)",
        ),
        (
            8 << 34 | process | 260,
            0,
            "translation of 0x1234: transaction type disallowed (reason 0x104)",
        ),
        (
            9 << 34 | process | 256,
            0,
            "message 0x1234: all inbound transactions disallowed (reason 0x100)",
        ),
    ] {
        model.fault_of_second(ID << 40 | header, 0x1234, second);
        let fault = drain(&driver).0[0].to_string();
        assert_eq!(fault, std::format!("03:05.1 PASID 5: {said}"));
    }
}

#[test]
fn a_queue_that_is_not_ours_is_left_alone() {
    let (driver, model) = unit(PLAIN, CONFIG);
    model.write32(48, 4);
    assert_eq!(drain(&driver), (Vec::new(), 0));
    assert_eq!(model.read32(48), 4);
    driver.enable().unwrap();
    model.fault(READ | 13, 0x1000);
    assert_eq!(drain(&driver).0.len(), 1);
    driver.disable().unwrap();
    model.write32(48, 4);
    assert_eq!(drain(&driver), (Vec::new(), 0));
}

#[test]
fn a_record_that_cannot_be_written_is_lost() {
    let (driver, model) = enabled(PLAIN, CONFIG);
    *model.state().csrs.get_mut(&76).unwrap() |= 1 << 8;
    assert_eq!(drain(&driver), (Vec::new(), 1));
    model.fault(READ | 13, 0x5000);
    assert_eq!(drain(&driver).0.len(), 1);
}
