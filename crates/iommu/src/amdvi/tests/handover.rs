//! Handing over.

use std::vec::Vec;

use super::*;
use crate::handover::{AdoptError, Frozen, Held};

#[test]
fn a_successor_goes_on_in_the_buffer_and_with_the_devices() {
    let (driver, model) = enabled(CONFIG);
    driver.attach(DEVICE, DOMAIN, root(0x10_0000, 4)).unwrap();
    let used = driver.memory().in_use();
    model.told();
    let (mut pages, mut tables) = (0, Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        Held::Structure { span, .. } => pages += span.len / 4096,
        Held::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    assert_eq!(
        (pages, tables),
        (used, [(DOMAIN, root(0x10_0000, 4))].into())
    );
    model.told();

    let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
    let adopt = |frozen: &Frozen| AmdVi::adopt(model.clone(), memory.clone(), CONFIG, frozen);
    let refused = |frozen: &Frozen| match adopt(frozen) {
        Err(ProbeError::Adopt(AdoptError::Register { name, .. })) => name,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("adopted"),
    };
    let mut other = frozen;
    for (word, name) in [
        (1, "Device Table Base"),
        (2, "Command Buffer Base"),
        (4, "Event Log Base"),
    ] {
        other.words[word] += 4096;
        assert_eq!(refused(&other), name);
        other = frozen;
    }
    let heir = adopt(&frozen).unwrap();
    // It has told the unit nothing.
    assert_eq!(model.told(), []);
    let again = heir.attach(DEVICE, DOMAIN, root(0x10_0000, 4));
    assert!(matches!(again, Err(AttachError::AlreadyAttached { .. })));
    heir.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(heir.counters().waits, 1);
    heir.detach(DEVICE).unwrap();
    drop(heir.tear_down().unwrap());
    assert_eq!(refused(&frozen), "Control");
    assert_eq!(memory.in_use(), 0);
}

#[test]
fn a_successor_takes_no_old_ticket_for_an_answer() {
    let (driver, model) = enabled(CONFIG);
    driver.disable().unwrap();
    let frozen = driver.freeze(&mut |_| {}).map_err(|(_, cause)| cause);
    let (frozen, _, memory) = frozen.unwrap();
    let heir = AmdVi::adopt(model.clone(), memory, CONFIG, &frozen).unwrap();
    model.state().broken.mute = true;
    let silent = heir.enable();
    assert!(matches!(silent, Err(UnitError::TimedOut { .. })));
    model.state().broken.mute = false;
    heir.enable().unwrap();
    model.told();
}
