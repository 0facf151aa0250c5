//! Entries as a format's functions encode and decode them.

use iopt::format::Entry;
use iopt::{Cell, Format, Pending, Prot, Table, TableOps as _};
use runs::{PageSizes, Run, Span};

use super::{fitting, offered};
use crate::suite::{Tables, World, page};

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
    let mut random = fastrand::Rng::with_seed(7);
    for level in 1..usize::from(format.levels()) {
        let highest = (1u64 << bits) - F::TABLE_BYTES;
        let mut addresses = vec![0, F::TABLE_BYTES, highest];
        addresses.extend((F::TABLE_BYTES.trailing_zeros()..bits).map(|bit| 1 << bit));
        addresses.extend((0..200).map(|_| random.u64(..) & highest));
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
    let mut random = fastrand::Rng::with_seed(11);
    let first = format.aperture().spans().next().unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    let fitting = fitting(&format, sizes);
    assert!(!fitting.is_empty());
    for (level, size) in fitting {
        let (slot, log2) = (1u64 << F::shift(level), size.trailing_zeros());
        let greatest = (1u64 << format.output_bits()) - size;
        let mut outputs = vec![0, greatest];
        outputs.extend((0..6).map(|_| random.u64(..) & greatest));
        for pa in outputs {
            let memory = A::room_for(32, format.output_bits());
            let mut world = <World<_, _>>::new(format, sizes, &memory);
            let iova = first.start + (random.u64(..first.len / size) * size);
            world.map(iova, &[Span::new(pa, size)], Prot::RW);
            let leaf = world.table.leaf_at(iova + size / 2).unwrap();
            assert_eq!(leaf.run, Run::new(iova, Span::new(pa, size)));
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
