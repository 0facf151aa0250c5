//! Address spaces by PASID, and TLBs in devices.
//!
//! Each PASID of a device has a table of its own, comes and goes alone, and is in a domain as a device is. PASID 0 is not
//! one, nor is one beyond the unit's bits. A device's TLB is filled from the unit, so what a flush or a detach
//! invalidates is invalidated in the unit first, then in each device of the domain that has a TLB, for each of its
//! PASIDs in the domain; one wait ends both. It is switched while nothing of the device is attached.

use super::*;

pub(crate) fn address_spaces_of_one_device_come_and_go_alone<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (device, domain, root) = (G::DEVICE, G::DOMAIN, rig.root());
    let other = rig.other_root();
    let bits = driver.capabilities().pasid_bits;
    for pasid in [0, 1 << bits, u32::MAX].map(Pasid) {
        let refused = Err(UnitAttachError::Pasid {
            device,
            pasid,
            bits,
        });
        assert_eq!(driver.attach_pasid(device, pasid, domain, root), refused);
        assert_eq!(driver.detach_pasid(device, pasid), refused);
    }
    if bits == 0 {
        driver.attach(device, domain, root).unwrap();
        assert_eq!(rig.found(&model, device, Some(Pasid(1))), None);
        return;
    }
    let (one, last) = (Pasid(1), Pasid((1 << bits) - 1));
    let places = [None, Some(one), Some(last)];
    rig.watch(&model, &places);
    let found = || places.map(|pasid| rig.found(&model, device, pasid));
    let there = |domain, root| Some((rig.tag(device, domain), root));
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach_pasid(device, one), gone);
    // A PASID before the device has anything else: requests without one find no table.
    driver.attach_pasid(device, last, domain, root).unwrap();
    assert_eq!(found(), [None, None, there(domain, root)]);
    assert_eq!(rig.found(&model, device, Some(Pasid(last.0 - 1))), None);
    let joined = |space, first| assert_eq!(G::received(&model), rig.attaching(space, first));
    joined((domain, Some(last)), true);
    driver.attach(device, domain, root).unwrap();
    joined((domain, None), false);
    driver.attach_pasid(device, one, OTHER, other).unwrap();
    joined((OTHER, Some(one)), false);
    let all = [
        there(domain, root),
        there(OTHER, other),
        there(domain, root),
    ];
    assert_eq!(found(), all);
    // A domain has one root, and a PASID one domain.
    let refused = |device, pasid, domain, root| {
        driver
            .attach_pasid(device, Pasid(pasid), domain, root)
            .unwrap_err()
    };
    let other_root = UnitAttachError::OtherRoot {
        domain: OTHER,
        there: other,
        asked: root,
    };
    assert_eq!(refused(device, 2, OTHER, root), other_root);
    assert_eq!(driver.attach(SECOND, OTHER, root), Err(other_root));
    assert_eq!(
        refused(device, 1, domain, root),
        UnitAttachError::AlreadyAttached {
            device,
            domain: OTHER
        }
    );
    let nobody = UnitAttachError::NotAttached { device: SECOND };
    assert_eq!(driver.detach_pasid(SECOND, one), Err(nobody));
    assert_eq!(found(), all);
    G::received(&model);

    driver.detach_pasid(device, last).unwrap();
    let said = rig.detaching(root, (domain, Some(last)), false);
    assert_eq!(G::received(&model), said);
    assert_eq!(found(), [all[0], all[1], None]);
    driver.detach(device).unwrap();
    let said = rig.detaching(root, (domain, None), false);
    assert_eq!(G::received(&model), said);
    assert_eq!(found(), [None, all[1], None]);
    assert_eq!(driver.detach(device), gone);
    assert_eq!(driver.detach_pasid(device, last), gone);
    // A detach that was not answered: no translation, and attached. Others come and go meanwhile.
    rig.break_down(&model, Breakage::Mute);
    driver.detach_pasid(device, one).unwrap_err();
    rig.break_down(&model, Breakage::None);
    assert_eq!(found(), [None; 3]);
    driver.attach(device, domain, root).unwrap();
    assert!(matches!(
        refused(device, 1, OTHER, other),
        UnitAttachError::AlreadyAttached { .. }
    ));
    driver.detach_pasid(device, one).unwrap();
    assert_eq!(found(), [all[0], None, None]);
    G::received(&model);
    driver.detach(device).unwrap();
    let said = rig.detaching(root, (domain, None), true);
    assert_eq!(G::received(&model), said);
    // All requests have found nothing, or a table that they had.
    for (pasid, seen) in rig.seen(&model) {
        let right = if pasid == Some(one) { all[1] } else { all[0] };
        assert!(seen.is_none() || seen == right, "{pasid:?}: {seen:?}");
    }
    driver.attach_pasid(device, one, domain, root).unwrap();
    assert_eq!(found(), [None, all[0], None]);
    G::received(&model);
}

pub(crate) fn tables_of_pasids_are_as_large_as_their_number_asks<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for (rig, pages) in rig.pasid_tables() {
        let (driver, model) = rig.enabled();
        let (device, root) = (G::DEVICE, rig.root());
        let (memory, bits) = (driver.memory().clone(), driver.capabilities().pasid_bits);
        let before = memory.in_use();
        driver.attach(device, G::DOMAIN, root).unwrap();
        let last = (1u32 << bits) - 1;
        if last > 0 {
            let found = |pasid| rig.found(&model, device, Some(Pasid(pasid))).is_some();
            assert!(!found(last), "{bits} bits");
            driver
                .attach_pasid(device, Pasid(last), G::DOMAIN, root)
                .unwrap();
            assert!(found(last) && !found(last + 1), "{bits} bits");
            assert!(last == 1 || !found(last - 1), "{bits} bits");
        }
        rig.is_there(&model);
        assert_eq!(memory.in_use() - before, pages, "{bits} bits");
        G::received(&model);
        assert!(driver.tear_down().is_ok());
        assert_eq!(memory.in_use(), 0);
    }
}

