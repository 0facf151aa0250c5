//! Cases that hold for every format, one by one: what its functions say of entries, and what a table
//! does with each of its sizes. The random sequences go everywhere; these go where one can tell what
//! went wrong.

use iopt::format::Entry;
use iopt::{Cell, Discard, Format, Gather, Interruption, Pending, Prot, Table, UnmapError};
use runs::{PageSizes, Run, Span};

use super::model::layout;
use super::{Tables, World, page, root_tables};

/// The cases for one format.
macro_rules! cases {
    ($format:expr, $sizes:expr, $tables:ty; $($name:ident)*) => {$(
        #[test]
        fn $name() {
            $crate::suite::cases::$name::<_, $tables>($format, $sizes);
        }
    )*};
}

/// A random number, always the same ones.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Levels with their sizes, of those that are offered.
fn offered<F: Format>(format: &F, sizes: PageSizes) -> Vec<(usize, u64)> {
    let levels = 0..usize::from(format.levels());
    levels
        .flat_map(|level| {
            let here = F::leaf_sizes(level).and(sizes);
            here.iter()
                .map(move |size| (level, size))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The sizes that fit twice, into input and output addresses.
fn fitting<F: Format>(format: &F, sizes: PageSizes) -> Vec<(usize, u64)> {
    let first = format.aperture().spans().next().unwrap();
    let most = (first.len / 2).min(1 << (format.output_bits() - 1));
    let all = offered(format, sizes).into_iter();
    all.filter(|(_, size)| *size <= most).collect()
}

fn reclaim<F: Format, A: Tables>(table: &mut Table<F, &A>, mut gather: Gather) {
    let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
    table.reclaim(flushed);
}

/// Every entry that is not 0, level by level from the root down: its table and its index.
fn entries<F: Format, A: Tables>(world: &World<'_, F, A>) -> Vec<(usize, Vec<(u64, usize)>)> {
    let format = world.table.format();
    let mut tables = vec![world.root_table()];
    let mut found = Vec::new();
    for level in (0..usize::from(format.levels())).rev() {
        let (mut below, mut here) = (Vec::new(), Vec::new());
        for table in tables {
            for nth in 0..format.entries(level) {
                let word = world.memory.word(table + (nth * F::ENTRY_BYTES) as u64);
                if word != 0 {
                    here.push((table, nth));
                }
                if let Entry::Table(table) = F::decode(level, word) {
                    below.push(table);
                }
            }
        }
        found.push((level, here));
        tables = below;
    }
    found
}

/// The entries of the only leaf, which is at `level`.
fn entries_of_leaf<F: Format, A: Tables>(
    world: &World<'_, F, A>,
    level: usize,
) -> Vec<(u64, usize)> {
    let all = entries(world).into_iter();
    all.filter(|(at, _)| *at == level)
        .flat_map(|(_, here)| here)
        .collect()
}

/// Each bit of an input address above the smallest page selects an entry at one level.
pub(crate) fn index_bits_of_all_levels_tile_the_address<F: Format, A: Tables>(
    format: F,
    _sizes: PageSizes,
) {
    let (levels, aperture) = (usize::from(format.levels()), format.aperture());
    assert_eq!(F::shift(0), F::GRANULE_LOG2);
    let mut from = F::GRANULE_LOG2;
    for level in 0..levels {
        assert_eq!(
            F::shift(level),
            from,
            "a gap or an overlap below level {level}"
        );
        assert!(format.entries(level).is_power_of_two());
        from += format.entries(level).trailing_zeros();
    }
    assert_eq!(from.min(64), aperture.bits.max(from.min(64)));
    if !F::GROWS {
        assert_eq!(from, aperture.bits);
    }
    // One bit at a time, in the tables themselves.
    let first = aperture.spans().next().unwrap();
    for bit in F::GRANULE_LOG2..63.min(aperture.bits) {
        if 1 << bit >= first.len {
            continue;
        }
        let memory = A::room_for(32, format.output_bits());
        let small = PageSizes::from_log2(F::GRANULE_LOG2);
        let mut world = <World<_, _>>::new(format, small, &memory);
        let iova = first.start + (1 << bit);
        world.map(iova, &[Span::new(page::<F>(), page::<F>())], Prot::READ);
        for (level, here) in entries(&world) {
            let (low, bits) = (F::shift(level), format.entries(level).trailing_zeros());
            let index = if (low..low + bits).contains(&bit) {
                1 << (bit - low)
            } else {
                0
            };
            let here: Vec<usize> = here.into_iter().map(|(_, nth)| nth).collect();
            assert_eq!(here, [index], "bit {bit} at level {level}");
        }
        world.finish();
    }
}

/// The lowest, the highest and random addresses of tables.
pub(crate) fn table_pointers_come_back_at_every_level<F: Format, A: Tables>(
    format: F,
    _sizes: PageSizes,
) {
    let bits = format.table_bits().min(format.output_bits());
    let mut random = Random(7);
    for level in 1..usize::from(format.levels()) {
        let highest = (1u64 << bits) - F::TABLE_BYTES;
        let mut addresses = vec![0, F::TABLE_BYTES, highest];
        addresses.extend((F::TABLE_BYTES.trailing_zeros()..bits).map(|bit| 1 << bit));
        addresses.extend((0..200).map(|_| random.next() & highest));
        for address in addresses {
            let word = format.table(level, address);
            assert!(!F::is_empty(word));
            assert_eq!(word >> (8 * F::ENTRY_BYTES - 1) >> 1, 0);
            assert_eq!(F::decode(level, word), Entry::Table(address), "{word:#x}");
        }
    }
}

/// A size belongs to one level: it takes one entry there or a group, and never a whole table.
pub(crate) fn every_level_has_its_own_sizes<F: Format, A: Tables>(format: F, sizes: PageSizes) {
    let memory = A::room_for(64, format.output_bits());
    let table = Table::with_page_sizes(format, &memory, sizes).unwrap();
    let mut all = PageSizes::NONE;
    for level in 0..usize::from(format.levels()) {
        let here = F::leaf_sizes(level);
        for size in here.iter() {
            let log2 = size.trailing_zeros();
            assert!(log2 >= F::shift(level), "level {level}: 2^{log2}");
            if level + 1 < usize::from(format.levels()) {
                assert!(log2 < F::shift(level + 1), "level {level}: 2^{log2}");
            }
            assert!(!all.contains(size));
        }
        all = all.or(here);
    }
    assert_eq!(all, F::page_sizes(format.levels()));
    // A table begins with those of its format that it was offered.
    assert_eq!(table.page_sizes(), all.and(sizes));
    assert!(all.contains(page::<F>()));
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
}

/// Every size at output address 0, at the greatest, and at random ones: one leaf, at its level, of
/// which each entry is right, and nothing after the unmap.
pub(crate) fn every_size_at_any_output_address_is_one_leaf_with_right_entries<F, A>(
    format: F,
    sizes: PageSizes,
) where
    F: Format,
    A: Tables,
{
    let mut random = Random(11);
    let first = format.aperture().spans().next().unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    let fitting = fitting(&format, sizes);
    assert!(!fitting.is_empty());
    for (level, size) in fitting {
        let (slot, log2) = (1u64 << F::shift(level), size.trailing_zeros());
        let greatest = (1u64 << format.output_bits()) - size;
        let mut outputs = vec![0, greatest];
        outputs.extend((0..6).map(|_| random.next() & greatest));
        for pa in outputs {
            let memory = A::room_for(32, format.output_bits());
            let mut world = <World<_, _>>::new(format, sizes, &memory);
            let iova = first.start + (random.below(first.len / size) * size);
            world.map(iova, &[Span::new(pa, size)], Prot::RW);
            let leaf = world.table.leaf_at(iova + size / 2).unwrap();
            assert_eq!(leaf.run, Run::new(iova, pa, size));
            assert_eq!((usize::from(leaf.level), leaf.prot), (level, Prot::RW));
            assert_eq!(world.table.leaves(first).count(), 1);
            // Its entries: neighbours in one table, and no others there.
            let entries = entries_of_leaf(&world, level);
            assert_eq!(entries.len() as u64, size / slot);
            let (table, begin) = entries[0];
            assert_eq!(begin % entries.len(), 0);
            for (&(at, index), nth) in entries.iter().zip(0..) {
                assert_eq!((at, index), (table, begin + nth as usize));
                let word = &world.memory.word(table + (index * F::ENTRY_BYTES) as u64);
                let own = if F::GROUPS_ADVANCE { nth * slot } else { 0 };
                assert_eq!(*word, F::leaf(level, pa + own, log2, bits), "entry {nth}");
                assert_eq!(F::decode(level, *word), Entry::Leaf { pa, log2 });
                for offset in [0, 1, slot - 1] {
                    let offset = nth * slot + offset;
                    assert_eq!(world.table.translate(iova + offset), Some(pa + offset));
                }
            }
            world.unmap(Span::new(iova, size), false);
            world.finish();
        }
    }
}

/// Every permission that can be said is read back, from every size, whatever hardware and the table
/// itself note beside it; and the address too.
pub(crate) fn permissions_survive_beside_what_hardware_notes<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    let mut said = 0;
    for prot in (0..=Prot::all().bits()).map(Prot::from_bits_truncate) {
        let Some(bits) = format.leaf_bits(prot) else {
            continue;
        };
        said += 1;
        for (level, size) in offered(&format, sizes) {
            let log2 = size.trailing_zeros();
            if size > 1 << format.output_bits() {
                continue;
            }
            for pa in [0, (1u64 << format.output_bits()) - size] {
                let word = F::leaf(level, pa, log2, bits);
                let mut words = vec![word, F::cleaned(word), word | F::ACCESSED];
                if format.keeps_dirty() {
                    words.extend([F::dirtied(word), F::dirtied(word) | F::ACCESSED]);
                    assert!(F::is_dirty(F::dirtied(word)));
                    assert!(!F::is_dirty(F::cleaned(F::dirtied(word))));
                }
                for word in words {
                    assert!(!F::is_empty(word));
                    assert_eq!(
                        F::decode(level, word),
                        Entry::Leaf { pa, log2 },
                        "{word:#x}"
                    );
                    assert_eq!(format.prot(level, word), prot, "{word:#x}");
                }
            }
        }
    }
    assert!(said >= 2, "{said}");
}

/// The unit marks the one entry that it has read.
pub(crate) fn a_leaf_is_dirty_when_one_of_its_entries_is<F: Format, A: Tables>(
    format: F,
    sizes: PageSizes,
) {
    if !format.keeps_dirty() {
        return;
    }
    let first = format.aperture().spans().next().unwrap();
    for (level, size) in fitting(&format, sizes) {
        let memory = A::room_for(32, format.output_bits());
        let count = size >> F::shift(level);
        let mut world = <World<_, _>>::new(format, sizes, &memory);
        let iova = first.start + size;
        world.map(iova, &[Span::new(0, size)], Prot::RW);
        world.table.track_dirty(true).unwrap();
        let (table, begin) = entries_of_leaf(&world, level)[0];
        let range = Span::new(iova, size);
        let mut words = [0; 1];
        let mut pending = Pending::new(&mut words[..], range, size).unwrap();
        for nth in (0..count)
            .step_by(count as usize / 16 + 1)
            .chain([count - 1])
        {
            let harvested = world.table.harvest(range, &mut pending).unwrap();
            assert_eq!(harvested, 0, "clean before entry {nth}");
            let cell = &memory.entries(table, begin + count as usize)[begin + nth as usize];
            cell.set(F::dirtied(cell.get()));
            let mut seen = Vec::new();
            world.table.peek_dirty(range, |run| seen.push(run)).unwrap();
            assert_eq!(seen, [range], "entry {nth} of {count}");
            assert_eq!(world.table.harvest(range, &mut pending).unwrap(), size);
        }
        world.table.track_dirty(false).unwrap();
        world.finish();
    }
}

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
                let done = world.table.unmap_mapped(span, &mut gather, &mut Discard);
                done.unwrap();
                reclaim(&mut world.table, gather);
            }
            let wanted = world.table.map(iova, &[Span::new(pa, size)], Prot::RW);
            assert!(wanted.is_err(), "{left} pages are left");
        }
        let last = Span::new(place(few - 1), smallest);
        let mut gather = Gather::new();
        world.table.unmap(last, &mut gather, &mut Discard).unwrap();
        reclaim(&mut world.table, gather);
        world.map(iova, &[Span::new(pa, size)], Prot::RW);
        assert_eq!(
            world.table.leaf_at(iova).unwrap().run,
            Run::new(iova, pa, size)
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
                let done = world.table.unmap_mapped(start, &mut gather, &mut Discard);
                done.map(drop)
            } else {
                world.table.unmap(start, &mut gather, &mut Discard)
            };
            match result {
                Err(UnmapError::InsideLeaf { leaf, .. }) => {
                    assert_eq!(leaf, Run::new(iova, pa, size));
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
        assert_eq!(runs, [Run::new(iova, pa, smallest)]);
        let rest = Run::new(iova + smallest, pa + smallest, size - smallest);
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
        world.table.unmap(rest, &mut gather, &mut Discard).unwrap();
        reclaim(&mut world.table, gather);
        world.finish();
    }
}

/// What overlaps is refused and leaves nothing; in the end every page leads where it was told to.
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
    let mut random = Random(13);
    let (mut mapped, mut refused) = (Vec::new(), 0);
    for _ in 0..1000 {
        let at = random.below(PAGES);
        let most = 1 << random.below(9);
        let len = (1 + random.below(most)).min(PAGES - at);
        // Now and then aligned as the input address is.
        let room = (1 << (format.output_bits() - 1)) - PAGES * grain;
        let pa =
            (random.below(room) & !(grain - 1)) + if random.below(2) == 0 { 0 } else { at * grain };
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
        table.unmap(span, &mut gather, &mut Discard).unwrap();
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
                assert_eq!(found, layout(Run::new(iova, pa, len), &all));
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
