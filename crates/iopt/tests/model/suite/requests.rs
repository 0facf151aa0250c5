//! Refused requests, an allocator that fails, and the sizes of leaves.

use iopt::{Format, Gather, Prot, Table, TableMapError, TableOps as _};
use runs::{Iova, PageSizes, Run, Span};

use super::{Tables, World, page, root_tables};

/// Maps something that needs many tables with an allocator that has only n left, for every n.
pub(crate) fn failing_allocator<F: Format, A: Tables>(format: F, sizes: PageSizes) {
    let memory = A::room_for(64, format.output_bits());
    let mut world = <World<_, _>>::new(format, sizes, &memory);
    let grain = world.model.sizes[0];
    // Two places far apart, and leaf tables on both sides of a boundary.
    let first = format.aperture().spans().next().unwrap().start;
    let iova = first + (1u64 << 30) - grain;
    let high = 7 << (format.output_bits() - 4).min(33);
    let run = [Span::new(high | grain, 2 * grain)];
    let mut refused = 0;
    for left in 0..16 {
        let free = 64 - memory.used();
        if left > free {
            break;
        }
        let hold = memory.reserve(free - left).unwrap();
        let before = world.snapshot();
        match world.table.map(iova, &run, Prot::READ) {
            Ok(()) => {
                memory.give_back(hold);
                let model = world.model.map(iova, &run, Prot::READ);
                assert_eq!(model, Ok(()));
                world.check();
                assert!(
                    refused >= 2 || format.levels() == 1,
                    "{refused} refusals: the request needed no tables"
                );
                world.finish();
                return;
            }
            Err(TableMapError::NoTables(cause)) => {
                refused += 1;
                assert_eq!(cause.available, left * F::TABLE_BYTES);
                assert!(cause.needed > cause.available);
                assert!(before == world.snapshot());
                memory.give_back(hold);
            }
            Err(other) => panic!("{other}"),
        }
    }
    panic!("never mapped");
}

pub(crate) fn refusals<F: Format, A: Tables>(format: F) {
    let memory = A::room_for(64, format.output_bits());
    let mut table = Table::new(format, &memory).unwrap();
    let page = page::<F>();
    let base = format.aperture().spans().next().unwrap().start;
    let one = [Span::new(256 * page, page)];
    let two = [Span::new(0, 2 * page)];
    let range = |result: Result<(), TableMapError>| match result {
        Err(TableMapError::Range(cause)) => cause.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        range(table.map(base, &[], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(base, &[Span::new(0, 0)], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(base + page / 2, &one, Prot::READ)),
        format!(
            "{:#x} is not a multiple of the smallest page, {page:#x} bytes",
            base + page / 2
        )
    );
    assert!(range(table.map(base, &[Span::new(0, 5)], Prot::READ)).starts_with("0x5 is not"));
    assert!(range(table.map(base, &[Span::new(9, page)], Prot::READ)).starts_with("0x9 is not"));
    let bits = format.aperture().bits;
    if bits < 64 {
        let top = (1u64 << bits) - page;
        assert!(range(table.map(1 << bits, &one, Prot::READ)).contains("outside"));
        assert!(range(table.map(top, &two, Prot::READ)).contains("outside"));
    }
    let last = !(page - 1);
    assert!(range(table.map(last, &two, Prot::READ)).contains("beyond 2^64"));
    let bits = format.output_bits();
    let beyond = Span::new((1 << bits) - page, 2 * page);
    assert_eq!(
        table.map(base, &[beyond], Prot::READ),
        Err(TableMapError::OutputTooWide {
            output: beyond,
            bits
        })
    );
    assert!(matches!(
        table.map(base, &one, Prot::empty()),
        Err(TableMapError::Prot { .. })
    ));
    table.map(base + 5 * page, &one, Prot::READ).unwrap();
    let three = [Span::new(0, 3 * page)];
    assert_eq!(
        table.map(base + 4 * page, &three, Prot::READ),
        Err(TableMapError::Overlap {
            wanted: Span::new(base + 4 * page, 3 * page),
            found: Run::new(base + 5 * page, Span::new(256 * page, page))
        })
    );
    assert_eq!(table.translate(base + 4 * page), None);
    let (gather, _) = table.tear_down();
    drop(gather);
}

/// Each leaf size where alignment and length just permit it, and where one page is missing.
pub(crate) fn leaf_sizes<F: Format, A: Tables>(format: F) {
    let memory = A::room_for(1 << 10, format.output_bits());
    let mut table = Table::new(format, &memory).unwrap();
    let page = page::<F>();
    let whole = format.aperture().spans().next().unwrap();
    let highest = 1u64 << format.output_bits();
    let offered: Vec<u64> = table.page_sizes().iter().collect();
    let unmap = |table: &mut Table<F, &A>, span: Span<Iova>| {
        let mut gather = Gather::new();
        table.unmap(span, &mut gather, &mut iopt::NoRuns).unwrap();
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        table.reclaim(flushed);
    };
    let mut used = 0;
    for (nth, &size) in offered.iter().enumerate() {
        if size > whole.len / 2 || size > highest / 2 {
            continue;
        }
        used += 1;
        // The highest output address and the second leaf's place.
        let (iova, pa) = (whole.start + size, highest - size);
        table.map(iova, &[Span::new(pa, size)], Prot::RW).unwrap();
        let leaf = Run::new(iova, Span::new(pa, size));
        let found: Vec<Run> = table.leaves(whole).map(|leaf| leaf.run).collect();
        assert_eq!(found, [leaf]);
        assert_eq!(table.translate(iova + (size - 1)), Some(highest - 1));
        assert_eq!(table.translate(iova - 1), None);
        if let Some(behind) = iova.checked_add(size) {
            assert_eq!(table.translate(behind), None);
        }
        unmap(&mut table, leaf.input());
        // A page less of length, or of alignment: the size below is the largest. Only where that
        // does not make too many leaves.
        let many = |leaf: u64| size / leaf > 1 << 14;
        let Some(&below) = nth.checked_sub(1).and_then(|n| offered.get(n)) else {
            continue;
        };
        let short = Span::new(pa, size - page);
        let cases = [
            (iova, short, below),
            (iova - page, short, page),
            (iova, Span::new(pa - page, size), page),
        ];
        for (iova, run, _) in cases.into_iter().filter(|(_, _, leaf)| !many(*leaf)) {
            table.map(iova, &[run], Prot::RW).unwrap();
            let range = Span::new(iova, run.len);
            let found: Vec<Run> = table.leaves(range).map(|leaf| leaf.run).collect();
            assert!(found.iter().all(|leaf| leaf.len < size));
            assert_eq!(table.runs(range).collect::<Vec<_>>(), [Run::new(iova, run)]);
            unmap(&mut table, range);
        }
    }
    assert!(used > 0);
    assert_eq!(memory.used(), root_tables(&format));
}
