//! Between two owners in this process.

use ioas::{
    BuildDomain, DomainIds, HandOverError, MapError, TableBuilder, TakeOverError, Tracking,
};
use iommu::{SoftwareConfig, Unit};
use iopt::Pending;

use super::*;

#[test]
fn an_address_space_changes_hands_while_its_device_runs() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let before = counted(&pinner);
    let ledgers = [(); 2].map(|()| Ledger::new("a counter", Some(2 * BYTES), 0));
    let memories = ledgers
        .each_ref()
        .map(|ledger| memory(also(&data), &pinner, ledger));
    let old = first_owner(tables(&table_file), &memories[0]);
    assert_eq!(counted(&pinner), before + HELD);

    let runs = frames(&data);
    let unit = Machine::new(tables(&table_file), Physical::new(also(&data), &runs));
    let shared: Arc<dyn Unit> = Arc::new(unit.clone());
    old.attach((shared.clone(), DEVICE)).unwrap();
    let (new, new_tables) = beside_the_device(&unit, |wait| {
        wait();
        let leaving = old.hand_over(&memories[..1]).unwrap();
        let handover = leaving.handover().clone();
        let (new_tables, mut opened) = adopted(&table_file, &handover);
        let taken = vec![(opened.remove(0), vec![(shared.clone(), DEVICE)])];
        let new = Ioas::adopt(&handover, &memories[1..], taken, None).unwrap();
        // Both are charged, and both have pinned it.
        let in_use = ledgers.each_ref().map(|ledger| ledger.in_use());
        assert_eq!(in_use, [HELD, HELD]);
        assert_eq!(counted(&pinner), before + 2 * HELD);
        wait();
        assert_eq!(leaving.give_up().unwrap(), HELD);
        assert_eq!((old.len(), old.places().len()), (0, 0));
        drop(old);
        let in_use = ledgers.each_ref().map(|ledger| ledger.in_use());
        assert_eq!(in_use, [0, HELD]);
        assert_eq!(counted(&pinner), before + HELD);
        wait();
        let again = new
            .areas()
            .into_iter()
            .map(|area| (area.range(), area.prot(), area.is_out()));
        let expected = handover.areas.iter();
        assert!(again.eq(expected.map(|area| (area.range, area.prot, area.out))));
        (new, new_tables)
    });
    goes_on(&unit, new, &memories[1], &new_tables);
    assert_eq!(counted(&pinner), before);
}

