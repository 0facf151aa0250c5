//! Several areas in one release: all of it goes, or all of it is as it was. And the tables for its return.

use super::*;

#[test]
fn what_two_calls_have_mapped_is_unmapped_by_two_after_it_was_released() {
    let (mut bench, machine) = bench(large());
    bench.space.unmap(at(0, GIB)).unwrap();
    let parts = [at(0, 2 * MIB), at(2 * MIB, 2 * MIB)];
    for part in parts {
        bench
            .map(part.start, Span::new(part.start - AT, part.len))
            .unwrap();
    }
    let before = bench.state();
    // Both, and a stretch over the border of both; at once and one by one.
    let over = at(MIB, 2 * MIB);
    for runs in [&parts[..], &[over], &[at(0, 4 * MIB)]] {
        assert!(release(&mut bench.space, runs).1.is_empty());
        assert!(restore(&mut bench.space, runs).is_empty());
        assert_eq!(bench.state(), before);
        for run in runs {
            assert!(release(&mut bench.space, &[*run]).1.is_empty());
            assert!(restore(&mut bench.space, &[*run]).is_empty());
            assert_eq!(bench.state(), before);
        }
    }
    // Also when the release was taken back.
    for nth in 0..3 {
        machine.unit.invalidates.set([nth]);
        assert_eq!(release(&mut bench.space, &[over]).1.len(), 1, "{nth}");
        machine.unit.invalidates.set(None);
        bench.space.flush().unwrap();
        assert_eq!(bench.state().areas, before.areas, "{nth}");
        assert!(release(&mut bench.space, &[over]).1.is_empty());
        assert!(restore(&mut bench.space, &[over]).is_empty());
    }
    for part in parts {
        assert_eq!(bench.space.unmap(part).unwrap().bytes, part.len, "{part}");
    }
    bench.end();
}

#[test]
fn what_was_set_aside_for_some_parts_is_given_back_when_there_is_no_table_for_the_next() {
    // In one domain, and in two of one memory: what the first has set aside the second may miss.
    for domains in [1, 2] {
        let mut bench = Bench::new();
        for n in 0..3 {
            let part = Span::new(n * 2 * MIB, 2 * MIB);
            bench.map(AT + part.start, part).unwrap();
        }
        let machines: Vec<Machine> = (0..domains)
            .map(|n| Machine::new(&bench.tables, n, can(FormatId::VtdSs, SMALL, n == 0)))
            .collect();
        for machine in &machines {
            machine.attach(&mut bench.space).unwrap();
        }
        assert_eq!(bench.space.places().len(), usize::from(domains));
        let run = at(0, 6 * MIB);
        let before = bench.state();
        let mut refused = 0;
        for left in 0.. {
            let others = bench.tables.reserve(128 - bench.tables.in_use() - left);
            let (_, kept) = release(&mut bench.space, &[run]);
            bench.tables.give_back(others.unwrap());
            match &kept[..] {
                [] => break,
                [(range, ReleaseError::SetAside(_))] => assert_eq!(*range, run),
                _ => panic!("{kept:?}"),
            }
            assert_eq!(bench.state(), before, "{left} tables");
            refused += 1;
        }
        // A table for each of the three parts, and two above them.
        assert_eq!(refused, 5 * domains);
        assert!(restore(&mut bench.space, &[run]).is_empty());
        assert_eq!(bench.state(), before);
        bench.end();
    }
}

#[test]
fn tables_that_a_restore_took_in_vain_are_set_aside_again() {
    // Two tables of leaves, and what lies above them.
    const PAGES: u64 = 1024;
    for deaf in [false, true] {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut space = space(FormatId::VtdSs, 4, &tables);
        let unit = Arc::new(FrailUnit::new(unit(&tables)));
        space.attach((unit.clone(), DEVICE)).unwrap();
        let pages = (0..PAGES).map(|n| Span::new((2 * n + 1) * PAGE, PAGE));
        let object = Arc::new(Frail::new(Synthetic::new(pages)));
        let memory = Memory::new(object.clone(), &Ledger::unlimited());
        let run = at(0, PAGES * PAGE);
        let whole = Span::new(0, run.len);
        space.map(AT, &memory, whole, Prot::RW).unwrap();
        let used = tables.in_use();
        assert!(release(&mut space, &[run]).1.is_empty());
        // There is no other table, then or later.
        let others = tables.reserve(64 - tables.in_use()).unwrap();
        // After the first table of leaves its runs cannot be read any more.
        object.reads.set([150]);
        unit.invalidates.set((0..8).filter(|_| deaf));
        let failed = restore(&mut space, &[run]);
        assert!(matches!(failed[..], [(_, MapError::Runs(_))]), "{failed:?}");
        object.reads.set(None);
        unit.invalidates.set(None);
        space.flush().unwrap();
        let more = tables.reserve(64 - tables.in_use()).unwrap();
        assert!(restore(&mut space, &[run]).is_empty());
        tables.give_back(others);
        tables.give_back(more);
        assert_eq!(tables.in_use(), used);
        space.close().unwrap();
    }
}
