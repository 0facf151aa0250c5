//! Ranges and the sizes of their leaves.

use iopt::{Format, Gather, Interruption, NoRuns, Prot, Table, TableOps as _, TableUnmapError};
use runs::{PageSizes, Run, Span};

use super::{fitting, offered, reclaim};
use crate::suite::model::layout;
use crate::suite::{Tables, World, root_tables};

/// Where tables have become empty a leaf of the level above has room, and not before.
pub(crate) fn empty_tables_become_larger_leaves<F: Format, A: Tables>(format: F, sizes: PageSizes) {
    let first = format.aperture().spans().next().unwrap();
    let smallest = offered(&format, sizes)[0].1;
    for (level, size) in fitting(&format, sizes) {
        if level == 0 || size == smallest {
            continue;
        }
        let memory = A::room_for(256, format.output_bits());
        let mut world = <World<_, _>>::new(format, sizes, &memory);
        let (iova, pa) = (first.start + size, 0);
        let whole = Span::new(iova, size);
        // All of its small pages, where they are not too many; else those at its ends. Their output
        // addresses do not go on, so that no two are one leaf.
        let slots = size / smallest;
        let few = if slots <= 1 << 13 { slots } else { 2 };
        let place = |nth| iova + nth * (slots - 1) / (few - 1) * smallest;
        for nth in 0..few {
            let to = Span::new((nth + 1) % 2 * smallest, smallest);
            // Not through the model, which compares all tables each time.
            world.table.map(place(nth), &[to], Prot::RW).unwrap();
        }
        let before = world.table.tables();
        assert!(before > 1);
        for left in [few, few / 2, 1] {
            let first_left = few - left;
            let span = Span::inclusive(place(0), place(first_left) - 1);
            if let Some(span) = span {
                let mut gather = Gather::new();
                let done = world.table.unmap_mapped(span, &mut gather, &mut NoRuns);
                done.unwrap();
                reclaim(&mut world.table, gather);
            }
            let wanted = world.table.map(iova, &[Span::new(pa, size)], Prot::RW);
            assert!(wanted.is_err(), "{left} pages are left");
        }
        let last = Span::new(place(few - 1), smallest);
        let mut gather = Gather::new();
        world.table.unmap(last, &mut gather, &mut NoRuns).unwrap();
        reclaim(&mut world.table, gather);
        world.map(iova, &[Span::new(pa, size)], Prot::RW);
        assert_eq!(
            world.table.leaf_at(iova).unwrap().run,
            Run::new(iova, Span::new(pa, size))
        );
        assert_eq!(world.table.leaves(whole).count(), 1);
        assert!(world.table.tables() < before);
        world.unmap(whole, false);
        world.finish();
    }
}

/// Refused as it is, and done where cutting is allowed: the page is gone, and nothing else.
pub(crate) fn a_small_unmap_at_the_start_of_a_large_leaf<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    let first = format.aperture().spans().next().unwrap();
    let smallest = offered(&format, sizes)[0].1;
    for (_, size) in fitting(&format, sizes) {
        if size == smallest {
            continue;
        }
        let memory = A::room_for(256, format.output_bits());
        let mut world = <World<_, _>>::new(format, sizes, &memory);
        let (iova, pa) = (first.start + size, 0);
        world.map(iova, &[Span::new(pa, size)], Prot::RW);
        let start = Span::new(iova, smallest);
        let before = world.snapshot();
        let mut gather = Gather::new();
        for holes in [false, true] {
            let result = if holes {
                let done = world.table.unmap_mapped(start, &mut gather, &mut NoRuns);
                done.map(drop)
            } else {
                world.table.unmap(start, &mut gather, &mut NoRuns)
            };
            match result {
                Err(TableUnmapError::InsideLeaf { leaf, .. }) => {
                    assert_eq!(leaf, Run::new(iova, Span::new(pa, size)));
                }
                other => panic!("{other:?}"),
            }
            assert!(gather.is_empty() && before == world.snapshot());
        }
        let mut runs = Vec::new();
        let (sink, allowed) = (&mut |run| runs.push(run), Interruption::Allowed);
        let flush = |_: &_| Ok::<_, ()>(());
        world
            .table
            .unmap_cutting(start, allowed, &mut gather, sink, flush)
            .unwrap();
        reclaim(&mut world.table, gather);
        assert_eq!(runs, [Run::new(iova, Span::new(pa, smallest))]);
        let rest = Run::new(iova + smallest, Span::new(pa + smallest, size - smallest));
        assert_eq!(world.table.translate(iova), None);
        let whole = Span::new(iova, size);
        assert_eq!(world.table.runs(whole).collect::<Vec<_>>(), [rest]);
        // The fewest leaves for the rest.
        let sizes: Vec<u64> = world.table.page_sizes().iter().collect();
        let leaves: Vec<Run> = world.table.leaves(whole).map(|leaf| leaf.run).collect();
        if size / smallest <= 1 << 20 {
            assert_eq!(leaves, layout(rest, &sizes));
        }
        world.model.leaves.clear();
        let mut gather = Gather::new();
        let rest = rest.input();
        world.table.unmap(rest, &mut gather, &mut NoRuns).unwrap();
        reclaim(&mut world.table, gather);
        world.finish();
    }
}