pub(crate) fn a_devices_tlb_is_invalidated_after_the_unit<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (device, domain, root) = (G::DEVICE, G::DOMAIN, rig.root());
    if !driver.capabilities().device_tlbs {
        return;
    }
    driver.set_device_tlb(device, Some(TLB)).unwrap();
    // The unit does not know the device yet.
    assert_eq!(G::received(&model), []);
    // Another one of the domain, without.
    for device in [device, SECOND] {
        driver.attach(device, domain, root).unwrap();
    }
    let pasids = match driver.capabilities().pasid_bits {
        0 => vec![None],
        _ => vec![None, Some(Pasid(1))],
    };
    if let Some(pasid) = pasids.get(1).copied().flatten() {
        driver.attach_pasid(device, pasid, domain, root).unwrap();
    }
    assert!(rig.serves_tlb(&model, device) && !rig.serves_tlb(&model, SECOND));
    G::received(&model);
    let waits = driver.counters().waits;
    let pair = Invalidation::of(Span::new(0xf000, 0x2000), 1, false);
    let eight = Invalidation::of(Span::new(0x8000, 0x8000), 1, true);
    for (what, blocks) in [
        (Some(&pair), &[(0xf000, 0), (0x1_0000, 0)][..]),
        (Some(&eight), &[(0x8000, 3)]),
        (None, &[(0, 52)]),
    ] {
        match what {
            Some(what) => driver.invalidate(domain, what).unwrap(),
            None => driver.invalidate_domain(domain).unwrap(),
        }
        let received = G::received(&model);
        let each = |pasid| {
            blocks
                .iter()
                .map(move |block| rig.in_device(pasid, block.0, block.1))
        };
        let devices: Vec<_> = pasids.iter().flat_map(|pasid| each(*pasid)).collect();
        let first = received.iter().position(|it| devices.contains(it)).unwrap();
        let (unit, after) = received.split_at(first);
        let barrier = rig.barrier();
        assert!(unit.len() > usize::from(barrier.is_some()), "{unit:?}");
        assert!(
            barrier.is_none() || unit.last() == barrier.as_ref(),
            "{unit:?}"
        );
        let (wait, after) = after.split_last().unwrap();
        assert_eq!(Some(wait), rig.whole(root, domain).last());
        let (told, rest): (Vec<_>, Vec<_>) =
            after.iter().cloned().partition(|it| devices.contains(it));
        assert_eq!(told, devices);
        assert!(rest.into_iter().all(|it| Some(it) == barrier), "{after:?}");
    }
    assert_eq!(driver.counters().waits - waits, 3);
    driver.detach(SECOND).unwrap();
    let all = |pasid| rig.in_device(pasid, 0, 52);
    let received = G::received(&model);
    assert!(!received.contains(&all(None)), "{received:?}");
    if let Some(pasid @ Some(number)) = pasids.get(1).copied() {
        driver.detach_pasid(device, number).unwrap();
        let said = rig.detaching_with_tlb(root, (domain, pasid), false);
        assert_eq!(G::received(&model), said);
    }
    driver.detach(device).unwrap();
    let said = rig.detaching_with_tlb(root, (domain, None), true);
    assert_eq!(G::received(&model), said);
    assert!(!rig.serves_tlb(&model, device));
    for on in [false, true] {
        driver.set_device_tlb(device, on.then_some(TLB)).unwrap();
        assert_eq!(G::received(&model), rig.switching());
        driver.attach(device, domain, root).unwrap();
        assert_eq!(rig.serves_tlb(&model, device), on);
        G::received(&model);
        driver.invalidate_domain(domain).unwrap();
        let received = G::received(&model);
        assert_eq!(received.contains(&all(None)), on);
        assert!(on || received == rig.whole(root, domain), "{received:?}");
        driver.detach(device).unwrap();
        G::received(&model);
    }
}

pub(crate) fn tlbs_are_refused_by_name_where_they_cannot_be_served<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (device, domain, root) = (G::DEVICE, G::DOMAIN, rig.root());
    if !driver.capabilities().device_tlbs {
        let refused = Err(UnitAttachError::NoDeviceTlbs { device });
        assert_eq!(driver.set_device_tlb(device, Some(TLB)), refused);
        assert_eq!(driver.set_device_tlb(device, None), Ok(()));
        return;
    }
    for (device, .., error) in rig.refused() {
        if let UnitAttachError::Elsewhere { .. } | UnitAttachError::Beyond { .. } = error {
            assert_eq!(driver.set_device_tlb(device, Some(TLB)), Err(error));
            assert_eq!(driver.set_device_tlb(device, None), Err(error));
        }
    }
    // Said twice is said once.
    for tlb in [Some(TLB), Some(TLB), None, None] {
        driver.set_device_tlb(device, tlb).unwrap();
    }
    let refused = Err(UnitAttachError::AlreadyAttached { device, domain });
    let switch = || [None, Some(TLB)].map(|tlb| driver.set_device_tlb(device, tlb));
    driver.attach(device, domain, root).unwrap();
    assert_eq!(switch(), [refused; 2]);
    assert!(!rig.serves_tlb(&model, device));
    driver.detach(device).unwrap();
    if driver.capabilities().pasid_bits > 0 {
        driver.attach_pasid(device, Pasid(1), domain, root).unwrap();
        assert_eq!(switch(), [refused; 2]);
        driver.detach_pasid(device, Pasid(1)).unwrap();
    }
    assert_eq!(switch(), [Ok(()); 2]);
    G::received(&model);
}
