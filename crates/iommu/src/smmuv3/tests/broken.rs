//! Units that do not answer, or stop: everything ends, with a name.

use super::*;

#[test]
fn devices_are_blocked_while_the_unit_has_started_by_halves() {
    for bit in [1 << 3, 1 << 2, 1] {
        let (driver, model) = unit(IDS, CONFIG);
        model.state().broken.stuck = bit;
        assert!(driver.enable().is_err());
        assert_eq!(model.state().gbpa >> 20 & 1, 1);
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
                let Err(UnitAttachError::Unit { cause, .. }) = failed else {
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
                model.received();
            }
        }
    }
}

#[test]
fn a_unit_that_has_given_up_altogether_says_that() {
    let (driver, model) = enabled(CONFIG);
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