#[test]
fn what_is_not_the_same_is_refused_and_the_old_owner_goes_on() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let before = counted(&pinner);
    let first = memory(also(&data), &pinner, &Ledger::unlimited());
    let old = first_owner(tables(&table_file), &first);
    let runs = frames(&data);
    let unit = Machine::new(tables(&table_file), Physical::new(also(&data), &runs));
    let unit: Arc<dyn Unit> = Arc::new(unit);
    old.attach((unit.clone(), DEVICE)).unwrap();
    let none = old.hand_over(&[]).unwrap_err();
    let area = Span::new(AT, OUT.start - AT);
    assert_eq!(none, HandOverError::Memory { area });

    let leaving = old.hand_over(std::slice::from_ref(&first)).unwrap();
    let handover = leaving.handover().clone();
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    let second = memory(also(&data), &pinner, &ledger);
    let with = |change: &dyn Fn(&mut Handover), memory: &Arc<Memory>, devices: &[DeviceId]| {
        let (_, mut opened) = adopted(&table_file, &handover);
        let devices = devices.iter().map(|device| (unit.clone(), *device));
        let taken = vec![(opened.remove(0), devices.collect())];
        let mut handover = handover.clone();
        change(&mut handover);
        let memories = std::slice::from_ref(memory);
        let refused = Ioas::adopt(&handover, memories, taken, None).unwrap_err();
        // For every cause: nothing is charged or pinned for the new owner.
        assert_eq!(
            (memory.ledger().in_use(), memory.held()),
            (0, 0),
            "{refused}"
        );
        assert_eq!(counted(&pinner), before + HELD, "{refused}");
        refused
    };
    let but = |change: &dyn Fn(&mut Handover)| with(change, &second, &[DEVICE]);

    let (_, other) = files();
    let other = memory(other, &pinner, &Ledger::unlimited());
    let refused = with(&|_| (), &other, &[DEVICE]);
    assert!(
        matches!(refused, TakeOverError::Differs { iova: AT, table: Some((pa, _)), .. } if pa == runs[0].start),
        "{refused}"
    );
    let refused = with(&|_| (), &second, &[]);
    assert!(
        matches!(refused, TakeOverError::Device { device: DEVICE, .. }),
        "{refused}"
    );
    let small = memory(
        also(&data),
        &pinner,
        &Ledger::new("a counter", Some(BYTES / 2), 0),
    );
    let refused = with(&|_| (), &small, &[DEVICE]);
    assert!(
        matches!(
            refused,
            TakeOverError::Hold {
                cause: MapError::OverLimit(_),
                ..
            }
        ),
        "{refused}"
    );
    let refused = but(&|handover| handover.domains.clear());
    assert!(
        matches!(
            refused,
            TakeOverError::Domains {
                described: 0,
                given: 1
            }
        ),
        "{refused}"
    );
    let refused = but(&|handover| handover.domains[0].root.address += PAGE);
    assert!(matches!(refused, TakeOverError::Table { .. }), "{refused}");
    let refused = but(&|handover| handover.areas[2].memory = 1);
    assert!(
        matches!(refused, TakeOverError::Area(area) if area.memory == 1),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[2].offset = BYTES - PAGE);
    assert!(matches!(refused, TakeOverError::Area(_)), "{refused}");
    let refused = but(&|handover| handover.areas[1].range.start -= PAGE);
    assert!(matches!(refused, TakeOverError::Area(_)), "{refused}");
    // An area that the tables do not have, one that they have with other permissions, one of other
    // pages of the same memory, and one that they have and that is not described.
    let refused = but(&|handover| handover.areas[1].out = false);
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: None, .. } if iova == OUT.start),
        "{refused}"
    );
    let refused = but(&|handover| {
        handover.areas[0].range.len = BYTES;
        handover.areas.drain(1..3);
    });
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: None, .. } if iova == OUT.start),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[3].prot = Prot::RW);
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: Some((_, Prot::READ)), .. } if iova == AT + GIB),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[3].offset += PAGE);
    assert!(
        matches!(refused, TakeOverError::Differs { .. }),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas.truncate(3));
    assert!(
        matches!(refused, TakeOverError::More { mapped, areas, .. } if mapped == areas + 3 * MIB),
        "{refused}"
    );

    drop(leaving);
    old.put_back(OUT, Interruption::Refused).unwrap();
    assert_eq!(old.unmap_all().unwrap().areas, 2);
    old.close().unwrap();
    assert_eq!(counted(&pinner), before);
}

