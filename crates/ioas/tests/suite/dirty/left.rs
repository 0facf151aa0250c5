//! Possible writes between two harvests by devices and users that have left, and where an operation was taken back.

use super::*;

#[test]
fn what_a_device_that_cannot_tell_could_write_counts_once_more_when_it_has_left() {
    let silent = |bench: &Bench| Tracker::new(&bench.tables, false, false);
    let device = DeviceId::pci(0, 9, 0);
    let all = vec![Span::new(AT, 8 * MIB)];
    // The only one, with whom its domain ends.
    let mut bench = bench(&[]);
    let unit = silent(&bench);
    bench.space.attach((unit.clone(), device)).unwrap();
    bench.space.track_dirty(Tracking::default()).unwrap();
    unit.inner.port(device).write(AT, &[0]).unwrap();
    bench.space.detach(device).unwrap();
    assert_eq!(bench.harvest(PAGE), (all.clone(), true));
    assert_eq!(bench.harvest(PAGE), (vec![], false));
    // Its ranges are harvested in parts, each of them once.
    for _ in 0..2 {
        bench.space.attach((unit.clone(), device)).unwrap();
        bench.space.detach(device).unwrap();
    }
    let part = page(100, 64);
    assert_eq!(bench.harvest_in(part, PAGE), (vec![part], true));
    let rest = vec![page(0, 100), page(164, 2048 - 164)];
    assert_eq!(bench.harvest(PAGE), (rest, true));
    // Only where it could write: not what is read, released or out.
    let (memory, part) = (bench.memory.clone(), Span::new(8 * MIB, PAGE));
    bench
        .space
        .map(AT + 12 * MIB, &memory, part, Prot::READ)
        .unwrap();
    let never = Interruption::Refused;
    bench.space.attach((unit.clone(), device)).unwrap();
    bench.space.take_out(page(0, 1), never).unwrap();
    let mut refused = |range, cause| panic!("{range}: {cause}");
    bench.space.release(&[page(5, 2)], never, &mut refused);
    bench.space.detach(device).unwrap();
    let mut failed = |range, cause| panic!("{range}: {cause}");
    bench.space.restore(&[page(5, 2)], never, &mut failed);
    bench.space.put_back(page(0, 1), never).unwrap();
    let there = vec![page(1, 4), page(7, 2048 - 7)];
    assert_eq!(bench.harvest(PAGE), (there, true));
    // An unmap forgets it, or takes it along.
    bench.space.attach((unit.clone(), device)).unwrap();
    bench.space.detach(device).unwrap();
    bench.space.unmap_cutting(page(0, 16), never).unwrap();
    let (span, mut words) = (Span::new(AT, 8 * MIB), vec![0u64; 32]);
    let mut pending = Pending::new(&mut words[..], span, PAGE).unwrap();
    bench.space.unmap_noting(span, &mut pending).unwrap();
    let shown = bench.space.show(&mut pending).unwrap();
    assert_eq!(shown.runs().collect::<Vec<_>>(), [page(16, 2048 - 16)]);
    shown.acknowledge();
    assert_eq!(bench.harvest(PAGE), (vec![], false));
    let part = Span::new(0, 8 * MIB);
    bench.space.map(AT, &memory, part, Prot::RW).unwrap();
    // Writes while tracking is off are dropped, and so is what was not harvested when it ends.
    bench.space.attach((unit.clone(), device)).unwrap();
    bench.space.detach(device).unwrap();
    bench.space.untrack_dirty();
    bench.space.attach((unit, device)).unwrap();
    bench.space.detach(device).unwrap();
    bench.space.track_dirty(Tracking::default()).unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![], false));

    // One of two in a domain, which stays; and one of a domain that stays without devices.
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let kept = space(FormatId::VtdSs, 4, &tables);
    let part = Span::new(0, 8 * MIB);
    kept.map(AT, &memory, part, Prot::RW).unwrap();
    let unit = Tracker::new(&tables, false, false);
    for n in 0..2 {
        kept.attach((unit.clone(), self::device(n))).unwrap();
    }
    kept.track_dirty(Tracking::default()).unwrap();
    bench.space = kept;
    for n in 0..2 {
        bench.space.detach(self::device(n)).unwrap();
        assert_eq!(bench.harvest(PAGE), (all.clone(), true), "{n}");
    }
    assert_eq!(bench.harvest(PAGE), (vec![], false));
}