/// Overlapping maps are refused and leave nothing; in the end every page leads where it was mapped.
pub(crate) fn a_thousand_random_ranges_are_right_page_by_page<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    let memory = A::room_for(256, format.output_bits());
    let mut table = Table::with_page_sizes(format, &memory, sizes).unwrap();
    let first = format.aperture().spans().next().unwrap();
    let (lowest, grain) = offered(&format, sizes)[0];
    // Around a boundary of the tables in which the smallest pages are.
    const PAGES: u64 = 4096;
    let above = if lowest + 1 < usize::from(format.levels()) {
        1u64 << F::shift(lowest + 1)
    } else {
        1
    };
    let border = first.start + (PAGES / 2 * grain).next_multiple_of(above);
    let base = border - PAGES / 2 * grain;
    let mut pages: Vec<Option<u64>> = vec![None; PAGES as usize];
    let mut random = fastrand::Rng::with_seed(13);
    let (mut mapped, mut refused) = (Vec::new(), 0);
    for _ in 0..1000 {
        let at = random.u64(..PAGES);
        let most = 1 << random.u64(..9);
        let len = (1 + random.u64(..most)).min(PAGES - at);
        // Now and then aligned as the input address is.
        let room = (1 << (format.output_bits() - 1)) - PAGES * grain;
        let pa =
            (random.u64(..room) & !(grain - 1)) + if random.u64(..2) == 0 { 0 } else { at * grain };
        let iova = base + at * grain;
        let span = &mut pages[at as usize..(at + len) as usize];
        let free = span.iter().all(Option::is_none);
        let leaves = (!free).then(|| table.leaves(first).count());
        let result = table.map(iova, &[Span::new(pa, len * grain)], Prot::RW);
        assert_eq!(result.is_ok(), free, "{result:?}");
        if let Some(leaves) = leaves {
            refused += 1;
            assert_eq!(table.leaves(first).count(), leaves);
            for (nth, page) in (0..).zip(span.iter()) {
                assert_eq!(table.translate(iova + nth * grain), *page);
            }
        } else {
            mapped.push(Span::new(iova, len * grain));
            for (nth, page) in (0..).zip(span) {
                *page = Some(pa + nth * grain);
            }
        }
    }
    assert!(
        mapped.len() > 50 && refused > 50,
        "{} {refused}",
        mapped.len()
    );
    for (nth, page) in (0..).zip(&pages) {
        let iova = base + nth * grain;
        assert_eq!(table.translate(iova), *page, "{iova:#x}");
        let last = page.map(|page| page + (grain - 1));
        assert_eq!(table.translate(iova + (grain - 1)), last);
    }
    for beside in [base.wrapping_sub(1), base + PAGES * grain] {
        assert_eq!(table.translate(beside), None);
    }
    // And everything goes again, in another order.
    mapped.sort_by_key(|span| span.start.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for span in mapped {
        let mut gather = Gather::new();
        table.unmap(span, &mut gather, &mut NoRuns).unwrap();
        reclaim(&mut table, gather);
    }
    assert_eq!(table.leaves(first).count(), 0);
    assert_eq!(memory.used(), root_tables(&format));
}