#[test]
fn domains_and_what_devices_have_written_go_along() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let runs = frames(&data);
    let machine = |tells, snoops| {
        let mut config = SoftwareConfig::default();
        config.capabilities.dirty_tracking = tells;
        config.capabilities.snoop_control = snoops;
        let physical = Physical::new(also(&data), &runs);
        Machine::with_config(tables(&table_file), physical, config)
    };
    // Two units that differ have a domain each.
    let units = [machine(true, false), machine(true, true)];
    let devices = [DEVICE, DeviceId::pci(0, 6, 0)];
    let shared = units
        .each_ref()
        .map(|unit| -> Arc<dyn Unit> { Arc::new(unit.clone()) });
    let builder =
        |tables: &Arc<HostTables>, ids| TableBuilder::new(tables.clone(), ids, [FormatId::VtdSs]);
    let old_tables = tables(&table_file);
    let old = Space::over_tables(builder(&old_tables, DomainIds::new(8)));
    let first = memory(also(&data), &pinner, &Ledger::unlimited());
    let whole = Span::new(0, BYTES);
    old.map(AT, &first, whole, Prot::RW).unwrap();
    old.allow(&[Span::new(GIB, 64 * GIB)]).unwrap();
    for (unit, device) in shared.iter().zip(devices) {
        old.attach((unit.clone(), device)).unwrap();
    }
    let tracking = Tracking {
        leaf: Some(PAGE),
        interruption: Interruption::Refused,
    };
    old.track_dirty(tracking).unwrap();
    let write = |n: usize, page: u64| {
        let mut port = units[n].port(devices[n]);
        port.write(AT + page * PAGE, &[page * PAGE]).unwrap();
    };
    write(0, 3);
    write(1, 9);

    let leaving = old.hand_over(std::slice::from_ref(&first)).unwrap();
    let handover = leaving.handover().clone();
    assert_eq!(handover.domains.len(), 2);
    assert_eq!(handover.tracking, Some(tracking));
    let second = memory(also(&data), &pinner, &Ledger::unlimited());
    let (new_tables, opened) = adopted(&table_file, &handover);
    let taken = opened.into_iter().zip(shared.iter().zip(devices));
    let taken = taken.map(|(table, (unit, device))| (table, vec![(unit.clone(), device)]));
    let ids = DomainIds::new(8);
    let claimed = handover.domains.iter().all(|domain| ids.claim(domain.id));
    assert!(claimed);
    let builder: Box<dyn BuildDomain> = Box::new(builder(&new_tables, ids));
    let memories = std::slice::from_ref(&second);
    let new = Space::adopt(&handover, memories, taken.collect(), Some(builder));
    let new = new.unwrap();
    assert_eq!(leaving.give_up().unwrap(), BYTES);

    let harvest = || {
        let mut pending = Pending::new(vec![0u64; 32], Span::new(AT, BYTES), PAGE).unwrap();
        let blind = new.harvest(&mut pending).unwrap().blind;
        let shown = new.show(&mut pending).unwrap();
        let pages: Vec<u64> = shown.runs().map(|run| (run.start - AT) / PAGE).collect();
        shown.acknowledge();
        (pages, blind)
    };
    // Writes that the old owner has not harvested, and later ones.
    write(0, 12);
    assert_eq!(harvest(), (vec![3, 9, 12], false));
    write(1, 3);
    assert_eq!(harvest(), (vec![3], false));
    // A third unit gets a domain of its own, with a number of its own.
    let third = machine(false, false);
    let device = DeviceId::pci(0, 7, 0);
    new.attach((Arc::new(third.clone()), device)).unwrap();
    let mut all: Vec<u32> = new
        .places()
        .iter()
        .filter_map(|place| place.number)
        .collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 3);
    let mut word = [0];
    third.port(device).read(AT + 9 * PAGE, &mut word).unwrap();
    assert_eq!(word[0], 9 * PAGE);
    let page = Span::new(0, PAGE);
    let chosen = new.map_anywhere(&second, page, Prot::READ).unwrap();
    assert_eq!(chosen, GIB);
    new.close().unwrap();
    assert_eq!((new_tables.in_use(), second.held()), (0, 0));
}

#[test]
fn what_is_released_changes_hands_as_such() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let before = counted(&pinner);
    let ledgers = [(); 2].map(|()| Ledger::new("a counter", Some(BYTES), 0));
    let memories = ledgers
        .each_ref()
        .map(|ledger| memory(also(&data), &pinner, ledger));
    let old = first_owner(tables(&table_file), &memories[0]);
    let run = Span::new(AT + 5 * MIB, MIB);
    let kept = &mut |range, cause| unreachable!("{range}: {cause}");
    old.release(&[run], Interruption::Refused, kept);
    assert_eq!(counted(&pinner), before + HELD - MIB);

    let leaving = old.hand_over(&memories[..1]).unwrap();
    let handover = leaving.handover().clone();
    let (new_tables, mut opened) = adopted(&table_file, &handover);
    let used = new_tables.in_use();
    let taken = vec![(opened.remove(0), Vec::new())];
    let new = Ioas::adopt(&handover, &memories[1..], taken, None).unwrap();
    // Charge and tables for its return are kept here as well.
    assert!(new_tables.in_use() > used);
    assert_eq!((ledgers[1].in_use(), memories[1].reserved()), (HELD, MIB));
    assert_eq!(leaving.give_up().unwrap(), HELD - MIB);
    drop(old);
    assert_eq!(ledgers[0].in_use(), 0);
    assert_eq!(new.translate(run.start), None);
    let failed = &mut |range, cause| unreachable!("{range}: {cause}");
    new.restore(&[run], Interruption::Refused, failed);
    assert!(new.translate(run.start).is_some());
    assert_eq!(counted(&pinner), before + HELD);
    assert_eq!(new_tables.in_use(), used);
    new.close().unwrap();
    assert_eq!((new_tables.in_use(), ledgers[1].in_use()), (0, 0));
}