#[test]
fn what_was_held_to_write_to_between_two_harvests_counts_as_written() {
    let mut bench = bench(&[(true, false)]);
    let whole = Span::new(AT, 8 * MIB);
    let keeps = WhenUnmapped::Keeps;
    let pin = |bench: &Bench, range, prot| bench.space.pin(range, prot, keeps).unwrap();
    // Before tracking begins nothing is noted; what is held then is held to write to later.
    drop(pin(&bench, page(0, 1), Prot::RW));
    let before = pin(&bench, page(1, 1), Prot::RW);
    bench.space.track_dirty(SMALL).unwrap();
    drop(before);
    // Many, over each other, some to be read only.
    drop(pin(&bench, page(4, 3), Prot::RW));
    drop(pin(&bench, page(5, 4), Prot::RW));
    drop(pin(&bench, page(40, 2), Prot::READ));
    let (first, second) = (
        pin(&bench, page(60, 4), Prot::RW),
        pin(&bench, page(62, 4), Prot::RW),
    );
    drop(first);
    // They are not held any more.
    assert_eq!(bench.space.first_pinned(page(0, 60)), None);
    assert_eq!(bench.space.first_pinned(whole), Some(page(62, 2)));
    let right = vec![page(1, 1), page(4, 5), page(60, 6)];
    assert_eq!(bench.harvest(PAGE), (right, false));
    assert_eq!(bench.harvest(PAGE), (vec![page(62, 4)], false));
    drop(second);
    // In parts.
    let first = bench.harvest_in(page(0, 64), PAGE);
    assert_eq!(first, (vec![page(62, 2)], false));
    assert_eq!(bench.harvest(PAGE), (vec![page(64, 2)], false));
    // A pin that is dropped because of an unmap is noted by that; plain unmaps forget.
    let held = pin(&bench, page(0, 1), Prot::RW);
    drop(pin(&bench, page(7, 1), Prot::RW));
    let never = Interruption::Refused;
    bench.space.unmap_cutting(page(7, 1), never).unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![page(0, 1)], false));
    drop(held);
    bench.space.untrack_dirty();
    drop(pin(&bench, page(9, 1), Prot::RW));
    bench.space.track_dirty(SMALL).unwrap();
    assert_eq!(bench.harvest(PAGE), (vec![], false));
}

#[test]
fn what_is_handed_over_names_what_was_written_to_by_those_who_have_left() {
    let mut bench = bench(&[(true, false)]);
    bench.space.track_dirty(SMALL).unwrap();
    let silent = Tracker::new(&bench.tables, false, false);
    let device = DeviceId::pci(0, 9, 0);
    bench
        .space
        .take_out(page(64, 2048 - 64), Interruption::Refused)
        .unwrap();
    bench.space.attach((silent, device)).unwrap();
    bench.space.detach(device).unwrap();
    let keeps = WhenUnmapped::Keeps;
    let pin = |bench: &Bench, range| bench.space.pin(range, Prot::RW, keeps).unwrap();
    bench
        .space
        .put_back(page(64, 2048 - 64), Interruption::Refused)
        .unwrap();
    drop(pin(&bench, page(100, 1)));
    let _held = pin(&bench, page(200, 2));
    let memories = [bench.memory.clone()];
    let leaving = bench.space.hand_over(&memories).unwrap();
    let mut written = leaving.handover().written.clone();
    drop(leaving);
    written.sort_unstable();
    let right = vec![page(0, 64), page(100, 1), page(200, 2)];
    assert_eq!(written, right);
    // It stays here, and nothing is lost by that.
    assert_eq!(bench.harvest(PAGE), (right, true));
}

#[test]
fn what_was_dirty_stays_so_when_it_is_not_released() {
    for blind in [false, true] {
        let mut bench = bench(&[(!blind, false)]);
        bench.space.track_dirty(SMALL).unwrap();
        bench.write(0, AT + 3 * PAGE);
        bench.write(0, AT + 9 * PAGE);
        let keeps = WhenUnmapped::Keeps;
        drop(bench.space.pin(page(2, 1), Prot::RW, keeps).unwrap());
        bench.units[0].deaf.store(true, Ordering::SeqCst);
        let mut kept = 0;
        let never = Interruption::Refused;
        bench
            .space
            .release(&[page(2, 2)], never, &mut |_, _| kept += 1);
        assert_eq!(kept, 1);
        bench.units[0].deaf.store(false, Ordering::SeqCst);
        let right = match blind {
            true => vec![Span::new(AT, 8 * MIB)],
            false => vec![page(2, 2), page(9, 1)],
        };
        assert_eq!(bench.harvest(PAGE), (right, blind));
    }
}

#[test]
fn an_unmap_whose_flush_fails_has_noted_what_was_written() {
    for blind in [false, true] {
        let bench = bench(&[(!blind, false)]);
        bench.space.track_dirty(SMALL).unwrap();
        bench.write(0, AT + 3 * PAGE);
        let keeps = WhenUnmapped::Keeps;
        drop(bench.space.pin(page(20, 1), Prot::RW, keeps).unwrap());
        let _held = bench.space.pin(page(30, 1), Prot::RW, keeps).unwrap();
        bench.units[0].deaf.store(true, Ordering::SeqCst);
        let span = Span::new(AT, 8 * MIB);
        let mut pending = Pending::new(vec![0u64; 32], span, PAGE).unwrap();
        let failed = bench.space.unmap_noting(span, &mut pending);
        assert!(matches!(failed, Err(UnmapError::Flush(_))), "{failed:?}");
        assert_eq!(bench.space.len(), 0);
        bench.units[0].deaf.store(false, Ordering::SeqCst);
        let shown = bench.space.show(&mut pending).unwrap();
        let right = match blind {
            true => vec![span],
            false => vec![page(3, 1), page(20, 1), page(30, 1)],
        };
        assert_eq!(shown.runs().collect::<Vec<_>>(), right);
        shown.acknowledge();
    }
}