/// Ranges of which the alignment permits other sizes before a boundary than behind it, compared with
/// a plain search page by page.
pub(crate) fn leaves_change_their_size_at_a_boundary<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    let first = format.aperture().spans().next().unwrap();
    let all: Vec<u64> = offered(&format, sizes)
        .iter()
        .map(|(_, size)| *size)
        .collect();
    let smallest = all[0];
    let most = (first.len / 4).min(1 << (format.output_bits() - 2));
    let mut checked = 0;
    for &size in all.iter().filter(|size| **size <= most) {
        let border = first.start + 2 * size;
        let near: Vec<u64> = all.iter().copied().filter(|near| *near <= size).collect();
        // Both addresses reach the boundary together; or the output address first, or last, by a
        // smaller size, so that no leaf is larger than that.
        for before in near.iter().copied().chain([0, 3 * smallest]) {
            for shift in near
                .iter()
                .copied()
                .chain([0])
                .filter(|shift| *shift != size)
            {
                if before > size {
                    continue;
                }
                let (iova, len) = (border - before, before + size + smallest);
                let pa = 2 * size + shift - before;
                let largest = if shift == 0 { size } else { shift };
                if len / largest > 1 << 9 || len > most + most / 2 {
                    continue;
                }
                let memory = A::room_for(512, format.output_bits());
                let mut table = Table::with_page_sizes(format, &memory, sizes).unwrap();
                table.map(iova, &[Span::new(pa, len)], Prot::RW).unwrap();
                let range = Span::new(iova, len);
                let found: Vec<Run> = table.leaves(range).map(|leaf| leaf.run).collect();
                assert_eq!(found, layout(Run { iova, pa, len }, &all));
                let (gather, memory) = table.tear_down();
                memory.reclaim(gather.never_walked().into_tables());
                assert_eq!(memory.used(), 0);
                checked += 1;
            }
        }
    }
    assert!(checked > 1, "{checked}");
}

/// Fourteen leaves of one level, three of the next, three of the first: twenty in one call, and
/// twenty of the smallest where there is only one size.
pub(crate) fn fourteen_small_three_large_and_three_small_are_twenty_leaves<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    let first = format.aperture().spans().next().unwrap();
    let smallest = offered(&format, sizes)[0].1;
    let own = |level: usize| 1u64 << F::shift(level);
    let levels = 0..usize::from(format.levels()) - 1;
    let all = F::page_sizes(format.levels()).and(sizes);
    let pairs = levels
        .map(|level| (own(level), own(level + 1)))
        .filter(|(small, large)| all.contains(*small) && all.contains(*large))
        .chain([(smallest, smallest)]);
    let room = first.len.min(1 << format.output_bits());
    for (small, large) in pairs {
        // The first small ones end where the large ones begin.
        let (skipped, border) = (14 * small, large * (14 * small).div_ceil(large));
        let len = skipped + 3 * large + 3 * small;
        if border + 3 * large + 3 * small > room {
            continue;
        }
        // No groups between the two.
        let both = PageSizes::from_bits(smallest | small | large);
        let memory = A::room_for(64, format.output_bits());
        let mut world = <World<_, _>>::new(format, both, &memory);
        let iova = first.start + border - skipped;
        world.map(iova, &[Span::new(border - skipped, len)], Prot::RW);
        let found: Vec<u64> = world.table.leaves(first).map(|leaf| leaf.run.len).collect();
        let mut expected = vec![small; 14];
        expected.extend([large; 3]);
        expected.extend([small; 3]);
        assert_eq!(found, expected);
        world.check();
        world.unmap(Span::new(iova, len), false);
        world.finish();
    }
}
