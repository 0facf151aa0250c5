//! Handing over.

use std::vec::Vec;

use super::*;
use crate::handover::{AdoptError, Frozen, Held};

const PAGE: u64 = 4096;

/// What was listed: structures by name, and tables.
type Listed = (Vec<(&'static str, u64)>, Vec<(DomainId, Root)>);

fn freeze(driver: Driver) -> (Frozen, Model, Arc<HeapTables>, Listed) {
    let (mut structures, mut tables) = (Vec::new(), Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        Held::Structure { name, span } => structures.push((name, span.len / PAGE)),
        Held::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, model, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    (frozen, model, memory, (structures, tables))
}

#[test]
fn a_successor_goes_on_in_the_queue_and_with_the_devices() {
    for mode in [Mode::Legacy, Mode::ScalableSecond] {
        let (driver, model) = enabled(CAP, ECAP | SCALABLE_BOTH, mode);
        let there = root(0x10_0000, 4);
        driver.attach(DEVICE, DOMAIN, there).unwrap();
        driver.invalidate_domain(DOMAIN).unwrap();
        let used = driver.memory().in_use();
        model.told();
        let (frozen, model, memory, (structures, tables)) = freeze(driver);
        assert_eq!(tables, [(DOMAIN, there)]);
        let pages: u64 = structures.iter().map(|(_, pages)| pages).sum();
        assert_eq!(pages, used, "{structures:?}");
        assert_eq!(structures.len(), if mode == Mode::Legacy { 4 } else { 6 });
        assert!(matches!(told(&model)[..], [Told::Wait(_)]));

        let config = Config {
            mode,
            ..Config::default()
        };
        let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
        let heir = Vtd::adopt(model.clone(), memory, config, &frozen).unwrap();
        // It has told the unit nothing.
        assert_eq!(told(&model), []);
        let again = heir.attach(DEVICE, DOMAIN, there);
        assert!(matches!(again, Err(AttachError::AlreadyAttached { .. })));
        heir.invalidate_domain(DOMAIN).unwrap();
        assert_eq!(heir.counters().waits, 1);
        heir.detach(DEVICE).unwrap();
        let (_, memory) = heir.tear_down().unwrap();
        assert_eq!(memory.in_use(), 0);
    }
}

#[test]
fn what_is_not_the_unit_described_is_not_adopted() {
    let (driver, _) = enabled(CAP, ECAP, Mode::Legacy);
    let (frozen, model, memory, _) = freeze(driver);
    let refused = |frozen: &Frozen, mode| {
        let config = Config {
            mode,
            ..Config::default()
        };
        match Vtd::adopt(model.clone(), memory.clone(), config, frozen) {
            Err(ProbeError::Adopt(AdoptError::Register { name, .. })) => name,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("adopted"),
        }
    };
    let mut other = frozen;
    other.words[1] += PAGE;
    assert_eq!(refused(&other, Mode::Legacy), "RTADDR");
    other = frozen;
    other.words[2] += PAGE;
    assert_eq!(refused(&other, Mode::Legacy), "IQA");
    other.words[2] = 0;
    assert_eq!(refused(&other, Mode::Legacy), "ECAP.QI");
    other = frozen;
    other.words[0] |= 1 << 8;
    assert_eq!(refused(&other, Mode::Legacy), "the mode");
    // It was disabled meanwhile.
    let config = Config::default();
    let heir = Vtd::adopt(model.clone(), memory.clone(), config, &frozen).unwrap();
    heir.disable().unwrap();
    assert_eq!(refused(&frozen, Mode::Legacy), "GSTS");
}

#[test]
fn a_unit_that_does_not_answer_is_not_frozen() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    model.state().broken.deaf = true;
    let Err((driver, cause)) = driver.freeze(&mut |_| ()) else {
        panic!("frozen");
    };
    assert!(matches!(cause, UnitError::TimedOut { .. }), "{cause}");
    model.state().broken.deaf = false;
    driver.invalidate_domain(DOMAIN).unwrap();
}
