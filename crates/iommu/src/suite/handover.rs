//! Handing a unit over while it translates.
//!
//! A driver lets go when its queue is empty: it lists each page that the unit still uses, and each table once for each
//! device or PASID behind it, and gives the rest back. A successor compares the description with the registers, and
//! names the first that differs; it sends nothing until it is asked to. Then it says what its predecessor would have
//! said. A unit that does not answer is not handed over, and one that is off is not taken for one that is on.

use super::*;

/// The list of a driver that is frozen: structures by name, their pages, and tables.
type Listed = (Vec<&'static str>, u64, Vec<(DomainId, Root)>);

fn freeze<G: QueueRig>(driver: Driven<G>) -> (Frozen, Arc<HeapTables>, Listed)
where
    Driven<G>: Operations + Send + Sync,
{
    let (mut names, mut spans, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        UnitMemory::Structure { name, span } => {
            names.push(name);
            spans.push((span.start, span.len));
        }
        UnitMemory::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    names.sort_unstable();
    names.dedup();
    spans.sort_unstable();
    spans.dedup();
    let pages = spans.iter().map(|(_, len)| len / 4096).sum();
    let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
    (frozen, memory, (names, pages, tables))
}

pub(crate) fn a_successor_goes_on_in_the_queue_and_with_the_devices<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    driver.invalidate_domain(G::DOMAIN).unwrap();
    G::received(&model);
    let (frozen, memory, (names, pages, tables)) = freeze::<G>(driver);
    assert_eq!(tables, [(G::DOMAIN, rig.root())]);
    let mut expected = rig.structures();
    expected.sort_unstable();
    assert_eq!((names, pages), (expected, memory.in_use()));
    assert_eq!(G::received(&model).len(), 1, "a wait");

    let adopt = |frozen: &Frozen| {
        Driven::<G>::adopt(model.clone(), memory.clone(), rig.config(), frozen)
            .map_err(|error| error.to_string())
    };
    let differs = |frozen: &Frozen, name: &str| {
        let error = adopt(frozen).err().expect("it is another");
        assert!(error.starts_with(&std::format!("{name} is ")), "{error}");
    };
    for (change, name) in rig.other_words() {
        let mut other = frozen;
        change(&mut other.words);
        differs(&other, name);
    }
    for (change, name) in rig.other_states() {
        change(&model);
        differs(&frozen, name);
        change(&model);
    }
    let heir = adopt(&frozen).unwrap();
    assert_eq!(G::received(&model), []);
    assert!(matches!(
        heir.attach(G::DEVICE, G::DOMAIN, rig.root()),
        Err(UnitAttachError::AlreadyAttached { .. })
    ));
    heir.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(heir.counters().waits, 1);
    heir.detach(G::DEVICE).unwrap();
    assert_eq!(rig.found(&model, G::DEVICE, None), None);
    assert!(heir.tear_down().is_ok());
    G::received(&model);
    assert_eq!(memory.in_use(), 0);
    differs(&frozen, rig.when_off());
}

pub(crate) fn a_successor_knows_all_address_spaces_and_tlbs<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (root, other) = (rig.root(), rig.other_root());
    let UnitCapabilities {
        pasid_bits,
        domain_bits,
        device_tlbs,
        ..
    } = driver.capabilities();
    if device_tlbs {
        driver.set_device_tlb(G::DEVICE, Some(TLB)).unwrap();
    }
    driver.attach(G::DEVICE, OTHER, other).unwrap();
    driver.attach(SECOND, G::DOMAIN, root).unwrap();
    // A table of another shape, in the highest domain but one; and a page of structures with nothing in it.
    let (third, high) = (DeviceId(1), DomainId((1 << domain_bits) - 2));
    let odd = rig.other_roots()[0];
    driver.attach(third, high, odd).unwrap();
    let gone = DeviceId(0x200);
    driver.attach(gone, G::DOMAIN, root).unwrap();
    driver.detach(gone).unwrap();
    // More than a page of notes; and the last.
    let all = 1 << pasid_bits;
    let last = (all > 600).then(|| all - 1);
    let pasids = || (1..all.min(601)).chain(last).map(Pasid);
    for pasid in pasids() {
        driver
            .attach_pasid(G::DEVICE, pasid, G::DOMAIN, root)
            .unwrap();
    }
    let flushed = |driver: &Driven<G>| {
        [G::DOMAIN, OTHER, high].map(|domain| {
            G::received(&model);
            driver.invalidate_domain(domain).unwrap();
            let said = G::received(&model).into_iter();
            let mut said: Vec<_> = said.map(|said| std::format!("{said:?}")).collect();
            said.sort_unstable();
            said
        })
    };
    let expected = flushed(&driver);
    let (frozen, memory, (_, pages, tables)) = freeze::<G>(driver);
    assert_eq!(pages, memory.in_use());
    let of = |domain, root| tables.iter().filter(|it| **it == (domain, root)).count();
    let members = pasids().count() + 1;
    assert_eq!((of(G::DOMAIN, root), of(OTHER, other)), (members, 1));
    assert_eq!((of(high, odd), tables.len()), (1, members + 2));
    assert_eq!(G::received(&model).len(), 1, "a wait");

    let heir = Driven::<G>::adopt(model.clone(), memory, rig.config(), &frozen);
    let heir = heir.map_err(|error| error.to_string()).unwrap();
    assert_eq!(G::received(&model), []);
    assert_eq!(flushed(&heir), expected);
    for pasid in pasids() {
        let again = heir.attach_pasid(G::DEVICE, pasid, G::DOMAIN, root);
        assert!(matches!(
            again,
            Err(UnitAttachError::AlreadyAttached { .. })
        ));
        heir.detach_pasid(G::DEVICE, pasid).unwrap();
    }
    heir.detach(G::DEVICE).unwrap();
    if device_tlbs {
        heir.set_device_tlb(G::DEVICE, None).unwrap();
    }
    for device in [SECOND, third] {
        heir.detach(device).unwrap();
    }
    G::received(&model);
    let (_, memory) = heir.tear_down().unwrap();
    assert_eq!(memory.in_use(), 0);
}

pub(crate) fn a_unit_that_does_not_answer_is_not_frozen<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for how in [Breakage::Mute, Breakage::Deaf] {
        let (driver, model) = rig.attached();
        rig.break_down(&model, how);
        let frozen = driver.freeze(&mut |_| panic!("nothing is listed"));
        let Err((driver, cause)) = frozen else {
            panic!("frozen");
        };
        assert_eq!(cause, rig.timed_out());
        rig.break_down(&model, Breakage::None);
        driver.detach(G::DEVICE).unwrap();
        G::received(&model);
    }
}

pub(crate) fn a_successor_takes_no_old_ticket_for_an_answer<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    driver.disable().unwrap();
    let (frozen, memory, _) = freeze::<G>(driver);
    let heir = Driven::<G>::adopt(model.clone(), memory, rig.config(), &frozen);
    let heir = heir.map_err(|error| error.to_string()).unwrap();
    rig.break_down(&model, Breakage::Mute);
    let silent = heir.enable();
    assert!(matches!(silent, Err(UnitError::TimedOut { .. })));
    rig.break_down(&model, Breakage::None);
    heir.enable().unwrap();
    // A unit that is off is not handed over as one that is on, or without its devices.
    rig.is_there(&model);
    G::received(&model);
}
